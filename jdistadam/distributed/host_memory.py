"""State in host memory: its placement, and how a step moves it to the device.

[Note: windows]
Between steps the flat arrays are in pinned host memory. A step moves a window of them to the
device, a few buckets at a time, updates it there, and writes it back. Each window is cut from the
result of the previous one, so the device holds at most two, and XLA updates the host arrays in
place. The kernel gets arrays that begin with the window. Its result for an element does not depend
on the element's position in the flat state, so the results equal those of a state on the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jdistadam.core import memory, trees
from jdistadam.core.codecs import BLOCK, BlockCodes, is_codes
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.flat_moments import offset_of, operand_of, with_result
from jdistadam.distributed.layout import ALIGNMENT, Bucket, Layout
from jdistadam.distributed.state import DistributedState, map_state

WINDOW = 1 << 24
"""Maximum number of state elements in a window, unless one bucket has more."""

ARRAYS = ("main_params", "mu", "nu", "ema")
"""The fields of a state that are flat arrays; all others are small and on the device."""


def map_arrays(function: Callable[[Any], Any], opt_state: Any) -> Any:
    """Applies a function to the flat arrays of a state, or of a tree with one in it."""

    def mapped(state: DistributedState) -> DistributedState:
        new = {name: jax.tree.map(function, getattr(state, name)) for name in ARRAYS}
        return state._replace(**new)

    return map_state(mapped, opt_state)


def state_shardings(config: DistributedConfig, specs: Any) -> Any:
    """Returns the NamedSharding of every array of a state, from its PartitionSpecs."""
    is_spec = lambda x: isinstance(x, P)  # noqa: E731
    placed = jax.tree.map(lambda x: NamedSharding(config.mesh, x), specs, is_leaf=is_spec)
    if not config.is_on_host:
        return placed
    return map_arrays(lambda _: config.state_sharding, placed)


def to_host(config: DistributedConfig, opt_state: Any) -> Any:
    """Moves the flat arrays of a state to ``state_memory``; inside a program."""
    return map_arrays(memory.to_host, opt_state) if config.is_on_host else opt_state


def check_memory(config: DistributedConfig | None, **named: Any) -> None:
    """Raises MeshError for an array on the host, unless ``state_memory`` puts it there."""
    if config is not None and config.is_on_host:
        named = {name: map_arrays(lambda _: None, tree) for name, tree in named.items()}
    trees.check_memory(**named)


def windows(layout: Layout, indices: Sequence[int]) -> list[list[int]]:
    """Splits buckets, in order, into windows: in each, all or none have main parameters."""
    found: list[list[int]] = []
    for i in indices:
        ends = [layout.buckets[k] for k in (found[-1][0] if found else i, i)]
        if not found or _size(ends) > WINDOW or ends[0].has_main != ends[1].has_main:
            found.append([])
        found[-1].append(i)
    return found


def largest_window(layout: Layout) -> int:
    """The size of a layout's largest window, in elements."""
    return max((part.layout.flat_size for part in parts(layout)), default=0)


class Part(NamedTuple):
    """A window: the indices of its buckets, the buckets in the layout, and a layout of its own."""

    indices: list[int]
    buckets: list[Bucket]
    layout: Layout


def parts(layout: Layout) -> list[Part]:
    """The windows of all buckets of a layout."""
    found = []
    for indices in windows(layout, range(len(layout.buckets))):
        buckets = [layout.buckets[i] for i in indices]
        alone = dataclasses.replace(
            layout,
            buckets=tuple(within(buckets)),
            flat_size=_size(buckets),
            main_size=_size(buckets) if buckets[0].has_main else 0,
        )
        found.append(Part(indices, buckets, alone))
    return found


def within(buckets: Sequence[Bucket]) -> list[Bucket]:
    """Returns buckets with positions relative to a window that begins with the first."""
    first = buckets[0]
    return [
        dataclasses.replace(
            bucket,
            offset=bucket.offset - first.offset,
            moment_offset=bucket.moment_offset - first.moment_offset,
        )
        for bucket in buckets
    ]


def cut(x: Any, buckets: Sequence[Bucket]) -> jax.Array:
    """Moves the buckets' part of a flat host array to the device, as float arrays."""
    part: jax.Array = _cut(x, buckets[0].offset, _size(buckets))
    return part


def put(x: Any, part: Any, buckets: Sequence[Bucket]) -> jax.Array:
    """Returns a flat host array with the part of ``cut`` replaced."""
    new: jax.Array = _put(x, part, buckets[0].offset)
    return new


def cut_moment(moment: Any, buckets: Sequence[Bucket]) -> Any:
    """``cut`` for a moment, which may be coded; leaves arrays of other buckets unchanged."""
    first, start = buckets[0], offset_of(moment, buckets[0])
    size = offset_of(moment, buckets[-1]) + _aligned(buckets[-1].shard_size) - start
    return with_result(moment, first, _cut(operand_of(moment, first), start, size))


def put_moment(moment: Any, part: Any, buckets: Sequence[Bucket]) -> Any:
    """``put`` for a moment."""
    first = buckets[0]
    old, new = operand_of(moment, first), operand_of(part, first)
    return with_result(moment, first, _put(old, new, offset_of(moment, first)))


def _cut(operand: Any, start: int, size: int) -> Any:
    def one(x: Any, width: int) -> Any:
        return memory.cut_lines(x, start // BLOCK, size // BLOCK, width)

    return jax.tree.map(one, operand, _widths(operand))


def _put(operand: Any, part: Any, start: int) -> Any:
    def one(x: Any, new: Any, width: int) -> Any:
        return memory.put_lines(memory.to_host(x), new, start // BLOCK, width)

    return jax.tree.map(one, operand, part, _widths(operand))


def _widths(operand: Any) -> Any:
    """Elements per block of a flat array."""
    return BlockCodes(BLOCK, 1) if is_codes(operand) else BLOCK


def _size(buckets: Sequence[Bucket]) -> int:
    """Elements of the flat state from the first bucket to the end of the last."""
    return buckets[-1].offset + _aligned(buckets[-1].shard_size) - buckets[0].offset


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
