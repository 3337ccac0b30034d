"""Updates one device's flat state: one kernel call after another, and gathers of new parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdistadam.core.codecs import FLOAT32
from jdistadam.core.storage import MOMENTS
from jdistadam.distributed import block_positions, packing
from jdistadam.distributed.calls import Call, make_calls
from jdistadam.distributed.communication import gathered_params
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.flat_arrays import STEPPED, main_codec
from jdistadam.distributed.layout import Bucket, Layout
from jdistadam.distributed.norms import squares_request
from jdistadam.distributed.parts_of_gradients import adding, is_written_whole
from jdistadam.distributed.schedule import Schedule
from jdistadam.distributed.state import DistributedState
from jdistadam.distributed.store import Store, Taken
from jdistadam.kernels.call import Arrays, KernelCall, run
from jdistadam.kernels.operands import Rounding, RoundingSpec, Scalars, Spec


class ShardUpdate(NamedTuple):
    """The results of an update.

    Attributes:
      state: The state with new main parameters and moments.
      shards: New parameters of each bucket, for this device's shard of the state; None where they
        were written into the whole array, and the state has them in float32.
      gathered: New parameters of each bucket in the form that devices hold between steps.
      squares: The buckets of each kernel call, and sums of squares of their leaves, or None
        without norms.
      tiles: Of each bucket whose parts the update added, the tiles of the norm of the sum.
    """

    state: DistributedState
    shards: Sequence[Any]
    gathered: Sequence[jax.Array]
    squares: Sequence[tuple[Sequence[Bucket], Any]]
    tiles: Sequence[Any]


def update_shards(
    config: DistributedConfig,
    schedule: Schedule,
    scalars: Scalars,
    *,
    grads: Sequence[jax.Array],
    state: DistributedState,
    params: Sequence[Any],
) -> ShardUpdate:
    """Updates the flat state in place, and gathers new parameters, in the order of ``make_calls``.

    Parameters without main parameters are updated themselves.

    Args:
      config: The configuration.
      schedule: The schedule of the params.
      scalars: The scalars of the kernel calls.
      grads: This device's shard of the summed gradient of each bucket, or its parts.
      state: The state.
      params: Leaves of the params, in the form that this device holds.
    """
    layout, buckets = schedule.layout, schedule.layout.buckets
    old = [_old_params(config, bucket, params) for bucket in buckets]
    calls = make_calls(config, schedule, [x.dtype for x in grads])
    store = Store(config, state, calls, grads)
    new_by_start: list[dict[int, jax.Array]] = [{} for _ in buckets]
    shards, gathered = [list[Any]([None] * len(buckets)) for _ in range(2)]
    squares, tiles = [], list[Any]([None] * len(buckets))
    for call in calls:
        arrived = store.wait_for([gathered[i] for i in call.waits_for])
        for i, new in zip(call.waits_for, arrived, strict=True):
            gathered[i] = new
        taken = store.take(call)
        static, rounding = _rounding_of(config, layout, call, state)
        new = run(
            KernelCall.of(
                main_codec(config, call.buckets[0]),
                _spec(config, call, taken, static),
                scalars,
                _arrays(call, grads, old, taken),
                call.buckets[0].dtype,
                rounding,
                squares_request(config, layout, call.buckets),
                adding(config, call),
            )
        )
        squares.append((call.buckets, new.squares))
        store.put(call, {name: getattr(new, name)[0] for name in taken.arrays})
        for span, of_span in zip(call.spans, new.params, strict=True):
            new_by_start[span.bucket_index][span.start or 0] = of_span
        for span, of_sum in zip(call.spans, new.tiles, strict=False):  # of added parts
            tiles[span.bucket_index] = of_sum
        for i in call.gathers:
            shard = packing.joined(buckets[i], new_by_start[i])
            is_whole = is_written_whole(config, buckets[i])
            gathered[i] = gathered_params(config.parallel, schedule.buckets[i], shard, is_whole)
            shards[i] = None if is_whole else shard
    return ShardUpdate(store.state(), shards, gathered, squares, tiles)


def _old_params(config: DistributedConfig, bucket: Bucket, params: Sequence[Any]) -> Any:
    """A bucket's old parameters; None if they are casts of main parameters, and not read."""
    if main_codec(config, bucket) == FLOAT32:
        return None
    return packing.state_shard(config.parallel, bucket, params, bucket.dtype)


def _arrays(call: Call, grads: Sequence[Any], old: Sequence[Any], taken: Taken) -> Arrays:
    """The arrays of a kernel call; those of the state are flat."""
    of_grads, of_params = (
        [span.of(x[span.bucket_index]) for span in call.spans] for x in (grads, old)
    )
    main, mu, nu = ((taken.arrays.get(name),) for name in STEPPED)
    return Arrays(of_grads, of_params, main, mu, nu)


def _spec(
    config: DistributedConfig, call: Call, taken: Taken, rounding: RoundingSpec | None
) -> Spec:
    """What is static in a kernel call, without main parameters."""
    buckets = call.buckets
    return Spec(
        "step",
        groups=tuple(bucket.group for bucket in buckets),
        flags=config.algorithm.hyper.flags,
        flat=frozenset(MOMENTS),
        sizes=tuple(bucket.shard_size for bucket in buckets),
        offsets=taken.starts("main_params" if buckets[0].has_main else "mu"),
        mu_offsets=taken.starts("mu"),
        nu_offsets=taken.starts("nu"),
        rounding=rounding,
    )


def _rounding_of(
    config: DistributedConfig, layout: Layout, call: Call, state: DistributedState
) -> tuple[RoundingSpec | None, Rounding | None]:
    """How a kernel call rounds, and what its random bits depend on; None: no codes, to nearest."""
    storage = config.algorithm.storage
    if not storage.is_any:
        return None, None
    positions, tables = block_positions.positions_of(layout, call.spans, config.parallel)
    spec = RoundingSpec(
        is_stochastic=storage.is_stochastic,
        ids=tuple(bucket.leaves[0] for bucket in call.buckets),
        cuts=tuple(block_positions.partition_of(layout, x, config.parallel) for x in call.buckets),
        tables=tables,
    )
    key = state.key if storage.is_stochastic else jnp.zeros((2,), jnp.uint32)
    return spec, Rounding(key, state.count, positions)
