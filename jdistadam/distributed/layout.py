"""The position of every parameter in sharded optimizer state, computed from shapes alone.

A *bucket* is what one collective sends. A large leaf with a dimension that divides by the
number of shards is its own bucket and is scattered along that dimension, in place:
nothing is packed or unpacked. All other leaves are flattened and packed, with leaves of the same
dtype and group, into buckets of up to ``bucket_bytes``, padded at the end.

The shards of all buckets of one device are stored in sequence in a few *flat* arrays, one for each
kind of state, at the offsets given here. If one device holds everything, nothing is packed.
Parameters that have a main copy come first, so the flat array of main parameters is shorter than
the others and has the same offsets.

Two devices, and the params w (256, 128) and b (3,) in bfloat16, s (128, 128) in float32; only the
first two have main parameters::

                   device 0                                 device 1
    bucket 0: w    w[0:128]                                 w[128:256]
    bucket 1: b    b[0], b[1]                               b[2], padding
    bucket 2: s    s[0:64]                                  s[64:128]

    offset         0            16384       16512           24704
    mu, nu         | w (16384)  | b (2) --- | s (8192)      |    flat_size = 24704
    main_params    | w (16384)  | b (2) --- |                    main_size = 16512

Dashes are a gap: every shard begins at a multiple of ``ALIGNMENT`` elements. The global array of mu
is the sequence of the flat arrays of all devices.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdistadam.core.codecs import BLOCK
from jdistadam.core.trees import runs_within
from jdistadam.distributed.layers import SCAN

ALIGNMENT = 128
"""Shards begin at multiples of this many elements: 16-byte vectors of every dtype stay aligned.

Codes begin with a block, which has one scale.
"""
assert ALIGNMENT % BLOCK == 0


@dataclasses.dataclass(frozen=True)
class Leaf:
    """The properties of a parameter on which the layout depends."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    group: int | None  # row of the coefficients; None: frozen
    tensor_axes: tuple[str, ...] = ()  # mesh axes of which devices have other shards of it
    layers: str | None = None  # "scan": over its first dimension, never scattered; "block"; None
    cuts: tuple[tuple[int, ...], ...] = ()  # for each dimension, which tensor axes cut it
    is_coded: bool = False  # whether its moments are coded, if any are
    is_rounded: bool = False  # whether its floats are, or uncoded would be, rounded stochastically
    rests_whole: bool = False  # whether devices hold all of it between steps, if others are cut
    split: int = 1  # shards into which axes of data cut it, as experts: [Note: experts]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def has_blocks(self) -> bool:
        """Whether a step depends on which blocks of the whole leaf a device has."""
        return self.is_coded or self.is_rounded


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The leaves that one collective sends.

    Attributes:
      leaves: Indices of its leaves.
      dim: Dimension along which its only leaf is scattered; None: its leaves are packed.
      dtype: Dtype of its parameters.
      group: Row of the coefficients.
      shard_shape: Shape of one device's shard, ``(shard_size,)`` if packed.
      padding: Elements at the end of a packed bucket that belong to no leaf.
      offset: Start of the shard in a device's flat arrays, in elements.
      has_main: Whether its main parameters or remainders are stored.
      tensor_axes: Mesh axes of which devices have other shards of its leaves.
      num_layers: First dimension of a stacked leaf if devices hold shards of it and send it layer
        by layer; otherwise None.
      inner_shape: Shape of one device's shard of the sum over shard_axes: ``shard_shape``,
        unless the state is sharded over replica_axes too.
      is_sharded_param: Whether devices hold such a shard of its only parameter, instead of all.
      leaf_alignment: If packed, its leaves begin at multiples of this many elements; elements
        between them are zero.
      is_coded: Whether its moments are coded, if any are.
      moment_offset: Start of its shard in the codes, or in the moments without codes.
      split: Number of shards into which axes of data cut its leaves: [Note: experts].
    """

    leaves: tuple[int, ...]
    dim: int | None
    dtype: Any
    group: int
    shard_shape: tuple[int, ...]
    padding: int
    offset: int
    has_main: bool
    tensor_axes: tuple[str, ...] = ()
    num_layers: int | None = None
    inner_shape: tuple[int, ...] = ()
    is_sharded_param: bool = False
    leaf_alignment: int = 1
    is_coded: bool = False
    moment_offset: int = 0
    split: int = 1

    @property
    def shard_size(self) -> int:
        """Number of elements in one device's shard."""
        return math.prod(self.shard_shape)

    @property
    def inner_size(self) -> int:
        """Number of elements in one device's shard of the sum over shard_axes."""
        return math.prod(self.inner_shape)

    @property
    def is_packed(self) -> bool:
        """Whether its leaves are flattened and packed, instead of one leaf in place."""
        return self.dim is None

    def starts(self, sizes: Iterable[int]) -> list[int]:
        """The start of leaves of these sizes, if packed, and the end of the last one."""
        padded = (-(-size // self.leaf_alignment) * self.leaf_alignment for size in sizes)
        return list(itertools.accumulate(padded, initial=0))

    @property
    def cut_dim(self) -> int:
        """The dimension along which its array is cut into shards; a packed array has only one."""
        return 0 if self.dim is None else self.dim

    @property
    def leaf(self) -> int:
        """Index of its only leaf, if it is not packed."""
        (leaf,) = self.leaves
        return leaf


@dataclasses.dataclass(frozen=True)
class Layout:
    """All buckets, and the sizes of a device's flat arrays that follow from them.

    Attributes:
      num_shards: Number of devices that share the state.
      leaves: The parameters.
      buckets: The buckets, in their order in the flat arrays. Leaves without elements are in none.
    """

    num_shards: int
    leaves: tuple[Leaf, ...]
    buckets: tuple[Bucket, ...]

    @property
    def flat_size(self) -> int:
        """Elements of a device's mu and nu in floats."""
        return sum(aligned(bucket.shard_size) for bucket in self.buckets)

    @property
    def main_size(self) -> int:
        """Elements of a device's main parameters."""
        return sum(aligned(bucket.shard_size) for bucket in self.buckets if bucket.has_main)

    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Returns shape and dtype of every leaf of unsharded params."""
        return [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in self.leaves]

    def num_shards_of(self, bucket: Bucket) -> int:
        """Returns the number of devices that share the state of a bucket."""
        return self.num_shards // bucket.split

    def whole_size(self, bucket: Bucket) -> int:
        """Returns the number of elements of all shards of a bucket, including padding."""
        return bucket.shard_size * self.num_shards_of(bucket)

    def __str__(self) -> str:
        """Returns a table with one line per bucket."""
        lines = [f"{'bucket':>6}  {'dtype':<9} {'dim':>4} {'shard':>12} {'pad %':>6}  leaves"]
        for i, b in enumerate(self.buckets):
            names = ", ".join(self.leaves[k].path for k in b.leaves[:3])
            more = f" (+{len(b.leaves) - 3})" if len(b.leaves) > 3 else ""
            dim = "pack" if b.is_packed else b.dim
            pad = 100 * b.padding / max(1, self.whole_size(b))
            lines.append(
                f"{i:>6}  {b.dtype!s:<9} {dim:>4} {b.shard_size:>12} {pad:>6.2f}  {names}{more}"
            )
        return "\n".join(lines)


_MIN_SCATTERED_SIZE = 1 << 14  # elements; below, one collective per leaf costs more than packing


def make_layout(
    leaves: Sequence[Leaf],
    num_shards: int,
    bucket_bytes: int,
    *,
    packs: bool | None = None,
    keeps_main: Callable[[Any, bool], bool] = lambda dtype, is_held: True,
    num_inner_shards: int | None = None,
    shards_params: bool = False,
    gathers_layers: bool = False,
    in_blocks: bool = False,
) -> Layout:
    """Assigns every leaf to a bucket and every bucket to its position.

    Args:
      leaves: The parameters. Frozen ones and those without elements are in no bucket.
      num_shards: Number of devices that share the state.
      bucket_bytes: Upper limit of a packed bucket, in bytes of its parameters. A larger leaf is its
        own bucket.
      packs: Whether small leaves are packed, which helps if anything is sent. None: if there are
        several shards.
      keeps_main: ``keeps_main(dtype, is_held)``: whether main parameters are stored for leaves of
        a dtype; ``is_held``: whether devices hold shards of them.
      num_inner_shards: Number of shards of the sum over shard_axes. None: num_shards.
      shards_params: Whether devices hold only shards of scattered parameters.
      gathers_layers: Whether devices gather those of stacked leaves layer by layer, if they hold
        shards of them.
      in_blocks: Whether leaves are cut only at multiples of ``BLOCK`` elements, so that blocks of
        coded moments, and random bits, are those of whole leaves.

    Example:
      >>> leaves = [Leaf("w", (512, 64), "float32", 0), Leaf("b", (3,), "float32", 0)]
      >>> for bucket in make_layout(leaves, 4, 1 << 20).buckets:
      ...     print(bucket.leaves, bucket.dim, bucket.shard_shape, bucket.padding, bucket.offset)
      (0,) 0 (128, 64) 0 0
      (1,) None (1,) 1 8192
    """
    packs = num_shards > 1 if packs is None else packs
    num_inner_shards = num_inner_shards or num_shards
    leaf_alignment = BLOCK if in_blocks else 1
    members = _members(leaves, num_shards, bucket_bytes, packs, leaf_alignment)
    first = [leaves[m.leaves[0]] for m in members]
    is_held = [
        shards_params and not (m.is_packed or leaf.rests_whole)
        for m, leaf in zip(members, first, strict=True)
    ]
    # Those with main parameters first, because the flat array of main parameters is shorter.
    has_main = [keeps_main(leaf.dtype, held) for leaf, held in zip(first, is_held, strict=True)]
    buckets, ends = list[Bucket](), collections.Counter[str]()
    for i in sorted(range(len(members)), key=lambda i: not has_main[i]):
        bucket = _bucket(leaves, members[i], num_shards, num_inner_shards, leaf_alignment)
        kind = "coded" if bucket.is_coded else "uncoded"
        bucket = dataclasses.replace(
            bucket,
            offset=ends["all"],
            moment_offset=ends[kind],
            has_main=has_main[i],
            is_sharded_param=is_held[i],
            num_layers=bucket.num_layers if gathers_layers and is_held[i] else None,
        )
        buckets.append(bucket)
        ends.update(dict.fromkeys(("all", kind), aligned(bucket.shard_size)))
    return Layout(num_shards, tuple(leaves), tuple(buckets))


class _Members(NamedTuple):
    """The leaves of a bucket, and the dimension along which its only leaf is cut; None: packed."""

    leaves: list[int]
    dim: int | None = None

    @property
    def is_packed(self) -> bool:
        return self.dim is None


def _members(
    leaves: Sequence[Leaf], num_shards: int, bucket_bytes: int, packs: bool, leaf_alignment: int
) -> list[_Members]:
    """The leaves of each bucket."""
    scattered: list[_Members] = []
    packed: list[int] = []
    for i, leaf in enumerate(leaves):
        if leaf.size and leaf.group is not None:
            dim = _scatter_dim(leaf, num_shards // leaf.split, leaf_alignment)
            is_small = packs and leaf.size < _MIN_SCATTERED_SIZE
            if dim is not None and not is_small:
                scattered.append(_Members([i], dim))
            elif packs:
                packed.append(i)
            else:
                scattered.append(_Members([i]))
    return scattered + [_Members(run) for run in _pack(leaves, packed, bucket_bytes)]


def _bucket(
    leaves: Sequence[Leaf],
    members: _Members,
    num_shards: int,
    num_inner_shards: int,
    leaf_alignment: int,
) -> Bucket:
    """A bucket, without the fields that depend on the others."""
    first = leaves[members.leaves[0]]
    total = sum(-(-leaves[i].size // leaf_alignment) * leaf_alignment for i in members.leaves)
    dim, is_packed, num_shards = members.dim, members.is_packed, num_shards // first.split
    padding = -total % (num_shards * leaf_alignment) if is_packed else 0
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
        num_layers=first.shape[0] if first.layers == SCAN and not is_packed else None,
        inner_shape=_cut(whole_shape, dim or 0, num_inner_shards // first.split),
        split=first.split,
        leaf_alignment=leaf_alignment if is_packed else 1,
        is_coded=first.is_coded,
    )


def _cut(shape: tuple[int, ...], dim: int, num_shards: int) -> tuple[int, ...]:
    return (*shape[:dim], shape[dim] // num_shards, *shape[dim + 1 :])


def aligned(size: int) -> int:
    """Returns a number of elements, rounded up to a multiple of ``ALIGNMENT``."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _scatter_dim(leaf: Leaf, num_shards: int, leaf_alignment: int) -> int | None:
    """The first dimension that divides; None if there is none.

    Each shard then has pieces of a multiple of ``leaf_alignment`` elements.
    """
    for dim in range(1 if leaf.layers == SCAN else 0, len(leaf.shape)):
        piece = math.prod(leaf.shape[dim:])
        divides = leaf.shape[dim] % num_shards == 0
        if divides and (num_shards == 1 or piece // num_shards % leaf_alignment == 0):
            return dim
    return None


def _pack(leaves: Sequence[Leaf], members: Sequence[int], bucket_bytes: int) -> list[list[int]]:
    """Splits leaves into runs of one kind, none above bucket_bytes except for a single leaf."""
    by_kind: dict[Any, list[int]] = {}
    for i in members:
        leaf = leaves[i]
        kind = (jnp.dtype(leaf.dtype), leaf.group, leaf.tensor_axes, leaf.is_coded)
        by_kind.setdefault(kind, []).append(i)
    nbytes = [leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in leaves]
    runs = (runs_within(x, [nbytes[i] for i in x], bucket_bytes) for x in by_kind.values())
    return list(itertools.chain(*runs))
