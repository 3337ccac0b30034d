"""The main job, small: it learns, and both optimizers and every option reach the run."""

import json
import subprocess
import sys

import numpy as np
import pytest

from support.paths import ROOT
from support.tensorboard import scalars

sys.path.insert(0, str(ROOT / "experiments"))
from lm import corpus, report


def train(tmp_path, *options):
    done = subprocess.run(
        [sys.executable, str(ROOT / "experiments" / "train_lm.py"), "--out", str(tmp_path), "--layers", "1", "--width",
         "32", "--batch", "8", "--evals", "2", "--devices", "4", *options],
        capture_output=True, text=True, timeout=300, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    return done, rows


ALONE = [
    ("--accumulate-steps", "2"),
    ("--optimizer", "optax"),
    ("--optimizer", "optax_sharded"),
    ("--param-dtype", "bfloat16", "--mu-dtype", "bfloat16"),
    ("--main-params-dtype", "remainder16", "--nu-dtype", "block8", "--rounding", "stochastic"),
    ("--replicas", "2", "--strategy", "optim_grads", "--grad-reduce-dtype", "float32"),
    ("--scan", "--strategy", "optim_grads_params", "--width", "64"),
    ("--gathered-in-model", "--strategy", "optim_grads_params", "--width", "64"),
]
EXCLUSIVE = {"--optimizer", "--gathered-in-model"}  # with --scan, which is among all
ALL = [option for options in ALONE if not EXCLUSIVE & {*options} for option in options]


@pytest.mark.slow  # as with all options at once: see test_train_lm_resume.py
@pytest.mark.parametrize("options", [*ALONE, ALL])
def test_training_learns_and_leaves_its_report(tmp_path, options):
    done, rows = train(tmp_path, "--steps", "30", *options)
    losses = [row["train_loss"] for row in rows if "train_loss" in row]
    validation = [row["validation_loss"] for row in rows if "validation_loss" in row]
    assert losses[-1] < np.log(256) - 1 and validation[-1] < validation[0]
    assert (tmp_path / "loss.png").stat().st_size > 10_000
    assert "bigram entropy" in done.stdout and "step/s" not in done.stderr
    if "--optimizer" not in options:
        share = "0.50" if "--replicas" in options else "0.25"
        assert "Optimizer state per device" in done.stdout and share in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--model-axis", "2"), ("--model-axis", "4", "--scan")])
def test_sharded_optimizer_follows_optax(tmp_path, options):
    """Same seed, same batches, communication in float32: the two curves are one curve."""
    curves = []
    options = ("--steps", "20", "--grad-comm-dtype", "float32", *options)
    held = []
    for name in ("jdistadam", "optax", "optax_sharded"):
        (tmp_path / name).mkdir()
        _, rows = train(tmp_path / name, "--optimizer", name, *options)
        curves.append([row["train_loss"] for row in rows if "train_loss" in row])
        run = json.loads((tmp_path / name / "run.json").read_text())
        held.append(run["results"]["state_bytes_per_device"])
    # Rounding differs, and Adam amplifies it: 20 steps of at most 3e-3 keep it below 1e-3 nats.
    np.testing.assert_allclose(curves[0], curves[1], atol=1e-3)
    np.testing.assert_allclose(curves[0], curves[2], atol=1e-3)
    assert held[2] < held[1] or "4" in options  # no axis of data is left with four by model


@pytest.mark.slow  # see distributed/test_processes.py
def test_two_processes_train_as_one(tmp_path):
    """The launcher, gloo, and a float32 sum: only the order of the loss's own mean may differ."""
    curves = []
    for count in ("1", "2"):
        (tmp_path / count).mkdir()
        options = ("--steps", "20", "--grad-reduce-dtype", "float32", "--processes", count)
        _, rows = train(tmp_path / count, *options)
        assert json.loads((tmp_path / count / "run.json").read_text())["results"][
            "processes"
        ] == int(count)
        curves.append([row["train_loss"] for row in rows if "train_loss" in row])
    np.testing.assert_allclose(curves[1], curves[0], rtol=4 * 2.0**-24)


def test_metrics_are_written_to_a_file_and_to_tensorboard(tmp_path, monkeypatch):
    """A run that goes on keeps the rows up to its first step, and writes the others anew."""
    pytest.importorskip("tensorboardX")
    path, folder = tmp_path / "metrics.jsonl", tmp_path / "tensorboard"
    rows = [{"step": i, "train_loss": 4.0 / i, "tokens": 8 * i} for i in (10, 20, 30)]
    for first, some in ((0, rows), (10, [rows[1] | {"train_loss": 7.0}])):
        file = report.MetricsFile(path, first, folder)
        for row in some:
            file.write(**row)
        file.close()
        monkeypatch.setattr("time.time", lambda: 4e9)  # the files are named by their second
    kept = [rows[0], rows[1] | {"train_loss": 7.0}]
    assert [json.loads(line) for line in path.read_text().splitlines()] == kept
    found = scalars(folder)
    assert {step for _, step in found} == {10, 20, 30}  # of which TensorBoard drops the last
    for row in kept:
        step = row["step"]
        assert found["train_loss", step] == np.float32(row["train_loss"])
        assert found["tokens", step] == row["tokens"]


def test_shown_metrics_are_short_and_formatted():
    metrics = {"train_loss": 2.34567, "train_learning_rate": 3e-4, "peak_bytes": 3.2e9}
    want = {"loss": "2.346", "lr": "3.00e-04", "peak": "3.2e+09 bytes"}
    assert report.shown(metrics | {"tokens": 5, "train_skipped": 0.0}) == want
    assert report.shown({"tokens_per_second": 12345.6}) == {"tokens_per_s": "12,346"}


def test_text_is_deterministic_and_held_out(tmp_path):
    """Which files a standard library has, and which of them are copies, is up to who installs it."""
    for i in range(100):
        (tmp_path / f"{i:03}.py").write_text(f"<{i % 45}>" * 9)  # the last 55 are copies
    train_text, validation = corpus.load(tmp_path)
    for i in range(45):
        assert (f"<{i}>".encode() in bytes(train_text)) != (f"<{i}>".encode() in bytes(validation))
    assert len(validation) > 100
    loads = [corpus.load() for _ in range(2)]
    np.testing.assert_array_equal(*(np.concatenate(texts) for texts in loads))
    assert len(loads[0][0]) > 1e6 and len(loads[0][1]) > 1e4


def test_zlib_entropy_of_known_sources():
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, 100_000).astype(np.uint8)
    assert corpus.zlib_entropy(noise) == pytest.approx(np.log(256), rel=1e-3)
    assert corpus.zlib_entropy(np.zeros(100_000, np.uint8)) < 0.02


def test_bigram_entropy_of_known_sources():
    rng = np.random.default_rng(0)
    assert corpus.bigram_entropy(np.tile(np.arange(7, dtype=np.uint8), 1000)) == pytest.approx(
        0, abs=1e-9
    )
    coin = rng.integers(0, 2, 200_000).astype(np.uint8)
    assert corpus.bigram_entropy(coin) == pytest.approx(np.log(2), abs=1e-3)
