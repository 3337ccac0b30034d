"""What every device does in a distributed step; runs inside ``jax.shard_map``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jdistadam import buckets, collectives, kernel, reductions, trees
from jdistadam.coefficients import coefficient_rows
from jdistadam.config import Hyperparameters, MixedPrecisionPolicy
from jdistadam.distributed_checks import check_grads, check_inside, check_scalar, check_state
from jdistadam.layout import Bucket, Layout, describe_leaves, make_layout
from jdistadam.masks import decay_groups


class DistributedState(NamedTuple):
    """The state of a distributed optimizer: a few flat arrays, whatever the number of leaves.

    Attributes:
      count: Shape (), int32: steps taken; replicated.
      main_params: Shape (num_shards * main_size,), float32, sharded. None where every parameter is
        its own main parameter: in float32, on a mesh of one device.
      mu: Shape (num_shards * flat_size,), policy.mu_dtype, sharded.
      nu: The same shape, policy.nu_dtype, sharded.
      grad_norm: Shape (), float32: global norm of the last mean gradient, before clipping.
    """

    count: jax.Array  # type: ignore[assignment]
    main_params: jax.Array | None
    mu: jax.Array
    nu: jax.Array
    grad_norm: jax.Array


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["sums", "weight"], meta_fields=["dtypes"]
)
@dataclasses.dataclass(frozen=True)
class AccumulatedGrads:
    """Gradients of several micro-batches, as ``tx.accumulate`` returns them.

    Attributes:
      sums: Tree like params: the weighted sum of this device's gradients, main_grads_dtype.
      weight: Shape (), float32: the sum of the weights.
      dtypes: The dtype of each parameter, on which the layout depends.
    """

    sums: Any
    weight: jax.Array
    dtypes: tuple[str, ...]

    def like_params(self) -> Any:
        """Returns shapes and dtypes of the params."""
        shapes = zip(jax.tree.leaves(self.sums), self.dtypes, strict=True)
        leaves = [jax.ShapeDtypeStruct(x.shape, dtype) for x, dtype in shapes]
        return jax.tree.unflatten(jax.tree.structure(self.sums), leaves)


@dataclasses.dataclass(frozen=True)
class DistributedConfig:
    """What the distributed optimizer was given, checked."""

    hyper: Hyperparameters
    like_optax: optax.GradientTransformation  # what state to_optax_state returns
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


def find_state(opt_state: Any) -> DistributedState:
    """Returns the DistributedState inside of what may be the state of a chain."""
    parts = jax.tree.leaves(opt_state, is_leaf=is_distributed_state)
    return next(part for part in parts if is_distributed_state(part))


def is_distributed_state(x: Any) -> bool:
    """Whether ``x`` is a DistributedState."""
    return isinstance(x, DistributedState)


def init_local(config: DistributedConfig, params: Any) -> DistributedState:
    """This device's part of the initial state."""
    layout = config.layout(params)
    main = main_shard(config, layout, params)
    # Varying over the axis also for the type checker of shard_map, as shards are.
    zeros = collectives.to_varying(jnp.zeros(layout.flat_size), config.shard_axis)
    return DistributedState(
        jnp.zeros((), jnp.int32),
        main if layout.main_size else None,
        zeros.astype(config.policy.mu_dtype),
        zeros.astype(config.policy.nu_dtype),
        jnp.zeros((), jnp.float32),
    )


def main_shard(config: DistributedConfig, layout: Layout, params: Any) -> jax.Array:
    """This device's flat array of main parameters, with the values of ``params``."""
    index = collectives.axis_index(config.shard_axis)
    dtype = config.policy.main_params_dtype
    return buckets.flat_shard(layout, jax.tree.leaves(params), index, dtype, main=True)


def step_local(
    config: DistributedConfig, grads: Any, state: DistributedState, params: Any
) -> tuple[Any, DistributedState]:
    """One step on one device: reduce-scatter, norm, kernel, all-gather."""
    check_inside(config.shard_axis, "step")
    trees.check_dtypes(params, name="params")
    layout = config.layout(params)
    check_state(config.policy, layout, state)
    grads, mean = _grads_and_mean(config, grads, params)
    shards = reduce_gradients(config, layout, jax.tree.leaves(grads))
    grad_norm = _norm(config, shards, mean)
    rows = coefficient_rows(config.hyper, state.count, (True, False))
    inv_scale = _clipped(config, mean, grad_norm)
    scalars = kernel.Scalars(rows, inv_scale, jnp.zeros((), jnp.bool_))
    leaves: list[Any] = list(jax.tree.leaves(params))  # zero-size leaves stay as they are
    flats, new_shards = _update_shards(config, layout, scalars, shards, state, leaves)
    for bucket, shard in zip(layout.buckets, new_shards, strict=True):
        whole = collectives.all_gather(shard, config.shard_axis, dim=bucket.dim or 0)
        for i, leaf in buckets.leaves_of_bucket(layout, bucket, whole):
            leaves[i] = leaf
    new_params = jax.tree.unflatten(jax.tree.structure(params), leaves)
    return new_params, DistributedState(optax.safe_increment(state.count), *flats, grad_norm)


def grad_norm_local(config: DistributedConfig, grads: Any) -> jax.Array:
    """The global norm of the mean gradient, reduced as a step reduces it."""
    check_inside(config.shard_axis, "grad_norm")
    params = grads.like_params() if isinstance(grads, AccumulatedGrads) else grads
    layout = config.layout(params)
    grads, mean = _grads_and_mean(config, grads, params)
    return _norm(config, reduce_gradients(config, layout, jax.tree.leaves(grads)), mean)


def init_grads_local(config: DistributedConfig, params: Any) -> AccumulatedGrads:
    """A sum of no gradients."""
    check_inside(config.shard_axis, "init_grads")
    dtype = config.policy.main_grads_dtype
    zeros = AccumulatedGrads(
        jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), params),
        jnp.zeros((), jnp.float32),
        tuple(jnp.dtype(x.dtype).name for x in jax.tree.leaves(params)),
    )
    return jax.tree.map(lambda x: collectives.to_varying(x, config.shard_axis), zeros)


def accumulate_local(
    config: DistributedConfig, acc: AccumulatedGrads, grads: Any, weight: Any
) -> AccumulatedGrads:
    """Adds one micro-batch's gradients, in main_grads_dtype."""
    check_inside(config.shard_axis, "accumulate")
    check_grads(config.shard_axis, grads, acc.sums, acc.weight, like_name="accumulated grads")
    check_scalar("weight", 1 if weight is None else weight)
    dtype = config.policy.main_grads_dtype

    def add(total: jax.Array, grad: jax.Array) -> jax.Array:
        grad = grad.astype(dtype)
        return total + (grad if weight is None else weighted(grad, weight))

    new_weight = acc.weight + jnp.asarray(1 if weight is None else weight, jnp.float32)
    return dataclasses.replace(acc, sums=jax.tree.map(add, acc.sums, grads), weight=new_weight)


def weighted(x: jax.Array, weight: Any) -> jax.Array:
    """``x * weight``, zero where the weight is: the mean over no tokens is NaN, and counts not."""
    weight = jnp.asarray(weight, x.dtype)
    return jnp.where(weight > 0, x * weight, jnp.zeros((), x.dtype))


def mean_factor(config: DistributedConfig, weight: Any) -> jax.Array:
    """What a sum over devices is multiplied by: one over the sum of all weights, or zero.

    Args:
      config: The configuration.
      weight: This device's weight, a traced float32 scalar. None: 1 on every device.
    """
    if weight is None:
        return jnp.float32(1 / config.num_shards)
    total = collectives.all_reduce(weight, config.shard_axis)
    return jnp.where(total > 0, 1 / total, 0)


def _grads_and_mean(config: DistributedConfig, grads: Any, params: Any) -> tuple[Any, jax.Array]:
    """Checks the gradients; returns them, and what their sum over devices is multiplied by."""
    weight = None
    if isinstance(grads, AccumulatedGrads):
        grads, weight = grads.sums, grads.weight
    marker = collectives.axis_index(config.shard_axis)  # varies, wherever types say so
    check_grads(config.shard_axis, grads, params, marker, like_name="params")
    return grads, mean_factor(config, weight) if config.average_grads else jnp.float32(1)


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


def _norm(config: DistributedConfig, shards: Sequence[jax.Array], mean: jax.Array) -> jax.Array:
    """The global norm of the mean gradient, float32."""
    squares, _ = reductions.sum_of_squares(shards)
    return jnp.sqrt(collectives.all_reduce(squares, config.shard_axis)) * mean


def _clipped(config: DistributedConfig, mean: jax.Array, norm: jax.Array) -> jax.Array:
    """What every summed gradient is multiplied by: the mean, and the clip on top of it."""
    if config.max_grad_norm is None:
        return mean
    max_norm = jnp.float32(config.max_grad_norm)
    # Written so that a norm that is not a number reaches every gradient, as in optax.
    return jnp.where(norm <= max_norm, mean, mean * (max_norm / norm))


def _update_shards(
    config: DistributedConfig,
    layout: Layout,
    scalars: kernel.Scalars,
    shards: Sequence[jax.Array],
    state: DistributedState,
    params: Sequence[Any],
) -> tuple[tuple[Any, Any, Any], list[jax.Array]]:
    """Updates the flat state in place; returns it and each bucket's new parameter shard.

    One kernel call for each parameter dtype, each in place on its part of the whole flat arrays:
    slicing them in XLA would copy the state. Parameters without a main copy are updated themselves.
    """
    main, mu, nu = state.main_params, state.mu, state.nu
    new_shards: list[Any] = [None] * len(shards)
    calls: dict[Any, list[int]] = {}
    for i, bucket in enumerate(layout.buckets):
        calls.setdefault((bucket.dtype, bucket.has_main), []).append(i)
    for (dtype, has_main), indices in calls.items():
        mine: list[Bucket] = [layout.buckets[i] for i in indices]
        spec = kernel.Spec(
            "step_and_cast" if has_main else "step",
            groups=tuple(bucket.group for bucket in mine),
            nesterov=config.hyper.nesterov,
            out_dtype=dtype if has_main else None,
            flat=frozenset({"params", "mu", "nu"} if has_main else {"mu", "nu"}),
            sizes=tuple(bucket.shard_size for bucket in mine),
            offsets=tuple(bucket.offset for bucket in mine),
        )
        grads = tuple(shards[i] for i in indices)
        updated = (main,) if has_main else [buckets.bucket_array(b, params, dtype) for b in mine]
        results = kernel.adam(spec, scalars, kernel.Operands(grads, updated, (mu,), (nu,)))
        (mu,), (nu,) = results.mu, results.nu
        if has_main:
            (main,) = results.params
        for i, shard in zip(indices, results.out if has_main else results.params, strict=True):
            new_shards[i] = shard
    return (main, mu, nu), new_shards
