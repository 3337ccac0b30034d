"""Where arrays are stored: in device memory, or in pinned host memory."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

HOST = "pinned_host"
MEMORIES = ("device", HOST)
"""The values of ``state_memory``: JAX's names of memory kinds."""


def to_host(tree: Any) -> Any:
    """Moves arrays to the host in a program, unless their types say that they are there."""
    return jax.tree.map(lambda x: _to(x, jax.memory.Space.Host), tree)


def to_device(tree: Any) -> Any:
    """Moves arrays to the device in a program, unless their types say that they are there."""
    return jax.tree.map(lambda x: _to(x, jax.memory.Space.Device), tree)


def is_on_host(x: Any) -> bool:
    """Whether an array, a shape or a sharding is in pinned host memory; False for a tracer."""
    return getattr(getattr(x, "sharding", x), "memory_kind", None) == HOST


def device_sharding(sharding: Any) -> Any:
    """Returns a sharding in device memory."""
    return sharding.with_memory_kind(MEMORIES[0]) if is_on_host(sharding) else sharding


def from_host(tree: Any) -> Any:
    """Moves arrays on the host to their devices; returns others unchanged."""

    def one(x: Any) -> Any:
        if isinstance(x, jax.core.Tracer):
            return to_device(x)
        return jax.device_put(x, device_sharding(x.sharding)) if is_on_host(x) else x

    return jax.tree.map(one, tree)


def cut_rows(x: Any, first: Any, num_rows: int, width: int) -> jax.Array:
    """Returns some rows of a flat array on the device; the array may be on the host.

    Rows, because the index of an element may exceed 2^31. A slice of the whole array would be a
    bitcast between memories to XLA, which rejects it.

    Args:
      x: The flat array.
      first: The first row.
      num_rows: The number of rows.
      width: Elements per row.
    """
    if x.size == num_rows * width:
        return to_device(x)
    rows = lax.dynamic_slice_in_dim(x.reshape(-1, width), first, num_rows)
    return to_device(rows).reshape(-1)


def put_rows(x: Any, new: Any, first: Any, width: int) -> jax.Array:
    """Returns a flat array in either memory with some rows replaced, in place if donated.

    Args:
      x: The flat array.
      new: The updated rows, as ``cut_rows`` returns them.
      first: The first row.
      width: Elements per row.
    """
    new = _to(new.reshape(-1, width), jax.typeof(x).memory_space)
    return lax.dynamic_update_slice_in_dim(x.reshape(-1, width), new, first, 0).reshape(-1)


def _to(x: Any, space: Any) -> Any:
    return x if jax.typeof(x).memory_space == space else jax.device_put(x, space)
