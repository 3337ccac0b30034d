"""The state of a drop-in before its first step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jdistadam.core import trees
from jdistadam.core.algorithm import Algorithm
from jdistadam.core.main_params import has_main_param
from jdistadam.core.types import OptState, Params
from jdistadam.drop_in import low_precision, optax_fallback
from jdistadam.drop_in.main_params import MainParamsState, new_main_params


def new_state(algorithm: Algorithm, params: Params) -> OptState:
    """The state before the first step; with main parameters, optax's state is that for them."""
    storage, main_kind = algorithm.storage, algorithm.main_params

    def optax_state(updated: Any) -> OptState:
        state = algorithm.like_optax.init(updated)
        state = _beside(params, _with_nu(state, storage.float_dtype("nu")))
        if storage.is_random:
            stored = map(jnp.result_type, jax.tree.leaves((updated, state[0].mu, state[0].nu)))
            storage.check_rounded([x for x in stored if jnp.issubdtype(x, jnp.floating)])
        return low_precision.new_state(storage, params, updated, state)

    if not main_kind.is_stored:
        return low_precision.with_key(storage, optax_state(params))

    def widened(x: Any) -> Any:
        return jnp.asarray(x, jnp.float32) if has_main_param(main_kind, x) else x

    inner = optax_state(jax.tree.map(widened, params))
    return low_precision.with_key(
        storage, MainParamsState(new_main_params(main_kind, params), inner)
    )


def _beside(params: Any, state: Any) -> Any:
    """Places the moments of a state that is made inside a program where its params are."""
    adam = state[0]._replace(
        mu=jax.tree.map(trees.placed_beside, params, state[0].mu),
        nu=jax.tree.map(trees.placed_beside, params, state[0].nu),
    )
    return (adam, *state[1:])


def _with_nu(state: Any, nu_dtype: Any) -> Any:
    """Gives optax's state a second moment in ``nu_dtype``, but for leaves that optax steps."""

    def zeros(x: Any) -> Any:
        return x if optax_fallback.takes(x.dtype) else jnp.zeros_like(x, dtype=nu_dtype)

    return (state[0]._replace(nu=jax.tree.map(zeros, state[0].nu)), *state[1:])
