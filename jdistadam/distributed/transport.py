"""Runs the collectives of a schedule on the arrays of one device, inside ``jax.shard_map``."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jdistadam.core import collectives
from jdistadam.distributed.schedule import Phase
from jdistadam.kernels import multi_tensor


def sum_gradients(phases: Sequence[Phase], x: jax.Array, dim: int) -> jax.Array:
    """Sums a bucket's gradient over devices, phase by phase.

    Args:
      phases: Those of "reduce" and "reduce_outer" that are still to come.
      x: This device's contribution, or its part of what was summed.
      dim: The dimension along which the sum is cut, where each device keeps a part.

    Returns:
      The sum, or this device's part of it.
    """
    for phase in phases:
        x = _sum_phase(phase, x, dim) if phase else x
    return x


def _sum_phase(phase: Phase, x: jax.Array, dim: int) -> jax.Array:
    first, last = phase[0], phase[-1]
    if first.op == "all-reduce":
        return collectives.all_reduce(collectives.round_to(x, first.dtype), first.axes)
    if first.op == "reduce-scatter":
        return collectives.reduce_scatter(x, first.axes, dim=dim, wire_dtype=first.dtype)
    if last.op != "all-gather":
        return _exchange_and_sum(phase, x, dim)
    # The same sums on all devices: each adds a part of the array, and they gather the parts.
    flat = jnp.pad(x.reshape(-1), (0, -x.size % last.devices))
    part = _exchange_and_sum(phase[:-1], flat, 0)
    return collectives.all_gather(part, last.axes, dim=0)[: x.size].reshape(x.shape)


def _exchange_and_sum(exchanges: Phase, x: jax.Array, dim: int) -> jax.Array:
    """Keeps this device's part of the sum, added pairwise in float32 along one axis after another.

    Contributions are rounded once to the dtype of the first exchange; partial sums stay float32.
    """
    sizes = [c.devices for c in reversed(exchanges)]  # in the order of the axes, outermost first
    part = x.shape[dim] // math.prod(sizes)
    shape = (*x.shape[:dim], *sizes, part, *x.shape[dim + 1 :])
    x = collectives.keep_cast(x.reshape(shape), exchanges[0].dtype)
    for position, exchange in zip(reversed(range(len(sizes))), exchanges, strict=True):
        received = collectives.all_to_all(x, *exchange.axes, dim=dim + position)
        (x,) = multi_tensor.sum_contributions([received])
    return x


def gather_parameters(phase: Phase, shard: jax.Array, dim: int, to: str = "invarying") -> jax.Array:
    """Concatenates parameter shards along ``dim``, as a phase says.

    They are sent in ``param_comm_dtype``; what arrives, and the device's own, is rounded to it.

    Args:
      phase: All-gathers. From the least significant axis on: each makes what the next one's
        devices hold whole.
      shard: This device's shard.
      dim: The dimension along which it was cut.
      to: "varying" where the type of the result shall say that it may differ between devices.
    """
    whole = shard
    for gather in phase:
        whole = collectives.round_to(whole, gather.dtype)
        whole = collectives.all_gather(whole, gather.axes, dim=dim, to=to)
    return whole.astype(shard.dtype)
