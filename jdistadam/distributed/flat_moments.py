"""A moment of the flat state: floats, or codes beside floats.

The codes of all leaves that are coded are one flat array, and the moments of those that are not
are another: ``Bucket.moment_offset`` says where in its array the shard of a bucket begins.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdistadam.core.algorithm import Algorithm
from jdistadam.core.codecs import FLOAT32, BlockCodes
from jdistadam.distributed.layout import Bucket, Layout


class FlatCodes(NamedTuple):
    """A moment in "block8" or "block16", in the place of a flat array of floats.

    Attributes:
      codes: Shape (num_shards * coded_size,), uint8 or uint16, sharded.
      scales: Shape (num_shards * coded_size / 128,), float32, sharded: one for each block.
      floats: Shape (num_shards * uncoded_size,), float32, sharded: the moments of small leaves,
        and of those that ``float32_moments`` names.
    """

    codes: Any
    scales: Any
    floats: Any


def is_flat_codes(x: Any) -> bool:
    """Whether a moment of the state is in codes."""
    return isinstance(x, FlatCodes)


def types_of_moment(algorithm: Algorithm, layout: Layout, name: str) -> Any:
    """Returns shapes and dtypes of what one device has of a moment, "mu" or "nu"."""
    shape, codec = jax.ShapeDtypeStruct, algorithm.storage.codec_of(name)
    if not codec.is_coded:
        return shape((layout.flat_size,), codec.dtype)
    return FlatCodes(
        shape((layout.coded_size,), codec.dtype),
        shape((codec.num_scales(layout.coded_size),), jnp.float32),
        shape((layout.uncoded_size,), jnp.float32),
    )


def bytes_of_moment(algorithm: Algorithm, layout: Layout, name: str) -> int:
    """Returns how many bytes one device has of a moment."""
    codec = algorithm.storage.codec_of(name)
    if not codec.is_coded:
        return codec.nbytes(layout.flat_size)
    return codec.nbytes(layout.coded_size) + FLOAT32.nbytes(layout.uncoded_size)


def offset_of(moment: Any, bucket: Bucket) -> int:
    """Returns where the shard of a bucket begins in the array that holds its moment."""
    return bucket.moment_offset if is_flat_codes(moment) else bucket.offset


def operand_of(moment: Any, bucket: Bucket) -> Any:
    """Returns the flat array that holds the moment of a bucket, as the kernel takes it."""
    if not is_flat_codes(moment):
        return moment
    return BlockCodes(moment.codes, moment.scales) if bucket.is_coded else moment.floats


def with_result(moment: Any, bucket: Bucket, new: Any) -> Any:
    """Returns a moment with what ``operand_of`` returned replaced."""
    if not is_flat_codes(moment):
        return new
    if bucket.is_coded:
        return moment._replace(codes=new.codes, scales=new.scales)
    return moment._replace(floats=new)
