"""Copies between processes: the bits of one process, and what happens if one of them dies."""

import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from support.free_port import free_port
from support.paths import TESTS, environment

SCRIPT = TESTS / "support" / "peer_processes.py"
STRATEGIES = ["optim", "optim_grads_params", "replicas"]


def skip_if_forbidden(said):
    """Devices that are CPUs write the memory of other processes by the kernel."""
    if "does not let process" in said:
        pytest.skip("the system forbids it: needs kernel.yama.ptrace_scope=0, or root")


def start(
    count,
    folder,
    steps,
    communication="peer",
    strategy="optim",
    platform="cpu",
    devices=4,
    limit=300,
):
    """Starts processes; returns them and the files with what they print."""
    port = free_port()
    running, outputs = [], [pathlib.Path(f"{folder}.{i}.txt") for i in range(count)]
    env = environment(
        JAX_PLATFORMS="cpu" if platform == "cpu" else "cuda,cpu",
        XLA_PYTHON_CLIENT_PREALLOCATE="false",
        JDISTADAM_WAIT_LIMIT_SECONDS=str(limit),
    )
    for i, output in enumerate(outputs):
        arguments = (platform, i, count, devices, port, folder, steps, communication, strategy)
        with output.open("w") as file:
            running.append(
                subprocess.Popen(
                    [sys.executable, "-P", SCRIPT, *map(str, arguments)],
                    env=env,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            )
    return running, outputs


def trained(count, folder, steps=6, **options):
    """The final parameters."""
    running, outputs = start(count, folder, steps, **options)
    codes = [process.wait(300) for process in running]
    for code, output in zip(codes, outputs, strict=True):
        said = output.read_text()
        skip_if_forbidden(said)
        assert code == 0, said[-3000:]
    expected = options.get("communication", "peer")
    assert all(f"over {expected}" in output.read_text() for output in outputs)
    return dict(np.load(f"{folder}.npz"))


def assert_same(one, other):
    assert one.keys() == other.keys() and len(one) == 3
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])


def check_processes(tmp_path, platform, strategy, devices=4):
    """Two processes, and one for each device."""
    options = dict(platform=platform, strategy=strategy, devices=devices)
    one = trained(1, tmp_path / "one", **options)
    for count in {2, devices}:
        assert_same(trained(count, tmp_path / f"{count}", **options), one)


@pytest.mark.parametrize(
    "strategy", [STRATEGIES[0], *(pytest.param(x, marks=pytest.mark.slow) for x in STRATEGIES[1:])]
)
def test_processes_that_copy_give_the_bits_of_one(tmp_path, strategy):
    check_processes(tmp_path, "cpu", strategy)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_eight_processes_that_copy_give_the_bits_of_one(tmp_path, strategy):
    check_processes(tmp_path, "cpu", strategy, devices=8)


def even_number_of_gpus(least=2):
    """All GPUs but one if their number is odd."""
    devices = len(jax.devices("gpu")) // 2 * 2
    if devices < least:
        pytest.skip(f"needs {least} GPUs")
    return devices


@pytest.mark.multigpu
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_processes_that_copy_between_gpus_give_the_bits_of_one(tmp_path, strategy):
    least = 4 if strategy == "replicas" else 2
    check_processes(tmp_path, "gpu", strategy, even_number_of_gpus(least))


def wait_for_step(step, running, outputs, index):
    """Returns once a process has ended a step."""
    limit = time.monotonic() + 120
    while f"step {step}\n" not in outputs[index].read_text():
        if running[index].poll() is not None:
            codes = [process.wait(60) for process in running]
            skip_if_forbidden(outputs[index].read_text())
            raise AssertionError((codes, outputs[index].read_text()[-3000:]))
        assert time.monotonic() < limit
        time.sleep(0.01)


def check_kill(tmp_path, seed, count=2, platform="cpu", devices=4):
    """Kills one process at a random moment; the others end, and the next start resumes."""
    options = dict(platform=platform, devices=devices)
    rng, folder = random.Random(seed), tmp_path / "killed"
    running, outputs = start(count, folder, 10**6, **options)
    victim = rng.randrange(count)
    wait_for_step(rng.randrange(3, 12), running, outputs, victim)
    time.sleep(rng.random() / 5)
    os.kill(running[victim].pid, signal.SIGKILL)
    killed = time.monotonic()
    for i, process in enumerate(running):
        code = process.wait(60)
        said = outputs[i].read_text()
        assert code == -signal.SIGKILL if i == victim else code != 0, said[-3000:]
        if i != victim:  # JAX's own services may end a process before
            died = f"process {victim} (pid {running[victim].pid}) has died"
            assert died in said or "Gloo All" in said or "oordination" in said, said[-3000:]
    assert time.monotonic() - killed < 60
    saved = sorted(int(x.name) for x in folder.iterdir() if x.name.isdigit())
    steps = (saved[-1] if saved else 0) + 3
    resumed = trained(count, folder, steps, **options)
    assert_same(resumed, trained(1, tmp_path / "whole", steps, **options))


@pytest.mark.slow
def test_a_process_that_dies_ends_the_others(tmp_path):
    check_kill(tmp_path, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_processes_end_wherever_one_dies(tmp_path, seed):
    check_kill(tmp_path, seed, count=4)


@pytest.mark.multigpu
@pytest.mark.parametrize("seed", range(2))
def test_processes_with_gpus_end_wherever_one_dies(tmp_path, seed):
    devices = even_number_of_gpus()
    check_kill(tmp_path, seed, (devices, 2)[seed], platform="gpu", devices=devices)


def check_stop(tmp_path, platform="cpu", devices=4):
    """Stops one of two processes for ever: the other one ends, and says for whom it waited.

    It waits for copies as long as the limit says; if it comes to a collective of XLA first, until
    JAX's heartbeat, or XLA's own limit, ends it.
    """
    limit, most = 10, 120
    options = dict(platform=platform, devices=devices, limit=limit)
    running, outputs = start(2, tmp_path / "stopped", 10**6, **options)
    wait_for_step(5, running, outputs, 1)
    os.kill(running[1].pid, signal.SIGSTOP)
    try:
        stopped = time.monotonic()
        code, said = running[0].wait(most), outputs[0].read_text()
        assert code != 0
        missed = re.search(rf"not come within {limit} s: places? .*\(process 1\b", said)
        assert missed or "Gloo All" in said or "oordination" in said, said[-3000:]
        why = missed[0] if missed else "JAX ended it"
        print(f"ended {time.monotonic() - stopped:.0f} s after the other one stopped: {why}")
    finally:
        for process in running:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_a_process_that_stops_ends_the_other(tmp_path):
    check_stop(tmp_path)


@pytest.mark.multigpu
def test_a_process_that_stops_ends_the_other_with_gpus(tmp_path):
    check_stop(tmp_path, "gpu", even_number_of_gpus())


def test_a_failure_is_told_to_other_processes():
    port = free_port()
    running = [
        subprocess.Popen(
            [sys.executable, "-P", TESTS / "support" / "peers_that_differ.py", str(i), str(port)],
            env=environment(JAX_PLATFORMS="cpu"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    ]
    outputs = [process.communicate(timeout=100)[0] for process in running]
    for output in outputs:
        skip_if_forbidden(output)
        said = re.search(r"after (\d+) s: .*did not come within 5 s: place \d \(process \d", output)
        assert said and int(said[1]) < 30, output[-3000:]
