"""Several processes, each with some of the devices, compute the bits of one process with all."""

import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

TESTS = pathlib.Path(__file__).parent


def final_state(tmp_path, count, strategy):
    """Runs so many processes on eight CPU devices together; the bits of every leaf at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    out = tmp_path / f"{count}.npz"
    running = [
        subprocess.Popen(
            [sys.executable, TESTS / "one_of_many_processes.py", str(i), str(count), str(port), strategy, out],
            env=os.environ | {"JAX_PLATFORMS": "cpu"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
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
    assert len(one) == len(two) > 10
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a, b)
