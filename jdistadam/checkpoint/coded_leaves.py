"""Moments in codes as arrays of the shapes of leaves: codes beside the scales of their blocks.

A leaf that is cut into pieces of whole blocks is coded and decoded where it is; its scales, a
32nd of a float32 moment, are gathered on all devices, as their order is that of the whole leaf.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jdistadam import compat
from jdistadam.core.moments import BLOCK, BlockCodes, BlockFormat
from jdistadam.kernels import rounding


def encoded(name: str, format: BlockFormat, x: jax.Array) -> BlockCodes:
    """Codes a float32 leaf of the moment "mu" or "nu", rounded to nearest."""
    found = _pieces(x.shape, x.sharding)
    if found is None:
        return BlockCodes(*_encoder(name, format, None, None, None)(x))
    mesh, spec, scale_spec = found
    codes, scales = jax.block_until_ready(_encoder(name, format, mesh, spec, scale_spec)(x))
    scales = jax.block_until_ready(jax.device_put(scales, NamedSharding(mesh, P())))
    return BlockCodes(codes, jax.jit(lambda x: x.reshape(-1))(scales))


def decoded(name: str, codes: jax.Array, scales: jax.Array) -> jax.Array:
    """Returns a leaf of the moment "mu" or "nu" as float32; its scales are on all devices."""
    found, shape = _pieces(codes.shape, codes.sharding), codes.shape
    if found is None:
        leaf: jax.Array = _decoder(name, None, None, None)(codes, scales)
        return leaf
    mesh, spec, scale_spec = found
    last = len(scale_spec) - 1
    in_pieces = jax.jit(lambda x: x.reshape(*shape[:last], -1))(scales)
    cut = jax.block_until_ready(jax.device_put(in_pieces, NamedSharding(mesh, scale_spec)))
    leaf = _decoder(name, mesh, spec, scale_spec)(codes, cut)
    return leaf


def num_scales(shape: tuple[int, ...]) -> int:
    """Returns the number of scales of a leaf."""
    return rounding.num_blocks(math.prod(shape))


def _pieces(shape: tuple[int, ...], sharding: Any) -> tuple[Any, P, P] | None:
    """How codes and scales are sharded where each piece is whole blocks; None where none is cut.

    Scales have the dimensions of the leaf up to the last one that is cut, of which they have one
    for each block.
    """
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_replicated:
        return None
    spec = P(*sharding.spec, *(None,) * (len(shape) - len(sharding.spec)))
    last = max(i for i, axes in enumerate(spec) if axes)
    if math.prod(sharding.shard_shape(shape)[last:]) % BLOCK:
        return None
    return sharding.mesh, spec, P(*spec[: last + 1])


@functools.lru_cache(maxsize=1024)
def _encoder(name: str, format: BlockFormat, mesh: Any, spec: Any, scale_spec: Any) -> Any:
    def local(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        codes, scales = rounding.encode(name, format, x, None, jnp)
        if scale_spec is not None:
            scales = scales.reshape(*x.shape[: len(scale_spec) - 1], -1)
        return codes, scales

    if mesh is None:
        return jax.jit(local)
    return jax.jit(
        compat.shard_map(local, mesh=mesh, in_specs=(spec,), out_specs=(spec, scale_spec))
    )


@functools.lru_cache(maxsize=1024)
def _decoder(name: str, mesh: Any, spec: Any, scale_spec: Any) -> Any:
    def local(codes: jax.Array, scales: jax.Array) -> jax.Array:
        leaf: jax.Array = rounding.decode(name, BlockCodes(codes, scales.reshape(-1)), jnp)
        return leaf

    if mesh is None:
        return jax.jit(local)
    return jax.jit(compat.shard_map(local, mesh=mesh, in_specs=(spec, scale_spec), out_specs=spec))
