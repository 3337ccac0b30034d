"""What one step sends: every collective by operation, dtype and size, from shapes alone.

Scalars (norm, loss, weights) are left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from jdistadam.core.collectives import Axes
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.layout import Bucket

_SMALL = 0.01  # of a layer's parameters: biases and norm scales are smaller, matrices larger


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation of a step.

    Attributes:
      op: "reduce-scatter", "all-gather", "all-reduce" or "all-to-all".
      dtype: What travels.
      elements: Size of the whole array: what every device adds to, exchanges, or holds at the end.
      axes: The mesh axes it runs over.
      devices: Number of devices along them.
      times: How often it runs in one step.
      leaves: Paths of the parameters.
      is_optional: Whether XLA may leave it out: the backward pass of a scanned layer needs again
        what it multiplied with, but not every bias.
    """

    op: str
    dtype: jnp.dtype
    elements: int
    axes: Axes
    devices: int
    times: int
    leaves: tuple[str, ...]
    is_optional: bool = False

    @property
    def result_elements(self) -> int:
        """Size of the array that a device gets."""
        return self.elements // (self.devices if self.op == "reduce-scatter" else 1)

    @property
    def bytes_sent(self) -> int:
        """Bytes that a device sends in one step, in a ring or, for all-to-all, directly."""
        passes = 2 if self.op == "all-reduce" else 1
        size = self.elements * self.dtype.itemsize * self.times * passes
        return size * (self.devices - 1) // self.devices


def planned_collectives(
    config: DistributedConfig, params: Any, *, accumulate_steps: int = 1
) -> list[Collective]:
    """Returns the collectives of one call of ``train_step`` that are larger than scalars.

    Args:
      config: ``tx.config``.
      params: Tree of global params or their shapes.
      accumulate_steps: As given to ``train_step``.
    """
    layout = config.layout(config.tensor_local(params))
    micro_batches = accumulate_steps if config.parallel.shards_grads else 1
    layers: dict[Any, int] = {}
    for bucket in layout.buckets:
        layers[bucket.num_layers] = layers.get(bucket.num_layers, 0) + bucket.shard_size
    found: list[Collective] = []
    for bucket in layout.buckets:
        paths = tuple(layout.leaves[i].path for i in bucket.leaves)
        for op, dtype, elements, axes, times in _of_bucket(config, bucket, micro_batches):
            devices = config.parallel.size(axes)
            found.append(Collective(op, jnp.dtype(dtype), elements, axes, devices, times, paths))
        if bucket.num_layers is not None:  # once more in the backward pass
            small = bucket.shard_size < _SMALL * layers[bucket.num_layers]
            found.append(dataclasses.replace(found[-1], is_optional=small))
    return found


_Planned = tuple[str, Any, int, Axes, int]


def _of_bucket(config: DistributedConfig, bucket: Bucket, micro_batches: int) -> Iterator[_Planned]:
    parallel, policy = config.parallel, config.policy
    wire, is_pairwise = policy.wire_dtype, policy.grad_reduce_dtype is not None
    whole = bucket.shard_size * config.num_shards
    shard = whole // parallel.num_inner_shards
    num_layers = bucket.num_layers or 1
    layer, passes = whole // num_layers, num_layers * micro_batches
    shards, replicas = parallel.shard_axes, parallel.replica_axes
    if parallel.strategy == "no_shard":
        if is_pairwise:
            yield from _pairwise(config, whole, replicas + shards, wire, 1, gathers=True)
        else:
            yield "all-reduce", wire, whole, parallel.data_axes, 1
        return
    if is_pairwise:
        yield from _pairwise(config, layer, shards, wire, passes)
    else:
        yield "reduce-scatter", wire, layer, shards, passes
    shards_more = parallel.outer_strategy == "optim"
    if replicas and is_pairwise:
        summed = policy.grad_reduce_dtype
        yield from _pairwise(config, shard, replicas, summed, 1, gathers=not shards_more)
    elif replicas:
        yield ("reduce-scatter" if shards_more else "all-reduce"), wire, shard, replicas, 1
    comm = bucket.dtype if policy.param_comm_dtype is None else policy.param_comm_dtype
    if shards_more:
        yield "all-gather", comm, shard, replicas, 1
    if bucket.num_layers is not None:
        yield "all-gather", comm, layer, shards, passes
    else:
        yield "all-gather", comm, whole, shards, 1


def _pairwise(
    config: DistributedConfig,
    elements: int,
    axes: Axes,
    wire_dtype: Any,
    times: int,
    *,
    gathers: bool = False,
) -> Iterator[_Planned]:
    """One exchange an axis, the last one first; what is summed once stays float32."""
    if gathers:
        elements += -elements % config.parallel.size(axes)
    remaining, dtype = elements, wire_dtype
    for axis in reversed(axes):
        yield "all-to-all", dtype, remaining, (axis,), times
        remaining //= config.parallel.size((axis,))
        dtype = jnp.float32
    if gathers:
        yield "all-gather", jnp.float32, elements, axes, times


def format_collectives(planned: Sequence[Collective]) -> str:
    """Returns a table, one line for each operation, dtype and set of axes."""
    rows: dict[Any, list[int]] = {}
    for c in planned:
        row = rows.setdefault((c.op, c.dtype.name, c.axes, c.devices, c.times), [0, 0, 0])
        for i, value in enumerate((1, c.elements, c.bytes_sent)):
            row[i] += value
    lines = [
        f"{'collective':<15} {'dtype':<14} {'over':<16} {'devices':>7} {'times':>5} {'arrays':>6} "
        f"{'elements':>13} {'MB sent':>10}"
    ]
    for (op, dtype, axes, devices, times), (count, elements, sent) in rows.items():
        lines.append(
            f"{op:<15} {dtype:<14} {','.join(axes):<16} {devices:>7} {times:>5} {count:>6} "
            f"{elements:>13} {sent / 1e6:>10.2f}"
        )
    return "\n".join(lines)
