"""NeMo's MainParamsOptimizerWrapper: an optimizer's state beside its main parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jdistadam.errors import TreeError
from jdistadam.interop import torch_layout
from jdistadam.interop.named_state import NamedState
from jdistadam.interop.their_arrays import as_numpy, mapping, sequence
from jdistadam.interop.torch_layout import Names, TorchLayout


def from_nemo(
    state_dict: Mapping[str, Any], params: Mapping[str, Any], names: Names = None
) -> NamedState:
    """Reads the state of NeMo's ``MainParamsOptimizerWrapper`` around an Adam.

    ``optimizer`` (before: ``optimizer_state_dict``) is the state of the wrapped optimizer, in
    torch's layout; ``fp32_from_fp16_params`` (before: ``fp32_from_fp16``) holds, for each group,
    the float32 values of those of its parameters that are in 16 bits. Which ones these are is seen
    from ``params``; frozen ones, which have no state, are not among them.

    Layout: NVIDIA/NeMo 8cfedd72, ``nemo/core/optim/optimizer_with_main_params.py``.

    Args:
      state_dict: ``optimizer.state_dict()``.
      params: The model's parameters by name, in the dtypes in which it was trained.
      names: As in ``from_torch``.

    Raises:
      TreeError, ShapeError, DtypeError: It is no such state, or params or names do not fit it.

    Example:
      >>> import numpy as np
      >>> moments = dict(exp_avg=np.zeros(2), exp_avg_sq=np.zeros(2))
      >>> adam = {"state": {0: moments}, "param_groups": [dict(step=5, params=[0])]}
      >>> state_dict = {"optimizer": adam, "fp32_from_fp16_params": [[np.float32([1, 2])]]}
      >>> theirs = from_nemo(state_dict, {"w": np.float16([1, 2])}, ["w"])
      >>> theirs.step, theirs.leaves["w"].param.dtype
      (5, dtype('float32'))
    """
    given = mapping("state_dict", state_dict)
    adam_key, adam = _first_of(given, ("optimizer", "optimizer_state_dict"))
    main_key, mains = _first_of(given, ("fp32_from_fp16_params", "fp32_from_fp16"))
    where = f"state_dict[{adam_key!r}]"
    layout = torch_layout.parse({"state": {}, **mapping(where, adam)}, names, where=where)
    by_name = dict(_mains(layout, mains, params, f"state_dict[{main_key!r}]"))
    leaves = {
        name: torch_layout.leaf_of(
            name,
            layout.entries.get(name),
            by_name.get(name, torch_layout.param_of(params, name)),
        )
        for name in layout.names
    }
    step = torch_layout.one_step(torch_layout.steps_of(layout))
    return NamedState(step, leaves, layout.groups)


def _first_of(given: Mapping[str, Any], keys: tuple[str, str]) -> tuple[str, Any]:
    for key in keys:
        if key in given:
            return key, given[key]
    raise TreeError(
        "state_dict",
        f"has neither {keys[0]!r} nor {keys[1]!r}",
        got=sorted(map(str, given)),
        expected=f"{keys[0]!r}",
        action="Use from_torch for the state of an optimizer that was not wrapped.",
    )


def _mains(layout: TorchLayout, mains: Any, params: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Yields the names of parameters in 16 bits, and their main parameters."""
    by_group = sequence(where, mains)
    if len(by_group) != len(layout.groups):
        raise TreeError(
            where,
            "has another number of groups than the optimizer",
            got=len(by_group),
            expected=len(layout.groups),
            action="Pass the state dictionary as it was saved.",
        )
    for i, (group, given) in enumerate(zip(layout.groups, by_group, strict=True)):
        narrow = [x for x in group.names if x in layout.entries and _is_narrow(params, x)]
        found = sequence(f"{where}[{i}]", given)
        if len(narrow) != len(found):
            raise TreeError(
                f"{where}[{i}]",
                "there is not one main parameter for each parameter in 16 bits",
                got=len(found),
                expected=f"{len(narrow)} for {narrow}",
                action="Pass params in the dtypes in which the model was trained.",
            )
        yield from zip(narrow, found, strict=True)


def _is_narrow(params: Any, name: str) -> bool:
    param = torch_layout.param_of(params, name)
    return param is not None and as_numpy(f"params[{name!r}]", param).dtype.itemsize == 2
