"""Readers of NeMo, Megatron-FSDP and Apex's DistributedFusedAdam: small steps to torch's layout.

Format 1 of Apex has shards: a parameter is flattened and cut into fragments, each in one bucket; a
bucket is cut into one shard per process. A process saves its shards and, for each fragment in one
of them, ``shard_range``, its place in the shard, and ``shard_param_range``, its place in the
flattened parameter.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from math import prod
from typing import Any

import numpy as np

from jdistadam.errors import ShapeError, TreeError
from jdistadam.interop.named_state import Group, NamedState, joined_groups
from jdistadam.interop.torch_layout import (
    Names,
    TorchLayout,
    as_numpy,
    first_of,
    mapping,
    parse,
    sequence,
)


def from_nemo(
    state_dict: Mapping[str, Any], params: Mapping[str, Any], names: Names = None
) -> NamedState:
    """Reads the state of NeMo's ``MainParamsOptimizerWrapper`` around an Adam.

    ``optimizer`` (before: ``optimizer_state_dict``) is the state of the wrapped optimizer;
    ``fp32_from_fp16_params`` (before: ``fp32_from_fp16``) has, for each group, the float32 values
    of its trained 16-bit parameters. ``params``, by name and in the dtypes of training, show which
    parameters these are. ``names`` as in ``from_torch``.

    Layout: NVIDIA/NeMo 8cfedd72, ``nemo/core/optim/optimizer_with_main_params.py``.

    Returns:
      The state by NeMo's names, as numpy arrays.

    Raises:
      TreeError, ShapeError, DtypeError: It is no such state, or params or names do not match it.

    Example:
      >>> moments = dict(exp_avg=np.zeros(2), exp_avg_sq=np.zeros(2))
      >>> adam = {"state": {0: moments}, "param_groups": [dict(step=5, params=[0])]}
      >>> state_dict = {"optimizer": adam, "fp32_from_fp16_params": [[np.float32([1, 2])]]}
      >>> theirs = from_nemo(state_dict, {"w": np.float16([1, 2])}, ["w"])
      >>> theirs.step, theirs.leaves["w"].param.dtype
      (5, dtype('float32'))
    """
    where, adam = first_of("state_dict", state_dict, "optimizer", "optimizer_state_dict")
    layout = parse({"state": {}, **mapping(where, adam)}, names, where)
    where, mains = first_of("state_dict", state_dict, "fp32_from_fp16_params", "fp32_from_fp16")
    by_group = sequence(where, mains)
    if len(by_group) != len(layout.groups):
        raise TreeError(
            f"{where}: has another number of groups than the optimizer: got {len(by_group)}, "
            f"expected {len(layout.groups)}. Pass the state dictionary as it was saved."
        )
    known = mapping("params", params)
    trained = {k: as_numpy(f"params[{k!r}]", known[k]) for k in layout.entries if k in known}
    for i, (group, given) in enumerate(zip(layout.groups, by_group, strict=True)):
        narrow = [k for k in group.names if k in trained and trained[k].itemsize == 2]
        found = sequence(f"{where}[{i}]", given)
        if len(narrow) != len(found):
            raise TreeError(
                f"{where}[{i}]: there is not one main parameter for each parameter in 16 bits: "
                f"got {len(found)}, expected {len(narrow)} for {narrow}. "
                "Pass params in the dtypes in which the model was trained."
            )
        for name, main in zip(narrow, found, strict=True):
            layout.entries[name] = {**layout.entries[name], "param": main}
    return layout.named_state(params)


def from_megatron_fsdp(
    state_dict: Mapping[str, Any], params: Mapping[str, Any] | None = None
) -> NamedState:
    """Reads the optimizer's part of a checkpoint of Megatron-FSDP, ``--ckpt-format fsdp_dtensor``.

    ``state`` has the moments of each parameter by name, ``param_to_group_meta`` its
    hyperparameters. The tensors must be whole: merge a checkpoint into one file with
    ``torch.distributed.checkpoint.format_utils.dcp_to_torch_save``. Names lose their leading
    ``module.`` and ``model.``, which differ between model and optimizer. Checkpoints with several
    optimizers, as from expert parallelism, are not supported.

    Layout: NVIDIA/Megatron-LM d98e8a64, ``megatron/core/optimizer/distrib_optimizer.py``
    (``sharded_param_state_fsdp_dtensor``) and ``megatron/training/checkpointing.py``.

    Args:
      state_dict: The checkpoint with ``model`` and ``optimizer``, or its part ``optimizer``.
      params: Parameters by name, in the dtype of the main parameters. None: taken from ``model``.

    Returns:
      The state by the names of Megatron-FSDP, as numpy arrays.

    Raises:
      TreeError, ShapeError, DtypeError: It is no such state.

    Example:
      >>> state = {"module.w": dict(step=2, exp_avg=np.zeros(3), exp_avg_sq=np.zeros(3))}
      >>> optimizer = {"state": state, "param_to_group_meta": {"module.w": dict(lr=1e-3)}}
      >>> theirs = from_megatron_fsdp({"optimizer": optimizer, "model": {"w": np.ones(3)}})
      >>> theirs.step, list(theirs.leaves)
      (2, ['w'])
    """
    where, given = "state_dict", mapping("state_dict", state_dict)
    if "optimizer" in given:
        params = given.get("model") if params is None else params
        where, given = first_of(where, given, "optimizer")
    state = _by_plain_name(*first_of(where, given, "state"))
    path, metas = first_of(where, given, "param_to_group_meta")
    metas = _by_plain_name(path, metas)
    groups = [{**mapping(f"{path}[{k!r}]", meta), "params": [k]} for k, meta in metas.items()]
    layout = parse({"state": state, "param_groups": groups}, {k: k for k in metas}, where)
    joined = joined_groups({group.names[0]: group.settings for group in layout.groups})
    params = None if params is None else _by_plain_name("params", params)
    return layout._replace(groups=joined).named_state(params)


def _by_plain_name(where: str, named: Any) -> dict[str, Any]:
    """The same dictionary without the wrappers' prefixes of names."""
    plain: dict[str, Any] = {}
    for name, value in mapping(where, named).items():
        key = re.sub(r"^((module|model)\.)+", "", str(name))
        if key in plain:
            raise TreeError(
                f"{where}: two names are one without their prefixes: got {name!r} and another one "
                f"for {key!r}, expected one parameter for each name. Pass the state of one model."
            )
        plain[key] = value
    return plain


_UNPACK = "Unpack it with torch.load(io.BytesIO(x.numpy()), weights_only=False)."
# Names of the shards of a bucket in the state of a parameter.
_ENTRIES = {
    "params_shard": "param", "param_remainders_shard": "param",
    "exp_avg_shard": "exp_avg", "exp_avg_sq_shard": "exp_avg_sq",
}  # fmt: skip


def from_apex_distributed(
    state_dict: Any,
    params: Mapping[str, Any] | None,
    names: Names = None,
    *,
    channels_last: Collection[str] = (),
) -> NamedState:
    """Reads the state of Apex's ``DistributedFusedAdam``, in format 1 or 2.

    Format 2 has whole arrays, format 1 the shards of each process. Where Apex is installed, unpack
    each x in ``state_dict["gathered_states"]`` of format 1 with
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
    if not isinstance(state_dict, Mapping):
        ranks = sequence("state_dict", state_dict)
    elif "gathered_states" in state_dict:
        ranks = sequence("state_dict['gathered_states']", state_dict["gathered_states"])
    elif "buckets" in mapping("state_dict['state']", state_dict.get("state", {})):
        ranks = [state_dict]
    elif state_dict.get("format", 2) != 2:
        raise TreeError(
            f"state_dict['format']: unknown format: got {state_dict['format']}, expected 1, with "
            "the buckets of every process, or 2. Save it anew with state_dict(state_dict_format=2)."
        )
    else:
        layout, steps, _ = _separated({"state_dict": state_dict}, names)
        return layout.named_state(params, steps)
    processes = {f"state_dict[{i}]": rank for i, rank in enumerate(ranks)}
    layout, steps, buckets = _separated(processes, names)
    return _joined(layout, buckets, params, channels_last).named_state(params, steps)


def _separated(processes: Mapping[str, Any], names: Names) -> tuple[TorchLayout, Any, Any]:
    """All processes in torch's layout, and what Apex adds: step counts and buckets, by place."""
    layouts, steps, buckets = [], {}, {}
    for i, (where, given) in enumerate(processes.items()):
        path, state = first_of(where, mapping(where, given, _UNPACK), "state")
        state = dict(mapping(path, state))
        steps[f"process {i}"] = state.pop("step", None)
        buckets[f"{path}['buckets']"] = state.pop("buckets", [])
        layouts.append(parse({**given, "state": state}, names, where))
    groups = [layout.groups for layout in layouts]
    if not groups or any(found != groups[0] for found in groups):
        what = "the processes have different groups" if groups else "no process"
        raise TreeError(
            f"state_dict: {what}: got {groups}, "
            "expected the states of all processes of one optimizer. "
            "Pass all that state_dict(state_dict_format=1) gathered."
        )
    entries = {name: x for layout in layouts for name, x in layout.entries.items()}
    return TorchLayout(groups[0], entries), steps, buckets


def _joined(
    layout: TorchLayout, buckets: Mapping[str, Any], params: Any, channels_last: Collection[str]
) -> TorchLayout:
    """Replaces fragments by whole arrays."""
    known, shapes = {} if params is None else mapping("params", params), {}
    for name in (name for group in layout.groups for name in group.names):
        if known.get(name) is None:
            raise TreeError(
                f"params[{name!r}]: missing: format 1 does not say the shapes of parameters: "
                "got None, expected the parameter of the model. Pass params=model.state_dict()."
            )
        shapes[name] = as_numpy(f"params[{name!r}]", known[name]).shape
    entries = _flat_arrays(layout, buckets, shapes)
    for name, shape in shapes.items():
        axes = (0, 2, 3, 1) if name in channels_last else tuple(range(len(shape)))
        if len(axes) != len(shape):
            raise ShapeError(
                f"params[{name!r}]: has no channels: got {shape}, expected 4 dimensions. "
                "Remove it from channels_last."
            )
        in_memory, back = [shape[i] for i in axes], np.argsort(axes)
        flat = entries[name].items()
        entries[name] = {_ENTRIES[k]: x.data.reshape(in_memory).transpose(back) for k, x in flat}
    return layout._replace(entries=entries)


def _flat_arrays(
    layout: TorchLayout, buckets: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """The flattened arrays of each parameter; empty if the optimizer has no place for it."""
    found: dict[str, dict[str, Any]] = {name: {} for name in shapes}  # masked: in no shard yet
    for name, entry in layout.entries.items():
        if "fragments" in entry and 0 in shapes[name]:  # it is in no bucket
            found[name] = {k: np.ma.masked_all(0, np.float32) for k in _ENTRIES if "exp" in k}
    for where, name, (start, stop), shards in _pieces(layout.groups, buckets):
        lengths, size = {kind: len(shard) for kind, shard in shards.items()}, prod(shapes[name])
        if not 0 <= start <= stop <= size or set(lengths.values()) != {stop - start}:
            raise ShapeError(
                f"{where}: a fragment does not fit its parameter or its shard: "
                f"got elements {start} to {stop} from {lengths}, expected as many elements, within "
                f"{size}. Check names and params: the fragment may be of another parameter."
            )
        for kind, shard in shards.items():
            if kind not in found[name]:
                found[name][kind] = np.ma.masked_all(size, shard.dtype)
            into, is_new = (x[start:stop] for x in (found[name][kind].data, found[name][kind].mask))
            if into[~is_new].tobytes() != shard[~is_new].tobytes():
                raise TreeError(
                    f"{where}: differs from what another process has of the same elements: "
                    "got two values, expected equal replicas. "
                    "Pass the states of one optimizer, of one step."
                )
            into[:], is_new[:] = shard, False
    every = [(name, k, x) for name, arrays in found.items() for k, x in arrays.items()]
    for name, kind, x in every:
        if x.mask.any():
            raise TreeError(
                f"{kind} of {name!r}: some elements are in no shard: got {x.count()} of {x.size} "
                "elements, expected all of them. Pass the states of all processes."
            )
    return found


def _pieces(groups: tuple[Group, ...], buckets: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Yields path, name, place in the flattened parameter, and shard parts of each fragment."""
    for root, given in buckets.items():
        for i, bucket in enumerate(sequence(root, given)):
            where = f"{root}[{i}]"
            fields = {kind: _field(bucket, kind) for kind in _ENTRIES}
            shards = {k: as_numpy(f"{where}.{k}", x) for k, x in fields.items() if x is not None}
            for fragment in sequence(f"{where}.fragments", _field(bucket, "fragments", [])):
                if _field(fragment, "in_local_shard"):
                    group = groups[_field(fragment, "param_group_id")]
                    name = group.names[_field(fragment, "param_id")]
                    low, high = _field(fragment, "shard_range")
                    parts = {kind: shard[low:high] for kind, shard in shards.items()}
                    yield f"{where}, {name!r}", name, _field(fragment, "shard_param_range"), parts


def _field(x: Any, name: str, default: Any = None) -> Any:
    """A field of an object, or the entry of a dictionary made from it."""
    return x.get(name, default) if isinstance(x, Mapping) else getattr(x, name, default)
