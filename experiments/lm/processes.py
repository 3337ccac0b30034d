"""One process of several: how they find each other, and a launcher for one machine."""

import os
import re
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
from jax.experimental import multihost_utils

TRY_AGAIN = 75
"""Exit code of a run that saved after a request to end: EX_TEMPFAIL of sysexits.h."""


GRACE_SECONDS = 10
"""How long processes may continue after one of them has failed, to say why."""


class StopSignal:
    """Whether SIGTERM has asked this run to end; equal on all processes."""

    def __init__(self) -> None:
        self._is_set = False
        if jax.process_count() == 1:  # otherwise jax.distributed.initialize listens
            signal.signal(signal.SIGTERM, self._set)

    def is_set(self, step: int) -> bool:
        """Whether to end after this step."""
        if jax.process_count() > 1:
            return bool(multihost_utils.reached_preemption_sync_point(step))
        return self._is_set

    def _set(self, number: int, frame: object) -> None:
        self._is_set = True


def join(place: str, total_devices: int | None) -> None:
    """Connects this process to the others; call it before anything else of JAX.

    Args:
      place: "INDEX/COUNT@ADDRESS" as ``launch`` gives it; "auto": JAX asks SLURM, Open MPI,
        Kubernetes or another launcher.
      total_devices: Devices of all processes together; default: 8 CPU devices, or a GPU for each.
    """
    if place == "auto":
        jax.distributed.initialize()
        return
    found = re.fullmatch(r"(\d+)/(\d+)@(\S+:\d+)", place)
    if not found:
        raise SystemExit(f"--distributed: got {place!r}, expected INDEX/COUNT@ADDRESS:PORT")
    index, count, address = int(found[1]), int(found[2]), found[3]
    jax.config.update("jax_num_cpu_devices", max(1, (total_devices or 8) // count))
    each = max(1, (total_devices or count) // count)  # GPUs of a process
    mine = list(range(index * each, (index + 1) * each))
    jax.distributed.initialize(address, count, index, local_device_ids=mine)


def launch(count: int, argv: list[str]) -> int:
    """Runs ``count`` copies of this command here; returns the first nonzero exit code."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, *argv, "--distributed"]
    running = [subprocess.Popen([*command, f"{i}/{count}@{address}"]) for i in range(count)]
    # When asked to end, it asks them, and waits while they save.
    signal.signal(signal.SIGTERM, lambda *_: [os.kill(x.pid, signal.SIGTERM) for x in running])
    codes: dict[int, int] = {}
    kill_at = float("inf")
    while len(codes) < count:
        if time.monotonic() > kill_at:
            for process in running:
                process.kill()
        for i, process in enumerate(running):
            if i not in codes:
                try:
                    codes[i] = process.wait(timeout=0.2)
                except subprocess.TimeoutExpired:
                    continue
                if codes[i] not in (0, TRY_AGAIN):
                    # The others wait for it in a collective and cannot save either: JAX notices
                    # after more than a minute, and does not end by SIGTERM before.
                    kill_at = min(kill_at, time.monotonic() + GRACE_SECONDS)
    return next((code for code in codes.values() if code), 0)


def is_first() -> bool:
    """Whether this process writes the results."""
    return jax.process_index() == 0


def meet(name: str) -> None:
    """Waits for all devices of all processes."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def of_first(value: float) -> float:
    """The first process's value, on all processes."""
    if jax.process_count() == 1:
        return value
    return float(multihost_utils.broadcast_one_to_all(np.float64(value)))


def of_all(values: list[float]) -> list[list[float]]:
    """The values of each process."""
    if jax.process_count() == 1:
        return [values]
    return np.asarray(multihost_utils.process_allgather(np.asarray(values))).tolist()
