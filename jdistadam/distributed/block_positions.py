"""Which blocks of a leaf a device has, for coded moments and random bits.

A device's shard of a bucket then consists of whole blocks of ``BLOCK`` elements. Each block belongs
to one leaf and is contiguous in the row-major order of the whole leaf, even if the leaf is sharded.
A leaf that is scattered in place is split at up to two levels: over the data axes and over tensor
axes. For a packed bucket, a table gives the leaf of each block and the block's number in that leaf.

A *piece* is what a shard has of a leaf without a gap, as in cuda/quantized.h.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdistadam.core import collectives
from jdistadam.core.codecs import BLOCK
from jdistadam.distributed.layout import Bucket, Layout, Leaf
from jdistadam.distributed.mesh_axes import DataParallel
from jdistadam.distributed.packing import Span
from jdistadam.errors import PolicyError
from jdistadam.kernels.operands import LeafPositions
from jdistadam.kernels.reference import LeafPartition


def whole_size(leaf: Leaf, parallel: DataParallel) -> int:
    """Returns the number of elements of a leaf before tensor axes cut it."""
    return leaf.size * math.prod(parallel.size(_axes_of(cut, parallel)) for cut in leaf.cuts)


def _axes_of(cut: Sequence[int], parallel: DataParallel) -> tuple[str, ...]:
    """The axes of an entry of ``Leaf.cuts``."""
    return tuple(parallel.cutting_axes[k] for k in cut)


def check_cuts(leaf: Leaf, parallel: DataParallel) -> None:
    """Raises PolicyError if a tensor axis cuts a leaf inside its blocks."""
    dims = [dim for dim, axes in enumerate(leaf.cuts) if axes]
    if leaf.group is None or not (dims and leaf.size and leaf.has_blocks):
        return
    piece = math.prod(leaf.shape[dims[0] :])
    if len(dims) > 1 or piece % BLOCK:
        counts = [parallel.size(_axes_of(leaf.cuts[dim], parallel)) for dim in dims]
        advice = "Leave it whole in param_specs"
        if not leaf.is_rounded:
            advice += ", or name it in float32_moments"
        elif not leaf.is_coded:
            advice += ", or round to nearest"
        raise PolicyError(
            f"{leaf.path}: is not cut at the ends of blocks, as coded moments and random bits "
            f"need it: got parts of shape {leaf.shape}, cut into {counts} along dimensions {dims}, "
            f"expected one dimension, and pieces of a multiple of {BLOCK} elements. {advice}."
        )


def partition_of(layout: Layout, bucket: Bucket, parallel: DataParallel) -> LeafPartition:
    """How the leaf of a bucket was cut, first over tensor axes, then over the data axes."""
    if bucket.is_packed or not layout.leaves[bucket.leaf].has_blocks:
        # A table has the cuts, or nothing depends on them.
        return LeafPartition.into_runs(bucket.shard_size)
    piece = _piece(layout, bucket)
    leaf = layout.leaves[bucket.leaf]
    whole = piece * layout.num_shards_of(bucket)
    return LeafPartition(piece, whole, *_tensor_cut(leaf, parallel))


def _piece(layout: Layout, bucket: Bucket) -> int:
    """Contiguous elements of the leaf in a shard of its bucket.

    The only shard of an uncut leaf is one piece, which need not be whole blocks.
    """
    return math.prod(
        bucket.shard_shape[bucket.cut_dim if layout.num_shards_of(bucket) > 1 else 0 :]
    )


def _tensor_cut(leaf: Leaf, parallel: DataParallel) -> tuple[int, int]:
    """Elements in one piece, and elements of the uncut leaf from one piece to the next."""
    for dim, cut in enumerate(leaf.cuts):
        if cut:
            piece = math.prod(leaf.shape[dim:])
            return piece, piece * parallel.size(_axes_of(cut, parallel))
    return leaf.size, leaf.size


def _tensor_index(leaf: Leaf, parallel: DataParallel) -> Any:
    """The number of this device's shard of the leaf over tensor axes."""
    axes = tuple(axis for cut in leaf.cuts for axis in _axes_of(cut, parallel))
    return collectives.axis_index(axes) if axes else jnp.int32(0)


def positions_of(
    layout: Layout, spans: Sequence[Span], parallel: DataParallel
) -> tuple[LeafPositions, tuple[int, ...]]:
    """Returns the positions of spans for the kernel, and the start of their tables.

    Args:
      layout: The layout.
      spans: The spans of one kernel call.
      parallel: The axes over which state is sharded, and those that cut leaves.
    """
    numbers, tables, begins, end = [], [], list[int](), 0
    for span in spans:
        first = layout.leaves[span.bucket.leaves[0]]
        index = collectives.axis_index(parallel.without(span.bucket.tensor_axes).state_axes)
        numbers.append(jnp.stack([index, _tensor_index(first, parallel)]))
        if span.bucket.is_packed and (span.start is None or first.has_blocks):
            table = _table(layout, span, index, parallel)
            tables.append(table)
            begins.append(end)
            end += table.shape[0]
        else:
            begins.append(-1)
    blocks = jnp.concatenate(tables) if tables else jnp.zeros((1, 2), jnp.uint32)
    return LeafPositions(jnp.stack(numbers), blocks), tuple(begins)


def _table(layout: Layout, span: Span, index: Any, parallel: DataParallel) -> jax.Array:
    """The leaf of each block of a span, and the block's number there."""
    bucket = span.bucket
    leaves = [layout.leaves[i] for i in bucket.leaves]
    if span.start is None:
        which, block = _blocks_of_leaves(layout, bucket, index)
    else:
        block = _blocks_of_range(layout, span, index)
        which = jnp.zeros_like(block)
    # Blocks of shards over tensor axes become blocks of whole leaves.
    cuts = np.asarray([_tensor_cut(leaf, parallel) for leaf in leaves]) // BLOCK
    width, whole_width = np.maximum(cuts, 1).astype(np.int32).T
    is_cut = np.asarray([any(leaf.cuts) for leaf in leaves])
    number = jnp.stack([_tensor_index(leaf, parallel) for leaf in leaves])[which]
    row, within = jnp.divmod(block, jnp.asarray(width)[which])
    moved = row * jnp.asarray(whole_width)[which] + number * jnp.asarray(width)[which] + within
    block = jnp.where(jnp.asarray(is_cut)[which], moved, block)
    return jnp.stack([jnp.asarray(bucket.leaves)[which], block], axis=1).astype(jnp.uint32)


def _blocks_of_range(layout: Layout, span: Span, index: Any) -> jax.Array:
    """For each block of a range of a shard: its number in the device's shard of the leaf."""
    assert span.start is not None
    bucket = layout.buckets[span.bucket_index]
    num_blocks = -(-span.bucket.shard_size // BLOCK)
    here = span.start // BLOCK + jnp.arange(num_blocks, dtype=jnp.int32)
    num_shards = layout.num_shards_of(bucket)
    if num_shards == 1:
        return here
    width = _piece(layout, bucket) // BLOCK
    row, within = jnp.divmod(here, width)
    return (row * num_shards + index) * width + within


def _blocks_of_leaves(layout: Layout, bucket: Bucket, index: Any) -> tuple[Any, Any]:
    """For each block: its leaf in the bucket, and its number in the device's shard of the leaf."""
    num_blocks = bucket.shard_size // BLOCK if bucket.leaf_alignment > 1 else 0
    starts = np.asarray(bucket.starts(layout.leaves[i].size for i in bucket.leaves)[:-1]) // BLOCK
    number = index * num_blocks + jnp.arange(num_blocks, dtype=jnp.int32)
    which = jnp.searchsorted(jnp.asarray(starts, jnp.int32), number, side="right") - 1
    return which, number - jnp.asarray(starts, jnp.int32)[which]
