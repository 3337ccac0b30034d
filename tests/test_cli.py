"""python -m jdistadam info and check."""

import json
import subprocess
import sys

import numpy as np
import pytest

from jdistadam import __main__, diagnostics, native


def test_info_as_json_in_a_process_of_its_own():
    done = subprocess.run(
        [sys.executable, "-m", "jdistadam", "info", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd="/",
    )
    report = json.loads(done.stdout)
    assert done.returncode == 0
    assert report["backends"]["cpu"]["available"] is True
    assert report["packages"]["jax"][0].isdigit() and report["packages"]["jdistadam"][0].isdigit()
    assert report["runs"].startswith("compiled")


def test_info_says_why_a_backend_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(
        native, "status", lambda name: native.Status(False, f"no compiler for {name}")
    )
    assert __main__.main(["info"]) == 0
    out = capsys.readouterr().out
    assert "[--] cuda  no compiler for cuda" in out and "fallback on" in out


def test_info_never_raises(monkeypatch, capsys):
    def broken(*args):
        raise RuntimeError("driver\nhas gone")

    for name in ("_devices", "_driver", "_backends", "_what_runs"):
        monkeypatch.setattr(diagnostics, name, broken)
    monkeypatch.setattr(diagnostics.importlib.metadata, "version", lambda name: "1")
    assert __main__.main(["info"]) == 0
    assert "unknown: RuntimeError: driver" in capsys.readouterr().out


def test_check_passes_and_says_what_it_compared(capsys):
    assert __main__.main(["check"]) == 0
    out = capsys.readouterr().out
    assert (
        "[OK]" in out and "values equal the oracle bit for bit" in out and out.endswith("SUCCESS\n")
    )


def test_check_fails_on_a_wrong_bit(monkeypatch, capsys):
    from jdistadam import reference

    original = reference.adam_leaf

    def wrong(*args, **kwargs):
        result = original(*args, **kwargs)
        return result._replace(
            mu=np.nextafter(result.mu.astype(np.float32), np.float32(9)).astype(result.mu.dtype)
        )

    monkeypatch.setattr(reference, "adam_leaf", wrong)
    assert __main__.main(["check"]) == 1
    out = capsys.readouterr().out
    assert "[FAIL]" in out and "differ in bits" in out and out.endswith("FAILED\n")


def test_check_fails_without_cpu_kernels(monkeypatch, capsys):
    monkeypatch.setattr(native, "status", lambda name: native.Status(False, "not built"))
    assert __main__.main(["check"]) == 1
    assert "[--]   cuda  not built" in capsys.readouterr().out


@pytest.mark.gpu
def test_check_covers_the_gpu(capsys):
    assert __main__.main(["check"]) == 0
    assert "[OK]   cuda" in capsys.readouterr().out


def test_unknown_command_exits_with_usage():
    with pytest.raises(SystemExit, match="2"):
        __main__.main(["nonsense"])
