"""The state of a distributed optimizer, and how to find it in the state of a chain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdistadam.core import trees
from jdistadam.core.loss_scale import LossScaleState
from jdistadam.core.types import OptState, Params
from jdistadam.errors import TreeError


class DistributedState(NamedTuple):
    """The state of a distributed optimizer: a few flat arrays, whatever the number of leaves.

    Attributes:
      count: Shape (), int32: steps taken, skipped ones not counted; replicated.
      main_params: Shape (num_shards * main_size,), float32, sharded: the main parameters. uint16
        with main_params_dtype "remainder16": their low halves. None where no parameter has one.
      mu: Shape (num_shards * flat_size,), policy.mu_dtype, sharded; FlatCodes for "block8" and
        "block16".
      nu: The same shape, policy.nu_dtype, sharded; likewise.
      grad_norm: Shape (), float32: global norm of the last mean gradient, before clipping. NaN
        where the state was of another layout.
      layout_digest: Shape (16,), uint8, replicated: a digest of the layout, which says to which
        leaf each element of the flat arrays belongs. Every function that takes a state compares
        it; keep it with the arrays.
      scaling: The loss scale and the number of skipped steps; None without loss_scale.
      key: Shape (2,), uint32, replicated: the seed of random bits, which never changes; None
        without stochastic rounding.
    """

    count: jax.Array  # type: ignore[assignment]
    main_params: jax.Array | None
    mu: Any
    nu: Any
    grad_norm: jax.Array
    layout_digest: jax.Array
    scaling: LossScaleState | None = None
    key: jax.Array | None = None


class StepResult(NamedTuple):
    """What a step on one device returns.

    Attributes:
      params: The new parameters.
      opt_state: The new state.
      is_skipped: Shape (), bool: whether everything stayed as it was; the same on all devices.
        None where that cannot happen.
      is_other_layout: Shape (), bool: whether the state is of another layout. New parameters,
        moments and norm are then NaN, and the digest of the state stays that of the other one.
      learning_rate: Shape (), float32: of this step, before ``lr_scale`` of groups.
    """

    params: Params
    opt_state: OptState
    is_skipped: jax.Array | None
    is_other_layout: jax.Array
    learning_rate: jax.Array


def find_state(opt_state: OptState) -> DistributedState:
    """Returns the DistributedState inside of what may be the state of a chain."""
    parts = jax.tree.leaves(opt_state, is_leaf=is_distributed_state)
    found = [part for part in parts if is_distributed_state(part)]
    if len(found) != 1:
        raise TreeError(
            "opt_state: not the state of a distributed optimizer: "
            f"got {type(opt_state).__name__} with {len(found)} DistributedState in it, "
            "expected a DistributedState, or the state of a chain with one. Call "
            "step(grads, opt_state, params) with what init, step or TrainState.create returned; "
            "restore a checkpoint into TrainState.shapes(params, tx), which gives it these types."
        )
    return found[0]


def check_own_state(state: Any) -> None:
    """Raises TreeError unless ``state`` is a DistributedState itself."""
    if not is_distributed_state(state):
        raise TreeError(
            f"opt_state: not the state of this optimizer: got {type(state).__name__}, expected "
            "DistributedState. Call step(grads, opt_state, params) with what init or step returned."
        )


def map_state(function: Callable[[DistributedState], Any], opt_state: OptState) -> Any:
    """Replaces the DistributedState inside of what may be the state of a chain."""
    return jax.tree.map(
        lambda part: function(part) if is_distributed_state(part) else part,
        opt_state,
        is_leaf=is_distributed_state,
    )


def scale_loss(loss: jax.Array, opt_state: OptState) -> jax.Array:
    """Returns the loss times the loss scale of the state, in float32: what to differentiate.

    ``train_step`` does this by itself. In a custom training loop::

        local = jda.local_params(params, tx)
        grads = jax.grad(lambda p: jda.scale_loss(loss(p, batch), opt_state))(local)

    Args:
      loss: The loss, shape ().
      opt_state: The state of a distributed optimizer, or of a ``chain`` with one. Without a
        ``loss_scale`` the loss is returned as it is.

    Raises:
      TreeError: There is no state of a distributed optimizer in ``opt_state``.
      ShapeError, DtypeError: The loss is not one real number.
    """
    scaling = find_state(opt_state).scaling
    trees.check_scalar("loss", loss)
    loss = jnp.asarray(loss)
    return loss if scaling is None else loss.astype(jnp.float32) * scaling.loss_scale


def is_distributed_state(x: Any) -> bool:
    """Whether ``x`` is a DistributedState."""
    return isinstance(x, DistributedState)
