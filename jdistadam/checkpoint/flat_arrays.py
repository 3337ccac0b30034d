"""Between the flat arrays of a distributed state and arrays of the shapes of leaves, by bucket.

An array that is scattered where it is keeps its shards: nothing is sent. The leaves of a packed
bucket are gathered, as one of them may be on several devices; a bucket is small.

[Note: one collective at a time]
Virtual CPU devices share a pool of threads. Of two programs with collectives that are started one
after the other, and need nothing of each other, each can get a part of the threads and wait forever
for the devices that have none. So whoever starts such a program waits for it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jdistadam import compat
from jdistadam.core import collectives
from jdistadam.distributed import moment_codes, param_specs
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.flat_moments import FlatCodes
from jdistadam.distributed.layout import ALIGNMENT, Bucket, Layout
from jdistadam.distributed.packing import shard_of


@dataclasses.dataclass(frozen=True)
class _Form:
    """All that the two programs of a bucket depend on; buckets of one form share them."""

    mesh: Mesh
    state_axes: tuple[str, ...]
    state_spec: P
    is_packed: bool
    shard_shape: tuple[int, ...]
    padding: int
    starts: tuple[int, ...]  # of leaves in a packed bucket, and where the last one ends
    shapes: tuple[tuple[int, ...], ...]  # of the parts of leaves that a tensor-parallel part has
    specs: tuple[P, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shard_shape)

    @property
    def num_rows(self) -> int:
        """A shard in rows of ALIGNMENT: counted so, 32 bits hold every offset."""
        return -(-self.size // ALIGNMENT)


def shardings_of(
    config: DistributedConfig, layout: Layout, bucket: Bucket, specs: Sequence[P]
) -> list[NamedSharding]:
    """Returns how the arrays of a bucket's leaves are placed: as ``extract`` returns them.

    Args:
      config: The configuration.
      layout: The layout.
      bucket: One of its buckets.
      specs: PartitionSpec of every leaf over tensor axes alone.
    """
    form = _form(config, layout, bucket, specs)
    return [NamedSharding(config.mesh, spec) for spec in form.specs]


def extract(
    config: DistributedConfig, layout: Layout, bucket: Bucket, specs: Sequence[P], flat: jax.Array
) -> list[jax.Array]:
    """Returns the leaves of a bucket, from a flat array: in the order of ``bucket.leaves``."""
    form = _form(config, layout, bucket, specs)
    leaves: list[jax.Array] = _extractor(form)(flat, bucket.offset // ALIGNMENT)
    # [Note: one collective at a time]
    return jax.block_until_ready(leaves) if bucket.is_packed else leaves


def extract_decoded(
    config: DistributedConfig,
    layout: Layout,
    bucket: Bucket,
    specs: Sequence[P],
    moment: FlatCodes,
    name: str,
) -> list[jax.Array]:
    """As ``extract``, from the moment "mu" or "nu" in codes: float32."""
    shards = moment_codes.decoded_shards(config, bucket, name, moment)
    return extract(config, layout, dataclasses.replace(bucket, offset=0), specs, shards)


def insert_encoded(
    config: DistributedConfig,
    layout: Layout,
    bucket: Bucket,
    specs: Sequence[P],
    moment: FlatCodes,
    name: str,
    leaves: Sequence[jax.Array],
) -> FlatCodes:
    """As ``insert``, of float32 leaves, into the moment "mu" or "nu" in codes."""
    empty = zeros(config, -(-bucket.shard_size // ALIGNMENT) * ALIGNMENT, jnp.float32)
    alone = dataclasses.replace(bucket, offset=0)
    shards = insert(config, layout, alone, specs, empty, leaves)
    new: FlatCodes = moment_codes.with_shards(config, bucket, name, moment, shards)
    return new


def insert(
    config: DistributedConfig,
    layout: Layout,
    bucket: Bucket,
    specs: Sequence[P],
    flat: jax.Array,
    leaves: Sequence[jax.Array],
) -> jax.Array:
    """Puts the leaves of a bucket into a flat array, which is donated; returns the new one."""
    form = _form(config, layout, bucket, specs)
    new: jax.Array = _inserter(form)(flat, bucket.offset // ALIGNMENT, list(leaves))
    return new


def zeros(config: DistributedConfig, size: int, dtype: Any) -> jax.Array:
    """Returns a flat array of zeros, of ``size`` elements on each device."""
    parallel = config.parallel
    total = size * parallel.num_shards * parallel.size(parallel.tensor_axes)
    sharding = NamedSharding(config.mesh, parallel.state_spec)
    make = jax.jit(lambda: jnp.zeros((total,), dtype), out_shardings=sharding)
    flat: jax.Array = make()
    return flat


def _form(config: DistributedConfig, layout: Layout, bucket: Bucket, specs: Sequence[P]) -> _Form:
    parallel = config.parallel
    mine = [specs[i] for i in bucket.leaves]
    if not bucket.is_packed:
        mine = [param_specs.with_axes(mine[0], bucket.cut_dim, parallel.state_axes)]
    return _Form(
        mesh=config.mesh,
        state_axes=parallel.state_axes,
        state_spec=parallel.state_spec,
        is_packed=bucket.is_packed,
        shard_shape=bucket.shard_shape,
        padding=bucket.padding,
        starts=tuple(bucket.starts(layout.leaves[i].size for i in bucket.leaves)),
        shapes=tuple(layout.leaves[i].shape for i in bucket.leaves),
        specs=tuple(mine),
    )


@functools.lru_cache(maxsize=4096)
def _extractor(form: _Form) -> Any:
    def local(flat: jax.Array, row: jax.Array) -> list[jax.Array]:
        rows = flat.reshape(-1, ALIGNMENT)
        shard = lax.dynamic_slice_in_dim(rows, row, form.num_rows).reshape(-1)[: form.size]
        if not form.is_packed:
            return [shard.reshape(form.shard_shape)]
        whole = collectives.all_gather(shard, form.state_axes, dim=0, to="varying")
        return [
            whole[start : start + math.prod(shape)].reshape(shape)
            for start, shape in zip(form.starts, form.shapes, strict=False)
        ]

    return jax.jit(
        compat.shard_map(
            local,
            mesh=form.mesh,
            in_specs=(form.state_spec, P()),
            out_specs=list(form.specs),
        )
    )


@functools.lru_cache(maxsize=4096)
def _inserter(form: _Form) -> Any:
    def local(flat: jax.Array, row: jax.Array, leaves: list[jax.Array]) -> jax.Array:
        if form.is_packed:
            whole = jnp.zeros((form.starts[-1] + form.padding,), flat.dtype)
            for start, x in zip(form.starts, leaves, strict=False):
                whole = lax.dynamic_update_slice_in_dim(whole, x.reshape(-1), start, 0)
            num_shards = whole.size // form.size
            index = collectives.axis_index(form.state_axes)
            shard = shard_of(whole, index, num_shards, 0)
        else:
            shard = leaves[0].reshape(-1)
        gap = jnp.zeros((form.num_rows * ALIGNMENT - form.size,), flat.dtype)
        rows = jnp.concatenate([shard, gap]).reshape(-1, ALIGNMENT)
        lines = flat.reshape(-1, ALIGNMENT)
        return lax.dynamic_update_slice_in_dim(lines, rows, row, 0).reshape(-1)

    mapped = compat.shard_map(
        local,
        mesh=form.mesh,
        in_specs=(form.state_spec, P(), list(form.specs)),
        out_specs=form.state_spec,
    )
    return jax.jit(mapped, donate_argnums=0)
