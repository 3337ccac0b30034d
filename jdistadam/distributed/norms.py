"""The global norm of gradients; norms of gradients, parameters and updates, by leaf or by group.

The kernels sum the squares (cuda/squares.h); they treat each bucket's shard as one leaf. In a
bucket that packs several leaves, each device has other elements of the leaves. For such buckets the
kernels store the square of each element, and the squares of a leaf are added afterwards.

Meshes with the same layout give the same sums, except that the collective library determines the
order of the sum over devices. On another mesh, and compared with an exact norm, the relative error
is at most 2^-24 times half the number of roundings that a square passes through: 1 when it is
computed, 7 in a run of elements, n / 1024 within a lane for n runs or single elements, 10 over the
lanes, those of the pairwise sum over leaves, and one for each device; then one for the square root
and two for the clip.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdistadam.core import collectives
from jdistadam.core.guards import LossScaleState, norm_scale
from jdistadam.distributed.accumulate import StepGrads
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.layout import Bucket, Layout
from jdistadam.distributed.verdict import Verdict, poisoned
from jdistadam.errors import PolicyError, TreeError
from jdistadam.kernels import multi_tensor
from jdistadam.kernels.reference import KINDS, SquaresRequest, num_runs, pairwise_sum

Norms = str | Callable[[str], str | None]
"""The argument ``norms`` of an optimizer: "total", "leaves", or a function of a leaf's path."""


_OF_ALL = ("param_norm", "update_norm")
"""The names of the norms of all leaves; ``grad_norm`` is a field of the state."""


def check_norms(norms: Any) -> None:
    """Raises PolicyError unless ``norms`` is None, "total", "leaves" or a function."""
    if norms not in (None, "total", "leaves") and not callable(norms):
        raise PolicyError(
            f'norms: unknown: got {norms!r}, expected None, "total", "leaves" or a function from '
            'the path of a leaf to a name. Pass for example norms="total".'
        )


def groups_of(norms: Norms, layout: Layout) -> dict[str | None, list[int]]:
    """Returns the leaves of each group by name; leaves under None count only in the total.

    Frozen and empty leaves are in no group.
    """
    groups: dict[str | None, list[int]] = {}
    leaves = sorted(i for bucket in layout.buckets for i in bucket.leaves)
    for i in leaves:
        path = layout.leaves[i].path
        name = {"total": None, "leaves": path}[norms] if isinstance(norms, str) else norms(path)
        if not (name is None or isinstance(name, str)):
            raise PolicyError(
                f"norms: returned no name: got {name!r} for {path}, expected a string, or None for "
                "a leaf that counts only in the totals. Return the name of the leaf's group."
            )
        groups.setdefault(name, []).append(i)
    if leaves and norms != "total" and list(groups) == [None]:
        raise TreeError(
            f"norms: names no leaf: got None for {layout.leaves[leaves[0]].path} and "
            f"{len(leaves) - 1} more, expected a name for at least one. "
            'Pass "total" for only the totals.'
        )
    return groups


def sent_elements(config: DistributedConfig, layout: Layout) -> int:
    """Returns the size of the single array that a step reduces for its norms; 0 for none."""
    groups = {} if config.norms is None else groups_of(config.norms, layout)
    return len(KINDS) * len(groups)


def squares_request(
    config: DistributedConfig, layout: Layout, buckets: Sequence[Bucket]
) -> SquaresRequest | None:
    """Returns the request of a kernel call for buckets, if any: a sum for each of their leaves."""
    if config.norms is None:
        return None
    by_elements = tuple(holds_several(bucket) for bucket in buckets)
    segments, first = [], 0
    for bucket, by_element in zip(buckets, by_elements, strict=True):
        runs = num_runs(bucket.shard_size, by_element)
        ends: list[tuple[Any, Any]] = [(0, runs)]
        if by_element:
            parallel = config.parallel.without(bucket.tensor_axes)
            index = collectives.axis_index(parallel.state_axes)
            sizes = [layout.leaves[i].size for i in bucket.leaves]
            pairs = zip(bucket.starts(sizes), sizes, strict=False)
            ends = [
                (_here(start, runs, index), _here(start + size, runs, index))
                for start, size in pairs
            ]
        segments += [jnp.stack([jnp.int32(first + x) for x in pair]) for pair in ends]
        first += runs
    return SquaresRequest(by_elements, jnp.stack(segments))


def holds_several(bucket: Bucket) -> bool:
    """Whether a shard may hold anything but elements of one leaf."""
    return bucket.is_packed and (len(bucket.leaves) > 1 or bucket.padding > 0)


def _here(place: int, shard_size: int, index: jax.Array) -> jax.Array:
    """Converts a position in a packed bucket to one in a device's shard, clipped to its ends."""
    device, within = divmod(place, shard_size)
    here = jnp.where(index == device, jnp.int32(within), jnp.int32(0))
    return jnp.where(index < device, jnp.int32(shard_size), here)


def norms_of(
    config: DistributedConfig,
    layout: Layout,
    sums: Sequence[tuple[Sequence[Bucket], jax.Array]],
    verdict: Verdict,
) -> dict[str, jax.Array] | None:
    """Returns the norms of a step by name; None without ``norms``.

    Args:
      config: The configuration.
      layout: The layout.
      sums: For each kernel call its buckets, and the local sums of squares of their leaves.
      verdict: The norm of the mean gradient, and whether the step was skipped.
    """
    if config.norms is None:
        return None
    groups = groups_of(config.norms, layout)
    norm, is_skipped = verdict.facts.norm, verdict.is_skipped
    if not groups:
        return dict.fromkeys(_OF_ALL, jnp.zeros((), jnp.float32))
    squares = _summed(config, list(groups.values()), sums)
    everything = jnp.concatenate([pairwise_sum(squares, jnp)[None], squares])
    norms = poisoned(verdict.facts.is_other_layout, jnp.sqrt(everything))
    if config.max_grad_norm is not None:
        # Like grad_norm: before clipping, which a skipped step does not apply (verdict.py).
        limit = jnp.float32(config.max_grad_norm)
        is_whole = norm <= limit if is_skipped is None else (norm <= limit) | is_skipped
        norms = norms.at[:, 0].multiply(jnp.where(is_whole, 1, norm / limit))
    total, *of_groups = norms
    named = dict(zip(_OF_ALL, total[1:], strict=True))
    for group, row in zip(groups, of_groups, strict=True):
        if group is not None:
            named |= {f"{kind}_norm/{group}": x for kind, x in zip(KINDS, row, strict=True)}
    return named


def _summed(
    config: DistributedConfig,
    groups: Sequence[Sequence[int]],
    sums: Sequence[tuple[Sequence[Bucket], jax.Array]],
) -> jax.Array:
    """The squares of groups of leaves on all devices, shape (groups, 3)."""
    parallel = config.parallel
    rows = [
        (i, bucket.tensor_axes) for buckets, _ in sums for bucket in buckets for i in bucket.leaves
    ]
    here = jnp.concatenate([x for _, x in sums])
    # Every element counts once: of devices with the same leaf, only the first counts it.
    by_axes = sorted({axes for _, axes in rows})
    is_mine = [
        collectives.axis_index(tuple(x for x in parallel.tensor_axes if x not in axes)) == 0
        for axes in by_axes
    ]
    of_rows = jnp.stack(is_mine)[np.asarray([by_axes.index(axes) for _, axes in rows])]
    here = jnp.where(of_rows[:, None], here, 0)
    row_of = {leaf: row for row, (leaf, _) in enumerate(rows)}
    each = [pairwise_sum(here[np.asarray([row_of[i] for i in x])], jnp) for x in groups]
    return collectives.all_reduce(
        collectives.to_varying(jnp.stack(each), parallel.cut_axes), parallel.cut_axes
    )


def norm_and_finite(
    config: DistributedConfig,
    layout: Layout,
    grads: StepGrads,
    scaling: LossScaleState | None,
    tiles: Sequence[jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """The global norm of the mean gradient, and whether any gradient is non-finite.

    Every element counts once: of tensor-parallel devices that hold the same leaf, only the first
    counts it. ``tiles``: the sums of all tiles of gradients, in order, if they are known.
    """
    parallel = config.parallel
    if tiles:
        return norm_of_squares(config, *multi_tensor.sum_of_tiles(tiles), grads.mean_scale, scaling)
    by_axes: dict[tuple[str, ...], list[jax.Array]] = {}
    for bucket, shard in zip(layout.buckets, grads.arrays, strict=True):
        by_axes.setdefault(bucket.tensor_axes, []).append(shard)
    squares, found_inf = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.bool_)
    for axes, arrays in sorted(by_axes.items()):
        partial_squares, found_here = multi_tensor.sum_of_squares(
            arrays, norm_scale(scaling), one_by_one=config.updates_early
        )
        copies = tuple(axis for axis in parallel.tensor_axes if axis not in axes)
        if copies:
            partial_squares = jnp.where(collectives.axis_index(copies) == 0, partial_squares, 0)
        squares, found_inf = squares + partial_squares, found_inf | found_here
    return norm_of_squares(config, squares, found_inf, grads.mean_scale, scaling)


def norm_of_squares(
    config: DistributedConfig,
    squares: jax.Array,
    found_inf: jax.Array,
    mean_scale: jax.Array,
    scaling: LossScaleState | None,
) -> tuple[jax.Array, jax.Array]:
    """The results of ``norm_and_finite``, from the squares of one device's shards."""
    axes = config.parallel.cut_axes
    if scaling is None:
        squares = collectives.all_reduce(squares, axes)
        return jnp.sqrt(squares) * mean_scale, jnp.zeros((), jnp.bool_)
    both = jnp.stack([squares, found_inf.astype(jnp.float32)])
    squares, count = collectives.all_reduce(collectives.to_varying(both, axes), axes)
    return jnp.sqrt(squares) * mean_scale, count > 0
