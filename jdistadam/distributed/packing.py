"""Leaves packed into buckets and cut into shards, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jdistadam.core import collectives, trees
from jdistadam.distributed.layout import Bucket, Layout, aligned
from jdistadam.distributed.mesh_axes import DataParallel
from jdistadam.kernels import multi_tensor, native


class Span(NamedTuple):
    """A device's shard of a bucket, or a range of it: what a kernel call steps.

    Attributes:
      bucket_index: The index of the bucket in the layout.
      bucket: The bucket. For a range: the same leaf and dtypes, the positions of the range, and its
        elements as a packed array.
      start: The first element of the range in the shard; None for the whole shard.
    """

    bucket_index: int
    bucket: Bucket
    start: int | None = None

    def of(self, shard: Any) -> Any:
        """The span's elements of an array like the bucket's shard; None stays None."""
        if self.start is None or shard is None:
            return shard
        end = self.start + self.bucket.shard_size
        return native.unfused(lax.slice_in_dim(shard.reshape(-1), self.start, end))


def joined(bucket: Bucket, spans: dict[int, jax.Array]) -> jax.Array:
    """Returns a bucket's shard from its spans, by their first elements; the inverse of ``of``."""
    if len(spans) == 1:
        return spans[0]
    in_order = [spans[start] for start in sorted(spans)]
    return jnp.concatenate(in_order).reshape(bucket.shard_shape)


def bucket_array(bucket: Bucket, leaves: Sequence[Any], dtype: Any) -> jax.Array:
    """Returns a bucket's content: its leaf or a shard of it in place, or its leaves packed."""
    if not bucket.is_packed:
        return leaves[bucket.leaf].astype(dtype)
    members = [jnp.asarray(leaves[i]) for i in bucket.leaves]
    dtypes = {x.dtype for x in members}
    if len(dtypes) > 1 or not dtypes <= set(trees.STORAGE_DTYPES):
        members = [x.astype(dtype) for x in members]
    offsets = bucket.starts(x.size for x in members)
    return multi_tensor.pack(members, offsets[:-1], offsets[-1] + bucket.padding, dtype)


def shard_of(whole: Any, index: Any, num_shards: int, dim: int) -> jax.Array:
    """Returns shard ``index`` of an array that is cut along ``dim``."""
    size = whole.shape[dim] // num_shards
    return lax.dynamic_slice_in_dim(whole, index * size, size, dim)


def state_shard(
    parallel: DataParallel, bucket: Bucket, params: Sequence[Any], dtype: Any
) -> jax.Array:
    """Returns the shard of a bucket's parameters that matches this device's state."""
    array = bucket_array(bucket, params, dtype)
    axes = axes_left_to_cut(parallel, bucket, array.shape)
    if not axes:
        return array
    index = collectives.axis_index(axes)
    return shard_of(array, index, parallel.size(axes), bucket.cut_dim)


def axes_left_to_cut(
    parallel: DataParallel, bucket: Bucket, shape: tuple[int, ...]
) -> tuple[str, ...]:
    """Returns the axes over which a bucket's array of this shape must still be cut into shards.

    These are the axes over which the state is sharded, without those that already cut the array.
    """
    parallel = parallel.without(bucket.tensor_axes)
    axes = parallel.state_axes
    if bucket.is_sharded_param and shape == bucket.inner_shape:
        return tuple(axis for axis in axes if axis not in parallel.shard_axes)
    return axes


def flat_of(buckets: Sequence[Bucket], shards: Sequence[Any]) -> jax.Array:
    """Puts one device's float32 shards of consecutive buckets into an array; gaps are zero."""
    arrays, end = [jnp.zeros((0,), jnp.float32)], 0
    for bucket, shard in zip(buckets, shards, strict=True):
        start = bucket.offset - buckets[0].offset
        arrays += [jnp.zeros((start - end,), jnp.float32), shard.reshape(-1)]
        end = start + bucket.shard_size
    arrays.append(jnp.zeros((aligned(end) - end,), jnp.float32))
    return jnp.concatenate(arrays)


def leaves_of_bucket(layout: Layout, bucket: Bucket, whole: Any) -> list[tuple[int, jax.Array]]:
    """Cuts a bucket's whole content into its leaves: pairs of leaf index and array."""
    if not bucket.is_packed:
        return [(bucket.leaf, whole)]
    shapes = [layout.leaves[i].shape for i in bucket.leaves]
    offsets = bucket.starts(layout.leaves[i].size for i in bucket.leaves)
    leaves = multi_tensor.unpack(whole, shapes, offsets[:-1], whole.dtype)
    return list(zip(bucket.leaves, leaves, strict=True))
