"""What leaves a distributed state and comes back has the bits that revision d14c5ef recorded."""

import json
import os
import subprocess
import sys

import pytest

from support import kept_states
from support.free_port import free_port
from support.paths import ROOT, TESTS
from support.samples import often

RECORD = json.loads(kept_states.RECORD.read_text())


def test_all_is_recorded():
    assert set(RECORD) == set(kept_states.CASES)
    ways = {way for found in RECORD.values() for way in found}
    assert ways == {
        "average", "back", "exported", "file", "header", "main", "params", "reloaded", "restored",
        "shapes", "state",
    }  # fmt: skip
    values = list(zip(*kept_states.CASES.values(), strict=True))
    for i, mine in enumerate(values):
        for other in values[i + 1 :]:
            met, every = set(zip(mine, other, strict=True)), (set(mine), set(other))
            assert len(met) == len(every[0]) * len(every[1])


@pytest.mark.parametrize("name", kept_states.CASES)
@often(lambda name: name in kept_states.OFTEN)
def test_a_state_is_saved_exported_and_made_again_as_recorded(name):
    assert kept_states.found_digests(name) == RECORD[name]


@pytest.mark.slow
def test_several_processes_find_the_same(tmp_path):
    """Two processes of four devices each: shards of the other one are fetched."""
    port = free_port()
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, TESTS)))}
    env.pop("XLA_FLAGS", None)
    command = [sys.executable, "-W", "ignore", "-m", "support.kept_states"]
    started = [
        subprocess.Popen([*command, str(i), "2", str(port), str(tmp_path)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for i in range(2)
    ]  # fmt: skip
    ended = [process.communicate(timeout=600) for process in started]
    assert [process.returncode for process in started] == [0, 0], ended[0][1][-3000:]
    for out, _ in ended:
        lines = [json.loads(line) for line in out.splitlines() if line.startswith('["')]
        assert [name for name, _ in lines] == list(kept_states.SHARED)
        for name, found in lines:
            assert found == RECORD[name], name
