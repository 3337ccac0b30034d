"""The buckets of Apex's DistributedFusedAdam, put together from the shards of every process.

A parameter is flattened and cut into fragments, each of which is in one bucket; a bucket is cut
into one shard for each process. A process saves its shards and, for each fragment that reaches
into one, ``shard_range``, its place in the shard, and ``shard_param_range``, its place in the
flattened parameter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jdistadam.errors import ShapeError, TreeError
from jdistadam.interop.torch_layout import TorchLayout, as_numpy, mapping, sequence

# What the shards of a bucket become in the state of a parameter.
_ENTRIES = {
    "params_shard": "param",
    "param_remainders_shard": "param",
    "exp_avg_shard": "exp_avg",
    "exp_avg_sq_shard": "exp_avg_sq",
}


def joined_shards(
    layouts: Sequence[TorchLayout], params: Any, channels_last: Collection[str]
) -> TorchLayout:
    """Returns the layout of one process that has everything, from those of all processes.

    Raises:
      TreeError: A parameter is missing, or elements are in no shard, or in two that differ.
      ShapeError: A fragment reaches beyond its parameter or its shard.
    """
    if not layouts or any(layout.groups != layouts[0].groups for layout in layouts):
        what = "the processes have different groups" if layouts else "no process"
        raise TreeError(
            f"state_dict: {what}: got {[layout.groups for layout in layouts]}, "
            "expected the states of all processes of one optimizer. "
            "Pass all that state_dict(state_dict_format=1) gathered."
        )
    shapes = {name: _shape(params, name) for name in layouts[0].names}
    flat = _flat_arrays(layouts, {name: int(np.prod(shape)) for name, shape in shapes.items()})
    entries: dict[str, Mapping[str, Any]] = {}
    for name, found in flat.items():
        axes = _memory_axes(name, shapes[name], name in channels_last)
        in_memory, back = [shapes[name][i] for i in axes], np.argsort(axes)
        entries[name] = {
            key: found[kind].reshape(in_memory).transpose(back)
            for kind, key in _ENTRIES.items()
            if kind in found
        }
    return dataclasses.replace(layouts[0], entries=entries)


def _shape(params: Any, name: str) -> tuple[int, ...]:
    param = None if params is None else mapping("params", params).get(name)
    if param is None:
        raise TreeError(
            f"params[{name!r}]: missing: format 1 does not say the shapes of parameters: got None, "
            "expected the parameter of the model. Pass params=model.state_dict()."
        )
    return as_numpy(f"params[{name!r}]", param).shape


def _memory_axes(name: str, shape: tuple[int, ...], is_channels_last: bool) -> tuple[int, ...]:
    """The dimensions of a parameter in the order in which memory has them."""
    if is_channels_last and len(shape) != 4:
        raise ShapeError(
            f"params[{name!r}]: has no channels: got {shape}, expected 4 dimensions. "
            "Remove it from channels_last."
        )
    return (0, 2, 3, 1) if is_channels_last else tuple(range(len(shape)))


def _flat_arrays(
    layouts: Sequence[TorchLayout], sizes: Mapping[str, int]
) -> dict[str, dict[str, np.ndarray]]:
    """The flattened arrays of each parameter; none where the optimizer gave it no place."""
    found: dict[str, dict[str, np.ndarray]] = {name: {} for name in sizes}
    filled: dict[tuple[str, str], np.ndarray] = {}  # which of their elements were put there
    for layout in layouts:
        for name, entry in layout.entries.items():
            if "fragments" in entry and not sizes[name]:  # nothing of it is in any bucket
                found[name] = {k: np.zeros(0, np.float32) for k in _ENTRIES if "exp" in k}
    for where, name, (start, stop), shards in _pieces(layouts):
        lengths = {kind: len(shard) for kind, shard in shards.items()}
        fits = 0 <= start <= stop <= sizes[name]
        if not fits or set(lengths.values()) != {stop - start}:
            raise ShapeError(
                f"{where}: a fragment does not fit its parameter or its shard: "
                f"got elements {start} to {stop} from {lengths}, expected as many elements, within "
                f"{sizes[name]}. Check names and params: the fragment may be of another parameter."
            )
        for kind, shard in shards.items():
            if (name, kind) not in filled:
                found[name][kind] = np.zeros(sizes[name], shard.dtype)
                filled[name, kind] = np.zeros(sizes[name], np.bool_)
            into, known = found[name][kind][start:stop], filled[name, kind][start:stop]
            if into[known].tobytes() != shard[known].tobytes():
                raise TreeError(
                    f"{where}: differs from what another process has of the same elements: "
                    "got two values, expected equal replicas. "
                    "Pass the states of one optimizer, of one step."
                )
            into[:], known[:] = shard, True
    for (name, kind), known in filled.items():
        if not known.all():
            raise TreeError(
                f"{kind} of {name!r}: some elements are in no shard: got {int(known.sum())} of "
                f"{known.size} elements, expected all of them. Pass the states of all processes."
            )
    return found


def _pieces(
    layouts: Sequence[TorchLayout],
) -> Iterator[tuple[str, str, tuple[int, int], dict[str, np.ndarray]]]:
    """Yields path, name, place in the flattened parameter, and parts of shards of each fragment."""
    for process, layout in enumerate(layouts):
        root = f"state_dict[{process}]['state']['buckets']"
        for i, bucket in enumerate(sequence(root, layout.beside.get("buckets", []))):
            where = f"{root}[{i}]"
            given = {kind: _field(bucket, kind) for kind in _ENTRIES}
            shards = {k: as_numpy(f"{where}.{k}", x) for k, x in given.items() if x is not None}
            for fragment in sequence(f"{where}.fragments", _field(bucket, "fragments", [])):
                if _field(fragment, "in_local_shard"):
                    group = layout.groups[_field(fragment, "param_group_id")]
                    name = group.names[_field(fragment, "param_id")]
                    low, high = _field(fragment, "shard_range")
                    parts = {kind: shard[low:high] for kind, shard in shards.items()}
                    yield f"{where}, {name!r}", name, _field(fragment, "shard_param_range"), parts


def _field(x: Any, name: str, default: Any = None) -> Any:
    """A field of an object, or an entry of the dictionary that it became."""
    return x.get(name, default) if isinstance(x, Mapping) else getattr(x, name, default)
