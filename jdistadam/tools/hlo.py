"""Reads the collectives of a compiled program off its optimized HLO."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

# XLA's names of dtypes, as they stand in HLO, and JAX's.
DTYPES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "f8e5m2": "float8_e5m2",
    "f8e4m3fn": "float8_e4m3fn",
    "pred": "bool",
    "s32": "int32",
    "u8": "uint8",
    "u16": "uint16",
    "u32": "uint32",
}
_OPS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"


class CompiledCollective(NamedTuple):
    """One collective instruction, which may combine several arrays.

    Attributes:
      op: "reduce-scatter", "all-gather", "all-reduce", "all-to-all" or "collective-permute".
      arrays: XLA's name of the dtype, and the number of elements, of each result.
      devices: How many devices take part in it together.
      times: How often it runs, as far as XLA knows the lengths of loops.
      is_async: Whether other work can run while it does.
    """

    op: str
    arrays: tuple[tuple[str, int], ...]
    devices: int
    times: int
    is_async: bool


def collectives_in(text: str) -> Iterator[CompiledCollective]:
    """Yields every collective of a program: ``compiled.as_text()``."""
    times = _times_of_computations(text)
    for name, line in _instructions(text):
        found = re.search(rf"= (\S.*?) ({_OPS})(-start)?\(", line)
        if not found:
            continue
        result, op, start = found.groups()
        if start and (op != "all-reduce" or result.startswith("((")):
            # (operands, results), each perhaps a tuple; older all-reduces name results alone
            result = _second_half(result)
        arrays = tuple(
            (dtype, math.prod(int(n) for n in dims.split(",") if n))
            for dtype, dims in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", result)
        )
        yield CompiledCollective(op, arrays, _devices(line), times.get(name, 1), bool(start))


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yields (name of the computation, line)."""
    name = ""
    for line in text.splitlines():
        if line.endswith("{") and (found := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(", line)):
            name = found[1]
        yield name, line


def _times_of_computations(text: str) -> dict[str, int]:
    """How often each computation runs: bodies of loops as often as XLA knows, others once."""
    callers: dict[str, list[tuple[str, int]]] = {}
    for name, line in _instructions(text):
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


def _devices(line: str) -> int:
    """The size of a collective's groups, in whichever way XLA writes them; 0 if it does not."""
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]<=", line):
        return int(found[1])
    if found := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", found[2]))
    found = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    return len(found[1].split(",")) if found else 0
