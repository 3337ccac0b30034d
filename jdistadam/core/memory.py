"""The memory that arrays are in: of their device, or pinned memory of the host beside it."""

from __future__ import annotations

from typing import Any

import jax

HOST = "pinned_host"
MEMORIES = ("device", HOST)
"""What ``state_memory`` may be: JAX's own names of kinds of memory."""


def to_host(tree: Any) -> Any:
    """Brings arrays to the host in a program, unless their types say that they are there."""
    return jax.tree.map(lambda x: _to(x, jax.memory.Space.Host), tree)


def to_device(tree: Any) -> Any:
    """Brings arrays to the device in a program, unless their types say that they are there."""
    return jax.tree.map(lambda x: _to(x, jax.memory.Space.Device), tree)


def is_on_host(x: Any) -> bool:
    """Whether an array, a shape or a sharding is in pinned memory of the host; not of a tracer."""
    return getattr(getattr(x, "sharding", x), "memory_kind", None) == HOST


def beside(sharding: Any) -> Any:
    """Returns a sharding in the memory of the devices."""
    return sharding.with_memory_kind(MEMORIES[0]) if is_on_host(sharding) else sharding


def from_host(tree: Any) -> Any:
    """Brings arrays of the host to their devices; others are as they are."""

    def one(x: Any) -> Any:
        if isinstance(x, jax.core.Tracer):
            return to_device(x)
        return jax.device_put(x, beside(x.sharding)) if is_on_host(x) else x

    return jax.tree.map(one, tree)


def _to(x: Any, space: Any) -> Any:
    return x if jax.typeof(x).memory_space == space else jax.device_put(x, space)
