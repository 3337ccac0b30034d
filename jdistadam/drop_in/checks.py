"""Checks before a step: trees, shapes and dtypes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jdistadam.core import trees
from jdistadam.core.codecs import is_codes
from jdistadam.core.storage import Storage
from jdistadam.core.types import Grads, OptState, Params
from jdistadam.drop_in import optax_fallback
from jdistadam.drop_in.low_precision import check_coded
from jdistadam.errors import DtypeError, TreeError

_FLOATS = (*trees.STORAGE_DTYPES, *optax_fallback.DTYPES)


def check_trees(
    grads: Grads,
    adam_state: optax.ScaleByAdamState,
    params: Params,
    *,
    state_name: str,
    storage: Storage,
) -> None:
    """Raises unless gradients and moments match the params in structure, shape and dtype."""
    mu_name, nu_name = (f"{state_name}[0].{part}" for part in ("mu", "nu"))
    if params is not None:
        trees.check_dtypes(params, name="params", allowed=(*_FLOATS, *optax_fallback.INTEGERS))
    like = grads if params is None else params
    mu, nu = (_as_arrays(x) for x in (adam_state.mu, adam_state.nu))
    for name, tree in (("grads", grads), (mu_name, mu), (nu_name, nu)):
        trees.check_same_shapes(tree, like, name=name, like_name="params")
    check_coded(storage, like, adam_state.mu, name=mu_name, codec=storage.codec_of("mu"))
    check_coded(storage, like, adam_state.nu, name=nu_name, codec=storage.nu)
    # optax's nu has the params' dtypes: without params, nu shows which are integers
    beside = nu if params is None else params
    _check_dtypes(grads, beside, name="grads", action="Cast the gradients.")
    for path, grad, param in zip(
        trees.paths(grads, "grads"), jax.tree.leaves(grads), jax.tree.leaves(like), strict=True
    ):
        if jnp.iscomplexobj(grad) and not jnp.iscomplexobj(param):
            raise DtypeError(
                f"{path}: complex, but its parameter is not, so the imaginary part would be lost: "
                f"got {grad.dtype}, expected a real dtype, like that of the parameter, "
                f"{param.dtype}. Take jnp.real, or make the loss real."
            )
    _check_dtypes(mu, beside, name=mu_name, action="Cast mu.")
    _check_dtypes(nu, beside, name=nu_name, action="Cast nu.")
    takes = optax_fallback.takes
    nu_of_kernel = jax.tree.map(lambda x: None if takes(x.dtype) else x, nu)
    nu_dtype = storage.float_dtype("nu")
    action = f"Cast nu to {nu_dtype}, or set nu_dtype."
    trees.check_dtypes(nu_of_kernel, name=nu_name, allowed=(nu_dtype,), action=action)


def _as_arrays(moments: Any) -> Any:
    """Moments with float32 arrays in place of codes."""

    def meant(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, jnp.float32) if is_codes(x) else x

    return jax.tree.map(meant, moments, is_leaf=is_codes)


def _check_dtypes(tree: Any, beside: Any, *, name: str, action: str) -> None:
    """Raises DtypeError for unsupported dtypes, and for integers that pair with a float."""

    def of(integers: bool) -> Any:
        """The leaves that pair with integers, or the others."""
        is_one = optax_fallback.is_integer
        return jax.tree.map(lambda x, y: x if is_one(y) == integers else None, tree, beside)

    trees.check_dtypes(of(False), name=name, allowed=_FLOATS, action=action)
    both = (*_FLOATS, *optax_fallback.INTEGERS)
    trees.check_dtypes(of(True), name=name, allowed=both, action=action)


def adam_state_of(state: OptState, name: str) -> optax.ScaleByAdamState:
    """Returns the first part of optax's state, or raises TreeError."""
    if not (isinstance(state, tuple) and state and isinstance(state[0], optax.ScaleByAdamState)):
        raise TreeError(
            f"{name}: not a state of this optimizer: got {type(state).__name__}, expected the "
            "state that init(params) returned. Pass opt_state as init, update or step returned it."
        )
    return state[0]
