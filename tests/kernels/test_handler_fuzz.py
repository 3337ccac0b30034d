"""Nothing that reaches the FFI handlers may end the process: it is called in one of its own."""

import os
import subprocess
import sys

import pytest

from support.paths import TESTS

SCRIPT = TESTS / "support" / "fuzz_handler.py"


@pytest.mark.slow
def test_any_call_succeeds_or_raises(tmp_path):
    """Wrong counts, dtypes, dimensions, sizes, offsets, attributes, missing ones, broken aliases."""
    done = subprocess.run(
        [sys.executable, "-P", str(SCRIPT), "400", "20"], capture_output=True, text=True, timeout=600, cwd=tmp_path,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, (
        f"exit code {done.returncode}\n{done.stdout}\n{done.stderr[-3000:]}"
    )
    assert "succeeded" in done.stdout
