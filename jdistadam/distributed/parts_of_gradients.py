"""Gradients that arrived as parts: which are added before the update, and which in its kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jdistadam.core.codecs import FLOAT32
from jdistadam.core.guards import LossScaleState, norm_scale
from jdistadam.core.precision import is_sent_as_is
from jdistadam.distributed.accumulate import StepGrads
from jdistadam.distributed.calls import Call, make_calls
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.flat_arrays import main_codec
from jdistadam.distributed.layout import Bucket
from jdistadam.distributed.schedule import Schedule
from jdistadam.kernels.parts import Adding, Cut, Parts, sum_parts


def steps_on_parts(config: DistributedConfig, bucket: Bucket) -> bool:
    """Whether one kernel adds the parts of a bucket's gradient and steps.

    This kernel has no codecs, rounding or norms of leaves. It needs float32 main parameters in
    device memory, of which devices have equal parts.
    """
    return (
        config.transport.is_peer
        and bucket.split == 1  # otherwise no device has another part
        and not (config.parallel.replica_axes or config.on_host)
        and main_codec(config, bucket) == FLOAT32
        and not config.algorithm.storage.is_any
        and config.norms is None
    )


def is_written_whole(config: DistributedConfig, bucket: Bucket) -> bool:
    """Whether that kernel writes new parameters into the whole array, which is gathered next."""
    is_whole = not bucket.is_sharded_param and is_sent_as_is(config.policy, bucket.dtype)
    return is_whole and steps_on_parts(config, bucket)


def adding(config: DistributedConfig, call: Call) -> Adding | None:
    """How the kernel of a call adds parts, or takes their sums; None: it is no such kernel."""
    if not steps_on_parts(config, call.buckets[0]):
        return None
    cuts = [Cut(x.shard_shape, x.cut_dim, config.transport.groups) for x in call.buckets]
    return Adding(cuts, is_written_whole(config, call.buckets[0]))


def added(
    config: DistributedConfig,
    schedule: Schedule,
    grads: StepGrads,
    scaling: LossScaleState | None,
    *,
    all_of_them: bool = True,
) -> tuple[StepGrads, Sequence[Any]]:
    """Adds parts in the order in which they arrive.

    Args:
      config: The configuration.
      schedule: The schedule of the params.
      grads: Gradients, of which some may be ``Parts``.
      scaling: The loss scale, by which the norm is divided.
      all_of_them: Whether also those that the kernel of an update could add.

    Returns:
      The gradients, and the tiles of the norm of each bucket that was added, None for others; no
      tiles unless all were parts.
    """
    arrays = list(grads.arrays)
    if not any(isinstance(x, Parts) for x in arrays):
        return grads, ()
    tiles: list[jax.Array | None] = [None] * len(arrays)
    scale = norm_scale(scaling)
    # Those of experts never come in parts; of shards, in a loop of the user's own, they were added.
    are_all_parts = all(isinstance(x, Parts) for x in arrays)
    for call in make_calls(config, schedule, [x.dtype for x in arrays]):
        if not all_of_them and are_all_parts and steps_on_parts(config, call.buckets[0]):
            continue
        of_call = [span.bucket_index for span in call.spans]
        indices = [i for i in of_call if isinstance(arrays[i], Parts)]
        if not indices:
            continue
        sums = sum_parts([arrays[i] for i in indices], scale)
        for i, total, of_total in zip(indices, *sums, strict=True):
            arrays[i], tiles[i] = total, of_total
    return grads._replace(arrays=arrays), tiles if are_all_parts else ()
