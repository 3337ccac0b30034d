"""Leaves that the kernel does not know, complex and float64: optax's own arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdistadam.core.hyperparameters import Hyperparameters
from jdistadam.kernels.coefficients import at_count

DTYPES = tuple(jnp.dtype(name) for name in ("float64", "complex64", "complex128"))
"""Dtypes that are left to optax."""


class OptaxLeaf(NamedTuple):
    """One leaf of each tree, and whether decay applies to it."""

    grad: Any
    param: Any
    mu: Any
    nu: Any
    decays: bool


def step(
    mode: str, hyper: Hyperparameters, count: jax.Array, leaves: Sequence[OptaxLeaf]
) -> list[tuple[Any, Any, Any]]:
    """Returns (new parameter or update, mu, nu) of every leaf, as optax computes them."""
    grads, params, mu, nu, decays = (list(column) for column in zip(*leaves, strict=True))
    tx = optax.chain(
        optax.add_decayed_weights(hyper.l2, decays),
        optax.scale_by_adam(hyper.b1, hyper.b2, hyper.eps, hyper.eps_root, nesterov=hyper.nesterov),
        optax.add_decayed_weights(at_count(hyper.weight_decay, count), decays),
        optax.scale(-1 * at_count(hyper.learning_rate, count)),
    )
    empty = optax.EmptyState()
    count_of_adam = count
    if not hyper.bias_correction:
        # optax has no such switch; after so many steps 1 - b^t is 1, for b up to 1 - 1e-7
        count_of_adam = jnp.asarray(jnp.iinfo(jnp.int32).max - 1, jnp.int32)
    masked = optax.MaskedState(empty)
    state = (masked, optax.ScaleByAdamState(count_of_adam, mu, nu), masked, empty)
    updates, (_, adam, _, _) = tx.update(grads, state, params)
    out = updates if mode == "update" else optax.apply_updates(params, updates)
    # scale_by_adam was not told mu_dtype: the state says it
    new_mu = [new.astype(old.dtype) for new, old in zip(adam.mu, mu, strict=True)]
    return list(zip(out, new_mu, adam.nu, strict=True))
