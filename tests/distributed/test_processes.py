"""Several processes, each with some of the devices, compute the bits of one process with all."""

import os
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from support.paths import TESTS, environment

SCRIPT = TESTS / "support" / "one_of_many_processes.py"


def final_state(tmp_path, count, strategy, platform="cpu", total=8):
    """Runs so many processes on all devices together; the bits of every leaf at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    out = tmp_path / f"{count}.npz"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").split(",")
    env = environment(
        JAX_PLATFORMS="cpu" if platform == "cpu" else "cuda,cpu",
        XLA_PYTHON_CLIENT_PREALLOCATE="false",  # the process of the tests holds most of a GPU
        CUDA_VISIBLE_DEVICES=",".join(visible[:total]),
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-P", SCRIPT, platform, str(total), str(i), str(count), str(port), strategy, out],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for i in range(count)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=300)[0] for process in running]
    for process, output in zip(running, outputs, strict=True):
        assert process.returncode == 0, output[-4000:]
    return [*np.load(out).values()]


@pytest.mark.parametrize(
    "strategy", [pytest.param("optim", marks=pytest.mark.slow), "optim_grads_params"]
)
def test_two_processes_give_the_bits_of_one(tmp_path, strategy):
    """Ten steps on 2 x 4 devices: each process feeds its own half of the batch."""
    one, two = (final_state(tmp_path, count, strategy) for count in (1, 2))
    assert_same(one, two)


@pytest.mark.multigpu
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_one_process_for_each_gpu_gives_the_bits_of_one(tmp_path, strategy):
    """Ten steps on 2 x 2 GPUs, or on two, over NCCL."""
    found = len(jax.devices("gpu"))
    if found < 2:
        pytest.skip(f"needs two GPUs, found {found}")
    total = 4 if found >= 4 else 2
    one, many = (final_state(tmp_path, n, strategy, "gpu", total) for n in (1, total))
    assert_same(one, many)


def assert_same(one, several):
    assert len(one) == len(several) > 10
    for a, b in zip(one, several, strict=True):
        np.testing.assert_array_equal(a, b)
