"""The exact values of params: how a state begins with them, and whether params still follow."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jdistadam import compat
from jdistadam.core import collectives
from jdistadam.core.codecs import FLOAT32, Codec
from jdistadam.core.trees import Params
from jdistadam.distributed import flat_arrays, packing
from jdistadam.distributed.config import DistributedConfig, global_specs
from jdistadam.distributed.flat_arrays import Field
from jdistadam.distributed.global_arrays import brought
from jdistadam.distributed.layout import Bucket, Layout
from jdistadam.distributed.mesh_axes import DataParallel
from jdistadam.distributed.schedule import Schedule
from jdistadam.distributed.state import DistributedState


def begun_shard(
    config: DistributedConfig, layout: Layout, field: Field, params: Params
) -> jax.Array:
    """This device's flat array of a field that begins with params.

    Args:
      config: The configuration.
      layout: The layout of the params.
      field: Main parameters, or an average.
      params: The exact params, as this device holds them.
    """
    buckets, leaves = [*filter(field.has, layout.buckets)], jax.tree.leaves(params)
    shards = [packing.state_shard(config.parallel, b, leaves, jnp.float32) for b in buckets]
    flat = packing.flat_of(buckets, shards)
    # Varying, as shards are, for the type checker of shard_map.
    flat = collectives.to_varying(flat, config.parallel.cut_axes)
    _, stored = field.codec.split(flat, jnp.bfloat16, jnp)
    return stored


def exact_values(
    config: DistributedConfig, buckets: Sequence[Bucket], shards: Sequence[Any], main: Any
) -> jax.Array:
    """The exact parameters of consecutive buckets in float32, at the positions of their moments.

    Args:
      config: The configuration.
      buckets: The buckets.
      shards: This device's shard of the params of each bucket.
      main: Their main parameters, from the first bucket on; None: there are none.
    """
    kind = config.policy.main_params
    if main is not None and kind == FLOAT32 and all(bucket.has_main for bucket in buckets):
        return main
    exact = []
    for bucket, shard in zip(buckets, shards, strict=True):
        if main is not None and bucket.has_main:
            start = bucket.offset - buckets[0].offset
            kept = main[start : start + bucket.shard_size].reshape(bucket.shard_shape)
            shard = kind.join(shard, kept, jnp)
        exact.append(shard.astype(jnp.float32))
    return packing.flat_of(buckets, exact)


def round_to_comm_dtype(schedule: Schedule, params: Params, *, before_forward: bool = False) -> Any:
    """Returns global params rounded to param_comm_dtype, as a step rounds them to send them.

    Rounds those sent after the update; with ``before_forward``, those gathered before the forward
    pass.
    """
    sent = sent_dtypes(schedule, before_forward=before_forward)
    leaves = map(as_received, jax.tree.leaves(params), sent)
    return jax.tree.unflatten(jax.tree.structure(params), leaves)


def as_received(x: jax.Array, sent: Any) -> jax.Array:
    """A parameter as devices receive it in one of ``sent_dtypes``."""
    return x if sent is None else collectives.round_to(x, sent).astype(x.dtype)


def sent_dtypes(schedule: Schedule, *, before_forward: bool = False) -> list[Any]:
    """Returns the dtype to which a step rounds each new parameter before sending it.

    None if it does not round it: devices hold such parameters as the main parameters define them.
    With ``before_forward``: the dtype of what is gathered before the forward pass.
    """
    dtypes: list[Any] = [None] * len(schedule.layout.leaves)
    for entry in schedule.buckets:
        before = entry.gather if entry.bucket.is_sharded_param else ()
        for gather in before if before_forward else entry.after_update:
            for i in entry.bucket.leaves:
                dtypes[i] = None if gather.dtype == entry.bucket.dtype else gather.dtype
    return dtypes


# Parameters may be the rounded average by chance, while they have hardly moved. But rounding to 16
# bits changes an average by a quarter of the spacing of these numbers, in the mean, and another
# parameter's remainder by a third: by 2^-10 of its magnitude or more. An average that differs by
# half of this from the exact parameters, and rounds to the same numbers everywhere, is no chance.
_CHANCE = 2.0**-11


def compared_with_main(
    config: DistributedConfig, params: Params, state: DistributedState
) -> tuple[list[list[str]], bool]:
    """Returns which params differ from main parameters; whether all are the average.

    These are the paths of each bucket in which some differ: leaves of a bucket are compared
    together. Each device compares the shard that matches its state; nothing is gathered, but arrays
    in other places are copied to theirs. A remainder is the other half of its parameter, and
    matches every value. There the average tells, if there is one: it is in place of the params of
    the last step if these are equal to it, rounded, and their exact values are not. Nothing tells
    of float32 params without main parameters: an average may have begun with them.

    Args:
      config: The configuration.
      params: Tree of global params.
      state: The state.
    """
    layout = config.schedule_of(params).layout
    kind = config.policy.main_params
    tells = state.main_params is not None and not kind.is_remainder
    compared = [bucket for bucket in layout.buckets if bucket.has_main and tells]
    has_average = state.ema is not None and any(map(_rounds_average, layout.buckets))
    if not (compared or has_average):
        return [], False
    static = config.parallel, kind, config.policy.param_comm_dtype, layout.buckets
    specs = tuple(jax.tree.leaves(global_specs(config, layout, params)))
    compare = _comparison(*static, specs, bool(compared), has_average)
    arrays = jax.tree.leaves(params), state.main_params, state.ema
    places = [NamedSharding(config.mesh, spec) for spec in specs]
    for name in ("main_params", "ema"):
        places += [config.state_sharding(name)] * len(jax.tree.leaves(getattr(state, name)))
    results = compare(*brought(arrays, places, exactly=False))
    results = jax.tree.map(lambda x: np.asarray(x).tolist(), results)
    pairs = zip(compared, results["differ"], strict=True) if compared else ()
    paths = [[layout.leaves[i].path for i in bucket.leaves] for bucket, differs in pairs if differs]
    others, moved, size = results["average"] if has_average else (1, 0, 0)
    return paths, not others and moved > _CHANCE * size


def _rounds_average(bucket: Bucket) -> bool:
    """Whether params that are the average differ from it, by a rounding or a remainder."""
    return bucket.has_main or bucket.dtype != jnp.float32


@functools.lru_cache(maxsize=64)
def _comparison(
    parallel: DataParallel,
    kind: Codec,
    sent: Any,
    buckets: tuple[Bucket, ...],
    specs: tuple[P, ...],
    with_main: bool,
    with_average: bool,
) -> Any:
    """The program of ``compared_with_main``, compiled once for a layout.

    For each bucket with main parameters it returns whether any device's shard differs; and three
    numbers for the average: how many elements are not the rounded average, the sum of the distances
    of exact values from the average, and the sum of the magnitudes of the average.
    """
    axes = parallel.data_axes + parallel.tensor_axes

    def local(leaves: list[Any], main: Any, ema: Any) -> dict[str, jax.Array]:
        differ, numbers = [], []
        for bucket in buckets:
            have = packing.state_shard(parallel, bucket, leaves, bucket.dtype)
            kept = flat_arrays.shard_in(main, bucket) if bucket.has_main else None
            if with_main and kept is not None:
                differ.append(_differs(have, kept, sent))
            if with_average:
                exact = have if kept is None else kind.join(have, kept, jnp)
                average = flat_arrays.shard_in(ema, bucket)
                numbers.append(_beside_average(bucket, have, exact, average))
        sums = dict[str, jax.Array]()
        if with_main:
            sums["differ"] = collectives.all_reduce(jnp.stack(differ).astype(jnp.int32), axes) > 0
        if with_average:
            sums["average"] = collectives.all_reduce(jnp.sum(jnp.stack(numbers), axis=0), axes)
        return sums

    flat = parallel.state_spec
    in_specs = (list(specs), flat, flat)
    return jax.jit(compat.shard_map(local, mesh=parallel.mesh, in_specs=in_specs, out_specs=P()))


def _differs(have: jax.Array, kept: jax.Array, sent: Any) -> jax.Array:
    """Whether a shard of params is not its main parameters, rounded and perhaps sent."""
    equal = collectives.follows(have, kept)
    if sent is not None:  # as received; not so before the first step
        rounded = collectives.round_to(kept, have.dtype)
        equal |= have == as_received(rounded, sent)
    return ~jnp.all(equal)


def _beside_average(
    bucket: Bucket, have: jax.Array, exact: jax.Array, average: jax.Array
) -> jax.Array:
    others = jnp.sum(have != average.astype(bucket.dtype)).astype(jnp.float32)
    moved = jnp.sum(jnp.abs(exact.astype(jnp.float32) - average))
    size = jnp.sum(jnp.abs(average)) * _rounds_average(bucket)
    return jnp.stack([others, moved, size])
