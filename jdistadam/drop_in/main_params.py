"""Main parameters of 16-bit leaves in one program: what the state keeps, and their exact values."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdistadam.core import trees
from jdistadam.errors import DtypeError, TreeError
from jdistadam.kernels import reference


class MainParamsState(NamedTuple):
    """The state of an optimizer that keeps main parameters.

    Attributes:
      main_params: The params in float32: what the optimizer updates; or, with remainder16, the
        low 16 bits of them, uint16. ``optax.MaskedNode()`` in place of each leaf that is not in 16
        bits, for which the params themselves are updated.
      inner: The state that optax would have for float32 params.
    """

    main_params: Any
    inner: Any


MAIN_DTYPES = {"float32": jnp.float32, "remainder16": jnp.uint16}
"""Dtype of the leaves of ``MainParamsState.main_params``."""


def needs_main(param: Any) -> bool:
    """Whether a parameter of this dtype loses bits of what the optimizer computes."""
    return getattr(param, "dtype", None) in (jnp.bfloat16, jnp.float16)


def new_main_params(kind: str, params: Any) -> Any:
    """The main parameters of a new state: the values of the params."""

    def new(path: str, x: Any) -> Any:
        if not needs_main(x):
            return optax.MaskedNode()
        if kind == "remainder16" and x.dtype != jnp.bfloat16:
            raise DtypeError(
                path,
                "has no remainder",
                got=x.dtype,
                expected="bfloat16, the upper half of a float32",
                action="Use main_params_dtype=jnp.float32.",
            )
        if kind == "remainder16":
            return trees.placed_beside(x, jnp.zeros_like(x, jnp.uint16))
        return jnp.asarray(x, jnp.float32)

    leaves = map(new, trees.paths(params, "params"), jax.tree.leaves(params))
    return jax.tree.unflatten(jax.tree.structure(params), leaves)


def split_state(state: Any, keeps_main_params: bool) -> tuple[Any, Any]:
    """Returns main parameters, or None, and optax's own state."""
    if keeps_main_params != isinstance(state, MainParamsState):
        expected = "MainParamsState" if keeps_main_params else "optax's own state"
        raise TreeError(
            "opt_state",
            "does not fit main_params_dtype",
            got=type(state).__name__,
            expected=expected,
            action="Make it with init(params) of this optimizer.",
        )
    return (state.main_params, state.inner) if keeps_main_params else (None, state)


def main_leaves(treedef: Any, main_params: Any, params: Any, dtype: Any) -> list[Any]:
    """Returns the main parameter of each leaf, or None."""
    try:
        mains = treedef.flatten_up_to(main_params)
    except (ValueError, TypeError):
        raise TreeError(
            "opt_state.main_params",
            "tree structure differs from params",
            got=jax.tree.structure(main_params),
            expected=treedef,
            action="Make the state with init(params) of this optimizer.",
        ) from None
    names = trees.paths(params, "opt_state.main_params")
    for name, main, param in zip(names, mains, jax.tree.leaves(params), strict=True):
        got = (np.shape(main), getattr(main, "dtype", None))
        fits = got == (np.shape(param), dtype)
        if not fits and (needs_main(param) or not isinstance(main, optax.MaskedNode)):
            raise DtypeError(
                name,
                "does not fit its parameter",
                got=got if hasattr(main, "dtype") else type(main).__name__,
                expected=(np.shape(param), jnp.dtype(dtype).name),
                action="Make the state with init(params) of this optimizer.",
            )
    return [None if isinstance(main, optax.MaskedNode) else main for main in mains]


def main_params_of(params: Any, opt_state: Any) -> Any:
    """The exact parameters that ``fused_adamw`` or ``fused_adam`` updates; see ``main_params``."""
    is_ours = lambda x: isinstance(x, MainParamsState)  # noqa: E731
    found = [x for x in jax.tree.leaves(opt_state, is_leaf=is_ours) if is_ours(x)]
    if not found:
        return params
    treedef: Any = jax.tree.structure(params)
    kept = found[0].main_params
    splits = any(x.dtype == jnp.uint16 for x in jax.tree.leaves(kept))
    dtype = MAIN_DTYPES["remainder16" if splits else "float32"]
    mains = main_leaves(treedef, kept, params, dtype)

    def whole(param: Any, main: Any) -> Any:
        if main is None:
            return param
        return reference.join(param, main, jnp) if splits else main

    pairs = zip(jax.tree.leaves(params), mains, strict=True)
    return treedef.unflatten([whole(*pair) for pair in pairs])
