"""Raises where what a train state is made of is not what it would be taken for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jdistadam import trees
from jdistadam.errors import DtypeError, TreeError, describe

_FLAX_COLLECTIONS = {"batch_stats", "cache", "intermediates", "perturbations"}


def check_created(params: Any, rng: Any) -> None:
    """Raises TreeError or DtypeError unless these are the params and the key of one model."""
    names = set(params) if isinstance(params, Mapping) else set()
    others = names & _FLAX_COLLECTIONS
    if "params" in names and others:
        raise TreeError(
            describe(
                "params",
                "all variables of a Flax model: the others would be trained as parameters",
                got=", ".join(map(str, params)),
                expected='variables["params"]',
                action=f"Pass these, and {sorted(others)[0]!r} and the like as model_state.",
            )
        )
    for path, x in zip(trees.paths(params, "params"), jax.tree.leaves(params), strict=True):
        if isinstance(x, jax.ShapeDtypeStruct):
            raise TreeError(
                describe(
                    path,
                    "a shape, not an array",
                    got=x,
                    expected="a jax or numpy array",
                    action="Use TrainState.shapes(params, tx) for shapes.",
                )
            )
    trees.check_dtypes(params, name="params")
    dtype = getattr(rng, "dtype", None)
    is_key = dtype is not None and (
        jnp.issubdtype(dtype, jax.dtypes.prng_key) or (dtype == jnp.uint32 and rng.ndim == 1)
    )
    if rng is not None and not is_key:
        raise DtypeError(
            describe(
                "rng",
                "not a random key",
                got=repr(rng) if dtype is None else dtype,
                expected="one key, as jax.random.key(0) returns",
                action="Pass rng=jax.random.key(seed).",
            )
        )
