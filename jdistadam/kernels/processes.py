"""Connects the processes of a host, so that their devices can copy among each other.

Processes find each other in the key-value store of ``jax.distributed``. Each one listens on a Unix
socket in a private directory, which it removes once all are connected, and accepts only its own
user. cuda/processes.h then owns the sockets. They end with the process, whatever ends it, and the
others notice. All processes of a run decide alike, from the same facts.

A process of the same user could read another one's memory anyway (by ptrace, where the system
allows it). Nobody else gets a descriptor of GPU memory: it is passed over these sockets only.
"""

from __future__ import annotations

import functools
import os
import pathlib
import shutil
import socket
import struct
import tempfile
from typing import Any, NamedTuple

import jax

import jdistadam
from jdistadam import compat
from jdistadam.errors import AgreementError
from jdistadam.kernels import native

LIMIT_SECONDS = 120
"""How long a process waits for the others to connect."""

GRACE_SECONDS = 30
"""A process that nothing else ends lives so long after another one has died."""

OF_PROCESSES = 1 << 32
"""Added to JAX's number of a device: the devices of a group belong to several processes."""


class Joined(NamedTuple):
    """The host of each process, by its index, and why they are not connected; "" if they are."""

    hosts: dict[int, str]
    why_not: str


@functools.cache
def join(platform: str) -> Joined:
    """Connects this process with all others of its host; call it in all processes of the run.

    Args:
      platform: "cpu" or "cuda".

    Raises:
      AgreementError: A process is missing.
    """
    if compat.coordination_client() is None:
        return Joined({}, "devices of several processes, without jax.distributed")
    folder = pathlib.Path(tempfile.mkdtemp(prefix="jdistadam-"))  # of this user alone
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(folder / "socket"))
            listener.listen(jax.process_count())
            facts = say_to_all(f"{platform}/facts", _facts(platform, folder))
            why, sockets = _why_apart(facts), dict[int, socket.socket]()
            if not why:
                why, sockets = _connected(platform, listener, facts)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    hosts = {i: said["host"] for i, said in facts.items()}
    if why:
        for connection in sockets.values():
            connection.close()
        return Joined(hosts, why)
    devices = [
        (OF_PROCESSES + number, process, ordinal)
        for process, said in facts.items()
        for number, ordinal in said["devices"]
    ]
    others = [(i, _pid_and_user(x)[0], x.detach()) for i, x in sorted(sockets.items())]
    native.module_of(platform).join_processes(jax.process_index(), devices, others, GRACE_SECONDS)
    return Joined(hosts, "")


def say_to_all(name: str, value: Any) -> dict[int, Any]:
    """Returns the value of every process; all call this with a name that is not used again."""
    store = compat.KeyValueStore(compat.coordination_client(), f"jdistadam/processes/{name}")
    store.put(str(jax.process_index()), value)
    found: dict[int, Any] = {}
    for process in range(jax.process_count()):
        found[process] = store.take(str(process), LIMIT_SECONDS)
        if found[process] is None:
            raise AgreementError(
                f"process {process}: did not connect for copies within {LIMIT_SECONDS} s: got no "
                "word, expected the same call of distributed in every process. "
                "Look into the log of that process: it has ended, or does something else."
            )
    return found


def _facts(platform: str, folder: pathlib.Path) -> dict[str, Any]:
    return {
        "host": pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "user": os.getuid(),
        "version": f"jdistadam {jdistadam.__version__}, {native.status(platform).detail}",
        "socket": str(folder / "socket"),
        "devices": [
            # As XLA numbers devices of this process: CPUs like those of all processes.
            (device.id, device.id if platform == "cpu" else device.local_hardware_id)
            for device in jax.local_devices(backend={"cuda": "gpu"}.get(platform, platform))
        ],
    }


def _why_apart(facts: dict[int, dict[str, Any]]) -> str:
    """Why processes of one host cannot connect; the same in each of them."""
    for i, said in facts.items():
        first = min(k for k, other in facts.items() if other["host"] == said["host"])
        for name in ("user", "version"):
            if said[name] != facts[first][name]:
                return f"another {name} in process {i} than in process {first}: {said[name]}"
    return ""


def _connected(
    platform: str, listener: socket.socket, facts: dict[int, dict[str, Any]]
) -> tuple[str, dict[int, socket.socket]]:
    """Why a process could not connect, the same in each of them, and this one's sockets."""
    sockets, failed = dict[int, socket.socket](), ""
    me, reaches = jax.process_index(), native.module_of(platform).reaches_process
    try:
        _connect(sockets, listener, facts)
        if not all(reaches(_pid_and_user(x)[0]) for x in sockets.values()):
            failed = f"a system that does not let process {me} write the memory of others"
    except OSError as error:
        failed = f"process {me} cannot reach others: {error}"
    said = say_to_all(f"{platform}/connected", failed)
    return next((x for x in said.values() if x), ""), sockets


def _connect(
    sockets: dict[int, socket.socket], listener: socket.socket, facts: dict[int, dict[str, Any]]
) -> None:
    """Adds a socket to each other process of this host: earlier ones listen to later ones."""
    me = jax.process_index()
    neighbors = {i for i, said in facts.items() if said["host"] == facts[me]["host"]} - {me}
    for i in sorted(x for x in neighbors if x < me):
        sockets[i] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sockets[i].settimeout(LIMIT_SECONDS)
        sockets[i].connect(facts[i]["socket"])
        sockets[i].sendall(struct.pack("i", me))
    listener.settimeout(LIMIT_SECONDS)
    while len(sockets) < len(neighbors):
        connection, _ = listener.accept()
        connection.settimeout(LIMIT_SECONDS)
        said = connection.recv(struct.calcsize("i"), socket.MSG_WAITALL)
        if _pid_and_user(connection)[1] != os.getuid() or len(said) < struct.calcsize("i"):
            connection.close()
        else:
            sockets[struct.unpack("i", said)[0]] = connection
    for connection in sockets.values():
        connection.setblocking(True)


def _pid_and_user(connection: socket.socket) -> tuple[int, int]:
    said = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, user, _ = struct.unpack("3i", said)
    return pid, user
