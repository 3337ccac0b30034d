"""Connects the processes of a host, so that their devices can copy among each other.

Processes find each other in the key-value store of ``jax.distributed``. Each one listens on a Unix
socket in Linux's abstract namespace, which needs no file, and each end accepts only its own user.
cuda/processes.h then owns the sockets. They end with the process, whatever ends it, and the others
notice. All processes of a run decide alike, from the same facts, at every step on the way: if one
of them cannot go on, all use XLA's collectives, for the same reason.

A process of the same user could read another one's memory anyway (by ptrace, where the system
allows it). Nobody else gets a descriptor of GPU memory: it is passed over these sockets only.
"""

from __future__ import annotations

import functools
import itertools
import os
import pathlib
import secrets
import socket
import struct
from typing import Any, NamedTuple

import jax

import jdistadam
from jdistadam import compat
from jdistadam.core import waits
from jdistadam.errors import AgreementError
from jdistadam.kernels import native

GRACE_SECONDS = 30
"""A process ends itself after its GPU has waited so long for a process that has died."""

OF_PROCESSES = 1 << 32
"""Added to JAX's number of a device: the devices of a group belong to several processes."""

_SOCKET_SECONDS = 10
"""How long a socket of a process that has already connected may take."""


class Joined(NamedTuple):
    """The host of each process, by its index, and why they are not connected; "" if they are."""

    hosts: dict[int, str]
    why_not: str


_JOINED: dict[str, Joined] = {}  # by platform


def join(platform: str) -> Joined:
    """Connects this process with all others of its host; call it in all processes of the run.

    If a process is missing, a later call goes on where this one stopped.

    Args:
      platform: "cpu" or "cuda".

    Raises:
      AgreementError: A process is missing.
    """
    if compat.coordination_client() is None:
        return Joined({}, "devices of several processes, without jax.distributed")
    if platform not in _JOINED:
        _JOINED[platform] = _joined(platform)
        _listener(platform).close()
    return _JOINED[platform]


def leave(platform: str, why: str) -> None:
    """Closes the connections of this process; those that wait for its copies hear why."""
    native.module_of(platform).leave_processes(why)
    _JOINED[platform] = _JOINED[platform]._replace(why_not=why)


def _joined(platform: str) -> Joined:
    facts = say_to_all(f"{platform}/facts", _facts(platform))
    hosts = {i: said["host"] for i, said in facts.items()}
    if why := _why_apart(facts):
        return Joined(hosts, why)
    me = jax.process_index()
    neighbors = {i for i in hosts if hosts[i] == hosts[me]} - {me}
    before = sorted(i for i in neighbors if i < me)
    connections, failed = _connected(platform, tuple(facts[i]["socket"] for i in before))
    sockets = dict(zip(before, connections, strict=False))
    why = _first(say_to_all(f"{platform}/connected", failed))
    if not why:
        failed = _accept(_listener(platform), neighbors, sockets)
        failed = failed or _why_unreachable(platform, facts, sockets)
        why = _first(say_to_all(f"{platform}/reached", failed))
    if why:
        for connection in sockets.values():
            connection.close()
        return Joined(hosts, why)
    devices = [
        (OF_PROCESSES + number, process, ordinal)
        for process, said in facts.items()
        for number, ordinal, _ in said["devices"]
    ]
    others = [(i, _pid_and_user(x)[0], x.detach()) for i, x in sorted(sockets.items())]
    native.module_of(platform).join_processes(me, devices, others, GRACE_SECONDS)
    return Joined(hosts, "")


def say_to_all(name: str, value: Any, limits: int = 1) -> dict[int, Any]:
    """Returns the value of every process; all call this with a name for one value of each.

    It waits as long as ``limits`` waits of another process may take.

    Raises:
      AgreementError: A process says nothing.
    """
    store = compat.KeyValueStore(compat.coordination_client(), f"jdistadam/processes/{name}")
    store.put(str(jax.process_index()), value)
    values = store.take_all(map(str, range(jax.process_count())), limits * waits.wait_limit())
    missing = [process for process, said in values.items() if said is None]
    if missing:
        raise AgreementError(
            f"process{'es' if len(missing) > 1 else ''} {', '.join(missing)}: did not connect for "
            f"copies within {limits * waits.wait_limit():g} s: got no word, expected the same call "
            "of distributed in every process. Look into the log of that process: it has ended, or "
            "does something else."
        )
    return {int(process): said for process, said in values.items()}


def _first(said: dict[int, str]) -> str:
    """The first reason that a process has given."""
    return next(filter(None, said.values()), "")


@functools.cache
def _listener(platform: str) -> socket.socket:
    """Where others connect to this process for a platform's devices."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0jdistadam-{platform}-{secrets.token_hex(16)}")
    listener.listen(jax.process_count())
    return listener


def _facts(platform: str) -> dict[str, Any]:
    name_of = native.module_of(platform).name_of_device
    return {
        "host": pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "user": os.getuid(),
        "version": f"jdistadam {jdistadam.__version__}, {native.status(platform).detail}",
        "PID namespace": _namespace("pid"),  # CUDA passes events by process and shared memory
        "IPC namespace": _namespace("ipc"),
        "/dev/shm": _shared_memory(),
        "socket": _listener(platform).getsockname().decode(),
        "devices": [
            # As XLA numbers devices of this process: CPUs like those of all processes.
            (device.id, number, name_of(number))
            for device in jax.local_devices(backend=native.name_in_jax(platform))
            for number in [device.id if platform == "cpu" else device.local_hardware_id]
        ],
    }


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError as error:  # as where /proc is that of another namespace
        return f"unknown: {error} in a process that is {os.getpid()}"


def _shared_memory() -> str:
    try:
        folder = os.stat("/dev/shm")
    except OSError as error:
        return f"unknown: {error}"
    return f"folder {folder.st_ino} of device {folder.st_dev}"


def _why_apart(facts: dict[int, dict[str, Any]]) -> str:
    """Why processes of one host cannot connect; the same in each of them."""
    for i, said in facts.items():
        first = min(k for k, other in facts.items() if other["host"] == said["host"])
        for name in ("user", "version", "PID namespace", "IPC namespace", "/dev/shm"):
            if said[name] != facts[first][name]:
                return f"another {name} in process {i} than in process {first}: {said[name]}"
    return ""


@functools.cache
def _connected(platform: str, names: tuple[str, ...]) -> tuple[list[socket.socket], str]:
    """Sockets to the first processes of a host, which listen on these names; why there are none."""
    me, sockets = jax.process_index(), list[socket.socket]()
    try:
        for name in names:
            sockets.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            sockets[-1].settimeout(_SOCKET_SECONDS)
            sockets[-1].connect(name)
            if _pid_and_user(sockets[-1])[1] != os.getuid():
                return sockets, f"process {me} was answered by another user"
            sockets[-1].sendall(struct.pack("i", me))
            sockets[-1].setblocking(True)
    except OSError as error:
        return sockets, f"process {me} cannot reach others of its host: {error}"
    return sockets, ""


def _accept(listener: socket.socket, neighbors: set[int], sockets: dict[int, socket.socket]) -> str:
    """Adds the sockets of later processes, all of which have connected; why some are missing."""
    listener.settimeout(_SOCKET_SECONDS)
    try:
        while sockets.keys() != neighbors:
            connection, _ = listener.accept()
            connection.settimeout(_SOCKET_SECONDS)
            is_ours = _pid_and_user(connection)[1] == os.getuid()
            said = connection.recv(struct.calcsize("i"), socket.MSG_WAITALL) if is_ours else b""
            if len(said) == struct.calcsize("i"):
                connection.setblocking(True)
                sockets[struct.unpack("i", said)[0]] = connection
            else:
                connection.close()
    except OSError as error:
        return f"process {jax.process_index()} cannot reach others of its host: {error}"
    return ""


def _why_unreachable(
    platform: str, facts: dict[int, dict[str, Any]], sockets: dict[int, socket.socket]
) -> str:
    """Why devices of this process cannot write the memory of others; "" if it seems they can."""
    module, me = native.module_of(platform), jax.process_index()
    for process, connection in sockets.items():
        if not module.reaches_process(_pid_and_user(connection)[0]):
            return f"a system that does not let process {me} write the memory of others"
        for mine, other in itertools.product(facts[me]["devices"], facts[process]["devices"]):
            if not module.reaches_device(mine[1], other[2]):
                return f"device {mine[0]} cannot reach the memory of device {other[0]}"
    return ""


def _pid_and_user(connection: socket.socket) -> tuple[int, int]:
    said = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, user, _ = struct.unpack("3i", said)
    return pid, user
