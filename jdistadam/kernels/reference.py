"""The reference implementation: the Adam formula in Python, one operation at a time.

With numpy it is what the compiled kernels must equal to the last bit. With jax.numpy the same
lines are the fallback where no compiled kernel exists; there XLA may contract operations, so it is
close but not bitwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jdistadam.core.codecs import join_halves, split_halves
from jdistadam.core.dtypes import store


class AdamResult(NamedTuple):
    """What one step writes for one leaf."""

    params: Any
    mu: Any
    nu: Any
    out: Any  # the update, the cast parameter or the remainder; None in mode "step"


def adam_update(
    c: Mapping[str, Any],
    *,
    g: Any,
    p: Any,
    m: Any,
    v: Any,
    flags: frozenset[str],
    every_term: bool,
    xp: Any,
) -> Any:
    """Returns (update, m, v) in float32: cuda/adam_math.h, operation by operation.

    A term whose coefficient is zero is left out, so that an infinite parameter does not become a
    NaN. With ``every_term`` none is: the derivative by a coefficient that is zero is not zero.
    """

    def with_term(name: str, x: Any, where: Any = True) -> Any:
        is_there = every_term | (c[name] != 0)
        return xp.where(is_there & where, x + c[name] * p, x)

    g = with_term("l2", g)
    m = c["one_minus_b1"] * g + c["b1"] * m
    v = c["one_minus_b2"] * (g * g) + c["b2"] * v
    if "nesterov" in flags:
        m_hat = c["b1"] * (m / c["c1_next"]) + c["one_minus_b1"] * (g / c["c1"])
    else:
        m_hat = m / c["c1"]
    u = m_hat / (xp.sqrt(v / c["c2"] + c["eps_root"]) + c["eps"])
    is_cautious = "cautious_weight_decay" in flags
    u = with_term("weight_decay", u, where=~(u * p < 0) if is_cautious else True)
    return c["learning_rate"] * u, m, v


def pairwise_sum(terms: Any, xp: Any) -> Any:
    """Adds along the first dimension: adjacent terms, then adjacent sums, an odd one carried."""
    while len(terms) > 1:
        with np.errstate(all="ignore"):
            pairs = terms[0 : len(terms) - 1 : 2] + terms[1::2]
        terms = xp.concatenate([pairs, terms[len(terms) // 2 * 2 :]])
    return terms[0]


NORM_LANES = 1024
NORM_TILE = 8 * NORM_LANES
"""The lanes of cuda/norm.h, and the elements of a tile."""


def sum_of_squares(grads: Any, inv_scale: Any) -> tuple[Any, Any]:
    """The global norm's square, and whether a gradient is non-finite; numpy, as cuda/norm.h."""
    with np.errstate(all="ignore"):
        scaled = [np.ravel(g).astype(np.float32) * inv_scale for g in grads]
        tiles = [
            _sum_lanes(np.square(g[i : i + NORM_TILE]))
            for g in scaled
            for i in range(0, g.size, NORM_TILE)
        ]
        total = store(_sum_lanes(np.asarray(tiles, np.float32)), np.float32, np)
    return total, np.bool_(any(not np.isfinite(g).all() for g in scaled))


def _sum_lanes(terms: Any) -> Any:
    """Each lane adds its terms one after the other; then the lanes are halved."""
    rows = np.zeros((-(-terms.size // NORM_LANES), NORM_LANES), np.float32)
    rows.ravel()[: terms.size] = terms
    lanes = np.zeros(NORM_LANES, np.float32)
    for row in rows:
        lanes = lanes + row
    while lanes.size > 1:
        lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
    return lanes[0]


def adam_leaf(
    mode: str,
    c: Mapping[str, Any],
    inv_scale: Any,
    found_inf: Any,
    grad: Any,
    param: Any,
    mu: Any,
    nu: Any,
    remainder: Any = None,
    *,
    flags: frozenset[str] = frozenset(),
    out_dtype: Any = None,
    every_term: bool = False,
    xp: Any = np,
) -> AdamResult:
    """One Adam step of one leaf.

    Args:
      mode: "step", "step_and_cast", "update" or "step_split", as in adam.py.
      c: The coefficients by name, float32 scalars.
      inv_scale: Multiplies the gradient, float32.
      found_inf: Whether to skip the step.
      grad: Gradient, float32, bfloat16 or float16.
      param: Parameter, of the gradient's shape, likewise.
      mu: First moment, likewise.
      nu: Second moment, likewise.
      remainder: The other half of the parameter, uint16, in mode "step_split".
      flags: The flags of the formula that are on.
      out_dtype: Dtype of ``out``.
      every_term: As in ``adam_update``.
      xp: numpy, or jax.numpy.

    Returns:
      The new values, each in the dtype of the old one.
    """
    f32 = xp.float32
    with np.errstate(all="ignore"):
        is_split = mode == "step_split"
        p = join_halves(param, remainder, xp) if is_split else param.astype(f32)
        g = grad.astype(f32) * inv_scale
        m, v = mu.astype(f32), nu.astype(f32)
        u, m, v = adam_update(c, g=g, p=p, m=m, v=v, flags=flags, every_term=every_term, xp=xp)
        if is_split:
            new_param, out = split_halves(p - u, param.dtype, xp)
            out_if_skipped = remainder
        elif mode == "update":
            new_param, out, out_if_skipped = param, store(-u, out_dtype, xp), xp.zeros_like(p)
        else:
            new_param, out, out_if_skipped = store(p - u, param.dtype, xp), None, None
            if mode == "step_and_cast":
                out, out_if_skipped = (store(x, out_dtype, xp) for x in (p - u, p))

        def unless_skipped(new: Any, old: Any) -> Any:
            return xp.where(found_inf, old.astype(new.dtype), new)

        return AdamResult(
            unless_skipped(new_param, param),
            unless_skipped(store(m, mu.dtype, xp), mu),
            unless_skipped(store(v, nu.dtype, xp), nu),
            None if out is None else unless_skipped(out, out_if_skipped),
        )
