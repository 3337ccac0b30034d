"""The unsharded parameters of a train state, for evaluation and export."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding

from jdistadam.core.types import Params
from jdistadam.distributed.main_params import as_they_arrive
from jdistadam.distributed.schedule import Schedule
from jdistadam.distributed.transformation import DistributedTransformation
from jdistadam.training.train_state import TrainState, check_layout


def full_params(state: TrainState, tx: DistributedTransformation) -> Any:
    """Returns the unsharded parameters that the next forward pass computes with, in their dtype.

    Every device gets them, but for what ``param_specs`` shards over tensor axes. Of those that
    devices hold as shards, the forward pass gathers copies rounded to ``policy.param_comm_dtype``,
    if it is set, and these are returned. The exact values are those of ``main_params`` and
    ``to_optax_state``, and what ``save`` writes.

    Under "no_shard", "optim" and "optim_grads" these are the state's own arrays, which the next
    step donates. What is kept for longer must be copied:
    ``jax.tree.map(jnp.copy, full_params(state, tx))``. All processes call this.

    Returns:
      A tree like ``state.params``.

    Raises:
      LayoutError: The state is of another layout than that of ``tx``.

    Example:
      >>> import jax.numpy as jnp, jdistadam as jda
      >>> tx = jda.distributed(jda.fused_adamw(1e-3), mesh=jax.make_mesh((1,), ("data",)))
      >>> state = jda.TrainState.create({"w": jnp.ones(3)}, tx)
      >>> kept = jax.tree.map(jnp.copy, full_params(state, tx))
      >>> state, _ = jda.train_step(lambda params, x: params["w"] @ x, tx)(state, jnp.ones(3))
      >>> kept["w"].tolist()
      [1.0, 1.0, 1.0]
    """
    check_layout(state, tx)
    config = tx.config
    if not config.parallel.shards_params:
        return state.params
    specs = config.tensor_specs(state.params)
    placed = jax.tree.map(lambda spec: NamedSharding(config.mesh, spec), specs)
    is_rounded = config.policy.param_comm_dtype is not None
    whole = config.tensor_local(state.params)
    schedule = tx.config.schedule(whole) if is_rounded else None
    # One function for all calls, which are compiled once.
    return jax.jit(_gathered, static_argnums=0, out_shardings=placed)(schedule, state.params)


def _gathered(schedule: Schedule | None, params: Params) -> Any:
    """Params as the forward pass gets them: rounded where a schedule is given."""
    return params if schedule is None else as_they_arrive(schedule, params, before_forward=True)
