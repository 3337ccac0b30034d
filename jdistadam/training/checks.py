"""Checks of the parts of a train state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jdistadam.core import trees
from jdistadam.core.guards import DynamicLossScale
from jdistadam.core.trees import OptState, Params
from jdistadam.distributed.checks import CONVERSION, check_options
from jdistadam.distributed.state import DistributedState
from jdistadam.distributed.transformation import DistributedTransformation
from jdistadam.errors import HyperparameterError, TreeError

_FLAX_COLLECTIONS = {"batch_stats", "cache", "intermediates", "perturbations"}


def check_created(params: Params, model_state: Any, rng: Any) -> None:
    """Raises TreeError or DtypeError unless these are a model's params, other arrays and key."""
    names = set(params) if isinstance(params, Mapping) else set()
    others = names & _FLAX_COLLECTIONS
    if "params" in names and others:
        raise TreeError(
            "params: all variables of a Flax model: the others would be trained as parameters: "
            f'got {", ".join(map(str, params))}, expected variables["params"]. '
            f"Pass these as params, and the rest, such as {sorted(others)[0]!r}, as model_state."
        )
    shapes = "Use TrainState.shapes(params, tx) for shapes."
    trees.refuse_shapes(params, name="params", action=shapes)
    trees.check_dtypes(params, name="params")
    trees.check_arrays(model_state, name="model_state")
    if rng is not None:
        trees.check_key("rng", rng)


def check_structure(
    opt_state: OptState, state: DistributedState, tx: DistributedTransformation
) -> None:
    """Raises TreeError unless ``opt_state``, with ``state`` in it, has the parts of its optimizer.

    These are the fields of a distributed state that its options need, and the parts of a chain.
    Raises HyperparameterError for a loss scale of another option.
    """
    check_options(tx.config, state)
    if isinstance(scale := getattr(state.scaling, "loss_scale", None), jax.Array | np.ndarray):
        _check_scale(scale, tx.config.loss_scale)
    check_parts(opt_state, tx)


def check_parts(opt_state: OptState, tx: DistributedTransformation) -> None:
    """Raises TreeError unless ``opt_state`` has the parts of its optimizer, as those of a chain."""
    specs = tx.state_specs()
    if _has_structure(specs, opt_state):
        return
    others = ""
    if type(specs) is type(opt_state) and hasattr(specs, "_fields"):
        pairs = zip(specs._fields, specs, opt_state, strict=True)
        names = [name for name, spec, part in pairs if not _has_structure(spec, part)]
        others = f" with another {', '.join(names)}"
    elif type(specs) is type(opt_state) and len(specs) != len(opt_state):
        others = f" of {len(opt_state)} parts instead of {len(specs)}"
    raise TreeError(
        f"opt_state: not the state of this optimizer: got {type(opt_state).__name__}{others}, "
        f"expected {type(specs).__name__}, of the structure that init returns. "
        "Pass the optimizer that made it, or make it with TrainState.create(params, tx) or "
        "from_optax_state."
    )


def _has_structure(specs: Any, tree: Any) -> bool:
    """Whether ``specs`` are a prefix of a tree."""
    try:
        jax.tree.broadcast(specs, tree)
    except ValueError:
        return False
    return True


def _check_scale(scale: Any, option: Any) -> None:
    """Raises HyperparameterError unless a scale can be one of the option ``loss_scale``."""
    if isinstance(scale, jax.core.Tracer):
        return
    got, is_dynamic = float(scale), isinstance(option, DynamicLossScale)
    least = float(np.float32(option.min_scale if is_dynamic else option))
    if got < least or (got > least and not is_dynamic):
        raise HyperparameterError(
            "opt_state.scaling.loss_scale: of another loss_scale than that of the optimizer: "
            f"got {got}, expected {least}{' or more' * is_dynamic}. Convert it: {CONVERSION}."
        )
