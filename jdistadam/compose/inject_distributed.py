"""``inject_hyperparams`` for a distributed optimizer: its numbers as replicated state."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec as P

from jdistadam.core import trees
from jdistadam.core.types import Grads, OptState, Params
from jdistadam.distributed.schedule import Schedule
from jdistadam.distributed.state import StepResult
from jdistadam.distributed.transformation import DistributedTransformation, Functions


def inject_distributed(
    first: DistributedTransformation,
    inject: Callable[[Callable[[Any], Any]], optax.GradientTransformationExtraArgs],
) -> DistributedTransformation:
    """Makes a distributed optimizer whose numbers are arrays in its state.

    Args:
      first: The optimizer made with the first values: what does not depend on numbers is its own,
        as mesh, layout and schedule of collectives.
      inject: Takes what returns two functions of an optimizer, and returns a transformation whose
        ``init`` and ``update`` call those of the optimizer with the numbers in the state.
    """
    injected = _Injected(first, inject)
    return DistributedTransformation.make(
        injected,
        first.config,
        optax.InjectStatefulHyperparamsState(P(), P(), P(), first.state_specs()),
        changes_grads=first.changes_grads,
        bound=first.bound,
    )


@dataclasses.dataclass(frozen=True, eq=False, repr=False)  # by identity, as functions are
class _Injected:
    """The functions of such an optimizer."""

    first: DistributedTransformation
    inject: Callable[[Callable[[Any], Any]], optax.GradientTransformationExtraArgs]

    def init(self, schedule: Schedule, params: Params) -> OptState:
        """Makes the state."""
        return self._injected(lambda functions: None, schedule).init(params)

    def local_step(
        self, schedule: Schedule, grads: Grads, state: OptState, params: Params, **extra_args: Any
    ) -> StepResult:
        """Takes a step with the numbers in the state."""

        def step_of(functions: Functions) -> Callable[..., tuple[StepResult, Any]]:
            def step(grads: Grads, inner: Any, params: Params, **extra: Any) -> Any:
                result = functions.local_step(schedule, grads, inner, params, **extra)
                return result, result.opt_state

            return step

        injected = self._injected(step_of, schedule)
        result, new = injected.update(grads, state, params, **extra_args)
        # A skipped step leaves schedules where they were; numbers that were set stay either way.
        beside = [x._replace(inner_state=None) for x in (state, new)]
        kept = trees.keep_if(result.is_skipped, *beside)
        return result._replace(opt_state=kept._replace(inner_state=result.opt_state))

    def norm(self, schedule: Schedule, grads: Grads, state: OptState) -> jax.Array:
        """The norm, by the numbers in the state."""
        if state is None:
            return self.first.functions.norm(schedule, grads, None)

        def norm_of(functions: Functions) -> Callable[..., tuple[jax.Array, Any]]:
            return lambda grads, inner, params: (functions.norm(schedule, grads, inner), inner)

        return self._injected(norm_of, schedule).update(grads, state)[0]

    def _injected(
        self, function_of: Callable[[Functions], Any], schedule: Schedule
    ) -> optax.GradientTransformationExtraArgs:
        """``inject``, into ``init`` and a function of the functions of an optimizer."""

        def functions_of(tx: DistributedTransformation) -> Any:
            return functools.partial(tx.functions.init, schedule), function_of(tx.functions)

        return self.inject(functions_of)
