"""Adam and AdamW with their state sharded over the devices of a mesh (ZeRO-1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jdistadam import collectives, trees
from jdistadam.config import (
    Hyperparameters,
    MixedPrecisionPolicy,
    ScalarOrSchedule,
    check_nu_dtype,
    check_strategy,
)
from jdistadam.distributed_checks import check_arguments, check_mesh, refuse_empty_leaves
from jdistadam.distributed_step import (
    AccumulatedGrads,
    DistributedConfig,
    DistributedState,
    accumulate_local,
    grad_norm_local,
    init_grads_local,
    init_local,
    step_local,
)
from jdistadam.transformation import FusedTransformation, StepFn


class DistributedTransformation(FusedTransformation):
    """``init``, ``update`` and ``step`` over a mesh, with what they were made from.

    ``train_step`` calls all of this for you. In a ``jax.shard_map`` of your own, over
    ``config.mesh``::

        def local_step(params, state, batch):  # batch: this device's part
            grads = jax.grad(loss)(jda.local_params(params, tx), batch)
            return tx.step(grads, state, params)

        specs = P(), tx.state_specs()
        step = jax.shard_map(local_step, mesh=mesh, in_specs=(*specs, P("data")), out_specs=specs)

    ``init`` also runs outside of it.
    """

    config: DistributedConfig
    specs: Any
    local_step: StepFn  # step, without the check for zero-size arguments that train_step keeps out
    norm: Callable[[Any, Any], jax.Array]

    @classmethod
    def make(
        cls,
        init: Any,
        update: Any,
        step: Any,
        local_step: Any,
        norm: Any,
        config: DistributedConfig,
        specs: Any,
    ) -> DistributedTransformation:
        """Joins the functions and what they were made from."""
        self: Any = cls(init, update, step)
        self.local_step, self.norm, self.config, self.specs = local_step, norm, config, specs
        return self

    def state_specs(self, params: Any = None) -> Any:
        """Returns the PartitionSpecs of the state, for shard_map's in_specs and out_specs.

        They are the same for all params.
        """
        del params
        return self.specs

    def init_grads(self, params: Any) -> AccumulatedGrads:
        """Returns a sum of no gradients, to which ``accumulate`` adds; inside shard_map.

        Args:
          params: Tree of arrays: only their shapes and dtypes matter.
        """
        return init_grads_local(self.config, params)

    def accumulate(self, acc: AccumulatedGrads, grads: Any, weight: Any = None) -> AccumulatedGrads:
        r"""Adds one micro-batch's local gradients; nothing is sent.

        ``step`` takes the result in place of gradients and uses the mean over all micro-batches
        of all devices, :math:`\sum_i w_i g_i / \sum_i w_i`.

        Args:
          acc: What ``init_grads`` or ``accumulate`` returned.
          grads: This device's gradients, not reduced.
          weight: :math:`w_i` >= 0, a scalar, e.g. a number of tokens. None: 1. Gradients of weight
            zero do not count, whatever they hold. On a float16 wire keep it near 1: the weighted
            sum is what travels.

        Returns:
          The new sums, in ``policy.main_grads_dtype``.

        Raises:
          TreeError, ShapeError, DtypeError: The gradients do not fit.
          MeshError: They are reduced already.
        """
        return accumulate_local(self.config, acc, grads, weight)

    def grad_norm(self, grads: Any, state: Any = None) -> jax.Array:
        """Returns the global norm of the mean gradient before clipping, as ``step`` computes it.

        XLA merges its communication with that of a ``step`` on the same gradients in the same
        program. The norm that a step used is also in its new state, ``state.grad_norm``.

        Args:
          grads: Local gradients, or what ``accumulate`` returned.
          state: The state. Only the one of a ``chain`` has an influence on the norm.

        Returns:
          Shape (), float32; the same on all devices.
        """
        return self.norm(grads, state)


def distributed_fused_adamw(
    learning_rate: ScalarOrSchedule,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    eps_root: Any = 0.0,
    weight_decay: ScalarOrSchedule = 1e-4,
    mask: Any | Callable[[Any], Any] | None = None,
    *,
    nesterov: bool = False,
    mesh: Mesh,
    shard_axis: str = "data",
    sharding_strategy: str = "optim",
    policy: MixedPrecisionPolicy | None = None,
    max_grad_norm: float | None = None,
    average_grads: bool = True,
    bucket_bytes: int = 32 << 20,
) -> DistributedTransformation:
    r"""AdamW for data parallelism, its state sharded over a mesh axis.

    Each of the :math:`N` devices keeps :math:`1/N` of the float32 main parameters, :math:`m` and
    :math:`v`. A step reduce-scatters the local gradients, updates the shard with the fused kernel
    and all-gathers the new parameters:

    .. math::

      \bar g = \frac1N \sum_r g_r, \qquad
      g = s \sum_r g_r, \qquad s = \frac1N \min\left(1, \frac{G}{\lVert \bar g \rVert}\right)

    with :math:`G` = ``max_grad_norm``, followed by the formula of ``fused_adamw``. The sum is in
    ``policy.grad_comm_dtype``; the scalar :math:`s` is float32 and applied inside the kernel.

    Args:
      learning_rate: As in ``fused_adamw``, and so are the next six.
      b1: Decay rate of the first moment.
      b2: Decay rate of the second moment.
      eps: Added outside the square root.
      eps_root: Added inside the square root.
      weight_decay: Decoupled weight decay, or a schedule.
      mask: Where weight decay applies.
      nesterov: Whether to use Nesterov momentum.
      mesh: One-dimensional mesh, e.g. ``jax.make_mesh((8,), ("data",))``.
      shard_axis: The axis of the mesh over which state is sharded and gradients are summed.
      sharding_strategy: "optim": optimizer state and main parameters are sharded (ZeRO-1).
      policy: The dtypes of what is stored and sent. None: float32 throughout.
      max_grad_norm: Clips the mean gradient to this global norm, as
        ``optax.clip_by_global_norm``. None: no clipping.
      average_grads: Whether to take the mean. If not, gradients are summed over devices and
        micro-batches, with their weights if they have any.
      bucket_bytes: Upper limit of a bucket of packed small leaves, in bytes.

    Returns:
      A ``DistributedTransformation``. Its ``step(grads, state, params)`` takes local gradients,
      not yet reduced, and the replicated params.

    Raises:
      HyperparameterError, MeshError, PolicyError: An argument is out of range or not supported.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jdistadam as jda
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> tx = jda.distributed_fused_adamw(1e-2, mesh=mesh, max_grad_norm=1.0)
      >>> state = jda.TrainState.create({"w": jnp.ones((3,))}, tx)
      >>> step = jda.train_step(lambda params, x: jnp.mean(x @ params["w"]), tx)
      >>> state, metrics = step(state, jnp.ones((jax.device_count(), 3)))
      >>> round(float(metrics["grad_norm"]), 4)
      1.7321

    References:
      Rajbhandari et al., `ZeRO <https://arxiv.org/abs/1910.02054>`_, 2020. NVIDIA Apex,
      ``DistributedFusedAdam``.
    """
    hyper = Hyperparameters(learning_rate, b1, b2, eps, eps_root, weight_decay, nesterov)
    like_optax = optax.adamw(learning_rate, weight_decay=weight_decay, mask=mask, nesterov=nesterov)
    return _distributed(
        hyper,
        like_optax,
        mask,
        mesh=mesh,
        shard_axis=shard_axis,
        sharding_strategy=sharding_strategy,
        policy=policy,
        max_grad_norm=max_grad_norm,
        average_grads=average_grads,
        bucket_bytes=bucket_bytes,
    )


def distributed_fused_adam(
    learning_rate: ScalarOrSchedule,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    eps_root: Any = 0.0,
    *,
    nesterov: bool = False,
    l2: Any = 0.0,
    mesh: Mesh,
    shard_axis: str = "data",
    sharding_strategy: str = "optim",
    policy: MixedPrecisionPolicy | None = None,
    max_grad_norm: float | None = None,
    average_grads: bool = True,
    bucket_bytes: int = 32 << 20,
) -> DistributedTransformation:
    """Adam for data parallelism: ``distributed_fused_adamw`` with the formula of ``fused_adam``.

    ``l2`` times the main parameters is added to the mean, clipped gradient.

    Args:
      learning_rate: As in ``fused_adam``, and so are the next six.
      b1: Decay rate of the first moment.
      b2: Decay rate of the second moment.
      eps: Added outside the square root.
      eps_root: Added inside the square root.
      nesterov: Whether to use Nesterov momentum.
      l2: L2 regularisation.
      mesh: As in ``distributed_fused_adamw``, and so are all that follow.
      shard_axis: The axis of the mesh over which state is sharded and gradients are summed.
      sharding_strategy: "optim".
      policy: The dtypes of what is stored and sent.
      max_grad_norm: Clips the mean gradient to this global norm.
      average_grads: Whether to take the mean over devices rather than the sum.
      bucket_bytes: Upper limit of a bucket of packed small leaves, in bytes.

    Returns:
      A ``DistributedTransformation``.

    Raises:
      HyperparameterError, MeshError, PolicyError: An argument is out of range or not supported.

    Example:
      >>> import jax
      >>> tx = distributed_fused_adam(1e-2, l2=0.1, mesh=jax.make_mesh((1,), ("data",)))
      >>> tx.config.hyper.l2
      0.1
    """
    hyper = Hyperparameters(learning_rate, b1, b2, eps, eps_root, 0.0, nesterov, l2)
    return _distributed(
        hyper,
        optax.adam(learning_rate, nesterov=nesterov),
        None,
        mesh=mesh,
        shard_axis=shard_axis,
        sharding_strategy=sharding_strategy,
        policy=policy,
        max_grad_norm=max_grad_norm,
        average_grads=average_grads,
        bucket_bytes=bucket_bytes,
    )


def _distributed(
    hyper: Hyperparameters,
    like_optax: optax.GradientTransformation,
    mask: Any,
    *,
    mesh: Mesh,
    shard_axis: str,
    sharding_strategy: str,
    policy: MixedPrecisionPolicy | None,
    max_grad_norm: float | None,
    average_grads: bool,
    bucket_bytes: int,
) -> DistributedTransformation:
    """Checks the arguments and joins the pieces."""
    check_strategy(sharding_strategy)
    check_mesh(mesh, shard_axis)
    policy = MixedPrecisionPolicy() if policy is None else policy
    check_arguments(policy, max_grad_norm, bucket_bytes)
    check_nu_dtype("MixedPrecisionPolicy.nu_dtype", policy.nu_dtype, hyper.b2)
    config = DistributedConfig(
        hyper,
        like_optax,
        mask,
        mesh,
        shard_axis,
        policy,
        max_grad_norm,
        average_grads,
        bucket_bytes,
    )

    def init(params: Any) -> DistributedState:
        trees.check_dtypes(params, name="params")
        if collectives.is_bound(shard_axis):
            return init_local(config, params)
        local = collectives.shard_map(
            lambda p: init_local(config, p), mesh=mesh, in_specs=(P(),), out_specs=tx.specs
        )
        return jax.jit(local)(params)

    def local_step(grads: Any, state: Any, params: Any, **extra_args: Any) -> tuple[Any, Any]:
        del extra_args
        return step_local(config, grads, state, params)

    def step(grads: Any, state: Any, params: Any, **extra_args: Any) -> tuple[Any, Any]:
        refuse_empty_leaves(mesh, params)
        return local_step(grads, state, params, **extra_args)

    def update(grads: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        if params is None:
            raise ValueError(optax._src.base.NO_PARAMS_MSG)
        new, state = step(grads, state, params, **extra_args)
        # In float32, so that apply_updates lands exactly on a 16-bit parameter.
        f32 = jnp.float32
        return jax.tree.map(lambda n, p: n.astype(f32) - p.astype(f32), new, params), state

    sharded = P(shard_axis)
    specs = DistributedState(P(), sharded, sharded, sharded, P())  # type: ignore[arg-type]

    def norm(grads: Any, state: Any) -> jax.Array:
        del state
        return grad_norm_local(config, grads)

    tx = DistributedTransformation.make(init, update, step, local_step, norm, config, specs)
    return tx
