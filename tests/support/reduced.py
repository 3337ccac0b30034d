"""The sum of gradients over devices, without the step behind it."""

import jax
import jax.numpy as jnp

import jdistadam as jda
from jdistadam.distributed import packing, step


def reduced(tx, layout, local_grads):
    """The flat sums over devices of gradients (devices, ...), and the dtypes of this one's shards."""
    dtypes = []

    def reduce(grads):
        leaves = [x[0] for x in jax.tree.leaves(grads)]
        shards = step.reduce_gradients(tx.config, layout, leaves)
        dtypes.extend(x.dtype for x in shards)
        return packing.flat_of(layout, shards, jnp.float32)

    specs = tx.config.parallel
    sharded = jax.shard_map(
        reduce,
        mesh=tx.config.mesh,
        in_specs=specs.batch_spec,
        out_specs=specs.state_spec,
        check_vma=False,
    )
    return jax.jit(sharded)(jda.shard_batch(local_grads, tx)), dtypes
