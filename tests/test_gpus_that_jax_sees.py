"""Tests for GPUs are skipped where jax sees none, or too few, whatever the machine has."""

import os
import re
import subprocess
import sys

import jax
import pytest

from support import gpus
from support.paths import ROOT, TESTS


def skipped_with(monkeypatch, count, *markers):
    """Why a test is skipped where jax sees so many GPUs."""

    def devices(platform):
        if not count:
            raise RuntimeError(f"Unknown backend: {platform!r} requested")
        return [object()] * count

    monkeypatch.setattr(jax, "devices", devices)
    gpus.count_gpus.cache_clear()
    why = gpus.why_skipped(markers)
    gpus.count_gpus.cache_clear()
    return why


@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize("marker", ["gpu", "multigpu"])
def test_a_test_without_its_gpus_is_skipped(monkeypatch, marker, count):
    why = skipped_with(monkeypatch, count, "slow", marker)
    assert bool(why) == (count < {"gpu": 1, "multigpu": 2}[marker])
    if why:
        allowed = re.search(r"grep -v '(.*)'; then", (ROOT / ".ci" / "common").read_text())[1]
        assert re.search(allowed.replace(r"\|", "|"), f"SKIPPED [1] tests/conftest.py:9: {why}")
        assert why.endswith(f"jax sees {count or 'none'}")


def test_no_other_test_has_jax_look_for_gpus(monkeypatch):
    asked = []
    monkeypatch.setattr(jax, "devices", asked.append)
    assert gpus.why_skipped({"slow", "h200"}) == ""
    assert not asked


@pytest.mark.gpu
def test_this_runs_on_a_gpu():
    assert jax.devices("gpu")


WITH_A_DEVICE = """
import glob, sys, pytest
found = glob.glob
glob.glob = lambda pattern: ["/dev/nvidia0"] if "nvidia" in pattern else found(pattern)
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", sys.argv[1]]))
"""


def test_a_machine_with_a_gpu_and_jax_for_cpus():
    """README's test command there: what jax sees counts, and not the files in /dev."""
    one = f"{TESTS / 'test_gpus_that_jax_sees.py'}::{test_this_runs_on_a_gpu.__name__}"
    done = subprocess.run(
        [sys.executable, "-c", WITH_A_DEVICE, one],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "needs an NVIDIA GPU; jax sees none" in done.stdout
