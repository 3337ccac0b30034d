"""The layout of ``torch.optim.Optimizer.state_dict()``, which several optimizers share.

``param_groups`` is a list of dictionaries, each with the hyperparameters of a group and, under
``params``, the indices of its parameters, or their names; ``state`` has a dictionary for each. A
step count is in the state of each parameter (torch) or in each group (Apex, Transformer Engine).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jdistadam.core.codecs import join_halves
from jdistadam.errors import HyperparameterError, ShapeError, TreeError
from jdistadam.interop.named_state import Group, NamedLeaf
from jdistadam.interop.their_arrays import as_numpy, mapping, number, sequence

Names = Sequence[str] | Mapping[Any, str] | None

_NOT_SETTINGS = ("params", "param_names")
_TENSORS = ("exp_avg", "exp_avg_sq", "param", "master_param")


@dataclasses.dataclass(frozen=True)
class TorchLayout:
    """Groups by name, and the state of each parameter that has one.

    Attributes:
      groups: The groups.
      entries: What ``state`` holds, by name.
      beside: What ``state`` holds under keys of no parameter.
    """

    groups: tuple[Group, ...]
    entries: dict[str, Mapping[str, Any]]
    beside: dict[str, Any]

    @property
    def names(self) -> list[str]:
        """The names of all parameters, in the order of the groups."""
        return [name for group in self.groups for name in group.names]


def parse(
    state_dict: Any, names: Names, *, where: str, beside: Collection[str] = ()
) -> TorchLayout:
    """Returns what a state dictionary holds, by name.

    Args:
      state_dict: The dictionary.
      names: The name of each parameter, by its index; None where the dictionary has them.
      where: How to call the dictionary in messages.
      beside: Keys of ``state`` that are no parameter.
    """
    given = mapping(where, state_dict)
    for key in ("state", "param_groups"):
        if key not in given:
            raise TreeError(
                where,
                f"has no {key!r}",
                got=f"keys {sorted(map(str, given))}",
                expected="the state_dict() of an optimizer, or another reader of jda.interop",
                action="Use from_nemo for 'fp32_from_fp16_params', from_apex_distributed for "
                "'gathered_states', from_megatron_fsdp for 'param_to_group_meta'.",
            )
    raw = [mapping(f"{where}['param_groups']", x) for x in sequence(where, given["param_groups"])]
    keys = [
        [str(key) for key in sequence(f"{where}['param_groups']", group.get("params"))]
        for group in raw
    ]
    name_of = _name_of(raw, [key for found in keys for key in found], names, where)
    groups = tuple(
        Group(tuple(name_of[key] for key in found), settings_of(group, where))
        for group, found in zip(raw, keys, strict=True)
    )
    state = mapping(f"{where}['state']", given["state"])
    entries = {key: value for key, value in state.items() if key not in beside}
    for key in entries:
        if str(key) not in name_of:
            raise TreeError(
                f"{where}['state'][{key!r}]",
                "belongs to no parameter of param_groups",
                got=key,
                expected=f"one of the {len(name_of)} in its groups",
                action="Pass the state dictionary as the optimizer made it.",
            )
    return TorchLayout(
        groups,
        {name_of[str(key)]: mapping(where, value) for key, value in entries.items()},
        {key: value for key, value in state.items() if key not in entries},
    )


def _name_of(
    raw: Sequence[Mapping[str, Any]], keys: list[str], names: Names, where: str
) -> dict[str, str]:
    """The name of each key, from the argument or from the groups themselves."""
    by_key: dict[str, str] = {}
    if names is None and not all(key.isdigit() for key in keys):
        by_key = {key: key for key in keys}
    elif names is None and all("param_names" in group for group in raw):
        by_key = dict(zip(keys, (n for group in raw for n in group["param_names"]), strict=True))
    elif names is None:
        raise TreeError(
            "names",
            "missing: the dictionary has parameters by index alone",
            got=None,
            expected=f"{len(keys)} names in the order in which the optimizer got its parameters",
            action="Pass the name of each parameter in optimizer.param_groups, in their order, "
            "found by identity: {id(x): name for name, x in model.named_parameters()}.",
        )
    else:
        items = names.items() if isinstance(names, Mapping) else enumerate(names)
        by_key = {str(key): str(name) for key, name in items}
    if sorted(by_key) != sorted(keys) or len(set(by_key.values())) != len(by_key):
        raise TreeError(
            "names",
            f"do not fit the parameters of {where}",
            got=f"{len(by_key)} names, {len(set(by_key.values()))} different ones",
            expected=f"one name for each of the {len(keys)} parameters",
            action="Leave out parameters that the optimizer did not get.",
        )
    return by_key


def settings_of(group: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns the hyperparameters of a group, as Python numbers; raises where Adam has no such."""
    settings = {key: _plain(where, x) for key, x in group.items() if key not in _NOT_SETTINGS}
    for key, instead in (
        ("amsgrad", "it has a third moment, which Adam here has not"),
        ("maximize", "minimise the negated loss"),
    ):
        if settings.get(key):
            raise HyperparameterError(
                f"{where}['param_groups'][...][{key!r}]",
                "is not supported",
                got=settings[key],
                expected=False,
                action=f"Continue it elsewhere: {instead}.",
            )
    return settings


def _plain(where: str, x: Any) -> Any:
    """A tensor of one number, or a list of them, as Python numbers."""
    if isinstance(x, list | tuple):
        return tuple(_plain(where, y) for y in x)
    is_one = hasattr(x, "dtype") and hasattr(x, "shape") and tuple(x.shape) in ((), (1,))
    return as_numpy(where, x).item() if is_one else x


def leaf_of(name: str, entry: Mapping[str, Any] | None, param: Any) -> NamedLeaf:
    """Returns a parameter and its moments.

    Args:
      name: Its name.
      entry: Its state, with the keys ``exp_avg`` and ``exp_avg_sq``; also the main parameter, as
        ``param`` (Apex) or ``master_param`` (Transformer Engine). None: it has no state.
      param: The parameter of the model, or None.
    """
    unknown = sorted(set(entry or ()) - {"step", *_TENSORS})
    if unknown:
        raise TreeError(
            f"state of {name!r}",
            f"unknown entry {unknown[0]!r}",
            got=sorted(map(str, entry or ())),
            expected="step, exp_avg, exp_avg_sq and perhaps param or master_param",
            action="Use the reader of the optimizer that made it; other ones are not supported.",
        )
    arrays = {k: as_numpy(f"{k} of {name!r}", x) for k, x in (entry or {}).items() if k in _TENSORS}
    param = None if param is None else as_numpy(f"parameter {name!r}", param)
    main = arrays.get("master_param", arrays.get("param"))
    if main is not None and main.dtype == np.int16:
        main = joined(name, param, main)
    leaf = NamedLeaf(
        param if main is None else main, arrays.get("exp_avg"), arrays.get("exp_avg_sq")
    )
    check_shapes(name, leaf)
    return leaf


def joined(name: str, param: Any, remainder: np.ndarray) -> np.ndarray:
    """Returns the float32 of a bfloat16 parameter and its remainder, an int16.

    Apex and Transformer Engine split float32 as we do: see [Note: remainders].
    """
    if param is None or param.dtype.name != "bfloat16":
        raise TreeError(
            f"parameter {name!r}",
            "needed in bfloat16, of which the state keeps the remainder",
            got=None if param is None else param.dtype,
            expected="the model's bfloat16 parameter",
            action="Pass it in params.",
        )
    if param.shape != remainder.shape:
        raise ShapeError(
            f"parameter {name!r}",
            "has another shape than its remainder",
            got=param.shape,
            expected=remainder.shape,
            action="Check that names are in the order in which the optimizer got its parameters.",
        )
    flat = join_halves(param.reshape(-1), remainder.reshape(-1).view(np.uint16), np)
    return np.asarray(flat).reshape(param.shape)


def check_shapes(name: str, leaf: NamedLeaf) -> None:
    """Raises ShapeError where the arrays of one parameter have different shapes."""
    shapes = {key: x.shape for key, x in leaf._asdict().items() if x is not None}
    if len(set(shapes.values())) > 1:
        raise ShapeError(
            f"state of {name!r}",
            "parameter and moments differ in shape",
            got=shapes,
            expected="one shape",
            action="Check that names are in the order in which the optimizer got its parameters.",
        )


def one_step(steps: Iterable[tuple[str, Any]]) -> int:
    """Returns the step count that all parameters or groups share; 0 if there are none."""
    found = {where: number(f"step of {where}", step) for where, step in steps}
    different = sorted(set(found.values()))
    if len(different) > 1 or any(x != int(x) or x < 0 for x in different):
        raise TreeError(
            "step",
            "differs between parameters, and one count serves all of ours",
            got={x: next(k for k, v in found.items() if v == x) for x in different},
            expected="one whole number of steps",
            action="Leave out parameters that were not trained from the start.",
        )
    return int(different[0]) if different else 0


def steps_of(layout: TorchLayout) -> Iterable[tuple[str, Any]]:
    """Yields the step count of each parameter that has a state, with the name that it goes by.

    Raises:
      TreeError: A parameter has moments, and no step count.
    """
    for i, group in enumerate(layout.groups):
        of_group = group.settings.get("step")
        if of_group is not None and group.names:
            yield f"param_groups[{i}]", of_group
        for name in group.names:
            step = layout.entries.get(name, {}).get("step")
            if step is not None:
                yield repr(name), step
            elif name in layout.entries and of_group is None:
                raise TreeError(
                    f"state of {name!r}",
                    "has no step count, and neither has its group",
                    got=sorted(map(str, layout.entries[name])),
                    expected="'step', without which the bias cannot be corrected",
                    action="Pass the state dictionary as the optimizer made it.",
                )


def param_of(params: Any, name: str) -> Any:
    """Returns a parameter of the model by name, None where it was not given."""
    return None if params is None else mapping("params", params).get(name)
