"""New parameters from their shards at the end of a step, as far as devices hold them."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from jdistadam.core import collectives
from jdistadam.distributed import packing, transport
from jdistadam.distributed.mesh_axes import DataParallel
from jdistadam.distributed.schedule import Schedule


def gather_new_params(
    parallel: DataParallel, schedule: Schedule, shards: Sequence[jax.Array]
) -> dict[int, jax.Array]:
    """Returns the new parameters by the index of the leaf, of all leaves that are in a bucket."""
    leaves: dict[int, jax.Array] = {}
    for entry, shard in zip(schedule.buckets, shards, strict=True):
        bucket = entry.bucket
        new = transport.gather_parameters(entry.after_update, shard, bucket.cut_dim)
        copies = tuple(axis for axis in parallel.tensor_axes if axis not in bucket.tensor_axes)
        new = collectives.to_invariant(new, copies)
        leaves.update(packing.leaves_of_bucket(schedule.layout, bucket, new))
    return leaves
