"""The main job, ended and begun again: the loss goes on. It learns, and leaves its report."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from support.paths import ROOT, environment

COMMAND = [
    sys.executable, str(ROOT / "experiments" / "train_lm.py"), "--layers", "1", "--width", "32",
    "--batch", "8", "--evals", "1", "--steps", "20",
]  # fmt: skip


def run(out, *options, code=0):
    done = subprocess.run(
        [*COMMAND, "--out", str(out), *options], capture_output=True, text=True, timeout=300, cwd=out
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done


def end_after_a_save(out, *options):
    """Starts a run and sends SIGTERM when there is a checkpoint; returns the step that it saved."""
    worker = subprocess.Popen(
        [*COMMAND, "--out", str(out), *options], stdout=subprocess.PIPE, text=True, cwd=out
    )
    deadline = time.time() + 240
    while not list((out / "checkpoints").glob("[0-9]")) and time.time() < deadline:
        time.sleep(0.01)
    worker.send_signal(signal.SIGTERM)
    output, _ = worker.communicate(timeout=240)
    assert worker.returncode == 75, output
    steps = sorted(int(x.name) for x in (out / "checkpoints").iterdir() if x.name.isdecimal())
    assert f"saved step {steps[-1]}; --resume goes on from there" in output
    return steps[-1]


def rows_of(out):
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in rows]


@pytest.fixture
def folders(tmp_path):
    for name in ("whole", "ended"):
        (tmp_path / name).mkdir()
    return tmp_path / "whole", tmp_path / "ended"


CASES = [
    ("--devices", "2"),
    ("--devices", "2", "--optimizer", "optax"),
    ("--devices", "4", "--scan", "--strategy", "optim_grads_params", "--param-dtype", "bfloat16"),
    ("--devices", "2", "--processes", "2", "--grad-reduce-dtype", "float32"),
]


ALL = (
    "--devices", "4", "--replicas", "2", "--strategy", "optim_grads_params", "--scan", "--width", "64",
    "--accumulate-steps", "2", "--grad-reduce-dtype", "float32", "--param-dtype", "bfloat16",
    "--main-params-dtype", "remainder16", "--mu-dtype", "bfloat16", "--nu-dtype", "block8",
    "--rounding", "stochastic",
)  # fmt: skip


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_bits(folders):
    """With all options in one run, which must reach it, learn and leave its report, too."""
    whole, ended = folders
    script = str(ROOT / "tests" / "support" / "end_and_resume.py")
    done = subprocess.run(
        [sys.executable, script, str(whole.parent), *COMMAND[2:], "--steps", "10", "--evals", "2", *ALL],
        capture_output=True, text=True, timeout=300, cwd=whole,
        env=environment(
            JAX_COMPILATION_CACHE_DIR=str(whole.parent / "cache"),  # the three runs share it
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        ),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "saved step 5; --resume goes on from there" in done.stdout
    assert rows_of(ended) == rows_of(whole) and rows_of(whole)[-1]["step"] == 10
    kept = {x for x in os.listdir(ended / "checkpoints") if x.isdecimal()}
    assert kept == {"8", "10"}
    train, validation = (
        [row[name] for row in rows_of(whole) if name in row]
        for name in ("train_loss", "validation_loss")
    )
    assert max(train[-1], validation[-1]) < np.log(256) - 0.5, (train, validation)
    assert validation[1] < validation[0]  # where the run ended, and after it
    assert (whole / "loss.png").stat().st_size > 10_000
    assert "bigram entropy" in done.stdout and "step/s" not in done.stderr
    assert "Optimizer state per device" in done.stdout and "0.50" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("options", CASES)
def test_sigterm_saves_and_resume_goes_on_with_the_same_bits(folders, options):
    whole, ended = folders
    run(whole, *options)
    last = end_after_a_save(ended, *options, "--save-every", "2")
    assert 2 <= last < 20
    run(ended, *options, "--save-every", "7", "--resume")
    assert rows_of(ended) == rows_of(whole)  # every loss and norm, bit for bit
    assert "20" in os.listdir(ended / "checkpoints")


@pytest.mark.slow
def test_resume_on_other_devices(folders):
    """The same sums in another order: close for a few steps."""
    whole, ended = folders
    options = ("--grad-comm-dtype", "float32", "--save-every", "10")
    run(whole, *options, "--devices", "4")
    shutil.copytree(whole / "checkpoints" / "10", ended / "checkpoints" / "10")
    done = run(ended, *options, "--devices", "4", code=1)
    assert "has checkpoints: add --resume, or choose another --out" in done.stderr
    run(ended, *options, "--devices", "2", "--strategy", "optim_grads_params", "--resume")
    losses = [[row["train_loss"] for row in rows_of(x) if "train_loss" in row] for x in folders]
    assert len(losses[0]) == 2 and len(losses[1]) == 1
    # Ten steps of at most 3e-3 from the same state; see test_sharded_optimizer_follows_optax.
    np.testing.assert_allclose(losses[1][-1], losses[0][-1], atol=1e-3)


LIMIT_SECONDS = 30
"""From the death of one process until the last of the others has ended."""


def children_of(process):
    """The processes that a launcher has started, in their order."""
    pids = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return sorted(map(int, pids))


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_kill_9_of_one_process_ends_the_others_and_resume_goes_on(folders, count):
    """In the middle of a step: the others end soon, and what is resumed has the same bits."""
    whole, ended = folders
    options = ("--devices", "4", "--processes", str(count), "--grad-reduce-dtype", "float32")
    run(whole, *options)
    launcher = subprocess.Popen(
        [*COMMAND, "--out", str(ended), *options, "--save-every", "2"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ended,
    )  # fmt: skip
    deadline = time.time() + 240
    while not list((ended / "checkpoints").glob("[2-9]")) and time.time() < deadline:
        time.sleep(0.01)
    others = children_of(launcher)
    os.kill(others.pop(), signal.SIGKILL)  # not the one that coordinates
    begun = time.time()
    output, _ = launcher.communicate(timeout=240)
    assert launcher.returncode != 0, output
    assert time.time() - begun < LIMIT_SECONDS, output
    assert not any(pathlib.Path(f"/proc/{pid}").exists() for pid in others)
    run(ended, *options, "--resume")
    assert rows_of(ended) == rows_of(whole)
