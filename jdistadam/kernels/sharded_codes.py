"""Encodes and decodes whole leaves on several devices.

Coded moments have the shapes of leaves: codes, and the scales of their blocks. If a leaf is sharded
into pieces of whole blocks, it is encoded and decoded in place. Only its scales are gathered on all
devices, because they are stored in the order of the whole leaf; they are small. Otherwise the leaf
is gathered first.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jdistadam.core.codecs import BLOCK, BlockCodes, Codec, codec_of


def encoded(name: str, codec: Codec, x: jax.Array) -> BlockCodes:
    """Encodes a float32 leaf of the moment "mu" or "nu", rounded to nearest."""
    mesh, spec, scale_spec = _pieces(x.shape, x.sharding)
    x = _placed(x, mesh, spec)
    codes, scales = jax.block_until_ready(_encoder(name, codec, mesh, spec, scale_spec)(x))
    return BlockCodes(codes, _reshaped(_placed(scales, mesh, P()), (-1,)))


def decoded(name: str, codes: jax.Array, scales: jax.Array) -> jax.Array:
    """Returns a leaf of the moment "mu" or "nu" as float32.

    Args:
      name: "mu" or "nu".
      codes: The codes. While tracing, each device has whole blocks as far as types say.
      scales: The scales of all blocks: sharded like the codes, or on all devices.
    """
    codes, scales = jnp.asarray(codes), jnp.asarray(scales)
    is_traced = isinstance(codes, jax.core.Tracer)
    sharding: Any = jax.typeof(codes).sharding if is_traced else codes.sharding
    if is_traced and not any(sharding.spec):  # on one device, or XLA decides
        moment = BlockCodes(codes, scales)
        return codec_of(moment).decode(name, moment, jnp)
    mesh, spec, scale_spec = _pieces(codes.shape, sharding)
    in_pieces = _reshaped(scales, (*codes.shape[: len(scale_spec[:-1])], -1))
    decode = _decoder(name, mesh, spec, scale_spec)
    return decode(_placed(codes, mesh, spec), _placed(in_pieces, mesh, scale_spec))


def _pieces(shape: tuple[int, ...], sharding: Any) -> tuple[Any, P, P]:
    """The shardings of codes and scales if each piece is whole blocks, otherwise unsharded.

    Scales have the dimensions of the leaf up to the last cut one, which counts blocks instead of
    elements. The mesh is None on one device.
    """
    if not isinstance(sharding, NamedSharding):
        return None, P(), P()
    spec = P(*sharding.spec, *(None,) * (len(shape) - len(sharding.spec)))
    last = max((i for i, axes in enumerate(spec) if axes), default=None)
    if last is None or math.prod(sharding.shard_shape(shape)[last:]) % BLOCK:
        return sharding.mesh, P(), P()
    return sharding.mesh, spec, P(*spec[: last + 1])


def _placed(x: jax.Array, mesh: Any, spec: P) -> jax.Array:
    """Reshards an array and waits for it: collectives of two programs must not overlap."""
    if mesh is None:
        return x
    if isinstance(x, jax.core.Tracer):
        return jax.reshard(x, NamedSharding(mesh, spec))
    return jax.block_until_ready(jax.device_put(x, NamedSharding(mesh, spec)))


@functools.partial(jax.jit, static_argnums=1)
def _reshaped(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return x.reshape(shape)


@functools.lru_cache(maxsize=1024)
def _encoder(name: str, codec: Codec, mesh: Any, spec: P, scale_spec: P) -> Any:
    def local(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        codes, scales = codec.encode(name, x, None, jnp)
        if scale_spec:
            scales = scales.reshape(*x.shape[: len(scale_spec) - 1], -1)
        return codes, scales

    return _on_devices(local, mesh, (spec,), (spec, scale_spec))


@functools.lru_cache(maxsize=1024)
def _decoder(name: str, mesh: Any, spec: P, scale_spec: P) -> Any:
    def local(codes: jax.Array, scales: jax.Array) -> jax.Array:
        moment = BlockCodes(codes, scales.reshape(-1))
        return codec_of(moment).decode(name, moment, jnp)

    return _on_devices(local, mesh, (spec, scale_spec), spec)


def _on_devices(local: Any, mesh: Any, in_specs: Any, out_specs: Any) -> Any:
    if mesh is None:
        return jax.jit(local)
    how: Any = dict(mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(jax.shard_map(local, **how))
