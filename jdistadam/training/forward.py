"""The forward pass of one device, inside ``jax.shard_map``: the same to train and to evaluate."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jdistadam.core import collectives
from jdistadam.core.types import Params
from jdistadam.distributed.accumulate import mean_factor
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.gather_params import gathered_before_loss, in_loss, local_params
from jdistadam.distributed.transformation import DistributedTransformation
from jdistadam.training.loss_function import LossFunction, LossOutput, refuse_summed_loss
from jdistadam.training.train_state import TrainState


@dataclasses.dataclass(frozen=True)
class Forward:
    """The loss of this device's micro-batches, at the params of a state.

    Attributes:
      loss_fn: The loss.
      tx: The optimizer, bound to the params.
      params: What the loss gets, and is differentiated by: unsharded, but what the model
        gathers is of type ``Shard``.
      rng: The key of this device; None if the state has none.
      next_rng: The key of the next state.
    """

    loss_fn: LossFunction
    tx: DistributedTransformation
    params: Params
    rng: Any
    next_rng: Any

    @classmethod
    def at(cls, state: TrainState, loss_fn: LossFunction, tx: DistributedTransformation) -> Forward:
        """Makes it from this device's part of a state."""
        parallel = tx.config.parallel
        next_rng = rng = None
        if state.rng is not None:
            next_rng, rng = jax.random.split(state.rng)
            rng = jax.random.fold_in(rng, collectives.axis_index(parallel.data_axes))
        params = state.params
        if parallel.shards_params:  # those that the model gathers stay shards
            params = gathered_before_loss(local_params(params, tx), tx)
        return cls(loss_fn, tx, params, rng, next_rng)

    def output(self, i: Any, batch: Any, model_state: Any) -> Callable[[Params], LossOutput]:
        """What the loss returns for micro-batch ``i``, as a function of the params.

        Raises:
          PolicyError: The loss was summed over the devices already.
        """

        def output(params: Params) -> LossOutput:
            key = None if self.rng is None else jax.random.fold_in(self.rng, i)
            with in_loss():
                return self.loss_fn(params, batch, model_state, key)

        parallel = self.tx.config.parallel
        if parallel.num_devices > 1:
            refuse_summed_loss(lambda p: output(p).loss, self.params, parallel.data_axes)
        return output


def mean_loss(config: DistributedConfig, loss: jax.Array, weight: Any) -> jax.Array:
    """The mean over all devices of what each found, by the weights that ``mean_factor`` takes."""
    total = collectives.all_reduce(loss, config.parallel.data_axes)
    return total * mean_factor(config, weight)[0]
