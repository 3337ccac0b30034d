"""Where every parameter is when the optimizer state is sharded. Static: made from shapes alone.

A *bucket* is what one collective sends. A large leaf with a dimension that divides by the
number of shards is a bucket of its own and is scattered along that dimension, where it is:
nothing is packed or unpacked. All other leaves are flattened and packed, with leaves of the same
dtype and group, into buckets of up to ``bucket_bytes``, padded at the end. Where parameters rest as
shards (``params_at_rest``), small leaves that divide are packed apart, shard by shard: device i
owns its shard of each of them, rather than the i-th part of all of them one behind the other.

The shards of all buckets that one device owns are stored one behind the other in a few *flat*
arrays, one for each kind of state, at the offsets written here. Where one device holds everything
nothing is packed. Parameters that have a main copy come first, so that the flat array of main
parameters is shorter than the others and shares their offsets.

[Note: stored leaves]
Leaves are stored, that is flattened, cut and sent, with their dimensions in the order in which they
are in memory (``formats``): packing.py brings them from the order of the parameter's dimensions
into that one and back, which moves nothing where they are laid out so. Shapes and dimensions of
buckets are those of stored leaves; outside of this folder those of parameters are meant.

Two devices, and the params w (256, 128) and b (3,) in bfloat16, s (128, 128) in float32, of which
only the first two have main parameters::

                   device 0                                 device 1
    bucket 0: w    w[0:128]                                 w[128:256]
    bucket 1: b    b[0], b[1]                               b[2], padding
    bucket 2: s    s[0:64]                                  s[64:128]

    offset         0            16384       16512           24704
    mu, nu         | w (16384)  | b (2) --- | s (8192)      |    flat_size = 24704
    main_params    | w (16384)  | b (2) --- |                    main_size = 16512

Dashes are a gap: every shard begins at a multiple of ``ALIGNMENT`` elements. The global array of mu
is the flat arrays of all devices, one behind the other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdistadam.core.formats import Order, Orders, leaf_dims, stored_dims

ALIGNMENT = 128
"""Shards begin at multiples of this many elements: 16-byte vectors of every dtype stay aligned."""

_MIN_SCATTERED_SIZE = 1 << 14  # elements; below, one collective a leaf costs more than packing


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A parameter as the layout sees it."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    group: int | None  # row of the coefficients; None: frozen
    tensor_axes: tuple[str, ...] = ()  # mesh axes, besides those of data, over which it is sharded
    is_stacked: bool = False  # its first dimension is scanned, and never scattered
    cuts: tuple[tuple[int, ...], ...] = ()  # for each dimension, which tensor axes cut it
    order: Order | None = None  # of its dimensions in memory; None: row-major

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Its shape with the dimensions in the order in which they are in memory."""
        return stored_dims(self.shape, self.order)


class HeldLeaf(NamedTuple):
    """What a device holds of a parameter between steps, where that is a shard.

    Attributes:
      leaf: Its index.
      dim: The dimension along which it is cut, as stored.
      shape: Shape of the shard, as stored.
      order: In which order its dimensions are stored.
    """

    leaf: int
    dim: int
    shape: tuple[int, ...]
    order: Order | None = None

    @property
    def param_dim(self) -> int:
        """The dimension of the parameter along which it is cut."""
        return self.dim if self.order is None else self.order[self.dim]

    @property
    def param_shape(self) -> tuple[int, ...]:
        """Shape of the shard, as a device holds it."""
        return leaf_dims(self.shape, self.order)


@dataclasses.dataclass(frozen=True)
class Bucket:
    """What one collective sends.

    Attributes:
      leaves: Indices of its leaves.
      dim: Dimension along which its one leaf is scattered, as stored, and so are all shapes here;
        None: its leaves are packed.
      dtype: Dtype of its parameters.
      group: Row of the coefficients.
      shard_shape: Shape of one device's shard, ``(shard_size,)`` if packed.
      padding: Elements at the end of a packed bucket that belong to no leaf.
      offset: Where the shard begins in a device's flat arrays, in elements.
      has_main: Whether its main parameters, or their remainders, are kept.
      tensor_axes: Mesh axes, besides those of data, over which its leaves are sharded.
      num_layers: First dimension of a stacked leaf of which devices hold shards, and which is sent
        layer by layer; otherwise None.
      inner_shape: Shape of one device's part after the sum over shard_axes: that of the shard,
        unless the state is sharded over replica_axes too.
      held: What devices hold of its parameters, if that is shards. If packed, a device's shard of
        the bucket then consists of its shards of the leaves, one behind the other.
      orders: In which order the dimensions of each leaf are stored; () where all are row-major.
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
    held: tuple[HeldLeaf, ...] = ()
    orders: Orders = ()

    @property
    def is_sharded_param(self) -> bool:
        """Whether devices hold shards of its parameters, rather than whole ones."""
        return bool(self.held)

    @property
    def held_shape(self) -> tuple[int, ...]:
        """Shape of the part of its array that devices hold, where that is a shard."""
        return self.shard_shape if self.is_packed else self.held[0].shape

    @property
    def shard_size(self) -> int:
        """Number of elements in one device's shard."""
        return math.prod(self.shard_shape)

    @property
    def inner_size(self) -> int:
        """Number of elements in one device's part after the sum over shard_axes."""
        return math.prod(self.inner_shape)

    @property
    def is_packed(self) -> bool:
        """Whether its leaves are flattened and packed, rather than one leaf as it is."""
        return self.dim is None

    @property
    def cut_dim(self) -> int:
        """The dimension along which its array is cut into shards: a packed one has but one."""
        return 0 if self.dim is None else self.dim

    @property
    def leaf(self) -> int:
        """Index of its one leaf, of a bucket that is not packed."""
        (leaf,) = self.leaves
        return leaf

    @property
    def leaf_orders(self) -> Orders:
        """In which order the dimensions of each leaf are stored."""
        return self.orders or (None,) * len(self.leaves)

    @property
    def order(self) -> Order | None:
        """In which order those of its one leaf are, of a bucket that is not packed."""
        return None if self.is_packed else self.leaf_orders[0]

    @property
    def param_dim(self) -> int:
        """The dimension of its one leaf along which that is cut; 0 if it is packed."""
        return self.cut_dim if self.order is None else self.order[self.cut_dim]

    @property
    def inner_param_shape(self) -> tuple[int, ...]:
        """``inner_shape`` with the dimensions in the order of the parameter's."""
        return leaf_dims(self.inner_shape, self.order)


@dataclasses.dataclass(frozen=True)
class Layout:
    """All buckets, and the sizes of a device's flat arrays.

    Attributes:
      num_shards: Number of devices that share the state.
      leaves: The parameters.
      buckets: The buckets, in their order in the flat arrays.
      flat_size: Elements of a device's mu and nu. Leaves without elements are in no bucket.
      main_size: Elements of a device's main parameters.
    """

    num_shards: int
    leaves: tuple[Leaf, ...]
    buckets: tuple[Bucket, ...]
    flat_size: int
    main_size: int

    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Returns shape and dtype of every leaf, as unsharded params have them."""
        return [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in self.leaves]

    def whole_size(self, bucket: Bucket) -> int:
        """Returns the number of elements of a bucket on all devices, padding included."""
        return bucket.shard_size * self.num_shards

    def __str__(self) -> str:
        """Returns a table with one line a bucket."""
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


def make_layout(
    leaves: Sequence[Leaf],
    num_shards: int,
    bucket_bytes: int,
    *,
    packs: bool | None = None,
    keeps_main: Callable[[Any, bool], bool] = lambda dtype, scattered: True,
    num_inner_shards: int | None = None,
    shards_params: bool = False,
    rests_with_state: bool = False,
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
      rests_with_state: Whether these are the parts of which they have the state; then small
        parameters that divide are held as shards too, and packed shard by shard.

    Example:
      >>> leaves = [Leaf("w", (512, 64), "float32", 0), Leaf("b", (3,), "float32", 0)]
      >>> for bucket in make_layout(leaves, 4, 1 << 20).buckets:
      ...     print(bucket.leaves, bucket.dim, bucket.shard_shape, bucket.padding, bucket.offset)
      (0,) 0 (128, 64) 0 0
      (1,) None (1,) 1 8192
    """
    packs = num_shards > 1 if packs is None else packs
    members = _members(leaves, num_shards, bucket_bytes, packs, rests_with_state)
    # Those with main parameters first: the flat array of main parameters is the shorter one.
    has_main = [keeps_main(leaves[m.leaves[0]].dtype, bool(m.dims)) for m in members]
    buckets: list[Bucket] = []
    offset = main_size = 0
    for i in sorted(range(len(members)), key=lambda i: not has_main[i]):
        bucket = _bucket(leaves, members[i], num_shards)
        num_held = num_shards if rests_with_state else num_inner_shards or num_shards
        bucket = dataclasses.replace(
            bucket,
            offset=offset,
            has_main=has_main[i],
            inner_shape=_scaled(
                bucket.shard_shape, bucket.cut_dim, num_shards // (num_inner_shards or num_shards)
            ),
            held=_held(leaves, members[i], num_held) if shards_params else (),
            num_layers=bucket.num_layers if shards_params and not rests_with_state else None,
        )
        buckets.append(bucket)
        offset += _aligned(bucket.shard_size)
        main_size = offset if bucket.has_main else main_size
    return Layout(num_shards, tuple(leaves), tuple(buckets), offset, main_size)


class _Members(NamedTuple):
    """The leaves of a bucket, and along which dimensions they are cut; () if they are not."""

    leaves: list[int]
    dims: tuple[int, ...]
    is_packed: bool


def _members(
    leaves: Sequence[Leaf], num_shards: int, bucket_bytes: int, packs: bool, cuts_small: bool
) -> list[_Members]:
    """The leaves of each bucket; with ``cuts_small``, packed ones that divide stand together."""
    scattered: list[_Members] = []
    packed: dict[bool, list[int]] = {True: [], False: []}  # by whether they are cut
    dims: dict[int, int] = {}
    for i, leaf in enumerate(leaves):
        if leaf.size and leaf.group is not None:
            dim = _scatter_dim(leaf, num_shards)
            is_small = packs and leaf.size < _MIN_SCATTERED_SIZE
            if dim is not None and not is_small:
                scattered.append(_Members([i], (dim,), is_packed=False))
            elif packs:
                if dim is not None and cuts_small:
                    dims[i] = dim
                packed[i in dims].append(i)
            else:
                scattered.append(_Members([i], (), is_packed=True))
    runs = [run for is_cut in packed for run in _pack(leaves, packed[is_cut], bucket_bytes)]
    return scattered + [
        _Members(run, tuple(dims[i] for i in run if i in dims), is_packed=True) for run in runs
    ]


def _bucket(leaves: Sequence[Leaf], members: _Members, num_shards: int) -> Bucket:
    """A bucket, without what depends on the others."""
    first = leaves[members.leaves[0]]
    total = sum(leaves[i].size for i in members.leaves)
    is_packed = members.is_packed
    dim = None if is_packed else members.dims[0]
    whole_shape = (total + -total % num_shards,) if is_packed else first.stored_shape
    orders = tuple(leaves[i].order for i in members.leaves)
    return Bucket(
        leaves=tuple(members.leaves),
        dim=dim,
        dtype=first.dtype,
        group=first.group or 0,
        shard_shape=_cut(whole_shape, dim or 0, num_shards),
        padding=-total % num_shards if is_packed else 0,
        offset=0,
        has_main=False,
        tensor_axes=first.tensor_axes,
        num_layers=first.shape[0] if first.is_stacked and not is_packed else None,
        orders=orders if any(orders) else (),
    )


def _held(leaves: Sequence[Leaf], members: _Members, num_held: int) -> tuple[HeldLeaf, ...]:
    """What devices hold of the leaves of a bucket; nothing if they are not cut."""
    if not members.dims:
        return ()
    return tuple(
        HeldLeaf(i, dim, _cut(leaves[i].stored_shape, dim, num_held), leaves[i].order)
        for i, dim in zip(members.leaves, members.dims, strict=True)
    )


def _cut(shape: tuple[int, ...], dim: int, num_shards: int) -> tuple[int, ...]:
    return (*shape[:dim], shape[dim] // num_shards, *shape[dim + 1 :])


def _scaled(shape: tuple[int, ...], dim: int, factor: int) -> tuple[int, ...]:
    return (*shape[:dim], shape[dim] * factor, *shape[dim + 1 :])


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _scatter_dim(leaf: Leaf, num_shards: int) -> int | None:
    """The first dimension, as stored, that divides; None if there is none."""
    dims = range(1 if leaf.is_stacked else 0, len(leaf.shape))
    return next((dim for dim in dims if leaf.stored_shape[dim] % num_shards == 0), None)


def _pack(leaves: Sequence[Leaf], members: Sequence[int], bucket_bytes: int) -> list[list[int]]:
    """Splits leaves into runs of one kind, none above bucket_bytes unless alone."""
    by_kind: dict[Any, list[list[int]]] = {}
    filled: dict[Any, int] = {}
    for i in members:
        leaf = leaves[i]
        kind = (jnp.dtype(leaf.dtype), leaf.group, leaf.tensor_axes)
        nbytes = leaf.size * jnp.dtype(leaf.dtype).itemsize
        if kind not in by_kind or filled[kind] + nbytes > bucket_bytes:
            by_kind.setdefault(kind, []).append([])
            filled[kind] = 0
        by_kind[kind][-1].append(i)
        filled[kind] += nbytes
    return [run for runs in by_kind.values() for run in runs]
