"""What the parts of a chain do to updates, as numbers for the kernel.

A part multiplies updates by a number or adds decayed params, perhaps of some leaves only, or clips
gradients to a norm. A step reads these numbers as it reads the learning rate, so it does not write
the updates in between. Optax's parts are recognized by the code of their ``update`` and applied to
ones and zeros, which returns their numbers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import add_decayed_weights as optax_add_decayed_weights  # also if a user replaces it

from jdistadam.core.algorithm import Algorithm, decay_groups, product
from jdistadam.core.hyperparameters import (
    Hyperparameters,
    Product,
    TracedSchedule,
    schedule_now,
    value_of,
)
from jdistadam.core.trees import Grads, Params, keep_if
from jdistadam.errors import TreeError


class Effect(NamedTuple):
    """What a part does to updates u of params p.

    Attributes:
      kind: "factor": x * u. "decay": u + x * p. "clip": u * min(1, x / norm).
      number: x, or a schedule of the step count in the part's state. Of a clip, a function. In a
        step, x or a ``TracedSchedule``.
      mask: Which leaves it changes: a tree of bools or a function of one. In a step, a bool for
        each leaf. None: all.
    """

    kind: str
    number: Any
    mask: Any = None

    def now(self, state: Any, tree: Any) -> Effect:
        """The effect on a tree in a step that begins with a state of the part."""
        number, mask = self.number, self.mask
        if mask is not None:
            mask = tuple(group == 0 for group in decay_groups(mask, tree))
        if callable(number):
            state = getattr(state, "inner_state", state)
            if "count" not in getattr(state, "_fields", ()):
                raise TreeError(
                    f"opt_state: not the state of a schedule: got {type(state).__name__}, expected "
                    "one with a count. Pass opt_state as init, update or step of this chain "
                    "returned it."
                )
            name = "weight_decay" if self.kind == "decay" else "learning_rate"
            number = schedule_now(name, number, state.count)
        return Effect(self.kind, number, mask)

    def selects(self, i: int) -> bool:
        """Whether it changes leaf number ``i`` in a step."""
        return self.mask is None or self.mask[i]


class How(NamedTuple):
    """How to take a step.

    Attributes:
      mode: "step": return new params. "update": return updates.
      is_skipped: In mode "step", whether to change nothing, a bool on the device. None: to step.
      norms: In mode "step", whether to return norms.
      grad_factor: What gradients are multiplied by, a float32 scalar. None: by nothing.
      effects: What happens to the updates afterwards.
    """

    mode: str = "step"
    is_skipped: Any = None
    norms: bool = False
    grad_factor: Any = None
    effects: tuple[Effect, ...] = ()

    def of(self, selected: Sequence[bool]) -> How:
        """The same for the selected leaves of a tree."""

        def fewer(effect: Effect) -> Effect:
            if effect.mask is None:
                return effect
            kept = zip(effect.mask, selected, strict=True)
            return effect._replace(mask=tuple(x for x, is_here in kept if is_here))

        return self._replace(effects=tuple(map(fewer, self.effects)))

    def scaled(self, grads: Grads) -> Grads:
        """Gradients multiplied by their factor."""
        if self.grad_factor is None:
            return grads
        return jax.tree.map(lambda g: (g * self.grad_factor).astype(g.dtype), grads)

    def changed(self, updates: Any, params: Params) -> Any:
        """Updates after the effects, in optax's formula."""

        def one(i: int, u: Any, p: Any) -> Any:
            for effect in self.effects:
                if effect.selects(i):
                    x = jnp.asarray(value_of(effect.number), u.dtype)
                    u = x * u if effect.kind == "factor" else u + x * p
            return u

        treedef: Any = jax.tree.structure(updates)
        reads_params = any(effect.kind == "decay" for effect in self.effects)
        like = params if reads_params else updates
        pairs = zip(jax.tree.leaves(updates), jax.tree.leaves(like), strict=True)
        return treedef.unflatten([one(i, *pair) for i, pair in enumerate(pairs)])

    def applied(self, updates: Any, params: Params) -> Any:
        """The result of the mode for updates that no kernel made."""
        updates = self.changed(updates, params)
        if self.mode == "update":
            return updates
        return keep_if(self.is_skipped, params, optax.apply_updates(params, updates))


def with_effects(
    effects: Sequence[Effect],
    rows: Sequence[int | None],
    known: Sequence[Any],
    numbers: Sequence[dict[str, Any]],
    now: Sequence[dict[str, Any]],
) -> tuple[tuple[int | None, ...], tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
    """Returns the same arguments of ``tree_step`` with groups of equal effects.

    Leaves of one group with other effects form another group, whose learning rate is a product and
    whose decay is that of the effect.
    """
    if not effects or not any(row is not None for row in rows):
        return tuple(rows), tuple(known), tuple(numbers), tuple(now)
    groups: dict[tuple[int, tuple[int, ...]], int] = {}
    new_rows: list[int | None] = []
    for i, row in enumerate(rows):
        if row is None:
            new_rows.append(None)
            continue
        chosen = tuple(j for j, effect in enumerate(effects) if effect.selects(i))
        new_rows.append(2 * groups.setdefault((row // 2, chosen), len(groups)) + row % 2)
    columns = []
    for group, chosen in groups:
        fixed, of_step = dict(numbers[group]), dict(now[group])
        factors = [effects[j].number for j in chosen if effects[j].kind == "factor"]
        for x in (effects[j].number for j in chosen if effects[j].kind == "decay"):
            del fixed["weight_decay"]
            (of_step if isinstance(x, TracedSchedule) else fixed)["weight_decay"] = x
        if factors:
            rate = (of_step if "learning_rate" in of_step else fixed).pop("learning_rate")
            of_step["learning_rate"] = Product((rate, *factors))
        columns.append((known[group], fixed, of_step))
    return (tuple(new_rows), *zip(*columns, strict=True))  # type: ignore[return-value]


def algorithm_with(
    algorithm: Algorithm | None, effects: Sequence[Effect], like_optax: Any
) -> Algorithm | None:
    """Returns what an optimizer and effects compute, with the state of ``like_optax``.

    None if factors are of some leaves only.
    """
    if algorithm is None or not effects:
        return algorithm
    factors = [effect for effect in effects if effect.kind == "factor"]
    decay = next((effect for effect in effects if effect.kind == "decay"), None)
    if any(effect.mask is not None for effect in factors):
        return None

    def with_effects(hyper: Hyperparameters | None) -> Any:
        if hyper is None:
            return None
        rate = functools.reduce(product, (x.number for x in factors), hyper.learning_rate)
        if isinstance(rate, np.floating) and rate < 0:
            rate = np.asarray(rate)  # optax does not warn of factors that climb
        changes = {"learning_rate": rate} | ({"weight_decay": decay.number} if decay else {})
        return dataclasses.replace(hyper, **changes)

    hypers = {label: with_effects(x) for label, x in algorithm.groups.hypers.items()}
    changes = dict(hypers=hypers) | (dict(mask=decay.mask) if decay else {})
    return dataclasses.replace(
        algorithm,
        hyper=with_effects(algorithm.hyper),
        groups=dataclasses.replace(algorithm.groups, **changes),
        like_optax=like_optax,
        reads_params=algorithm.reads_params or decay is not None,
    )


@jax.jit
def clip_factor(grads: Grads, max_norm: Any) -> jax.Array:
    """The factor by which ``optax.clip_by_global_norm`` clips; the norm is summed in float32."""
    norm = optax.tree.norm(jax.tree.map(lambda x: x.astype(jnp.float32), grads))
    is_small = norm < max_norm
    return jnp.where(is_small, 1.0, max_norm / jnp.where(is_small, 1.0, norm)).astype(jnp.float32)


_FACTOR = optax.scale(1.0).update.__code__
_SCHEDULED = optax.scale_by_schedule(jnp.float32).update.__code__
_DECAY = optax_add_decayed_weights(0.1).update.__code__
_CLIP = optax.clip_by_global_norm(1.0).update.__code__
_ZERO = optax.set_to_zero().update.__code__

_LARGE = 2.0**63
"""A gradient whose square is finite, and which is above the norm of any clip."""


def is_zero(tx: Any) -> bool:
    """Whether a transformation is ``optax.set_to_zero``."""
    return _code(tx) is _ZERO


def _code(tx: Any) -> Any:
    return getattr(getattr(tx, "update", None), "__code__", None)


def effect_of(tx: Any) -> Effect | None:
    """Returns what a transformation does, if it is known."""
    if (effect := getattr(tx, "effect", None)) is not None:
        return effect
    code = _code(tx)
    dtype = jax.dtypes.canonicalize_dtype(np.float64)  # the widest that a leaf may have
    one = np.ones(1, dtype)  # of numpy, which needs no device

    def number(state: Any) -> Any:
        if code is _CLIP:
            return tx.update(jnp.full((), _LARGE, jnp.float32), state)[0]
        given = (0 * one, state, one) if code is _DECAY else (one, state)
        return tx.update(*given)[0].reshape(())

    def at(count: Any) -> Any:
        return number(optax.ScaleByScheduleState(count))

    if code is _CLIP:
        return Effect("clip", lambda: number(None))
    if code is _SCHEDULED:
        return Effect("factor", at)
    if code not in (_FACTOR, _DECAY):
        return None
    kind = "factor" if code is _FACTOR else "decay"
    try:
        x = number(None)  # at once: one operation
    except AttributeError:  # a schedule, which needs a count
        return Effect(kind, at)
    except (TypeError, ValueError):  # of an array of several numbers
        return None
    return None if np.issubdtype(x.dtype, np.complexfloating) else Effect(kind, x)
