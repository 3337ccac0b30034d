"""Sums of one array over the devices, and the way back; inside ``jax.shard_map``.

A bucket's gradient is reduced in two parts. The *inner* one, over ``shard_axes``, is what every
micro-batch does under "optim_grads"; the *outer* one, over ``replica_axes``, is done once a step.
Under "no_shard" the inner part is all of it.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jdistadam.core import collectives
from jdistadam.core.collectives import Axes
from jdistadam.core.precision import MixedPrecisionPolicy
from jdistadam.distributed.mesh_axes import DataParallel
from jdistadam.kernels import multi_tensor


def reduce_inner(
    parallel: DataParallel, policy: MixedPrecisionPolicy, whole: jax.Array, dim: int
) -> jax.Array:
    """Sums a bucket's gradient over ``shard_axes`` and keeps a shard ("no_shard": all of it)."""
    wire = policy.wire_dtype
    if parallel.strategy == "no_shard":
        if policy.grad_reduce_dtype is None:
            return collectives.all_reduce(collectives.round_to(whole, wire), parallel.data_axes)
        return _pairwise_all_reduce(parallel, whole, _outer_first(parallel), wire)
    if policy.grad_reduce_dtype is None:
        return collectives.reduce_scatter(whole, parallel.shard_axes, dim=dim, wire_dtype=wire)
    return _pairwise_reduce_scatter(parallel, whole, parallel.shard_axes, dim, wire)


def reduce_outer(
    parallel: DataParallel, policy: MixedPrecisionPolicy, shard: jax.Array, dim: int
) -> jax.Array:
    """Sums a shard over ``replica_axes``, and keeps a part of it where state is sharded there."""
    axes = parallel.replica_axes
    if parallel.strategy == "no_shard" or not axes:
        return shard
    shards_more = parallel.outer_strategy == "optim"
    if policy.grad_reduce_dtype is not None:  # what is summed already stays in the dtype of sums
        dtype = policy.grad_reduce_dtype
        if shards_more:
            return _pairwise_reduce_scatter(parallel, shard, axes, dim, dtype)
        return _pairwise_all_reduce(parallel, shard, axes, dtype)
    wire = policy.wire_dtype
    if shards_more:
        return collectives.reduce_scatter(shard, axes, dim=dim, wire_dtype=wire)
    return collectives.all_reduce(collectives.round_to(shard, wire), axes)


def _outer_first(parallel: DataParallel) -> Axes:
    return parallel.replica_axes + parallel.shard_axes


def _pairwise_reduce_scatter(
    parallel: DataParallel, x: jax.Array, axes: Axes, dim: int, wire_dtype: Any
) -> jax.Array:
    """``collectives.reduce_scatter``, but added in float32, pairwise, the last axis first.

    Contributions are rounded to ``wire_dtype`` and sent; partial sums travel on in float32.
    """
    sizes = [parallel.mesh.shape[axis] for axis in axes]
    parts = math.prod(sizes)
    shape = (*x.shape[:dim], *sizes, x.shape[dim] // parts, *x.shape[dim + 1 :])
    x = collectives.keep_cast(x.reshape(shape), wire_dtype)
    for i in reversed(range(len(axes))):
        received = collectives.all_to_all(x, axes[i], dim=dim + i)
        (x,) = multi_tensor.sum_contributions([received])
    return x


def _pairwise_all_reduce(
    parallel: DataParallel, x: jax.Array, axes: Axes, wire_dtype: Any
) -> jax.Array:
    """The same sums on all devices: each adds a part of the array, and they gather the parts."""
    flat = jnp.pad(x.reshape(-1), (0, -x.size % parallel.size(axes)))
    shard = _pairwise_reduce_scatter(parallel, flat, axes, 0, wire_dtype)
    return collectives.all_gather(shard, axes, dim=0)[: x.size].reshape(x.shape)


def gather_shards(
    parallel: DataParallel,
    policy: MixedPrecisionPolicy,
    shard: jax.Array,
    axes: Axes,
    dim: int,
    to: str = "invarying",
) -> jax.Array:
    """Concatenates parameter shards over ``axes``, the most significant first.

    They travel in ``param_comm_dtype``; what arrives, and the device's own, is rounded to it.
    """
    dtype = shard.dtype
    comm_dtype = dtype if policy.param_comm_dtype is None else policy.param_comm_dtype
    x = collectives.round_to(shard, comm_dtype)
    # From the least significant axis on: each gather makes what the next one's devices hold whole.
    inner = tuple(axis for axis in axes if axis in parallel.shard_axes)
    outer = tuple(axis for axis in axes if axis not in inner)
    for group in (outer, inner):
        x = collectives.all_gather(x, group, dim=dim, to=to)
    return x.astype(dtype)
