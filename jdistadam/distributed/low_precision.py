"""What the kernel is told of buckets whose moments are coded, or where rounding is at random."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp

from jdistadam.core import varying
from jdistadam.distributed.blocks import cuts_of, places_of
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.flat_moments import offset_of
from jdistadam.distributed.layout import Bucket, Layout
from jdistadam.distributed.state import DistributedState
from jdistadam.kernels.adam import Operands, Scalars, Spec
from jdistadam.kernels.quantized_adam import Places, QuantizedSpec, Rounding


def quantized_call(
    config: DistributedConfig,
    layout: Layout,
    buckets: Sequence[Bucket],
    spec: Spec,
    scalars: Scalars,
    state: DistributedState,
    operands: Operands,
) -> tuple[QuantizedSpec, Scalars, Rounding, Places, Operands]:
    """Returns the arguments of ``quantized_adam.adam`` for buckets of equal dtypes.

    Args:
      config: The configuration.
      layout: The layout.
      buckets: The buckets.
      spec: The call without rounding.
      scalars: What the kernel is told besides arrays.
      state: The state: its count and key say which random bits are drawn.
      operands: The shards of gradients and params, and the flat arrays.
    """
    storage, parts = config.algorithm.storage, config.tensor_parts
    places, tables = places_of(
        layout, buckets, config.parallel.state_axes, config.cutting_axes, parts
    )
    cuts = tuple(cuts_of(layout, bucket, parts) for bucket in buckets)
    quantized = QuantizedSpec(
        adam=spec,
        is_random=storage.is_random,
        ids=tuple(bucket.leaves[0] for bucket in buckets),
        mu_offsets=tuple(offset_of(state.mu, bucket) for bucket in buckets),
        nu_offsets=tuple(offset_of(state.nu, bucket) for bucket in buckets),
        cuts=cuts,
        tables=tables,
    )
    key = state.key if storage.is_random else jnp.zeros((2,), jnp.uint32)
    args = (scalars, Rounding(key, state.count), places, operands)
    return quantized, *varying.vary_together(args)
