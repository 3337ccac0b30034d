"""The two FFI calls of a step over the memory of several devices in one process.

They run inside ``jax.shard_map``. The devices wait for each other in every call (cuda/meeting.h).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdistadam.core import collectives
from jdistadam.kernels import native, reference
from jdistadam.kernels.adam import Scalars, bits_of

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

    def _norm_types(self, like: Any) -> list[Any]:
        tiles = sum(-(-size // reference.NORM_TILE) for size in self.sizes)
        shapes = (((), jnp.float32), ((), jnp.bool_), ((tiles, 2), jnp.uint32))
        return [native.type_like(like, shape, dtype) for shape, dtype in shapes]


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
    call = jax.ffi.ffi_call("jdistadam_peer_sum", [*types, *spec._norm_types(grads[0])])
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
    norm_types = [] if summed else spec._norm_types(grads[0])
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
