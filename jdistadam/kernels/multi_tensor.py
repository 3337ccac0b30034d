"""The other kernels: norm, pairwise sums, packing and unpacking.

All arrays are local to one device, as in adam.py.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdistadam.core import collectives
from jdistadam.kernels import native, reference

NORMS = frozenset(["jdistadam_norm_tiles"])
"""The targets of calls that read gradients for a norm."""
_FLAT_INPUT, _FLAT_OUTPUT = 1, 2  # bits of the handler's attribute `flat`


class _SumSpec(NamedTuple):
    """The static side of a call of the sum kernel."""

    shapes: tuple[tuple[int, ...], ...]  # of the results
    sizes: tuple[int, ...]  # of the leaves
    offsets: tuple[int, ...]  # of the leaves in a flat array
    dtype: Any  # of the results
    contributions: int = 1
    flat: int = 0


def sum_of_squares(
    grads: Sequence[Any], inv_scale: Any = None, *, one_by_one: bool = False
) -> tuple[jax.Array, jax.Array]:
    r"""Returns :math:`\sum (s g)^2` over all leaves, and whether any :math:`s g` is non-finite.

    Reads the gradients once. Sizes and dtypes of the leaves fix the order of the sum.

    Args:
      grads: float32, bfloat16 or float16 arrays of any shapes.
      inv_scale: :math:`s`, shape (), float32. None: 1.
      one_by_one: Whether each leaf has a kernel call of its own, so that it can be freed before
        all others exist. The result is bitwise the same.

    Returns:
      Two arrays of shape (), float32 and bool.
    """
    scale = jnp.ones((), jnp.float32) if inv_scale is None else inv_scale
    scale, grads = collectives.vary_together((scale, list(grads)))
    by_dtype: dict[str, list[Any]] = {}
    for grad in grads:
        if grad.size:
            by_dtype.setdefault(jnp.dtype(grad.dtype).name, []).append(grad)
    total, found_inf = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.bool_)
    for _, arrays in sorted(by_dtype.items()):
        calls = [[x] for x in arrays] if one_by_one else [arrays]
        tiles = [native.choose(_tiles_native, _tiles_fallback)(scale, call) for call in calls]
        squares, found_here = sum_of_tiles(tiles)
        total, found_inf = total + squares, found_inf | found_here
    return total, found_inf


def sum_of_tiles(tiles: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns what ``sum_of_squares`` does, from the tiles of leaves of one dtype, in order."""
    squares, found_inf = native.choose(_norm_native, _norm_fallback)(jnp.concatenate(list(tiles)))
    return squares, found_inf


def tiles_type(like: Any, sizes: Iterable[int]) -> Any:
    """Returns the type of sums of tiles: bits of a sum of squares; whether any is non-finite."""
    tiles = sum(-(-size // reference.NORM_TILE) for size in sizes)
    return native.type_like(like, (tiles, 2), jnp.uint32)


def _tiles_native(inv_scale: Any, grads: Sequence[Any]) -> jax.Array:
    result = tiles_type(grads[0], (x.size for x in grads))
    return jax.ffi.ffi_call("jdistadam_norm_tiles", result)(inv_scale, *grads)


def _tiles_fallback(inv_scale: Any, grads: Sequence[Any]) -> jax.Array:
    tiles = []
    for x in grads:
        scaled = x.reshape(-1).astype(jnp.float32) * inv_scale
        padded = jnp.pad(scaled, (0, -x.size % reference.NORM_TILE))
        rows = padded.reshape(-1, reference.NORM_TILE)
        squares = jax.lax.bitcast_convert_type(jnp.sum(jnp.square(rows), axis=1), jnp.uint32)
        is_nonfinite = ~jnp.all(jnp.isfinite(rows), axis=1)
        tiles.append(jnp.stack([squares, is_nonfinite.astype(jnp.uint32)], axis=1))
    return jnp.concatenate(tiles)


def _norm_native(tiles: Any) -> tuple[jax.Array, jax.Array]:
    types = [native.type_like(tiles, (), dtype) for dtype in (jnp.float32, jnp.bool_)]
    squares, found_inf = jax.ffi.ffi_call("jdistadam_norm", types)(tiles)
    return squares, found_inf


def _norm_fallback(tiles: Any) -> tuple[jax.Array, jax.Array]:
    squares = jax.lax.bitcast_convert_type(tiles[:, 0], jnp.float32)
    return jnp.sum(squares), jnp.any(tiles[:, 1] != 0)


def sum_contributions(stacked: Sequence[Any]) -> list[jax.Array]:
    """Adds arrays of shape (contributions, ...) pairwise in float32."""
    if not stacked:
        return []
    contributions = stacked[0].shape[0]
    sizes = tuple(x.size // contributions for x in stacked)
    shapes = tuple(x.shape[1:] for x in stacked)
    offsets = tuple(np.cumsum((0, *sizes[:-1])).tolist())
    return _sum(_SumSpec(shapes, sizes, offsets, jnp.float32, contributions), stacked)


def pack(leaves: Sequence[Any], offsets: Sequence[int], size: int, dtype: Any) -> jax.Array:
    """Returns a flat array with the leaves at ascending offsets and zeros elsewhere."""
    if not leaves:
        return jnp.zeros((size,), dtype)
    sizes = tuple(x.size for x in leaves)
    spec = _SumSpec(((size,),), sizes, tuple(offsets), dtype, flat=_FLAT_OUTPUT)
    return _sum(spec, leaves)[0]


def unpack(
    flat: Any, shapes: Sequence[tuple[int, ...]], offsets: Sequence[int], dtype: Any
) -> list[jax.Array]:
    """Returns the leaves at ascending offsets of a flat array."""
    sizes = tuple(int(np.prod(shape)) for shape in shapes)
    spec = _SumSpec(tuple(shapes), sizes, tuple(offsets), dtype, flat=_FLAT_INPUT)
    return _sum(spec, (flat,))


def _sum(spec: _SumSpec, inputs: Sequence[Any]) -> list[jax.Array]:
    if not spec.shapes:
        return []
    inputs = collectives.vary_together(list(inputs))
    results = [native.type_like(inputs[0], shape, spec.dtype) for shape in spec.shapes]
    attributes = {
        "contributions": np.int32(spec.contributions),
        "flat": np.int32(spec.flat),
        "sizes": np.asarray(spec.sizes, np.int64),
        "offsets": np.asarray(spec.offsets, np.int64),
    }

    def compiled(*arrays: Any) -> list[jax.Array]:
        call = jax.ffi.ffi_call("jdistadam_sum", results, vmap_method="sequential")
        return list(call(*arrays, **attributes))

    return native.choose(compiled, functools.partial(_sum_fallback, spec))(*inputs)


def _sum_fallback(spec: _SumSpec, *inputs: Any) -> list[jax.Array]:
    if spec.flat & _FLAT_INPUT:
        ends = np.add(spec.offsets, spec.sizes).tolist()
        leaves = [inputs[0][a:b] for a, b in zip(spec.offsets, ends, strict=True)]
    else:
        stacks = [x.reshape(spec.contributions, -1).astype(jnp.float32) for x in inputs]
        leaves = [reference.pairwise_sum(stack, jnp) for stack in stacks]
    if not spec.flat & _FLAT_OUTPUT:
        pairs = zip(leaves, spec.shapes, strict=True)
        return [leaf.reshape(shape).astype(spec.dtype) for leaf, shape in pairs]
    out = jnp.zeros(spec.shapes[0], spec.dtype)
    for leaf, offset in zip(leaves, spec.offsets, strict=True):
        out = out.at[offset : offset + leaf.size].set(leaf.astype(spec.dtype))
    return [out]
