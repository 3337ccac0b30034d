"""The traced derivative of a loss: the order of its gradients, and its evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jdistadam.core import jaxprs
from jdistadam.core.trees import Params


def with_order(
    differentiate: Callable[[Params], tuple[Any, Params]], params: Params
) -> tuple[tuple[Any, Params], tuple[int, ...]]:
    """Returns ``differentiate(params)``, and the order in which its gradients are known.

    Args:
      differentiate: Returns something and gradients of the params.
      params: The params.

    Returns:
      Its results, and the indices of the leaves in that order.
    """
    traced, shapes = jax.make_jaxpr(differentiate, return_shape=True)(params)
    shapes, treedef = jax.tree.flatten(shapes)
    results = jaxprs.run(traced, *jax.tree.leaves(params))
    ranks = jaxprs.ranks_of(traced.jaxpr)[len(shapes) - len(jax.tree.leaves(params)) :]
    order = tuple(sorted(range(len(ranks)), key=ranks.__getitem__))
    return jax.tree.unflatten(treedef, results), order


def without_effects(function: Callable[..., Any], *args: Any) -> Any:
    """Returns ``function(*args)``, an array, and runs nothing that it does not depend on.

    Callbacks and prints that do not make it are left out, also those in loops.
    """
    traced, is_used = jaxprs.results_alone(jax.make_jaxpr(function)(*args))
    used = (x for x, is_ in zip(jax.tree.leaves(args), is_used, strict=True) if is_)
    return jaxprs.run(traced, *used)[0]
