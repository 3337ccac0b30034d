"""README's examples run as they stand, each in a program of its own, and train."""

import os
import re
import subprocess
import sys

import pytest

from support.paths import ROOT

README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.S)


@pytest.mark.parametrize("index", range(len(EXAMPLES)))
def test_example_runs_and_learns(tmp_path, index):
    """On 8 devices. Each prints what falls as it trains, first on its line."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-P", "-c", EXAMPLES[index]], capture_output=True, text=True, timeout=300,
        cwd=tmp_path, env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    values = [float(line.split()[0]) for line in done.stdout.splitlines()]
    assert len(values) == 20 and values[-1] < 0.9 * values[0], values


def test_there_are_six_examples():
    assert len(EXAMPLES) == 6
    for name in ("optax.chain(", "tx.step(", "jda.train_step(", "jax.shard_map(", "param_specs="):
        assert any(name in example for example in EXAMPLES)
