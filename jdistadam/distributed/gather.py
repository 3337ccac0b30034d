"""Parameters from their shards: at the end of a step, as far as devices hold them, or before one.

[Note: parameters at rest]
With ``params_at_rest="shard"`` a step begins with these gathers, one for each bucket, each of
which depends on nothing but the shards: the compiler is free to run them beside the forward pass.
They are outside of what is differentiated, so gradients are local and have the shape of unsharded
parameters. ``train_step`` tells XLA for GPUs not to merge them: merged, they are one that runs
before all else. Apart, in the program of a GPT for 8 H200s most are in flight while products run,
and end just before their first use. Layers of a scan are one leaf each, gathered before the scan.
"""

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
        if bucket.is_packed and bucket.is_sharded_param:
            leaves.update(packing.held_of_shard(bucket, new))
        else:
            leaves.update(packing.leaves_of_bucket(schedule.layout, bucket, new))
    return leaves


def gather_params_at_rest(schedule: Schedule, held: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the leaves of unsharded params, of what a device holds of them.

    Their types say that they may differ between devices: else types would have every use of them
    summed over the devices in the backward pass.
    """
    leaves = list(held)
    for entry in schedule.buckets:
        bucket = entry.bucket
        is_held = all(held[part.leaf].shape == part.shape for part in bucket.held)
        if is_held and bucket.is_sharded_param:
            shard = packing.bucket_array(bucket, held, bucket.dtype)
            whole = transport.gather_parameters(entry.gather, shard, bucket.cut_dim, to="varying")
            for i, leaf in packing.leaves_of_bucket(schedule.layout, bucket, whole):
                # Else XLA may fuse the unpacking with the model, and sum in another order than
                # where parameters are arguments.
                leaves[i] = jax.lax.optimization_barrier(leaf)
    return leaves
