"""python -m jdistadam info, check, bench, plan and audit."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from jdistadam import __main__, bench, diagnostics, native


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


def test_bench_measures_every_variant(monkeypatch, capsys):
    """On a tree small enough for a test; the figures mean nothing, their relations must hold."""
    monkeypatch.setitem(bench.TREES, "small", {"w": (300, 70), "b": (70,)})
    monkeypatch.setattr(bench, "copy_bandwidth", lambda *args: 1e9)
    assert __main__.main(["bench", "--trees", "small", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    rows = {row["variant"]: row for row in report["rows"]}
    assert set(rows) == {"float32", "bf16, float32 main", "bf16, remainder16", "optax.adamw"}
    for name, row in rows.items():
        nbytes = bench.VARIANTS[name].bytes_per_parameter * (300 * 70 + 70)
        assert row["parameters"] == 300 * 70 + 70 and row["leaves"] == 2
        share = nbytes / (row["wall_microseconds"] * 1e-6) / 1e9
        np.testing.assert_allclose(row["wall_share_of_copy"], share, rtol=1e-12)
    for name in ("float32", "optax.adamw"):
        assert rows[name]["host_microseconds"] > 0 and rows[name]["compile_seconds"] > 0


@pytest.mark.parametrize(("leaf", "factor"), [("b", 1 + 1e-5), ("w", np.nan)])
def test_bench_compares_with_optax_before_it_times(monkeypatch, leaf, factor):
    monkeypatch.setitem(bench.TREES, "small", {"w": (300, 70), "b": (70,)})
    assert set(bench.measure_hosts("small", ("float32", "optax.adamw"), 1)) == {
        "float32",
        "optax.adamw",
    }
    init, step = bench.VARIANTS["float32"].make()

    def wrong(grads, state, params):
        new, state = step(grads, state, params)
        return new | {leaf: new[leaf] * factor}, state

    variant = bench.VARIANTS["float32"]._replace(make=lambda: (init, wrong))
    monkeypatch.setitem(bench.VARIANTS, "float32", variant)
    with pytest.raises(
        AssertionError, match=f"small: steps of ours and of optax differ in {leaf}$"
    ):
        bench.measure_hosts("small", ("float32", "optax.adamw"), 1)


def test_bench_lists_its_trees_and_refuses_others(capsys):
    assert __main__.main(["bench", "--list"]) == 0
    out = capsys.readouterr().out
    assert "gpt2s" in out and "124,474,368 parameters" in out and "1000 leaves" in out
    assert __main__.main(["bench", "--trees", "gpt3"]) == 2
    assert "unknown tree 'gpt3'" in capsys.readouterr().out


def run_cli(tmp_path, *args):
    """In a process of its own, since `plan` decides how many devices JAX has."""
    shapes = {"w": [1024, 64], "b": [64]}
    (tmp_path / "shapes.json").write_text(json.dumps(shapes))
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    }
    command = [sys.executable, "-m", "jdistadam", *args, "--tree", str(tmp_path / "shapes.json")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=env
    )
    return done.returncode, done.stdout, done.stderr


def test_plan_prints_bytes_of_devices_that_do_not_exist(tmp_path):
    options = (
        "--devices",
        "64",
        "--replicas",
        "2",
        "--grad-comm-dtype",
        "bfloat16",
        "--sharding-strategy",
        "optim_grads",
        "--accumulate-steps",
        "3",
    )
    code, out, err = run_cli(tmp_path, "plan", *options)
    assert code == 0, err
    lines = {
        line.rsplit(None, 3)[0]: line.split()[-1] for line in out.splitlines() if " held " in line
    }
    assert float(lines["params"]) == round(2 * 65_600 / 1e6, 2)
    rows = [line.split() for line in out.splitlines()]
    assert ["reduce-scatter", "bfloat16", "data", "32", "3"] in [row[:5] for row in rows]


@pytest.mark.parametrize(("dtype", "code"), [("float32", 0), ("bfloat16", 1)])
def test_audit_compiles_for_the_devices_here(tmp_path, dtype, code):
    """XLA widens 16-bit collectives on CPU devices: that program is not as planned."""
    done, out, err = run_cli(tmp_path, "audit", "--param-dtype", dtype, "--grad-comm-dtype", dtype)
    assert done == code, err
    assert ("NOT as planned" in out) == bool(code) and "reduce-scatter" in out


def test_plan_says_what_is_wrong(tmp_path):
    code, _, err = run_cli(tmp_path, "plan", "--sharding-strategy", "optin")
    assert code == 2 and "sharding_strategy" in err and "optim" in err and "Traceback" not in err
    assert run_cli(tmp_path, "plan", "--replicas", "3")[0] == 1


@pytest.mark.parametrize("variant", sorted(bench.VARIANTS))
def test_every_bench_variant_steps(variant):
    how = bench.VARIANTS[variant]
    shapes = {"w": (30, 7), "b": (7,)}
    init, step = how.make()
    params = bench.make_tree(shapes, 0.1, how.param_dtype)
    grads = bench.make_tree(shapes, 0.01, how.grad_dtype)
    args = params, jax.jit(init)(params), grads
    with jax.default_device(jax.devices("cpu")[0]):
        new = bench.looped(step, 3)(*jax.tree.map(jax.numpy.copy, args))[0]
    assert not np.array_equal(new["w"], params["w"]) and np.isfinite(np.float32(new["w"])).all()
