"""The transport: XLA's collectives, or copies between the memory of devices of one host.

An *exchange* sends the parts of a gradient to the devices that add and update them, a *gather*
sends new parameters to all. "peer" copies without a kernel (kernels/copies.py), so in
``train_step`` copies overlap the model (training/overlap.py). Each device then adds its parts
pairwise in float32, with the same bits as ``grad_reduce_dtype=float32`` over XLA.

    what                          over peer memory
    ----------------------------  -------------------------------------------------------
    devices                       of one host, along one shard axis; no model axes
    param_specs                   over no shard axis
    sharding_strategy             not "no_shard"
    grad_reduce_dtype             float32
    early_updates                 False, as by default, except with a state in host memory

Within such a step XLA communicates along replica axes. All such steps must be started from one
thread. Devices wait for each other in every step, so two threads whose programs reach two GPUs in
different orders would wait until the timeout.

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
import jax.numpy as jnp
import numpy as np

from jdistadam.core import collectives
from jdistadam.core.collectives import Axes
from jdistadam.core.precision import MixedPrecisionPolicy
from jdistadam.distributed.mesh_axes import DataParallel, why_split
from jdistadam.distributed.schedule import BucketSchedule, Phase
from jdistadam.errors import PolicyError
from jdistadam.kernels import copies, multi_tensor, native
from jdistadam.kernels.copies import Groups
from jdistadam.kernels.parts import Cut, Parts, sum_parts
from jdistadam.kernels.processes import OF_PROCESSES, join, leave, say_to_all

_REQUESTS = ("auto", "xla", "peer")
_SLOWEST_LINK = 60
"""GB/s. NVLink has 150 to 450, and the gain was measured there. PCIe has 25 (4.0 x16) to 55 (5.0
x16), which the GPUs of a host share: NCCL knows how, and copies between all pairs do not."""
T = TypeVar("T")
_TRIED: dict[Groups, tuple[str, float]] = {}  # between processes: why not, GB/s
_ALLOCATORS = ("default", "bfc", "platform")  # of XLA, whose memory a peer can open


class Communication(NamedTuple):
    """The chosen transport, and why it is not peer memory; "" if it is."""

    transport: str
    why_not_peer: str

    @property
    def is_peer(self) -> bool:
        """Whether a step goes over peer memory."""
        return self.transport == "peer"

    def __str__(self) -> str:
        """Returns the transport, and why it is not peer memory."""
        return f"{self.transport} ({self.why_not_peer})" if self.why_not_peer else self.transport


OVER_XLA = Communication("xla", 'communication="xla"')
_TO_PLAN = 'communication="peer" plans for GPUs'


def choose_communication(
    requested: Any,
    parallel: DataParallel,
    policy: MixedPrecisionPolicy,
    *,
    updates_early: bool = False,
    param_specs: Any = None,
) -> Communication:
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
    reasons += [why] if (why := why_split(parallel, param_specs)) else []
    if not reasons:
        reasons += _obstacles_of_devices(parallel, is_asked_for=requested == "peer")
    if not reasons and len({_process_of(x) for x in parallel.mesh.devices.flat}) > 1:
        why = _why_processes_are_apart(parallel, is_asked_for=requested == "peer")
        reasons += [why] if why else []
    if not reasons:
        return Communication("peer", "")
    if requested == "peer":
        raise PolicyError(
            "communication: a step over peer memory is not supported here: "
            f"got {reasons[0]}, expected sharded state, float32 sums and no early updates, over "
            "one axis of several devices of one host, without model axes. "
            'Pass communication="auto", which uses collectives here, or change the setting.'
        )
    return Communication("xla", reasons[0])


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
        yield f"grad_reduce_dtype {policy.grad_reduce_dtype}"


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


def groups_of(communication: Communication, parallel: DataParallel, axes: Axes) -> Groups:
    """Returns the devices along axes, for all places along others; none if XLA sends along them."""
    if not communication.is_peer or axes != parallel.shard_axes:
        return ()
    return _groups_along(parallel.mesh, axes)


@functools.cache
def _groups_along(mesh: Any, axes: Axes) -> Groups:
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


def sum_gradients(phases: Sequence[Phase], x: jax.Array, dim: int) -> jax.Array:
    """Sums a bucket's gradient over devices, phase by phase.

    Args:
      phases: The remaining "reduce" and "reduce_outer" phases.
      x: This device's contribution, or its part of a partial sum.
      dim: The dimension along which the sum is cut, if each device keeps a part.

    Returns:
      The sum, or this device's part of it.
    """
    for phase in phases:
        x = _sum_phase(phase, x, dim) if phase else x
    return x


def exchanged_parts(phases: Sequence[Phase], x: jax.Array, dim: int) -> Parts | None:
    """Exchanges a bucket's gradient without adding its parts; None if XLA sends it, or nothing is.

    Args:
      phases: As in ``sum_gradients``.
      x: This device's gradient.
      dim: The dimension along which the sum is cut.
    """
    sent = [phase for phase in phases if phase]
    return _exchanged(sent[0], x, dim) if len(sent) == 1 and sent[0][0].groups else None


def _exchanged(phase: Phase, x: jax.Array, dim: int) -> Parts:
    (exchange,) = phase
    length = x.shape[dim] // exchange.devices
    part = (*x.shape[:dim], length, *x.shape[dim + 1 :])
    # The reshape keeps XLA from adding what is not rounded yet.
    apart = x.reshape((*x.shape[:dim], exchange.devices, length, *x.shape[dim + 1 :]))
    own = collectives.keep_cast(apart, exchange.dtype).reshape(x.shape)
    with jax.named_scope(exchange.name):
        received = copies.exchange(own, dim=dim, groups=exchange.groups)
    return Parts(own, received, Cut(part, dim, exchange.groups))


def _sum_phase(phase: Phase, x: jax.Array, dim: int) -> jax.Array:
    first, last = phase[0], phase[-1]
    if first.op == "all-reduce":
        return collectives.all_reduce(collectives.round_to(x, first.dtype), first.axes)
    if first.op == "reduce-scatter":
        return collectives.reduce_scatter(x, first.axes, dim=dim, comm_dtype=first.dtype)
    if last.op != "all-gather":
        return _exchange_and_sum(phase, x, dim)
    # The same sums on all devices: each sums a part of the array, then they gather the parts.
    flat = jnp.pad(x.reshape(-1), (0, -x.size % last.devices))
    part = _exchange_and_sum(phase[:-1], flat, 0)
    return collectives.all_gather(part, last.axes, dim=0)[: x.size].reshape(x.shape)


def _exchange_and_sum(exchanges: Phase, x: jax.Array, dim: int) -> jax.Array:
    """Returns this device's part of the sum, added pairwise in float32 along one axis at a time.

    Contributions are rounded once to the dtype of the first exchange; partial sums stay float32.
    """
    if exchanges[0].groups:
        return sum_parts([_exchanged(exchanges, x, dim)]).sums[0]
    sizes = [c.devices for c in reversed(exchanges)]  # in the order of the axes, outermost first
    part = x.shape[dim] // math.prod(sizes)
    shape = (*x.shape[:dim], *sizes, part, *x.shape[dim + 1 :])
    x = collectives.keep_cast(x.reshape(shape), exchanges[0].dtype)
    for position, exchange in zip(reversed(range(len(sizes))), exchanges, strict=True):
        received = collectives.all_to_all(x, *exchange.axes, dim=dim + position)
        (x,) = multi_tensor.sum_contributions([received])
    return x


def gathered_params(
    parallel: DataParallel, entry: BucketSchedule, new: jax.Array, is_whole: bool = False
) -> jax.Array:
    """Returns a bucket's new parameters in the form that devices hold between steps.

    Args:
      parallel: The axes.
      entry: Its schedule.
      new: This device's shard of them.
      is_whole: Whether ``new`` has the shape of all, of which the shard is written.
    """
    bucket = entry.bucket
    if is_whole:
        (gather,) = entry.after_update
        with jax.named_scope(gather.name):
            return copies.gather_in_place(new, dim=bucket.cut_dim, groups=gather.groups)
    new = gather_parameters(entry.after_update, new, bucket.cut_dim)
    equal = tuple(axis for axis in parallel.tensor_axes if axis not in bucket.tensor_axes)
    return collectives.to_invariant(new, equal)


def gather_parameters(phase: Phase, shard: jax.Array, dim: int, to: str = "invarying") -> jax.Array:
    """Concatenates parameter shards along ``dim``, as a phase specifies.

    They are sent in ``param_comm_dtype``; received shards and the device's own are rounded to it.

    Args:
      phase: All-gathers, least significant axis first: each completes the input of the next.
      shard: This device's shard.
      dim: The dimension along which it was cut.
      to: "varying" if the result's type must say that it may differ between devices.
    """
    whole = shard
    for gather in phase:
        whole = collectives.round_to(whole, gather.dtype)
        if gather.groups:
            with jax.named_scope(gather.name):
                whole = copies.gather(whole, dim=dim, groups=gather.groups, to=to)
        else:
            whole = collectives.all_gather(whole, gather.axes, dim=dim, to=to)
    return whole.astype(shard.dtype)
