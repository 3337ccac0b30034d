"""Sums and steps on gradients whose parts arrived from other devices; inside ``jax.shard_map``.

A device has its own whole gradient, and for its shard the parts of the other devices' gradients
(``copies.exchange``). The kernels read the parts where they are: cuda/parts.h.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdistadam.core import collectives
from jdistadam.kernels import copies, native
from jdistadam.kernels.adam import bits_of
from jdistadam.kernels.multi_tensor import tiles_type
from jdistadam.kernels.operands import Operands, Results, Scalars, Spec
from jdistadam.kernels.reference import NORM_TILE

SUM, STEP = "jdistadam_sum_parts", "jdistadam_step_parts"
"""The targets of the two calls."""


class Cut(NamedTuple):
    """How a gradient is cut: the shape of a part, its dimension, and the groups of devices."""

    shape: tuple[int, ...]
    dim: int
    groups: copies.Groups

    @property
    def size(self) -> int:
        """Elements of a part."""
        return math.prod(self.shape)

    @property
    def whole(self) -> tuple[int, ...]:
        """The shape of the gradient."""
        whole = list(self.shape)
        whole[self.dim] *= len(self.groups[0])
        return tuple(whole)


@dataclasses.dataclass(frozen=True)
class Parts:
    """A gradient whose parts are not added yet.

    Attributes:
      own: This device's gradient, whole.
      received: The parts of the other devices' gradients for its shard, stacked in their order.
      cut: How it is cut.
    """

    own: jax.Array
    received: jax.Array
    cut: Cut

    @property
    def dtype(self) -> Any:
        """The dtype of the parts."""
        return self.own.dtype


class Sums(NamedTuple):
    """Gradients added in float32, and for each the sums of squares of its tiles (cuda/norm.h)."""

    sums: list[jax.Array]
    tiles: list[jax.Array]


class Adding(NamedTuple):
    """How a step adds gradients.

    Attributes:
      cuts: How each is cut.
      is_whole: Whether new parameters are whole arrays, of which this device's shard is written.
    """

    cuts: Sequence[Cut]
    is_whole: bool


def sum_parts(parts: Sequence[Parts], norm_scale: Any = None) -> Sums:
    """Adds the parts of some gradients, pairwise in float32.

    Args:
      parts: Gradients of one dtype.
      norm_scale: The factor of a sum before it is squared, shape (), float32. None: 1.

    Returns:
      The sums, and tiles of their norm.
    """
    scale = jnp.ones((), jnp.float32) if norm_scale is None else norm_scale
    own, received = [x.own for x in parts], [x.received for x in parts]
    scale, own, received = collectives.vary_together((scale, own, received))
    cuts = [x.cut for x in parts]
    types = [native.type_like(own[0], cut.shape, np.dtype(np.float32)) for cut in cuts]
    call = jax.ffi.ffi_call(SUM, [*types, _type_of_tiles(own[0], cuts)])
    *sums, tiles = call(scale, *own, *received, **_attributes(cuts))
    return Sums(sums, _split(tiles, cuts))


def step_parts(
    spec: Spec, scalars: Scalars, operands: Operands, adding: Adding
) -> tuple[Results, Sequence[Any]]:
    """Takes an Adam step on float32 main parameters, and rounds them to new parameters.

    Args:
      spec: As for ``adam`` in mode "step_and_cast"; main, mu and nu are flat.
      scalars: As for ``adam``.
      operands: The gradients, or the sums of all of them; and one array each of main parameters,
        float32, and of moments, floats, which are updated in place.
      adding: How parts are added, and what new parameters are.

    Returns:
      The new arrays, and tiles of the norm of each gradient; None if it was added before.
    """
    grads, (main,), (mu,), (nu,) = operands.grads, operands.params, operands.mu, operands.nu
    summed, cuts, is_whole = not isinstance(grads[0], Parts), adding.cuts, adding.is_whole
    scale = jnp.ones((), jnp.float32)  # of the norm: gradients with a loss scale are added before
    arrays = list(grads) if summed else [*(x.own for x in grads), *(x.received for x in grads)]
    numbers, arrays, state = collectives.vary_together(((scale, *scalars), arrays, (main, mu, nu)))
    state = native.unfused(state)
    shapes = [cut.whole if is_whole else cut.shape for cut in cuts]
    types = [native.type_like(arrays[0], shape, jnp.dtype(spec.out_dtype)) for shape in shapes]
    tiles = _type_of_tiles(arrays[0], cuts)
    first, count = len(numbers) + len(arrays), len(cuts)
    call = jax.ffi.ffi_call(
        STEP,
        [*types, *(jax.typeof(x) for x in state), tiles],
        input_output_aliases={first + i: count + i for i in range(3)},
    )
    results = call(
        *numbers,
        *arrays,
        *state,
        **_attributes(cuts),
        **{name: np.asarray(spec.offsets_of(kind), np.int64) for name, kind in _OFFSETS},
        groups=np.asarray(spec.groups, np.int32),
        flags=bits_of(spec.flags),
        summed=np.bool_(summed),
        whole=np.bool_(is_whole),
    )
    results = native.unfused(results)
    of_sums = [None] * count if summed else _split(results[-1], cuts)
    main, mu, nu = ((x,) for x in results[count : count + 3])
    return Results(main, mu, nu, tuple(results[:count])), of_sums


_OFFSETS = (("offsets", "params"), ("mu_offsets", "mu"), ("nu_offsets", "nu"))


def _attributes(cuts: Sequence[Cut]) -> dict[str, Any]:
    return {
        **copies.attributes_of(cuts[0].groups),
        "rows": np.asarray([math.prod(cut.shape[: cut.dim]) for cut in cuts], np.int64),
        "sizes": np.asarray([cut.size for cut in cuts], np.int64),
    }


def _type_of_tiles(like: Any, cuts: Sequence[Cut]) -> Any:
    return tiles_type(like, (cut.size for cut in cuts))


def _split(tiles: jax.Array, cuts: Sequence[Cut]) -> list[jax.Array]:
    """The tiles of each leaf."""
    ends = np.cumsum([-(-cut.size // NORM_TILE) for cut in cuts])
    return list(jnp.split(tiles, ends[:-1]))
