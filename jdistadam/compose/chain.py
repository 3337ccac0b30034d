"""``optax.chain`` with the fused step of the last transformation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jdistadam.compose.distributed_chain import DistributedChain, check_state, update_in_turn
from jdistadam.core import trees
from jdistadam.core.trees import Grads, OptState, Params
from jdistadam.distributed.transformation import DistributedTransformation
from jdistadam.drop_in.effects import (
    Effect,
    How,
    algorithm_with,
    clip_factor,
    cure_of_hidden,
    effect_of,
    may_follow,
)
from jdistadam.drop_in.state import MainParamsState
from jdistadam.drop_in.step import advance_schedules
from jdistadam.drop_in.transformation import (
    NO_OPTIMIZER,
    FullResult,
    FusedTransformation,
    full_step_of,
    made_of,
    takes_all,
)
from jdistadam.errors import PolicyError


def chain(*transformations: optax.GradientTransformation) -> FusedTransformation:
    """``optax.chain`` with a ``step``, and with optax's state.

    ``step`` is fused if one of jdistadam's optimizers is followed only by what multiplies by a
    number: ``optax.scale``, ``scale_by_schedule``, ``scale_by_learning_rate`` and ``set_to_zero``,
    also in ``jda.masked``. ``add_decayed_weights`` without a mask, or ``jda.add_decayed_weights``,
    may follow ``jda.scale_by_adam`` and positive constants, which divide it. The numbers are
    multiplied first, and main parameters follow. Otherwise ``step`` is ``update`` and
    ``apply_updates``, and ``why_not_fused`` says why.

    The transformations before the optimizer change the gradients. ``optax.clip_by_global_norm``
    directly before it does not write them: the kernel multiplies them by the smaller of 1 and
    ``max_norm / norm``, with the norm in float32. optax divides by the norm and then multiplies,
    with two roundings in the gradients' dtype. ``update`` does the same as ``step``.

    Transformations before a distributed optimizer get unreduced gradients. They must be linear,
    because gradients are summed over devices afterwards. ``optax.scale``, ``optax.masked`` and
    schedules of scales are linear; clipping and normalisation are not. If devices hold shards of
    the parameters, transformations must not read them; they get zeros of the unsharded shapes. If
    ``gather_params`` has summed gradients into shards, transformations must be elementwise, and
    independent of gradient shapes and positions. If the optimizer skips a step, their states stay
    unchanged. A step that can be skipped reads old and new states and writes one: 12 bytes per
    float32 element, which matters only for states as large as the parameters.

    Args:
      *transformations: Gradient transformations, applied in this order.

    Returns:
      A ``FusedTransformation``; a ``DistributedTransformation`` if the last one is.

    Raises:
      PolicyError: An argument is no transformation. One before a distributed optimizer is not
        linear, needs other arguments, or would read shards. One follows a distributed optimizer;
        or, if it is no number, an optimizer with main parameters (raised by ``init``).

    Example:
      >>> import jax.numpy as jnp, jdistadam as jda
      >>> tx = chain(optax.clip_by_global_norm(1.0), jda.fused_adamw(1e-2))
      >>> params = {"w": jnp.ones(3)}
      >>> params, state = tx.step({"w": jnp.full(3, 100.0)}, tx.init(params), params)
      >>> round(float(params["w"][0]), 4)
      0.99
    """
    _check_transformations(transformations)
    *first, last = transformations
    if isinstance(last, DistributedTransformation):
        distributed = DistributedChain(tuple(first), last)
        distributed.check_before_params_are_known()
        return DistributedTransformation.make(
            distributed,
            last.config,
            distributed.state_specs(),
            bound=last.bound,
        )
    place, effects, why = _optimizer_in(transformations)
    before, after = transformations[:place], transformations[place + 1 :]
    return _Chain(before, transformations[place], after, effects).transformation(why)


def _optimizer_in(
    transformations: Sequence[Any],
) -> tuple[int, tuple[Effect, ...], str]:
    """Returns the place of the optimizer, the effects after it, and why a chain is not fused."""
    end = len(transformations) - 1
    ours = [i for i, tx in enumerate(transformations) if isinstance(tx, FusedTransformation)]
    if not ours:
        return end, (), NO_OPTIMIZER
    place = ours[-1]
    tx, after = transformations[place], transformations[place + 1 :]
    if after and not takes_all(tx):
        return end, (), f"the step of transformation {place} cannot take what follows it"
    effects: list[Effect] = []
    for i, other in enumerate(after):
        effect = effect_of(other)
        if effect is None or not may_follow(effect, effects, tx.is_direction):
            return end, (), _why_not_joined(place + 1 + i, other, effect)
        effects.append(effect)
    if not tx.is_fused and not tx.is_direction:
        return end, (), tx.why_not_fused
    if tx.is_direction and not any(effect.kind != "decay" for effect in effects):
        why = f"nothing multiplies by a learning rate after transformation {end}"
        return place, tuple(effects), why
    return place, tuple(effects), "" if after else tx.why_not_fused


def _why_not_joined(i: int, tx: Any, effect: Effect | None) -> str:
    """Why the kernel cannot do what transformation ``i`` does after the optimizer."""
    if effect is not None and effect.kind == "decay":
        return (
            f"the weight decay of transformation {i} follows what is no direction of Adam times "
            "positive constants: put it directly after jda.scale_by_adam"
        )
    if cure := cure_of_hidden(tx):
        return f"transformation {i} follows the optimizer, and hides what it does: {cure}"
    why = f"transformation {i} and later ones follow the optimizer, and do more"
    return f"{why} than to multiply by numbers"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)  # by identity, like functions
class _Chain:
    """The functions of a chain in one program."""

    before: tuple[optax.GradientTransformation, ...]
    last: Any  # the optimizer
    after: tuple[optax.GradientTransformation, ...]
    effects: tuple[Effect, ...]  # of those after it

    def init(self, params: Params) -> OptState:
        states = tuple(tx.init(params) for tx in self.before)
        for i, state in enumerate(states):
            if trees.parts_of(state, MainParamsState):
                raise _misplaced(i, "params must follow its main parameters exactly")
        return (*states, self.last.init(params), *(tx.init(params) for tx in self.after))

    def transformation(self, why_not_fused: str) -> FusedTransformation:
        """The functions as an optimizer."""
        if takes_all(self.last):
            tx = made_of(self.init, self.full_step)
        else:
            tx = FusedTransformation(self.init, self.update, self.step)
        tx._of_another = why_not_fused
        if getattr(self.last, "full_step", None) is not None:
            tx.full_step = self.full_step
            is_rated = any(effect.kind != "decay" for effect in self.effects)
            tx.is_direction = self.last.is_direction and not is_rated
            if algorithm := self.last.algorithm:
                like_optax = tx if self.last.is_direction else algorithm.like_optax
                whole = algorithm_with(algorithm, self.effects, like_optax)  # checks its numbers
                tx.algorithm = None if self.before else whole
        return tx

    @property
    def _clip(self) -> Effect | None:
        """The clip right before the optimizer, if there is one."""
        effect = effect_of(self.before[-1]) if self.before else None
        return effect if effect is not None and effect.kind == "clip" and not effect.mask else None

    def update(
        self, grads: Grads, state: OptState, params: Params = None, **extra_args: Any
    ) -> tuple[Any, OptState]:
        transformations = (*self.before, self.last)
        check_state(transformations, state)
        return update_in_turn(transformations, grads, state, params, extra_args)

    def step(
        self, grads: Grads, state: OptState, params: Params, **extra_args: Any
    ) -> tuple[Params, OptState]:
        trees.check_given(params)
        if not isinstance(self.last, FusedTransformation):
            trees.check_same_structure(grads, params, name="grads", like_name="params")
            updates, state = self.update(grads, state, params, **extra_args)
            return optax.apply_updates(params, updates), state
        check_state((*self.before, self.last), state)
        *states, last = state
        grads, new = update_in_turn(self.before, grads, states, params, extra_args)
        params, last = self.last.step(grads, last, params, **extra_args)
        return params, (*new, last)

    def full_step(
        self, grads: Grads, state: Any, params: Params, extra: Any, how: How
    ) -> FullResult:
        """The step for wrappers; if it is skipped, all states stay unchanged."""
        check_state((*self.before, self.last, *self.after), state)
        count, skipped = len(self.before), how.is_skipped
        before, last, after = state[:count], state[count], state[count + 1 :]
        if self.before:
            grads, how = how.scaled(grads), how._replace(grad_factor=None)
        clip = self._clip if self.last.merges and _are_floats(grads) else None
        in_turn = self.before[:-1] if clip else self.before
        grads, new = update_in_turn(in_turn, grads, before[: len(in_turn)], params, extra)
        if clip:
            how = how._replace(grad_factor=clip_factor(grads, clip.number()))
            new = (*new, before[-1])
        effects = zip(self.effects, after, strict=True)
        applied = tuple(effect.now(its_state, grads) for effect, its_state in effects)
        how = how._replace(effects=(*applied, *how.effects))
        step = full_step_of(self.last, "chain", may_be_direction=True)
        result = step(grads, last, params, extra, how)
        next_after = tuple(map(advance_schedules, after))
        new, next_after = trees.keep_if(skipped, (before, after), (new, next_after))
        return result._replace(state=(*new, result.state, *next_after))


def _are_floats(tree: Any) -> bool:
    """Whether the kernel takes all leaves of a tree."""
    return all(jnp.result_type(x) in trees.STORAGE_DTYPES for x in jax.tree.leaves(tree))


def _check_transformations(transformations: Sequence[Any]) -> None:
    """Raises PolicyError unless all are transformations and a distributed one is last."""
    if not transformations:
        raise PolicyError(
            "chain: empty: got no transformation, expected at least one. Pass an optimizer."
        )
    for i, tx in enumerate(transformations):
        if not (hasattr(tx, "init") and hasattr(tx, "update")):
            raise PolicyError(
                f"chain, transformation {i}: not a gradient transformation: "
                f"got {getattr(tx, '__name__', type(tx).__name__)}, expected what optax.scale(0.5) "
                "or fused_adamw(1e-3) returns. Call chain(first, second), without a list; "
                "turn a schedule into one with optax.scale_by_schedule."
            )
    for i, tx in enumerate(transformations[:-1]):
        if isinstance(tx, DistributedTransformation):
            raise _misplaced(i, "a distributed optimizer must come last")


def _misplaced(i: int, why: str) -> PolicyError:
    return PolicyError(
        f"chain, transformation {i}: {why}: got others behind it, expected the last place. "
        "Move it to the end; in place of what changes the learning rate there, "
        "set hyperparams['learning_rate'] of inject_hyperparams."
    )
