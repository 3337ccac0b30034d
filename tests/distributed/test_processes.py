"""Several processes, each with some of the devices, compute the bits of one process with all."""

import os
import re
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import jdistadam as jda
from jdistadam import compat
from jdistadam.core import waits
from jdistadam.kernels import processes
from jdistadam.training.agreement import check_agreement
from support.free_port import free_port
from support.paths import TESTS, environment

SCRIPT = TESTS / "support" / "one_of_many_processes.py"
DIFFER = TESTS / "support" / "processes_that_differ.py"


def started(script, count, arguments, **env):
    """Starts processes with ``arguments(index, port)``."""
    port = free_port()
    return [
        subprocess.Popen(
            [sys.executable, "-P", script, *arguments(i, port)],
            env=environment(**({"JAX_PLATFORMS": "cpu"} | env)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(count)
    ]


def final_state(tmp_path, count, strategy, platform="cpu", total=4):
    """Runs so many processes on all devices together; the bits of every leaf at the end."""
    out = tmp_path / f"{count}.npz"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7").split(",")
    running = started(
        SCRIPT,
        count,
        lambda i, port: [platform, str(total), str(i), str(count), str(port), strategy, str(out)],
        JAX_PLATFORMS="cpu" if platform == "cpu" else "cuda,cpu",
        XLA_PYTHON_CLIENT_PREALLOCATE="false",  # the process of the tests holds most of a GPU
        CUDA_VISIBLE_DEVICES=",".join(visible[:total]),
    )
    outputs = [process.communicate(timeout=300)[0] for process in running]
    for process, output in zip(running, outputs, strict=True):
        assert process.returncode == 0, output[-4000:]
    return [*np.load(out).values()]


@pytest.mark.parametrize(
    "strategy", [pytest.param("optim", marks=pytest.mark.slow), "optim_grads_params"]
)
def test_two_processes_give_the_bits_of_one(tmp_path, strategy):
    """Four steps on 2 x 2 devices: each process feeds its own half of the batch."""
    one, two = (final_state(tmp_path, count, strategy) for count in (1, 2))
    assert_same(one, two)


@pytest.mark.multigpu
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_one_process_for_each_gpu_gives_the_bits_of_one(tmp_path, strategy):
    """Four steps on 2 x 4 GPUs, 2 x 2, or two, over NCCL."""
    total = max(n for n in (2, 4, 8) if n <= len(jax.devices("gpu")))
    one, many = (final_state(tmp_path, n, strategy, "gpu", total) for n in (1, total))
    assert_same(one, many)


def assert_same(one, several):
    assert len(one) == len(several) > 10
    for a, b in zip(one, several, strict=True):
        np.testing.assert_array_equal(a, b)


DIFFERENCES = {
    "policy": "policy: differs between process 1 and process 0: got .*bfloat16",
    "layout": r"layout: differs between process 1 and process 0: got leaf \['w'\]: shape .*512",
    "program": "program: differs between process 1 and process 0: .* look for what loss_fn",
    "learning rate": r"learning_rate: differs between process 1 and process 0: got 0\.5, expected 0\.01",
    "max_grad_norm": r"max_grad_norm: differs between process 1 and process 0: got 1\.0, expected None",
    "accumulate_steps": "accumulate_steps: differs between process 1 and process 0: got 2, expected 1",
    "batch": r"batch: differs .* got batch int32 of 3 dimensions, expected batch float32 of 3 dimensions",
    "params": r"params: differs .* got params\['b'\] float32 \(4,\) with digest .*Draw them from one seed",
    "model state": r"model_state: differs .* got model_state\['n'\] float64 \(2,\) with digest",
    "rng": r"rng: differs .* got rng key<threefry2x32> uint32 \(2,\) with digest .*, expected none",
    "another rng": "rng: differs .* got rng key<threefry2x32> uint32 .* expected rng key<threefry2x32> uint32 ",
    "save step": "step: differs between process 1 and process 0: got 5, expected 4",
    "save without extra": r"extra: differs .* got no extra, expected extra\['epoch'\]",
    "save another key": r"extra\['key'\]: differs .* got .*sha256.* threefry",
    "save other call": "call: differs between process 1 and process 0: got eval_step, expected save or Checkpointer",
    "versions": "versions: differs between process 1 and process 0: got jdistadam 0.0.0",
    "extra": r"extra\['epoch'\]: differs between process 1 and process 0: got .*3.*expected .*2",
    "raises": "program: differs .* got ValueError: the data of this process is missing",
}
REFUSED = (
    r"extra: differs between process 1 and process 0: got TreeError: extra\['x'\]: nothing that"
)
SAME = ("nothing", "rows", "lengths", "save nothing", "save refused extra")
NEVER_CAME = "process 1: did not come to train_step within 2 s: got no word"


@pytest.mark.slow
def test_processes_that_differ_stop_before_the_first_step(tmp_path):
    """All that are there raise the same, which names the process and the difference.

    So they do before they save other values beside a state; equal ones come back in each.
    """
    whats = [*DIFFERENCES, *SAME, "never comes"]
    running = started(DIFFER, 2, lambda i, port: [str(i), str(port), str(tmp_path), *whats])
    outputs = [process.communicate(timeout=200)[0] for process in running]
    for output in outputs:
        said = dict(re.findall(r"^(\w[\w ]*) -> (.*)$", output, re.MULTILINE))
        for what, message in DIFFERENCES.items():
            assert re.search("AgreementError: " + message, said[what]), output[-3000:]
        for what in SAME:
            assert said.get(what, "").startswith("loss "), output[-3000:]
        assert re.search(REFUSED, said["save refused extra refused"]) or output == outputs[1]
    assert said["never comes"] == "left"  # the second process
    assert f"never comes -> AgreementError: {NEVER_CAME}" in outputs[0], outputs[0][-3000:]


@pytest.mark.slow
def test_extra_evaluation_in_one_process_ends_in_time(tmp_path):
    """The second process evaluates once more, and the first one takes a step: both would wait."""
    running = started(DIFFER, 2, lambda i, port: [str(i), str(port), str(tmp_path), "evaluation"])
    outputs = [process.communicate(timeout=100)[0] for process in running]
    message = "evaluation -> AgreementError: process 0: did not come to eval_step within 6 s"
    assert message in outputs[1], outputs[1][-3000:]


class SlowStore:
    """A coordination client in which nobody has said anything."""

    def __init__(self):
        self.waited, self.said = 0, {}

    def key_value_set(self, name, value, allow_overwrite=False):
        assert allow_overwrite or name not in self.said
        self.said[name] = value

    def blocking_key_value_get(self, name, milliseconds):
        if name in self.said:
            return self.said[name]
        time.sleep(milliseconds / 1000)
        self.waited += milliseconds
        raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: nobody said so")


def test_the_limit_is_for_all_missing_processes_together(monkeypatch):
    """Otherwise the others, which wait twice as long, would blame the one that waits for them."""
    store = SlowStore()
    monkeypatch.setattr(compat, "coordination_client", lambda: store)
    with pytest.raises(
        jda.errors.AgreementError, match="processes 1, 2, 3 and 4 more: did not come"
    ):
        check_agreement("train_step", {}, range(8), limit=1)
    assert 900 <= store.waited < 1100
    store.waited = 0
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    monkeypatch.setattr(waits, "_limit", 1.0)
    for _ in range(2):  # again, after it has failed
        with pytest.raises(jda.errors.AgreementError, match="processes 1, 2, 3: did not connect"):
            processes.say_to_all("planted", 0)
    assert 1900 <= store.waited < 2100
