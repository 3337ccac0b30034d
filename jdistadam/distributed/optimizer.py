"""Adam and AdamW for data parallelism: what is sharded and communicated, as the caller says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import optax
from jax.sharding import Mesh

from jdistadam.core.groups import make_groups
from jdistadam.core.hyperparameters import Hyperparameters, ScalarOrSchedule
from jdistadam.core.loss_scale import DynamicLossScale, check_loss_scale
from jdistadam.core.precision import MixedPrecisionPolicy, check_nu_dtype
from jdistadam.distributed.checks import check_arguments, check_stacked
from jdistadam.distributed.communication import choose_communication
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.mesh_axes import make_data_parallel
from jdistadam.distributed.transformation import DistributedTransformation, make_distributed


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
    shard_axis: str | tuple[str, ...] = "data",
    replica_axis: str | tuple[str, ...] | None = None,
    sharding_strategy: str = "optim",
    outer_sharding_strategy: str = "no_shard",
    reshard_after_forward: bool = True,
    policy: MixedPrecisionPolicy | None = None,
    max_grad_norm: float | None = None,
    loss_scale: float | DynamicLossScale | None = None,
    average_grads: bool = True,
    bucket_bytes: int = 32 << 20,
    param_specs: Any = None,
    communication: str = "auto",
    stacked: Callable[[str], bool] | None = None,
    param_labels: Any = None,
    groups: Mapping[str, Mapping[str, Any]] | None = None,
) -> DistributedTransformation:
    r"""AdamW for data parallelism, its state sharded over a mesh.

    With the default strategy each of :math:`N` devices keeps :math:`1/N` of the float32 main
    parameters, :math:`m` and :math:`v`. A step reduce-scatters the local gradients, updates the
    shard with the fused kernel and all-gathers the new parameters:

    .. math::

      \bar g = \frac1N \sum_r g_r, \qquad
      g = s \sum_r g_r, \qquad s = \frac1N \min\left(1, \frac{G}{\lVert \bar g \rVert}\right)

    with :math:`G` = ``max_grad_norm``, followed by the formula of ``fused_adamw``. The sum is in
    ``policy.grad_comm_dtype``; the scalar :math:`s`, which also holds the inverse of the loss
    scale, is float32 and applied inside the kernel.

    What a device holds and sends, for :math:`P` parameters and :math:`M` micro-batches:

    ============================ ======= ================= ======= =======================
    sharding_strategy            state   accumulated grads params  sent, times (N - 1) / N
    ============================ ======= ================= ======= =======================
    "no_shard" (DDP)             P       P                 P       grads twice
    "optim" (ZeRO-1)             P / N   P                 P       grads, params
    "optim_grads" (ZeRO-2)       P / N   P / N             P       grads M times, params
    "optim_grads_params" (FSDP)  P / N   P / N             P / N   grads M times, params
    the same, resharding nothing P / N   P                 P / N   grads, params
    ============================ ======= ================= ======= =======================

    Args:
      learning_rate: As in ``fused_adamw``, and so are the next six.
      b1: Decay rate of the first moment.
      b2: Decay rate of the second moment.
      eps: Added outside the square root.
      eps_root: Added inside the square root.
      weight_decay: Decoupled weight decay, or a schedule.
      mask: Where weight decay applies. A function of params sees the shapes that they have before
        anything is sharded, and so does one for ``param_labels``.
      nesterov: Whether to use Nesterov momentum.
      mesh: The mesh, e.g. ``jax.make_mesh((8,), ("data",))``.
      shard_axis: The axis of the mesh, or a tuple of axes, the outermost first, over which state
        is sharded and gradients are summed.
      replica_axis: Further axes that carry data, across which the shards are replicated (hybrid
        sharding): gradients are summed over ``shard_axis`` first, the shards then over these.
      sharding_strategy: "no_shard"; "optim": main parameters and moments are sharded (ZeRO-1);
        "optim_grads": every micro-batch's gradients are reduced at once, and shards of them are
        accumulated (ZeRO-2); "optim_grads_params": leaves of 16384 elements or more with a
        dimension that divides are sharded too (ZeRO-3), see ``gather_params``.
      outer_sharding_strategy: "optim": state is sharded over ``replica_axis`` as well.
      reshard_after_forward: Under "optim_grads_params". True: layers of ``stacked`` leaves are
        gathered one by one, again in the backward pass, and gradients are reduced in every
        micro-batch. False: a step gathers all parameters once, beside the forward pass, sums whole
        gradients over its micro-batches, and reduces them once; between steps devices hold shards
        all the same. States can be exchanged between the two. See docs/reshard_after_forward.md.
      policy: The dtypes of what is stored and sent. None: float32 throughout.
      max_grad_norm: Clips the mean gradient to this global norm, as
        ``optax.clip_by_global_norm``. None: no clipping.
      loss_scale: What the loss was multiplied by before it was differentiated, a number or a
        ``DynamicLossScale``; ``train_step`` does so, in a custom training loop use ``scale_loss``.
        The order is unscale, norm, clip, step. A step with a non-finite gradient on any device
        is skipped and counted, and changes no bit of params, moments and count. With 1.0 nothing
        is scaled, but such steps are skipped. None: they are not.
      average_grads: Whether to take the mean. If not, gradients are summed over devices and
        micro-batches, with their weights if they have any.
      bucket_bytes: Upper limit of a bucket of packed small leaves, in bytes.
      param_specs: For models that are partitioned over the mesh's other axes: a tree of
        PartitionSpecs over these, or of NamedShardings, with None for leaves that are not sharded;
        a prefix of params or a function of them. ``flax.linen.get_partition_spec`` and
        ``nnx.get_partition_spec`` give one. ``train_step`` leaves these axes to XLA. In a
        ``jax.shard_map`` of your own over all axes, gradients of leaves that are not sharded over
        such an axis must be the same along it.
      communication: By which means a step moves bytes. "xla": its collectives. "peer": one kernel
        that reads the other GPUs' gradients, updates, and writes into their parameters, for GPUs
        (or virtual CPU devices) of one process; raises where it is not supported, as in
        ``distributed/communication.py``. "auto": "peer" on GPUs where it is supported, with
        ``grad_reduce_dtype=jnp.float32`` among the conditions, else "xla". Both give the same bits.
      stacked: For models that scan over layers: a predicate on the path of a leaf, such as
        ``lambda path: "layers" in path`` for ``params['layers']['w']``, that says whether its first
        dimension is the layers. What is sharded of these leaves is sharded within a layer. The
        model calls ``gather_params`` in its scan: under "optim_grads_params" ``train_step`` leaves
        these leaves sharded, with ``reshard_after_forward``; else layers are whole already. Their
        gradients are reduced layer by layer in the backward pass where strategies shard gradients.
      param_labels: A tree of labels, a prefix of params or a function of them.
      groups: For every label a dict of what differs from the arguments above: ``lr_scale``
        (multiplies the learning rate), ``weight_decay``, ``b1``, ``b2``, or ``frozen=True``: no
        state, nothing communicated, params as they are. It costs no further kernel launch.

    Returns:
      A ``DistributedTransformation``. Its ``step(grads, state, params)`` takes local gradients,
      not yet reduced, and the params as ``param_specs(params)`` places them.

    Raises:
      HyperparameterError, MeshError, PolicyError: An argument is out of range, or two contradict
        each other.

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
    hyper = Hyperparameters(
        learning_rate=learning_rate,
        b1=b1,
        b2=b2,
        eps=eps,
        eps_root=eps_root,
        weight_decay=weight_decay,
        nesterov=nesterov,
    )
    like_optax = optax.adamw(learning_rate, weight_decay=weight_decay, mask=mask, nesterov=nesterov)
    return _distributed(
        hyper,
        like_optax,
        mask,
        mesh=mesh,
        shard_axis=shard_axis,
        replica_axis=replica_axis,
        sharding_strategy=sharding_strategy,
        outer_sharding_strategy=outer_sharding_strategy,
        reshard_after_forward=reshard_after_forward,
        policy=policy,
        max_grad_norm=max_grad_norm,
        loss_scale=loss_scale,
        average_grads=average_grads,
        bucket_bytes=bucket_bytes,
        param_specs=param_specs,
        communication=communication,
        stacked=stacked,
        param_labels=param_labels,
        groups=groups,
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
    shard_axis: str | tuple[str, ...] = "data",
    replica_axis: str | tuple[str, ...] | None = None,
    sharding_strategy: str = "optim",
    outer_sharding_strategy: str = "no_shard",
    reshard_after_forward: bool = True,
    policy: MixedPrecisionPolicy | None = None,
    max_grad_norm: float | None = None,
    loss_scale: float | DynamicLossScale | None = None,
    average_grads: bool = True,
    bucket_bytes: int = 32 << 20,
    param_specs: Any = None,
    communication: str = "auto",
    stacked: Callable[[str], bool] | None = None,
    param_labels: Any = None,
    groups: Mapping[str, Mapping[str, Any]] | None = None,
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
      shard_axis: The axes of the mesh over which state is sharded and gradients are summed.
      replica_axis: Further axes that carry data.
      sharding_strategy: "no_shard", "optim", "optim_grads" or "optim_grads_params".
      outer_sharding_strategy: "no_shard" or "optim".
      reshard_after_forward: Whether each layer and micro-batch communicates, or each step.
      policy: The dtypes of what is stored and sent.
      max_grad_norm: Clips the mean gradient to this global norm.
      loss_scale: What the loss was multiplied by.
      average_grads: Whether to take the mean over devices rather than the sum.
      bucket_bytes: Upper limit of a bucket of packed small leaves, in bytes.
      param_specs: Where params are sharded over other axes.
      communication: As in ``distributed_fused_adamw``.
      stacked: Which leaves are scanned layers.
      param_labels: Labels of the params.
      groups: What differs between labels; ``weight_decay`` in a group is decoupled.

    Returns:
      A ``DistributedTransformation``.

    Raises:
      HyperparameterError, MeshError, PolicyError: As ``distributed_fused_adamw``.

    Example:
      >>> import jax
      >>> tx = distributed_fused_adam(1e-2, l2=0.1, mesh=jax.make_mesh((1,), ("data",)))
      >>> tx.config.hyper.l2
      0.1
    """
    hyper = Hyperparameters(
        learning_rate=learning_rate,
        b1=b1,
        b2=b2,
        eps=eps,
        eps_root=eps_root,
        nesterov=nesterov,
        l2=l2,
    )
    return _distributed(
        hyper,
        optax.adam(learning_rate, nesterov=nesterov),
        None,
        mesh=mesh,
        shard_axis=shard_axis,
        replica_axis=replica_axis,
        sharding_strategy=sharding_strategy,
        outer_sharding_strategy=outer_sharding_strategy,
        reshard_after_forward=reshard_after_forward,
        policy=policy,
        max_grad_norm=max_grad_norm,
        loss_scale=loss_scale,
        average_grads=average_grads,
        bucket_bytes=bucket_bytes,
        param_specs=param_specs,
        communication=communication,
        stacked=stacked,
        param_labels=param_labels,
        groups=groups,
    )


def _distributed(
    hyper: Hyperparameters,
    like_optax: optax.GradientTransformation,
    mask: Any,
    *,
    mesh: Mesh,
    shard_axis: Any,
    replica_axis: Any,
    sharding_strategy: str,
    outer_sharding_strategy: str,
    reshard_after_forward: bool,
    policy: MixedPrecisionPolicy | None,
    max_grad_norm: float | None,
    loss_scale: float | DynamicLossScale | None,
    average_grads: bool,
    bucket_bytes: int,
    param_specs: Any,
    communication: str,
    stacked: Callable[[str], bool] | None,
    param_labels: Any,
    groups: Any,
) -> DistributedTransformation:
    """Checks the arguments and joins the pieces."""
    policy = MixedPrecisionPolicy() if policy is None else policy
    check_arguments(policy, max_grad_norm, bucket_bytes, average_grads)
    parallel = make_data_parallel(
        mesh,
        shard_axis=shard_axis,
        replica_axis=replica_axis,
        strategy=sharding_strategy,
        outer_strategy=outer_sharding_strategy,
        reshard_after_forward=reshard_after_forward,
        policy=policy,
        has_param_specs=param_specs is not None,
    )
    check_loss_scale(loss_scale)
    check_stacked(stacked)
    made_groups = make_groups(hyper, mask, param_labels, groups)
    for group in filter(None, made_groups.hypers.values()):
        low = policy.low_precision(group.b1, group.b2)
        name = "MixedPrecisionPolicy.nu_dtype"
        check_nu_dtype(name, policy.nu_dtype, group.b2, is_random=low.is_random)
    config = DistributedConfig(
        hyper=hyper,
        like_optax=like_optax,
        groups=made_groups,
        parallel=parallel,
        policy=policy,
        max_grad_norm=max_grad_norm,
        loss_scale=loss_scale,
        average_grads=average_grads,
        bucket_bytes=bucket_bytes,
        given_param_specs=param_specs,
        stacked=stacked,
        communication=choose_communication(communication, parallel, policy),
    )
    return make_distributed(config)
