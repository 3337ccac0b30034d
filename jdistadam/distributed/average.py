"""The moving average of the exact parameters, in the flat state next to the moments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jdistadam.core import trees
from jdistadam.distributed import calls, flat_arrays
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.layout import Layout
from jdistadam.distributed.main_params import exact_values
from jdistadam.distributed.state import DistributedState
from jdistadam.distributed.store import Store


def with_next_ema(
    config: DistributedConfig,
    layout: Layout,
    state: DistributedState,
    shards: Sequence[Any],
    is_skipped: jax.Array | None,
) -> DistributedState:
    """Returns the state with its average moved towards the new parameters, if it has one.

    Args:
      config: The configuration.
      layout: The layout.
      state: The state with new main parameters and moments. Their windows leave the device before
        windows of the average arrive.
      shards: This device's new parameters of each bucket; not read if ``state`` has them in
        float32.
      is_skipped: Whether the step is skipped; None if it cannot be.
    """
    if config.ema_decay is None:
        return state
    moves = calls.average_calls(config, layout)
    updated = jax.tree.leaves([getattr(state, name) for name in flat_arrays.STEPPED])
    store = Store(config, state, moves, shards, after=updated)
    for call in moves:
        taken = store.take(call)
        before, main = taken.arrays["ema"], taken.window("main_params")
        new = [span.of(shards[span.bucket_index]) for span in call.spans]
        values = exact_values(config, call.buckets, new, main)
        # Not d * old + (1 - d) * new: in float32 its weights do not add up to 1, and the average
        # of a constant would drift.
        moved = before + jnp.float32(1 - config.ema_decay) * (values - before)
        store.put(call, {"ema": trees.keep_if(is_skipped, before, moved)})
    return store.state()
