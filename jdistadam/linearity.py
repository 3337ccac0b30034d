"""Whether a gradient transformation is linear in the gradients, found by tracing it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import ClosedJaxpr, Literal

# Calls whose inner program has the operands and results of the call, in order. Results of all
# other operations are taken to depend on every operand.
_CALLS = ("pjit", "jit", "closed_call", "remat", "checkpoint")
_STEPS = ("sign", "floor", "ceil", "round", "stop_gradient", "nextafter")


def why_not_linear(tx: optax.GradientTransformation, params: Any) -> str | None:
    r"""Returns why ``tx.update`` may not come before a sum over devices; None if it may.

    It may where :math:`T(\sum_r g_r) = \sum_r T(g_r)` and its state is the same on all devices.
    :math:`T` is linear where its derivative does not depend on the gradients, and nothing in it is
    piecewise constant. Nothing is computed: the derivative is traced and its inputs are followed.

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
    from_params, from_grads = (
        follow(jaxpr, [k == wanted for k, n in enumerate(counts) for _ in range(n)])
        for wanted in (0, 1)
    )
    num_updates, num_state = (len(jax.tree.leaves(part)) for part in shapes[:2])
    new_state = slice(num_updates, num_updates + num_state)
    if from_grads.decides or any(from_grads.results[new_state.stop :]):
        return "it is not linear in the gradients"
    if any(from_grads.results[new_state]):
        return "its state depends on the gradients"
    if any(from_params.results[:num_updates]):
        return "it adds something that depends on the params"
    return None


class Influence(NamedTuple):
    """What marked arguments of a traced function reach."""

    results: list[bool]  # for each result, whether it depends on them
    decides: bool  # whether they pass through a step: a comparison, a sign, a rounding


def follow(closed: ClosedJaxpr, sources: Sequence[bool]) -> Influence:
    """Follows marked arguments through a traced function.

    Example:
      >>> follow(jax.make_jaxpr(lambda x, y: (x + 1, x * y))(1.0, 2.0), [False, True])
      Influence(results=[False, True], decides=False)
    """
    jaxpr = closed.jaxpr
    marked = {var for var, source in zip(jaxpr.invars, sources, strict=True) if source}
    decides = False

    def is_marked(var: Any) -> bool:
        return not isinstance(var, Literal) and var in marked

    for eqn in jaxpr.eqns:
        inputs = [is_marked(var) for var in eqn.invars]
        inner = eqn.params.get("jaxpr")
        if eqn.primitive.name in _CALLS and isinstance(inner, ClosedJaxpr):
            outputs, inner_decides = follow(inner, inputs)
            decides |= inner_decides
        else:
            outputs = [any(inputs)] * len(eqn.outvars)
            decides |= any(inputs) and _is_step(eqn)
        marked.update(var for var, out in zip(eqn.outvars, outputs, strict=True) if out)
    return Influence([is_marked(var) for var in jaxpr.outvars], decides)


def _is_step(eqn: Any) -> bool:
    """Whether an operation is piecewise constant, so that its derivative hides what it does."""
    inexact = all(jnp.issubdtype(var.aval.dtype, jnp.inexact) for var in eqn.outvars)
    return eqn.primitive.name in _STEPS or not inexact


def example_params() -> Any:
    """A small tree on which most transformations can be traced before any params are known."""
    return {
        "a": jax.ShapeDtypeStruct((2, 3), jnp.float32),
        "b": jax.ShapeDtypeStruct((2,), jnp.float32),
    }
