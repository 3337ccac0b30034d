"""The benchmark of whole steps, small: its command, and that its checks and phases can fail."""

import json
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jdistadam.tools import bench
from support.paths import ROOT, environment

sys.path.insert(0, str(ROOT / "experiments"))
import bench_step
from step_bench import alone, budget, chart, check, group, rows, tables, trace

FAST_COMPILATION = (
    "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workload", "variants"),
    [
        ("scanned-2x2", ("annotated_fsdp", "optim_grads_params+clip")),
        ("unrolled-8", [f"optim_grads_params+{x}" for x in ("block_by_block", "at_any_time")]),
    ],
)
def test_command_checks_and_times_every_row(tmp_path, workload, variants):
    out = tmp_path / "bench_step.json"
    chosen = [f"{workload}/{name}" for name in variants]
    done = subprocess.run(
        [sys.executable, str(ROOT / "experiments" / "bench_step.py"), "--rows", ",".join(chosen),
         "--size", "tiny", "--rounds", "2", "--jobs", "1", "--out", str(out)],
        env=environment(
            JAX_PLATFORMS="cpu", XLA_FLAGS=FAST_COMPILATION
        ),
        capture_output=True, text=True, timeout=300, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    run = json.loads(out.read_text())
    assert run["machine"]["devices"] and run["revision"] and "--size tiny" in run["command"]
    floor, *others = run["results"]["rows"]
    assert floor["name"] == f"{workload}/floor" and floor["ratio_to_floor"] == 1
    assert [row["name"] for row in others] == chosen
    for row in others:
        assert row["check"]["passed"] and 0 < row["check"]["distance"]
        assert len(row["rounds_ms"]) == 2 and row["tokens_per_second"] > 0
        assert row["argument_bytes"] > floor["argument_bytes"] and row["predicted_ms"]["update"] > 0
        assert row["name"] in done.stdout.split("tokens/s")[-1]


@pytest.fixture
def small(monkeypatch):
    """The step alone on a tree of two leaves and two CPU devices."""
    monkeypatch.setitem(bench.TREES, "small", {"w": (64, 32), "b": (32,)})
    return Mesh(np.asarray(jax.devices("cpu")[:2]), ("data",), axis_types=(AxisType.Auto,))


def test_command_checks_and_times_steps_alone(monkeypatch, tmp_path, small, capsys):
    names = [f"step-small/{x}" for x in ("annotated_zero1+clip", "optim+float32sum", "no_shard")]
    options = ["--rows", ",".join(names), "--rounds", "1", "--trace-steps", "0", "--jobs", "1"]
    monkeypatch.setattr(
        sys, "argv", ["bench_step.py", *options, "--out", str(tmp_path / "found.json")]
    )
    monkeypatch.setattr(bench_step, "make_mesh", lambda args: (small, False, "xla"))
    assert bench_step.main() == 0
    found = json.loads((tmp_path / "found.json").read_text())["results"]["rows"]
    assert [row["name"] for row in found] == names
    printed = capsys.readouterr().out.split("tokens/s")[-1]
    for row in found:
        assert row["check"]["passed"] and row["ms"] > 0 and row["name"] in printed
        assert row["check"]["distance"] < row["check"]["bound"]


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("wrong", [lambda g: g.at[1].set(g[0]), lambda g: 0 * g])
def test_check_notices_gradients_that_are_not_the_mean(small, wrong, clips):
    setting = alone.Setting("small", small)
    grads = setting.grads()
    right, other = (
        check.Reference(setting, lambda params, batch: (None, batch), batch, clips)
        for batch in (grads, jax.tree.map(wrong, grads))
    )
    losses, bound = [0.0] * check.CHECKED_STEPS, check.tolerance(24, 2)
    assert check.compare(right, right.end, losses, bound)["passed"]
    assert not check.compare(right, other.end, losses, bound)["passed"]


def test_check_notices_clipping_that_is_missing(small):
    setting = alone.Setting("small", small)
    batch = setting.grads()
    clipped, unclipped = (
        check.Reference(setting, lambda params, grads: (None, grads), batch, clips)
        for clips in (True, False)
    )
    losses = [0.0] * check.CHECKED_STEPS
    assert not check.compare(clipped, unclipped.end, losses, check.tolerance(24, 2))["passed"]


def test_check_notices_another_loss(small):
    setting = alone.Setting("small", small)
    batch = setting.grads()
    reference = check.Reference(setting, lambda params, grads: (1.0, grads), batch, False)
    assert check.compare(reference, reference.end, [1.0, 1.0], 0.1)["passed"]
    assert not check.compare(reference, reference.end, [1.0, 1.2], 0.1)["passed"]
    assert not check.compare(reference, reference.end, [np.nan, 1.0], 0.1)["passed"]


def test_check_notices_a_leaf_that_is_not_finite(small):
    setting = alone.Setting("small", small)
    batch = setting.grads()
    reference = check.Reference(setting, lambda params, grads: (None, grads), batch, False)
    for path in reference.end:
        end = reference.end | {path: np.nan * reference.end[path]}
        found = check.compare(reference, end, [0.0] * check.CHECKED_STEPS, 0.1)
        assert not found["passed"] and found["worst_leaf"] == path


PROFILE = """
planes { name: "/device:GPU:0"
  lines { id: 1 name: "Stream #1(Compute)"
    events { metadata_id: 1 offset_ps: 0 duration_ps: 4000000000
             stats { metadata_id: 1 str_value: "fusion.3" } }
    events { metadata_id: 2 offset_ps: 6000000000 duration_ps: 1000000000 } }
  lines { id: 2 name: "Stream #2(NCCL)"
    events { metadata_id: 3 offset_ps: 3000000000 duration_ps: 2000000000 } }
  event_metadata { key: 1 value { id: 1 name: "loop_add_fusion" } }
  event_metadata { key: 2 value { id: 2 name: "void AdamKernel<float>()" } }
  event_metadata { key: 3 value { id: 3 name: "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL" } }
  stat_metadata { key: 1 value { id: 1 name: "hlo_op" } } }
"""


@pytest.mark.filterwarnings("ignore:builtin type event_stats:DeprecationWarning")
def test_phases_of_a_profile(tmp_path):
    """A fusion of the model 0..4 ms, a reduce-scatter 3..5 beside its end, an update 6..7."""
    hlo = '  %fusion.3 = f32[] fusion(), metadata={op_name="jit(step)/transpose(jvp(model))/add"}'
    profile = jax.profiler.ProfileData.from_serialized_xspace(
        jax.profiler.ProfileData.text_proto_to_serialized_xspace(PROFILE)
    )
    events = trace.events_of(profile, trace.op_names(hlo))
    found = trace.phases(events, steps=2)
    assert {k: (v["exposed_ms"], v["overlapped_ms"]) for k, v in found.items()} == {
        "model": (2.0, 0.0),
        "update": (0.5, 0.0),
        "reduce-scatter": (0.5, 0.5),
        "idle": (0.5, 0.0),
    }
    longest = trace.longest(events, steps=1)
    assert [(phase, ms) for phase, _, _, ms in longest] == [
        ("reduce-scatter", 2.0),
        ("update", 1.0),
    ]
    row = {"name": "a/b", "phases": found, "predicted_ms": {"update": 0.25, "norm": 0.125}}
    printed = tables.text({"rows": [row], "left_out": []})
    assert "reduce-scatter 0.50+0.50" in printed and "update 0.50+0.00 (0.25)" in printed
    assert "norm 0.00+0.00 (0.12)" in printed  # predicted, not found
    image = tmp_path / "phases.png"
    assert not chart.draw([{"name": "a/b"}], image) and not image.exists()
    assert chart.draw([row, row], image) and image.stat().st_size > 5000


@pytest.mark.parametrize(
    ("kernel", "origin", "phase"),
    [
        ("ncclDevKernel_AllGather_RING_LL", "", "all-gather"),
        ("ncclDevKernel_SendRecv", "", "all-to-all"),
        ("MemcpyD2D", "", "copies"),
        ("MemcpyP2P", "", "peer copies"),
        ("void TileKernel<float>()", "", "norm"),
        ("nvjet_tst_256x128", "", "model"),
        ("loop_multiply_fusion_1", "jit(step)/optimizer/mul", "update"),
        ("loop_multiply_fusion_1", "jit(step)/clip/mul", "norm"),
        ("loop_multiply_fusion_1", "jit(step)/concatenate", "other"),
        ("wrapped_copy_2", "jit(step)/model/while", "copies"),
        ("loop_copy_fusion_1", "", "copies"),
        ("copy_17_1", "", "copies"),
        ("loop_copy_multiply_fusion", "jit(step)/model/mul", "model"),
    ],
)
def test_phase_of_a_kernel(kernel, origin, phase):
    assert trace.phase_of(kernel, "", {kernel: origin}) == phase


@pytest.mark.parametrize(
    ("row", "devices", "expected"),
    [
        ("unrolled-8/optim", 2, {"reduce-scatter": 4.0, "all-gather": 2.0, "update": 3.5, "norm": 0.25}),
        ("scanned-1x4/optim_grads_params", 2, {"reduce-scatter": 16.0, "all-gather": 16.0, "update": 3.5, "norm": 0.25}),
        ("unrolled-1x4/optim_grads_params+block_by_block", 2, {"reduce-scatter": 16.0, "all-gather": 16.0, "update": 3.5, "norm": 0.25}),
        ("scanned-1x4/annotated_fsdp", 2, {"reduce-scatter": 16.0, "all-gather": 16.0, "update": 3.5}),
        ("unrolled-1x4/annotated_fsdp", 2, {"reduce-scatter": 16.0, "all-gather": 8.0, "update": 3.5}),
        ("unrolled-8/no_shard", 2, {"all-reduce": 8.0, "update": 7.0, "norm": 0.5}),
        ("unrolled-8/annotated_zero1", 1, {"update": 7.0}),
        ("unrolled-1x2/annotated_zero1", 2, {"reduce-scatter": 8.0, "all-gather": 2.0, "update": 3.5}),
        ("unrolled-8/optim+float32sum+over_xla", 2,
         {"all-to-all": 8.0, "all-gather": 2.0, "sum": 1.0, "update": 3.75, "norm": 0.5}),
    ],
)  # fmt: skip
def test_prediction_counts_bytes(row, devices, expected):
    """1e9 parameters on 2 devices: 28e9 / 2 bytes updated, 2e9 / 2 sent each way, 2e9 / 2 normed."""
    rates = {"copy": 4e12, "reduce-scatter": 250e9, "all-gather": 500e9, "all-reduce": 250e9}
    rates["all-to-all"] = 125e9
    name = "layers" if "scanned" in row else "block00"
    setting = types.SimpleNamespace(
        mesh=Mesh(np.arange(devices), ("data",)),
        shapes={name: jax.ShapeDtypeStruct((10, 10_000, 10_000), np.float32)},
    )
    assert budget.predict(rows.parse(row), setting, rates) == expected


def test_rows_by_pattern_and_by_name():
    groups = rows.select("unrolled-1/optim*,scanned-2/optim+clip+early")
    assert [row.name for row in groups["unrolled-1"]] == [
        "unrolled-1/floor",
        "unrolled-1/optim",
        "unrolled-1/optim_grads",
        "unrolled-1/optim_grads_params",
    ]
    assert [row.name for row in groups["scanned-2"]][1:] == ["scanned-2/optim+clip+early"]
    for name in rows.KNOWN:
        assert rows.parse(name).name == name
    layers = rows.select("layers")
    assert [len(group) for group in layers.values()] == [6, 3]
    assert [row.name for group in layers.values() for row in group[1:]] == rows.SETS["layers"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rolled-8/optim", "no workload 'rolled-8'"),
        ("unrolled-8/zero7", "no variant 'zero7'"),
        ("unrolled-8/annotated_fsdp+remainder16", "annotated_fsdp has no remainder16"),
        ("unrolled-8/optim+block_by_block", "optim has no block_by_block"),
        ("scanned-8/optim_grads_params+at_any_time", "optim_grads_params has no at_any_time"),
        ("step-gpt2xl/optim_grads_params", "no variant 'optim_grads_params'"),
        ("unrolled-8/nothing*", "no known row is like"),
    ],
)
def test_unknown_rows_are_named(name, message):
    with pytest.raises(SystemExit, match=message):
        rows.select(name)


def test_batches_fit_into_memory_with_their_floor():
    names = [f"unrolled-8/{x}" for x in ("floor", "optim", "optim_grads", "no_shard")]
    found = object.__new__(group.Group)
    found.rows, found.variants = [rows.parse(name) for name in names], dict.fromkeys(names)
    held = dict(zip(names, (1, 4, 4, 4), strict=True))
    found.records = {
        n: {"argument_bytes": held[n], "temporary_bytes": 2, "parameters": 0} for n in names
    }
    assert found.batches(11) == [names[:3], [names[0], names[3]]]
    assert found.batches(1) == [[names[0], name] for name in names[1:]]


def test_samples_of_an_array_on_one_device_without_a_mesh():
    x = jax.device_put(np.arange(10.0, dtype=np.float32), jax.devices("cpu")[0])
    assert check.sample({"x": x})["['x']"].tolist() == list(range(10))
