"""The leaves of a bucket out of a flat array, and into it, outside of ``jax.shard_map``.

A scattered leaf keeps its shards: nothing is sent. The leaves of a packed bucket are gathered,
because one leaf may be on several devices; such a bucket is small.

[Note: programs of few leaves]
The time in which XLA compiles a program grows with the number of its arrays, for thousands of them
faster than linearly. No program here therefore takes or returns more than a few leaves. Leaves of
equal shapes share a program, which gets the start of each as an argument.

[Note: one collective at a time]
Virtual CPU devices share a pool of threads. If two independent programs with collectives start one
after the other, each can get some of the threads and wait forever for the devices that have none.
Every caller that starts such a program therefore waits for it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jdistadam import compat
from jdistadam.core import collectives, memory
from jdistadam.core.codecs import NOTHING, Codec
from jdistadam.core.trees import batches_of_equals
from jdistadam.distributed.layout import ALIGNMENT, Bucket, Layout
from jdistadam.distributed.mesh_axes import DataParallel, with_axes
from jdistadam.distributed.packing import shard_of

_MOST_LEAVES = 16  # of a packed bucket, in one program
_MANY = 1000  # leaves of params, for a program that takes all of them


def are_many(layout: Layout) -> bool:
    """Whether params have too many leaves for one program: [Note: programs of few leaves]."""
    return len(layout.leaves) > _MANY


@dataclasses.dataclass(frozen=True)
class Form:
    """Everything that determines the programs of a bucket; buckets of one form share them."""

    parallel: DataParallel
    is_packed: bool
    shard_shape: tuple[int, ...]
    padding: int
    starts: tuple[int, ...]  # of leaves in a packed bucket, and the end of the last one
    shapes: tuple[tuple[int, ...], ...]  # of the leaves of one tensor-parallel shard
    specs: tuple[P, ...]
    flat_spec: P  # of the flat array
    codec: Codec = NOTHING  # in which leaves are stored that are put in as exact values

    @property
    def size(self) -> int:
        """Elements of a shard."""
        return math.prod(self.shard_shape)

    @property
    def num_rows(self) -> int:
        """A shard in rows of ALIGNMENT: in rows, every offset fits into 32 bits."""
        return -(-self.size // ALIGNMENT)

    @property
    def shardings(self) -> list[NamedSharding]:
        """The sharding of each leaf."""
        return [NamedSharding(self.parallel.mesh, spec) for spec in self.specs]

    @property
    def joined(self) -> Form:
        """The form of a packed bucket whose leaves are one array, with the padding."""
        size = self.starts[-1] + self.padding
        one: dict[str, Any] = {"starts": (0, size), "shapes": ((size,),), "padding": 0}
        return dataclasses.replace(self, specs=(self.joined_spec,), **one)

    @property
    def joined_spec(self) -> P:
        """The PartitionSpec of that array: each tensor-parallel shard has its own."""
        return P(self.parallel.tensor_axes) if self.parallel.tensor_axes else P()

    def batches(self) -> list[list[int]]:
        """The leaves of each program; a single batch if they are few."""
        return batches_of_equals(list(zip(self.shapes, self.specs, strict=True)), _MOST_LEAVES)

    def some(self, batch: Sequence[int]) -> Form:
        """The form of some leaves, wherever they start."""
        kinds = [(self.shapes[i], self.specs[i]) for i in batch]
        shapes, specs = zip(*kinds, strict=True)
        return Form(self.parallel, True, (), 0, (), shapes, specs, self.flat_spec)

    def compiled(self, local: Any, in_specs: Any, out_specs: Any, **kwargs: Any) -> Any:
        """Compiles a function of each device's shards."""
        mesh = self.parallel.mesh
        mapped = compat.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
        return jax.jit(mapped, **kwargs)


def form_of(config: Any, layout: Layout, bucket: Bucket, tensor_specs: Sequence[P]) -> Form:
    """Returns the form of a bucket of a ``DistributedConfig``.

    Args:
      config: The configuration.
      layout: The layout.
      bucket: The bucket.
      tensor_specs: For all leaves, PartitionSpecs over tensor axes.
    """
    leaves = [layout.leaves[i] for i in bucket.leaves]
    parallel, flat_spec = config.parallel.without(bucket.tensor_axes), config.parallel.state_spec
    starts = tuple(bucket.starts(leaf.size for leaf in leaves))
    shapes = tuple(leaf.shape for leaf in leaves)
    specs = tuple(tensor_specs[i] for i in bucket.leaves)
    if not bucket.is_packed:
        specs = (with_axes(specs[0], bucket.cut_dim, parallel.state_axes),)
    is_packed, shape, padding = bucket.is_packed, bucket.shard_shape, bucket.padding
    return Form(parallel, is_packed, shape, padding, starts, shapes, specs, flat_spec)


def extracted(form: Form, flat: Any, offset: int) -> list[jax.Array]:
    """Returns the leaves of a bucket whose shards begin at an offset of a flat array."""
    batches, row = form.batches(), offset // ALIGNMENT
    leaves: list[Any] = [None] * len(form.shapes)
    if len(batches) == 1:
        leaves = _extractor(form)(flat, row)
    else:
        (whole,) = _extractor(form.joined)(flat, row)
        for batch in batches:
            starts = np.asarray([form.starts[i] for i in batch], np.int32)
            for i, x in zip(batch, _cutter(form.some(batch))(whole, starts), strict=True):
                leaves[i] = x
    # [Note: one collective at a time]
    return jax.block_until_ready(leaves) if form.is_packed else leaves


def inserted(form: Form, flat: Any, offset: int, leaves: Sequence[Any]) -> jax.Array:
    """Returns a flat array, which is donated, with a bucket's leaves put in at an offset.

    Without a flat array, it returns the shards in whole rows.
    """
    batches, leaves = form.batches(), list(leaves)
    if len(batches) > 1:
        (sharding,) = form.joined.shardings
        size = form.parallel.size(form.parallel.tensor_axes) * form.joined.starts[-1]
        whole = jnp.zeros((size,), leaves[0].dtype, device=sharding)
        for batch in batches:
            starts = np.asarray([form.starts[i] for i in batch], np.int32)
            whole = _joiner(form.some(batch))(whole, starts, [leaves[i] for i in batch])
        form, leaves = form.joined, [whole]
    new: jax.Array = _inserter(form)(flat, offset // ALIGNMENT, leaves)
    return new


@functools.lru_cache(maxsize=4096)
def _extractor(form: Form) -> Any:
    """A program that cuts the leaves of a bucket out of a flat array, from a row on."""

    def local(flat: jax.Array, row: jax.Array) -> list[jax.Array]:
        shard = memory.cut_rows(flat, row, form.num_rows, ALIGNMENT)[: form.size]
        if not form.is_packed:
            return [shard.reshape(form.shard_shape)]
        whole = collectives.all_gather(shard, form.parallel.state_axes, dim=0, to="varying")
        return [
            whole[start : start + math.prod(shape)].reshape(shape)
            for start, shape in zip(form.starts, form.shapes, strict=False)
        ]

    return form.compiled(local, (form.flat_spec, P()), list(form.specs))


@functools.lru_cache(maxsize=4096)
def _inserter(form: Form) -> Any:
    """The inverse; without a flat array, it returns the shards in whole rows."""
    spec = form.flat_spec

    def local(flat: Any, row: jax.Array, leaves: list[jax.Array]) -> jax.Array:
        shard = leaves[0].reshape(-1)
        if form.is_packed:
            whole = jnp.zeros((form.starts[-1] + form.padding,), shard.dtype)
            for start, x in zip(form.starts, leaves, strict=False):
                whole = lax.dynamic_update_slice_in_dim(whole, x.reshape(-1), start, 0)
            index = collectives.axis_index(form.parallel.state_axes)
            shard = shard_of(whole, index, whole.size // form.size, 0)
        rows = jnp.pad(shard, (0, form.num_rows * ALIGNMENT - form.size))
        if form.codec.is_stored:
            _, rows = form.codec.split(rows.astype(jnp.float32), jnp.bfloat16, jnp)
        return rows if flat is None else memory.put_rows(flat, rows, row, ALIGNMENT)

    return form.compiled(local, (spec, P(), list(form.specs)), spec, donate_argnums=0)


@functools.lru_cache(maxsize=4096)
def _cutter(form: Form) -> Any:
    """A program that cuts some leaves out of a joined bucket."""

    def local(whole: jax.Array, starts: jax.Array) -> list[jax.Array]:
        return [
            lax.dynamic_slice_in_dim(whole, starts[i], math.prod(shape)).reshape(shape)
            for i, shape in enumerate(form.shapes)
        ]

    return form.compiled(local, (form.joined_spec, P()), list(form.specs))


@functools.lru_cache(maxsize=4096)
def _joiner(form: Form) -> Any:
    """A program that puts some leaves into a joined bucket, which is donated."""

    def local(whole: jax.Array, starts: jax.Array, leaves: list[jax.Array]) -> jax.Array:
        for i, x in enumerate(leaves):
            whole = lax.dynamic_update_slice_in_dim(whole, x.reshape(-1), starts[i], 0)
        return whole

    spec = form.joined_spec
    return form.compiled(local, (spec, P(), list(form.specs)), spec, donate_argnums=0)
