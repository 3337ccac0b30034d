"""Whole programs with steps over peer memory: they end, with the bits of XLA's collectives."""

import os
import subprocess
import sys

import pytest

from support.free_port import free_port
from support.paths import TESTS, environment
from support.samples import few

SCRIPT = TESTS / "support" / "peer_programs.py"
NAMES = ("two_steps", "beside_a_sum", "scan", "python_loop", "donation", "nan")


def failure_of(folder, *arguments):
    """Runs programs in a process of its own; returns what it printed unless it succeeded.

    One that hangs says where, and fails.
    """
    done = subprocess.run(
        [sys.executable, "-P", str(SCRIPT), *arguments], capture_output=True, text=True, timeout=150,
        cwd=folder, env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    succeeded = done.returncode == 0 and "SUCCESS" in done.stdout
    return None if succeeded else done.stdout + done.stderr[-3000:] or f"exit {done.returncode}"


@pytest.mark.slow
def test_peer_programs_end_with_the_bits_of_xla(tmp_path):
    assert failure_of(tmp_path, "few", *NAMES[:3]) is None


@pytest.mark.slow
@pytest.mark.parametrize("program", NAMES)
def test_many_steps_end_with_the_bits_of_xla(tmp_path, program):
    assert failure_of(tmp_path, "many", program) is None


@few(1)
@pytest.mark.parametrize(
    ("processes", "steps"),
    [(1, 20), (2, 20), *(pytest.param(n, 700, marks=pytest.mark.slow) for n in (1, 2, 4))],
)
def test_random_programs_have_the_values_of_numpy_and_xla(processes, steps):
    """Calls that do not need each other, which devices make in different orders."""
    port, seed = free_port(), steps + processes
    script = TESTS / "support" / "random_copies.py"
    running = [
        subprocess.Popen(
            [sys.executable, "-P", script, *map(str, (i, processes, port, seed, steps))],
            env=environment(JAX_PLATFORMS="cpu"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(processes)
    ]
    for output in [process.communicate(timeout=1200)[0] for process in running]:
        if "a system that does not let process" in output:
            pytest.skip("processes may not read each other's memory here")
        assert output.endswith("SUCCESS\n"), output[-3000:]
