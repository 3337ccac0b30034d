"""The other kernels: global norm, pairwise sums, packing, unpacking and keeping many leaves.

All arrays are local to one device, as in adam.py.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdistadam.core import collectives
from jdistadam.kernels import native, reference

_FLAT_INPUT, _FLAT_OUTPUT = 1, 2  # bits of the handler's attribute `flat`


class _SumSpec(NamedTuple):
    """The static side of a call of the sum kernel."""

    flat: int
    shapes: tuple[tuple[int, ...], ...]  # of the results
    sizes: tuple[int, ...]  # of the leaves
    offsets: tuple[int, ...]  # of the leaves in a flat array
    contributions: int
    dtype: Any  # of the results


def sum_of_squares(grads: Sequence[Any], inv_scale: Any = None) -> tuple[jax.Array, jax.Array]:
    r"""Returns :math:`\sum (s g)^2` over all leaves, and whether any :math:`s g` is non-finite.

    Reads the gradients once. Sizes and dtypes of the leaves fix the order of the sum.

    Args:
      grads: float32, bfloat16 or float16 arrays of any shapes.
      inv_scale: :math:`s`, shape (), float32. None: 1.

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
        squares, found = native.choose(_norm_native, _norm_fallback)(scale, arrays)
        total, found_inf = total + squares, found_inf | found
    return total, found_inf


def _norm_native(inv_scale: Any, grads: Sequence[Any]) -> tuple[jax.Array, jax.Array]:
    tiles = sum(-(-x.size // reference.NORM_TILE) for x in grads)
    shapes = (((), jnp.float32), ((), jnp.bool_), ((tiles, 2), jnp.uint32))
    results = [native.type_like(grads[0], shape, dtype) for shape, dtype in shapes]
    squares, found_inf, _ = jax.ffi.ffi_call("jdistadam_norm", results)(inv_scale, *grads)
    return squares, found_inf


def _norm_fallback(inv_scale: Any, grads: Sequence[Any]) -> tuple[jax.Array, jax.Array]:
    scaled = [x.astype(jnp.float32) * inv_scale for x in grads]
    squares = jnp.stack([jnp.sum(jnp.square(x)) for x in scaled])
    finite = jnp.stack([jnp.all(jnp.isfinite(x)) for x in scaled])
    return jnp.sum(squares), ~jnp.all(finite)


def sum_contributions(stacked: Sequence[Any], dtype: Any = jnp.float32) -> list[jax.Array]:
    """Adds arrays of shape (contributions, ...) pairwise in float32; rounds once, to ``dtype``."""
    if not stacked:
        return []
    contributions = stacked[0].shape[0]
    shapes = tuple(x.shape[1:] for x in stacked)
    sizes = tuple(x.size // contributions for x in stacked)
    offsets = tuple(np.cumsum((0, *sizes[:-1])).tolist())
    spec = _SumSpec(
        flat=0,
        shapes=shapes,
        sizes=sizes,
        offsets=offsets,
        contributions=contributions,
        dtype=dtype,
    )
    return _sum(spec, stacked)


def pack(leaves: Sequence[Any], offsets: Sequence[int], size: int, dtype: Any) -> jax.Array:
    """Returns a flat array with the leaves at ascending offsets and zeros elsewhere."""
    if not leaves:
        return jnp.zeros((size,), dtype)
    spec = _SumSpec(
        flat=_FLAT_OUTPUT,
        shapes=((size,),),
        sizes=tuple(x.size for x in leaves),
        offsets=tuple(offsets),
        contributions=1,
        dtype=dtype,
    )
    return _sum(spec, leaves)[0]


def unpack(
    flat: Any, shapes: Sequence[tuple[int, ...]], offsets: Sequence[int], dtype: Any
) -> list[jax.Array]:
    """Returns the leaves at ascending offsets of a flat array."""
    spec = _SumSpec(
        flat=_FLAT_INPUT,
        shapes=tuple(shapes),
        sizes=tuple(int(np.prod(shape)) for shape in shapes),
        offsets=tuple(offsets),
        contributions=1,
        dtype=dtype,
    )
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
        return list(jax.ffi.ffi_call("jdistadam_sum", results)(*arrays, **attributes))

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
