"""By which means bytes move between devices: XLA's collectives, or peer memory.

Over peer memory a device reads the gradients of all others where they are, and writes new
parameters into their arrays, in one kernel with the update: nothing is packed, sent or received.
The sum is that of ``grad_reduce_dtype=float32`` over XLA, bit for bit.

    what                          over peer memory
    ----------------------------  -------------------------------------------------------
    devices                       2, 4 or 8 of one process, along one axis of the mesh
    sharding_strategy             "optim", without replica_axis and tensor axes
    grad_reduce_dtype             float32
    main_params_dtype             float32
    param_comm_dtype              None

Such steps must be started from one thread: devices wait for each other in every one, so two threads
whose programs reach two GPUs in different orders would wait until the limit (kernels/peer.py).

All else goes over XLA. "auto" decides by this table, and on GPUs alone, never by a timing; "peer"
raises where the table says no.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jdistadam.core.algorithm import Algorithm
from jdistadam.core.codecs import FLOAT32
from jdistadam.core.precision import MixedPrecisionPolicy
from jdistadam.distributed.mesh_axes import DataParallel
from jdistadam.errors import PolicyError
from jdistadam.kernels import native

MEANS = ("auto", "xla", "peer")
_NUM_DEVICES = (2, 4, 8)
_ALLOCATORS = ("default", "bfc", "platform")  # of XLA, with memory that a peer can open


class Communication(NamedTuple):
    """The means that was chosen, and why not peer memory; "" where it is."""

    means: str
    why_not_peer: str

    @property
    def is_peer(self) -> bool:
        """Whether a step goes over peer memory."""
        return self.means == "peer"

    def __str__(self) -> str:
        """Returns the means, and why it is not peer memory."""
        return f"{self.means} ({self.why_not_peer})" if self.why_not_peer else self.means


OVER_XLA = Communication("xla", 'communication="xla"')
NO_DEVICES = "devices that do not exist"
"""Why not peer memory, where the settings allow it and a mesh of numbers stands for devices."""


def choose_communication(
    requested: Any, parallel: DataParallel, policy: MixedPrecisionPolicy, algorithm: Algorithm
) -> Communication:
    """Decides by which means a step communicates.

    Args:
      requested: "auto", "xla" or "peer".
      parallel: The axes and the strategy.
      policy: The dtypes of what is kept and sent.
      algorithm: Those of the moments.

    Raises:
      PolicyError: ``requested`` is none of these, or is "peer" where that is not supported.
    """
    if requested not in MEANS:
        raise PolicyError(
            f"communication: unknown: got {requested!r}, expected {' or '.join(map(repr, MEANS))}. "
            "Leave it out, or pass one of these."
        )
    if requested == "xla":
        return OVER_XLA
    reasons = [*_obstacles(parallel, policy, algorithm)]
    if not reasons:
        reasons += _obstacles_of_devices(parallel.mesh, is_asked_for=requested == "peer")
    if not reasons:
        return Communication("peer", "")
    if requested == "peer":
        raise PolicyError(
            "communication: a step over peer memory is not supported here: "
            f'got {reasons[0]}, expected "optim" with unsharded parameters, '
            "float32 sums and main parameters, on 2, 4 or 8 devices of one process. "
            'Pass communication="auto", which goes over XLA here, or change the setting.'
        )
    return Communication("xla", reasons[0])


def keeps_shards_alone(parallel: DataParallel) -> bool:
    """Whether a device keeps only its own shard of what it has sent ahead: [Note: sent ahead]."""
    return parallel.num_devices > 2


def _obstacles(
    parallel: DataParallel, policy: MixedPrecisionPolicy, algorithm: Algorithm
) -> Iterator[str]:
    """What of the module's table does not hold."""
    if parallel.strategy != "optim":
        yield f"sharding_strategy {parallel.strategy!r}"
    if len(parallel.mesh.axis_names) > 1:
        yield f"a mesh with axes {', '.join(parallel.mesh.axis_names)}"
    if parallel.num_devices not in _NUM_DEVICES:
        yield f"{parallel.num_devices} devices"
    if policy.grad_reduce_dtype != np.float32:
        yield f"grad_reduce_dtype {policy.grad_reduce_dtype}"
    if policy.main_params != FLOAT32:
        yield f"main_params_dtype {policy.main_params_dtype}"
    if algorithm.storage.is_any:
        yield " ".join(str(algorithm).split())
    if policy.param_comm_dtype is not None:
        yield f"param_comm_dtype {policy.param_comm_dtype}"
    devices = list(parallel.mesh.devices.flat)
    if not hasattr(devices[0], "platform"):  # numbers, as the command `plan` has them
        yield NO_DEVICES
        return
    if len({device.process_index for device in devices}) > 1:
        yield "devices of several processes"
    platform = {"gpu": "cuda"}.get(devices[0].platform, devices[0].platform)
    if not native.status(platform).available:
        yield f"no compiled kernels: {native.status(platform).detail}"


def _obstacles_of_devices(mesh: Any, *, is_asked_for: bool) -> Iterator[str]:
    """Why peer memory is not used on these devices; fewer reasons if it is asked for."""
    devices = list(mesh.devices.flat)
    if devices[0].platform not in ("gpu", "cuda"):
        if not is_asked_for:  # CPU devices share memory, by which nothing is won
            yield f"platform {devices[0].platform}"
    elif not all(map(_is_here, devices)):
        if not is_asked_for:  # programs can be compiled for GPUs that are elsewhere
            yield "devices that this process does not have"
    elif why := why_gpus_are_apart(devices):
        yield why


def _is_here(device: Any) -> bool:
    """Whether this process has a device."""
    try:
        return device in jax.local_devices(backend=device.platform)
    except RuntimeError:  # JAX has no such platform here
        return False


def why_gpus_are_apart(devices: Sequence[Any]) -> str:
    """Says why these GPUs of this process do not use each other's memory; "" if they do."""
    allocator = os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default").lower()
    if allocator not in _ALLOCATORS:
        return f"XLA_PYTHON_CLIENT_ALLOCATOR={allocator}, whose memory peers do not reach"
    reached = native.reachable_peers()
    ordinals = [local_number(device) for device in devices]
    for one, other in itertools.permutations(ordinals, 2):
        if not reached(one, other):
            return f"GPU {one} cannot reach the memory of GPU {other}"
    return ""


@functools.cache
def places(mesh: Any) -> tuple[int, ...]:
    """The local numbers of the devices of a mesh, in its order, as handlers know them."""
    return tuple(int(local_number(device)) for device in mesh.devices.flat)


def local_number(device: Any) -> int:
    """The number of a device within its process; of one that does not exist, its id."""
    ordinal = getattr(device, "local_hardware_id", None)
    return device.id if ordinal is None or ordinal < 0 else ordinal
