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

All else goes over XLA. "auto" decides by this table, and on GPUs alone, never by a timing; "peer"
raises where the table says no.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jdistadam.core.main_params import MainParams
from jdistadam.core.precision import MixedPrecisionPolicy
from jdistadam.distributed.mesh_axes import DataParallel
from jdistadam.errors import PolicyError
from jdistadam.kernels import native

MEANS = ("auto", "xla", "peer")
_NUM_DEVICES = (2, 4, 8)


class Communication(NamedTuple):
    """The means that was chosen, and why not peer memory; "" where it is."""

    means: str
    why_not_peer: str

    @property
    def is_peer(self) -> bool:
        """Whether a step goes over peer memory."""
        return self.means == "peer"


OVER_XLA = Communication("xla", 'communication="xla"')


def choose_communication(
    requested: Any, parallel: DataParallel, policy: MixedPrecisionPolicy
) -> Communication:
    """Decides by which means a step communicates.

    Args:
      requested: "auto", "xla" or "peer".
      parallel: The axes and the strategy.
      policy: The dtypes.

    Raises:
      PolicyError: ``requested`` is none of these, or is "peer" where that is not supported.
    """
    if requested not in MEANS:
        raise PolicyError(
            "communication",
            "unknown",
            got=repr(requested),
            expected=" or ".join(map(repr, MEANS)),
            action="Leave it out, or pass one of these.",
        )
    if requested == "xla":
        return OVER_XLA
    reasons = [*_obstacles(parallel, policy)]
    if not reasons and requested == "auto":
        reasons += _obstacles_on_gpus(parallel.mesh)
    if not reasons:
        return Communication("peer", "")
    if requested == "peer":
        raise PolicyError(
            "communication",
            "a step over peer memory is not supported here",
            got=reasons[0],
            expected='"optim" with float32 sums and main parameters on 2, 4 or 8 devices of one '
            "process",
            action='Pass communication="auto", which goes over XLA here, or change the setting.',
        )
    return Communication("xla", reasons[0])


def _obstacles(parallel: DataParallel, policy: MixedPrecisionPolicy) -> Iterator[str]:
    """What of the module's table does not hold."""
    if parallel.strategy != "optim":
        yield f"sharding_strategy {parallel.strategy!r}"
    if len(parallel.mesh.axis_names) > 1:
        yield f"a mesh with axes {', '.join(parallel.mesh.axis_names)}"
    if parallel.num_devices not in _NUM_DEVICES:
        yield f"{parallel.num_devices} devices"
    if policy.grad_reduce_dtype != np.float32:
        yield f"grad_reduce_dtype {policy.grad_reduce_dtype}"
    if policy.main_params is not MainParams.FLOAT32:
        yield f"main_params_dtype {policy.main_params_dtype}"
    if policy.param_comm_dtype is not None:
        yield f"param_comm_dtype {policy.param_comm_dtype}"
    devices = parallel.mesh.devices.flat
    if len({device.process_index for device in devices}) > 1:
        yield "devices of several processes"
    platform = {"gpu": "cuda"}.get(devices[0].platform, devices[0].platform)
    if not native.status(platform).available:
        yield f"no compiled kernels: {native.status(platform).detail}"


def _obstacles_on_gpus(mesh: Any) -> Iterator[str]:
    """What keeps the GPUs of this process apart."""
    devices = mesh.devices.flat
    if devices[0].platform not in ("gpu", "cuda"):
        yield f"platform {devices[0].platform}"
        return
    if any(device not in jax.local_devices() for device in devices):
        yield "devices that this process does not have"
        return
    reached = native.reachable_peers()
    ordinals = [device.local_hardware_id for device in devices]
    apart = [(a, b) for a in ordinals for b in ordinals if not reached(a, b)]
    if apart:
        yield f"GPU {apart[0][0]} cannot reach the memory of GPU {apart[0][1]}"


@functools.cache
def places(mesh: Any) -> tuple[int, ...]:
    """The local numbers of the devices of a mesh, in its order, as handlers know them."""
    return tuple(int(_ordinal(device)) for device in mesh.devices.flat)


def _ordinal(device: Any) -> int:
    """The number of a device within its process; of one that does not exist, its id."""
    ordinal = getattr(device, "local_hardware_id", None)
    return device.id if ordinal is None or ordinal < 0 else ordinal
