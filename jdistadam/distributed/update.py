"""Updates one device's flat state: scalars, clipping, kernel calls, new parameters.

[Note: gathers beside updates]
A kernel call updates no more buckets than those whose new parameters XLA sends in one merged
all-gather. The gather of one call then runs beside the next call. The call after that waits for it,
by an optimization barrier: otherwise XLA starts all gathers when the last call has ended. A state
in host memory is updated in windows instead, and gathered at the end.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdistadam.core import collectives
from jdistadam.core.codecs import FLOAT32, NOTHING, Codec
from jdistadam.core.guards import exceeds
from jdistadam.core.hyperparameters import coefficient_rows
from jdistadam.distributed import host_memory, packing
from jdistadam.distributed.communication import gather_parameters
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.flat_moments import offset_of, operand_of, with_result
from jdistadam.distributed.layout import Bucket, Layout
from jdistadam.distributed.mesh_axes import DataParallel
from jdistadam.distributed.norms import asked_of
from jdistadam.distributed.packing import Piece, cuts_of, positions_of
from jdistadam.distributed.schedule import MERGED_BYTES, BucketSchedule, Schedule
from jdistadam.distributed.state import DistributedState
from jdistadam.kernels import native, quantized_adam
from jdistadam.kernels.adam import (
    Operands,
    Scalars,
    Spec,
    adam,
    new_params,
    with_main_params,
)
from jdistadam.kernels.quantized_adam import LeafPositions, QuantizedSpec, Rounding

MOMENTS = ("mu", "nu")


class FlatState(NamedTuple):
    """This device's flat arrays."""

    main_params: Any
    mu: Any
    nu: Any

    def operands(self, bucket: Bucket) -> dict[str, Any]:
        """The arrays that a bucket is in, by field."""
        return {name: operand_of(getattr(self, name), bucket) for name in _fields_of(bucket)}

    def replaced(self, bucket: Bucket, operands: dict[str, Any]) -> FlatState:
        """This state with the arrays of ``operands`` replaced."""
        new = {k: with_result(getattr(self, k), bucket, x) for k, x in operands.items()}
        return self._replace(**new)


def _fields_of(bucket: Bucket) -> tuple[str, ...]:
    """The fields of ``FlatState`` that a bucket is in."""
    return (*MOMENTS, "main_params") if bucket.has_main else MOMENTS


class UpdateResult(NamedTuple):
    """The results of an update, over either transport.

    Attributes:
      flat: The new state.
      shards: New parameters of each bucket, for this device's part of the state; not read if
        ``flat`` has them in float32.
      leaves: New parameters by leaf index.
      norm: The global norm of the mean gradient.
      found_inf: Whether a gradient is non-finite; only with a loss scale.
      is_skipped: Whether the step is skipped; None if it cannot be.
      is_empty: Whether the total weight is zero; None if it cannot be.
      norms: The norms by name; None if not requested.
    """

    flat: FlatState
    shards: Sequence[Any]
    leaves: dict[int, jax.Array]
    norm: jax.Array
    found_inf: jax.Array
    is_skipped: jax.Array | None
    is_empty: jax.Array | None
    norms: dict[str, jax.Array] | None = None


def skipped(
    config: DistributedConfig,
    state: DistributedState,
    norm: jax.Array,
    found_inf: jax.Array,
    is_empty: jax.Array | None,
    is_other: jax.Array,
) -> jax.Array | None:
    """Whether a step is skipped; a step with a state of another layout never is.

    Reasons: a non-finite gradient, with a loss scale; its norm, with a guard; a total weight of
    zero. None if none of them is possible.
    """
    flags = [is_empty] if is_empty is not None else []
    if state.scaling is not None:
        flags.append(found_inf)
    if config.norm_guard is not None and state.guard is not None:
        flags.append(exceeds(config.norm_guard, state.guard, norm))
    return functools.reduce(jnp.logical_or, flags) & ~is_other if flags else None


def step_scalars(
    config: DistributedConfig,
    state: DistributedState,
    mean_scale: jax.Array,
    norm: jax.Array | None,
    is_skipped: jax.Array | None,
    is_other: jax.Array,
) -> Scalars:
    """The scalars of the kernel call; one factor combines loss scale, mean and clip.

    For a state of another layout the coefficients are NaN, and so are all results.
    """
    rows = coefficient_rows(config.algorithm.groups.used, state.count)
    inv_scale = clipped_scale(config.max_grad_norm, mean_scale, norm)
    if config.norms is not None and is_skipped is not None:
        # So that norms of leaves are finite even if the total norm is not.
        inv_scale = jnp.where(is_skipped, mean_scale, inv_scale)
    if state.scaling is not None:
        inv_scale = inv_scale * (1 / state.scaling.loss_scale)
    skip = jnp.zeros((), jnp.bool_) if is_skipped is None else is_skipped
    return Scalars(jnp.where(is_other, jnp.nan, rows), inv_scale, skip)


class ShardUpdate(NamedTuple):
    """The results of ``update_shards``.

    Attributes:
      flat: The new state.
      shards: New parameters of each bucket, for this device's part of the state.
      gathered: New parameters of each bucket in the form that devices hold between steps.
      sums: With ``norms``, the buckets of each kernel call and sums of squares of their leaves.
    """

    flat: FlatState
    shards: list[jax.Array]
    gathered: list[jax.Array]
    sums: list[tuple[Sequence[Bucket], jax.Array]]


def update_shards(
    config: DistributedConfig,
    schedule: Schedule,
    scalars: Scalars,
    *,
    grads: Sequence[jax.Array],
    state: DistributedState,
    params: Sequence[Any],
) -> ShardUpdate:
    """Updates the flat state in place, and gathers new parameters.

    Kernel calls are in place on their parts of the whole flat arrays: slicing them in XLA would
    copy the state. Parameters without main parameters are updated themselves.

    Args:
      config: The configuration.
      schedule: The schedule of the params.
      scalars: The scalars of the kernel call.
      grads: This device's part of the summed gradient of each bucket.
      state: The state.
      params: Leaves of the params, in the form that this device holds.
    """
    layout = schedule.layout
    casts = config.policy.main_params == FLOAT32
    old = [  # old parameters are not read if they are casts of main parameters
        None
        if casts and bucket.has_main
        else packing.state_shard(config.parallel, bucket, params, bucket.dtype)
        for bucket in layout.buckets
    ]
    flat = FlatState(state.main_params, state.mu, state.nu)
    calls = _kernel_calls(config, schedule, grads)
    streamed = [pieces for pieces in calls if _on_host(config, pieces[0].bucket)]
    stream = _stream(config, streamed, flat, grads)
    parts: list[dict[int, jax.Array]] = [{} for _ in grads]
    gathered: list[Any] = [None] * len(grads)
    sums: list[tuple[Sequence[Bucket], jax.Array]] = []
    for k, pieces in enumerate(calls):
        if k >= 2 and not config.steps_in_windows:
            flat = _after_gathers(schedule, flat, gathered, calls[k - 2])
        buckets = [piece.bucket for piece in pieces]
        on_host, of_state = _on_host(config, buckets[0]), flat.operands(buckets[0])
        if on_host:
            of_state |= stream.take()
        of_grads, of_params = (
            [piece.of(arrays[piece.bucket_index]) for piece in pieces] for arrays in (grads, old)
        )
        operands = Operands(of_grads, of_params, (), ())
        spec, operands = _call_of(config, buckets, flat, operands, of_state)
        call: Any = (spec, scalars, operands.unfused())
        is_any = config.algorithm.storage.is_any
        if is_any:
            call = quantized_call(config, layout, pieces, spec, scalars, state, call[2])
        asked = asked_of(config, layout, buckets)
        step: Any = quantized_adam.adam if is_any else adam
        results = step(*call, asked)
        if asked is not None:
            sums.append((buckets, results.squares))
        results = native.unfused(results._replace(squares=None))
        new, main = new_params(_kind(config, buckets[0]), results)
        of_state = {"mu": results.mu[0], "nu": results.nu[0]}
        if buckets[0].has_main:
            of_state["main_params"] = main[0]
        if on_host:
            stream.put({name: of_state.pop(name) for name in on_host})
        flat = flat.replaced(buckets[0], of_state)
        for piece, part in zip(pieces, new, strict=True):
            i = piece.bucket_index
            parts[i][piece.start or 0] = part
            if not config.steps_in_windows:
                gathered[i] = _gathered(config.parallel, schedule.buckets[i], part)
    for i, pieces in enumerate(streamed):
        flat = flat.replaced(pieces[0].bucket, stream.whole(i))
    shards = [packing.joined(*pair) for pair in zip(layout.buckets, parts, strict=True)]
    for i, entry in enumerate(schedule.buckets):
        if gathered[i] is None:
            gathered[i] = _gathered(config.parallel, entry, shards[i])
    return ShardUpdate(flat, shards, gathered, sums)


def _gathered(parallel: DataParallel, entry: BucketSchedule, shard: jax.Array) -> jax.Array:
    """A bucket's new parameters in the form that devices hold between steps."""
    bucket = entry.bucket
    new = gather_parameters(entry.after_update, shard, bucket.cut_dim)
    copies = tuple(axis for axis in parallel.tensor_axes if axis not in bucket.tensor_axes)
    return collectives.to_invariant(new, copies)


def _after_gathers(
    schedule: Schedule, flat: FlatState, gathered: list[Any], pieces: Sequence[Piece]
) -> FlatState:
    """The state, when what another call updated is gathered: [Note: gathers beside updates]."""
    sent = [i for i, *_ in pieces if schedule.buckets[i].gathered_bytes]
    if sent:
        flat, arrived = jax.lax.optimization_barrier((flat, [gathered[i] for i in sent]))
        for i, new in zip(sent, arrived, strict=True):
            gathered[i] = new
    return flat


def _on_host(config: DistributedConfig, bucket: Bucket) -> list[str]:
    """The arrays of ``FlatState`` that a bucket is in, and that are on the host."""
    names = () if bucket.is_resident else _fields_of(bucket)
    return [name for name in names if name in config.on_host]


def _stream(
    config: DistributedConfig,
    calls: Sequence[Sequence[Piece]],
    flat: FlatState,
    grads: Sequence[Any],
) -> host_memory.Stream:
    """The windows of kernel calls that need arrays on the host: [Note: windows]."""
    arrays, lines = [], []
    for pieces in calls:
        buckets = [piece.bucket for piece in pieces]
        names, operands = _on_host(config, buckets[0]), flat.operands(buckets[0])
        arrays.append({name: operands[name] for name in names})
        lines.append({name: host_memory.lines(getattr(flat, name), buckets) for name in names})
    first = [grads[calls[0][0].bucket_index]] if calls else []
    return host_memory.Stream(arrays, lines, first, config.state_buffer_bytes)


def _kernel_calls(
    config: DistributedConfig, schedule: Schedule, grads: Sequence[jax.Array]
) -> list[list[Piece]]:
    """What each kernel call steps: buckets with equal dtypes."""
    layout, calls = schedule.layout, dict[Any, list[int]]()
    for i, bucket in enumerate(layout.buckets):
        arrays = bucket.has_main, bucket.is_coded, bucket.is_resident
        kind = (bucket.dtype, grads[i].dtype, *arrays)
        calls.setdefault(kind, []).append(i)
    splits = config.norms is None  # whose sums are in an order of the whole shard
    windows, whole = list[list[Piece]](), list[list[Piece]]()
    for call in calls.values():
        is_on_host = bool(_on_host(config, layout.buckets[call[0]]))
        if is_on_host or config.updates_early:
            windows += host_memory.windows(layout, call, splits=splits and is_on_host)
        else:
            groups = [call] if config.steps_in_windows else _merged(schedule, call)
            whole += [[Piece(i, layout.buckets[i]) for i in group] for group in groups]
    return host_memory.ordered(windows) + whole


def _merged(schedule: Schedule, indices: Sequence[int]) -> list[list[int]]:
    """Splits buckets, in order, into groups whose gathers XLA merges into one."""
    groups, nbytes = list[list[int]](), 0
    for i in indices:
        added = schedule.buckets[i].gathered_bytes
        if not groups or (added and nbytes + added > MERGED_BYTES):
            groups.append([])
            nbytes = 0
        groups[-1].append(i)
        nbytes += added
    return groups


def _call_of(
    config: DistributedConfig,
    buckets: Sequence[Bucket],
    flat: FlatState,
    operands: Operands,
    of_state: dict[str, Any],
) -> tuple[Spec, Operands]:
    """One kernel call, for buckets of equal dtypes; ``operands`` are gradients and params."""
    first, windows = buckets[0], host_memory.within(buckets)

    def offsets(name: str) -> tuple[int, ...]:
        is_window = name in config.on_host and not first.is_resident
        placed = windows if is_window else buckets
        return tuple(offset_of(getattr(flat, name), x) for x in placed)

    spec = Spec(
        "step",
        groups=tuple(bucket.group for bucket in buckets),
        flags=config.algorithm.hyper.flags,
        flat=frozenset(MOMENTS),
        sizes=tuple(bucket.shard_size for bucket in buckets),
        offsets=offsets("main_params"),
        mu_offsets=offsets("mu"),
        nu_offsets=offsets("nu"),
    )
    operands = operands._replace(mu=(of_state["mu"],), nu=(of_state["nu"],))
    kind, main = _kind(config, first), (of_state.get("main_params"),)
    return with_main_params(kind, spec, operands, main, first.dtype, is_flat=True)


def _kind(config: DistributedConfig, bucket: Bucket) -> Codec:
    """How main parameters of a bucket are kept."""
    return config.policy.main_params if bucket.has_main else NOTHING


def clipped_scale(max_grad_norm: float | None, mean_scale: jax.Array, norm: Any) -> jax.Array:
    """The factor of every summed gradient: the mean, times the clip."""
    if max_grad_norm is None:
        return mean_scale
    max_norm = jnp.float32(max_grad_norm)
    # Written so that a NaN norm reaches every gradient, as in optax.
    return jnp.where(norm <= max_norm, mean_scale, mean_scale * (max_norm / norm))


def quantized_call(
    config: DistributedConfig,
    layout: Layout,
    pieces: Sequence[Piece],
    spec: Spec,
    scalars: Scalars,
    state: DistributedState,
    operands: Operands,
) -> tuple[QuantizedSpec, Scalars, Rounding, LeafPositions, Operands]:
    """Returns the arguments of ``quantized_adam.adam`` for pieces of equal dtypes.

    Args:
      config: The configuration.
      layout: The layout.
      pieces: The pieces.
      spec: The call without rounding.
      scalars: The scalars of the kernel call.
      state: The state: its count and key determine the random bits.
      operands: The shards of gradients and params, and the flat arrays.
    """
    buckets = [piece.bucket for piece in pieces]
    storage, parts = config.algorithm.storage, config.tensor_parts
    positions, tables = positions_of(
        layout, pieces, config.parallel.state_axes, config.cutting_axes, parts
    )
    quantized = QuantizedSpec(
        adam=spec,
        is_stochastic=storage.is_stochastic,
        ids=tuple(bucket.leaves[0] for bucket in buckets),
        cuts=tuple(cuts_of(layout, bucket, parts) for bucket in buckets),
        tables=tables,
    )
    key = state.key if storage.is_stochastic else jnp.zeros((2,), jnp.uint32)
    args = (scalars, Rounding(key, state.count), positions, operands)
    return quantized, *collectives.vary_together(args)
