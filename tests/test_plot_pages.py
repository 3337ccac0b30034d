"""Pictures of the pages show what the records and plans of today say."""

import bisect
import collections
import itertools
import json
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from PIL import Image  # comes with matplotlib

import jdistadam as jda
from support.paths import ROOT, environment

PLOTS = ROOT / "experiments" / "results" / "plots"
PAGES = "".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))


def contents(folder):
    """What each picture shows, as the script wrote it into the file, by the picture's name."""
    paths = {str(x.relative_to(folder)): x for x in folder.glob("*/*.png")}
    return {name: Image.open(path).text["Description"] for name, path in paths.items()}


def test_pictures_are_up_to_date_and_shown(tmp_path):
    """If this fails after a change that was meant, run experiments/plot_pages.py again."""
    script = ROOT / "experiments" / "plot_pages.py"
    subprocess.run(
        [sys.executable, str(script), "--out", str(tmp_path)], env=environment(), check=True
    )
    drawn = contents(tmp_path)
    assert len(drawn) == 6 and all(drawn.values())
    assert drawn == contents(PLOTS)
    for name in drawn:
        assert f"](../experiments/results/plots/{name})" in PAGES
        assert (PLOTS / name).stat().st_size < 150_000


def numbers(name):
    """The numbers of each bar and line of a picture; a bar has four: left, low, width, height."""
    parts = contents(PLOTS)[name].split("; ")
    rows = [part for part in parts if re.fullmatch(r"[-+.e\d]+( [-+.e\d]+){3,}", part)]
    return [[float(x) for x in row.split()] for row in rows]


def validation_losses(run):
    path = PLOTS.parent / "train_lm" / run / "metrics.jsonl"
    rows = map(json.loads, path.read_text().splitlines())
    return {row["step"]: row["validation_loss"] for row in rows if "validation_loss" in row}


def apart(run, base):
    losses, others = validation_losses(run), validation_losses(base)
    assert losses.keys() == others.keys() and len(losses) in (10, 20)
    return [losses[step] - others[step] for step in losses]


SEEDS = [
    [f"h100_x4/600_steps_3e-4/{name}_seed{i}" for name in ("jdistadam", "optax_sharded")]
    for i in range(3)
]
OVER_4 = "h200_x4/strategies/optim_1"
RUNS = ("no_shard_1", "optim_2", "optim_grads_1", "optim_grads_2")
LINES = {
    "h100_x4/optax_losses.png": SEEDS,
    "h200_x4/strategy_losses.png": [[f"h200_x4/strategies/{run}", OVER_4] for run in RUNS],
}


@pytest.mark.parametrize("name", LINES)
def test_differences_of_losses_are_those_of_the_records(name):
    drawn = [row[len(row) // 2 :] for row in numbers(name) if len(row) in (20, 40)]
    for line, pair in zip(drawn, LINES[name], strict=True):
        assert line == pytest.approx(apart(*pair), rel=1e-5)


def test_band_is_as_wide_as_seeds_of_optax_are_apart():
    bars = [
        row for row in numbers("h100_x4/optax_losses.png") if row[-2:] != [0, 0] and len(row) == 4
    ]
    losses = [list(validation_losses(optax).values()) for _, optax in SEEDS]
    expected = [max(x) - min(x) for x in zip(*losses, strict=True)]
    assert [bar[3] for bar in bars] == pytest.approx([2 * x for x in expected], rel=1e-5)
    assert [bar[1] for bar in bars] == pytest.approx([-x for x in expected], rel=1e-5)


def test_one_line_shows_both_meshes_of_no_shard():
    assert not any(apart("h200_x4/strategies/no_shard_1", "h200_x4/strategies/no_shard_2"))


TIMELINES = {
    # bytes per parameter times N / (N - 1); bars of communication that start before the passes, in
    # the first micro-batch, in the second or after it, after the update; those during a pass
    "no_shard": (4, [0, 0, 4, 0], 0),
    "optim": (4, [0, 0, 4, 4], 0),
    "optim_grads": (6, [0, 4, 4, 4], 6),
    "optim_grads_params": (6, [4, 4, 4, 0], 6),
}


@pytest.mark.parametrize("strategy", TIMELINES)
def test_timeline_shows_what_the_plan_sends(strategy):
    """4 blocks of 2^20 parameters, 2 micro-batches, 4 devices; a unit of length is 2^21 bytes."""
    rows, top = numbers("cpu/step_timeline.png"), -3 * list(TIMELINES).index(strategy)
    computed, sent = (
        sorted((left, left + width) for left, low, width, _ in rows if low == lane)
        for lane in (top, top - 1)
    )
    tx = jda.distributed(
        jda.fused_adamw(1e-3),
        mesh=jax.make_mesh((4,), ("data",), devices=jax.devices()[:4]),
        sharding_strategy=strategy,
        policy=jda.MixedPrecisionPolicy(grad_comm_dtype=jnp.bfloat16),
    )
    shape = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    plan = jda.plan([shape] * 4, tx, accumulate_steps=2)
    size, places, during = TIMELINES[strategy]
    assert len(sent) == sum(c.times for c in plan.collectives)
    total = sum(end - start for start, end in sent) * 2**21
    assert total == pytest.approx(plan.bytes_sent) == size * 3 / 4 * 2**22
    for bars in (computed, sent):
        assert all(a[1] <= b[0] + 1e-5 for a, b in itertools.pairwise(bars))
    *passes, update = computed
    assert len(passes) == 16
    limits = (passes[0][0], passes[8][0], update[0])
    counts = collections.Counter(bisect.bisect(limits, start) for start, _ in sent)
    assert [counts[i] for i in range(4)] == places
    assert sum(any(a < end and start < b for a, b in passes) for start, end in sent) == during
