"""The flat arrays of one device while calls renew them, wherever they are between steps.

A call takes arrays in place, as whole flat arrays: slicing them in XLA would copy the state.
If some are in host memory, it takes windows of these that have arrived on the device; the store
sends new values back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jdistadam.distributed import host_memory
from jdistadam.distributed.calls import Call
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.flat_arrays import Window, arrays_of, joined_field, types_of_arrays
from jdistadam.distributed.layout import Layout
from jdistadam.distributed.state import DistributedState


class Taken(NamedTuple):
    """What a call takes, by name: arrays, and the windows of its spans in them."""

    arrays: dict[str, Any]
    windows: dict[str, list[Window]]

    def starts(self, name: str) -> tuple[int, ...]:
        """The first elements of the spans in an array."""
        return tuple(window.start for window in self.windows[name])

    def window(self, name: str) -> Any:
        """The spans in an array, as one window of it; None: the call does not take the array."""
        return (
            host_memory.cut(self.arrays[name], self.windows[name]) if name in self.arrays else None
        )


class Store:
    """The current values of the flat arrays; ``take`` and ``put`` alternate, once for each call.

    Args:
      config: The configuration.
      state: The state before the first call.
      calls: All calls, in order.
      inputs: An array of each bucket that the calls need. Copies from the host start when the first
        input of a call that needs them is there.
      after: Arrays on which the first copy depends, in addition.
    """

    def __init__(
        self,
        config: DistributedConfig,
        state: DistributedState,
        calls: Sequence[Call],
        inputs: Sequence[Any],
        after: Sequence[Any] = (),
    ) -> None:
        self._config, self._state = config, state
        self._names = {name for call in calls for name in call.windows}
        self._arrays = arrays_of({name: getattr(state, name) for name in self._names})
        self._streamed = [call for call in calls if _on_host(config, call)]
        arrays, rows = _windows(config, self._arrays, self._streamed)
        needed = [inputs[call.spans[0].bucket_index] for call in self._streamed[:1]]
        self._stream = host_memory.Stream(arrays, rows, [*needed, *after])

    def take(self, call: Call) -> Taken:
        """Returns the arrays of a call: whole ones in place, or windows that begin with it."""
        arrays = {name: self._arrays[windows[0].array] for name, windows in call.windows.items()}
        moved = self._stream.take() if _on_host(self._config, call) else {}
        windows = call.windows | {name: _from_first(call.windows[name]) for name in moved}
        return Taken(arrays | moved, windows)

    def put(self, call: Call, new: dict[str, Any]) -> None:
        """Puts new values of the arrays that the call took, or of some."""
        streamed = {name: new[name] for name in _on_host(self._config, call) if name in new}
        if streamed:
            self._stream.put(streamed)
        self._replace(call, {name: x for name, x in new.items() if name not in streamed})

    def wait_for(self, arrays: Sequence[Any]) -> list[Any]:
        """Lets later calls wait for some arrays; returns these."""
        if not arrays:
            return []
        self._arrays, waited = jax.lax.optimization_barrier((self._arrays, list(arrays)))
        return waited

    def state(self) -> DistributedState:
        """Returns the state with the new arrays, after the last call."""
        for i, call in enumerate(self._streamed):
            self._replace(call, self._stream.whole(i))
        new = {name: joined_field(self._arrays, name) for name in self._names}
        return self._state._replace(**new)

    def _replace(self, call: Call, new: dict[str, Any]) -> None:
        self._arrays |= {call.windows[name][0].array: x for name, x in new.items()}


def bytes_of_windows(config: DistributedConfig, layout: Layout, calls: Sequence[Call]) -> int:
    """The bytes of windows that are on a device at the same time while it makes these calls."""
    arrays = arrays_of(types_of_arrays(config, layout))
    sizes = map(host_memory.nbytes, *_windows(config, arrays, calls))
    return host_memory.bytes_at_once(list(sizes))


def _windows(
    config: DistributedConfig, arrays: dict[str, Any], calls: Sequence[Call]
) -> tuple[list[Any], list[Any]]:
    """For each call with arrays in host memory: these by name, and the ``Rows`` of its window."""
    named, rows = [], []
    for call in calls:
        if names := _on_host(config, call):
            some = {name: arrays[call.windows[name][0].array] for name in names}
            named.append(some)
            rows.append({name: host_memory.rows(x, call.windows[name]) for name, x in some.items()})
    return named, rows


def _on_host(config: DistributedConfig, call: Call) -> list[str]:
    """The arrays of a call that are in host memory between steps."""
    return [name for name in call.windows if name in config.on_host]


def _from_first(windows: Sequence[Window]) -> list[Window]:
    """The same ones in an array that begins with the first."""
    return [window._replace(start=window.start - windows[0].start) for window in windows]
