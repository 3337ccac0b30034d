"""Comparison with optax in units of the operands.

The unit in the last place of a *result* is meaningless if operands cancel, so each error is divided
by the ulp of the largest operand. Plain float32 arithmetic stays below the limits in any order of
contraction if both sides use the same coefficients: mu 4, nu 2, and twice the bound B derived below
for updates and parameters.
"""

import numpy as np

MU_ULP, NU_ULP, UPDATE_RATIO, PARAM_RATIO = 4, 2, 2, 2


def ulp(x):
    """Spacing of float32 at |x|, at least that of the smallest normal number."""
    return np.spacing(np.maximum(np.abs(x), np.finfo(np.float32).tiny).astype(np.float32)).astype(
        np.float64
    )


def assert_step_close(got, want, old, grad, hyper, count):
    """Compares one step of two implementations from the same state.

    Args:
      got: dict with params, mu, nu, float32 arrays.
      want: The same from the other implementation.
      old: The same before the step.
      grad: The gradient for both.
      hyper: dict with learning_rate, b1, b2, eps, eps_root, weight_decay, and perhaps nesterov.
      count: Steps taken before this one.
    """
    got, want, old = (
        {k: np.asarray(v, np.float64) for k, v in x.items()} for x in (got, want, old)
    )
    g = np.asarray(grad, np.float64)
    t, b1, b2 = count + 1, hyper["b1"], hyper["b2"]
    c1, c2 = 1 - b1**t, 1 - b2**t

    mu_operand = np.maximum(np.abs(b1 * old["mu"]), np.abs((1 - b1) * g))
    error = np.abs(got["mu"] - want["mu"]) / ulp(mu_operand)
    assert error.max(initial=0) <= MU_ULP, f"mu differs by {error.max()} ulp of its operands"

    normal = want["nu"] >= np.finfo(np.float32).tiny  # XLA flushes denormals, the kernels do not
    error = (np.abs(got["nu"] - want["nu"]) / ulp(want["nu"]))[normal]
    assert error.max(initial=0) <= NU_ULP, f"nu differs by {error.max()} ulp"

    # B: the maximum sum of the update's roundings, from the operands' sizes. m_hat is m / c1, or
    # with Nesterov the sum of two terms; an error of m reaches it divided like m itself, and each
    # term adds its own roundings.
    den = np.sqrt(want["nu"] / c2 + hyper["eps_root"]) + hyper["eps"]
    if hyper.get("nesterov"):
        c1_next = 1 - b1 ** (t + 1)
        terms = b1 * want["mu"] / c1_next, (1 - b1) * g / c1
        m_hat = terms[0] + terms[1]
        m_hat_error = 2 * ulp(mu_operand) * b1 / c1_next + 3 * ulp(np.maximum(*np.abs(terms)))
    else:
        m_hat = want["mu"] / c1
        m_hat_error = 2 * ulp(mu_operand) / c1
    decay = np.abs(hyper["weight_decay"] * old["params"])
    largest = np.maximum(np.abs(m_hat / den), decay)
    u = want["params"] - old["params"]
    bound = hyper["learning_rate"] * (4 * ulp(largest) + m_hat_error / den) + ulp(u)
    param_bound = bound + ulp(np.maximum(np.abs(old["params"]), np.abs(want["params"])))
    error = np.abs(got["params"] - want["params"]) / param_bound
    assert error.max(initial=0) <= PARAM_RATIO, f"params differ by {error.max()} times the bound"
    if "update" in got:
        error = np.abs(got["update"] - want["update"]) / bound
        assert error.max(initial=0) <= UPDATE_RATIO, (
            f"update differs by {error.max()} times the bound"
        )
