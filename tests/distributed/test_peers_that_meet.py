"""Processes that may copy among each other: they do, or all use XLA for one reason, and none ends."""

import os
import re
import shlex
import subprocess
import sys

import pytest

from support.free_port import free_port
from support.paths import TESTS, environment
from support.samples import few

SCRIPT = TESTS / "support" / "peers_that_meet.py"
OWN_NAMESPACES = "unshare --pid --ipc --fork --mount-proc"
OWN_TMP = 'unshare --mount sh -c \'mount -t tmpfs none "$TMPDIR" && exec "$@"\' sh'
PLATFORMS = pytest.mark.parametrize(
    "platform", ["cpu", pytest.param("gpu", marks=pytest.mark.multigpu)]
)


def met(platform, what="nothing", wrap="", **env):
    """What each of two processes says; the second one is started by ``wrap``."""
    port = free_port()
    gpu = dict(XLA_PYTHON_CLIENT_PREALLOCATE="false", JAX_PLATFORMS="cuda,cpu")
    given = environment(**env | (gpu if platform == "gpu" else dict(JAX_PLATFORMS="cpu")))
    trial = [*shlex.split(wrap), "true"]
    if wrap and subprocess.run(trial, env=given, capture_output=True).returncode:
        pytest.skip(f"needs the right to run {wrap}")
    running = [
        subprocess.Popen(
            [*shlex.split(wrap if i else ""), sys.executable, "-P", SCRIPT, platform, str(i),
             str(port), what],
            env=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=120)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    for process, output in zip(running, outputs, strict=True):
        if "does not let process" in output:
            pytest.skip("the system forbids it: needs kernel.yama.ptrace_scope=0, or root")
        expected = (7, 0) if what.startswith("leaves") else (0, 0)
        assert process.returncode == expected[process is running[1]], output[-3000:]
    return outputs


def transports(outputs):
    """The transport of each process, and the reasons if it is XLA."""
    found = [re.search(r"^over (\w+)(?: \((.*)\))?$", x, re.M).groups() for x in outputs]
    refused = [re.search(r"refused: .*: got (.*), expected sharded", x) for x in outputs]
    reasons = {x[1] if x else why for x, (_, why) in zip(refused, found, strict=True)}
    losses = {re.search(r"loss (.*)", output)[1] for output in outputs}
    assert len(losses) == 1
    return {transport for transport, _ in found}, reasons


@PLATFORMS
def test_a_process_with_namespaces_of_its_own_uses_xla_as_the_other_one(platform):
    outputs = met(platform, wrap=OWN_NAMESPACES)
    over, (why,) = transports(outputs)
    assert over == {"xla"}
    assert re.match("another PID namespace in process 1 than in process 0: pid:", why), why
    for output in outputs:
        assert "sockets and threads 0 0" in output and "\nend\n" in output, output


@few(1)
@pytest.mark.parametrize("what", ["cannot compile", "cannot copy"])
@PLATFORMS
def test_a_trial_that_fails_in_one_process_fails_in_all(platform, what):
    outputs = met(platform, what)
    over, (why,) = transports(outputs)
    assert over == {"xla"} and why.endswith("a planted reason")
    for output in outputs:
        assert "sockets and threads 0 0" in output and "\nend\n" in output, output


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["", OWN_TMP], ids=["long TMPDIR", "own tmp"])
def test_processes_meet_without_a_common_folder(tmp_path, wrap):
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    outputs = met("cpu", wrap=wrap, TMPDIR=str(folder))
    assert transports(outputs) == ({"peer"}, {None})
    assert all("sockets and threads 1 1" in output for output in outputs), outputs
    assert not os.listdir(folder)


@pytest.mark.slow
def test_a_process_that_was_missing_is_met_later():
    outputs = met("cpu", "comes late")
    assert transports(outputs) == ({"peer"}, {None})
    assert "missing: process 1: did not connect for copies within 1 s" in outputs[0]


@few(1)
@pytest.mark.parametrize("what", ["leaves", "leaves without a word"])
@PLATFORMS
def test_a_process_that_leaves_ends_nobody(platform, what):
    """The next step of the other one says who has left."""
    here, there = met(platform, what)
    assert "over peer" in here and "over peer" in there
    said = re.search(r"still there\nafter (\d+) s: .*process 1 \(pid \d+\) has died", here)
    assert said and int(said[1]) < 60, here[-3000:]
