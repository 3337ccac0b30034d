"""AdamW with its state sharded over the devices of a mesh (ZeRO-1)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jdistadam import buckets, collectives, kernel, trees
from jdistadam.coefficients import coefficient_rows
from jdistadam.config import Hyperparameters, MixedPrecisionPolicy, ScalarOrSchedule, check_strategy
from jdistadam.distributed_checks import (
    check_arguments,
    check_mesh,
    check_step,
    refuse_empty_leaves,
)
from jdistadam.layout import Bucket, Layout, describe_leaves, make_layout
from jdistadam.optimizer import FusedTransformation, decay_groups


class DistributedState(NamedTuple):
    """The state of a distributed optimizer: a few flat arrays, whatever the number of leaves."""

    count: jax.Array  # type: ignore[assignment]  # shape (), int32: steps taken; replicated
    main_params: jax.Array  # shape (num_shards * flat_size,), float32; sharded
    mu: jax.Array  # the same shape, policy.mu_dtype; sharded
    nu: jax.Array  # the same shape, policy.nu_dtype; sharded
    grad_norm: (
        jax.Array
    )  # shape (), float32: global norm of the last mean gradient, before clipping


@dataclasses.dataclass(frozen=True)
class DistributedConfig:
    """What ``distributed_fused_adamw`` was given, checked."""

    hyper: Hyperparameters
    mask: Any
    mesh: Mesh
    shard_axis: str
    policy: MixedPrecisionPolicy
    max_grad_norm: float | None
    average_grads: bool
    bucket_bytes: int

    @property
    def num_shards(self) -> int:
        """Number of devices that share the state."""
        return self.mesh.shape[self.shard_axis]

    def layout(self, params: Any) -> Layout:
        """Returns where everything lies, for a tree of arrays or shapes."""
        leaves = describe_leaves(params, decay_groups(self.mask, params))
        return make_layout(leaves, self.num_shards, self.bucket_bytes)


class DistributedTransformation(FusedTransformation):
    """``init``, ``update`` and ``step`` over a mesh, with what they were made from.

    ``update`` and ``step`` run inside ``jax.shard_map`` over ``config.mesh``; ``init`` runs inside
    or outside of it. ``train_step`` does all of this for you.
    """

    config: DistributedConfig

    def state_specs(self) -> DistributedState:
        """Returns the PartitionSpecs of the state, for shard_map's in_specs and out_specs."""
        sharded = P(self.config.shard_axis)
        return DistributedState(P(), sharded, sharded, sharded, P())  # type: ignore[arg-type]


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
      average_grads: Whether to divide the summed gradients by N.
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
    check_strategy(sharding_strategy)
    check_mesh(mesh, shard_axis)
    policy = MixedPrecisionPolicy() if policy is None else policy
    check_arguments(policy, max_grad_norm, bucket_bytes)
    config = DistributedConfig(
        Hyperparameters(learning_rate, b1, b2, eps, eps_root, weight_decay, nesterov),
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
            return _init_local(config, params)
        local = collectives.shard_map(
            lambda p: _init_local(config, p), mesh=mesh, in_specs=(P(),), out_specs=tx.state_specs()
        )
        return jax.jit(local)(params)

    def step(grads: Any, state: Any, params: Any, **extra_args: Any) -> tuple[Any, Any]:
        del extra_args
        refuse_empty_leaves(mesh, params)
        return step_local(config, grads, state, params)

    def update(grads: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        del extra_args
        if params is None:
            raise ValueError(optax._src.base.NO_PARAMS_MSG)
        refuse_empty_leaves(mesh, params)
        new, state = step_local(config, grads, state, params)
        # In float32, so that apply_updates lands exactly on a 16-bit parameter.
        f32 = jnp.float32
        return jax.tree.map(lambda n, p: n.astype(f32) - p.astype(f32), new, params), state

    tx = DistributedTransformation(init, update, step)
    tx.config = config
    return tx


def _init_local(config: DistributedConfig, params: Any) -> DistributedState:
    """This device's part of the initial state."""
    layout = config.layout(params)
    index = collectives.axis_index(config.shard_axis)
    main = buckets.flat_shard(
        layout, jax.tree.leaves(params), index, config.policy.main_params_dtype
    )
    return DistributedState(
        jnp.zeros((), jnp.int32),
        main,
        jnp.zeros_like(main, dtype=config.policy.mu_dtype),
        jnp.zeros_like(main, dtype=config.policy.nu_dtype),
        jnp.zeros((), jnp.float32),
    )


def step_local(
    config: DistributedConfig, grads: Any, state: DistributedState, params: Any
) -> tuple[Any, DistributedState]:
    """One step on one device: reduce-scatter, norm, kernel, all-gather."""
    layout = config.layout(params)
    check_step(config.shard_axis, config.policy, layout, grads, state, params)
    shards = reduce_gradients(config, layout, jax.tree.leaves(grads))
    inv_scale, grad_norm = _scale_and_norm(config, shards)
    rows = coefficient_rows(config.hyper, state.count, (True, False))
    scalars = kernel.Scalars(rows, inv_scale, jnp.zeros((), jnp.bool_))
    flats, new_shards = _update_shards(config, layout, scalars, shards, state)
    leaves: list[Any] = list(jax.tree.leaves(params))  # zero-size leaves stay as they are
    for bucket, shard in zip(layout.buckets, new_shards, strict=True):
        whole = collectives.all_gather(shard, config.shard_axis, dim=bucket.dim or 0)
        for i, leaf in buckets.leaves_of_bucket(layout, bucket, whole):
            leaves[i] = leaf
    new_params = jax.tree.unflatten(jax.tree.structure(params), leaves)
    return new_params, DistributedState(optax.safe_increment(state.count), *flats, grad_norm)


def reduce_gradients(
    config: DistributedConfig, layout: Layout, grads: Sequence[Any]
) -> list[jax.Array]:
    """Returns this device's shard of every bucket's summed gradient, in the wire dtype."""
    wire_dtype = config.policy.wire_dtype
    return [
        collectives.reduce_scatter(
            buckets.bucket_array(bucket, grads, jnp.promote_types(bucket.dtype, wire_dtype)),
            config.shard_axis,
            dim=bucket.dim or 0,
            wire_dtype=wire_dtype,
        )
        for bucket in layout.buckets
    ]


def _scale_and_norm(config: DistributedConfig, shards: Sequence[jax.Array]) -> tuple[Any, Any]:
    """Returns what gradients are multiplied by, and the global norm before clipping; float32."""
    squares = [jnp.sum(jnp.square(x.astype(jnp.float32))) for x in shards]
    total = collectives.all_reduce(sum(squares, start=jnp.float32(0)), config.shard_axis)
    mean = jnp.float32(1 / config.num_shards if config.average_grads else 1)
    norm = jnp.sqrt(total) * mean
    if config.max_grad_norm is None:
        return mean, norm
    max_norm = jnp.float32(config.max_grad_norm)
    # Written so that a norm that is not a number reaches every gradient, as in optax.
    return jnp.where(norm <= max_norm, mean, mean * (max_norm / norm)), norm


def _update_shards(
    config: DistributedConfig,
    layout: Layout,
    scalars: kernel.Scalars,
    shards: Sequence[jax.Array],
    state: DistributedState,
) -> tuple[tuple[Any, Any, Any], list[jax.Array]]:
    """Updates the flat state in place; returns it and each bucket's new parameter shard.

    One kernel call for each parameter dtype, each in place on its part of the whole flat arrays:
    slicing them in XLA would copy the state.
    """
    flats = (state.main_params, state.mu, state.nu)
    new_shards: list[Any] = [None] * len(shards)
    by_dtype: dict[Any, list[int]] = {}
    for i, bucket in enumerate(layout.buckets):
        by_dtype.setdefault(bucket.dtype, []).append(i)
    for dtype, indices in by_dtype.items():
        mine: list[Bucket] = [layout.buckets[i] for i in indices]
        spec = kernel.Spec(
            "step_and_cast",
            groups=tuple(bucket.group for bucket in mine),
            nesterov=config.hyper.nesterov,
            out_dtype=dtype,
            flat=frozenset({"params", "mu", "nu"}),
            sizes=tuple(bucket.shard_size for bucket in mine),
            offsets=tuple(bucket.offset for bucket in mine),
        )
        grads = tuple(shards[i] for i in indices)
        results = kernel.adam(spec, scalars, kernel.Operands(grads, *((flat,) for flat in flats)))
        flats = (results.params[0], results.mu[0], results.nu[0])
        for i, shard in zip(indices, results.out, strict=True):
            new_shards[i] = shard
    return flats, new_shards
