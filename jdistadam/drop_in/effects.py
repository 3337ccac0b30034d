"""What the parts of a chain do to updates, as numbers for the kernel.

A part multiplies updates by a number or adds decayed params, perhaps of some leaves only, or clips
gradients to a norm. A step reads these numbers as it reads the learning rate, so it does not write
the updates in between. Optax's parts are recognized by the code of their ``update`` and applied to
ones and zeros, which returns their numbers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
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
    Sum,
    TracedSchedule,
    schedule_now,
    value_of,
)
from jdistadam.core.trees import Grads, Params, keep_if
from jdistadam.errors import TreeError


class Effect(NamedTuple):
    """What a part does to updates u of params p.

    Attributes:
      kind: "factor": x * u. "zero": zeros. "decay": u + x * p. "clip": u * min(1, x / norm).
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
                    if effect.kind == "zero":
                        u = jnp.zeros_like(u)
                    else:
                        u = x * u if effect.kind == "factor" else u + x * p
            return u

        treedef: Any = jax.tree.structure(updates)
        reads_params = any(effect.kind == "decay" for effect in self.effects)
        like = params if reads_params else updates
        pairs = zip(jax.tree.leaves(updates), jax.tree.leaves(like), strict=True)
        return treedef.unflatten([one(i, *pair) for i, pair in enumerate(pairs)])

    def stilled(self, out: Any, params: Params) -> Any:
        """New params or updates, without those of leaves whose updates are set to zero.

        The kernel multiplies them by zero, which is not zero if they are not finite.
        """
        zeros = [effect for effect in self.effects if effect.kind == "zero"]
        if not zeros:
            return out
        treedef: Any = jax.tree.structure(out)
        leaves = jax.tree.leaves(out)
        old = jax.tree.leaves(params) if self.mode == "step" else map(jnp.zeros_like, leaves)
        pairs = enumerate(zip(leaves, old, strict=True))
        kept = [x if any(z.selects(i) for z in zeros) else new for i, (new, x) in pairs]
        return treedef.unflatten(kept)

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
        factors, decay = _in_order([effects[j] for j in chosen])
        if decay is not None:
            del fixed["weight_decay"]
            is_made_now = isinstance(decay, TracedSchedule | Sum)
            (of_step if is_made_now else fixed)["weight_decay"] = decay
        if factors:
            rate = (of_step if "learning_rate" in of_step else fixed).pop("learning_rate")
            of_step["learning_rate"] = Product((rate, *factors))
        columns.append((known[group], fixed, of_step))
    return (tuple(new_rows), *zip(*columns, strict=True))  # type: ignore[return-value]


def _in_order(effects: Sequence[Effect]) -> tuple[list[Any], Any]:
    """The factors of updates, and the decay that is added before all of them; None: no decay.

    A decay after factors is divided by them: f * u + x * p = f * (u + x / f * p).
    """
    factors, terms = list[Any](), list[Any]()
    for effect in effects:
        if effect.kind != "decay":
            factors.append(effect.number)
        else:
            x = effect.number
            terms.append(float(x) / math.prod(map(float, factors)) if factors else x)
    if len(terms) < 2:
        return factors, terms[0] if terms else None
    is_known = all(map(is_constant, terms))
    return factors, sum(map(float, terms)) if is_known else Sum(tuple(terms))


def is_constant(x: Any) -> bool:
    """Whether a number is known while a step is traced."""
    return not callable(x) and not isinstance(x, jax.core.Tracer | TracedSchedule)


def may_follow(effect: Effect, before: Sequence[Effect], is_direction: bool) -> bool:
    """Whether the kernel can do what a part does after an optimizer and effects.

    Decay may follow a direction, and factors that it can be divided by.
    """
    if effect.kind != "decay":
        return effect.kind in ("factor", "zero")
    factors = [x.number for x in before if x.kind != "decay"]
    if not is_direction or not factors:
        return is_direction
    if not all(map(is_constant, (effect.number, *factors))):
        return False
    return float(effect.number) >= 0 and all(float(x) > 0 for x in factors)


def algorithm_with(
    algorithm: Algorithm | None, effects: Sequence[Effect], like_optax: Any
) -> Algorithm | None:
    """Returns what an optimizer and effects compute, with the state of ``like_optax``.

    None if factors are of some leaves only, or decays of several parts are to be added.
    """
    if algorithm is None or not effects:
        return algorithm
    factors = [effect for effect in effects if effect.kind != "decay"]
    decays = [effect for effect in effects if effect.kind == "decay"]
    is_known = len(decays) < 2 and not (decays and algorithm.reads_params)
    if any(effect.mask is not None for effect in factors) or not is_known:
        return None
    decay = decays[0]._replace(number=_in_order(effects)[1]) if decays else None

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
_HIDING = {
    optax.masked(optax.identity(), True).update.__code__: (
        "write jda.masked in place of that of optax, around a number or jda.add_decayed_weights"
    ),
    optax.chain(optax.identity()).update.__code__: "write its parts in place of optax.chain",
}

_LARGE = 2.0**63
"""A gradient whose square is finite, and which is above the norm of any clip."""


def cure_of_hidden(tx: Any) -> str | None:
    """What to write in place of a function of optax that hides what a transformation does."""
    return _HIDING.get(_code(tx))


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
    if code is _ZERO:
        return Effect("zero", 0.0)
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
