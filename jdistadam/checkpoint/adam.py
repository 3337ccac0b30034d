"""Adam's moments and main parameters by parameter, in trees and in flat arrays.

Scattered arrays keep their shards: nothing is sent. The leaves of a packed bucket are gathered,
because one leaf may be on several devices; such a bucket is small.

[Note: one collective at a time]
Virtual CPU devices share a pool of threads. If two independent programs with collectives start one
after the other, each can get some of the threads and wait forever for the devices that have none.
So every caller that starts such a program waits for it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jdistadam import compat
from jdistadam.checkpoint import parts
from jdistadam.core import collectives, memory
from jdistadam.core.codecs import NOTHING, BlockCodes, Codec, codec_of, is_codes
from jdistadam.core.guards import (
    LossScaleState,
    NormGuardState,
    continued_loss_scale,
    continued_norm_guard,
)
from jdistadam.core.storage import main_codec_of
from jdistadam.distributed import flat_moments
from jdistadam.distributed.flat_moments import is_flat_codes
from jdistadam.distributed.flat_parts import part_of, with_part
from jdistadam.distributed.layout import ALIGNMENT, Bucket
from jdistadam.distributed.main_params import sent_dtypes
from jdistadam.distributed.mesh_axes import DataParallel, with_axes
from jdistadam.distributed.packing import shard_of
from jdistadam.kernels import sharded_quantized_adam
from jdistadam.training.placement import copy_to


@dataclasses.dataclass
class Param:
    """A parameter of a state and its optimizer state."""

    name: str
    like: Any  # the parameter, or its shape; None if there are only moments
    place: Sharding
    exact_at: Sharding | None = None  # where its exact value is read; None: it has no moments
    # Shape, dtype as floats and sharding of "mu", "nu" and "ema".
    moments: dict[str, jax.ShapeDtypeStruct] = dataclasses.field(default_factory=dict)
    kind: Codec = NOTHING  # which main parameter is kept for it
    main: Any = None  # the template's array with its main parameter
    sent: Any = None  # the dtype to which a step rounds it; None: it does not


class TreeAdam:
    """Moments and main parameters in the state of one program; each parameter is a unit."""

    sections: tuple[str, ...] = (*parts.MOMENTS, "main_params")

    def __init__(self, leaves: Sequence[parts.Leaf], place: Callable[[Any], Sharding]) -> None:
        """Takes the leaves of a template, and a function that returns an array's sharding."""
        self._place = place
        self._likes = {leaf.name: leaf.value for leaf in leaves if leaf.section}
        self._new: dict[str, Any] = {}
        of_params = (x for x in leaves if x.section in ("params", *parts.MOMENTS))
        names = dict.fromkeys(x.name.replace(x.section, "params", 1) for x in of_params)
        self.units: list[tuple[Any, list[Param]]] = [(name, [self._param(name)]) for name in names]

    def _param(self, name: str) -> Param:
        like, moments = self._likes.get(name), {}
        for section in parts.MOMENTS:
            if (x := self._like(section, name)) is not None:
                dtype, array = (jnp.float32, x.codes) if is_codes(x) else (x.dtype, x)
                place = self._place(array)
                moments[section] = jax.ShapeDtypeStruct(x.shape, dtype, sharding=place)
        place, main = self._place(like), self._like("main_params", name)
        return Param(name, like, place, place, moments, main_codec_of(main), main)

    def _like(self, section: str, name: str) -> Any:
        return self._likes.get(name.replace("params", section, 1))

    def put(self, section: str, name: str, found: Sequence[Any]) -> None:
        """Stores the moment or the main parameter of a parameter."""
        like, (x,) = self._like(section, name), found
        if is_codes(like):
            x = BlockCodes(*sharded_quantized_adam.encoded(section, codec_of(like), x))
        new = jax.device_put(x, jax.tree.map(self._place, like))
        self._new[name.replace("params", section, 1)] = new

    def finished(self, values: dict[str, Any]) -> dict[str, Any]:
        """Returns all arrays by name: the template's, or zeros, if none was put."""

        def kept(x: Any) -> Any:
            is_shape = isinstance(x, jax.ShapeDtypeStruct)
            return jnp.zeros(x.shape, x.dtype, device=self._place(x)) if is_shape else x

        names = {x for x in self._likes if x.startswith(self.sections)} - self._new.keys()
        return {name: jax.tree.map(kept, self._likes[name]) for name in names} | self._new


class FlatAdam:
    """Moments and main parameters in a distributed state; each bucket is a unit.

    Frozen and empty parameters have no bucket: they are units with None.
    """

    def __init__(self, params: Any, state: Any, tx: Any, *, starts_anew: bool = False) -> None:
        """Takes a state, or its shapes, and whether all of it will be put."""
        config = tx.config
        self.config, self.state, self._starts_anew = config, state, starts_anew
        self.layout = tx.layout(params)
        dtypes = {part: config.algorithm.storage.float_dtype(part) for part in parts.MOMENTS}
        if config.ema_decay is not None:
            dtypes["ema"] = jnp.dtype(jnp.float32)
        self.sections = (*dtypes, "main_params")
        self._tensor_specs = jax.tree.leaves(config.tensor_specs(params))
        placed = jax.tree.leaves(tx.param_shardings(params))
        sent = sent_dtypes(config.schedule(config.tensor_local(params)))
        named = zip(parts.leaves("params", params), placed, sent, strict=True)
        alone = {i: Param(x.name, x.value, at, sent=to) for i, (x, at, to) in enumerate(named)}
        self.units: list[tuple[Any, list[Param]]] = []
        for bucket in self.layout.buckets:
            mine = [alone.pop(i) for i in bucket.leaves]
            for param, spec in zip(mine, self._form(bucket).specs, strict=True):
                param.exact_at = place = NamedSharding(config.mesh, spec)
                if bucket.has_main:
                    param.kind = config.policy.main_params
                    param.main = part_of(state.main_params, bucket)
                for part, dtype in dtypes.items():
                    like = jax.ShapeDtypeStruct(param.like.shape, dtype, sharding=place)
                    param.moments[part] = like
            self.units.append((bucket, mine))
        self.units += [(None, [param]) for param in alone.values()]

    def extract(self, bucket: Bucket, section: str, flat: Any) -> list[jax.Array]:
        """Returns the leaves of a bucket, in the order of ``bucket.leaves``; float32 for codes."""
        flat, offset = part_of(flat, bucket), bucket.offset
        if is_flat_codes(flat):
            flat, offset = flat_moments.decoded_shards(self.config, bucket, section, flat), 0
        leaves: list[jax.Array] = _extractor(self._form(bucket))(flat, offset // ALIGNMENT)
        # [Note: one collective at a time]
        return jax.block_until_ready(leaves) if bucket.is_packed else leaves

    @functools.cached_property
    def _new(self) -> dict[str, Any]:
        """The flat arrays: the template's if some of it may stay, else zeros."""
        new = {}
        for section in self.sections:
            if (like := getattr(self.state, section)) is None:
                continue
            is_shape = any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(like))
            if self._starts_anew or is_shape:
                new[section] = flat_moments.zeros(self.config, self.layout, section)
            else:
                new[section] = copy_to(like, self.config.state_sharding(section))
        return new

    def put(self, section: str, bucket: Bucket, found: Sequence[Any]) -> None:
        """Stores a moment, or the main parameters, of a bucket's leaves; None: it stays."""
        flat, form = self._new[section], self._form(bucket)
        if any(x is None for x in found):
            old = self.extract(bucket, section, flat)
            found = [y if x is None else x for x, y in zip(found, old, strict=True)]
        part = part_of(flat, bucket)
        if is_flat_codes(part):
            shards = _inserter(form)(None, 0, list(found))
            new = flat_moments.with_shards(self.config, bucket, section, flat, shards)
        else:
            row = bucket.offset // ALIGNMENT
            new = with_part(flat, bucket, _inserter(form)(part, row, list(found)))
        self._new[section] = new

    def finished(self, values: dict[str, Any]) -> dict[str, Any]:
        """Returns the state under the name "", with ``values`` that the file may lack."""
        config, everywhere = self.config, NamedSharding(self.config.mesh, P())
        storage = config.algorithm.storage

        def saved(part: str, kind: Any) -> Any:
            found = kind(*(values.get(f"{part}.{x}") for x in kind._fields))
            return jax.tree.map(np.asarray, found) if jax.tree.leaves(found) else None

        scalars = {
            "grad_norm": values.get("grad_norm", np.float32(0)),
            "scaling": continued_loss_scale(config.loss_scale, saved("scaling", LossScaleState)),
            "guard": continued_norm_guard(config.norm_guard, saved("guard", NormGuardState)),
            "layout_digest": config.layout_digest(self.layout),
            "key": values.get("key", storage.key) if storage.is_stochastic else None,
        }
        placed = jax.device_put(copy_to(scalars, everywhere), everywhere)
        # On Explicit axes shardings come back in another spelling: device_put copies nothing.
        for section, flat in self._new.items():
            placed[section] = jax.device_put(flat, config.state_sharding(section))
        return {"": self.state._replace(count=values["count"], **placed)}

    def _form(self, bucket: Bucket) -> _Form:
        parallel, leaves = self.config.parallel, [self.layout.leaves[i] for i in bucket.leaves]
        starts = tuple(bucket.starts(leaf.size for leaf in leaves))
        shapes = tuple(leaf.shape for leaf in leaves)
        specs = tuple(self._tensor_specs[i] for i in bucket.leaves)
        if not bucket.is_packed:
            specs = (with_axes(specs[0], bucket.cut_dim, parallel.state_axes),)
        return _Form(
            parallel, bucket.is_packed, bucket.shard_shape, bucket.padding, starts, shapes, specs
        )


@dataclasses.dataclass(frozen=True)
class _Form:
    """Everything that determines the two programs of a bucket; buckets of one form share them."""

    parallel: DataParallel
    is_packed: bool
    shard_shape: tuple[int, ...]
    padding: int
    starts: tuple[int, ...]  # of leaves in a packed bucket, and the end of the last one
    shapes: tuple[tuple[int, ...], ...]  # of the leaves of one tensor-parallel part
    specs: tuple[P, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shard_shape)

    @property
    def num_rows(self) -> int:
        """A shard in rows of ALIGNMENT: in rows, every offset fits into 32 bits."""
        return -(-self.size // ALIGNMENT)

    def compiled(self, local: Any, in_specs: Any, out_specs: Any, **kwargs: Any) -> Any:
        mesh = self.parallel.mesh
        mapped = compat.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
        return jax.jit(mapped, **kwargs)


@functools.lru_cache(maxsize=4096)
def _extractor(form: _Form) -> Any:
    """A program that cuts the leaves of a bucket out of a flat array, from a row on."""

    def local(flat: jax.Array, row: jax.Array) -> list[jax.Array]:
        shard = memory.cut_lines(flat, row, form.num_rows, ALIGNMENT)[: form.size]
        if not form.is_packed:
            return [shard.reshape(form.shard_shape)]
        whole = collectives.all_gather(shard, form.parallel.state_axes, dim=0, to="varying")
        return [
            whole[start : start + math.prod(shape)].reshape(shape)
            for start, shape in zip(form.starts, form.shapes, strict=False)
        ]

    return form.compiled(local, (form.parallel.state_spec, P()), list(form.specs))


@functools.lru_cache(maxsize=4096)
def _inserter(form: _Form) -> Any:
    """The inverse; without a flat array, it returns the shards in whole rows."""
    spec = form.parallel.state_spec

    def local(flat: Any, row: jax.Array, leaves: list[jax.Array]) -> jax.Array:
        shard = leaves[0].reshape(-1)
        if form.is_packed:
            whole = jnp.zeros((form.starts[-1] + form.padding,), shard.dtype)
            for start, x in zip(form.starts, leaves, strict=False):
                whole = lax.dynamic_update_slice_in_dim(whole, x.reshape(-1), start, 0)
            index = collectives.axis_index(form.parallel.state_axes)
            shard = shard_of(whole, index, whole.size // form.size, 0)
        rows = jnp.pad(shard, (0, form.num_rows * ALIGNMENT - form.size))
        return rows if flat is None else memory.put_lines(flat, rows, row, ALIGNMENT)

    return form.compiled(local, (spec, P(), list(form.specs)), spec, donate_argnums=0)
