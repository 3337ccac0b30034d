"""The order of copies of a state on the host, in every schedule that the program allows.

A recorder stands for the copies. It notes what each call depends on, so the tests hold for any
order that XLA may choose: CPUs copy at once, and could not show that a wait is missing.
"""

import dataclasses
import itertools
import random
from typing import Any

import numpy as np
import pytest

from jdistadam.core import memory
from jdistadam.distributed import host_memory
from jdistadam.kernels.host_copy import Rows

NAMES = ("main_params", "mu", "mu codes", "nu", "nu codes")


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """An array: the call that made it (None: an argument), and its name."""

    call: Any
    name: str
    dtype = np.dtype(np.float32)


@dataclasses.dataclass(eq=False)
class Call:
    kind: str
    operands: list
    index: int = -1
    replaces: tuple = ()  # operands that it changes in place
    before: set = dataclasses.field(default_factory=set)  # calls that must come earlier

    def __post_init__(self):
        for call in {x.call for x in self.operands} - {None}:
            self.before |= {call} | call.before


class Recorder:
    """In place of ``kernels.host_copy``."""

    def __init__(self):
        self.calls = []

    def call(self, *args):
        self.calls.append(Call(*args))
        return self.calls[-1]

    def to_device(self, hosts, parts, index, after):
        call = self.call("start", [*hosts, *after], index)
        return [Value(call, "part") for _ in hosts], Value(call, "token")

    def to_host(self, host, part, new, index, after):
        call = self.call("leave", [host, new, *after], index, (host,))
        return Value(call, host.name)

    def wait(self, arrays, index, after, *, to_host):
        kind = "left" if to_host else "arrived"
        call = self.call(kind, [*arrays, *after], index, tuple(arrays))
        return [Value(call, x.name) for x in arrays]


def run(monkeypatch, windows, count):
    """The calls of a stream whose windows have these arrays, the new parts, and the last arrays."""
    recorder = Recorder()
    monkeypatch.setattr(host_memory, "host_copy", recorder)
    monkeypatch.setattr(memory, "to_host", lambda x: x)
    first = {name: Value(None, name) for name in NAMES}
    arrays = [{name: first[name] for name in window} for window in windows]
    rows = [{name: Rows(0, 2, 3) for name in window} for window in windows]
    size = 24 * max(map(len, windows))
    grads = [Value(recorder.call("gradient", []), "gradient") for _ in windows]
    monkeypatch.setattr(host_memory, "WINDOWS_BYTES", count * size)
    stream = host_memory.Stream(arrays, rows, grads[:1])
    new = []
    for i, grad in enumerate(grads):
        window = stream.take()
        call = recorder.call("kernel", [*window.values(), grad], i)
        new.append({name: Value(call, name) for name in window})
        stream.put(new[-1])
    last = {}
    for i in range(len(windows)):
        last |= stream.whole(i)
    return recorder.calls, new, last


def cases():
    rng = random.Random(0)
    for num in range(1, 10):
        for count in range(3, 12):
            yield [NAMES[:3]] * num, count
            for _ in range(5):
                yield [tuple(rng.sample(NAMES, rng.randint(1, 4))) for _ in range(num)], count


def of(calls, kind):
    return [call for call in calls if call.kind == kind]


def test_the_order_holds_in_every_schedule(monkeypatch):
    for windows, count in cases():
        calls, new, last = run(monkeypatch, windows, count)
        where = (windows, count)
        leave = {i: {x for x in of(calls, "leave") if x.index == i} for i in range(len(windows))}
        start = {x.index: x for x in of(calls, "start")}

        def covers(call, i, leave=leave):
            """Whether after this call window i is on the host."""
            is_wait = call.kind == "left" and call.index >= i
            return is_wait and (leave[i] | leave[call.index]) <= call.before

        waits = of(calls, "left")
        ordered = [x for x in calls if x.kind != "gradient"]
        for a, b in itertools.pairwise(ordered):
            assert a in b.before, (where, a.kind, b.kind)
        for call in calls:  # nothing reads an array after it has changed
            for old in call.replaces:
                readers = [x for x in calls if x is not call and old in x.operands]
                assert all(x in call.before for x in readers), (where, call.kind)
        for i, parts in enumerate(new):
            for part in parts.values():  # XLA must not free a part that leaves
                assert any(covers(x, i) and part in x.operands for x in waits), (where, i)
            if i >= count:  # no more windows than the bytes allow
                assert any(covers(x, i - count) and x in start[i].before for x in waits), where
        for name, value in last.items():  # whatever reads the results comes after all copies
            put = max(i for i, window in enumerate(windows) if name in window)
            assert covers(value.call, put), (where, name)
            assert {x for i in leave for x in leave[i]} <= value.call.before | {value.call}


@pytest.mark.parametrize("count", [3, 4, 7])
def test_half_of_the_windows_arrive_and_half_leave(count, monkeypatch):
    num = 12
    calls, _, _ = run(monkeypatch, [NAMES[:3]] * num, count)
    arrived = {x.index: calls.index(x) for x in of(calls, "arrived")}
    start = {x.index: calls.index(x) for x in of(calls, "start")}
    waits = sorted((calls.index(x), x.index) for x in of(calls, "left"))
    left = [min(place for place, index in waits if index >= i) for i in range(num)]
    ahead, behind = count - count // 2, count // 2
    for i in range(num):
        assert start[min(i + ahead - 1, num - 1)] < arrived[i]
        if i + ahead < num:
            assert start[i + ahead] > arrived[i]
        last = max(
            calls.index(x) for x in of(calls, "leave") if x.index == min(i + behind, num - 1)
        )
        assert left[i] > last
        if i + behind + 1 < num:
            assert left[i] < arrived[i + behind + 1]
