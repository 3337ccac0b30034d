"""The bytes that a device holds and sends in a training step, computed from its schedule."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jdistadam.core.codecs import FLOAT32
from jdistadam.core.precision import sent_dtype
from jdistadam.core.trees import Params
from jdistadam.distributed import parts_of_gradients
from jdistadam.distributed.calls import average_calls, make_calls
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.flat_arrays import STEPPED, fields_of, main_codec, types_of_arrays
from jdistadam.distributed.layout import Layout
from jdistadam.distributed.layout_text import DIGEST_SIZE
from jdistadam.distributed.norms import holds_several
from jdistadam.distributed.schedule import BucketSchedule, Collective, Schedule
from jdistadam.distributed.store import bytes_of_windows
from jdistadam.distributed.transport import Transport
from jdistadam.kernels.reference import KINDS, num_runs
from jdistadam.training import overlap
from jdistadam.training.savings import settings_for

NOT_COUNTED = "activations, gradients in the dtype of the parameters, and the batch"
GATHERED_BLOCKS = "up to three gathered blocks"


@dataclasses.dataclass(frozen=True)
class Plan:
    """The result of ``plan``; prints as two tables, with what takes most and how to lower it.

    All numbers are bytes on one device.

    Attributes:
      held: Between steps, by name: params, main_params, mu, nu, scalars (count, norm, loss
        scale, digest of the layout), ema with ``ema_decay``, and what a chain and
        ``inject_hyperparams`` add. Their sum is what a compiled
        ``train_step`` takes besides the batch, returns besides the metrics, and updates in place.
        Excludes arrays on the host.
      sums: Gradients accumulated over micro-batches, within a step; 0 for one micro-batch.
      buffers: Upper bound of the temporary memory of a ``train_step``, by use, besides the model's
        own and the gradients in the params' dtype. XLA lets some of it share memory. "mailboxes"
        receive gradients over peer memory.
      collectives: The collectives of a step.
      communication: The transport, and why it is not peer memory.
      on_host: Between steps in host memory, for this device, by name; with
        ``state_memory``.
      settings: Settings that make the largest part smaller.
      not_counted: What a step holds on a device in addition.
    """

    held: dict[str, int]
    sums: int
    buffers: dict[str, int]
    collectives: tuple[Collective, ...]
    communication: Transport
    on_host: dict[str, int] = dataclasses.field(default_factory=dict)
    settings: tuple[str, ...] = ()
    not_counted: str = NOT_COUNTED

    @property
    def held_bytes(self) -> int:
        """Bytes between steps."""
        return sum(self.held.values())

    @property
    def buffer_bytes(self) -> int:
        """Upper bound of the peak temporary memory of a step, without the model's own."""
        return sum(self.buffers.values())

    @property
    def step_bytes(self) -> int:
        """Upper bound of what a step holds, but for what is not counted."""
        return self.held_bytes + self.sums + self.buffer_bytes

    @property
    def bytes_sent(self) -> int:
        """Bytes that a device sends in one step."""
        return sum(c.bytes_sent for c in self.collectives)

    @property
    def largest(self) -> tuple[str, int]:
        """Name and bytes of the largest part of ``step_bytes``."""
        return max((self.held | self._in_a_step).items(), key=lambda part: part[1])

    @property
    def advice(self) -> str:
        """The settings that make the largest part smaller, and where to read more."""
        return "; ".join([*self.settings, "more in docs/out_of_memory.md"])

    def as_dict(self) -> dict[str, Any]:
        """Converts the plan to types that ``json.dumps`` takes.

        Returns:
          Its fields and totals by name, in bytes.
        """
        added = "held_bytes", "buffer_bytes", "step_bytes", "bytes_sent", "largest"
        return vars(self) | {
            "collectives": [c.as_dict() for c in self.collectives],
            "communication": {
                "name": self.communication.name,
                "why_not_peer": self.communication.why_not_peer,
            },
            **{name: getattr(self, name) for name in added},
        }

    @property
    def _in_a_step(self) -> dict[str, int]:
        return {"accumulated gradients": self.sums} | self.buffers

    def __str__(self) -> str:
        """Returns the tables."""
        rows = [(name, "held", size) for name, size in self.held.items()]
        rows += [("total", "held", self.held_bytes)]
        rows += [(name, "on the host", size) for name, size in self.on_host.items()]
        rows += [(name, "in a step", size) for name, size in self._in_a_step.items()]
        rows += [("total", "at most", self.step_bytes)]
        lines = [f"{'on each device':<24} {'when':<11} {'size':>12}"]
        lines += [f"{name:<24} {when:<11} {size_text(size):>12}" for name, when, size in rows]
        transport = f"communication: {self.communication}"
        return "\n".join(
            [*lines, "", self._summary(), "", format_collectives(self.collectives), transport]
        )

    def _summary(self) -> str:
        """What is not in the table, the largest part of it, and how to lower that."""
        name, size = self.largest
        return (
            f"not counted: {self.not_counted}\n"
            f"largest: {name}, {size_text(size)}\n"
            f"to lower it: {self.advice}"
        )


def size_text(size: int) -> str:
    """Returns a number of bytes as text: in GB, below one in MB.

    Example:
      >>> size_text(2_345_678), size_text(1_200_000_000)
      ('2.35 MB', '1.20 GB')
    """
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"


def plan_of(config: DistributedConfig, params: Params, *, accumulate_steps: int) -> Plan:
    """Returns the plan of a step for global params, or for their shapes."""
    schedule = config.schedule_of(params, accumulate_steps=accumulate_steps)
    buffers: dict[str, int] = {}
    are_late = _added_late(config, schedule, accumulate_steps)
    for entry, is_late in zip(schedule.buckets, are_late, strict=True):
        for name, size in _buffers(config, schedule.layout, entry, is_late=is_late):
            buffers[name] = buffers.get(name, 0) + size
    if size := _mailboxes(config, schedule, are_late):
        buffers["mailboxes"] = size
    held = _held(config, schedule.layout)
    on_host = {name: held[name] for name in config.on_host if held[name]}
    held = {k: x - on_host.get(k, 0) for k, x in held.items() if x != on_host.get(k)}
    if on_host:
        of_step = make_calls(config, schedule, [x.dtype for x in schedule.layout.buckets])
        of_average = average_calls(config, schedule.layout)
        buffers["windows of the state"] = max(
            bytes_of_windows(config, schedule.layout, calls) for calls in (of_step, of_average)
        )
    are_blocks = any(x.gather_again and x.bucket.num_layers is None for x in schedule.buckets)
    planned = Plan(
        held=held,
        sums=_sums(config, schedule.layout) if accumulate_steps > 1 else 0,
        buffers=buffers,
        collectives=schedule.collectives,
        communication=config.transport,
        on_host=on_host,
        not_counted=f"{GATHERED_BLOCKS}, {NOT_COUNTED}" if are_blocks else NOT_COUNTED,
    )
    settings = settings_for(planned.largest[0], config, schedule.layout)
    return dataclasses.replace(planned, settings=settings)


def nbytes_of(tree: Any) -> int:
    """Returns the bytes of the arrays, or shapes, of a tree."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _held(config: DistributedConfig, layout: Layout) -> dict[str, int]:
    held_sizes = {x.leaf: x.inner_size for x in layout.buckets if x.is_sharded_param}
    scalars = 2 + sum(len(guard.kind._fields) for guard, _ in config.active_guards)
    scalars += 2 if config.algorithm.storage.is_stochastic else 0  # the key
    of_arrays = {name: nbytes_of(x) for name, x in types_of_arrays(config, layout).items()}
    held = {
        "params": sum(
            held_sizes.get(i, leaf.size) * jnp.dtype(leaf.dtype).itemsize
            for i, leaf in enumerate(layout.leaves)
        ),
        **{name: of_arrays[name] for name in STEPPED},
        "scalars": 4 * scalars + DIGEST_SIZE,
    }
    others = [name for name in fields_of(config) if name not in STEPPED]
    return held | {name: of_arrays[name] for name in others}


def _sums(config: DistributedConfig, layout: Layout) -> int:
    shards = config.parallel.shards_grads
    elements = sum(b.inner_size if shards else layout.whole_size(b) for b in layout.buckets)
    return elements * config.policy.main_grads_dtype.itemsize


def _added_late(config: DistributedConfig, schedule: Schedule, accumulate_steps: int) -> list[bool]:
    """For each bucket: whether parts of its gradient stay until the kernel of an update."""
    are_of_model = any(x.gather_again for x in schedule.buckets)
    come_once = accumulate_steps == 1 or not config.parallel.shards_grads
    all_come = all(x.bucket.split == 1 for x in schedule.buckets)  # those of experts do not
    may_wait = come_once and all_come and not (are_of_model or config.takes_norm_first)
    return [
        may_wait and parts_of_gradients.steps_on_parts(config, entry.bucket)
        for entry in schedule.buckets
    ]


def _mailboxes(config: DistributedConfig, schedule: Schedule, are_late: Sequence[bool]) -> int:
    """Upper bound of what copies of gradients fill at the same time.

    At most three groups of parts that are added in the backward pass exist at a time, by
    [Note: overlap] of training/overlap.py: one is sent, one is added, and parts of a third may wait
    for others that the same call adds.
    """
    if not config.transport.is_peer:
        return 0
    stay = not config.parallel.shards_grads
    sizes: dict[bool, list[int]] = {True: [], False: []}
    for entry, is_late in zip(schedule.buckets, are_late, strict=True):
        bucket = entry.bucket
        received = schedule.layout.whole_size(bucket) - bucket.inner_size
        if bucket.num_layers is not None:  # of this layer and the one before
            received = 2 * received // bucket.num_layers
        sizes[is_late or stay].append(received * config.policy.comm_dtype.itemsize)
    most = 3 * (overlap.TOGETHER_BYTES + max(sizes[False], default=0))
    return sum(sizes[True]) + min(sum(sizes[False]), most)


def _buffers(
    config: DistributedConfig, layout: Layout, entry: BucketSchedule, *, is_late: bool
) -> Iterator[tuple[str, int]]:
    """The temporary arrays of one bucket but its mailbox, in this order."""
    policy, bucket = config.policy, entry.bucket
    # Stacked layers pass one after the other; the sum of gradients holds all of them.
    whole = layout.whole_size(bucket) // (bucket.num_layers or 1)
    inner, sent = bucket.inner_size, policy.comm_dtype.itemsize
    if bucket.is_packed:
        widest = jnp.promote_types(bucket.dtype, policy.comm_dtype)
        yield "packed gradients", whole * jnp.dtype(widest).itemsize
    if entry.reduce and (bucket.is_packed or policy.comm_dtype != bucket.dtype):
        yield "gradients as sent", whole * sent
    itemsize = jnp.dtype(bucket.dtype).itemsize
    # Gathered before the loss; what blocks and loops gather, they gather again.
    is_whole_in_loss = bucket.is_sharded_param and entry.gather and not entry.gather_again
    if not is_late:
        yield from _reduced(config, entry, whole)
    if parts_of_gradients.is_written_whole(config, bucket):
        if bucket.is_packed:
            yield "gathered parameters", whole * itemsize
        return
    if config.norms is not None:
        runs = num_runs(bucket.shard_size, holds_several(bucket))
        yield "squares of norms", 4 * len(KINDS) * runs
    comm = sent_dtype(policy, bucket.dtype)
    yield "new shards", bucket.shard_size * itemsize
    if main_codec(config, bucket) != FLOAT32:
        yield "new shards", bucket.shard_size * itemsize  # cut out of the params
    if comm != bucket.dtype:
        yield "gathered parameters", whole * jnp.dtype(comm).itemsize
    if bucket.is_packed or is_whole_in_loss:
        yield "gathered parameters", whole * itemsize
    if bucket.num_layers is not None:
        yield "gathered parameters", 2 * whole * itemsize  # of this layer and the next
    wide = config.differentiated_dtype(bucket.dtype)  # [Note: widened shards]
    is_in_loop = bucket.num_layers is not None or any(x.times > 1 for x in entry.gather_again)
    if is_in_loop and wide != bucket.dtype and not config.transport.is_peer:  # else one layer
        yield "widened shards", inner * wide.itemsize


def _reduced(
    config: DistributedConfig, entry: BucketSchedule, whole: int
) -> Iterator[tuple[str, int]]:
    """What is received of a gradient, but for mailboxes, and its sum."""
    sent, reduced = config.policy.comm_dtype.itemsize, config.policy.reduced_dtype.itemsize
    inner = entry.bucket.inner_size
    if not entry.reduce:  # no other device has these parameters
        return
    if entry.reduce[0].op == "all-to-all" and not config.transport.is_peer:
        yield "received contributions", entry.reduce[0].elements * sent
    yield "reduced gradients", inner * reduced
    if entry.reduce[-1].op == "all-gather":  # of the parts of a float32 sum
        yield "reduced gradients", whole * reduced
    if entry.reduce_outer:
        yield "reduced gradients", 2 * inner * reduced


def format_collectives(planned: Sequence[Collective]) -> str:
    """Returns a table, one line for each operation, dtype and set of axes.

    The last column is the transport, unless that is "xla" for all.
    """
    rows: dict[Any, list[int]] = {}
    for c in planned:
        key = c.op, c.dtype.name, c.axes, c.devices, c.times, c.transport
        row = rows.setdefault(key, [0, 0, 0])
        for i, value in enumerate((1, c.elements, c.bytes_sent)):
            row[i] += value
    is_said = any(c.transport != "xla" for c in planned)
    lines = [
        f"{'collective':<15} {'dtype':<14} {'over':<16} {'devices':>7} {'times':>5} {'arrays':>6} "
        f"{'elements':>13} {'sent':>10}{'  transport' if is_said else ''}"
    ]
    for (op, dtype, axes, devices, times, transport), (count, elements, sent) in rows.items():
        lines.append(
            f"{op:<15} {dtype:<14} {','.join(axes):<16} {devices:>7} {times:>5} {count:>6} "
            f"{elements:>13} {size_text(sent):>10}{f'  {transport}' if is_said else ''}"
        )
    return "\n".join(lines)
