"""``optax.chain`` with the fused step of the last transformation."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdistadam.compose.linearity import (
    example_params,
    is_alike,
    is_elementwise,
    reads_params,
    why_not_linear,
)
from jdistadam.core import trees
from jdistadam.core.algorithm import Algorithm
from jdistadam.core.hyperparameters import Hyperparameters, at_count
from jdistadam.core.trees import Grads, OptState, Params
from jdistadam.distributed import model_axes
from jdistadam.distributed.accumulate import AccumulatedGrads
from jdistadam.distributed.schedule import Schedule
from jdistadam.distributed.shard import in_form_of, is_shard, leaves_of, plain
from jdistadam.distributed.state import StepResult
from jdistadam.distributed.transformation import DistributedTransformation
from jdistadam.drop_in.effects import Effect, How, clip_factor, effect_of
from jdistadam.drop_in.state import MainParamsState
from jdistadam.drop_in.step import advance_schedules
from jdistadam.drop_in.transformation import (
    FullResult,
    FusedTransformation,
    full_step_of,
    step_of,
)
from jdistadam.errors import PolicyError, TreeError


def chain(*transformations: optax.GradientTransformation) -> FusedTransformation:
    """``optax.chain`` with a ``step``: the same state, the same updates.

    ``step`` is fused if the last transformation has its own step, as jdistadam's optimizers do. The
    transformations before it change the gradients. At the end of a chain, jdistadam's
    ``scale_by_adam`` and ``add_decayed_weights``, and what multiplies by a number, become one such
    optimizer, whose state stays in parts: ``jda.scale_by_learning_rate``, or ``optax.scale``,
    ``optax.scale_by_schedule`` and ``optax.scale_by_learning_rate``, of which one may depend on the
    step count. Several numbers are multiplied first. Otherwise ``step`` is ``update`` and
    ``apply_updates``, and ``why_not_fused`` says why.

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
        linear, needs other arguments, or would read shards. One follows a distributed optimizer or
        an optimizer with main parameters (raised by ``init``).

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
        distributed = _DistributedChain(tuple(first), last)
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
        return end, (), "no transformation in it has a fused step"
    place = ours[-1]
    tx, after = transformations[place], transformations[place + 1 :]
    is_direction = tx.is_direction
    effects: list[Effect] = []
    for i, other in enumerate(after):
        effect = effect_of(other) if tx.merges and tx.is_as_made else None
        is_first_decay = is_direction and i == 0 and effect is not None and effect.kind == "decay"
        if effect is None or (effect.kind != "factor" and not is_first_decay):
            return end, (), _WHY_NOT.format(place + 1 + i)
        effects.append(effect)
    if is_direction and not any(effect.kind == "factor" for effect in effects):
        return (
            place,
            tuple(effects),
            f"nothing multiplies by a learning rate after transformation {end}",
        )
    return place, tuple(effects), "" if after else tx.why_not_fused


_WHY_NOT = (
    "transformation {} and later ones follow the optimizer, and do more than to multiply by numbers"
)


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
        merges = isinstance(self.last, FusedTransformation) and self.last.merges
        is_merged = merges and self.last.is_as_made and bool(self.after or self._clip)
        step = step_of(self.full_step) if is_merged else self.step
        tx = FusedTransformation(self.init, self.update_merged if is_merged else self.update, step)
        tx._of_another = why_not_fused
        if getattr(self.last, "full_step", None) is not None:
            tx.full_step, tx.merges = self.full_step, merges
            is_rated = any(effect.kind == "factor" for effect in self.effects)
            tx.is_direction = self.last.is_direction and not is_rated
            if not self.before:  # so that distributed takes it
                tx.algorithm = _after(self.last, self.effects, tx)
        return tx

    @property
    def _clip(self) -> Effect | None:
        """The clip right before the optimizer, if there is one."""
        effect = effect_of(self.before[-1]) if self.before else None
        return effect if effect is not None and effect.kind == "clip" and not effect.mask else None

    def update(
        self, grads: Grads, state: OptState, params: Params = None, **extra_args: Any
    ) -> tuple[Any, OptState]:
        transformations = (*self.before, self.last, *self.after)
        _check_state(transformations, state)
        return _update_in_turn(transformations, grads, state, params, extra_args)

    def update_merged(
        self, grads: Grads, state: OptState, params: Params = None, **extra_args: Any
    ) -> tuple[Any, OptState]:
        return self.full_step(grads, state, params, extra_args, How("update"))[:2]

    def step(
        self, grads: Grads, state: OptState, params: Params, **extra_args: Any
    ) -> tuple[Params, OptState]:
        if params is None:
            raise ValueError(optax._src.base.NO_PARAMS_MSG)
        if not isinstance(self.last, FusedTransformation) or self.after:
            trees.check_same_structure(grads, params, name="grads", like_name="params")
            updates, state = self.update(grads, state, params, **extra_args)
            return optax.apply_updates(params, updates), state
        _check_state((*self.before, self.last), state)
        *states, last = state
        grads, new = _update_in_turn(self.before, grads, states, params, extra_args)
        params, last = self.last.step(grads, last, params, **extra_args)
        return params, (*new, last)

    def full_step(
        self, grads: Grads, state: Any, params: Params, extra: Any, how: How
    ) -> FullResult:
        """The step for wrappers; if it is skipped, all states stay unchanged."""
        _check_state((*self.before, self.last, *self.after), state)
        count, skipped = len(self.before), how.is_skipped
        before, last, after = state[:count], state[count], state[count + 1 :]
        if self.before:
            grads, how = how.scaled(grads), how._replace(grad_factor=None)
        clip = self._clip if self.last.merges else None
        in_turn = self.before
        if clip is not None and _are_floats((grads, params)):
            in_turn = self.before[:-1]
        else:
            clip = None
        grads, new = _update_in_turn(in_turn, grads, before[: len(in_turn)], params, extra)
        if clip is not None:
            how = how._replace(grad_factor=clip_factor(grads, clip.number(None)))
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


def _after(
    tx: FusedTransformation, effects: Sequence[Effect], chained: FusedTransformation
) -> Algorithm | None:
    """The algorithm of an optimizer with effects; None if factors are of some leaves only."""
    algorithm = tx.algorithm
    factors = [effect for effect in effects if effect.kind == "factor"]
    if algorithm is None or not effects or any(effect.mask is not None for effect in factors):
        return algorithm if not effects else None
    decay = next((effect for effect in effects if effect.kind == "decay"), None)

    def with_effects(hyper: Hyperparameters | None) -> Any:
        if hyper is None:
            return None
        changes = {"learning_rate": _product(hyper.learning_rate, factors)}
        if decay is not None:
            changes["weight_decay"] = decay.number if decay.is_scheduled else decay.number(None)
        return dataclasses.replace(hyper, **changes)

    groups = algorithm.groups
    hypers = {label: with_effects(hyper) for label, hyper in groups.hypers.items()}
    mask = groups.mask if decay is None else decay.mask
    theirs = optax.GradientTransformation(chained.init, chained.update)
    return dataclasses.replace(
        algorithm,
        hyper=with_effects(algorithm.hyper),
        groups=dataclasses.replace(groups, hypers=hypers, mask=mask),
        like_optax=theirs if tx.is_direction else algorithm.like_optax,
        reads_params=algorithm.reads_params or decay is not None,
    )


def _product(rate: Any, factors: Sequence[Effect]) -> Any:
    """A learning rate multiplied by factors: a schedule if one of them is."""

    def product(count: Any) -> Any:
        numbers = [at_count(rate, count), *(factor.number(count) for factor in factors)]
        return functools.reduce(operator.mul, numbers)

    if callable(rate) or any(factor.is_scheduled for factor in factors):
        return product
    number = product(None)
    is_rising = isinstance(number, np.floating) and number < 0  # optax warns of no such factor
    return np.asarray(number) if is_rising else number


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _DistributedChain:
    """The functions of a chain whose last transformation is a distributed optimizer."""

    before: tuple[optax.GradientTransformation, ...]
    last: DistributedTransformation

    def init(self, schedule: Schedule, params: Params) -> OptState:
        """Makes the states of all transformations."""
        self.check_before(self._unsharded(schedule, params))
        before = (tx.init(params) for tx in self.before)
        return (*before, self.last.functions.init(schedule, params))

    def local_step(
        self, schedule: Schedule, grads: Grads, state: OptState, params: Params, **extra_args: Any
    ) -> StepResult:
        """Changes the gradients and takes the optimizer's step."""
        unsharded = self._unsharded(schedule, params)
        self.check_before(unsharded)
        self._check_shards_of(grads, unsharded)
        grads, states = self._update_before(grads, state, _arrays(unsharded), extra_args)
        result = self.last.functions.local_step(schedule, grads, state[-1], params, **extra_args)
        # If the optimizer skips a step, schedules before it do not advance either.
        states = trees.keep_if(result.is_skipped, state[:-1], states)
        return result._replace(opt_state=(*states, result.opt_state))

    def norm(self, schedule: Schedule, grads: Grads, state: OptState) -> jax.Array:
        """The norm of the gradients that reach the optimizer."""
        grads, _ = self._update_before(grads, state, None, {})
        return self.last.functions.norm(schedule, grads, state[-1])

    def state_specs(self) -> Any:
        """The PartitionSpecs of the state: everything before the optimizer is replicated."""
        return (*(jax.sharding.PartitionSpec() for _ in self.before), self.last.state_specs())

    def check_before(self, params: Params) -> None:
        """Raises PolicyError if a transformation may not come before a sum over devices."""
        for i, tx in enumerate(self.before):
            if why := _why_not_linear(i, tx, params):
                raise PolicyError(
                    f"chain, transformation {i}: it would see each device's gradients before "
                    f"they are summed, and {why}: got a distributed optimizer after it, expected "
                    "a transformation that is linear in the gradients and keeps nothing of them. "
                    "For clipping pass max_grad_norm, for weight decay weight_decay or l2; for "
                    "noise see docs/recipes.md."
                )
            if self.last.config.parallel.shards_params and reads_params(tx, params):
                raise self._sees_shards(i, "parameters, and it reads their values")

    def _check_shards_of(self, grads: Grads, unsharded: Params) -> None:
        """Raises PolicyError if a transformation would mix elements within one shard."""
        if isinstance(grads, AccumulatedGrads) or not any(map(is_shard, leaves_of(grads))):
            return
        like = lambda g, p: jax.ShapeDtypeStruct(jnp.shape(g), p.dtype)  # noqa: E731
        shards = jax.tree.map(like, plain(grads), unsharded)
        for i, tx in enumerate(self.before):
            if not is_elementwise(tx, unsharded):
                raise self._sees_shards(i, "summed gradients, and it is not elementwise")
            if not is_alike(tx, unsharded, shards):
                raise self._sees_shards(i, "summed gradients, and it looks at shapes or places")

    def _sees_shards(self, i: int, of_what: str) -> PolicyError:
        parallel = self.last.config.parallel
        return PolicyError(
            f"chain, transformation {i}: it would see a device's shard of {of_what}: "
            f"got {parallel.strategy!r}, expected 'optim' or 'optim_grads'. "
            "Change the strategy, or leave this transformation out."
        )

    def _unsharded(self, schedule: Schedule, params: Params) -> Params:
        return model_axes.unsharded(self.last.config, schedule, params)

    def check_before_params_are_known(self) -> None:
        """Raises what ``check_before`` does, if example params are enough to find it.

        A transformation may hold functions that only work on the user's params, such as a mask or a
        label for each of their names. On example params this user code may raise anything: a
        ValueError of jax.tree, a KeyError, an AttributeError or an assertion. That says nothing
        about the transformation; ``init`` checks it with the real params.
        """
        try:
            self.check_before(example_params())
        except PolicyError:
            raise
        except Exception:
            return

    def _update_before(
        self, grads: Grads, state: OptState, params: Params, extra_args: dict[str, Any]
    ) -> tuple[Grads, tuple[Any, ...]]:
        """Updates gradients, or sums of accumulated ones, with all but the optimizer."""
        is_accumulated = isinstance(grads, AccumulatedGrads)
        if is_accumulated and self.before and self.last.config.parallel.shards_grads:
            raise PolicyError(
                "chain: accumulated gradients are already reduced and sharded: "
                "got a transformation before the distributed optimizer, expected none, "
                "under 'optim_grads' and 'optim_grads_params'. Use sharding_strategy='optim', "
                "or 'optim_grads_params' with reshard_after_forward=False."
            )
        _check_state((*self.before, self.last), state)
        given = grads.sums if is_accumulated else grads
        updated, states = _update_in_turn(self.before, plain(given), state[:-1], params, extra_args)
        updated = in_form_of(given, updated)
        return dataclasses.replace(grads, sums=updated) if is_accumulated else updated, states


def _update_in_turn(
    transformations: Sequence[optax.GradientTransformation],
    grads: Grads,
    states: Sequence[OptState],
    params: Params,
    extra_args: dict[str, Any],
) -> tuple[Any, tuple[Any, ...]]:
    """Like ``optax.chain``: each transformation updates the previous one's results."""
    new_states = []
    for tx, state in zip(transformations, states, strict=True):
        tx = optax.with_extra_args_support(tx)
        grads, new_state = tx.update(grads, state, params, **extra_args)
        new_states.append(new_state)
    return grads, tuple(new_states)


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


def _check_state(transformations: Sequence[optax.GradientTransformation], state: Any) -> None:
    """Raises TreeError unless a state has one part per transformation."""
    expected = len(transformations)
    if not isinstance(state, tuple) or len(state) != expected:
        got = f"{len(state)} parts" if isinstance(state, tuple) else type(state).__name__
        raise TreeError(
            f"opt_state: not a state of this chain: got {got}, expected {expected} parts. "
            "Pass opt_state as init, update or step returned it."
        )


def _arrays(params: Params) -> Params:
    """Params, or zeros in place of shapes; nothing reads their values."""

    def array(x: Any) -> Any:
        return jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x

    return jax.tree.map(array, params)


def _misplaced(i: int, why: str) -> PolicyError:
    return PolicyError(
        f"chain, transformation {i}: {why}: got others behind it, expected the last place. "
        "Move it to the end; in place of what changes the learning rate there, "
        "set hyperparams['learning_rate'] of inject_hyperparams."
    )


def _why_not_linear(i: int, tx: optax.GradientTransformation, params: Params) -> str | None:
    """As ``why_not_linear``; raises PolicyError if it needs arguments that others do not take."""
    try:
        return why_not_linear(tx, params)
    except TypeError as error:
        if "required keyword-only argument" not in str(error):
            raise
        raise PolicyError(
            f"chain, transformation {i}: it needs more than gradients, state and params: "
            f"got {error}, expected no such argument before a distributed optimizer. "
            "For a learning rate that follows the loss, set hyperparams['learning_rate'] "
            "of inject_hyperparams between steps: docs/recipes.md."
        ) from error
