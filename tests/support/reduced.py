"""The sum of gradients over devices, without the following step."""

import jax

import jdistadam as jda
from jdistadam.distributed import accumulate, packing
from jdistadam.kernels.parts import Parts, sum_parts


def reduced(tx, params, local_grads):
    """The flat sums over devices of gradients (devices, ...), and dtypes of a device's shards."""
    dtypes = []
    schedule = tx.config.schedule(params)

    def reduce(grads):
        leaves = [x[0] for x in jax.tree.leaves(grads)]
        found = accumulate.summed_shards(tx.config, schedule, leaves, of_step=True)
        shards = [sum_parts([x]).sums[0] if isinstance(x, Parts) else x for x in found]
        dtypes.extend(x.dtype for x in shards)
        return packing.flat_of(schedule.layout.buckets, shards)

    specs = tx.config.parallel
    sharded = jax.shard_map(
        reduce,
        mesh=tx.config.mesh,
        in_specs=specs.batch_spec,
        out_specs=specs.state_spec,
        check_vma=False,
    )
    return jax.jit(sharded)(jda.shard_batch(local_grads, tx)), dtypes
