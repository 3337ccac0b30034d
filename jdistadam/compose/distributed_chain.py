"""A chain whose last transformation is a distributed optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jdistadam.compose.linearity import (
    example_params,
    is_alike,
    is_elementwise,
    reads_params,
    why_not_linear,
)
from jdistadam.core import trees
from jdistadam.core.trees import Grads, OptState, Params
from jdistadam.distributed import model_axes
from jdistadam.distributed.accumulate import AccumulatedGrads
from jdistadam.distributed.schedule import Schedule
from jdistadam.distributed.shard import in_form_of, is_shard, leaves_of, plain
from jdistadam.distributed.state import StepResult
from jdistadam.distributed.transformation import DistributedTransformation
from jdistadam.errors import PolicyError, TreeError


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class DistributedChain:
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
        check_state((*self.before, self.last), state)
        given = grads.sums if is_accumulated else grads
        updated, states = update_in_turn(self.before, plain(given), state[:-1], params, extra_args)
        updated = in_form_of(given, updated)
        return dataclasses.replace(grads, sums=updated) if is_accumulated else updated, states


def update_in_turn(
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


def check_state(transformations: Sequence[optax.GradientTransformation], state: Any) -> None:
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
