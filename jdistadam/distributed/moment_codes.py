"""Moments in codes as floats, and back: one bucket's shards at a time, outside of shard_map.

Both are exact where the floats came of codes: encode(decode(x)) is x.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jdistadam import compat
from jdistadam.core.codecs import BLOCK, BlockCodes, codec_of
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.flat_moments import FlatCodes, types_of_moment
from jdistadam.distributed.layout import Bucket, Layout


def new_moment(config: DistributedConfig, layout: Layout, name: str) -> Any:
    """Returns the moment "mu" or "nu" of a state, all zero: flat arrays on all devices."""
    parallel = config.parallel
    devices = parallel.num_shards * parallel.size(parallel.tensor_axes)
    types = types_of_moment(config.algorithm, layout, name)

    def make() -> Any:
        return jax.tree.map(lambda x: jnp.zeros(devices * x.shape[0], x.dtype), types)

    return jax.jit(make, out_shardings=NamedSharding(config.mesh, parallel.state_spec))()


def decoded_shards(
    config: DistributedConfig, bucket: Bucket, name: str, moment: FlatCodes
) -> jax.Array:
    """Returns a bucket's shards of all devices as float32, one behind the other.

    Each is filled with zeros to whole blocks.

    Args:
      config: The configuration.
      bucket: The bucket.
      name: "mu" or "nu".
      moment: The moment.
    """
    decode = _decoder(*_kind(config, bucket, name))
    place = NamedSharding(config.mesh, config.parallel.state_spec)
    moment = jax.device_put(moment, place)  # where it is numpy's
    shards: jax.Array = decode(moment, bucket.moment_offset // BLOCK)
    return shards


def with_shards(
    config: DistributedConfig, bucket: Bucket, name: str, moment: FlatCodes, shards: Any
) -> Any:
    """Returns a moment with a bucket's shards replaced; ``moment`` is donated.

    Args:
      config: The configuration.
      bucket: The bucket.
      name: "mu" or "nu".
      moment: The moment.
      shards: As ``decoded_shards`` returns them.
    """
    encode = _encoder(*_kind(config, bucket, name))
    return encode(moment, bucket.moment_offset // BLOCK, shards)


def _kind(config: DistributedConfig, bucket: Bucket, name: str) -> tuple[Any, ...]:
    num_blocks = -(-bucket.shard_size // BLOCK)
    return config.mesh, config.parallel.state_spec, name, bucket.is_coded, num_blocks


@functools.lru_cache(maxsize=4096)
def _decoder(mesh: Mesh, spec: P, name: str, is_coded: bool, num_blocks: int) -> Any:
    def local(moment: FlatCodes, block: jax.Array) -> jax.Array:
        def cut(x: jax.Array, size: int) -> jax.Array:
            return lax.dynamic_slice_in_dim(x.reshape(-1, size), block, num_blocks).reshape(-1)

        if not is_coded:
            return cut(moment.floats, BLOCK)
        codes = BlockCodes(cut(moment.codes, BLOCK), cut(moment.scales, 1))
        decoded: jax.Array = codec_of(codes).decode(name, codes, jnp)
        return decoded

    mapped = compat.shard_map(local, mesh=mesh, in_specs=(spec, P()), out_specs=spec)
    return jax.jit(mapped)


@functools.lru_cache(maxsize=4096)
def _encoder(mesh: Mesh, spec: P, name: str, is_coded: bool, num_blocks: int) -> Any:
    def local(moment: FlatCodes, block: jax.Array, shard: jax.Array) -> FlatCodes:
        def put(x: jax.Array, new: jax.Array, size: int) -> jax.Array:
            rows, new = x.reshape(-1, size), new.reshape(num_blocks, size)
            return lax.dynamic_update_slice_in_dim(rows, new, block, 0).reshape(-1)

        if not is_coded:
            return moment._replace(floats=put(moment.floats, shard, BLOCK))
        new = codec_of(moment).encode(name, shard, None, jnp)
        codes, scales = put(moment.codes, new.codes, BLOCK), put(moment.scales, new.scales, 1)
        return moment._replace(codes=codes, scales=scales)

    mapped = compat.shard_map(local, mesh=mesh, in_specs=(spec, P(), spec), out_specs=spec)
    return jax.jit(mapped, donate_argnums=0)
