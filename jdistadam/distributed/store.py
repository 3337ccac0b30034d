"""The flat arrays of one device while kernels step them, wherever they are between steps.

A kernel call takes arrays in place, as whole flat arrays: slicing them in XLA would copy the state.
If some are in host memory, it takes windows of these that have arrived on the device; the store
sends new values back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jdistadam.distributed import host_memory
from jdistadam.distributed.calls import Call, within
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.flat_moments import offset_of, operand_of, with_result
from jdistadam.distributed.layout import arrays_of
from jdistadam.distributed.state import DistributedState


class FlatState(NamedTuple):
    """This device's flat arrays that a kernel steps."""

    main_params: Any
    mu: Any
    nu: Any

    @classmethod
    def of(cls, state: DistributedState) -> FlatState:
        """Those of a state."""
        return cls(state.main_params, state.mu, state.nu)


class Taken(NamedTuple):
    """What a call takes: its arrays by name, and the starts of its buckets in each."""

    arrays: dict[str, Any]
    offsets: dict[str, tuple[int, ...]]


class Store:
    """The current values of the flat arrays; ``take`` and ``put`` alternate, once for each call.

    Args:
      config: The configuration.
      state: The state before the step.
      calls: All calls, in order.
      grads: The gradient of each bucket. Copies from the host start when the first one is there
        of those that need them.
    """

    def __init__(
        self,
        config: DistributedConfig,
        state: DistributedState,
        calls: Sequence[Call],
        grads: Sequence[Any],
    ) -> None:
        self._flat, self._on_host = FlatState.of(state), config.on_host
        self._streamed = [call for call in calls if call.on_host]
        arrays, lines = [], []
        for call in self._streamed:
            first = call.buckets[0]
            arrays.append({x: operand_of(getattr(self._flat, x), first) for x in call.on_host})
            lines.append(
                {x: host_memory.lines(getattr(self._flat, x), call.buckets) for x in call.on_host}
            )
        first_grads = [grads[call.pieces[0].bucket_index] for call in self._streamed[:1]]
        self._stream = host_memory.Stream(arrays, lines, first_grads, config.state_buffer_bytes)

    def take(self, call: Call) -> Taken:
        """Returns the arrays of a call: whole ones in place, or windows that begin with it."""
        buckets, first = call.buckets, call.buckets[0]
        placed = within(buckets)
        offsets = {
            name: tuple(offset_of(flat, x) for x in (placed if name in self._on_host else buckets))
            for name, flat in self._flat._asdict().items()
        }
        arrays = {x: operand_of(getattr(self._flat, x), first) for x in arrays_of(first)}
        return Taken(arrays | (self._stream.take() if call.on_host else {}), offsets)

    def put(self, call: Call, new: dict[str, Any]) -> None:
        """Puts new values of the arrays that the call took."""
        if call.on_host:
            self._stream.put({name: new[name] for name in call.on_host})
        self._replace(call, {name: x for name, x in new.items() if name not in call.on_host})

    def wait_for(self, arrays: Sequence[Any]) -> list[Any]:
        """Lets later calls wait for some arrays; returns these."""
        if not arrays:
            return []
        self._flat, waited = jax.lax.optimization_barrier((self._flat, list(arrays)))
        return waited

    def whole(self) -> FlatState:
        """Returns the new flat arrays, after the last call."""
        for i, call in enumerate(self._streamed):
            self._replace(call, self._stream.whole(i))
        return self._flat

    def _replace(self, call: Call, new: dict[str, Any]) -> None:
        bucket = call.buckets[0]
        replaced = {k: with_result(getattr(self._flat, k), bucket, x) for k, x in new.items()}
        self._flat = self._flat._replace(**replaced)
