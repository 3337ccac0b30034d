"""Step time and memory against the number of devices, from shapes and speeds alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jdistadam.core import trees
from jdistadam.core.arguments import check_count, check_flag, shown
from jdistadam.core.trees import Params
from jdistadam.distributed.communication import NO_DEVICES, Communication
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.transformation import DistributedTransformation, check_distributed
from jdistadam.errors import HyperparameterError, MeshError
from jdistadam.tools.plan import Plan, plan_of
from predict.machine import Machine, check_positive
from predict.step_time import StepTime, predict_step

POWERS_OF_TWO = tuple(1 << i for i in range(11))
"""1 to 1024 devices."""


@dataclasses.dataclass(frozen=True)
class ScalingRow:
    """The prediction for one number of devices.

    Attributes:
      devices: The number.
      time: The time of a step.
      plan: The plan of stored and sent bytes per device.
      tokens_per_second: Of all devices; None without ``tokens``.
    """

    devices: int
    time: StepTime
    plan: Plan
    tokens_per_second: float | None

    @property
    def efficiency(self) -> float:
        """The share of the step that is the model's forward and backward pass."""
        return self.time.model / self.time.step

    @property
    def step_bytes(self) -> int:
        """Upper bound of a step's memory, without the model's activations and gradients."""
        return self.plan.held_bytes + self.plan.sums + self.plan.buffer_bytes


@dataclasses.dataclass(frozen=True)
class Scaling:
    """The result of ``scaling``; prints as a table.

    Attributes:
      rows: One for each number of devices.
    """

    rows: tuple[ScalingRow, ...]

    def __str__(self) -> str:
        """Returns the table: milliseconds, and GB on each device."""
        lines = self.table()
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(f"{x:>{width}}" for x, width in zip(line, widths, strict=True))
            for line in lines
        )

    def table(self) -> list[tuple[str, ...]]:
        """Returns the titles and the cells of each row as text.

        Milliseconds: the expected step and its bounds; the model; the optimizer's kernels; all
        communication, and its exposed part. Then the model's share of the step, tokens per second,
        GB between steps and at most during one, and the means of communication.
        """
        titles = (
            "devices", "step ms", "least", "most", "model", "kernels", "sending", "exposed",
            "share %", "tokens/s", "held GB", "step GB", "means",
        )  # fmt: skip
        return [titles, *map(_cells, self.rows)]


def scaling(
    params: Params,
    make_tx: Callable[[Mesh], DistributedTransformation],
    machine: Machine,
    *,
    tokens: float | None = None,
    flops: float | None = None,
    model_seconds: float | None = None,
    recomputes: bool = False,
    accumulate_steps: int = 1,
    in_train_step: bool = True,
    devices: Sequence[int] = POWERS_OF_TWO,
    devices_per_replica: int | None = None,
) -> Scaling:
    r"""Predicts time and memory of a training step for each number of devices (weak scaling).

    Every device takes the same number of tokens :math:`T`, whatever the number of devices. With
    :math:`P` parameters and a device's rate :math:`R`, its forward and backward pass take
    :math:`6 P T / R` seconds, or :math:`8 P T / R` if the backward pass rematerializes the forward
    pass: attention apart from its projections is not counted. The other phases:
    ``predict.step_time``, and for collectives ``Machine.seconds``.

    Assumed: no congestion and no stragglers; devices fill nodes in order; collectives that overlap
    the model slow neither each other nor the model; the batch and the host keep up; with
    ``communication="auto"``, devices of a node reach each other's memory in one process.

    Args:
      params: Tree of global params or of ``jax.ShapeDtypeStruct``.
      make_tx: Makes the optimizer for a mesh with the axis "data", or with ``devices_per_replica``
        with the axes "replica" and "data". Its devices are numbers: none need exist.
      machine: Speeds.
      tokens: T, of all micro-batches.
      flops: R, operations per second that the model reaches, not those of the data sheet.
      model_seconds: Measured time of the forward and backward pass, instead of ``flops``.
      recomputes: Whether the backward pass rematerializes the forward pass (``jax.checkpoint``).
      accumulate_steps: As given to ``train_step``.
      in_train_step: As in ``predict_step``.
      devices: Numbers of devices.
      devices_per_replica: How many share the state in hybrid sharding; fewer devices are one
        replica.

    Raises:
      HyperparameterError: A number is out of range; neither or both of ``flops`` and
        ``model_seconds`` are given; devices in other nodes, but no bandwidth of the network.
      MeshError: ``devices_per_replica`` does not divide a number of devices.

    Example:
      >>> import functools, jax, jax.numpy as jnp
      >>> import jdistadam as jda
      >>> params = {f"w{i}": jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16) for i in range(20)}
      >>> policy = jda.MixedPrecisionPolicy(grad_comm_dtype=jnp.bfloat16)
      >>> found = scaling(
      ...     params, lambda mesh: jda.distributed(jda.fused_adamw(1e-3), mesh=mesh, policy=policy),
      ...     Machine(4.2e12, 220e9, network_bandwidth=50e9),
      ...     tokens=8192, flops=500e12, devices=(1, 8, 64))
      >>> for row in found.rows:
      ...     held = row.plan.held_bytes / 1e9
      ...     print(f"{row.devices:>2} {1e3 * row.time.step:.1f} ms {held:.2f} GB")
       1 141.5 ms 18.79 GB
       8 149.5 ms 4.70 GB
      64 159.0 ms 2.94 GB
    """
    _check_work(tokens, flops, model_seconds, accumulate_steps)
    check_flag("in_train_step", in_train_step)
    trees.check_dtypes(params, name="params")
    for n in devices:
        check_count("devices", n)
    if model_seconds is None:
        assert tokens is not None and flops is not None  # for mypy: checked above
        size = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
        model_seconds = (8 if recomputes else 6) * size * tokens / flops
    rows = []
    for n in devices:
        config = _config(make_tx(_mesh(n, devices_per_replica)), n, machine)
        whole = config.tensor_local(params)
        schedule = config.schedule(whole, accumulate_steps=accumulate_steps)
        time = predict_step(
            config, schedule, machine, model_seconds,
            accumulate_steps=accumulate_steps, recomputes=recomputes, in_train_step=in_train_step,
        )  # fmt: skip
        planned = plan_of(config, schedule, accumulate_steps=accumulate_steps)
        rows.append(ScalingRow(n, time, planned, tokens and n * tokens / time.step))
    return Scaling(tuple(rows))


def _cells(row: ScalingRow) -> tuple[str, ...]:
    time, rate = row.time, row.tokens_per_second
    kernels = sum(time.kernels.values())
    times = (time.step, time.least, time.most, time.model, kernels)
    return (
        f"{row.devices}",
        *(f"{1e3 * x:.2f}" for x in (*times, time.communication, time.exposed)),
        f"{100 * row.efficiency:.1f}",
        "-" if rate is None else f"{rate:,.0f}",
        f"{row.plan.held_bytes / 1e9:.2f}",
        f"{row.step_bytes / 1e9:.2f}",
        row.plan.communication.transport,
    )


def _check_work(tokens: Any, flops: Any, model_seconds: Any, accumulate_steps: Any) -> None:
    check_count("accumulate_steps", accumulate_steps)
    for name, value, unit in (
        ("tokens", tokens, "tokens"),
        ("flops", flops, "operations a second"),
        ("model_seconds", model_seconds, "seconds"),
    ):
        if value is not None:
            check_positive(name, value, unit)
    if (flops is None) == (model_seconds is None) or (flops is not None and tokens is None):
        raise HyperparameterError(
            "flops: the time of the model follows from tokens and flops, or is given: "
            f"got tokens={tokens}, flops={flops}, model_seconds={model_seconds}, "
            "expected tokens and flops, or model_seconds. "
            "Pass model_seconds where it was measured, otherwise both others."
        )


def _mesh(num_devices: int, devices_per_replica: int | None) -> Mesh:
    """A mesh of numbers, without devices."""
    numbers = np.arange(num_devices)
    if devices_per_replica is None:
        return Mesh(numbers, ("data",))
    check_count("devices_per_replica", devices_per_replica)
    shards = min(num_devices, devices_per_replica)
    if num_devices % shards:
        raise MeshError(
            "devices_per_replica: does not divide the number of devices: "
            f"got {devices_per_replica} for {num_devices} devices, expected a divisor of every "
            "larger number of devices. Change devices_per_replica or devices."
        )
    return Mesh(numbers.reshape(-1, shards), ("replica", "data"))


def _config(tx: Any, num_devices: int, machine: Machine) -> DistributedConfig:
    """The optimizer's, over peer memory if it lacks nothing but existing devices."""
    check_distributed(tx)
    config: DistributedConfig = tx.config
    if config.mesh.size != num_devices:
        raise MeshError(
            "make_tx: made an optimizer for another mesh than it was given: "
            f"got a mesh of {shown(dict(config.mesh.shape))}, "
            f"expected the given one of {num_devices} devices. Pass mesh=mesh on to the optimizer."
        )
    in_a_node = num_devices <= machine.devices_per_node
    if config.communication.why_not_peer == NO_DEVICES and in_a_node:
        return dataclasses.replace(config, communication=Communication("peer", ""))
    return config
