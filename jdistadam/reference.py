"""The oracle: the Adam formula once more, in Python, one operation at a time.

With numpy it is what the compiled kernels must equal to the last bit. With jax.numpy the same
lines are the fallback where no compiled kernel exists; there XLA may contract operations, so it is
close but not bitwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np


class AdamResult(NamedTuple):
    """What one step writes for one leaf."""

    params: Any
    mu: Any
    nu: Any
    out: Any  # the update or the cast parameter; None in mode "step"


def adam_update(
    c: Mapping[str, Any], g: Any, p: Any, m: Any, v: Any, *, nesterov: bool, xp: Any
) -> Any:
    """Returns (update, m, v) in float32: cuda/adam_math.h, operation by operation."""
    g = xp.where(c["l2"] != 0, g + c["l2"] * p, g)
    m = c["one_minus_b1"] * g + c["b1"] * m
    v = c["one_minus_b2"] * (g * g) + c["b2"] * v
    if nesterov:
        m_hat = c["b1"] * (m / c["c1_next"]) + c["one_minus_b1"] * (g / c["c1"])
    else:
        m_hat = m / c["c1"]
    u = m_hat / (xp.sqrt(v / c["c2"] + c["eps_root"]) + c["eps"])
    u = xp.where(c["weight_decay"] != 0, u + c["weight_decay"] * p, u)
    return c["learning_rate"] * u, m, v


def store(x: Any, dtype: Any, xp: Any) -> Any:
    """Rounds float32 once to ``dtype``, ties to even; every NaN becomes the positive quiet NaN."""
    return xp.where(xp.isnan(x), xp.asarray(np.nan, xp.float32), x).astype(dtype)


def adam_leaf(
    mode: str,
    c: Mapping[str, Any],
    inv_scale: Any,
    found_inf: Any,
    grad: Any,
    param: Any,
    mu: Any,
    nu: Any,
    *,
    nesterov: bool = False,
    out_dtype: Any = None,
    xp: Any = np,
) -> AdamResult:
    """One Adam step of one leaf.

    Args:
      mode: "step", "step_and_cast" or "update", as in kernel.py.
      c: The coefficients by name, float32 scalars.
      inv_scale: Multiplies the gradient, float32.
      found_inf: Whether to skip the step.
      grad: Gradient, float32, bfloat16 or float16.
      param: Parameter, of the gradient's shape, likewise.
      mu: First moment, likewise.
      nu: Second moment, likewise.
      nesterov: Whether to use Nesterov momentum.
      out_dtype: Dtype of ``out``.
      xp: numpy, or jax.numpy.

    Returns:
      The new values, each in the dtype of the old one.
    """
    f32 = xp.float32
    with np.errstate(all="ignore"):
        p = param.astype(f32)
        g = grad.astype(f32) * inv_scale
        u, m, v = adam_update(c, g, p, mu.astype(f32), nu.astype(f32), nesterov=nesterov, xp=xp)
        new = {
            "step": (store(p - u, param.dtype, xp), None),
            "step_and_cast": (store(p - u, param.dtype, xp), p - u),
            "update": (param, -u),
        }[mode]
        idle_out = p if mode == "step_and_cast" else xp.zeros_like(p)
        out = (
            None if new[1] is None else store(xp.where(found_inf, idle_out, new[1]), out_dtype, xp)
        )
        return AdamResult(
            xp.where(found_inf, param, new[0]),
            xp.where(found_inf, mu, store(m, mu.dtype, xp)),
            xp.where(found_inf, nu, store(v, nu.dtype, xp)),
            out,
        )


def adam_leaf_jax(*args: Any, **kwargs: Any) -> AdamResult:
    """Like adam_leaf, traced with jax.numpy."""
    return adam_leaf(*args, **kwargs, xp=jnp)
