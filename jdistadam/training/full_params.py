"""The unsharded parameters of a train state, for evaluation and export."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding

from jdistadam.core.types import Params
from jdistadam.distributed.main_params import as_they_arrive
from jdistadam.distributed.transformation import DistributedTransformation
from jdistadam.training.train_state import TrainState, check_layout


def full_params(state: TrainState, tx: DistributedTransformation) -> Any:
    """Returns the unsharded parameters, in the dtype the model computes with.

    Every device gets them, but for what ``param_specs`` shards over tensor axes. Those that rest as
    shards are what the next forward pass gets: rounded to ``policy.param_comm_dtype`` if it is set.

    Raises:
      LayoutError: The state is of another layout than that of ``tx``.
    """
    check_layout(state, tx)
    config = tx.config
    if not config.parallel.shards_params:
        return state.params
    specs = config.tensor_specs(state.params)
    placed = jax.tree.map(lambda spec: NamedSharding(config.mesh, spec), specs)
    schedule = tx.seen.schedule_of_whole(config.tensor_local(state.params))

    def whole(params: Params) -> Any:
        if not config.parallel.gathers_once:
            return params
        return as_they_arrive(schedule, params, before_forward=True)

    return jax.jit(whole, out_shardings=placed)(state.params)
