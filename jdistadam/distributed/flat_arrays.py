"""The flat arrays of a state, and moments that are decoded and encoded.

A moment is one flat array of floats, or two: the codes of all coded leaves, and the moments of all
other leaves. A ``Window`` says in which array a bucket's shard is, and where.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jdistadam import compat
from jdistadam.core import memory
from jdistadam.core.codecs import BLOCK, FLOAT32, NOTHING, BlockCodes, Codec, codec_of
from jdistadam.core.storage import MOMENTS
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.layout import ALIGNMENT, Bucket, Layout, aligned

STEPPED = ("main_params", *MOMENTS)
FLAT_ARRAYS = (*STEPPED, "ema")
"""The fields of a state that are flat arrays, first those that a kernel steps; others are small."""


class Field(NamedTuple):
    """A field of a state that is a flat array: what it holds of each parameter.

    Attributes:
      name: Its name, also of the section of a checkpoint.
      codec: How it is stored.
      dtype: The dtype of its leaves outside of the flat array; float32 for codes.
      begins: "zeros", or "params": with their exact values.
    """

    name: str
    codec: Codec
    dtype: Any
    begins: str

    def has(self, bucket: Bucket) -> bool:
        """Whether it holds the leaves of a bucket."""
        return self.name != "main_params" or bucket.has_main


def fields_of(config: DistributedConfig) -> dict[str, Field]:
    """Returns the flat arrays of an optimizer's state by name, in the order of ``FLAT_ARRAYS``."""
    storage, main = config.algorithm.storage, config.policy.main_params
    moments = [
        Field(name, storage.codec_of(name), storage.float_dtype(name), "zeros") for name in MOMENTS
    ]
    mains = [Field("main_params", main, main.dtype, "params")] if main.is_stored else []
    average = Field("ema", FLOAT32, jnp.dtype(jnp.float32), "params")
    averages = [] if config.ema_decay is None else [average]
    return {field.name: field for field in (*mains, *moments, *averages)}


def main_codec(config: DistributedConfig, bucket: Bucket) -> Codec:
    """Returns how main parameters of a bucket are stored; ``NOTHING`` if it has none."""
    return config.policy.main_params if bucket.has_main else NOTHING


class Window(NamedTuple):
    """Where a span, or a device's whole shard of a bucket, is in a flat array.

    Attributes:
      array: The array: a field of the state, or "mu.codes", which has the scales too, "mu.floats",
        "nu.codes" or "nu.floats".
      start: Its first element.
      size: Elements, up to the next window.
    """

    array: str
    start: int
    size: int


def window_of(config: DistributedConfig, name: str, bucket: Bucket) -> Window | None:
    """Returns the window of a bucket in a field of the state; None: the field lacks it."""
    field, size = fields_of(config).get(name), aligned(bucket.shard_size)
    if field is None or not field.has(bucket):
        return None
    if field.codec.is_coded:
        array = "codes" if bucket.is_coded else "floats"
        return Window(f"{name}.{array}", bucket.moment_offset, size)
    return Window(name, bucket.offset, size)


class FlatCodes(NamedTuple):
    """A moment in "block8" or "block16", in place of a flat array of floats.

    Attributes:
      codes: Flat, uint8 or uint16, sharded.
      scales: Flat, float32, sharded: one for each block of 128 codes.
      floats: Flat, float32, sharded: the moments of small leaves and of those selected by
        ``float32_moments``.
    """

    codes: Any
    scales: Any
    floats: Any


def is_flat_codes(x: Any) -> bool:
    """Whether a moment of the state is in codes."""
    return isinstance(x, FlatCodes)


def types_of_arrays(config: DistributedConfig, layout: Layout) -> dict[str, Any]:
    """Returns shapes and dtypes of one device's flat arrays by name; None: it has none."""
    shape = jax.ShapeDtypeStruct

    def of(field: Field) -> Any:
        if field.name == "main_params":
            return shape((layout.main_size,), field.codec.dtype) if layout.main_size else None
        size = layout.flat_size
        if not field.codec.is_coded:
            return shape((size,), field.codec.dtype)
        coded = sum(aligned(x.shard_size) for x in layout.buckets if x.is_coded)
        # Neither is zero, because shard_map takes no empty arrays.
        coded, floats = (max(x, ALIGNMENT) for x in (coded, size - coded))
        scales = shape((field.codec.num_scales(coded),), jnp.float32)
        return FlatCodes(shape((coded,), field.codec.dtype), scales, shape((floats,), jnp.float32))

    types = {name: of(field) for name, field in fields_of(config).items()}
    return dict.fromkeys(FLAT_ARRAYS) | types


def shard_in(flat: Any, bucket: Bucket) -> jax.Array:
    """Returns a bucket's shard of a flat array of floats, on the device."""
    num_rows = -(-bucket.shard_size // ALIGNMENT)
    rows = memory.cut_rows(flat, bucket.offset // ALIGNMENT, num_rows, ALIGNMENT)
    return rows[: bucket.shard_size].reshape(bucket.shard_shape)


def arrays_of(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the arrays of some fields of a state under the names that windows have for them."""
    arrays = dict[str, Any]()
    for name, x in fields.items():
        if is_flat_codes(x):
            arrays |= {f"{name}.codes": BlockCodes(x.codes, x.scales), f"{name}.floats": x.floats}
        else:
            arrays[name] = x
    return arrays


def joined_field(arrays: dict[str, Any], name: str) -> Any:
    """Returns a field of a state; the inverse of ``arrays_of``."""
    if name in arrays:
        return arrays[name]
    codes, scales = arrays[f"{name}.codes"]
    return FlatCodes(codes, scales, arrays[f"{name}.floats"])


# Decodes and encodes moments: one bucket's shards at a time, outside of shard_map.
#
# Both are exact for floats decoded from codes: encode(decode(x)) is x.


def zeros(config: DistributedConfig, layout: Layout, name: str) -> Any:
    """Returns a flat array of a state on all devices, filled with zeros."""
    parallel, sharding = config.parallel, config.state_sharding(name)
    types = types_of_arrays(config, layout)[name]
    devices = parallel.size(parallel.cut_axes)

    def local() -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), types)

    def zeros_on_host(x: Any) -> jax.Array:  # the device need not have room for it
        shape = (devices * x.shape[0],)
        with jax.transfer_guard_host_to_device("allow"):  # from the host to its pinned memory
            return jax.make_array_from_callback(
                shape, sharding, lambda _: np.zeros(x.shape, x.dtype)
            )

    if name in config.on_host:
        return jax.tree.map(zeros_on_host, types)
    # Mapped, so that on Explicit axes the type has this sharding inside of a program, too.
    specs = jax.tree.map(lambda _: sharding.spec, types)
    mapped = compat.shard_map(local, mesh=parallel.mesh, in_specs=(), out_specs=specs)
    return jax.jit(mapped)()


def decoded_shards(config: DistributedConfig, bucket: Bucket, name: str, moment: Any) -> jax.Array:
    """Returns a bucket's shards of all devices as float32, in sequence.

    Each is padded with zeros to whole blocks.

    Args:
      config: The configuration.
      bucket: The bucket.
      name: "mu" or "nu".
      moment: The moment.
    """
    num_blocks = -(-bucket.shard_size // BLOCK)
    decode = _decoder(config.mesh, config.parallel.state_spec, name, bucket.is_coded, num_blocks)
    return decode(moment, bucket.moment_offset // BLOCK)


def with_shards(
    config: DistributedConfig, bucket: Bucket, name: str, moment: Any, shards: Any
) -> Any:
    """Returns a moment with a bucket's shards replaced; ``moment`` is donated.

    Args:
      config: The configuration.
      bucket: The bucket.
      name: "mu" or "nu".
      moment: The moment.
      shards: As ``decoded_shards`` returns them.
    """
    encode = _encoder(config.mesh, config.parallel.state_spec, name, bucket.is_coded)
    return encode(moment, bucket.moment_offset // BLOCK, shards)


@functools.lru_cache(maxsize=4096)
def _decoder(mesh: Mesh, spec: P, name: str, is_coded: bool, num_blocks: int) -> Any:
    def local(moment: FlatCodes, block: jax.Array) -> jax.Array:
        def cut(x: jax.Array, size: int) -> jax.Array:
            return memory.cut_rows(x, block, num_blocks, size)

        if not is_coded:
            return cut(moment.floats, BLOCK)
        codes = BlockCodes(cut(moment.codes, BLOCK), cut(moment.scales, 1))
        return codec_of(codes).decode(name, codes, jnp)

    mapped = compat.shard_map(local, mesh=mesh, in_specs=(spec, P()), out_specs=spec)
    return jax.jit(mapped)


@functools.lru_cache(maxsize=4096)
def _encoder(mesh: Mesh, spec: P, name: str, is_coded: bool) -> Any:
    def local(moment: FlatCodes, block: jax.Array, shard: jax.Array) -> FlatCodes:
        def put(x: jax.Array, new: jax.Array, size: int) -> jax.Array:
            return memory.put_rows(x, new, block, size)

        if not is_coded:
            return moment._replace(floats=put(moment.floats, shard, BLOCK))
        new = codec_of(moment).encode(name, shard, None, jnp)
        codes, scales = put(moment.codes, new.codes, BLOCK), put(moment.scales, new.scales, 1)
        return moment._replace(codes=codes, scales=scales)

    mapped = compat.shard_map(local, mesh=mesh, in_specs=(spec, P(), spec), out_specs=spec)
    return jax.jit(mapped, donate_argnums=0)
