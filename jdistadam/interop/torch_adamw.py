"""torch.optim.AdamW and what has its layout, in and out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jdistadam.errors import HyperparameterError, TreeError
from jdistadam.interop import torch_layout
from jdistadam.interop.named_state import NamedState, check_named_state
from jdistadam.interop.torch_layout import Names


class TorchState(NamedTuple):
    """A state in the layout of torch, of numpy arrays.

    Attributes:
      optimizer: What ``load_state_dict`` of ``torch.optim.AdamW`` takes, once its arrays are
        tensors.
      params: Parameters by name, float32 where the state had main parameters.
      names: The names of the parameters, in the order of the indices in ``optimizer``.
    """

    optimizer: dict[str, Any]
    params: dict[str, np.ndarray]
    names: list[str]


def from_torch(
    state_dict: Mapping[str, Any], params: Mapping[str, Any] | None, names: Names = None
) -> NamedState:
    """Reads the state of ``torch.optim.AdamW`` or ``Adam``, or of an optimizer of its layout.

    Those are ``apex.optimizers.FusedAdam``, ``transformer_engine.pytorch.optimizers.FusedAdam``,
    and any of them under Megatron-FSDP's ``fully_shard_optimizer``. Apex keeps its own
    ``master_weights`` out of the dictionary, and neither it nor older versions of torch
    write whether weight decay is decoupled (``adam_w_mode``): it is taken to be.

    Layouts: torch 2.15, ``torch/optim/adam.py``; NVIDIA/apex 6424da3b,
    ``apex/optimizers/fused_adam.py``; NVIDIA/TransformerEngine 04912bf0,
    ``transformer_engine/pytorch/optimizers/fused_adam.py``; NVIDIA/Megatron-LM d98e8a64,
    ``megatron/core/distributed/fsdp/src/megatron_fsdp/fully_shard.py``.

    Args:
      state_dict: ``optimizer.state_dict()``, with tensors or numpy arrays.
      params: ``model.state_dict()``, or another dictionary of parameters by name; it may hold more
        than the optimizer got, such as buffers.
      names: The names of the parameters in the order of ``optimizer.param_groups``, which need not
        be that of the model, or a dictionary of them by index. None: the dictionary has them, as
        that of an optimizer made with ``model.named_parameters()``, or of
        ``get_optimizer_state_dict`` of torch's distributed checkpoints.

    Raises:
      TreeError, ShapeError, DtypeError: It is no such state, or the names do not fit it.
      HyperparameterError: It uses ``amsgrad`` or ``maximize``.

    Example:
      >>> settings = dict(lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, params=[0])
      >>> moments = dict(step=3.0, exp_avg=np.ones((2, 4)), exp_avg_sq=np.ones((2, 4)))
      >>> state_dict = {"state": {0: moments}, "param_groups": [settings]}
      >>> theirs = from_torch(state_dict, {"fc.weight": np.ones((2, 4))}, ["fc.weight"])
      >>> theirs.step, theirs.leaves["fc.weight"].mu.shape
      (3, (2, 4))
    """
    layout = torch_layout.parse(state_dict, names, where="state_dict")
    leaves = {
        name: torch_layout.leaf_of(
            name, layout.entries.get(name), torch_layout.param_of(params, name)
        )
        for name in layout.names
    }
    step = torch_layout.one_step(torch_layout.steps_of(layout))
    return NamedState(step, leaves, layout.groups)


_NEEDED = ("lr", "betas", "eps", "weight_decay")
_DEFAULTS = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}


def to_torch(theirs: NamedState, **settings: Any) -> TorchState:
    """Writes a state in the layout of ``torch.optim.AdamW.state_dict()``.

    Parameters are numbered group by group, and each group keeps its order.

    Args:
      theirs: The state, as ``from_train_state`` or ``from_fused`` returns it, or another reader.
      **settings: Hyperparameters by torch's names, in place of those of every group.

    Raises:
      HyperparameterError: One is missing that torch needs.
      TreeError: A group names a parameter that is not there.

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
            f"groups, {missing[0]!r}",
            "is in a group, and is no parameter of the state",
            got=f"{len(missing)} such names",
            expected="names of its leaves",
            action="Pass groups of the parameters that are exported.",
        )
    groups, first = [], 0
    for group in theirs.groups:
        given = {k: x for k, x in group.settings.items() if k not in ("step", "bias_correction")}
        new = _DEFAULTS | given | settings
        _check_settings(new, group.settings.get("bias_correction", True))
        groups.append(new | {"params": list(range(first, first + len(group.names)))})
        first += len(group.names)
    state = {}
    for i, name in enumerate(names):
        leaf = theirs.leaves[name]
        if leaf.mu is not None:
            step = np.array(theirs.step, np.float32)  # as torch keeps it
            state[i] = {"step": step, "exp_avg": leaf.mu, "exp_avg_sq": leaf.nu}
    params = {k: leaf.param for k, leaf in theirs.leaves.items() if leaf.param is not None}
    return TorchState({"state": state, "param_groups": groups}, params, names)


def _check_settings(settings: Mapping[str, Any], bias_correction: bool) -> None:
    missing = [key for key in _NEEDED if key not in settings]
    if missing or not bias_correction:
        raise HyperparameterError(
            missing[0] if missing else "bias_correction",
            "missing, and torch needs it" if missing else "torch always corrects the bias",
            got=dict(settings) if missing else False,
            expected=", ".join(_NEEDED) if missing else True,
            action="Pass them by keyword." if missing else "Train on with ours.",
        )
