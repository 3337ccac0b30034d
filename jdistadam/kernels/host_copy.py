"""Copies windows of arrays between a device and its host, concurrently with the program.

``to_device`` and ``to_host`` start copies, and ``wait`` returns their arrays when they are done:
cuda/ffi_host_copy.h. All arrays are one device's, as in adam.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdistadam.core import collectives, memory
from jdistadam.kernels import native


class Rows(NamedTuple):
    """A window of a flat array: some rows of ``width`` elements."""

    first: int
    num_rows: int
    width: int


def to_device(
    hosts: Sequence[Any], rows: Sequence[Rows], index: int, after: Sequence[Any]
) -> tuple[list[Any], Any]:
    """Starts to copy a window of each array on the host.

    Args:
      hosts: Flat arrays in host memory.
      rows: One window for each array.
      index: Identifies the copy for ``wait``.
      after: Arrays on which the start depends, in addition.

    Returns:
      The windows, which only ``wait`` may take; and an array on which others can depend.
    """
    hosts, after = collectives.vary_together((list(hosts), list(after)))
    device = jax.memory.Space.Device

    def compiled(hosts: Sequence[Any], after: Sequence[Any]) -> tuple[list[Any], Any]:
        types = [
            native.type_like(x, (some.num_rows * some.width,), x.dtype).update(memory_space=device)
            for x, some in zip(hosts, rows, strict=True)
        ]
        types.append(native.type_like(hosts[0], (1,), jnp.uint8).update(memory_space=device))
        call = jax.ffi.ffi_call("jdistadam_host_copy", types)
        *new, started = call(*hosts, *after, **_attributes(hosts, rows, index, to_host=False))
        return new, started

    def fallback(hosts: Sequence[Any], after: Sequence[Any]) -> tuple[list[Any], Any]:
        new = [memory.cut_rows(x, *some) for x, some in zip(hosts, rows, strict=True)]
        return new, new[0][:1].astype(jnp.uint8)

    return native.choose(compiled, fallback)(hosts, after)


def to_host(host: Any, rows: Rows, new: Any, index: int, after: Sequence[Any]) -> Any:
    """Starts to replace a window of an array on the host; returns the array, in place.

    One array per call: XLA considers all results of a call to be in one memory, and follows each
    result of one call to each result of the next, which takes exponential time.

    Args:
      host: A flat array in host memory.
      rows: The window.
      new: Its new values, on the device. Pass it to ``wait`` too.
      index: Identifies the copy for ``wait``, with those that started before.
      after: Arrays on which the start depends, in addition.
    """
    host, new, after = collectives.vary_together((host, new, list(after)))

    def compiled(host: Any, new: Any, after: Sequence[Any]) -> Any:
        call = jax.ffi.ffi_call(
            "jdistadam_host_copy", jax.typeof(host), input_output_aliases={0: 0}
        )
        return call(host, new, *after, **_attributes([host], [rows], index, to_host=True))

    def fallback(host: Any, new: Any, after: Sequence[Any]) -> Any:
        return memory.put_rows(host, new, rows.first, rows.width)

    return native.choose(compiled, fallback)(host, new, after)


def wait(arrays: Sequence[Any], index: int, after: Sequence[Any], *, to_host: bool) -> list[Any]:
    """Returns arrays when a copy is done.

    Args:
      arrays: To the device, the windows. To the host, an array on the host.
      index: The copy's.
      after: Arrays on which it depends, in addition: to the host, the new windows.
      to_host: The direction of the copy.
    """
    arrays, after = collectives.vary_together((list(arrays), list(after)))

    def compiled(arrays: Sequence[Any], after: Sequence[Any]) -> list[Any]:
        aliases = {i: i for i in range(len(arrays))}
        types = [jax.typeof(x) for x in arrays]
        call = jax.ffi.ffi_call("jdistadam_host_copied", types, input_output_aliases=aliases)
        return list(call(*arrays, *after, index=np.int32(index), to_host=np.bool_(to_host)))

    return native.choose(compiled, lambda arrays, after: list(arrays))(arrays, after)


def _attributes(
    hosts: Sequence[Any], rows: Sequence[Rows], index: int, *, to_host: bool
) -> dict[str, Any]:
    starts = [
        some.first * some.width * x.dtype.itemsize for x, some in zip(hosts, rows, strict=True)
    ]
    return {
        "offsets": np.asarray(starts, np.int64),
        "index": np.int32(index),
        "to_host": np.bool_(to_host),
    }
