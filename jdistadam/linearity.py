"""Whether a gradient transformation is linear in the gradients, found by tracing it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import ClosedJaxpr, Literal

# Calls whose inner program has the operands and results of the call, in order. Results of all
# other operations are taken to depend on every operand.
_CALLS = ("pjit", "jit", "closed_call", "remat", "checkpoint")


def why_not_linear(tx: optax.GradientTransformation, params: Any) -> str | None:
    r"""Returns why ``tx.update`` may not come before a sum over devices; None if it may.

    It may where :math:`T(\sum_r g_r) = \sum_r T(g_r)` and its state is the same on all devices.
    :math:`T` is linear where its derivative does not depend on the gradients. Nothing is computed:
    the derivative is traced and its inputs are followed.

    Args:
      tx: A gradient transformation.
      params: Tree of arrays or ``jax.ShapeDtypeStruct``.

    Example:
      >>> params = {"w": jnp.ones(3)}
      >>> why_not_linear(optax.scale(0.5), params)
      >>> why_not_linear(optax.clip_by_global_norm(1.0), params)
      'it is not linear in the gradients'
    """
    tx = optax.with_extra_args_support(tx)
    state = jax.eval_shape(tx.init, params)

    def derivative(params: Any, grads: Any, tangents: Any, state: Any) -> Any:
        def update(grads: Any) -> Any:
            return tx.update(grads, state, params)

        (updates, new_state), (d_updates, _) = jax.jvp(update, (grads,), (tangents,))
        return updates, new_state, d_updates

    jaxpr, shapes = jax.make_jaxpr(derivative, return_shape=True)(params, params, params, state)
    counts = [len(jax.tree.leaves(part)) for part in (params, params, params, state)]
    on_params, on_grads = (
        depends_on(jaxpr, [k == wanted for k, n in enumerate(counts) for _ in range(n)])
        for wanted in (0, 1)
    )
    ends = [len(jax.tree.leaves(part)) for part in shapes]
    new_state = slice(ends[0], ends[0] + ends[1])
    if any(on_grads[new_state.stop :]):
        return "it is not linear in the gradients"
    if any(on_grads[new_state]):
        return "its state depends on the gradients"
    if any(on_params[: ends[0]]):
        return "it adds something that depends on the params"
    return None


def depends_on(closed: ClosedJaxpr, sources: Sequence[bool]) -> list[bool]:
    """Returns, for each result of a traced function, whether it depends on a marked argument.

    Example:
      >>> depends_on(jax.make_jaxpr(lambda x, y: (x + 1, x * y))(1.0, 2.0), [False, True])
      [False, True]
    """
    jaxpr = closed.jaxpr
    marked = {var for var, source in zip(jaxpr.invars, sources, strict=True) if source}

    def is_marked(var: Any) -> bool:
        return not isinstance(var, Literal) and var in marked

    for eqn in jaxpr.eqns:
        inputs = [is_marked(var) for var in eqn.invars]
        inner = eqn.params.get("jaxpr")
        if eqn.primitive.name in _CALLS and isinstance(inner, ClosedJaxpr):
            outputs = depends_on(inner, inputs)
        else:
            outputs = [any(inputs)] * len(eqn.outvars)
        marked.update(var for var, out in zip(eqn.outvars, outputs, strict=True) if out)
    return [is_marked(var) for var in jaxpr.outvars]


def example_params() -> Any:
    """A small tree on which most transformations can be traced before any params are known."""
    return {
        "a": jax.ShapeDtypeStruct((2, 3), jnp.float32),
        "b": jax.ShapeDtypeStruct((2,), jnp.float32),
    }
