"""Assigns every leaf to a bucket, and every bucket to its place: layout.py says what these are."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jdistadam.core.codecs import BLOCK
from jdistadam.distributed.layout import ALIGNMENT, Bucket, Layout, Leaf

_MIN_SCATTERED_SIZE = 1 << 14  # elements; below, one collective a leaf costs more than packing


def make_layout(
    leaves: Sequence[Leaf],
    num_shards: int,
    bucket_bytes: int,
    *,
    packs: bool | None = None,
    keeps_main: Callable[[Any, bool], bool] = lambda dtype, scattered: True,
    num_inner_shards: int | None = None,
    shards_params: bool = False,
    gathers_layers: bool = False,
    in_blocks: bool = False,
) -> Layout:
    """Assigns every leaf to a bucket and every bucket to its place.

    Args:
      leaves: The parameters. Frozen ones and those without elements are in no bucket.
      num_shards: Number of devices that share the state.
      bucket_bytes: Upper limit of a packed bucket, in bytes of its parameters. A leaf above it is
        a bucket of its own.
      packs: Whether small leaves are packed, as they should be where anything is sent. None: if
        there are several shards.
      keeps_main: ``keeps_main(dtype, is_held)``: whether main parameters are kept, of leaves of
        which devices hold shards if ``shards_params``.
      num_inner_shards: Number of parts into which the sum over shard_axes cuts. None: num_shards.
      shards_params: Whether devices hold only shards of the parameters that are scattered.
      gathers_layers: Whether they gather these of stacked leaves layer by layer.
      in_blocks: Whether leaves are cut only at multiples of ``BLOCK`` of their elements, so that
        blocks of moments in codes, and random bits, are those of whole leaves.

    Example:
      >>> leaves = [Leaf("w", (512, 64), "float32", 0), Leaf("b", (3,), "float32", 0)]
      >>> for bucket in make_layout(leaves, 4, 1 << 20).buckets:
      ...     print(bucket.leaves, bucket.dim, bucket.shard_shape, bucket.padding, bucket.offset)
      (0,) 0 (128, 64) 0 0
      (1,) None (1,) 1 8192
    """
    packs = num_shards > 1 if packs is None else packs
    unit = BLOCK if in_blocks else 1
    members = _members(leaves, num_shards, bucket_bytes, packs, unit)
    # Those with main parameters first: the flat array of main parameters is the shorter one.
    has_main = [keeps_main(leaves[m.leaves[0]].dtype, not m.is_packed) for m in members]
    buckets: list[Bucket] = []
    offset = main_size = 0
    ends = {True: 0, False: 0}  # of moments, by whether they are coded
    for i in sorted(range(len(members)), key=lambda i: not has_main[i]):
        bucket = _bucket(leaves, members[i], num_shards, unit)
        bucket = dataclasses.replace(
            bucket,
            offset=offset,
            moment_offset=ends[bucket.is_coded],
            has_main=has_main[i],
            inner_shape=_scaled(
                bucket.shard_shape, bucket.cut_dim, num_shards // (num_inner_shards or num_shards)
            ),
            is_sharded_param=shards_params and not bucket.is_packed,
            num_layers=bucket.num_layers if gathers_layers else None,
        )
        buckets.append(bucket)
        offset += _aligned(bucket.shard_size)
        ends[bucket.is_coded] += _aligned(bucket.shard_size)
        main_size = offset if bucket.has_main else main_size
    coded_size, uncoded_size = (max(ends[is_coded], ALIGNMENT) for is_coded in (True, False))
    return Layout(
        num_shards, tuple(leaves), tuple(buckets), offset, main_size, coded_size, uncoded_size
    )


class _Members(NamedTuple):
    """The leaves of a bucket, and along which dimension its one leaf is cut; None: packed."""

    leaves: list[int]
    dim: int | None = None

    @property
    def is_packed(self) -> bool:
        return self.dim is None


def _members(
    leaves: Sequence[Leaf],
    num_shards: int,
    bucket_bytes: int,
    packs: bool,
    unit: int,
) -> list[_Members]:
    """The leaves of each bucket."""
    scattered: list[_Members] = []
    packed: list[int] = []
    for i, leaf in enumerate(leaves):
        if leaf.size and leaf.group is not None:
            dim = _scatter_dim(leaf, num_shards, unit)
            is_small = packs and leaf.size < _MIN_SCATTERED_SIZE
            if dim is not None and not is_small:
                scattered.append(_Members([i], dim))
            elif packs:
                packed.append(i)
            else:
                scattered.append(_Members([i]))
    return scattered + [_Members(run) for run in _pack(leaves, packed, bucket_bytes)]


def _bucket(leaves: Sequence[Leaf], members: _Members, num_shards: int, unit: int) -> Bucket:
    """A bucket, without what depends on the others."""
    first = leaves[members.leaves[0]]
    total = sum(-(-leaves[i].size // unit) * unit for i in members.leaves)
    is_packed = members.is_packed
    padding = -total % (num_shards * unit) if is_packed else 0
    dim = members.dim
    whole_shape = (total + padding,) if is_packed else first.shape
    return Bucket(
        leaves=tuple(members.leaves),
        dim=dim,
        dtype=first.dtype,
        group=first.group or 0,
        shard_shape=_cut(whole_shape, dim or 0, num_shards),
        padding=padding,
        offset=0,
        has_main=False,
        tensor_axes=first.tensor_axes,
        num_layers=first.shape[0] if first.is_stacked and not is_packed else None,
        unit=unit if is_packed else 1,
        is_coded=first.is_coded,
    )


def _cut(shape: tuple[int, ...], dim: int, num_shards: int) -> tuple[int, ...]:
    return (*shape[:dim], shape[dim] // num_shards, *shape[dim + 1 :])


def _scaled(shape: tuple[int, ...], dim: int, factor: int) -> tuple[int, ...]:
    return (*shape[:dim], shape[dim] * factor, *shape[dim + 1 :])


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _scatter_dim(leaf: Leaf, num_shards: int, unit: int) -> int | None:
    """The first dimension that divides; None if there is none.

    Its shards are then pieces of a multiple of ``unit`` elements each.
    """
    for dim in range(1 if leaf.is_stacked else 0, len(leaf.shape)):
        piece = math.prod(leaf.shape[dim:])
        divides = leaf.shape[dim] % num_shards == 0
        if divides and (num_shards == 1 or piece // num_shards % unit == 0):
            return dim
    return None


def _pack(leaves: Sequence[Leaf], members: Sequence[int], bucket_bytes: int) -> list[list[int]]:
    """Splits leaves into runs of one kind, none above bucket_bytes unless alone."""
    by_kind: dict[Any, list[list[int]]] = {}
    filled: dict[Any, int] = {}
    for i in members:
        leaf = leaves[i]
        kind = (jnp.dtype(leaf.dtype), leaf.group, leaf.tensor_axes, leaf.is_coded)
        nbytes = leaf.size * jnp.dtype(leaf.dtype).itemsize
        if kind not in by_kind or filled[kind] + nbytes > bucket_bytes:
            by_kind.setdefault(kind, []).append([])
            filled[kind] = 0
        by_kind[kind][-1].append(i)
        filled[kind] += nbytes
    return [run for runs in by_kind.values() for run in runs]
