"""Updates leaves that the kernel does not support (complex, float64, integers) as optax does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdistadam.core.hyperparameters import Hyperparameters, at_count

DTYPES = tuple(jnp.dtype(name) for name in ("float64", "complex64", "complex128"))
"""Dtypes that are left to optax wherever they occur."""

INTEGERS = tuple(jnp.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64))
"""Parameter dtypes that are left to optax with their gradients and moments."""


def is_integer(x: Any) -> bool:
    """Whether an array has one of the dtypes in ``INTEGERS``."""
    return x.dtype in INTEGERS


def takes(dtype: jnp.dtype) -> bool:
    """Whether optax steps a leaf whose parameter, gradient or moments have this dtype."""
    return dtype in DTYPES or dtype in INTEGERS


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
    """Returns optax's (new parameter or update, mu, nu) of every leaf."""
    grads, params, mu, nu, decays = (list(column) for column in zip(*leaves, strict=True))
    rate = hyper.learning_rate
    tx = optax.chain(
        optax.add_decayed_weights(hyper.l2, decays),
        optax.scale_by_adam(hyper.b1, hyper.b2, hyper.eps, hyper.eps_root, nesterov=hyper.nesterov),
        _with_decay(at_count(hyper.weight_decay, count), decays, hyper.cautious_weight_decay),
        optax.scale_by_learning_rate(rate),
    )
    empty = optax.EmptyState()
    count_of_adam = count
    if not hyper.bias_correction:
        # optax has no such switch; after this many steps 1 - b^t is 1, for b up to 1 - 1e-7
        count_of_adam = jnp.asarray(jnp.iinfo(jnp.int32).max - 1, jnp.int32)
    masked = optax.MaskedState(empty)
    of_rate = optax.ScaleByScheduleState(count) if callable(rate) else empty
    state = (masked, optax.ScaleByAdamState(count_of_adam, mu, nu), masked, of_rate)
    updates, (_, adam, _, _) = tx.update(grads, state, params)
    out = updates if mode == "update" else _apply(params, updates)
    # scale_by_adam was not given mu_dtype: the state has it. Only in a new state is the mu of
    # integers an integer: optax adds fractions to it, and so do the following steps.
    new_mu = [
        new.astype(new.dtype if is_integer(old) else old.dtype)
        for new, old in zip(adam.mu, mu, strict=True)
    ]
    return list(zip(out, new_mu, adam.nu, strict=True))


def _with_decay(
    weight_decay: Any, decays: Sequence[bool], is_cautious: bool
) -> optax.GradientTransformation:
    """``optax.add_decayed_weights``; if cautious, only for updates with the parameter's sign."""
    if not is_cautious:
        return optax.add_decayed_weights(weight_decay, decays)

    def add(u: Any, p: Any) -> Any:
        points_apart = jnp.real(u * jnp.conj(p)) < 0
        return jnp.where(points_apart, u, u + weight_decay * p)

    decay = optax.stateless(lambda updates, params: jax.tree.map(add, updates, params))
    return optax.masked(decay, decays)


def _apply(params: Sequence[Any], updates: Sequence[Any]) -> Any:
    """``optax.apply_updates``, which truncates p + u if p is an integer.

    The compiler would compute p - rate * x with one rounding instead of two. If p + u is near an
    integer, the truncated result would differ from that of ``update`` followed by
    ``apply_updates``. So the compiler must not see both together. (XLA of jax 0.10 does on CPU.)
    """
    separate = [
        jax.lax.optimization_barrier(u) if is_integer(p) else u
        for p, u in zip(params, updates, strict=True)
    ]
    return optax.apply_updates(params, separate)
