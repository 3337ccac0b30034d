"""Flat arrays in two parts, if ``state_memory`` chooses a memory for each leaf.

Leaves whose state stays on the device are *resident*. They have flat arrays of their own, with
positions of their own: a layout has a layout of each part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from jdistadam.core import memory
from jdistadam.errors import PolicyError


class FlatParts(NamedTuple):
    """A flat array in two parts, or what belongs to each.

    Attributes:
      host: For the leaves whose state is in host memory.
      device: For those whose state stays on the device.
    """

    host: Any
    device: Any


def part_of(flat: Any, bucket: Any) -> Any:
    """Returns the part of a flat array that has a bucket; all of it, if it is in one part."""
    if not isinstance(flat, FlatParts):
        return flat
    return flat.device if bucket.is_resident else flat.host


def with_part(flat: Any, bucket: Any, new: Any) -> Any:
    """Returns a flat array with the part of ``part_of`` replaced."""
    if not isinstance(flat, FlatParts):
        return new
    return flat._replace(**{"device" if bucket.is_resident else "host": new})


def in_each_part(config: Any, x: Any) -> Any:
    """Returns ``x``, or ``x`` for each part, if states of a configuration have parts."""
    return x if config.is_resident is None else FlatParts(x, x)


def in_parts(config: Any, layout: Any, function: Callable[..., Any], *flats: Any) -> Any:
    """Returns ``function(config, layout, *flats)``, made of one part after the other.

    Args:
      config: The ``DistributedConfig``.
      layout: The ``Layout``.
      function: What makes a flat array, or a part of it, for a configuration and a layout.
      flats: Flat arrays, or other ``FlatParts``, of which it gets the same part; or None.
    """
    if not layout.parts:
        return function(config, layout, *flats)
    on_host = dataclasses.replace(config, is_resident=None)
    configs = on_host, dataclasses.replace(on_host, on_host=())
    both = [flat or FlatParts(None, None) for flat in flats]
    return FlatParts(*map(function, configs, layout.parts, *both))


def residence(state_memory: Any) -> Callable[[str], bool] | None:
    """Returns whether the state of the leaf of a path stays on the device; None for no function."""
    if not callable(state_memory):
        return None

    def is_resident(path: str) -> bool:
        if (place := state_memory(path)) not in memory.MEMORIES:
            raise PolicyError(
                f"state_memory: not a memory for {path}: got {place!r}, expected "
                f"{' or '.join(map(repr, memory.MEMORIES))}. Let the function return one of them."
            )
        return bool(place == memory.MEMORIES[0])

    return is_resident
