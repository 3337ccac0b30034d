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
from jdistadam.distributed.flat_moments import is_flat_codes
from jdistadam.distributed.layout import ALIGNMENT, Bucket, Layout
from jdistadam.distributed.packing import shard_of
from jdistadam.distributed.transformation import DistributedTransformation


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


class FlatArrays:
    """What a distributed state has in flat arrays, as arrays of the shapes of leaves."""

    def __init__(self, tx: DistributedTransformation, params: Any) -> None:
        """Takes the optimizer and its params, or their shapes."""
        self.config: DistributedConfig = tx.config
        self.layout: Layout = tx.layout(params)
        specs = self.config.tensor_specs(params)
        self._specs: list[P] = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P))

    def places(self, bucket: Bucket) -> list[NamedSharding]:
        """Returns how the leaves of a bucket are placed by ``extract``, and for ``insert``."""
        return [NamedSharding(self.config.mesh, spec) for spec in self._form(bucket).specs]

    def new(self, section: str) -> Any:
        """Returns "mu", "nu" or "main_params", all zero; None where there are none."""
        if section != "main_params":
            return moment_codes.new_moment(self.config, self.layout, section)
        size, dtype = self.layout.main_size, self.config.policy.main_params.dtype
        return self._zeros(size, dtype) if size else None

    def extract(self, bucket: Bucket, section: str, flat: Any) -> list[jax.Array]:
        """Returns the leaves of a bucket, in the order of ``bucket.leaves``; of codes float32."""
        offset = bucket.offset
        if is_flat_codes(flat):
            flat, offset = moment_codes.decoded_shards(self.config, bucket, section, flat), 0
        leaves: list[jax.Array] = _extractor(self._form(bucket))(flat, offset // ALIGNMENT)
        # [Note: one collective at a time]
        return jax.block_until_ready(leaves) if bucket.is_packed else leaves

    def insert(self, bucket: Bucket, section: str, flat: Any, leaves: Sequence[jax.Array]) -> Any:
        """Puts leaves of a bucket, float32 for codes, into flat arrays, which are donated."""
        put = _inserter(self._form(bucket))
        if not is_flat_codes(flat):
            return put(flat, bucket.offset // ALIGNMENT, list(leaves))
        empty = self._zeros(-(-bucket.shard_size // ALIGNMENT) * ALIGNMENT, jnp.float32)
        shards = put(empty, 0, list(leaves))
        return moment_codes.with_shards(self.config, bucket, section, flat, shards)

    def _zeros(self, size: int, dtype: Any) -> jax.Array:
        """A flat array of zeros, of ``size`` elements on each device."""
        parallel = self.config.parallel
        total = size * parallel.num_shards * parallel.size(parallel.tensor_axes)
        sharding = NamedSharding(self.config.mesh, parallel.state_spec)
        flat: jax.Array = jax.jit(lambda: jnp.zeros((total,), dtype), out_shardings=sharding)()
        return flat

    def _form(self, bucket: Bucket) -> _Form:
        parallel, layout = self.config.parallel, self.layout
        mine = [self._specs[i] for i in bucket.leaves]
        if not bucket.is_packed:
            mine = [param_specs.with_axes(mine[0], bucket.cut_dim, parallel.state_axes)]
        return _Form(
            mesh=self.config.mesh,
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
