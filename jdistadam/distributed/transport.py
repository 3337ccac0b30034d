"""The transport, and how it is chosen: XLA's collectives, or copies between devices of one host.

An *exchange* sends the parts of a gradient to the devices that add and update them, a *gather*
sends new parameters to all. "peer" copies without a kernel (kernels/copies.py), so in
``train_step`` copies overlap the model (training/overlap.py). Each device then adds its parts
pairwise in float32, with the same bits as ``grad_reduce_dtype=float32`` over XLA.

    what                          over peer memory
    ----------------------------  -------------------------------------------------------
    devices                       of one host, along one shard axis; no model axes
    param_specs                   over no shard axis, and no function; "peer" allows both
    sharding_strategy             not "no_shard"
    grad_reduce_dtype             float32
    early_updates                 False, as by default, except with a state in host memory

Within such a step XLA communicates along replica axes. All such steps must be started from one
thread. Devices wait for each other in every step, so two threads whose programs reach two GPUs in
different orders would wait until the timeout.

Of parameters that ``param_specs`` cut over the shard axis nothing is sent: each device has its own.

All other steps use XLA. "auto" uses peer memory only on GPUs and only if all rows of this table
hold; "peer" raises if a row does not hold. Processes of one host connect first
(kernels/processes.py).
"""

from __future__ import annotations

import concurrent.futures
import functools
import hashlib
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from jdistadam.core.collectives import Axes
from jdistadam.core.precision import MixedPrecisionPolicy
from jdistadam.distributed.mesh_axes import DataParallel, why_split
from jdistadam.errors import PolicyError
from jdistadam.kernels import copies, native
from jdistadam.kernels.copies import Groups
from jdistadam.kernels.processes import OF_PROCESSES, join, leave, say_to_all

_REQUESTS = ("auto", "xla", "peer")
_SLOWEST_LINK = 60
"""GB/s. NVLink has 150 to 450, and the gain was measured there. PCIe has 25 (4.0 x16) to 55 (5.0
x16), which the GPUs of a host share: NCCL knows how, and copies between all pairs do not."""
T = TypeVar("T")
_TRIED: dict[Groups, tuple[str, float]] = {}  # between processes: why not, GB/s
_ALLOCATORS = ("default", "bfc", "platform")  # of XLA, whose memory a peer can open


class Transport(NamedTuple):
    """How gradients and parameters travel along some axes, and what follows for a step.

    Attributes:
      why_not_peer: Why it is not peer memory; "" if it is.
      axes: The axes along which devices copy. XLA sends along all others.
      groups: Of the devices along these axes, which copy among each other; none over XLA.
    """

    why_not_peer: str
    axes: Axes = ()
    groups: Groups = ()

    @property
    def is_peer(self) -> bool:
        """Whether devices copy: in equal programs, without rules for ``jax.vmap``.

        A gradient then arrives in parts, which a kernel adds later, with tiles of a norm. And
        ``train_step`` lets copies overlap products and updates; otherwise XLA does.
        """
        return bool(self.groups)

    @property
    def name(self) -> str:
        """Returns "xla": by its collectives; or "peer": by copies from memory to memory."""
        return "peer" if self.is_peer else "xla"

    def groups_along(self, axes: Axes) -> Groups:
        """Returns the groups of devices along axes; none if XLA sends along them."""
        return self.groups if axes == self.axes else ()

    def __str__(self) -> str:
        """Returns the name, and why it is not peer memory."""
        return f"{self.name} ({self.why_not_peer})" if self.why_not_peer else self.name


OVER_XLA = Transport('communication="xla"')
_TO_PLAN = 'communication="peer" plans for GPUs'


def choose_transport(
    requested: Any,
    parallel: DataParallel,
    policy: MixedPrecisionPolicy,
    *,
    updates_early: bool = False,
    param_specs: Any = None,
) -> Transport:
    """Chooses the transport of a step.

    Args:
      requested: "auto", "xla" or "peer".
      parallel: The axes and the strategy.
      policy: The dtypes that are stored and sent.
      updates_early: Whether updates run during the backward pass.
      param_specs: The argument of the optimizer with this name.

    Raises:
      PolicyError: ``requested`` is none of these, or is "peer" but not supported.
    """
    if requested not in _REQUESTS:
        expected = " or ".join(map(repr, _REQUESTS))
        raise PolicyError(
            f"communication: unknown: got {requested!r}, expected {expected}. "
            "Leave it out, or pass one of these."
        )
    if requested == "xla":
        return OVER_XLA
    reasons = [*_obstacles(parallel, policy)]
    if updates_early:
        reasons.insert(0, "updates during the backward pass")
    if requested == "auto" and (why := why_split(parallel, param_specs)):
        reasons.append(why)
    if not reasons:
        reasons += _obstacles_of_devices(parallel, is_asked_for=requested == "peer")
    if not reasons and len({_process_of(x) for x in parallel.mesh.devices.flat}) > 1:
        why = _why_processes_are_apart(parallel, is_asked_for=requested == "peer")
        reasons += [why] if why else []
    if not reasons:
        axes = parallel.shard_axes
        return Transport("", axes, _groups_along(parallel.mesh, axes))
    if requested == "peer":
        raise PolicyError(
            "communication: a step over peer memory is not supported here: "
            f"got {reasons[0]}, expected sharded state, float32 sums and no early updates, over "
            "one axis of several devices of one host, without model axes. "
            'Pass communication="auto", which uses collectives here, or change the setting.'
        )
    return Transport(reasons[0])


def _obstacles(parallel: DataParallel, policy: MixedPrecisionPolicy) -> Iterator[str]:
    """The rows of the module's table that do not hold."""
    if parallel.strategy == "no_shard":
        yield f"sharding_strategy {parallel.strategy!r}"
    if parallel.tensor_axes:
        yield f"a mesh with axes {', '.join(parallel.mesh.axis_names)}"
    if len(parallel.shard_axes) > 1:
        yield f"shard axes {', '.join(parallel.shard_axes)}"
    if parallel.size(parallel.shard_axes) == 1:
        yield "1 device"
    if policy.grad_reduce_dtype != np.float32:
        yield f"grad_reduce_dtype={policy.grad_reduce_dtype}"


def _obstacles_of_devices(parallel: DataParallel, *, is_asked_for: bool) -> Iterator[str]:
    """Why peer memory is not used on these devices; fewer reasons if it is requested."""
    mesh, axes = parallel.mesh, parallel.shard_axes
    devices = list(mesh.devices.flat)
    if not hasattr(devices[0], "platform"):  # numbers, from the command `plan`
        if not is_asked_for:
            yield f"the devices do not exist; {_TO_PLAN}"
        return
    platform = native.platform_of(devices[0].platform)
    if not native.status(platform).available:
        yield f"no compiled kernels: {native.status(platform).detail}"
    elif platform != "cuda":
        if not is_asked_for:  # CPU devices share memory anyway: no gain
            yield f"platform {platform}; {_TO_PLAN}"
    elif len({device.process_index for device in devices}) > 1:
        return
    elif not all(map(_is_here, devices)):
        if not is_asked_for:  # programs can be compiled for GPUs of another machine
            yield "devices that this process does not have"
    elif why := (
        why_gpus_are_apart(devices)
        or _why_links_fail(devices, is_asked_for)
        or _attempt(mesh, axes, _groups_along(mesh, axes))[0]
    ):
        yield why


def _why_processes_are_apart(parallel: DataParallel, *, is_asked_for: bool) -> str:
    """Why devices of several processes do not copy among each other; "" if they do.

    It connects the processes and tries a copy, so all must call it; all get the same result.
    """
    mesh = parallel.mesh
    if not all(map(_exists, mesh.devices.flat)):
        return "devices that no process has"
    if len({device.process_index for device in mesh.devices.flat}) < jax.process_count():
        return "devices of some of the processes"
    joined = join(native.platform_of(mesh.devices.flat[0].platform))
    if joined.why_not:
        return joined.why_not
    hosts = np.vectorize(lambda device: joined.hosts[device.process_index])(mesh.devices)
    along = _moved_last(mesh, parallel.shard_axes, hosts)
    if any(len(set(group)) > 1 for group in along):
        return f"devices of several hosts along {', '.join(parallel.shard_axes)}"
    why, speed = _tried_copies(mesh, parallel.shard_axes)
    if not why and not is_asked_for and speed < _SLOWEST_LINK:
        return f"{speed:.0f} GB/s between processes, less than {_SLOWEST_LINK}"
    return why


def _tried_copies(mesh: Any, axes: Axes) -> tuple[str, float]:
    """Why copies along axes fail, and the GB/s that the slowest process sends from a device."""
    groups = _groups_along(mesh, axes)
    if groups not in _TRIED:
        _TRIED[groups] = _try_copies(mesh, axes, groups)
    return _TRIED[groups]


@functools.cache  # others may not compile again
def _trial(mesh: Any, axes: Axes, groups: Groups) -> tuple[Callable[[], tuple[str, float]], str]:
    """What tries a copy, and why it does not compile; "" if it does."""
    try:
        return _elsewhere(lambda: copies.compiled_trial(mesh, axes, groups)), ""
    except Exception as error:  # whatever it is: the others wait for word
        why = f"copies between devices do not compile: {error}"
        return lambda: (why, 0.0), why


@functools.cache  # others may not try again
def _attempt(mesh: Any, axes: Axes, groups: Groups) -> tuple[str, float]:
    return _elsewhere(_trial(mesh, axes, groups)[0])


def _elsewhere(run: Callable[[], T]) -> T:
    """Runs in a thread of its own: the caller may be inside of jit, or under another mesh."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


def _try_copies(mesh: Any, axes: Axes, groups: Groups) -> tuple[str, float]:
    platform = native.platform_of(mesh.devices.flat[0].platform)
    is_first = all(why for why, _ in _TRIED.values())  # no copies need the connections
    name = f"copies/{hashlib.sha256(repr(groups).encode()).hexdigest()}"
    _, why = _trial(mesh, axes, groups)
    why = next(filter(None, say_to_all(f"{name}/compiled", why, limits=2).values()), "")
    speed = 0.0
    if not why:
        why, speed = _attempt(mesh, axes, groups)
        if why and is_first:  # others may wait for the copies of this process
            leave(platform, why)
        said = say_to_all(name, (why, speed), limits=2).values()  # others may wait for copies
        # Those that only heard of a failure say so, too.
        why = min((why for why, _ in said if why), key=len, default="")
        speed = min(speed for _, speed in said)
    if why and is_first:
        leave(platform, why)
    return why, speed


def _why_links_fail(devices: Sequence[Any], is_asked_for: bool) -> str:
    """Why copies between these GPUs of this process are wrong or too slow; "" if they are not."""
    for one, other in itertools.permutations(map(local_number, devices), 2):
        speed = native.link_speed(one, other)
        if speed < 0:
            return f"copies from GPU {one} to {other} that bring other values"
        if 0 < speed < _SLOWEST_LINK and not is_asked_for:  # 0: it could not be measured
            return f"{speed:.0f} GB/s from GPU {one} to {other}, less than {_SLOWEST_LINK}"
    return ""


def _is_here(device: Any) -> bool:
    """Whether a device belongs to this process."""
    return _exists(device) and device.process_index == jax.process_index()


def _exists(device: Any) -> bool:
    """Whether a process of this run has a device; programs are compiled for others, too."""
    try:
        return device in jax.devices(device.platform)
    except RuntimeError:  # JAX has no such platform here
        return False


def why_gpus_are_apart(devices: Sequence[Any]) -> str:
    """Returns why these GPUs of this process cannot reach each other's memory; "" if they can."""
    setting, allocator = _allocator()
    if allocator not in _ALLOCATORS:
        return f"{setting}{allocator}, whose memory peers do not reach"
    reached = native.reachable_peers()
    ordinals = [local_number(device) for device in devices]
    for one, other in itertools.permutations(ordinals, 2):
        if not reached(one, other):
            return f"GPU {one} cannot reach the memory of GPU {other}"
    return ""


def _allocator() -> tuple[str, str]:
    """The setting that selects the allocator of GPUs, and its value; options of a client win."""
    options = getattr(jax.config, "jax_pjrt_client_create_options", None) or {}
    if isinstance(options, str):
        options = dict(option.split(":", 1) for option in options.split(";") if ":" in option)
    if "allocator" in options:
        return "jax_pjrt_client_create_options=allocator:", str(options["allocator"]).lower()
    value = os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default")
    return "XLA_PYTHON_CLIENT_ALLOCATOR=", value.lower()


@functools.cache
def _groups_along(mesh: Any, axes: Axes) -> Groups:
    """The devices along axes, for all places along others."""
    number = local_number
    if len({_process_of(device) for device in mesh.devices.flat}) > 1:
        number = lambda device: OF_PROCESSES + device.id  # noqa: E731
    numbers = np.vectorize(number, otypes=[int])(mesh.devices)
    return tuple(map(tuple, _moved_last(mesh, axes, numbers)))


def _moved_last(mesh: Any, axes: Axes, values: Any) -> list[list[Any]]:
    """What belongs to the devices of a mesh, as a row for each place along other axes."""
    last = [mesh.axis_names.index(axis) for axis in axes]
    moved = np.moveaxis(values, last, range(-len(last), 0))
    return moved.reshape(-1, math.prod(mesh.shape[x] for x in axes)).tolist()


def _process_of(device: Any) -> int:
    """The process of a device; 0 for a number, from the command `plan`."""
    process: int = getattr(device, "process_index", 0)
    return process


def local_number(device: Any) -> int:
    """The number of a device within its process; for a nonexistent device, its id."""
    ordinal = getattr(device, "local_hardware_id", None)
    if ordinal is None or ordinal < 0:
        ordinal = getattr(device, "id", device)  # a number, from the command `plan`
    return ordinal
