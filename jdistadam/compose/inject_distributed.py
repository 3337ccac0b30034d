"""``inject_hyperparams`` for a distributed optimizer: its numbers as replicated state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec as P

from jdistadam.core import trees
from jdistadam.core.types import Grads, OptState, Params
from jdistadam.distributed.state import StepResult
from jdistadam.distributed.transformation import DistributedTransformation


def inject_distributed(
    first: DistributedTransformation,
    inject: Callable[[Callable[[Any], Any]], optax.GradientTransformationExtraArgs],
) -> DistributedTransformation:
    """Makes a distributed optimizer whose numbers are arrays in its state.

    Args:
      first: The optimizer made with the first values: what does not depend on numbers is its own,
        as mesh, layout and schedule of collectives.
      inject: Takes a function of an optimizer, and returns a transformation whose ``update`` calls
        it with the optimizer of the numbers in the state.
    """
    injected = _Injected(first, inject)
    return DistributedTransformation.make(
        init=injected.init,
        local_step=injected.local_step,
        norm=injected.norm,
        seen=first.seen,
        config=first.config,
        specs=optax.InjectStatefulHyperparamsState(P(), P(), P(), first.state_specs()),
        changes_grads=first.changes_grads,
    )


@dataclasses.dataclass(frozen=True, eq=False, repr=False)  # by identity, as functions are
class _Injected:
    """The functions of such an optimizer."""

    first: DistributedTransformation
    inject: Callable[[Callable[[Any], Any]], optax.GradientTransformationExtraArgs]

    def init(self, params: Params) -> OptState:
        return self._injected(lambda tx: tx.update).init(params)

    def local_step(
        self,
        grads: Grads,
        state: OptState,
        params: Params,
        **extra_args: Any,
    ) -> StepResult:
        def step_of(tx: DistributedTransformation) -> Callable[..., tuple[StepResult, Any]]:
            def step(grads: Grads, inner: Any, params: Params, **extra: Any) -> Any:
                result = tx.local_step(grads, inner, params, **extra)
                return result, result.opt_state

            return step

        result, new = self._injected(step_of).update(grads, state, params, **extra_args)
        # A skipped step leaves schedules where they were; numbers that were set stay either way.
        beside = [x._replace(inner_state=None) for x in (state, new)]
        kept = trees.keep_if(result.is_skipped, *beside)
        return result._replace(opt_state=kept._replace(inner_state=result.opt_state))

    def norm(self, grads: Grads, state: OptState) -> jax.Array:
        if state is None:
            return self.first.norm(grads, None)

        def norm_of(tx: DistributedTransformation) -> Callable[..., tuple[jax.Array, Any]]:
            return lambda grads, inner, params: (tx.norm(grads, inner), inner)

        return self._injected(norm_of).update(grads, state)[0]

    def _injected(
        self, function_of: Callable[[DistributedTransformation], Any]
    ) -> optax.GradientTransformationExtraArgs:
        """``inject``, of optimizers that know of the params that the first one has seen."""

        def knowing(tx: DistributedTransformation) -> Any:
            tx.seen.share(self.first.seen)
            return function_of(tx)

        return self.inject(knowing)
