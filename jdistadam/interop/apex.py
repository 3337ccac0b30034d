"""The states of Apex's DistributedFusedAdam: whole, or the shards of all processes.

A parameter is flattened and cut into fragments, each in one bucket; a bucket is cut into one shard
per process. A process saves its shards and, for each fragment in one of them, ``shard_range``, its
place in the shard, and ``shard_param_range``, its place in the flattened parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jdistadam.errors import ShapeError, TreeError
from jdistadam.interop.named_state import NamedState
from jdistadam.interop.torch_layout import (
    Names,
    TorchLayout,
    as_numpy,
    first_of,
    mapping,
    parse,
    sequence,
)

_UNPACK = "Unpack it with torch.load(io.BytesIO(x.numpy()), weights_only=False)."
# Names of the shards of a bucket in the state of a parameter.
_ENTRIES = {
    "params_shard": "param",
    "param_remainders_shard": "param",
    "exp_avg_shard": "exp_avg",
    "exp_avg_sq_shard": "exp_avg_sq",
}


def from_apex_distributed(
    state_dict: Any,
    params: Mapping[str, Any] | None,
    names: Names = None,
    *,
    channels_last: Collection[str] = (),
) -> NamedState:
    """Reads the state of Apex's ``DistributedFusedAdam``, in format 1 or 2.

    Format 2 has unsharded arrays, also of scaled states and of remainders. Format 1 has the buckets
    of each process: flat shards, and the fragments of parameters in them. Where Apex is installed,
    unpack each x in ``state_dict["gathered_states"]`` with
    ``torch.load(io.BytesIO(x.numpy()), weights_only=False)`` and pass the list. In a file, buckets
    and fragments are dictionaries with the same field names.

    Layout: NVIDIA/apex 6424da3b, ``apex/contrib/optimizers/distributed_fused_adam.py``.

    Args:
      state_dict: ``optimizer.state_dict()`` (format 2), or a list of the state dictionaries of all
        processes (format 1).
      params: The model's parameters by name. Format 1 needs their shapes, and their values if it
        has 16-bit remainders or no main parameters.
      names: As in ``from_torch``.
      channels_last: Names of parameters in this memory format; format 1 uses its order.

    Returns:
      The state by Apex's names, as numpy arrays.

    Raises:
      TreeError, ShapeError, DtypeError: It is no such state, the names do not match it, or shards
        are missing.

    Example:
      >>> moments = dict(param=np.ones(4), exp_avg=np.zeros(4), exp_avg_sq=np.zeros(4))
      >>> groups = [dict(lr=1e-3, params=[0])]
      >>> state_dict = {"state": {"step": 7, 0: moments}, "param_groups": groups, "format": 2}
      >>> from_apex_distributed(state_dict, None, ["w"]).step
      7
    """
    ranks: list[Any] | None = None
    if not isinstance(state_dict, Mapping):
        ranks = sequence("state_dict", state_dict)
    elif "gathered_states" in state_dict:
        ranks = sequence(*first_of("state_dict", state_dict, "gathered_states"))
    elif "buckets" in mapping("state_dict['state']", state_dict.get("state", {})):
        ranks = [state_dict]
    elif state_dict.get("format", 2) != 2:
        raise TreeError(
            f"state_dict['format']: unknown format: got {state_dict['format']}, expected 1, with "
            "the buckets of every process, or 2. Save it anew with state_dict(state_dict_format=2)."
        )
    if ranks is None:
        layout, beside = _parsed("state_dict", state_dict, names)
        return layout.named_state(params, {"process 0": beside["step"]})
    parsed = [_parsed(f"state_dict[{i}]", rank, names) for i, rank in enumerate(ranks)]
    layout = _joined(parsed, params, channels_last)
    steps = {f"process {i}": beside["step"] for i, (_, beside) in enumerate(parsed)}
    return layout.named_state(params, steps)


def _parsed(where: str, given: Any, names: Names) -> tuple[TorchLayout, dict[str, Any]]:
    """The states of parameters, and the other entries of ``state``."""
    path, state = first_of(where, mapping(where, given, _UNPACK), "state")
    state = dict(mapping(path, state))
    beside = {"step": state.pop("step", None), "buckets": state.pop("buckets", [])}
    return parse({**given, "state": state}, names, where), beside


def _joined(
    parsed: Sequence[tuple[TorchLayout, Any]], params: Any, channels_last: Collection[str]
) -> TorchLayout:
    """Returns the layout of a single process with all shards, from those of all processes."""
    groups = [layout.groups for layout, _ in parsed]
    if not groups or any(found != groups[0] for found in groups):
        what = "the processes have different groups" if groups else "no process"
        raise TreeError(
            f"state_dict: {what}: got {groups}, "
            "expected the states of all processes of one optimizer. "
            "Pass all that state_dict(state_dict_format=1) gathered."
        )
    shapes = {name: _shape(params, name) for group in groups[0] for name in group.names}
    entries: dict[str, Mapping[str, Any]] = {}
    for name, found in _flat_arrays(parsed, shapes).items():
        shape = shapes[name]
        axes = (0, 2, 3, 1) if name in channels_last else tuple(range(len(shape)))
        if len(axes) != len(shape):
            raise ShapeError(
                f"params[{name!r}]: has no channels: got {shape}, expected 4 dimensions. "
                "Remove it from channels_last."
            )
        in_memory, back = [shape[i] for i in axes], np.argsort(axes)
        arrays = {_ENTRIES[kind]: x.reshape(in_memory) for kind, x in found.items()}
        entries[name] = {key: x.transpose(back) for key, x in arrays.items()}
    return TorchLayout(groups[0], entries)


def _shape(params: Any, name: str) -> tuple[int, ...]:
    param = None if params is None else mapping("params", params).get(name)
    if param is None:
        raise TreeError(
            f"params[{name!r}]: missing: format 1 does not say the shapes of parameters: got None, "
            "expected the parameter of the model. Pass params=model.state_dict()."
        )
    return as_numpy(f"params[{name!r}]", param).shape


def _flat_arrays(
    parsed: Sequence[tuple[TorchLayout, Any]], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, dict[str, np.ndarray]]:
    """The flattened arrays of each parameter; empty if the optimizer has no place for it."""
    sizes = {name: int(np.prod(shape)) for name, shape in shapes.items()}
    found: dict[str, dict[str, np.ndarray]] = {name: {} for name in sizes}
    filled: dict[tuple[str, str], np.ndarray] = {}  # which of their elements are filled
    for layout, _ in parsed:
        for name, entry in layout.entries.items():
            if "fragments" in entry and not sizes[name]:  # it is in no bucket
                found[name] = {k: np.zeros(0, np.float32) for k in _ENTRIES if "exp" in k}
    for where, name, (start, stop), shards in _pieces(parsed):
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
    parsed: Sequence[tuple[TorchLayout, Any]],
) -> Iterator[tuple[str, str, tuple[int, int], dict[str, np.ndarray]]]:
    """Yields path, name, place in the flattened parameter, and shard parts of each fragment."""
    for process, (layout, beside) in enumerate(parsed):
        root = f"state_dict[{process}]['state']['buckets']"
        for i, bucket in enumerate(sequence(root, beside["buckets"])):
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
    """A field of an object, or the entry of a dictionary made from it."""
    return x.get(name, default) if isinstance(x, Mapping) else getattr(x, name, default)
