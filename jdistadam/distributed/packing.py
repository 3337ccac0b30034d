"""Which elements of leaves a device has: buckets packed and cut into shards, and their blocks.

The first part converts between leaves and buckets in a program. The second part is about blocks,
for coded moments and random bits: a device's shard of a bucket then consists of whole blocks of
``BLOCK`` elements. Each block belongs to one leaf and is contiguous in the row-major order of the
whole leaf, even if the leaf is sharded. A leaf that is scattered in place is split at up to two
levels: over the data axes and over tensor axes. For a packed bucket, a table gives the leaf of each
block and the block's number in that leaf.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdistadam.core import collectives, trees
from jdistadam.core.codecs import BLOCK
from jdistadam.distributed.layout import Bucket, Layout, Leaf, aligned
from jdistadam.distributed.mesh_axes import DataParallel
from jdistadam.errors import PolicyError
from jdistadam.kernels import multi_tensor, native
from jdistadam.kernels.operands import LeafPositions
from jdistadam.kernels.reference import LeafPartition


class Piece(NamedTuple):
    """A bucket, or a part of one device's shard of it: what a kernel call steps.

    Attributes:
      bucket_index: The index of the bucket in the layout.
      bucket: The bucket. For a part of it: the same leaf and dtypes, the positions of the part, and
        its elements as a packed array.
      start: The first element of the part in the shard; None for the whole bucket.
    """

    bucket_index: int
    bucket: Bucket
    start: int | None = None

    def of(self, shard: Any) -> Any:
        """The piece's part of an array like the bucket's shard; None stays None."""
        if self.start is None or shard is None:
            return shard
        end = self.start + self.bucket.shard_size
        return native.unfused(lax.slice_in_dim(shard.reshape(-1), self.start, end))


def joined(bucket: Bucket, parts: dict[int, jax.Array]) -> jax.Array:
    """Returns a bucket's shard from its parts, by their first elements; the inverse of ``of``."""
    if len(parts) == 1:
        return parts[0]
    in_order = [parts[start] for start in sorted(parts)]
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
    """Returns the part of a bucket's parameters that matches this device's state."""
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
    axes = parallel.state_axes
    if bucket.is_sharded_param and shape == bucket.inner_shape:
        return tuple(axis for axis in axes if axis not in parallel.shard_axes)
    return axes


def flat_shard(layout: Layout, leaves: Sequence[Any], index: Any, dtype: Any) -> jax.Array:
    """Returns device ``index``'s part of ``leaves``: shape ``(flat_size,)``, gaps zero."""
    shards = [
        shard_of(bucket_array(bucket, leaves, dtype), index, layout.num_shards, bucket.cut_dim)
        for bucket in layout.buckets
    ]
    return flat_of(layout.buckets, shards, dtype)


def flat_of(buckets: Sequence[Bucket], shards: Sequence[Any], dtype: Any) -> jax.Array:
    """Puts one device's shards of consecutive buckets into an array; gaps are zero."""
    parts, end = [jnp.zeros((0,), dtype)], 0
    for bucket, shard in zip(buckets, shards, strict=True):
        start = bucket.offset - buckets[0].offset
        parts += [jnp.zeros((start - end,), dtype), shard.reshape(-1)]
        end = start + bucket.shard_size
    parts.append(jnp.zeros((aligned(end) - end,), dtype))
    return jnp.concatenate(parts)


def leaves_of_bucket(layout: Layout, bucket: Bucket, whole: Any) -> list[tuple[int, jax.Array]]:
    """Cuts a bucket's whole content into its leaves: pairs of leaf index and array."""
    if not bucket.is_packed:
        return [(bucket.leaf, whole)]
    shapes = [layout.leaves[i].shape for i in bucket.leaves]
    offsets = bucket.starts(layout.leaves[i].size for i in bucket.leaves)
    leaves = multi_tensor.unpack(whole, shapes, offsets[:-1], whole.dtype)
    return list(zip(bucket.leaves, leaves, strict=True))


def leaves_of_flat(layout: Layout, flat: Any) -> list[np.ndarray]:
    """Joins the leaves from all devices' flat arrays: the inverse of flat_shard.

    Args:
      layout: The layout.
      flat: Shape ``(num_shards * flat_size,)``. If it is shorter, missing leaves are zero, and so
        are leaves in no bucket.
    """
    by_device = np.asarray(flat).reshape(layout.num_shards, -1)
    leaves = [np.zeros(leaf.shape, by_device.dtype) for leaf in layout.leaves]
    for bucket in layout.buckets:
        if bucket.offset >= by_device.shape[1]:
            continue
        shards = by_device[:, bucket.offset : bucket.offset + bucket.shard_size]
        whole = np.concatenate(
            list(shards.reshape(layout.num_shards, *bucket.shard_shape)), bucket.cut_dim
        )
        for i, leaf in _leaves_on_host(layout, bucket, whole):
            leaves[i] = leaf
    return leaves


def _leaves_on_host(layout: Layout, bucket: Bucket, whole: np.ndarray) -> list[tuple[int, Any]]:
    """``leaves_of_bucket`` for a numpy array."""
    if bucket.is_packed:
        sizes = [layout.leaves[i].size for i in bucket.leaves]
        starts = bucket.starts(sizes)
        pieces = [whole[a : a + size] for a, size in zip(starts, sizes, strict=False)]
        pairs = zip(bucket.leaves, pieces, strict=True)
        return [(i, x.reshape(layout.leaves[i].shape)) for i, x in pairs]
    return leaves_of_bucket(layout, bucket, whole)


def whole_size(leaf: Leaf, tensor_parts: Sequence[int]) -> int:
    """Returns the number of elements of a leaf before tensor axes cut it."""
    return leaf.size * math.prod(tensor_parts[k] for axes in leaf.cuts for k in axes)


def check_cuts(leaf: Leaf, tensor_parts: Sequence[int]) -> None:
    """Raises PolicyError if a tensor axis cuts a leaf inside its blocks."""
    dims = [dim for dim, axes in enumerate(leaf.cuts) if axes]
    if leaf.group is None or not (dims and leaf.size and leaf.has_blocks):
        return
    piece = math.prod(leaf.shape[dims[0] :])
    if len(dims) > 1 or piece % BLOCK:
        parts = [math.prod(tensor_parts[k] for k in leaf.cuts[dim]) for dim in dims]
        advice = "Leave it whole in param_specs"
        if not leaf.is_rounded:
            advice += ", or name it in float32_moments"
        elif not leaf.is_coded:
            advice += ", or round to nearest"
        raise PolicyError(
            f"{leaf.path}: is not cut at the ends of blocks, as coded moments and random bits "
            f"need it: got parts of shape {leaf.shape}, cut into {parts} along dimensions {dims}, "
            f"expected one dimension, and pieces of a multiple of {BLOCK} elements. {advice}."
        )


def partition_of(layout: Layout, bucket: Bucket, tensor_parts: Sequence[int]) -> LeafPartition:
    """How the leaf of a bucket was cut, first over tensor axes, then over the data axes."""
    if bucket.is_packed or not layout.leaves[bucket.leaf].has_blocks:
        # A table has the cuts, or nothing depends on them.
        return LeafPartition.into_runs(bucket.shard_size)
    piece = _piece(layout, bucket)
    leaf = layout.leaves[bucket.leaf]
    return LeafPartition(piece, piece * layout.num_shards, *_tensor_cut(leaf, tensor_parts))


def _piece(layout: Layout, bucket: Bucket) -> int:
    """Contiguous elements of the leaf in a shard of its bucket.

    The only shard of an uncut leaf is one piece, which need not be whole blocks.
    """
    return math.prod(bucket.shard_shape[bucket.cut_dim if layout.num_shards > 1 else 0 :])


def _tensor_cut(leaf: Leaf, tensor_parts: Sequence[int]) -> tuple[int, int]:
    """Elements in one piece, and elements of the uncut leaf from one piece to the next."""
    for dim, axes in enumerate(leaf.cuts):
        if axes:
            piece = math.prod(leaf.shape[dim:])
            return piece, piece * math.prod(tensor_parts[k] for k in axes)
    return leaf.size, leaf.size


def _tensor_part(leaf: Leaf, cutting_axes: Sequence[str]) -> Any:
    """The number of this device's part of the leaf over tensor axes."""
    axes = tuple(cutting_axes[k] for cut in leaf.cuts for k in cut)
    return collectives.axis_index(axes) if axes else jnp.int32(0)


def positions_of(
    layout: Layout,
    pieces: Sequence[Piece],
    state_axes: tuple[str, ...],
    cutting_axes: Sequence[str],
    tensor_parts: Sequence[int],
) -> tuple[LeafPositions, tuple[int, ...]]:
    """Returns the positions of pieces for the kernel, and the start of their tables.

    Args:
      layout: The layout.
      pieces: The pieces of one kernel call.
      state_axes: The axes over which the state is sharded.
      cutting_axes: Tensor axes of more than one device.
      tensor_parts: Their sizes.
    """
    index = collectives.axis_index(state_axes) if state_axes else jnp.int32(0)
    parts, tables, begins, end = [], [], list[int](), 0
    for piece in pieces:
        first = layout.leaves[piece.bucket.leaves[0]]
        parts.append(jnp.stack([index, _tensor_part(first, cutting_axes)]))
        if piece.bucket.is_packed and (piece.start is None or first.has_blocks):
            table = _table(layout, piece, index, cutting_axes, tensor_parts)
            tables.append(table)
            begins.append(end)
            end += table.shape[0]
        else:
            begins.append(-1)
    blocks = jnp.concatenate(tables) if tables else jnp.zeros((1, 2), jnp.uint32)
    return LeafPositions(jnp.stack(parts), blocks), tuple(begins)


def _table(
    layout: Layout,
    piece: Piece,
    index: Any,
    cutting_axes: Sequence[str],
    tensor_parts: Sequence[int],
) -> jax.Array:
    """The leaf of each block of a piece, and the block's number there."""
    bucket = piece.bucket
    leaves = [layout.leaves[i] for i in bucket.leaves]
    if piece.start is None:
        which, block = _blocks_of_leaves(layout, bucket, index)
    else:
        block = _blocks_of_part(layout, piece, index)
        which = jnp.zeros_like(block)
    # Blocks of the parts that tensor axes cut become blocks of whole leaves.
    cuts = np.asarray([_tensor_cut(leaf, tensor_parts) for leaf in leaves]) // BLOCK
    width, whole_width = np.maximum(cuts, 1).astype(np.int32).T
    is_cut = np.asarray([any(leaf.cuts) for leaf in leaves])
    part = jnp.stack([_tensor_part(leaf, cutting_axes) for leaf in leaves])[which]
    row, within = jnp.divmod(block, jnp.asarray(width)[which])
    moved = row * jnp.asarray(whole_width)[which] + part * jnp.asarray(width)[which] + within
    block = jnp.where(jnp.asarray(is_cut)[which], moved, block)
    return jnp.stack([jnp.asarray(bucket.leaves)[which], block], axis=1).astype(jnp.uint32)


def _blocks_of_part(layout: Layout, piece: Piece, index: Any) -> jax.Array:
    """For each block of a part of a shard: its number in the device's part of the leaf."""
    assert piece.start is not None
    bucket = layout.buckets[piece.bucket_index]
    num_blocks = -(-piece.bucket.shard_size // BLOCK)
    here = piece.start // BLOCK + jnp.arange(num_blocks, dtype=jnp.int32)
    if layout.num_shards == 1:
        return here
    width = _piece(layout, bucket) // BLOCK
    row, within = jnp.divmod(here, width)
    return (row * layout.num_shards + index) * width + within


def _blocks_of_leaves(layout: Layout, bucket: Bucket, index: Any) -> tuple[Any, Any]:
    """For each block: its leaf in the bucket, and its number in the device's part of the leaf."""
    num_blocks = bucket.shard_size // BLOCK if bucket.leaf_alignment > 1 else 0
    starts = np.asarray(bucket.starts(layout.leaves[i].size for i in bucket.leaves)[:-1]) // BLOCK
    place = index * num_blocks + jnp.arange(num_blocks, dtype=jnp.int32)
    found = jnp.searchsorted(jnp.asarray(starts, jnp.int32), place, side="right") - 1
    return found, place - jnp.asarray(starts, jnp.int32)[found]
