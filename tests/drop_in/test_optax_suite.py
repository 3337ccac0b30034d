"""optax's own tests pass with jdistadam's Adam and AdamW in place of optax's."""

import pathlib
import re
import subprocess
import sys

import optax
import pytest

from support.paths import environment

FOLDER = pathlib.Path(optax.__file__).parent
FILES = (
    "_src/alias_test.py",
    "_src/float64_test.py",
    "_src/sharding_test.py",
    "contrib/_common_test.py",
    "contrib/_sam_test.py",
    "contrib/_schedule_free_test.py",
    "transforms/_accumulation_test.py",
    "transforms/_combining_test.py",
    "tree_utils/_state_utils_test.py",
)


LONG = "test_multi_steps_mixed_precision"  # two tests as long as all the others together


@pytest.mark.parametrize(
    "which", [f"not {LONG}", pytest.param(LONG, marks=pytest.mark.slow)], ids=["most", "long"]
)
def test_optax_own_tests_pass_with_ours(tmp_path, which):
    """In a process of its own: some of its tests change the configuration of JAX."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-p", "support.optax_with_ours", "--import-mode=importlib",
         "-p", "no:cacheprovider", "-rp", "-k", which, *(str(FOLDER / name) for name in FILES)],
        capture_output=True, text=True, timeout=600, cwd=tmp_path,
        env=environment(XLA_FLAGS="", JAX_PLATFORMS="cpu"),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
    made = dict(re.findall(r"'(adamw?)': (\d+)", done.stdout))
    passed = int(re.search(r"(\d+) passed", done.stdout)[1])
    if which == LONG:
        assert passed == 2 and int(made["adam"]) + int(made["adamw"]) >= 2, done.stdout[-500:]
    else:
        assert int(made["adam"]) >= 40 and int(made["adamw"]) >= 40, done.stdout[-500:]
        assert passed >= 108
        without = [name for name in FILES if f"/{name}::" not in done.stdout]
        assert without == ["transforms/_accumulation_test.py"]  # its tests are the long ones
