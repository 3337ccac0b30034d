"""The other kernels: norm, pairwise sums, packing and unpacking; and steps over peer memory.

All arrays are local to one device, as in adam.py. Sums and steps over the memory of several devices
in one process are two FFI calls inside ``jax.shard_map``. The devices wait for each other in every
call (cuda/meeting.h).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdistadam.core import collectives
from jdistadam.kernels import native, reference
from jdistadam.kernels.adam import bits_of
from jdistadam.kernels.operands import Scalars

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
        squares, found = native.choose(_norm_native, _norm_fallback)(jnp.concatenate(tiles))
        total, found_inf = total + squares, found_inf | found
    return total, found_inf


def _tiles_type(like: Any, sizes: Iterable[int]) -> Any:
    """The type of the sums of tiles: bits of a sum of squares, and whether any is non-finite."""
    tiles = sum(-(-size // reference.NORM_TILE) for size in sizes)
    return native.type_like(like, (tiles, 2), jnp.uint32)


def _norm_types(like: Any, sizes: Iterable[int] | None = None) -> list[Any]:
    """The types of a sum of squares, and of whether any is non-finite; of leaves also the tiles."""
    types = [native.type_like(like, (), dtype) for dtype in (jnp.float32, jnp.bool_)]
    return types if sizes is None else [*types, _tiles_type(like, sizes)]


def _tiles_native(inv_scale: Any, grads: Sequence[Any]) -> jax.Array:
    result = _tiles_type(grads[0], (x.size for x in grads))
    return jax.ffi.ffi_call("jdistadam_norm_tiles", result)(inv_scale, *grads)


def _tiles_fallback(inv_scale: Any, grads: Sequence[Any]) -> jax.Array:
    tiles = []
    for x in grads:
        scaled = x.reshape(-1).astype(jnp.float32) * inv_scale
        padded = jnp.pad(scaled, (0, -x.size % reference.NORM_TILE))
        rows = padded.reshape(-1, reference.NORM_TILE)
        squares = jax.lax.bitcast_convert_type(jnp.sum(jnp.square(rows), axis=1), jnp.uint32)
        found = ~jnp.all(jnp.isfinite(rows), axis=1)
        tiles.append(jnp.stack([squares, found.astype(jnp.uint32)], axis=1))
    return jnp.concatenate(tiles)


def _norm_native(tiles: Any) -> tuple[jax.Array, jax.Array]:
    squares, found_inf = jax.ffi.ffi_call("jdistadam_norm", _norm_types(tiles))(tiles)
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


LIMIT_SECONDS = 300
"""How long a device waits for the others in a step before it gives up."""

_SITES = itertools.count(1)  # a number per traced call


@dataclasses.dataclass(frozen=True)
class PeerSpec:
    """The static side of a call; one entry for each leaf.

    Attributes:
      devices: Local numbers of the devices that meet, in the order of the shards.
      sizes: Elements of a shard.
      runs: Elements of the shard that are contiguous in the whole leaf.
      offsets: Position of the shard in the flat arrays of state.
      groups: Its row of coefficients.
      flags: As in ``Spec``.
      received: Whether the others have sent their gradients of this device's shard.
      takes_shards: Whether the call takes only this shard of the own gradients of such leaves, too.
    """

    devices: tuple[int, ...]
    sizes: tuple[int, ...]
    runs: tuple[int, ...]
    offsets: tuple[int, ...]
    groups: tuple[int, ...]
    flags: frozenset[str]
    received: tuple[bool, ...]
    takes_shards: bool = False

    def _where(self, *, summed: bool = False) -> dict[str, Any]:
        given = 2 if self.takes_shards else 1
        received = [0 if summed or not is_received else given for is_received in self.received]
        return {
            "devices": np.asarray(self.devices, np.int64),
            "site": np.int64(next(_SITES)),
            "limit_seconds": np.int64(LIMIT_SECONDS),
            "sizes": np.asarray(self.sizes, np.int64),
            "runs": np.asarray(self.runs, np.int64),
            "received": np.asarray(received, np.int32),
        }


def sum_over_peers(
    spec: PeerSpec, norm_scale: Any, grads: Sequence[Any], received: Sequence[Any] = ()
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """Adds this device's shards of the gradients of all devices, pairwise in float32.

    Args:
      spec: The leaves.
      norm_scale: The factor of the sums in their norm, shape (), float32.
      grads: This device's gradients, of one dtype: whole, or its shard (``takes_shards``).
      received: For each leaf in ``spec.received``, this device's shard of the others' gradients,
        starting with the next lower place; in the order of the leaves.

    Returns:
      The sums, each of shape (size,), float32; the sum of their squares; whether one is non-finite.
    """
    operands = norm_scale, list(grads), list(received)
    norm_scale, grads, received = collectives.vary_together(operands)
    types = [native.type_like(grads[0], (size,), jnp.float32) for size in spec.sizes]
    call = jax.ffi.ffi_call("jdistadam_peer_sum", [*types, *_norm_types(grads[0], spec.sizes)])
    *sums, squares, found_inf, _ = call(norm_scale, *grads, *received, **spec._where())
    return sums, squares, found_inf


def step_over_peers(
    spec: PeerSpec,
    scalars: Scalars,
    grads: Sequence[Any],
    received: Sequence[Any],
    state: Sequence[Any],
    *,
    norm_scale: Any,
    param_types: Sequence[Any],
    summed: bool,
) -> tuple[list[jax.Array], tuple[Any, ...], tuple[jax.Array, jax.Array] | None]:
    """Takes an Adam step on this device's shards and writes new parameters to all devices.

    Args:
      spec: The leaves.
      scalars: How to step.
      grads: As in ``sum_over_peers``; if ``summed``, its result.
      received: As in ``sum_over_peers``; empty if ``summed``.
      state: Main parameters, mu and nu: this device's flat arrays, updated in place.
      norm_scale: As in ``sum_over_peers``.
      param_types: The types of the whole new parameters.
      summed: Whether the gradients are summed already.

    Returns:
      The unsharded parameters; the new state; and, unless ``summed``, the sum of squares of the
      summed gradients, and whether one is non-finite.
    """
    operands = ((norm_scale, *scalars), list(grads), list(received), tuple(state))
    numbers, grads, received, state = collectives.vary_together(operands)
    state = native.unfused(state)
    norm_types = [] if summed else _norm_types(grads[0], spec.sizes)
    first_state = len(numbers) + len(grads) + len(received)
    aliases = {first_state + i: len(grads) + i for i in range(len(state))}
    call = jax.ffi.ffi_call(
        "jdistadam_peer_step",
        [*param_types, *(jax.typeof(x) for x in state), *norm_types],
        input_output_aliases=aliases,
    )
    results = call(
        *numbers,
        *grads,
        *received,
        *state,
        **spec._where(summed=summed),
        offsets=np.asarray(spec.offsets, np.int64),
        groups=np.asarray(spec.groups, np.int32),
        flags=bits_of(spec.flags),
        summed=np.bool_(summed),
    )
    results = native.unfused(results)
    params, state = list(results[: len(grads)]), tuple(results[len(grads) :][: len(state)])
    norm = None if summed else (results[-3], results[-2])
    return params, state, norm
