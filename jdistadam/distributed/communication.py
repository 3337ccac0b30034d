"""Runs the phases of a schedule: sums of gradients, and gathers of parameters, on each device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jdistadam.core import collectives
from jdistadam.distributed.mesh_axes import DataParallel
from jdistadam.distributed.schedule import BucketSchedule, Phase
from jdistadam.kernels import copies, multi_tensor
from jdistadam.kernels.parts import Cut, Parts, sum_parts


def sum_gradients(phases: Sequence[Phase], x: jax.Array, dim: int) -> jax.Array:
    """Sums a bucket's gradient over devices, phase by phase.

    Args:
      phases: The remaining "reduce" and "reduce_outer" phases.
      x: This device's contribution, or its shard of a partial sum.
      dim: The dimension along which the sum is cut, if each device keeps a shard.

    Returns:
      The sum, or this device's shard of it.
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
    # The same sums on all devices: each sums a shard of the array, then they gather the shards.
    flat = jnp.pad(x.reshape(-1), (0, -x.size % last.devices))
    shard = _exchange_and_sum(phase[:-1], flat, 0)
    return collectives.all_gather(shard, last.axes, dim=0)[: x.size].reshape(x.shape)


def _exchange_and_sum(exchanges: Phase, x: jax.Array, dim: int) -> jax.Array:
    """Returns this device's shard of the sum, added pairwise in float32 along one axis at a time.

    Contributions are rounded once to the dtype of the first exchange; partial sums stay float32.
    """
    if exchanges[0].groups:
        return sum_parts([_exchanged(exchanges, x, dim)]).sums[0]
    sizes = [c.devices for c in reversed(exchanges)]  # in the order of the axes, outermost first
    length = x.shape[dim] // math.prod(sizes)
    shape = (*x.shape[:dim], *sizes, length, *x.shape[dim + 1 :])
    x = collectives.keep_cast(x.reshape(shape), exchanges[0].dtype)
    for position, exchange in zip(reversed(range(len(sizes))), exchanges, strict=True):
        received = collectives.all_to_all(x, *exchange.axes, dim=dim + position)
        (x,) = multi_tensor.sum_contributions([received])
    return x


def gathered_params(
    parallel: DataParallel, entry: BucketSchedule, new: jax.Array, is_whole: bool
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
