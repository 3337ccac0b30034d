"""Where every parameter lies when the optimizer state is sharded. Static: made from shapes alone.

A *bucket* is what travels in one collective. A large leaf with a dimension that divides by the
number of shards is a bucket of its own and is scattered along that dimension, where it lies:
nothing is packed or unpacked. All other leaves are flattened and packed, with leaves of the same
dtype and group, into buckets of up to ``bucket_bytes``, padded at the end.

The shards of all buckets that one device owns lie behind each other in a few *flat* arrays, one
for each kind of state, at the offsets written here. Where one device holds everything nothing is
packed, and float32 parameters are their own main parameters: those with a copy come first, so that
the flat array of main parameters is shorter than the others and shares their offsets.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

ALIGNMENT = 128
"""Shards begin at multiples of this many elements: 16-byte vectors of every dtype stay aligned."""

_MIN_SCATTERED_SIZE = 1 << 14  # elements; below, one collective a leaf costs more than packing


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A parameter as the layout sees it."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    group: int  # row of the coefficients: leaves of different groups are never packed together

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Bucket:
    """What travels in one collective.

    Attributes:
      leaves: Indices of its leaves.
      dim: Dimension along which its one leaf is scattered; None: its leaves are packed.
      dtype: Dtype of its parameters.
      group: Row of the coefficients.
      shard_shape: Shape of one device's shard, ``(shard_size,)`` if packed.
      padding: Elements at the end of a packed bucket that belong to no leaf.
      offset: Where the shard begins in a device's flat arrays, in elements.
      has_main: Whether its main parameters are kept: they differ from the parameters in dtype or
        in sharding.
    """

    leaves: tuple[int, ...]
    dim: int | None
    dtype: Any
    group: int
    shard_shape: tuple[int, ...]
    padding: int
    offset: int
    has_main: bool

    @property
    def shard_size(self) -> int:
        """Number of elements in one device's shard."""
        return math.prod(self.shard_shape)


@dataclasses.dataclass(frozen=True)
class Layout:
    """All buckets, and the sizes of a device's flat arrays.

    Attributes:
      num_shards: Number of devices that share the state.
      leaves: The parameters.
      buckets: The buckets, in the order in which they lie.
      flat_size: Elements of a device's mu and nu. Leaves without elements are in no bucket.
      main_size: Elements of a device's main parameters.
    """

    num_shards: int
    leaves: tuple[Leaf, ...]
    buckets: tuple[Bucket, ...]
    flat_size: int
    main_size: int

    def __str__(self) -> str:
        """Returns a table with one line a bucket."""
        lines = [f"{'bucket':>6}  {'dtype':<9} {'dim':>4} {'shard':>12} {'pad %':>6}  leaves"]
        for i, b in enumerate(self.buckets):
            names = ", ".join(self.leaves[k].path for k in b.leaves[:3])
            more = f" (+{len(b.leaves) - 3})" if len(b.leaves) > 3 else ""
            dim = "pack" if b.dim is None else b.dim
            pad = 100 * b.padding / max(1, b.shard_size * self.num_shards)
            lines.append(
                f"{i:>6}  {b.dtype!s:<9} {dim:>4} {b.shard_size:>12} {pad:>6.2f}  {names}{more}"
            )
        return "\n".join(lines)


def describe_leaves(params: Any, groups: Sequence[int]) -> tuple[Leaf, ...]:
    """Returns the leaves of a tree of arrays or shapes."""
    flat, _ = jax.tree_util.tree_flatten_with_path(params)
    return tuple(
        Leaf("params" + jax.tree_util.keystr(path), tuple(x.shape), jnp.dtype(x.dtype), group)
        for (path, x), group in zip(flat, groups, strict=True)
    )


def make_layout(leaves: Sequence[Leaf], num_shards: int, bucket_bytes: int) -> Layout:
    """Assigns every leaf to a bucket and every bucket to its place.

    Args:
      leaves: The parameters.
      num_shards: Number of devices that share the state.
      bucket_bytes: Upper limit of a packed bucket, in bytes of its parameters. A leaf above it is
        a bucket of its own.

    Example:
      >>> leaves = [Leaf("w", (512, 64), "float32", 0), Leaf("b", (3,), "float32", 0)]
      >>> for bucket in make_layout(leaves, 4, 1 << 20).buckets:
      ...     print(bucket.leaves, bucket.dim, bucket.shard_shape, bucket.padding, bucket.offset)
      (0,) 0 (128, 64) 0 0
      (1,) None (1,) 1 8192
    """
    buckets: list[Bucket] = []
    offset = 0

    def add(members: Sequence[int], dim: int | None) -> None:
        nonlocal offset
        first = leaves[members[0]]
        total = sum(leaves[i].size for i in members)
        if dim is None:
            shard_shape: tuple[int, ...] = (-(-total // num_shards),)
        else:
            shard_shape = (
                *first.shape[:dim],
                first.shape[dim] // num_shards,
                *first.shape[dim + 1 :],
            )
        bucket = Bucket(
            tuple(members),
            dim,
            first.dtype,
            first.group,
            shard_shape,
            padding=math.prod(shard_shape) * num_shards - total,
            offset=offset,
            has_main=has_main(first),
        )
        buckets.append(bucket)
        offset += _aligned(bucket.shard_size)

    def has_main(leaf: Leaf) -> bool:
        return num_shards > 1 or jnp.dtype(leaf.dtype) != jnp.float32

    packed: list[int] = []
    nonempty = [i for i, leaf in enumerate(leaves) if leaf.size]
    for i in sorted(nonempty, key=lambda i: not has_main(leaves[i])):
        dim = _scatter_dim(leaves[i], num_shards)
        if dim is not None or num_shards == 1:
            add([i], dim)
        else:
            packed.append(i)
    for members in _pack(leaves, packed, bucket_bytes):
        add(members, None)
    main_size = max((b.offset + _aligned(b.shard_size) for b in buckets if b.has_main), default=0)
    return Layout(num_shards, tuple(leaves), tuple(buckets), offset, main_size)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _scatter_dim(leaf: Leaf, num_shards: int) -> int | None:
    if leaf.size < (_MIN_SCATTERED_SIZE if num_shards > 1 else 1):
        return None
    return next((dim for dim, size in enumerate(leaf.shape) if size % num_shards == 0), None)


def _pack(leaves: Sequence[Leaf], members: Sequence[int], bucket_bytes: int) -> list[list[int]]:
    """Splits leaves into runs of one dtype and group, none above bucket_bytes unless alone."""
    by_kind: dict[Any, list[list[int]]] = {}
    filled: dict[Any, int] = {}
    for i in members:
        leaf = leaves[i]
        kind = (jnp.dtype(leaf.dtype), leaf.group)
        nbytes = leaf.size * jnp.dtype(leaf.dtype).itemsize
        if kind not in by_kind or filled[kind] + nbytes > bucket_bytes:
            by_kind.setdefault(kind, []).append([])
            filled[kind] = 0
        by_kind[kind][-1].append(i)
        filled[kind] += nbytes
    return [run for runs in by_kind.values() for run in runs]
