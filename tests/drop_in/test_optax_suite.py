"""optax's own tests pass with jdistadam's Adam and AdamW in place of optax's."""

import os
import pathlib
import re
import subprocess
import sys

import optax
import pytest

from support.paths import environment
from support.samples import often

FOLDER = pathlib.Path(optax.__file__).parent
FILES = (
    "_src/alias_test.py",
    "_src/float64_test.py",
    "_src/sharding_test.py",
    "_src/transform_test.py",
    "contrib/_common_test.py",
    "contrib/_sam_test.py",
    "contrib/_schedule_free_test.py",
    "schedules/_inject_test.py",
    "transforms/_accumulation_test.py",
    "transforms/_combining_test.py",
    "tree_utils/_state_utils_test.py",
)


LONG = "test_multi_steps_mixed_precision"  # two tests as long as all the others together
# Hyperparameters that optax rounds to bfloat16 raise: docs/drop_in.md.
DIFFERENT = "hyperparam_default_dtype or bf16hyp"
OTHERS = f"not ({LONG} or {DIFFERENT})"
COUNTS = {  # arguments of pytest, tests at least, and how many of each optimizer they make
    "one of each": (("--one-of-each", "-k", OTHERS), 16, 6),
    "most": (("-k", OTHERS), 108, 40),
    "long": (("-k", LONG), 2, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("which", COUNTS)
@often(lambda which: which == "one of each")
def test_optax_own_tests_pass_with_ours(tmp_path, which):
    """In a process of its own: some of its tests change the configuration of JAX."""
    arguments, num_tests, num_made = COUNTS[which]
    files = [x for x in FILES if which != "one of each" or not x.startswith("contrib")]
    flags = os.environ.get("XLA_FLAGS", "").split()
    on_one_device = " ".join(x for x in flags if "device_count" not in x)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-p", "support.optax_with_ours", "--import-mode=importlib",
         "-p", "no:cacheprovider", "-rp", *arguments, *(str(FOLDER / name) for name in files)],
        capture_output=True, text=True, timeout=600, cwd=tmp_path,
        env=environment(XLA_FLAGS=on_one_device, JAX_PLATFORMS="cpu"),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
    made = dict(re.findall(r"'(adamw?|scale_by_adam)': (\d+)", done.stdout))
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= num_tests
    of_each = sorted(map(int, made.values()))
    assert (sum(of_each) if which == "long" else of_each[0]) >= num_made, done.stdout[-500:]
    if which != "long":
        assert [name for name in files if f"/{name}::" not in done.stdout] == []
