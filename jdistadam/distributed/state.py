"""The state of a distributed optimizer, and its place in a chain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jdistadam.core import trees
from jdistadam.core.guards import LossScaleState, NormGuardState
from jdistadam.core.trees import Grads, OptState, Params
from jdistadam.distributed.schedule import Schedule
from jdistadam.errors import TreeError


class DistributedState(NamedTuple):
    """The state of a distributed optimizer: a few flat arrays, for any number of leaves.

    Attributes:
      count: Shape (), int32: steps taken, excluding skipped ones; replicated.
      main_params: Shape (devices * main_size,), float32, sharded: the main parameters. With
        "remainder16": their low halves, uint16. None if no parameter has one. ``devices`` is the
        number of devices with different shards, along shard axes and tensor axes.
      mu: Shape (devices * flat_size,), mu_dtype of the optimizer, sharded; FlatCodes for "block8"
        and "block16".
      nu: The same shape, nu_dtype of the optimizer, sharded; likewise.
      grad_norm: Shape (), float32: global norm of the last mean gradient, before clipping. NaN if
        the state was of another layout.
      layout_digest: Shape (16,), uint8, replicated: a digest of the layout, which identifies the
        leaf of each element of the flat arrays. Every function that takes a state compares the
        digest, so keep it with the arrays.
      scaling: The loss scale and the number of skipped steps; None without loss_scale.
      key: Shape (2,), uint32, replicated: the constant seed of random bits; None without
        stochastic rounding.
      ema: Shape (devices * flat_size,), float32, sharded: the moving average of the exact
        parameters, which ``ema_params`` returns; None without ema_decay.
      guard: The running mean of the gradient norm, and its skipped steps; None without norm_guard.
    """

    count: jax.Array  # type: ignore[assignment]
    main_params: jax.Array | None
    mu: Any
    nu: Any
    grad_norm: jax.Array
    layout_digest: jax.Array
    scaling: LossScaleState | None = None
    key: jax.Array | None = None
    ema: jax.Array | None = None
    guard: NormGuardState | None = None


class StepResult(NamedTuple):
    """The result of a step on one device.

    Attributes:
      params: The new parameters.
      opt_state: The new state.
      is_skipped: Shape (), bool: whether the step was skipped; the same on all devices. None if
        that cannot happen.
      is_other_layout: Shape (), bool: whether the state has another layout. New parameters,
        moments and norm are then NaN, and the state keeps the digest of the other layout.
      learning_rate: Shape (), float32: the learning rate of this step, not of groups.
      norms: The norms by name, shape (), float32; the same on all devices. None without
        ``norms``.
    """

    params: Params
    opt_state: OptState
    is_skipped: jax.Array | None
    is_other_layout: jax.Array
    learning_rate: jax.Array
    norms: dict[str, jax.Array] | None = None


class Functions(Protocol):
    """The functions of a distributed optimizer in ``jax.shard_map``, for params of a schedule."""

    def init(self, schedule: Schedule, params: Params) -> Any:
        """Makes the state."""

    def local_step(
        self, schedule: Schedule, grads: Grads, state: Any, params: Params, **extra_args: Any
    ) -> StepResult:
        """Takes a step with plain params, in the form that a device holds."""

    def norm(self, schedule: Schedule, grads: Grads, state: Any) -> jax.Array:
        """The global norm of the mean gradient."""


def find_state(opt_state: OptState) -> DistributedState:
    """Returns the DistributedState in a state that may be a chain's."""
    states = trees.parts_of(opt_state, DistributedState)
    if len(states) != 1:
        raise TreeError(
            "opt_state: not the state of a distributed optimizer: "
            f"got {type(opt_state).__name__} with {len(states)} DistributedState in it, "
            "expected a DistributedState, or the state of a chain with one. Call "
            "step(grads, opt_state, params) with what init, step or TrainState.create returned; "
            "restore a checkpoint into TrainState.shapes(params, tx), which gives it these types."
        )
    return states[0]


def check_own_state(state: Any) -> None:
    """Raises TreeError unless ``state`` is itself a DistributedState."""
    if not is_distributed_state(state):
        raise TreeError(
            f"opt_state: not the state of this optimizer: got {type(state).__name__}, expected "
            "DistributedState. Call step(grads, opt_state, params) with what init or step returned."
        )


def map_state(
    function: Callable[..., Any],
    opt_state: OptState,
    *more: Any,
    others: Callable[..., Any] = lambda x: x,
) -> Any:
    """Maps the DistributedState in a state that may be a chain's, and the chain's other arrays."""
    return jax.tree.map(
        lambda x, *parts: (function if is_distributed_state(x) else others)(x, *parts),
        opt_state,
        *more,
        is_leaf=is_distributed_state,
    )


def scale_loss(loss: jax.Array, opt_state: OptState) -> jax.Array:
    """Returns the loss times the loss scale of the state, in float32, for differentiation.

    ``train_step`` does this itself. In a custom training loop::

        local = jda.local_params(params, tx)
        grads = jax.grad(lambda p: jda.scale_loss(loss(p, batch), opt_state))(local)

    Args:
      loss: The loss, shape ().
      opt_state: The state of a distributed optimizer, or of a ``chain`` with one. Without a
        ``loss_scale`` the loss is returned unchanged.

    Returns:
      The scaled loss, shape (), float32; without a ``loss_scale``, the loss as it is.

    Raises:
      TreeError: ``opt_state`` has no state of a distributed optimizer.
      ShapeError, DtypeError: The loss is not one real number.
    """
    scaling = find_state(opt_state).scaling
    trees.check_scalar("loss", loss)
    loss = jnp.asarray(loss)
    return loss if scaling is None else loss.astype(jnp.float32) * scaling.loss_scale


def is_distributed_state(x: Any) -> bool:
    """Whether ``x`` is a DistributedState."""
    return isinstance(x, DistributedState)
