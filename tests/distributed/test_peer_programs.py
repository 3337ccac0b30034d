"""Whole programs with steps over peer memory: they end, with the bits of XLA's collectives."""

import os
import subprocess
import sys

import pytest

from support.paths import TESTS

SCRIPT = TESTS / "support" / "peer_programs.py"
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("python_loop", "donation", "nan")]


@pytest.mark.parametrize("program", ["two_steps", "beside_a_sum", "scan", *SLOW])
def test_it_ends_with_the_bits_of_xla(tmp_path, program):
    """In a process of its own: one that hangs says where, and fails."""
    done = subprocess.run(
        [sys.executable, "-P", str(SCRIPT), program], capture_output=True, text=True, timeout=150,
        cwd=tmp_path, env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0 and "SUCCESS" in done.stdout, done.stdout + done.stderr[-3000:]
