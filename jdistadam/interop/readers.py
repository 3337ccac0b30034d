"""Readers of other frameworks' states, each a small step to torch's layout, and its writer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jdistadam.errors import HyperparameterError, TreeError
from jdistadam.interop.named_state import Group, NamedState, check_named_state, joined_groups
from jdistadam.interop.torch_layout import Names, as_numpy, first_of, mapping, parse, sequence


def from_torch(
    state_dict: Mapping[str, Any], params: Mapping[str, Any] | None, names: Names = None
) -> NamedState:
    """Reads the state of ``torch.optim.AdamW`` or ``Adam``, or of an optimizer with its layout.

    Those are ``FusedAdam`` of Apex and of Transformer Engine, and any of them under Megatron-FSDP's
    ``fully_shard_optimizer``. Apex keeps its own ``master_weights`` out of the dictionary. Neither
    Apex nor older versions of torch write whether weight decay is decoupled (``adam_w_mode``):
    decoupled is assumed.

    Layouts: torch 2.15, ``torch/optim/adam.py``; NVIDIA/apex 6424da3b,
    ``apex/optimizers/fused_adam.py``; NVIDIA/TransformerEngine 04912bf0,
    ``transformer_engine/pytorch/optimizers/fused_adam.py``; NVIDIA/Megatron-LM d98e8a64,
    ``megatron/core/distributed/fsdp/src/megatron_fsdp/fully_shard.py``.

    Args:
      state_dict: ``optimizer.state_dict()``, with tensors or numpy arrays.
      params: Parameters by name, such as ``model.state_dict()``; buffers are left out.
      names: The names of the parameters in the order of ``optimizer.param_groups``, which may
        differ from the model's, or a dictionary of them by index. None: the dictionary has names,
        as from an optimizer made with ``model.named_parameters()``, or from
        ``get_optimizer_state_dict`` of torch's distributed checkpoints.

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


def from_nemo(
    state_dict: Mapping[str, Any], params: Mapping[str, Any], names: Names = None
) -> NamedState:
    """Reads the state of NeMo's ``MainParamsOptimizerWrapper`` around an Adam.

    ``optimizer`` (before: ``optimizer_state_dict``) is the state of the wrapped optimizer;
    ``fp32_from_fp16_params`` (before: ``fp32_from_fp16``) has, for each group, the float32 values
    of its trained 16-bit parameters. ``params`` says which ones these are: by name, in the dtypes
    of training. ``names`` as in ``from_torch``.

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
      params: Parameters by name, in the dtype of the main parameters. None: those in ``model``.

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
    groups, first = [], 0
    for group in theirs.groups:
        last = first + len(group.names)
        groups.append(_as_adamw(group, settings) | {"params": list(range(first, last))})
        first = last
    state = {
        i: {"step": np.array(theirs.step, np.float32), "exp_avg": leaf.mu, "exp_avg_sq": leaf.nu}
        for i, leaf in enumerate(theirs.leaves[name] for name in names)
        if leaf.mu is not None
    }
    params = {k: leaf.param for k, leaf in theirs.leaves.items() if leaf.param is not None}
    return TorchState({"state": state, "param_groups": groups}, params, names)


def _as_adamw(group: Group, instead: dict[str, Any]) -> dict[str, Any]:
    not_torchs = ("step", "bias_correction")
    new = _OF_ADAMW | {k: x for k, x in group.settings.items() if k not in not_torchs} | instead
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
    return new
