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
from step_bench import alone, budget, chart, check, flops, group, model, rows, tables, trace

from support.samples import few

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
        (
            "unrolled-1",
            [f"annotated_fsdp+{x}+clip" for x in ("gathered_once+whole_2", "products_kept")],
        ),
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


@few(1)
@pytest.mark.parametrize("keeps", [True, False])
def test_command_checks_and_times_steps_alone(monkeypatch, tmp_path, small, capsys, keeps):
    names = [f"step-small/{x}" for x in ("annotated_zero1+clip", "optim+float32sum", "no_shard")]
    options = ["--rows", ",".join(names), "--rounds", "1", "--trace-steps", "0", "--jobs", "1"]
    monkeypatch.setattr(
        sys, "argv", ["bench_step.py", *options, "--out", str(tmp_path / "found.json")]
    )
    monkeypatch.setattr(bench_step, "make_mesh", lambda args: (small, False, "xla"))
    monkeypatch.setattr(group.Group, "fit_together", lambda *_: keeps)
    assert bench_step.main() == 0
    found = json.loads((tmp_path / "found.json").read_text())["results"]["rows"]
    assert [row["name"] for row in found] == names
    printed = capsys.readouterr().out.split("tokens/s")[-1]
    for row in found:
        assert row["check"]["passed"] and row["ms"] > 0 and row["name"] in printed
        assert row["check"]["distance"] < row["check"]["bound"]


@pytest.mark.slow
def test_rows_without_memory_do_not_end_the_command(monkeypatch, tmp_path, small):
    """The floor of one workload, and all rows of another."""
    options = ["--size", "tiny", "--rounds", "1", "--trace-steps", "0", "--jobs", "1"]
    chosen = "unrolled-1/optim,step-small/optim"
    out = tmp_path / "found.json"
    monkeypatch.setattr(
        sys, "argv", ["bench_step.py", *options, "--rows", chosen, "--out", str(out)]
    )
    monkeypatch.setattr(bench_step, "make_mesh", lambda args: (small, False, "xla"))
    drop = group.Group.drop_too_large

    def drop_some(found, limit):
        if found.floor:
            found.tried[found.floor][""]["temporary_bytes"] = 1 << 40
        drop(found, 1 << 30 if found.floor else 0)

    monkeypatch.setattr(group.Group, "drop_too_large", drop_some)
    assert bench_step.main() == 1
    floor, ours, alone_too = json.loads(out.read_text())["results"]["rows"]
    assert floor["failed"].startswith("out of memory") and "ms" not in floor
    assert ours["ms"] > 0 and "ratio_to_floor" not in ours
    assert alone_too["failed"].startswith("out of memory")


@few(1)
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
planes { name: "/device:GPU:1"
  lines { id: 1 name: "Stream #1(Compute)"
    events { metadata_id: 1 offset_ps: 7000000000 duration_ps: 1000000000 } }
  event_metadata { key: 1 value { id: 1 name: "TileKernel" } } }
planes { name: "/device:GPU:2" }
"""


@pytest.mark.filterwarnings("ignore:builtin type event_stats:DeprecationWarning")
def test_phases_of_a_profile(tmp_path):
    """A fusion of the model 0..4 ms, a reduce-scatter 3..5 beside its end, an update 6..7."""
    hlo = '  %fusion.3 = f32[] fusion(), metadata={op_name="jit(step)/transpose(jvp(model))/add"}'
    profile = jax.profiler.ProfileData.from_serialized_xspace(
        jax.profiler.ProfileData.text_proto_to_serialized_xspace(PROFILE)
    )
    of_gpus = trace.events_of(profile, trace.op_names(hlo))
    assert [len(events) for events in of_gpus.values()] == [3, 1]
    events = of_gpus[0]
    found = trace.phases(events, steps=2)
    assert {k: (v["exposed_ms"], v["overlapped_ms"]) for k, v in found.items()} == {
        "model": (2.0, 0.0),
        "update": (0.5, 0.0),
        "reduce-scatter": (0.5, 0.5),
        "idle": (0.5, 0.0),
    }
    longest = trace.longest(events, steps=1)
    assert [(phase, ms) for phase, _, _, ms in longest] == [
        ("model", 4.0),
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
    last = trace.last_step(of_gpus, steps=2)  # of 8 ms, which GPU 1 ends
    assert [x[:3] for x in last[0]] == [(-1, 1, "reduce-scatter"), (2, 3, "update")]
    assert [x[:3] for x in last[1]] == [(3, 4, "norm")]
    chart.draw_timeline(last, "a/b", tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").stat().st_size > 5000


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


def fake_group(held, temporary):
    """A group of three rows that are compiled, the first of them the floor."""
    names = [f"unrolled-8/{x}" for x in ("floor", "optim", "annotated_zero1+best_flags")]
    found = object.__new__(group.Group)
    found.rows, found.mesh = [rows.parse(name) for name in names], types.SimpleNamespace(size=2)
    found.variants, found.states = dict.fromkeys(names), {}
    found.records = {name: {"name": name, "parameters": 0} for name in names}
    flags = dict(zip(names, ([""], [""], ["none", "early"]), strict=True))
    found.programs = {name: dict.fromkeys(flags[name]) for name in names}
    memory = {"argument_bytes": held, "temporary_bytes": temporary}
    found.tried = {name: {x: dict(memory) for x in flags[name]} for name in names}
    for name in names:
        found.records[name] |= memory
    return found, names


def test_states_of_all_rows_must_fit_with_one_step():
    found, _ = fake_group(held=4, temporary=2)
    assert found.fit_together(14) and not found.fit_together(13)
    for record in found.records.values():
        record["parameters"] = 1  # 8 bytes, to start with
    assert found.fit_together(22) and not found.fit_together(21)


def test_rows_that_need_too_much_memory_are_left_out(capsys):
    found, (floor, ours, rival) = fake_group(held=4, temporary=2)
    found.tried[floor][""]["temporary_bytes"] = found.tried[rival]["none"]["temporary_bytes"] = 20
    found.drop_too_large(10)
    assert found.floor is None and list(found.programs) == [ours, rival]
    assert found.records[floor]["failed"].startswith("out of memory: ")
    assert list(found.programs[rival]) == ["early"] and "failed" not in found.records[rival]
    found.tried[rival]["early"]["argument_bytes"] = 20
    found.drop_too_large(10)
    assert list(found.variants) == [ours]
    assert all("failed" in x for x in found.records[rival]["tried"])


def test_a_row_takes_the_fastest_of_its_flags(small, monkeypatch):
    """Of five, one fails and one is another's program; those close to the fastest are kept."""
    chosen = [rows.parse(f"step-small/{x}") for x in ("annotated_zero1", "optim")]
    found = group.Group(chosen, None, small, False, "xla")
    found.compile(1)
    found.make_data()
    name = chosen[0].name
    text = found.programs[name].pop("").as_text()
    seconds = {"slow": 3.0, "broken": None, "close": 1.02, "fast": 1.0, "again": 1.0}
    found.programs[name] = {
        x: types.SimpleNamespace(flags=x, as_text=lambda x=x: text.replace("HloModule", x[:4]))
        for x in reversed(seconds)  # as compiled; of equal ones, the first one listed stays
    }
    found.programs[name]["again"].as_text = lambda: "fast" + text.removeprefix("HloModule")
    found.tried[name] = {x: {"options": {x: True}} for x in seconds}

    def turn(name, steps):
        if (flags := found.variants[name].program.flags) == "broken":
            raise RuntimeError("RESOURCE_EXHAUSTED: out of it")
        timed.append(flags)
        return seconds[flags]

    timed = []
    monkeypatch.setattr(found, "turn", turn)
    found._drop_equal(name)
    found.choose(name)
    record = found.records[name]
    assert record["flags"] == "fast" and record["options"] == {"fast": True}
    assert sorted(found.programs[name]) == ["close", "fast"]
    assert found.variants[name].program.flags == "fast"
    slow, broken, close, fast, again = record["tried"]
    assert slow["ms"] > close["ms"] > fast["ms"] > 0 and again["same_as"] == "fast"
    assert broken["failed"].startswith("out of memory") and "again" not in timed
    rounds = {"fast": [1.0, 1.0, 1.0], "close": [0.9, 0.9, 2.0]}
    assert found._best_of_rounds(name, rounds) == rounds["close"]
    assert record["flags"] == "close" and record["tried"][3]["rounds_ms"] == rounds["fast"]


def test_a_late_run_ends_after_two_rounds(small, monkeypatch):
    found = group.Group([rows.parse("step-small/optim")], None, small, False, "xla")
    found.compile(1)
    found.make_data()
    monkeypatch.setattr(found, "turn", lambda name, steps: 1.0)
    found.measure(5, 0, float("inf"), lambda: True)
    assert found.records["step-small/optim"]["rounds_ms"] == [1e3, 1e3]


def test_flags_to_try():
    row = rows.parse("scanned-2/annotated_fsdp+clip+best_flags")
    for scanned, names in rows.FLAGS.items():
        assert len(names) == len(set(names)) <= rows.MOST_FLAGS, scanned
    assert list(row.choices()) == list(rows.FLAGS[True])
    choices = row.choices(["none", "early+pipelined"])
    assert choices["none"].options == rows.merging(256 << 20)
    added = rows.OPTIONS["early"] | rows.OPTIONS["pipelined"]
    assert choices["early+pipelined"].options == rows.merging(256 << 20) | added
    assert rows.parse("scanned-2/optim").choices() == {"": rows.parse("scanned-2/optim")}
    with pytest.raises(SystemExit, match="no flags late"):
        row.choices(["late"])
    with pytest.raises(SystemExit, match="9 flags to try"):
        row.choices(["none", *[x for x in rows.OPTIONS][:8]])


def test_a_gain_is_the_median_of_ratios_within_rounds():
    rival, ours = {"rounds_ms": [110.0, 120.0, 102.0]}, {"rounds_ms": [100.0, 100.0, 100.0]}
    found = tables.gain(rival, ours)
    expected = {"percent": 10, "percent_least": 2, "percent_most": 20}
    assert found == pytest.approx(expected)


def test_tokens_choose_the_number_of_sequences():
    found = rows.select("unrolled/optim,scanned-4/floor", tokens=[2048, 8192], length=2048)
    names = [row.name for group in found.values() for row in group]
    assert names == ["unrolled-1/floor", "unrolled-1/optim", "unrolled-4/floor",
                     "unrolled-4/optim", "scanned-4/floor"]  # fmt: skip
    found = rows.select("zero3_scanned", tokens=[2048], length=1024)
    assert list(found) == ["scanned-2"] and len(found["scanned-2"]) == 5
    with pytest.raises(SystemExit, match="no sequences of 2048"):
        rows.select("unrolled/optim", tokens=[1024], length=2048)
    with pytest.raises(SystemExit, match="say how many --tokens"):
        rows.select("unrolled/optim")


@pytest.mark.parametrize("name", model.SIZES)
def test_flops_count_what_is_multiplied(name):
    """Two per parameter that is multiplied by activations, forward, and four backward."""
    size = model.SIZES[name]
    leaves = model.shapes(size, is_scanned=False)
    everything = sum(x.size for x in jax.tree.leaves(leaves))
    unused = leaves["embed"].size if size.is_llama else leaves["positions"].size
    attention = 6 * size.layers * size.width * size.length
    assert flops.per_token(size) == 6 * (everything - unused) + attention


def test_utilization():
    size = model.SIZES["gpt-1.3b"]
    found = flops.describe(size, "NVIDIA H100 80GB HBM3")
    assert found["peak_per_second"] == 989.4e12
    assert flops.utilization(66_000, found, 1) == pytest.approx(0.544, abs=0.001)
    assert flops.utilization(66_000, flops.describe(size, "cpu"), 1) is None


@few(1)
@pytest.mark.parametrize("size", ["tiny", "tiny-llama"])
@pytest.mark.parametrize("is_scanned", [False, True])
def test_checkpoints_change_memory_and_no_result(size, is_scanned):
    size = model.SIZES[size]
    params = model.draw(
        model.shapes(size, is_scanned), jax.sharding.SingleDeviceSharding(jax.devices()[0])
    )
    found = {}
    for checkpoint in model.CHECKPOINTS:
        workload = model.Workload(is_scanned, 2, checkpoint=checkpoint)
        loss = model.make_loss(size, workload, "xla")
        tokens = model.tokens(size, workload, 1)[0, 0]
        value, grads = jax.jit(jax.value_and_grad(loss))(params, tokens)
        kept = jax.eval_shape(lambda p, loss=loss, t=tokens: jax.vjp(loss, p, t)[1], params)
        found[checkpoint] = value, grads, sum(x.size for x in jax.tree.leaves(kept))
    (value, grads, most), *others = found.values()
    assert np.isclose(value, np.log(size.vocabulary), atol=0.2)
    for other, others_grads, kept in others:
        np.testing.assert_allclose(other, value, rtol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), others_grads, grads)
        assert kept < most
        most = kept


def test_samples_of_an_array_on_one_device_without_a_mesh():
    x = jax.device_put(np.arange(10.0, dtype=np.float32), jax.devices("cpu")[0])
    assert check.sample({"x": x})["['x']"].tolist() == list(range(10))
