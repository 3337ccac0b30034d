"""The command jdistadam: info, check, bench, plan and audit."""

import json
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
import types

import jax
import numpy as np
import pytest

import jdistadam
from jdistadam import __main__
from jdistadam.kernels import native
from jdistadam.tools import audit, bench, command_line, diagnostics
from jdistadam.training import planned
from support.paths import ROOT
from support.samples import few


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


@pytest.mark.parametrize(
    "held, capability, code",
    [
        ("sm_75 sm_80 sm_86 compute_86", "7.5", "sm_75"),
        ("sm_75 sm_80 sm_86 compute_86", "8.6", "sm_86"),
        ("sm_75 sm_80 sm_86 compute_86", "8.9", "sm_86"),
        ("sm_75 sm_80 sm_86 compute_86", "8.0", "sm_80"),
        ("sm_75 sm_80 sm_86 compute_86", "10.0", "compute_86"),
        ("sm_90 sm_100 sm_120 compute_120", "11.0", None),
        ("sm_90 sm_100 sm_120 compute_120", "12.1", "sm_120"),
        ("sm_90", "8.0", None),
        ("sm_90", "10.0", None),
        ("compute_90", "9.0", "compute_90"),
    ],
)
def test_info_names_the_code_that_a_gpu_runs(monkeypatch, capsys, held, capability, code):
    """As CUDA's guide has it: machine code within a major number, PTX for all that is newer."""
    assert native.code_that_runs(f"nvcc 13.0.88, {held}", capability) == code
    gpu = types.SimpleNamespace(
        platform="gpu", id=0, device_kind="GPU X", compute_capability=capability
    )
    monkeypatch.setattr(jax, "devices", lambda: [gpu])
    monkeypatch.setattr(native, "status", lambda name: native.Status(True, f"nvcc 1.2, {held}"))
    monkeypatch.setattr(native, "default_platform", lambda: "cuda")
    text = diagnostics.format_info(diagnostics.info())
    if code:
        assert f"code      GPU X: {code}\n" in text and "runs      compiled cuda kernels\n" in text
    else:
        assert f"code      GPU X: no code for compute capability {capability}. Reinst" in text
        assert "runs      no kernel on GPU X: see code\n" in text


def test_info_never_raises(monkeypatch, capsys):
    def broken(*args):
        raise RuntimeError("driver\nhas gone")

    for name in ("_devices", "_driver", "_backends", "_code", "_what_runs"):
        monkeypatch.setattr(diagnostics, name, broken)
    monkeypatch.setattr(diagnostics.importlib.metadata, "version", lambda name: "1")
    assert __main__.main(["info"]) == 0
    assert "unknown: RuntimeError: driver" in capsys.readouterr().out


def test_check_passes_and_says_what_it_compared(capsys):
    assert __main__.main(["check"]) == 0
    out = capsys.readouterr().out
    assert (
        "[OK]" in out
        and "values equal the reference bit for bit" in out
        and out.endswith("SUCCESS\n")
    )


def test_check_fails_on_a_wrong_bit(monkeypatch, capsys):
    from jdistadam.kernels import reference

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


def test_check_fails_where_nothing_is_checked(monkeypatch, capsys):
    def no_device(name):
        raise RuntimeError("no such platform")

    monkeypatch.setattr(jax, "devices", no_device)
    assert __main__.main(["check"]) == 1
    assert capsys.readouterr().out.endswith("FAILED: nothing was checked\n")


@pytest.mark.gpu
def test_check_covers_the_gpu(capsys):
    assert __main__.main(["check"]) == 0
    assert "[OK]   cuda" in capsys.readouterr().out


def error_of(capsys, *argv):
    """The one line that arguments end with; nothing else may be printed."""
    with pytest.raises(SystemExit) as end:
        __main__.main(argv)
    out, err = capsys.readouterr()
    assert end.value.code == 2 and out == "" and err.count("\n") == 1
    return err


def test_unknown_commands_and_options_raise(capsys):
    assert error_of(capsys, "nonsense").startswith("jdistadam: error: ")
    assert "COMMAND" in error_of(capsys)
    err = error_of(capsys, "plan", "--device", "4", "--nonsense")  # options may be abbreviated
    assert err.startswith(
        "jdistadam plan: error: unrecognized arguments: --nonsense; see jdistadam plan"
    )


def test_version_option_prints_the_version(capsys):
    with pytest.raises(SystemExit) as end:
        __main__.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"jdistadam {jdistadam.__version__}\n"


def test_the_package_declares_its_command_and_its_types():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["scikit-build"]["wheel"]["packages"] == ["jdistadam"]
    assert pkgutil.resolve_name(project["project"]["scripts"]["jdistadam"]) is __main__.main
    assert (ROOT / "jdistadam" / "py.typed").is_file()


@pytest.mark.parametrize("command", ["info", "bench", "plan", "audit"])
def test_help_says_what_each_option_is_and_its_default(capsys, command):
    with pytest.raises(SystemExit) as end:
        __main__.main([command, "--help"])
    _, options = capsys.readouterr().out.split("\n  -h, --help ")
    names = re.findall(r"^  --([\w-]+)", options, re.M)
    assert end.value.code == 0 and names
    text = " ".join(options.split())
    with_value = re.findall(r"^  --([\w-]+) [A-Z{]", options, re.M)  # others are switches
    assert text.count("(default: ") == len(with_value)
    if command == "bench":
        assert f"--trees TREE [TREE ...] trees to update: {', '.join(bench.TREES)} (def" in text
    if command == "plan":
        assert "{no_shard,optim,optim_grads,optim_grads_params}" in text
        assert "bfloat16, float16 (default: bfloat16) --replicas" in text
        assert "JSON file {path: shape} (default: gpt2s)" in text
        assert "none: it updates the model's; one of float32, remainder16, none (def" in text


@pytest.mark.slow
def test_bench_measures_every_variant(monkeypatch, capsys):
    """On a tree small enough for a test; the figures mean nothing, their relations must hold."""
    monkeypatch.setitem(bench.TREES, "small", {"w": (300, 70), "b": (70,)})
    monkeypatch.setattr(bench, "copy_bandwidth", lambda *args: 1e9)
    assert __main__.main(["bench", "--trees", "small", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    rows = {row["variant"]: row for row in report["rows"]}
    assert set(rows) == {"float32", "bf16, float32 main", "bf16, remainder16", "optax.adamw"}
    for row in rows.values():
        assert row["parameters"] == 300 * 70 + 70 and row["leaves"] == 2
        assert row["wall_microseconds"] > 0 and row["wall_share_of_copy"] is None  # on a CPU
    found = bench.measure("small", "float32", 1e9)
    share = 28 * (300 * 70 + 70) / (found.wall_microseconds * 1e-6) / 1e9
    np.testing.assert_allclose(found.wall_share_of_copy, share, rtol=1e-12)
    for name in ("float32", "optax.adamw"):
        assert rows[name]["host_microseconds"] > 0 and rows[name]["compile_seconds"] > 0


def test_bench_on_a_cpu_takes_a_small_tree_and_prints_no_share_of_a_copy(monkeypatch, capsys):
    """It took minutes, and printed 136.6 %: a copy there is no bound of a step."""
    seen = []
    measured = bench.Measured("flat4M", 1, 1 << 22, "float32", 2.0, 1.366, host_microseconds=3.0)
    monkeypatch.setattr(bench, "copy_bandwidth", lambda *args: 1e9)
    monkeypatch.setattr(bench, "measure_hosts", lambda tree, variants: seen.append(tree) or {})
    monkeypatch.setattr(bench, "measure", lambda tree, variant, copy: measured)
    assert __main__.main(["bench"]) == 0
    out = capsys.readouterr().out
    assert seen == ["flat4M"] and "%" not in out and "136" not in out
    assert out.splitlines()[-1].split() == ["flat4M", "float32", "2", "-", "-", "-", "3", "-"]
    assert __main__.main(["bench", "--trees", "gpt2s"]) == 0 and seen[-1] == "gpt2s"


@pytest.mark.slow
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


def test_bench_lists_its_trees_and_raises_for_others(capsys):
    assert __main__.main(["bench", "--list"]) == 0
    out = capsys.readouterr().out
    assert "gpt2s" in out and "124,474,368 parameters" in out and "1000 leaves" in out
    assert __main__.main(["bench", "--list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["gpt2s"]["parameters"] == 124_474_368 and listed["many1000x4k"]["leaves"] == 1000
    err = error_of(capsys, "bench", "--trees", "gpt2s", "gpt3")
    assert "argument --trees: invalid choice: 'gpt3'" in err and "resnet50" in err


def run_cli(tmp_path, *args, devices=4, platforms="cpu"):
    """In a process of its own, with as many devices as the test wants."""
    shapes = {"w": [1024, 64], "b": [64]}
    (tmp_path / "shapes.json").write_text(json.dumps(shapes))
    env = os.environ | {
        "JAX_PLATFORMS": platforms,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    command = [sys.executable, "-m", "jdistadam", *args, "--tree", str(tmp_path / "shapes.json")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=env
    )
    return done.returncode, done.stdout, done.stderr


def test_plan_prints_bytes_of_devices_that_do_not_exist(tmp_path):
    """It starts no backend of JAX: one that does not exist is no obstacle."""
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
    code, out, err = run_cli(tmp_path, "plan", *options, platforms="nonsense")
    assert code == 0, err
    assert ["params", "held", f"{2 * 65_600 / 1e6:.2f}", "MB"] in map(str.split, out.splitlines())
    rows = [line.split() for line in out.splitlines()]
    assert ["reduce-scatter", "bfloat16", "data", "32", "3"] in [row[:5] for row in rows]


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(bench.TREES, "small", {"w": (300, 70), "b": (70,)})
    return "--tree", "small"


def test_plan_begins_with_what_was_planned(small, tmp_path, capsys):
    options = ("--devices", "12", "--replicas", "3", "--accumulate-steps", "5")
    strategies = ("--sharding-strategy", "optim_grads_params", "--outer-sharding-strategy", "optim")
    strategies += ("--no-reshard-after-forward",)
    assert __main__.main(["plan", *small, *options, *strategies, "--param-dtype", "float16"]) == 0
    assert capsys.readouterr().out.splitlines()[:7] == [
        "tree                small, 2 leaves, 21,070 parameters",
        "param_dtype         float16",
        "devices             12, as 3 replicas of 4",
        "sharding_strategy   optim_grads_params, outer optim, not resharded",
        "accumulate_steps    5",
        "",
        "main_params_dtype   float32",
    ]
    (tmp_path / "one.json").write_text('{"w": []}')
    assert __main__.main(["plan", "--tree", str(tmp_path / "one.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("one.json, 1 leaf, 1 parameters")
    assert lines[2] == "devices             8"


def test_plan_prints_the_transport_and_why(small, capsys):
    assert __main__.main(["plan", *small, "--devices", "8"]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == "communication: xla (--grad-reduce-dtype none)"
    assert __main__.main(["plan", *small, "--devices", "8", "--replicas", "2"]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == "communication: xla (--grad-reduce-dtype none)"


def test_plan_takes_peer_memory_host_memory_and_a_model_axis(monkeypatch, capsys):
    """For GPUs, on any machine; and each device then holds what `jda.plan` says."""
    shapes = {"w": (512, 1024), "odd": (512, 7), "b": (1024,)}
    monkeypatch.setitem(bench.TREES, "small", shapes)
    command = ("plan", "--tree", "small", "--devices", "8", "--grad-reduce-dtype", "float32")
    assert __main__.main([*command]) == 0
    assert capsys.readouterr().out.endswith("--communication peer plans for GPUs)\n")
    assert __main__.main([*command, "--communication", "peer"]) == 0
    out = capsys.readouterr().out
    assert out.endswith("\ncommunication: peer\n") and "mailboxes" in out
    assert __main__.main([*command, "--state-memory", "pinned_host"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["mu", "on", "the", "host", f"{4 * (512 * 1031 + 1024) / 8 / 1e6:.2f}", "MB"] in rows
    assert __main__.main([*command, "--model-devices", "2"]) == 0
    out = capsys.readouterr().out
    assert "devices             8, 2 along the model\n" in out
    size = 2 * (512 * (512 + 7) + 1024)
    assert ["params", "held", f"{size / 1e6:.2f}", "MB"] in map(str.split, out.splitlines())
    err = error_of(capsys, *command, "--model-devices", "3")
    assert "argument --model-devices: 3 does not divide 8 devices" in err
    err = error_of(capsys, *command, "--model-devices", "2", "--communication", "peer")
    assert "got a mesh with axes data, model" in err


@pytest.mark.parametrize("command", ["plan", "audit"])
def test_output_without_replicas_names_no_replica_axis(small, capsys, command):
    assert __main__.main([command, *small]) == 0
    assert "replica" not in capsys.readouterr().out


def test_plan_sends_stacked_layers_one_by_one(monkeypatch, capsys):
    """What is sent of them is sent once for each layer of its scan."""
    shapes = {"encoder/layers/w": (6, 256, 512), "decoder/layers/w": (4, 256, 512)}
    monkeypatch.setitem(bench.TREES, "small", shapes | {"head": (512, 64)})
    options = ("--tree", "small", "--sharding-strategy", "optim_grads_params")
    found = []
    for more in ((), ("--layers", "layers")):
        assert __main__.main(["plan", *options, *more]) == 0
        out = capsys.readouterr().out
        rows = [line.split()[:5] for line in out.splitlines()]
        found.append([row[4] for row in rows if row[:1] == ["all-gather"]])
    assert [sorted(times) for times in found] == [["1"], ["1", "4", "6"]]
    assert "\nlayers              6, 4\n" in out
    err = error_of(capsys, "plan", *options, "--layers", "blocks")
    assert "TreeError: --layers: selects no leaf" in err and "or leave --layers out" in err


@pytest.mark.parametrize("shape", [(512,), ()])
def test_layers_that_are_not_stacked_raise(monkeypatch, capsys, shape):
    monkeypatch.setitem(bench.TREES, "small", {"layers/w": (6, 256, 512), "layers/b": shape})
    for command in ("plan", "audit"):
        err = error_of(capsys, command, "--tree", "small", "--layers", "layers")
        got = f"first dimensions 6, {'512' if shape else 'none'}, expected one"
        assert f"argument --layers: leaves in layers are not stacked: got {got}" in err


@pytest.mark.parametrize("communication", ["xla", "peer"])
def test_audit_gathers_stacked_layers_one_by_one(monkeypatch, capsys, communication):
    """In the forward and in the backward pass of each micro-batch, over either transport."""
    shapes = {"encoder/layers/w": (3, 64, 128), "decoder/layers/w": (2, 64, 128)}
    monkeypatch.setitem(bench.TREES, "small", shapes | {"head": (128, 256)})
    options = "--layers layers --sharding-strategy optim_grads_params --accumulate-steps 2"
    dtypes = "--param-dtype float32 --grad-reduce-dtype float32"
    command = ["audit", "--tree", "small", *options.split(), *dtypes.split()]
    assert __main__.main([*command, "--communication", communication]) == 0
    out = capsys.readouterr().out
    gathers = re.search(r"^(copied )?all-gather +float32 +\d+ +(\d+) +(\d+)", out, re.M)
    assert (gathers[1] is not None) == (communication == "peer")
    of_layers = 5 * 64 * 128
    assert int(gathers[2]) == int(gathers[3]) == 2 * 2 * of_layers + 128 * 256
    assert "\nas planned; " in out


def test_plan_as_json_has_the_printed_numbers_in_bytes(small, capsys):
    command = ("plan", *small, *"--devices 4 --accumulate-steps 2 --param-dtype float32".split())
    peer = ("--communication", "peer", "--grad-reduce-dtype", "float32")
    assert __main__.main([*command, *peer]) == 0
    printed = capsys.readouterr().out
    assert __main__.main([*command, *peer, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    rows = report["held"] | report["buffers"] | {"accumulated gradients": report["sums"]}
    for name, size in rows.items():
        assert re.search(rf"^{name} .* {planned.size_text(size)}$", printed, re.M)
    total = report["held_bytes"] + report["sums"] + report["buffer_bytes"]
    assert report["step_bytes"] == total == sum(rows.values())
    assert report["bytes_sent"] == sum(c["bytes_sent"] for c in report["collectives"]) > 0
    assert {c["transport"] for c in report["collectives"]} == {"peer"}
    assert report["communication"] == {"name": "peer", "why_not_peer": ""}
    assert __main__.main([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["communication"]["why_not_peer"] == "--grad-reduce-dtype none"


def test_audit_as_json_has_rows_and_the_verdict(small, capsys):
    assert __main__.main(["audit", *small, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["passed"], report["only_widened"], report["num_devices"]) == (False, True, 8)
    assert "order" not in report
    rows = {(row["op"], row["dtype"]): row for row in report["rows"]}
    gathered = rows["all-gather", "float32"]
    assert gathered["found"] == rows["all-gather", "bfloat16"]["planned"] > 300 * 70
    assert gathered["found_bytes"] == 4 * gathered["found"] and gathered["note"] == "WIDENED"


def test_plan_works_for_a_million_devices(small, capsys):
    assert __main__.main(["plan", *small, "--devices", "1000000", "--replicas", "10"]) == 0
    assert "1000000, as 10 replicas of 100000" in capsys.readouterr().out


def test_plan_raises_as_the_optimizer_does(small, capsys):
    message = error_of(capsys, "plan", *small, "--nu-dtype", "bfloat16")
    assert "cannot follow the gradients at this --b2: got" in message
    assert "and --b2 0.999" in message


@pytest.mark.filterwarnings("ignore:mu_dtype. a first moment in float16")
@pytest.mark.parametrize("field", sorted(command_line._POLICY))
def test_every_dtype_that_the_help_names_is_planned(small, capsys, field):
    choices, _ = command_line._POLICY[field]
    for choice in choices:
        options = (f"--{field.replace('_', '-')}", choice, "--param-dtype", "float32")
        if field in ("mu_dtype", "nu_dtype"):
            options += ("--b1", "0.8", "--b2", "0.88")
        assert __main__.main(["plan", *small, *options]) == 0
        value = re.search(rf"^{field} +(.*)", capsys.readouterr().out, re.M)[1]
        wanted = {
            "grad_comm_dtype": "float32",
            "grad_reduce_dtype": "float32, by the collective library",
            "param_comm_dtype": "params' own",
        }
        assert value == (wanted.get(field, "none") if choice == "none" else choice)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--devices 0", "argument --devices: got '0', expected a whole number from 1 to"),
        ("--devices -1", "argument --devices: got '-1'"),
        ("--devices 8.5", "argument --devices: got '8.5'"),
        ("--devices 1048577", "from 1 to 1048576"),
        (f"--devices {'9' * 5000}", "argument --devices: got '99"),
        ("--accumulate-steps 0", "argument --accumulate-steps: got '0'"),
        ("--replicas 0", "argument --replicas: got '0'"),
        ("--replicas 3 --devices 8", "argument --replicas: 3 does not divide 8 devices"),
        ("--replicas 16 --devices 8", "argument --replicas: 16 does not divide 8 devices"),
        ("--tree missing.json", "cannot read 'missing.json' (No such file or directory)"),
        ("--tree missing.json", "expected a JSON file or one of flat1B, "),
        ("--tree .", "cannot read '.' (Is a directory)"),
        ("--param-dtype int8", "argument --param-dtype: invalid choice: 'int8'"),
        ("--sharding-strategy optin", "argument --sharding-strategy: invalid choice: 'optin'"),
        ("--outer-sharding-strategy x", "argument --outer-sharding-strategy: invalid choice: 'x'"),
        ("--mu-dtype float8_e5m2", "argument --mu-dtype: invalid choice: 'float8_e5m2'"),
        ("--grad-comm-dtype nonsense", "argument --grad-comm-dtype: invalid choice: 'nonsense'"),
        ("--param-comm-dtype float32", "PolicyError: params['h0.down.b']: --param-comm-dtype is wider"),
        ("--main-grads-dtype bfloat16 --grad-comm-dtype float32", "PolicyError: --main-grads-dtype"),
        ("--main-grads-dtype bfloat16 --grad-comm-dtype float32", "Set --main-grads-dtype float32, or"),
        ("--sharding-strategy no_shard --outer-sharding-strategy optim", "PolicyError: "),
        ("--outer-sharding-strategy optim", "over --replicas too: got --sharding-strategy optim, --replicas none,"),
        ("--nu-dtype bfloat16", "and --b2 0.999, expected --rounding"),
        ("--rounding stochastic", "PolicyError: --rounding: has no effect"),
        ("--layers h", "argument --layers: leaves in h0 are not stacked: got first dimensions 768, 2304, 3072, expected one"),
        ("--layers params", "--layers: selects no leaf"),  # its paths do not begin with params
    ],
)  # fmt: skip
def test_plan_says_in_a_line_what_is_wrong(capsys, options, said):
    err = error_of(capsys, "plan", *options.split())
    assert err.startswith("jdistadam plan: error: ") and said in err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"w": [3', "is not JSON: "),
        ('{"w":\n\n\n[3}', "is not JSON: "),
        ("", "is not JSON: "),
        (b"\xff\xfe\x00", "is not JSON: "),
        ("[" * 100_000, "is not JSON: "),
        ('{"w": [3], "b": [3], "w": [3, 4]}', "the key 'w' is there twice"),
        ("[3, 4]", 'got [3, 4], expected an object like {"w": [1024, 64]}'),
        ("{}", "got {}, expected an object"),
        ("null", "got None, expected an object"),
        ('{"w": 3}', "shape of 'w': got 3, expected a list of whole numbers"),
        ('{"w": "3"}', "shape of 'w': got '3', expected"),
        (
            '{"w": {"b": [3]}}',
            """shape of 'w': got {'b': [3]}, expected one level, with the paths of leaves: {"w/b": [1024""",
        ),
        ('{"b": [1], "w": [3, -1]}', "shape of 'w': got [3, -1], expected"),
        ('{"w": [3.0]}', "got [3.0], expected"),
        ('{"w": [true]}', "got [True], expected"),
        ('{"w": [[3]]}', "got [[3]], expected"),
        ('{"w": [4294967296, 2147483648]}', "fewer than 2**63 elements"),
        ('{"w": [0, 9223372036854775808]}', "fewer than 2**63 elements"),
    ],
)
def test_malformed_tree_file_raises(tmp_path, capsys, content, said):
    path = tmp_path / "shapes.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    for command in ("plan", "audit"):
        err = error_of(capsys, command, "--tree", str(path))
        assert f"{command}: error: argument --tree: " in err and str(path) in err and said in err


def test_empty_leaves_are_planned(tmp_path, capsys):
    (tmp_path / "shapes.json").write_text('{"w": [0, 4], "b": []}')
    assert __main__.main(["plan", "--tree", str(tmp_path / "shapes.json")]) == 0
    assert "2 leaves, 1 parameters" in capsys.readouterr().out


def audit_on(monkeypatch, tmp_path, capsys, n, *args):
    """What an audit prints where JAX finds n CPU devices."""
    (tmp_path / "shapes.json").write_text(json.dumps({"w": [1024, 64], "b": [64]}))
    found = jax.devices("cpu")[:n]
    monkeypatch.setattr(jax, "devices", lambda *args: found)
    assert __main__.main(["audit", *args, "--tree", str(tmp_path / "shapes.json")]) == 0
    return capsys.readouterr().out


def test_audit_with_its_defaults_says_what_cpu_devices_cannot_show(monkeypatch, tmp_path, capsys):
    out = audit_on(monkeypatch, tmp_path, capsys, 4)
    assert out.splitlines()[2] == "devices             4"
    assert "CPU backend widens bfloat16 to float32; only an audit for GPUs can check" in out
    assert "as planned in operations and elements, NOT CHECKED in dtypes;" in out
    gathers = [line.split() for line in out.splitlines() if line.startswith("all-gather")]
    assert [(row[1], row[3], row[4]) for row in gathers] == [
        ("bfloat16", "65600", "0"),
        ("float32", "0", "65600"),
    ]


def test_audit_in_float32_checks_all(monkeypatch, tmp_path, capsys):
    out = audit_on(monkeypatch, tmp_path, capsys, 4, "--param-dtype", "float32")
    assert "\nas planned; besides" in out and "reduce-scatter" in out and "CPU" not in out


def test_audit_on_one_device_has_nothing_to_check(monkeypatch, tmp_path, capsys):
    out = audit_on(monkeypatch, tmp_path, capsys, 1)
    assert out.endswith("\none device: nothing is sent, so there is nothing to check\n")


@pytest.mark.parametrize(("found", "widened", "code"), [(8, False, 0), (0, True, 0), (0, False, 1)])
def test_audit_exits_with_1_if_not_as_planned(monkeypatch, small, capsys, found, widened, code):
    row = audit.AuditRow("all-gather", "bfloat16", 2, 8, 0, found, 0, widened)
    result = audit.Audit((row,), 1, 2, None)
    monkeypatch.setattr(audit, "audit", lambda *args: result)
    assert __main__.main(["audit", *small]) == code
    assert ("NOT as planned" in capsys.readouterr().out) == bool(code)


@pytest.mark.parametrize("command", ["audit", "bench"])
def test_missing_device_prints_a_message_instead_of_a_traceback(monkeypatch, capsys, command):
    def broken():
        raise RuntimeError("Unable to initialize backend 'cuda':\nno GPU")

    monkeypatch.setattr(jax, "devices", broken)
    err = error_of(capsys, command)
    assert "JAX finds no device: RuntimeError Unable to initialize" in err and "no GPU" in err


def test_closed_pipe_prints_no_error():
    """As `jdistadam plan | head -1` does, here before the first line."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-P", "-m", "jdistadam", "plan"]
    env = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}  # written at the end
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, timeout=120, env=env)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has it")
def test_output_that_cannot_be_written_is_a_failure_with_one_line():
    command = [sys.executable, "-P", "-m", "jdistadam", "plan"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=120, text=True)
    assert done.returncode == 1
    assert done.stderr == "jdistadam: error: [Errno 28] No space left on device\n"


def test_an_interrupted_command_prints_no_traceback(monkeypatch, capsys):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setitem(__main__._COMMANDS, "info", interrupted)
    assert __main__.main(["info"]) == 130
    assert capsys.readouterr() == ("", "")


@few(2)
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
