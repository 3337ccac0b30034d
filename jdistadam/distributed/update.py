"""Updates one device's flat state: one kernel call after another, and gathers of new parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdistadam.core.codecs import FLOAT32, NOTHING
from jdistadam.distributed import block_positions, packing
from jdistadam.distributed.calls import Call, make_calls
from jdistadam.distributed.communication import gathered_params
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.layout import Bucket, Layout
from jdistadam.distributed.norms import squares_request
from jdistadam.distributed.parts_of_gradients import is_written_whole, step_on_parts, steps_on_parts
from jdistadam.distributed.schedule import Schedule
from jdistadam.distributed.state import DistributedState
from jdistadam.distributed.store import Store, Taken
from jdistadam.kernels import native
from jdistadam.kernels.adam import adam
from jdistadam.kernels.operands import (
    Operands,
    Rounding,
    RoundingSpec,
    Scalars,
    Spec,
    keeping_main_params,
    new_params,
)


class ShardUpdate(NamedTuple):
    """The results of an update.

    Attributes:
      state: The state with new main parameters and moments.
      shards: New parameters of each bucket, for this device's part of the state; None where they
        were written into the whole array, and the state has them in float32.
      gathered: New parameters of each bucket in the form that devices hold between steps.
      tiles: Of each bucket whose parts the update added, the tiles of the norm of the sum.
      squares: The buckets of each kernel call, and sums of squares of their leaves, or None
        without norms.
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
    norm_scale: Any,
) -> ShardUpdate:
    """Updates the flat state in place, and gathers new parameters, in the order of ``make_calls``.

    Parameters without main parameters are updated themselves.

    Args:
      config: The configuration.
      schedule: The schedule of the params.
      scalars: The scalars of the kernel calls.
      grads: This device's part of the summed gradient of each bucket, or the parts of it.
      state: The state.
      params: Leaves of the params, in the form that this device holds.
      norm_scale: The factor of sums in the norm of gradients whose parts it adds.
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
        spec, operands = _operands_of(config, call, grads, old, taken, static)
        if steps_on_parts(config, call.buckets[0]):
            made = step_on_parts(config, call, spec, scalars, operands, norm_scale)
            for piece, new, found in zip(call.pieces, made.params, made.tiles, strict=True):
                i = piece.bucket_index
                tiles[i] = found
                is_whole = is_written_whole(config, buckets[i])
                gathered[i] = gathered_params(config.parallel, schedule.buckets[i], new, is_whole)
            store.put(call, made.state)
            continue
        request = squares_request(config, layout, call.buckets)
        results = adam(spec, scalars, operands.unfused(), rounding, request)
        squares.append((call.buckets, results.squares))
        results = native.unfused(results._replace(squares=None))
        new_parts, main = new_params(_kept(config, call.buckets[0]), results)
        arrays = {"mu": results.mu, "nu": results.nu, "main_params": main}
        store.put(call, {name: arrays[name][0] for name in taken.arrays})
        for piece, part in zip(call.pieces, new_parts, strict=True):
            new_by_start[piece.bucket_index][piece.start or 0] = part
        for i in call.gathers:
            shards[i] = packing.joined(buckets[i], new_by_start[i])
            gathered[i] = gathered_params(config.parallel, schedule.buckets[i], shards[i])
    return ShardUpdate(store.state(), shards, gathered, squares, tiles)


def _old_params(config: DistributedConfig, bucket: Bucket, params: Sequence[Any]) -> Any:
    """A bucket's old parameters; None if they are casts of main parameters, and not read."""
    if config.policy.main_params == FLOAT32 and bucket.has_main:
        return None
    return packing.state_shard(config.parallel, bucket, params, bucket.dtype)


def _operands_of(
    config: DistributedConfig,
    call: Call,
    grads: Sequence[Any],
    old: Sequence[Any],
    taken: Taken,
    rounding: RoundingSpec | None,
) -> tuple[Spec, Operands]:
    """The static side and the operands of a kernel call."""
    buckets, first = call.buckets, call.buckets[0]
    of_grads, of_params = (
        [piece.of(x[piece.bucket_index]) for piece in call.pieces] for x in (grads, old)
    )
    spec = Spec(
        "step",
        groups=tuple(bucket.group for bucket in buckets),
        flags=config.algorithm.hyper.flags,
        flat=frozenset(("mu", "nu")),
        sizes=tuple(bucket.shard_size for bucket in buckets),
        offsets=taken.starts("main_params" if first.has_main else "mu"),
        mu_offsets=taken.starts("mu"),
        nu_offsets=taken.starts("nu"),
        rounding=rounding,
    )
    arrays = taken.arrays
    operands = Operands(of_grads, of_params, (arrays["mu"],), (arrays["nu"],))
    main = (arrays.get("main_params"),)
    return keeping_main_params(
        _kept(config, first), spec, operands, main, first.dtype, is_flat=True
    )


def _kept(config: DistributedConfig, bucket: Bucket) -> Any:
    """How main parameters of a bucket are kept."""
    return config.policy.main_params if bucket.has_main else NOTHING


def _rounding_of(
    config: DistributedConfig, layout: Layout, call: Call, state: DistributedState
) -> tuple[RoundingSpec | None, Rounding | None]:
    """How a kernel call rounds, and what its random bits depend on; None: no codes, to nearest."""
    storage = config.algorithm.storage
    if not storage.is_any:
        return None, None
    positions, tables = block_positions.positions_of(
        layout, call.pieces, config.parallel, config.cutting_axes, config.cutting_parts
    )
    spec = RoundingSpec(
        is_stochastic=storage.is_stochastic,
        ids=tuple(bucket.leaves[0] for bucket in call.buckets),
        cuts=tuple(
            block_positions.partition_of(layout, x, config.cutting_parts) for x in call.buckets
        ),
        tables=tables,
    )
    key = state.key if storage.is_stochastic else jnp.zeros((2,), jnp.uint32)
    return spec, Rounding(key, state.count, positions)
