"""Apex's DistributedFusedAdam: states by parameter, and the shards of every process."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from jdistadam.errors import ShapeError, TreeError
from jdistadam.interop import torch_layout
from jdistadam.interop.apex_shards import flat_arrays
from jdistadam.interop.named_state import NamedLeaf, NamedState
from jdistadam.interop.their_arrays import as_numpy, mapping, sequence
from jdistadam.interop.torch_layout import Names, TorchLayout


def from_apex_distributed(
    state_dict: Any,
    params: Mapping[str, Any] | None,
    names: Names = None,
    *,
    channels_last: Collection[str] = (),
) -> NamedState:
    """Reads the state of Apex's ``DistributedFusedAdam``, in format 1 or 2.

    Format 2 holds unsharded arrays, made of scaled states and of remainders too. Format 1 holds the
    buckets of each process: flat shards, and the fragments of parameters that are in them. Unpack
    what it gathered where Apex is installed::

        gathered = state_dict["gathered_states"]
        ranks = [torch.load(io.BytesIO(x.numpy()), weights_only=False) for x in gathered]

    and pass this list; the shards may be tensors. In a file, buckets and fragments are dictionaries
    of the fields of the same names.

    Layout: NVIDIA/apex 6424da3b, ``apex/contrib/optimizers/distributed_fused_adam.py``.

    Args:
      state_dict: ``optimizer.state_dict()`` (format 2), or a list of the state dictionaries of all
        processes (format 1).
      params: The model's parameters by name. Format 1 needs them for their shapes, and for their
        values where it keeps 16-bit remainders or nothing of them.
      names: As in ``from_torch``.
      channels_last: Names of parameters in torch's memory format of this name. Format 1 has their
        elements in the order of memory.

    Raises:
      TreeError, ShapeError, DtypeError: It is no such state, the names do not fit it, or shards are
        missing.

    Example:
      >>> moments = dict(param=np.ones(4), exp_avg=np.zeros(4), exp_avg_sq=np.zeros(4))
      >>> groups = [dict(lr=1e-3, params=[0])]
      >>> state_dict = {"state": {"step": 7, 0: moments}, "param_groups": groups, "format": 2}
      >>> from_apex_distributed(state_dict, None, ["w"]).step
      7
    """
    if isinstance(state_dict, list | tuple):
        return _from_shards(state_dict, params, names, channels_last)
    given = mapping("state_dict", state_dict)
    if "gathered_states" in given:
        ranks = sequence("state_dict['gathered_states']", given["gathered_states"])
        return _from_shards(ranks, params, names, channels_last)
    if "buckets" in mapping("state_dict['state']", given.get("state", {})):
        return _from_shards([given], params, names, channels_last)
    if given.get("format", 2) != 2:
        raise TreeError(
            "state_dict['format']",
            "unknown format",
            got=given["format"],
            expected="1, with the buckets of every process, or 2",
            action="Save it anew with state_dict(state_dict_format=2).",
        )
    layout = torch_layout.parse(given, names, where="state_dict", beside=("step",))
    leaves = {
        name: torch_layout.leaf_of(
            name, layout.entries.get(name), torch_layout.param_of(params, name)
        )
        for name in layout.names
    }
    return NamedState(_step([layout]), leaves, layout.groups)


def _step(layouts: Sequence[TorchLayout]) -> int:
    for i, layout in enumerate(layouts):
        if "step" not in layout.beside:
            raise TreeError(
                f"state of process {i}",
                "has no step count",
                got=sorted(map(str, layout.beside)),
                expected="'step' beside the parameters",
                action="Use from_torch for an optimizer of torch's own layout.",
            )
    steps = [(f"process {i}", layout.beside["step"]) for i, layout in enumerate(layouts)]
    return torch_layout.one_step(steps)


def _from_shards(
    ranks: Sequence[Any], params: Any, names: Names, channels_last: Collection[str]
) -> NamedState:
    """Puts format 1 together."""
    for i, rank in enumerate(ranks):
        mapping(
            f"state_dict[{i}]",
            rank,
            "Unpack it with torch.load(io.BytesIO(x.numpy()), weights_only=False).",
        )
    layouts = [
        torch_layout.parse(rank, names, where=f"state_dict[{i}]", beside=("step", "buckets"))
        for i, rank in enumerate(ranks)
    ]
    if not layouts or any(layout.groups != layouts[0].groups for layout in layouts):
        raise TreeError(
            "state_dict",
            "the processes have different groups" if layouts else "no process",
            got=[layout.groups for layout in layouts],
            expected="the states of all processes of one optimizer",
            action="Pass all that state_dict(state_dict_format=1) gathered.",
        )
    flat = flat_arrays(layouts, {name: _param(params, name).size for name in layouts[0].names})
    leaves = {
        name: _leaf(name, _param(params, name), found, name in channels_last)
        for name, found in flat.items()
    }
    return NamedState(_step(layouts), leaves, layouts[0].groups)


def _param(params: Any, name: str) -> np.ndarray:
    param = torch_layout.param_of(params, name)
    if param is None:
        raise TreeError(
            f"params[{name!r}]",
            "missing: format 1 does not say the shapes of parameters",
            got=None,
            expected="the parameter of the model",
            action="Pass params=model.state_dict().",
        )
    return as_numpy(f"params[{name!r}]", param)


def _leaf(
    name: str, param: np.ndarray, found: Mapping[str, np.ndarray], is_channels_last: bool
) -> NamedLeaf:
    """Gives the flat arrays of a parameter its shape."""
    shape = param.shape
    if is_channels_last and param.ndim != 4:
        raise ShapeError(
            f"params[{name!r}]",
            "has no channels",
            got=shape,
            expected="4 dimensions",
            action="Remove it from channels_last.",
        )

    def shaped(flat: np.ndarray) -> np.ndarray:
        if not is_channels_last:
            return flat.reshape(shape)
        return flat.reshape([shape[i] for i in (0, 2, 3, 1)]).transpose(0, 3, 1, 2)

    arrays = {kind: shaped(flat) for kind, flat in found.items()}
    main = arrays.get("params_shard", param)
    if "param_remainders_shard" in arrays:
        main = torch_layout.joined(name, param, arrays["param_remainders_shard"])
    return NamedLeaf(main, arrays.get("exp_avg_shard"), arrays.get("exp_avg_sq_shard"))
