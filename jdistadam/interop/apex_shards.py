"""The buckets of Apex's DistributedFusedAdam, put together from the shards of every process.

A parameter is flattened and cut into fragments, each of which is in one bucket; a bucket is cut
into one shard for each process. A process saves its shards and, for each fragment that reaches
into one, ``shard_range``, its place in the shard, and ``shard_param_range``, its place in the
flattened parameter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from jdistadam.errors import ShapeError, TreeError
from jdistadam.interop.their_arrays import as_numpy, field, sequence
from jdistadam.interop.torch_layout import TorchLayout

_KINDS = ("params_shard", "param_remainders_shard", "exp_avg_shard", "exp_avg_sq_shard")


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A part of a flattened parameter, and its place there."""

    where: str
    name: str
    start: int
    stop: int
    shards: Mapping[str, np.ndarray]


def flat_arrays(
    layouts: Sequence[TorchLayout], sizes: Mapping[str, int]
) -> dict[str, dict[str, np.ndarray]]:
    """Returns the flattened arrays of each parameter, by name and kind of shard.

    None of them for a parameter to which the optimizer gave no place.

    Args:
      layouts: What each process saved.
      sizes: The number of elements of each parameter.

    Raises:
      TreeError: Elements are in no shard, or in two that differ.
      ShapeError: A fragment reaches beyond its parameter or its shard.
    """
    found: dict[str, dict[str, np.ndarray]] = {name: {} for name in sizes}
    filled: dict[tuple[str, str], np.ndarray] = {}
    for layout in layouts:
        for name, entry in layout.entries.items():
            if "fragments" in entry and not sizes[name]:  # nothing of it is in any bucket
                found[name] = {k: np.zeros(0, np.float32) for k in _KINDS if "exp" in k}
    for piece in (piece for i, layout in enumerate(layouts) for piece in _pieces(i, layout)):
        _check_within(piece, sizes[piece.name])
        for kind, shard in piece.shards.items():
            key = piece.name, kind
            if kind not in found[piece.name]:
                found[piece.name][kind] = np.zeros(sizes[piece.name], shard.dtype)
                filled[key] = np.zeros(sizes[piece.name], np.bool_)
            _put(piece, shard, found[piece.name][kind], filled[key])
    for (name, kind), is_filled in filled.items():
        _check_filled(f"{kind} of {name!r}", is_filled)
    return found


def _pieces(process: int, layout: TorchLayout) -> Iterator[_Piece]:
    """Yields what the shards of one process hold of each parameter."""
    root = f"state_dict[{process}]['state']['buckets']"
    for i, bucket in enumerate(sequence(root, layout.beside.get("buckets", []))):
        where = f"{root}[{i}]"
        given = {kind: field(bucket, kind) for kind in _KINDS}
        shards = {k: as_numpy(f"{where}.{k}", x) for k, x in given.items() if x is not None}
        for fragment in sequence(f"{where}.fragments", field(bucket, "fragments", [])):
            if not field(fragment, "in_local_shard"):
                continue
            group, index = field(fragment, "param_group_id"), field(fragment, "param_id")
            low, high = field(fragment, "shard_range")
            start, stop = field(fragment, "shard_param_range")
            name = layout.groups[group].names[index]
            parts = {kind: shard[low:high] for kind, shard in shards.items()}
            yield _Piece(where, name, start, stop, parts)


def _check_within(piece: _Piece, size: int) -> None:
    """Raises ShapeError unless a piece has the size of its place in the parameter."""
    sizes = {kind: len(shard) for kind, shard in piece.shards.items()}
    fits = 0 <= piece.start <= piece.stop <= size
    if not fits or set(sizes.values()) != {piece.stop - piece.start}:
        raise ShapeError(
            f"{piece.where}, {piece.name!r}",
            "a fragment does not fit its parameter or its shard",
            got=f"elements {piece.start} to {piece.stop} from {sizes}",
            expected=f"as many elements, within {size}",
            action="Check names and params: the fragment may be of another parameter.",
        )


def _put(piece: _Piece, shard: np.ndarray, into: np.ndarray, is_filled: np.ndarray) -> None:
    """Copies a piece to its place; replicas of it must be equal."""
    place = slice(piece.start, piece.stop)
    old = into[place][is_filled[place]]
    if old.tobytes() != shard[is_filled[place]].tobytes():
        raise TreeError(
            f"{piece.where}, {piece.name!r}",
            "differs from what another process has of the same elements",
            got="two values",
            expected="equal replicas",
            action="Pass the states of one optimizer, of one step.",
        )
    into[place] = shard
    is_filled[place] = True


def _check_filled(where: str, is_filled: np.ndarray) -> None:
    if not is_filled.all():
        raise TreeError(
            where,
            "some elements are in no shard",
            got=f"{int(is_filled.sum())} of {is_filled.size} elements",
            expected="all of them",
            action="Pass the states of all processes.",
        )
