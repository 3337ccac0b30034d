"""State in host memory: its placement, and how a step moves it to the device.

[Note: windows]
Between steps all flat arrays, or some, are in pinned host memory. A step copies a window of them to
the device, a few buckets at a time, updates it there, and copies it back. On GPUs both directions
run at once, while the kernel updates a third window. ``WINDOWS_BYTES`` limits the windows on the
device. Half of them arrive before they are needed, and half have time to leave, so the backward
pass waits for neither. The kernel gets arrays that begin with the window. Its result for an element
does not depend on the element's position in the flat state, so the results equal those of a state
on the device.

Every call depends on the previous one, if necessary by an operand that it does not read. XLA
therefore cannot reorder the calls, and never copies an array on the host to keep an older value.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from jdistadam.core import memory, trees
from jdistadam.core.codecs import BLOCK, BlockCodes, is_codes
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.flat_arrays import FLAT_ARRAYS, Window
from jdistadam.distributed.state import DistributedState, map_state
from jdistadam.kernels import host_copy
from jdistadam.kernels.host_copy import Rows

WINDOWS_BYTES = 1 << 30
"""Device memory for windows, unless three need more. With half of it a training step of 1.31e9
parameters takes 13 % longer on an H100.
"""


def map_arrays(names: Collection[str], function: Callable[[Any], Any], opt_state: Any) -> Any:
    """Applies a function to some flat arrays of a state, or of a tree with one in it."""

    def mapped(state: DistributedState) -> DistributedState:
        new = {name: jax.tree.map(function, getattr(state, name)) for name in names}
        return state._replace(**new)

    return map_state(mapped, opt_state) if names else opt_state


def state_shardings(config: DistributedConfig, specs: Any) -> Any:
    """Returns the NamedSharding of every array of a state, from its PartitionSpecs."""
    placed = jax.tree.map(lambda spec: NamedSharding(config.mesh, spec), specs)
    return map_arrays(config.on_host, lambda x: x.with_memory_kind(memory.HOST), placed)


def to_state_memory(config: DistributedConfig, opt_state: Any) -> Any:
    """Moves the arrays of a state to ``state_memory``; inside a program."""
    return map_arrays(config.on_host, memory.to_host, opt_state)


def check_memory(config: DistributedConfig | None, **named: Any) -> None:
    """Raises MeshError for an array on the host, unless ``state_memory`` puts it there."""
    on_host = () if config is None else config.on_host
    if on_host:
        advice = (
            f"state_memory of this optimizer names only {', '.join(on_host)}. "
            "Move the state first: jax.device_put(opt_state, tx.state_shardings())."
        )
    else:
        advice = ""
    for names, how in ((FLAT_ARRAYS, ""), (on_host, advice)):
        kept = {name: map_arrays(names, lambda _: None, tree) for name, tree in named.items()}
        trees.check_memory(how, **kept)


def num_windows(window_bytes: float) -> int:
    """The number of windows that may be on a device at the same time: one each way, and a third."""
    return max(3, int(WINDOWS_BYTES / max(window_bytes, 1)))


def bytes_at_once(sizes: Sequence[int]) -> int:
    """The bytes of windows of these sizes that are on a device at the same time."""
    largest = max(sizes, default=0)
    return largest * min(len(sizes), num_windows(largest))


def cut(x: Any, windows: Sequence[Window]) -> jax.Array:
    """Consecutive windows of a flat array in either memory, as one on the device."""
    return memory.cut_rows(x, *rows(x, windows))


def rows(x: Any, windows: Sequence[Window]) -> Any:
    """The ``Rows`` of a flat array that consecutive windows have; for codes, also of scales."""
    start, end = windows[0].start, windows[-1].start + windows[-1].size
    first, count = start // BLOCK, (end - start) // BLOCK
    of_elements = Rows(first, count, BLOCK)
    return BlockCodes(of_elements, Rows(first, count, 1)) if is_codes(x) else of_elements


class Stream:
    """Takes windows of arrays in host memory to the device, in order, and puts new values back.

    ``take`` and ``put`` alternate, once per window; then ``whole`` returns the new arrays.

    Args:
      arrays: For each window a tree of the flat arrays that it belongs to. Arrays with the same
        path in different trees are the same.
      rows: For each window its ``Rows`` of each array.
      after: Arrays on which the first copy depends.
    """

    def __init__(self, arrays: Sequence[Any], rows: Sequence[Any], after: Sequence[Any]) -> None:
        self._trees = [jax.tree.structure(x) for x in arrays]
        self._arrays: dict[str, Any] = {}
        self._windows: list[dict[str, Rows]] = []
        for tree, of_tree in zip(arrays, rows, strict=True):
            named = _by_path(tree)
            self._arrays |= named
            self._windows.append(dict(zip(named, _leaves(of_tree), strict=True)))
        self._arrays = {name: memory.to_host(x) for name, x in self._arrays.items()}
        self._after = list(after)
        self._arriving: list[list[Any]] = []
        self._leaving: list[tuple[int, list[Any]]] = []
        self._put: set[str] = set()  # arrays that any window has put
        self._num_taken = 0
        sizes = list(map(nbytes, arrays, rows))
        count = num_windows(max(sizes, default=0))
        self._num_behind = count // 2
        self._num_ahead = count - self._num_behind
        for i in range(min(self._num_ahead, len(self._windows))):
            self._start(i)

    def take(self) -> Any:
        """Returns the next window: a tree of arrays on the device."""
        i, self._num_taken = self._num_taken, self._num_taken + 1
        arrived = host_copy.wait(self._arriving.pop(0), i, self._after, to_host=False)
        return jax.tree.unflatten(self._trees[i], arrived)

    def put(self, window: Any) -> None:
        """Puts new values of the window that was taken last, or of some of its arrays."""
        i, new = self._num_taken - 1, _by_path(window)
        after: list[Any] = []
        for last, x in new.items():
            rows = self._windows[i][last]
            host = host_copy.to_host(self._arrays[last], rows, x, i, after)
            self._arrays[last], after = host, [host]
        self._put |= new.keys()
        self._leaving.append((i, list(new.values())))
        is_last = self._num_taken == len(self._windows)
        if is_last or len(self._leaving) > self._num_behind:
            others = sorted(self._put - {last}) if is_last else []
            self._wait([*others, last], len(self._leaving) if is_last else 1)
        self._after = [self._arrays[last]]
        self._start(i + self._num_ahead)

    def whole(self, i: int) -> Any:
        """Returns the tree of arrays of window i, with all new values."""
        return jax.tree.unflatten(self._trees[i], [self._arrays[x] for x in self._windows[i]])

    def _start(self, i: int) -> None:
        """Starts to copy a window to the device."""
        if i < len(self._windows):
            hosts, rows = [self._arrays[x] for x in self._windows[i]], self._windows[i].values()
            arriving, started = host_copy.to_device(hosts, list(rows), i, self._after)
            self._arriving.append(arriving)
            self._after = [started]

    def _wait(self, names: Sequence[str], count: int) -> None:
        """Lets later users of arrays wait until the next windows that leave are on the host."""
        leaving, self._leaving = self._leaving[:count], self._leaving[count:]
        i, after = leaving[-1][0], [x for _, new in leaving for x in new]
        after += [self._arrays[names[-1]]] if len(names) > 1 else []
        for name in names:
            (host,) = host_copy.wait([self._arrays[name]], i, after, to_host=True)
            self._arrays[name], after = host, [host]


def nbytes(arrays: Any, rows: Any) -> int:
    """The bytes of a window: its trees of flat arrays and of ``Rows``."""
    pairs = zip(jax.tree.leaves(arrays), _leaves(rows), strict=True)
    return sum(x.dtype.itemsize * some.num_rows * some.width for x, some in pairs)


def _leaves(rows: Any) -> list[Rows]:
    return jax.tree.leaves(rows, is_leaf=lambda x: isinstance(x, Rows))


def _by_path(tree: Any) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): x for path, x in leaves}
