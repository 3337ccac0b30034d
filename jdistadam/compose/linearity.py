"""Whether a gradient transformation is linear in the gradients, found by tracing it.

Without this check, a chain that clips or normalizes would change each device's gradients before
they are summed, and would silently train a different model.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, Literal

from jdistadam.core.trees import Grads, OptState, Params

# Operations that are jointly linear in all of their floating operands.
_LINEAR = frozenset(
    "add add_any sub neg convert_element_type reshape broadcast_in_dim transpose squeeze"
    " slice dynamic_slice gather rev pad concatenate split select_n reduce_sum"
    " cumsum copy real imag complex conj reduce_precision optimization_barrier"
    " sharding_constraint".split()
)
# Operations that are linear in each single operand.
_BILINEAR = frozenset("mul dot_general conv_general_dilated".split())
# Those of them that work element by element.
_ELEMENTWISE = frozenset(
    "add add_any sub neg convert_element_type select_n copy real imag complex conj"
    " reduce_precision optimization_barrier sharding_constraint mul div".split()
)


class Kind(enum.Enum):
    """How a value in a traced function depends on the gradients."""

    ZERO = enum.auto()
    FREE = enum.auto()  # not at all
    LINEAR = enum.auto()
    MIXED = enum.auto()  # linear, and an element may depend on other elements
    OTHER = enum.auto()  # in another or an unknown way


def why_not_linear(tx: optax.GradientTransformation, params: Params) -> str | None:
    r"""Returns why ``tx.update`` may not come before a sum over devices; None if it may.

    It may if :math:`T(\sum_r g_r) = \sum_r T(g_r)` and its state is the same on all devices.
    Nothing is computed: the operations of the traced function are followed.

    Args:
      tx: A gradient transformation.
      params: Tree of arrays or ``jax.ShapeDtypeStruct``.

    Example:
      >>> params = {"w": jnp.ones(3)}
      >>> why_not_linear(optax.scale(0.5), params)
      >>> why_not_linear(optax.clip_by_global_norm(1.0), params)
      'it is not linear in the gradients'
    """
    updates, state = _kinds(tx, params, of_grads=Kind.LINEAR, of_params=Kind.FREE)
    if any(kind not in (Kind.ZERO, Kind.FREE) for kind in state):
        return "its state depends on the gradients"
    if any(kind in (Kind.FREE, Kind.OTHER) for kind in updates):
        return "it is not linear in the gradients"
    return None


def reads_params(tx: optax.GradientTransformation, params: Params) -> bool:
    """Returns whether values of params, beyond their shapes, reach the result of ``tx.update``."""
    updates, state = _kinds(tx, params, of_grads=Kind.FREE, of_params=Kind.OTHER)
    return Kind.OTHER in (*updates, *state)


def is_elementwise(tx: optax.GradientTransformation, params: Params) -> bool:
    """Returns whether each element of a linear ``tx.update(grads)`` depends only on its own grad.

    Example:
      >>> params = {"w": jnp.ones((3, 2))}
      >>> is_elementwise(optax.scale(0.5), params), is_elementwise(optax.centralize(), params)
      (True, False)
    """
    updates, _ = _kinds(tx, params, of_grads=Kind.LINEAR, of_params=Kind.FREE)
    return Kind.MIXED not in updates


def is_alike(tx: optax.GradientTransformation, params: Params, grads: Any) -> bool:
    """Returns whether ``tx.update`` treats gradients of other shapes like those of params.

    False if it depends on shapes or on positions in arrays, or cannot take these gradients.
    """
    try:
        found = [_operations(_traced(tx, params, like)[0].jaxpr) for like in (grads, params)]
    except (TypeError, ValueError):  # shapes do not fit
        return False
    return found[0] == found[1] and all(name != "iota" for name, *_ in found[0])


def _operations(jaxpr: Any) -> list[tuple[Any, ...]]:
    """Names and literals of a program's operations in order, and the shapes of its constants."""
    found: list[tuple[Any, ...]] = [("constant", x.aval.shape) for x in jaxpr.constvars]
    for eqn in jaxpr.eqns:
        literals = [repr(x.val) for x in eqn.invars if isinstance(x, Literal)]
        found.append((eqn.primitive.name, *literals))
        for inner in eqn.params.values():
            if isinstance(inner, ClosedJaxpr):
                found += _operations(inner.jaxpr)
    return found


def _traced(
    tx: optax.GradientTransformation, params: Params, grads: Any
) -> tuple[ClosedJaxpr, Any, Any]:
    """The program of ``tx.update`` for given gradients, and the shapes of updates and state."""
    tx = optax.with_extra_args_support(tx)
    state = jax.eval_shape(tx.init, params)

    def update(grads: Grads, state: OptState, params: Params) -> Any:
        return tx.update(grads, state, params)

    closed, (updates, _) = jax.make_jaxpr(update, return_shape=True)(grads, state, params)
    return closed, updates, state


def _kinds(
    tx: optax.GradientTransformation, params: Params, *, of_grads: Kind, of_params: Kind
) -> tuple[list[Kind], list[Kind]]:
    """The kinds of the results of ``tx.update``, from those of gradients and params."""
    jaxpr, updates, state = _traced(tx, params, params)
    like = [(params, of_grads), (state, Kind.FREE), (params, of_params)]
    kinds = follow(jaxpr, [kind for tree, kind in like for _ in jax.tree.leaves(tree)])
    num_updates = len(jax.tree.leaves(updates))
    return kinds[:num_updates], kinds[num_updates:]


def follow(closed: ClosedJaxpr, arguments: Sequence[Kind]) -> list[Kind]:
    """Returns the kind of each result of a traced function.

    Example:
      >>> jaxpr = jax.make_jaxpr(lambda g, x: (g * x, g + x, g * g))(1.0, 2.0)
      >>> [kind.name for kind in follow(jaxpr, [Kind.LINEAR, Kind.FREE])]
      ['LINEAR', 'OTHER', 'OTHER']
    """
    jaxpr = closed.jaxpr
    kinds = dict(zip(jaxpr.invars, arguments, strict=True))
    for var, value in zip(jaxpr.constvars, closed.consts, strict=True):
        kinds[var] = _kind_of_constant(value)

    def kind_of(var: Any) -> Kind:
        return _kind_of_constant(var.val) if isinstance(var, Literal) else kinds[var]

    for eqn in jaxpr.eqns:
        inputs = [kind_of(var) for var in eqn.invars]
        if eqn.primitive.name == "jit":  # it has the operands and results of its inner program
            outputs = follow(eqn.params["jaxpr"], inputs)
        else:
            linear = [Kind.LINEAR if kind is Kind.MIXED else kind for kind in inputs]
            kind = _kind_of_result(eqn, linear)
            if kind is Kind.LINEAR:
                moves = eqn.primitive.name not in _ELEMENTWISE
                kind = Kind.MIXED if moves or Kind.MIXED in inputs else kind
            outputs = [kind] * len(eqn.outvars)
        kinds.update(zip(eqn.outvars, outputs, strict=True))
    return [kind_of(var) for var in jaxpr.outvars]


def _kind_of_constant(value: Any) -> Kind:
    is_number = isinstance(value, np.ndarray | np.generic | float | int)
    return Kind.ZERO if is_number and not np.any(value) else Kind.FREE


def _kind_of_result(eqn: Any, inputs: Sequence[Kind]) -> Kind:
    is_float = [jnp.issubdtype(var.aval.dtype, jnp.inexact) for var in eqn.invars]
    floats = {kind for kind, inexact in zip(inputs, is_float, strict=True) if inexact}
    name = eqn.primitive.name
    if Kind.LINEAR not in inputs and Kind.OTHER not in inputs:
        keeps_zero = name in _LINEAR and floats == {Kind.ZERO}
        return Kind.ZERO if keeps_zero or (name in _BILINEAR and Kind.ZERO in inputs) else Kind.FREE
    indices = {kind for kind, inexact in zip(inputs, is_float, strict=True) if not inexact}
    results_inexact = all(jnp.issubdtype(var.aval.dtype, jnp.inexact) for var in eqn.outvars)
    if not results_inexact or indices - {Kind.ZERO, Kind.FREE} or Kind.OTHER in inputs:
        return Kind.OTHER
    if name in _LINEAR:
        return Kind.OTHER if Kind.FREE in floats else Kind.LINEAR
    if name in _BILINEAR:
        if Kind.ZERO in inputs:
            return Kind.ZERO
        return Kind.LINEAR if Kind.FREE in inputs else Kind.OTHER
    if name == "div" and inputs[1] == Kind.FREE:
        return Kind.LINEAR
    return Kind.OTHER


def example_params() -> Params:
    """A small tree with which most transformations can be traced before params are known."""
    shapes = {"a": (2, 3), "b": (2,)}
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
