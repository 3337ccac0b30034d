"""The time of a training step: bytes over bandwidths, and the part of it that other work hides.

A step consists of a forward pass of F seconds, a backward pass of B seconds, kernels of the
optimizer and collectives as in the schedule (``distributed/schedule.py``). What a collective can
overlap::

    overlaps                 which
    -----------------------  --------------------------------------------------------------------
    the forward pass         gathers of parameters that devices store as shards, without
                             micro-batches or of layers that are gathered one by one
    the backward pass        the second gather of scanned layers; reductions of gradients that the
                             backward pass makes before its end: of leaves that are neither packed
                             nor stacked, and of layers that are gathered one by one. Sums over
                             micro-batches that are reduced once overlap only the last micro-batch's
    updates                  gathers of new parameters over peer memory
    nothing                  all others: gathers of new parameters over XLA, reductions of packed
                             and of stacked leaves; in a custom loop all over peer memory

If collectives of C seconds overlap work of W seconds, in E equal executions (micro-batches), the
exposed part, during which nothing else runs, is::

    least      max(0, C - W)                 everything that can be hidden is
    expected   min(C, max(C - W, E u))       u: one message without overlap: the first gather,
                                             before the first layer can start, and the last
                                             reduction, after the last gradient
    most       C                             nothing is hidden

Over XLA, gathers of new parameters run beside the update of others, too, but as kernels that use
the same memory. Little of their time is saved; the prediction saves nothing.

XLA merges collectives into messages: reduce-scatters and all-gathers up to MERGED_BYTES of results,
as ``train_step`` asks, all-reduces up to 30 MiB. Results of a reduce-scatter are shards: on many
devices all of them are one message, and nothing of it is hidden. Copies over peer memory start
together up to TOGETHER_BYTES, and go directly to their destination.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.schedule import MERGED_BYTES, BucketSchedule, Collective, Schedule
from jdistadam.training.overlap import TOGETHER_BYTES
from predict.kernel_bytes import kernel_bytes
from predict.machine import DIRECT, Machine, members_per_node

_MERGED_BY_XLA = 30 << 20  # XLA's own limit for all-reduces


@dataclasses.dataclass(frozen=True)
class StepTime:
    """The result of ``predict_step``, in seconds per step.

    Attributes:
      model: Forward and backward pass.
      kernels: The optimizer's kernels by name, never hidden.
      collectives: All collectives by operation, without overlap.
      exposed: The expected time of collectives while nothing else runs.
      exposed_least: The same if everything that can be hidden is.
      exposed_most: The same if nothing is.
    """

    model: float
    kernels: dict[str, float]
    collectives: dict[str, float]
    exposed: float
    exposed_least: float
    exposed_most: float

    @property
    def step(self) -> float:
        """The whole step, as expected."""
        return self.beside_communication + self.exposed

    @property
    def least(self) -> float:
        """The whole step if everything that can be hidden is."""
        return self.beside_communication + self.exposed_least

    @property
    def most(self) -> float:
        """The whole step if nothing is hidden."""
        return self.beside_communication + self.exposed_most

    @property
    def beside_communication(self) -> float:
        """The model and the kernels."""
        return self.model + sum(self.kernels.values())

    @property
    def communication(self) -> float:
        """All collectives, without overlap."""
        return sum(self.collectives.values())


def predict_step(
    config: DistributedConfig,
    schedule: Schedule,
    machine: Machine,
    model: float,
    *,
    accumulate_steps: int = 1,
    recomputes: bool = False,
    in_train_step: bool = True,
) -> StepTime:
    r"""Predicts the time of one step.

    Each kernel takes its bytes (``kernel_bytes``) over the memory's bandwidth. The forward pass is
    a third of ``model``, or a quarter if the backward pass ``recomputes`` it.

    Args:
      config: ``tx.config``.
      schedule: The result of ``config.schedule``.
      machine: Speeds.
      model: Seconds of the forward and backward passes of all micro-batches of a device.
      accumulate_steps: As given to ``train_step``.
      recomputes: Whether the backward pass rematerializes the forward pass.
      in_train_step: Whether the step is one of ``train_step``, which alone moves copies over peer
        memory beside other work.

    Example:
      >>> import jax, numpy as np
      >>> import jdistadam as jda
      >>> mesh = jax.sharding.Mesh(np.arange(2), ("data",))
      >>> config = jda.distributed(jda.fused_adamw(1e-3), mesh=mesh).config
      >>> schedule = config.schedule({"w": jax.ShapeDtypeStruct((1000, 1000), "float32")})
      >>> machine = Machine(1e12, 1e11, latency=0, link_hop=0)
      >>> found = predict_step(config, schedule, machine, model=1e-3)
      >>> {name: round(1e6 * x, 1) for name, x in (found.kernels | found.collectives).items()}
      {'norm': 2.0, 'update': 16.0, 'reduce-scatter': 20.0, 'all-gather': 20.0}
      >>> f"{1e6 * found.step:.1f}, from {1e6 * found.least:.1f} to {1e6 * found.most:.1f}"
      '1058.0, from 1038.0 to 1058.0'
    """
    sizes = kernel_bytes(config, schedule, accumulate_steps=accumulate_steps)
    kernels = {name: size / machine.memory_bandwidth for name, size in sizes.items()}
    forward = model / (4 if recomputes else 3)
    backward = (model - forward) / (1 if config.parallel.shards_grads else accumulate_steps)
    windows = {"forward": forward, "backward": backward, "updates": kernels.get("update", 0.0)}
    windows["nothing"] = 0.0
    collectives: dict[str, float] = {}
    least = expected = most = 0.0
    for where, window in windows.items():
        hidden = window if in_train_step or not config.communication.is_peer else 0.0
        total = alone = 0.0
        for phases in _phases(config, schedule, where, accumulate_steps):
            longest = 0.0
            for messages in _groups(phases):
                seconds, one = _time(config, machine, messages, accumulate_steps)
                op = messages[0].op
                collectives[op] = collectives.get(op, 0.0) + seconds
                total += seconds
                longest = max(longest, one)
            alone += longest
        least += max(0.0, total - hidden)
        expected += min(total, max(total - hidden, alone))
        most += total
    collectives = {op: x for op, x in collectives.items() if x}
    return StepTime(model, kernels, collectives, expected, least, most)


def _phases(
    config: DistributedConfig, schedule: Schedule, where: str, accumulate_steps: int
) -> tuple[list[Collective], list[Collective]]:
    """Gathers and reductions that can overlap a pass, updates or nothing."""
    gathers: list[Collective] = []
    reductions: list[Collective] = []
    after_update = "updates" if config.communication.is_peer else "nothing"
    for entry in schedule.buckets:
        bucket = entry.bucket
        # Whole leaves are gathered once, before the loop over micro-batches.
        is_early = bucket.num_layers is not None or accumulate_steps == 1
        if bucket.is_sharded_param and where == ("forward" if is_early else "nothing"):
            gathers += entry.gather
        if where == "backward":
            gathers += entry.gather_again
        elif where == after_update:
            gathers += entry.after_update
        early, late = _reductions(config, schedule, entry, accumulate_steps)
        reductions += {"backward": early, "nothing": late}.get(where, [])
    return gathers, reductions


def _reductions(
    config: DistributedConfig, schedule: Schedule, entry: BucketSchedule, accumulate_steps: int
) -> tuple[list[Collective], list[Collective]]:
    """Splits reductions into overlappable and exposed."""
    bucket, both = entry.bucket, [*entry.reduce, *entry.reduce_outer]
    if any(c.when == "layer" for c in entry.reduce):
        return list(entry.reduce), list(entry.reduce_outer)
    if bucket.is_packed or any(schedule.layout.leaves[i].layers == "scan" for i in bucket.leaves):
        return [], both
    if accumulate_steps > 1 and config.parallel.shards_grads:
        return list(entry.reduce), list(entry.reduce_outer)
    return both, []


def _groups(collectives: Sequence[Collective]) -> list[list[Collective]]:
    """Collectives that XLA may merge: equal except for their arrays."""
    groups: dict[tuple[object, ...], list[Collective]] = {}
    for c in collectives:
        if c.devices > 1:
            groups.setdefault((c.op, c.dtype, c.axes, c.when, c.times), []).append(c)
    return list(groups.values())


def _time(
    config: DistributedConfig,
    machine: Machine,
    group: Sequence[Collective],
    accumulate_steps: int,
) -> tuple[float, float]:
    """Seconds of equal collectives, and of their largest message once per execution."""
    first = group[0]
    per_node = members_per_node(config.parallel, first.axes, machine.devices_per_node)
    sizes = [float(c.bytes_sent) for c in group]
    op, limit = first.op, MERGED_BYTES
    if first.groups:
        op, limit = DIRECT, TOGETHER_BYTES
    elif first.op == "all-reduce":
        limit = _MERGED_BY_XLA
    messages, largest = len(group), max(sizes)
    if first.groups or first.op != DIRECT:
        results = sum(c.result_elements for c in group) * first.dtype.itemsize
        messages = min(len(group), -(-results // limit))
        largest = max(max(sizes), sum(sizes) / messages)
    # Of the layers of a scan, one per micro-batch overlaps nothing.
    alone = accumulate_steps if first.when == "layer" else first.times

    def seconds(sent: float, count: int) -> float:
        return machine.seconds(op, sent, devices=first.devices, per_node=per_node, messages=count)

    whole = seconds(sum(sizes), messages * first.times)
    return whole, seconds(largest * alone / first.times, alone)
