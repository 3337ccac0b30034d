"""torch's layout of optimizer states, read and written; the other readers first convert to it.

``param_groups`` is a list of dictionaries, each with the hyperparameters of a group and, under
``params``, the indices or names of its parameters; ``state`` has a dictionary per parameter. A step
count is in the state of each parameter (torch) or in each group (Apex, Transformer Engine).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jdistadam.core.codecs import join_halves
from jdistadam.errors import DtypeError, HyperparameterError, ShapeError, TreeError
from jdistadam.interop.named_state import Group, NamedLeaf, NamedState, check_named_state

Names = Sequence[str] | Mapping[Any, str] | None

# Keys in the state of a parameter: the main parameter is ``param`` in Apex and ``master_param`` in
# Transformer Engine, float32 or the int16 remainder of a bfloat16 parameter.
_OURS = {"param": "param", "master_param": "param", "exp_avg": "mu", "exp_avg_sq": "nu"}
_INSTEAD = {
    "amsgrad": "it has a third moment, which Adam here has not",
    "maximize": "minimise the negated loss",
}
_AS_MADE = "Pass the state dictionary as the other framework made it."


def from_torch(
    state_dict: Mapping[str, Any], params: Mapping[str, Any] | None, names: Names = None
) -> NamedState:
    """Reads the state of ``torch.optim.AdamW`` or ``Adam``, or of an optimizer with its layout.

    ``FusedAdam`` of Apex (without ``master_weights``, which are not in the dictionary) and of
    Transformer Engine have this layout, also under Megatron-FSDP's ``fully_shard_optimizer``. If a
    state does not say whether weight decay is decoupled (Apex, older versions of torch), it is
    taken as decoupled.

    Layouts: torch 2.15, ``torch/optim/adam.py``; NVIDIA/apex 6424da3b,
    ``apex/optimizers/fused_adam.py``; NVIDIA/TransformerEngine 04912bf0,
    ``transformer_engine/pytorch/optimizers/fused_adam.py``; NVIDIA/Megatron-LM d98e8a64,
    ``megatron/core/distributed/fsdp/src/megatron_fsdp/fully_shard.py``.

    Args:
      state_dict: ``optimizer.state_dict()``, with tensors or numpy arrays.
      params: Parameters by name, such as ``model.state_dict()``; buffers are left out.
      names: The names of the parameters in the order of ``optimizer.param_groups``, which may
        differ from the model's, or a dictionary of them by index. None: they are in the dictionary,
        as after ``AdamW(model.named_parameters())``, or from ``get_optimizer_state_dict``.

    Returns:
      The state by torch's names, as numpy arrays.

    Raises:
      TreeError, ShapeError, DtypeError: It is no such state, or the names do not match it.
      HyperparameterError: It uses ``amsgrad`` or ``maximize``.

    Example:
      >>> moments = dict(step=3.0, exp_avg=np.ones((2, 4)), exp_avg_sq=np.ones((2, 4)))
      >>> state_dict = {"state": {0: moments}, "param_groups": [dict(lr=1e-3, params=[0])]}
      >>> theirs = from_torch(state_dict, {"fc.weight": np.ones((2, 4))}, ["fc.weight"])
      >>> theirs.step, theirs.leaves["fc.weight"].mu.shape, theirs.arguments()
      (3, (2, 4), {'learning_rate': 0.001})
    """
    return parse(state_dict, names).named_state(params)


class TorchState(NamedTuple):
    """A state in torch's layout, with numpy arrays.

    Attributes:
      optimizer: The argument of ``torch.optim.AdamW.load_state_dict``, with arrays as tensors.
      params: Parameters by name, float32 if the state had main parameters.
      names: The names of the parameters in the order of the indices in ``optimizer``.
    """

    optimizer: dict[str, Any]
    params: dict[str, np.ndarray]
    names: list[str]


_NEEDED = ("lr", "betas", "eps", "weight_decay")
_OF_ADAMW: dict[str, Any] = {
    "foreach": None, "fused": None, "capturable": False, "differentiable": False,
    "amsgrad": False, "maximize": False, "decoupled_weight_decay": True,
}  # fmt: skip


def to_torch(theirs: NamedState, **settings: Any) -> TorchState:
    """Writes a state in the layout of ``torch.optim.AdamW.state_dict()``.

    Parameters are numbered group by group, and each group keeps its order.

    Args:
      theirs: The result of ``from_train_state``, ``from_fused`` or a reader.
      **settings: Hyperparameters by torch's names; they replace those of every group.

    Returns:
      A ``TorchState``: the argument of ``load_state_dict``, the parameters and their names.

    Raises:
      HyperparameterError: A hyperparameter that torch needs is missing.
      TreeError: A group names an unknown parameter.

    Example:
      >>> theirs = from_torch({"state": {}, "param_groups": [dict(params=[0])]}, None, ["w"])
      >>> exported = to_torch(theirs, lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
      >>> exported.optimizer["param_groups"][0]["params"], exported.names
      ([0], ['w'])
    """
    check_named_state(theirs)
    names = [name for group in theirs.groups for name in group.names]
    if missing := [name for name in names if name not in theirs.leaves]:
        raise TreeError(
            f"groups, {missing[0]!r}: is in a group, and is no parameter of the state: "
            f"got {len(missing)} such names, expected names of its leaves. "
            "Pass groups of the parameters that are exported."
        )
    groups, indices = [], itertools.count()
    for group in theirs.groups:
        known = {k: x for k, x in group.settings.items() if k not in ("step", "bias_correction")}
        new = _OF_ADAMW | known | settings
        if missing := [key for key in _NEEDED if key not in new]:
            raise HyperparameterError(
                f"{missing[0]}: missing, and torch needs it: got {new}, "
                f"expected {', '.join(_NEEDED)}. Pass them by keyword."
            )
        if not group.settings.get("bias_correction", True):
            raise HyperparameterError(
                "bias_correction: torch always corrects the bias: got False, expected True. "
                "Train on with ours."
            )
        groups.append(new | {"params": [next(indices) for _ in group.names]})
    state = {
        i: {"step": np.array(theirs.step, np.float32), "exp_avg": leaf.mu, "exp_avg_sq": leaf.nu}
        for i, leaf in enumerate(theirs.leaves[name] for name in names)
        if leaf.mu is not None
    }
    params = {k: leaf.param for k, leaf in theirs.leaves.items() if leaf.param is not None}
    return TorchState({"state": state, "param_groups": groups}, params, names)


def as_numpy(where: str, x: Any) -> np.ndarray:
    """Returns an array, number or torch tensor as a numpy array, without a copy if possible."""
    if hasattr(x, "full_tensor"):
        raise TreeError(
            f"{where}: a distributed tensor, of which this process holds a shard: "
            f"got {type(x).__name__}, expected the whole tensor. "
            "Gather it first; of a distributed checkpoint make a file with "
            "torch.distributed.checkpoint.format_utils.dcp_to_torch_save."
        )
    if hasattr(x, "detach"):
        x = x.detach().cpu()
        if str(x.dtype) == "torch.bfloat16":  # torch cannot pass it to numpy otherwise
            return np.asarray(x.float().numpy().astype(ml_dtypes.bfloat16))
        x = x.numpy()
    array = np.asarray(x)
    if array.dtype.kind not in "biuf" and array.dtype != ml_dtypes.bfloat16:
        got = type(x).__name__ if array.dtype == object else array.dtype
        raise DtypeError(
            f"{where}: not an array of numbers: got {got}, "
            f"expected a numpy array or a torch tensor. {_AS_MADE}"
        )
    return array


def mapping(where: str, x: Any, action: str = _AS_MADE) -> Mapping[Any, Any]:
    """Returns ``x``, or raises TreeError if it is no dictionary."""
    if isinstance(x, Mapping):
        return x
    raise TreeError(f"{where}: not a dictionary: got {type(x).__name__}, expected a dict. {action}")


def sequence(where: str, x: Any) -> list[Any]:
    """Returns a list, from a list or from a dictionary by position as in files."""
    if isinstance(x, list | tuple):
        return list(x)
    by_position = {str(key): value for key, value in x.items()} if isinstance(x, Mapping) else None
    if by_position is not None and by_position.keys() == set(map(str, range(len(by_position)))):
        return [by_position[str(i)] for i in range(len(by_position))]
    got = type(x).__name__ if by_position is None else sorted(by_position)
    raise TreeError(
        f"{where}: not a list, nor a dictionary by position: got {got}, "
        f"expected a list, or all positions from 0. {_AS_MADE}"
    )


def first_of(where: str, x: Any, *keys: str) -> tuple[str, Any]:
    """Returns the first of these entries in a dictionary, after its path."""
    given = mapping(where, x)
    for key in keys:
        if key in given:
            return f"{where}[{key!r}]", given[key]
    raise TreeError(
        f"{where}: has no {' or '.join(map(repr, keys))}: got keys {sorted(map(str, given))}, "
        f"expected {keys[0]!r}, as the state_dict() of an optimizer of this format has it. "
        "Use from_nemo for 'fp32_from_fp16_params', from_apex_distributed for 'gathered_states', "
        "from_megatron_fsdp for 'param_to_group_meta', from_torch for 'param_groups' alone."
    )


class TorchLayout(NamedTuple):
    """Groups, and the entry of ``state`` for each parameter with one, by name."""

    groups: tuple[Group, ...]
    entries: dict[str, Mapping[str, Any]]

    def named_state(self, params: Any, steps: Mapping[str, Any] | None = None) -> NamedState:
        """Returns the state; ``steps``: step counts by place, if not in groups and entries."""
        known = {} if params is None else mapping("params", params)
        names = (name for group in self.groups for name in group.names)
        leaves = {k: _leaf(k, self.entries.get(k, {}), known.get(k)) for k in names}
        step = _one_step(_steps(*self) if steps is None else steps)
        return NamedState(step, leaves, self.groups)


def parse(state_dict: Any, names: Names, where: str = "state_dict") -> TorchLayout:
    """Returns the contents of a state dictionary, called ``where`` in messages, by name."""
    path, given = first_of(where, state_dict, "state")
    of_groups, groups = first_of(where, state_dict, "param_groups")
    raw = [mapping(of_groups, group) for group in sequence(of_groups, groups)]
    keys = [[str(key) for key in sequence(of_groups, group.get("params"))] for group in raw]
    name_of = _name_of(raw, [key for found in keys for key in found], names, where)
    entries = mapping(path, given)
    if strange := [key for key in entries if str(key) not in name_of]:
        raise TreeError(
            f"{path}[{strange[0]!r}]: belongs to no group: got {len(strange)} such parameters, "
            f"expected one of the {len(name_of)} in the groups. "
            "Pass the state of one optimizer, as it was saved."
        )
    pairs = zip(([name_of[key] for key in found] for found in keys), raw, strict=True)
    made = tuple(Group(tuple(members), _settings(group, of_groups)) for members, group in pairs)
    by_name = {name_of[str(key)]: mapping(f"{path}[{key!r}]", x) for key, x in entries.items()}
    return TorchLayout(made, by_name)


def _name_of(raw: list[Any], keys: list[str], names: Names, where: str) -> dict[str, str]:
    """The name of each key, from the argument or from the groups."""
    if names is None and not all(map(str.isdigit, keys)):
        names = {key: key for key in keys}
    elif names is None and all("param_names" in group for group in raw):
        of_group = [sequence(f"{where}: param_names", group["param_names"]) for group in raw]
        given = [name for found in of_group for name in found]
        names = dict(zip(keys, given, strict=True)) if len(given) == len(keys) else given
    elif names is None:
        raise TreeError(
            "names: missing: the dictionary has parameters by index alone: got None, "
            f"expected {len(keys)} names in the order in which the optimizer got its parameters. "
            "Pass the name of each parameter in optimizer.param_groups, in their order, "
            "found by identity: {id(x): name for name, x in model.named_parameters()}."
        )
    items = names.items() if isinstance(names, Mapping) else enumerate(names)
    by_key = {str(key): str(name) for key, name in items}
    if sorted(by_key) != sorted(keys) or len(set(by_key.values())) != len(by_key):
        raise TreeError(
            f"names: do not fit the parameters of {where}: got {len(by_key)} names, "
            f"{len(set(by_key.values()))} different ones, expected one name for each of the "
            f"{len(keys)} parameters. Leave out parameters that the optimizer did not get."
        )
    return by_key


def _settings(group: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The hyperparameters of a group, as Python numbers."""
    settings = {k: _plain(where, x) for k, x in group.items() if k not in ("params", "param_names")}
    for key in filter(settings.get, _INSTEAD):
        raise HyperparameterError(
            f"{where}[...][{key!r}]: is not supported: got {settings[key]}, expected False. "
            f"Continue it elsewhere: {_INSTEAD[key]}."
        )
    return settings


def _plain(where: str, x: Any) -> Any:
    """A tensor of one number, or a list of them, as Python numbers."""
    if isinstance(x, list | tuple):
        return tuple(_plain(where, y) for y in x)
    is_one = hasattr(x, "dtype") and hasattr(x, "shape") and tuple(x.shape) in ((), (1,))
    return as_numpy(where, x).item() if is_one else x


def _leaf(name: str, entry: Mapping[str, Any], param: Any) -> NamedLeaf:
    """A parameter, from its state or otherwise from the model, and its moments."""
    if unknown := sorted(set(entry) - {"step", *_OURS}):
        raise TreeError(
            f"state of {name!r}: unknown entry {unknown[0]!r}: got {sorted(map(str, entry))}, "
            "expected step, exp_avg, exp_avg_sq and perhaps param or master_param. "
            "Use the reader of the optimizer that made it; other ones are not supported."
        )
    if param is not None:
        param = as_numpy(f"parameter {name!r}", param)
    found = {our: as_numpy(f"{k} of {name!r}", entry[k]) for k, our in _OURS.items() if k in entry}
    found = {"param": param} | found
    main = found["param"]
    if main is not None and main.dtype == np.int16:
        if param is None or param.dtype != ml_dtypes.bfloat16:
            raise TreeError(
                f"parameter {name!r}: needed in bfloat16, of which the state keeps the remainder: "
                f"got {None if param is None else param.dtype}, "
                "expected the model's bfloat16 parameter. Pass it in params."
            )
        found["parameter"] = param
    shapes = {key: x.shape for key, x in found.items() if x is not None}
    if len(set(shapes.values())) > 1:
        raise ShapeError(
            f"state of {name!r}: parameter and what is kept of it differ in shape: "
            f"got {shapes}, expected one shape. "
            "Check that names are in the order in which the optimizer got its parameters."
        )
    if "parameter" in found:  # Apex and Transformer Engine split as we do: [Note: remainders]
        flat = join_halves(param.reshape(-1), main.reshape(-1).view(np.uint16), np)
        main = flat.reshape(param.shape)
    return NamedLeaf(main, found.get("mu"), found.get("nu"))


def _steps(groups: Sequence[Group], entries: Mapping[str, Any]) -> dict[str, Any]:
    """The step counts of groups and parameters by place; None where both lack one."""
    found = {}
    for i, (names, settings) in enumerate(groups):
        of_group = settings.get("step")
        if of_group is not None and names:
            found[f"param_groups[{i}]"] = of_group
        for name in filter(entries.__contains__, names):
            of_param = entries[name].get("step")
            if of_param is not None or of_group is None:
                found[repr(name)] = of_param
    return found


def _one_step(steps: Mapping[str, Any]) -> int:
    """The step count shared by all parameters or groups; 0 if there are none."""
    found: dict[Any, str] = {}  # each distinct count, and its first place
    for where, step in steps.items():
        if step is None:
            raise TreeError(
                f"state of {where}: has no step count, and neither has its group: got None, "
                "expected 'step', without which the bias cannot be corrected. Pass the state "
                "dictionary as its optimizer made it: to from_torch if its groups have 'step'."
            )
        count = as_numpy(f"step of {where}", step)
        found.setdefault(float(count.item()) if count.size == 1 else count.shape, where)
    is_count = [isinstance(x, float) and x.is_integer() and 0 <= x < 1 << 31 for x in found]
    if len(found) > 1 or not all(is_count):
        raise TreeError(
            "step: not one whole number for all parameters, as one count serves all of ours: "
            f"got {found}, expected one whole number of steps below 2**31. "
            "Leave out parameters that were not trained from the start."
        )
    return int(next(iter(found), 0))
