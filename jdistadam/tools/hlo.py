"""Reads the collectives of a compiled program from its optimized HLO."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jdistadam.kernels import copies

# XLA's names of dtypes in HLO, and JAX's.
DTYPES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "f8e5m2": "float8_e5m2",
    "f8e4m3fn": "float8_e4m3fn",
    "c64": "complex64",
    "pred": "bool",
    "s8": "int8",
    "s16": "int16",
    "s32": "int32",
    "s64": "int64",
    "u8": "uint8",
    "u16": "uint16",
    "u32": "uint32",
    "u64": "uint64",
}
_OPS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
_OURS = re.compile(r'op_name="[^"]*\bjdistadam/(all_|reduce_)')  # scopes of core/collectives.py
COPIED = "copied "
"""What stands before the operation of a collective by copies between devices."""


class CompiledCollective(NamedTuple):
    """One collective instruction, which may combine several arrays.

    Attributes:
      op: "reduce-scatter", "all-gather", "all-reduce", "all-to-all" or "collective-permute"; over
        peer memory "copied all-gather" or "copied all-to-all" (kernels/copies.py).
      arrays: XLA's dtype name and the number of elements of each result.
      devices: How many devices take part in it together.
      times: How often it runs, as far as XLA knows the lengths of loops.
      is_async: Whether it can overlap other work.
      groups: The devices that take part in it together, by position in the mesh; for a
        collective-permute each sender and receiver. Empty if XLA writes them in an unknown form.
      is_ours: Whether core/collectives.py made it, as far as its name in the program tells.
    """

    op: str
    arrays: tuple[tuple[str, int], ...]
    devices: int
    times: int
    is_async: bool
    groups: tuple[tuple[int, ...], ...] = ()
    is_ours: bool = False


def collectives_in(text: str) -> Iterator[CompiledCollective]:
    """Yields every collective of a program: ``compiled.as_text()``."""
    times = _times_of_computations(text)
    for name, line in instructions(text):
        if copies.START in line and (copied := _copied(line)):
            yield copied._replace(times=times.get(name, 1))
        found = re.search(rf"= (\S.*?) ({_OPS})(-start)?\(", line)
        if not found:
            continue
        result, op, start = found.groups()
        if start and (op != "all-reduce" or result.startswith("((")):
            # (operands, results), each may be a tuple; older all-reduces name only results.
            # Permutes may also have contexts.
            result = _second_half(result.replace(", u32[]", ""))
        arrays = _arrays(result)
        groups = _groups(line)
        devices = 0 if op == "collective-permute" or not groups else len(groups[0])
        yield CompiledCollective(
            op, arrays, devices, times.get(name, 1), bool(start), groups, bool(_OURS.search(line))
        )


def _copied(line: str) -> CompiledCollective | None:
    """The collective that a custom call starts, once; None if the line has no such call."""
    found = re.search(r"= (\S.*?) custom-call\(", line)
    per_group = re.search(r"per_group = (\d+)", line)
    if not found or not per_group:
        return None
    devices, arrays = int(per_group[1]), _arrays(found[1])
    if "gathers = true" in line:
        return CompiledCollective(f"{COPIED}all-gather", arrays, devices, 1, True)
    # A device does not send itself its own part.
    arrays = tuple((dtype, n // (devices - 1) * devices) for dtype, n in arrays)
    return CompiledCollective(f"{COPIED}all-to-all", arrays, devices, 1, True)


def _arrays(result: str) -> tuple[tuple[str, int], ...]:
    """XLA's dtype name and the number of elements of each array of a type."""
    return tuple(
        (dtype, math.prod(int(n) for n in dims.split(",") if n))
        for dtype, dims in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", result)
    )


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yields (name of the computation, line) in execution order."""
    name = ""
    for line in text.splitlines():
        if line.endswith("{") and (found := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(", line)):
            name = found[1]
        yield name, line


def _times_of_computations(text: str) -> dict[str, int]:
    """How often each computation runs: loop bodies as often as XLA knows, others once."""
    callers: dict[str, list[tuple[str, int]]] = {}
    for name, line in instructions(text):
        if found := re.search(r" while\(.*\bbody=%?([\w.\-]+)", line):
            count = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
            callers.setdefault(found[1], []).append((name, int(count[1]) if count else 1))
        for called in re.findall(r"\b(?:calls|to_apply)=%?([\w.\-]+)", line):
            callers.setdefault(called, []).append((name, 1))

    def times(name: str) -> int:
        return sum(times(caller) * count for caller, count in callers.get(name, ())) or 1

    return {name: times(name) for name in callers}


def _second_half(result: str) -> str:
    arrays = re.findall(r"[a-z]\w*\[[\d,]*\](?:\{[^}]*\})?", result)
    return ", ".join(arrays[len(arrays) // 2 :])


def _groups(line: str) -> tuple[tuple[int, ...], ...]:
    """The groups of a collective in any known form of XLA; empty for an unknown form.

    Example:
      >>> _groups("replica_groups={{0,2},{1,3}}")
      ((0, 2), (1, 3))
      >>> _groups("replica_groups=[2,2]<=[2,2]T(1,0)")
      ((0, 2), (1, 3))
      >>> _groups("replica_groups=mesh['data'=2,'model'=2] {'data'}")
      ((0, 2), (1, 3))
    """
    if found := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]+\})\}", line):
        return tuple(_numbers(group) for group in re.findall(r"\{([\d,]+)\}", found[1]))
    if found := re.search(r"replica_groups=\[(\d+,\d+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", line):
        return _rows(_iota(found[2]).reshape(_numbers(found[1])))
    mesh = r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((\[.*?\].*?)\))? \{([^}]*)\}"
    if found := re.search(mesh, line):
        axes = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", found[1])}
        names, sizes = list(axes), list(axes.values())
        devices = _iota(found[2]) if found[2] else np.arange(math.prod(sizes))
        devices = devices.reshape(sizes)
        last = [names.index(name) for name in re.findall(r"'(\w+)'", found[3])]
        order = [i for i in range(len(names)) if i not in last] + last
        count = math.prod(devices.shape[i] for i in last)
        return _rows(devices.transpose(order).reshape(-1, count))
    return ()


def _iota(text: str) -> np.ndarray:
    """The numbers of "[4,2]T(1,0)": the iota of this shape, transposed."""
    shape, *order = re.findall(r"[\d,]+", text)
    numbers = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return (numbers.transpose(_numbers(order[0])) if order else numbers).reshape(-1)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(","))


def _rows(groups: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, groups.tolist()))
