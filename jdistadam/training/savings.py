"""The settings that make a part of a plan smaller."""

from __future__ import annotations

import jax.numpy as jnp

from jdistadam.core.codecs import FLOAT32
from jdistadam.core.storage import MOMENTS
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.flat_arrays import FLAT_ARRAYS
from jdistadam.distributed.layout import Layout

_GRADS = ("packed gradients", "gradients as sent", "received contributions", "mailboxes")
_RECEIVED = ("received contributions",)
_SUMS = ("accumulated gradients",)
_SHARDED = 'sharding_strategy="optim_grads_params"'


def settings_for(part: str, config: DistributedConfig, layout: Layout) -> tuple[str, ...]:
    """Returns settings that make a part of a plan smaller, without those that are already made.

    Args:
      part: The name of the part.
      config: The arguments of the optimizer.
      layout: The layout of its state.
    """
    parallel, policy, storage = config.parallel, config.policy, config.algorithm.storage
    dtypes = {jnp.dtype(leaf.dtype) for leaf in layout.leaves}
    shards, several = parallel.strategy != "no_shard", parallel.num_devices > 1
    is_wide = policy.main_params == FLOAT32 and jnp.float16 not in dtypes
    is_narrowed = policy.comm_dtype == jnp.float32 and jnp.float32 not in dtypes
    are_wide = all(storage.codec_of(moment) == FLOAT32 for moment in MOMENTS)
    keeps_sums = several and not parallel.shards_grads
    rows = (
        (FLAT_ARRAYS, several and not shards, 'sharding_strategy="optim"'),
        (("main_params",), is_wide, 'main_params_dtype="remainder16"'),
        (MOMENTS, are_wide, 'mu_dtype="block16", nu_dtype="block16"'),
        (FLAT_ARRAYS, part not in config.on_host, 'state_memory="pinned_host"'),
        (("params",), several and not parallel.shards_params, _SHARDED),
        (_GRADS, is_narrowed, "grad_comm_dtype=jnp.bfloat16"),
        (_SUMS, keeps_sums and parallel.shards_params, "reshard_after_forward=True"),
        (_SUMS, keeps_sums and not parallel.shards_params, 'sharding_strategy="optim_grads"'),
        (("mailboxes",), True, 'communication="xla"'),
        (_RECEIVED, policy.reduced_dtype != policy.comm_dtype, "grad_reduce_dtype=None"),
        (("gathered parameters",), parallel.shards_params, "layers, for scanned layers or blocks"),
    )
    return tuple(setting for parts, helps, setting in rows if helps and part in parts)
