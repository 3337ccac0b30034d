"""How many bytes a device holds and sends in a training step, from shapes alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from jdistadam.core import trees
from jdistadam.core.arguments import check_count
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.layout import Bucket, Layout
from jdistadam.distributed.schedule import Collective, format_collectives, planned_collectives
from jdistadam.distributed.transformation import DistributedTransformation, check_distributed


@dataclasses.dataclass(frozen=True)
class Plan:
    """What ``plan`` returns; prints as two tables.

    All numbers are bytes on one device.

    Attributes:
      held: Between steps, by name: params, main_params, mu, nu, the identity of the layout, scalars
        (count, norm, loss scale).
        Their sum is what a compiled ``train_step`` takes besides the batch, gives back besides the
        metrics, and updates in place.
      sums: Sums of gradients over micro-batches, within a step; 0 for one micro-batch.
      buffers: What a step needs for a moment beside the model's own and the gradients, in the
        params' dtype, by use; an upper bound: XLA lets some of it share memory.
      collectives: What travels.
    """

    held: dict[str, int]
    sums: int
    buffers: dict[str, int]
    collectives: tuple[Collective, ...]

    @property
    def held_bytes(self) -> int:
        """Bytes between steps."""
        return sum(self.held.values())

    @property
    def buffer_bytes(self) -> int:
        """Upper bound of what the step needs for a moment, without the model's own."""
        return sum(self.buffers.values())

    @property
    def bytes_sent(self) -> int:
        """Bytes that a device sends in one step."""
        return sum(c.bytes_sent for c in self.collectives)

    def __str__(self) -> str:
        """Returns the tables."""
        parts = [(name, "held", size) for name, size in self.held.items()]
        parts += [("total", "held", self.held_bytes)]
        parts += [("sums of gradients", "in a step", self.sums)]
        parts += [(name, "in a step", size) for name, size in self.buffers.items()]
        lines = [f"{'on each device':<24} {'when':<10} {'MB':>12}"]
        lines += [f"{name:<24} {when:<10} {size / 1e6:>12.2f}" for name, when, size in parts]
        return "\n".join([*lines, "", format_collectives(self.collectives)])


def plan(params: Any, tx: DistributedTransformation, *, accumulate_steps: int = 1) -> Plan:
    r"""Says what a step of ``train_step`` needs on each device, before any array exists.

    With :math:`P` parameters on :math:`N` devices, float32 state and bfloat16 params, "optim" holds
    :math:`2 P + 12 P / N` bytes, and small leaves are padded.

    Args:
      params: Tree of global params, or of ``jax.ShapeDtypeStruct`` such as ``jax.eval_shape`` of
        the model's initialisation returns.
      tx: A distributed optimizer. Its mesh may be larger than what this machine has, if its
        devices come from ``jax.experimental.topologies``.
      accumulate_steps: As given to ``train_step``.

    Example:
      >>> import jax
      >>> import jdistadam as jda
      >>> tx = jda.distributed_fused_adamw(1e-3, mesh=jax.make_mesh((1,), ("data",)))
      >>> p = plan({"w": jax.ShapeDtypeStruct((1024, 1024), jnp.float32)}, tx)
      >>> p.held["params"], p.held["mu"], p.bytes_sent
      (4194304, 4194304, 0)
    """
    check_distributed(tx)
    check_count("accumulate_steps", accumulate_steps)
    trees.check_dtypes(params, name="params")
    config = tx.config
    layout = config.layout(config.tensor_local(params))
    buffers: dict[str, int] = {}
    for bucket in layout.buckets:
        for name, size in _buffers(config, bucket):
            buffers[name] = buffers.get(name, 0) + size
    return Plan(
        _held(config, layout, config.identity(config.tensor_local(params)).nbytes),
        _sums(config, layout) if accumulate_steps > 1 else 0,
        buffers,
        tuple(planned_collectives(config, params, accumulate_steps=accumulate_steps)),
    )


def _held(config: DistributedConfig, layout: Layout, identity_bytes: int) -> dict[str, int]:
    policy = config.policy
    sharded = {b.leaves[0]: b for b in layout.buckets if config.is_sharded_param(b)}
    sizes = [
        _size(config.inner_shard_shape(sharded[i])) if i in sharded else leaf.size
        for i, leaf in enumerate(layout.leaves)
    ]
    leaves = zip(sizes, layout.leaves, strict=True)
    scalars = 2 + (0 if config.loss_scale is None else 4)  # of LossScaleState
    return {
        "params": sum(size * jnp.dtype(leaf.dtype).itemsize for size, leaf in leaves),
        "main_params": layout.main_size * policy.main_dtype.itemsize,
        "mu": layout.flat_size * policy.mu_dtype.itemsize,
        "nu": layout.flat_size * policy.nu_dtype.itemsize,
        "layout identity": identity_bytes,
        "scalars": 4 * scalars,
    }


def _sums(config: DistributedConfig, layout: Layout) -> int:
    shards = config.parallel.shards_grads
    elements = sum(
        _size(config.inner_shard_shape(b)) if shards else _whole(config, b) for b in layout.buckets
    )
    return elements * config.policy.main_grads_dtype.itemsize


def _buffers(config: DistributedConfig, bucket: Bucket) -> Iterator[tuple[str, int]]:
    """What one bucket passes through, in this order."""
    policy, parallel = config.policy, config.parallel
    # Stacked layers pass one after the other; the sum of gradients holds all of them.
    whole = _whole(config, bucket) // (bucket.num_layers or 1)
    inner = _size(config.inner_shard_shape(bucket))
    wire, reduced = policy.wire_dtype.itemsize, policy.reduced_dtype.itemsize
    pairwise = policy.grad_reduce_dtype is not None
    if bucket.dim is None:
        widest = jnp.promote_types(bucket.dtype, policy.wire_dtype)
        yield "packed gradients", whole * jnp.dtype(widest).itemsize
    if bucket.dim is None or policy.wire_dtype != bucket.dtype:
        yield "gradients for the wire", whole * wire
    if pairwise:
        yield "received contributions", whole * wire
    yield "reduced gradients", inner * reduced
    if parallel.strategy == "no_shard" and pairwise:
        yield "reduced gradients", whole * reduced
    elif parallel.strategy != "no_shard" and parallel.replica_axes:
        yield "reduced gradients", 2 * inner * reduced
    itemsize = jnp.dtype(bucket.dtype).itemsize
    comm = bucket.dtype if policy.param_comm_dtype is None else policy.param_comm_dtype
    yield "new shards", bucket.shard_size * itemsize
    if not bucket.has_main or policy.keeps_remainders:
        yield "new shards", bucket.shard_size * itemsize  # cut out of the params
    if comm != bucket.dtype:
        yield "gathered parameters", whole * jnp.dtype(comm).itemsize
    if bucket.dim is None:
        yield "gathered parameters", whole * itemsize
    if bucket.num_layers is not None:
        yield "gathered parameters", 2 * whole * itemsize  # of this layer and the next


def _whole(config: DistributedConfig, bucket: Bucket) -> int:
    return bucket.shard_size * config.num_shards


def _size(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape))
