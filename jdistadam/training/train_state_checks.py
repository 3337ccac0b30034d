"""Raises where what a train state is made of is not what it would be taken for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jdistadam.core import trees
from jdistadam.core.types import Params
from jdistadam.errors import TreeError

_FLAX_COLLECTIONS = {"batch_stats", "cache", "intermediates", "perturbations"}


def check_created(params: Params, model_state: Any, rng: Any) -> None:
    """Raises TreeError or DtypeError unless these are params, other arrays and a key of a model."""
    names = set(params) if isinstance(params, Mapping) else set()
    others = names & _FLAX_COLLECTIONS
    if "params" in names and others:
        raise TreeError(
            "params",
            "all variables of a Flax model: the others would be trained as parameters",
            got=", ".join(map(str, params)),
            expected='variables["params"]',
            action=f"Pass these, and {sorted(others)[0]!r} and the like as model_state.",
        )
    shapes = "Use TrainState.shapes(params, tx) for shapes."
    trees.refuse_shapes(params, name="params", action=shapes)
    trees.check_dtypes(params, name="params")
    trees.check_arrays(model_state, name="model_state")
    if rng is not None:
        trees.check_key("rng", rng)
