"""One process of several: how they find each other, and a launcher for those of one machine."""

import re
import socket
import subprocess
import sys

import jax


def join(place: str, total_devices: int | None) -> None:
    """Connects this process to the others; call it before anything else of JAX.

    Args:
      place: "INDEX/COUNT@ADDRESS" as ``launch`` gives it; "auto": JAX asks SLURM, Open MPI,
        Kubernetes or whoever started it.
      total_devices: CPU devices of all processes together, where there is no GPU.
    """
    if place == "auto":
        jax.distributed.initialize()
        return
    found = re.fullmatch(r"(\d+)/(\d+)@(\S+:\d+)", place)
    if not found:
        raise SystemExit(f"--distributed: got {place!r}, expected INDEX/COUNT@ADDRESS:PORT")
    index, count, address = int(found[1]), int(found[2]), found[3]
    jax.config.update("jax_num_cpu_devices", max(1, (total_devices or 8) // count))
    # With GPUs, one for each process.
    jax.distributed.initialize(address, count, index, local_device_ids=[index])


def launch(count: int, argv: list[str]) -> int:
    """Runs so many of this command on this machine; returns the first exit code that is not 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, *argv, "--distributed"]
    running = [subprocess.Popen([*command, f"{i}/{count}@{address}"]) for i in range(count)]
    codes: dict[int, int] = {}
    while len(codes) < count:
        for i, process in enumerate(running):
            if i not in codes:
                try:
                    codes[i] = process.wait(timeout=0.2)
                except subprocess.TimeoutExpired:
                    continue
                if codes[i] != 0:  # the others would wait for it for minutes
                    for other in running:
                        other.terminate()
    return next((code for code in codes.values() if code), 0)


def is_first() -> bool:
    """Whether this process writes the results."""
    return jax.process_index() == 0
