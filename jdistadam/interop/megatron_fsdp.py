"""Megatron-LM's checkpoints of Megatron-FSDP: the optimizer's state by the names of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jdistadam.errors import TreeError
from jdistadam.interop import torch_layout
from jdistadam.interop.hyperparameters import joined_groups
from jdistadam.interop.named_state import NamedState
from jdistadam.interop.their_arrays import mapping


def from_megatron_fsdp(
    state_dict: Mapping[str, Any], params: Mapping[str, Any] | None = None
) -> NamedState:
    """Reads the optimizer's part of a checkpoint of Megatron-FSDP, ``--ckpt-format fsdp_dtensor``.

    ``state`` has the moments of each parameter by name, ``param_to_group_meta`` its
    hyperparameters. The tensors must be whole: bring a checkpoint into one file with
    ``torch.distributed.checkpoint.format_utils.dcp_to_torch_save``. Names lose their leading
    ``module.`` and ``model.``, which differ between model and optimizer. Checkpoints with several
    optimizers in one, as of expert parallelism, are not supported; that of
    ``fully_shard_optimizer`` has torch's layout, which ``from_torch`` reads.

    Layout: NVIDIA/Megatron-LM d98e8a64, ``megatron/core/optimizer/distrib_optimizer.py``
    (``sharded_param_state_fsdp_dtensor``) and ``megatron/training/checkpointing.py``.

    Args:
      state_dict: The checkpoint, with ``model`` and ``optimizer``, or what is under ``optimizer``.
      params: Parameters by name, in the dtype of the main parameters. None: those under ``model``.

    Raises:
      TreeError, ShapeError, DtypeError: It is no such state.

    Example:
      >>> import numpy as np
      >>> moments = dict(step=2, exp_avg=np.zeros(3), exp_avg_sq=np.zeros(3))
      >>> meta = {"module.w": dict(lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)}
      >>> optimizer = {"state": {"module.w": moments}, "param_to_group_meta": meta}
      >>> theirs = from_megatron_fsdp({"optimizer": optimizer, "model": {"w": np.ones(3)}})
      >>> theirs.step, list(theirs.leaves)
      (2, ['w'])
    """
    given = mapping("state_dict", state_dict)
    if "optimizer" in given:
        params = given.get("model") if params is None else params
        given = mapping("state_dict['optimizer']", given["optimizer"])
    for key in ("state", "param_to_group_meta"):
        if key not in given:
            raise TreeError(
                "state_dict",
                f"has no {key!r}",
                got=sorted(map(str, given)),
                expected="'state' and 'param_to_group_meta'",
                action="Use from_torch where it has 'param_groups'.",
            )
    entries = _by_plain_name("state_dict['state']", given["state"])
    metas = _by_plain_name("state_dict['param_to_group_meta']", given["param_to_group_meta"])
    found = {} if params is None else _by_plain_name("params", params)
    if extra := sorted(set(entries) - set(metas)):
        raise TreeError(
            f"state_dict['state'][{extra[0]!r}]",
            "belongs to no group",
            got=f"{len(extra)} such parameters",
            expected="its name in param_to_group_meta",
            action="Pass the state of one optimizer, as it was saved.",
        )
    where = "param_to_group_meta"
    groups = joined_groups(
        {
            name: torch_layout.settings_of(mapping(f"{where}[{name!r}]", meta), where)
            for name, meta in metas.items()
        }
    )
    leaves = {
        name: torch_layout.leaf_of(name, entries.get(name), found.get(name)) for name in metas
    }
    layout = torch_layout.TorchLayout(groups, entries, {})
    return NamedState(torch_layout.one_step(torch_layout.steps_of(layout)), leaves, groups)


def _by_plain_name(where: str, named: Any) -> dict[str, Any]:
    """The same dictionary without the wrappers' prefixes of names."""
    plain: dict[str, Any] = {}
    for name, value in mapping(where, named).items():
        parts = str(name).split(".")
        while len(parts) > 1 and parts[0] in ("module", "model"):
            parts = parts[1:]
        key = ".".join(parts)
        if key in plain:
            raise TreeError(
                where,
                "two names are one without their prefixes",
                got=f"{name!r} and another one for {key!r}",
                expected="one parameter for each name",
                action="Pass the state of one model.",
            )
        plain[key] = value
    return plain
