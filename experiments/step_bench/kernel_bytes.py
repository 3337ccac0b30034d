"""Bytes that a step's kernels read and write in device memory, from its schedule."""

from __future__ import annotations

import jax.numpy as jnp

from jdistadam.core.codecs import FLOAT32
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.layout import Bucket
from jdistadam.distributed.parts_of_gradients import steps_on_parts
from jdistadam.distributed.schedule import Schedule

_FLOAT32 = 4  # bytes of the kernels' sums


def kernel_bytes(
    config: DistributedConfig, schedule: Schedule, *, accumulate_steps: int = 1
) -> dict[str, int]:
    r"""Returns the bytes that each kernel of a step reads and writes on one device.

    A device's shard has :math:`z` parameters. :math:`m` of them have main parameters of :math:`s`
    bytes. Gradients have :math:`g` bytes after the sum over devices, params :math:`p` bytes and
    moments :math:`\mu` and :math:`\nu` bytes::

        accumulate   A (2 a + c) z'      sums over A > 1 micro-batches, of a bytes; contributions
                                         of c bytes; z': the shard of "optim_grads", else all
        sum          (n c + g) z         n received contributions, with grad_reduce_dtype
        norm         g z
        update       (g + 2 mu + 2 nu + p) z + 2 s m
                                         and p more if the parameter itself is read

    Over peer memory the kernel that adds contributions also takes the norm, and the update adds
    them itself, without "sum" and with n c in place of g, unless it needs the norm first.

    Casts, packing and copies are not counted.

    Args:
      config: ``tx.config``.
      schedule: The result of ``config.schedule``.
      accumulate_steps: As given to ``train_step``.

    Example:
      >>> import jax, numpy as np
      >>> import jdistadam as jda
      >>> mesh = jax.sharding.Mesh(np.arange(4), ("data",))
      >>> policy = jda.MixedPrecisionPolicy(grad_comm_dtype="bfloat16")
      >>> config = jda.distributed(jda.fused_adamw(1e-3), mesh=mesh, policy=policy).config
      >>> w = jax.ShapeDtypeStruct((1024, 1024), "bfloat16")
      >>> found = kernel_bytes(config, config.schedule({"w": w}))
      >>> {name: 4 * size / 1024**2 for name, size in found.items()}  # per parameter
      {'norm': 2.0, 'update': 28.0}
    """
    reduced = config.policy.reduced_dtype.itemsize
    found = {"accumulate": 0, "sum": 0, "norm": 0, "update": 0}
    for entry in schedule.buckets:
        bucket = entry.bucket
        if accumulate_steps > 1:
            found["accumulate"] += accumulate_steps * _accumulated(config, schedule, bucket)
        gradient = bucket.shard_size * reduced
        adds_in_update = steps_on_parts(config, bucket) and not config.takes_norm_first
        for c in entry.reduce + entry.reduce_outer:
            if c.op != "all-to-all":
                continue
            received = c.elements * c.dtype.itemsize
            if adds_in_update:
                gradient = received
            else:
                found["sum"] += c.times * (received + c.elements // c.devices * reduced)
        if not config.transport.is_peer:
            found["norm"] += gradient
        found["update"] += gradient + bucket.shard_size * jnp.dtype(bucket.dtype).itemsize
        found["update"] += state_bytes(config, bucket)
    return {name: size for name, size in found.items() if size}


def state_bytes(config: DistributedConfig, bucket: Bucket) -> int:
    """Bytes of a bucket's state that an update reads and writes.

    The parameter itself counts if it is read: without main parameters, or with remainders.
    """
    policy, storage = config.policy, config.algorithm.storage
    dtype = policy.main_params.dtype
    size = 0
    if bucket.has_main and dtype is not None:
        size += 2 * dtype.itemsize
    if not bucket.has_main or dtype is None or dtype.itemsize < _FLOAT32:
        size += jnp.dtype(bucket.dtype).itemsize
    total = bucket.shard_size * size
    for moment in ("mu", "nu"):
        codec = storage.codec_of(moment)
        codec = FLOAT32 if codec.is_coded and not bucket.is_coded else codec
        total += 2 * codec.nbytes(bucket.shard_size)
    return total


def _accumulated(config: DistributedConfig, schedule: Schedule, bucket: Bucket) -> int:
    """Bytes of adding one micro-batch's gradients to their sums."""
    policy = config.policy
    if config.parallel.shards_grads:
        return bucket.inner_size * (
            policy.reduced_dtype.itemsize + 2 * policy.main_grads_dtype.itemsize
        )
    whole = schedule.layout.whole_size(bucket)
    return whole * (jnp.dtype(bucket.dtype).itemsize + 2 * policy.main_grads_dtype.itemsize)
