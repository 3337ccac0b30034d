"""Kernel calls of a step run as soon as their gradients are known; inside ``jax.shard_map``.

[Note: early updates] A state in host memory moves during the backward pass only if kernel calls,
which wait for its windows, run during the backward pass. XLA often runs all of them at the end,
when nothing hides the transfer, and keeps all gradients until then. The step is therefore traced,
and evaluated in another order: each operation of the optimizer as soon as its operands are known.
Barriers enforce this order. A matrix product waits for the new parameters of all kernel calls but
the last few, so that sums over devices have time to overlap the products. It also waits for the
norms of their gradients, which can then be freed. Parameters are gathered at the end, where XLA
merges the gathers.

A kernel call that makes new parameters waits for the last product with the old ones. Otherwise XLA
would copy the old ones, because it writes new parameters over them.

XLA removes unused values from a barrier, so all later operations use the results of a barrier.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from jdistadam.core import jaxprs
from jdistadam.training import order
from jdistadam.training.reordered import Ordered, evaluate, nodes_of, unseen


def with_early_updates(
    step: Callable[..., Any],
    *,
    lag: float,
    seen: Callable[[Ordered], None] = unseen,
) -> Callable[..., Any]:
    """Returns a function with the results of ``step``: [Note: early updates].

    Args:
      step: A training step of one device. Its first results replace its first arguments, leaf by
        leaf. Operations after its last product are the optimizer's; if a transformation before it
        has products, little is early.
      lag: The number of kernel calls that make new parameters for which a product does not wait.
      seen: Called with the order, when the step is traced.
    """

    def early(*args: Any) -> Any:
        traced, shapes = jax.make_jaxpr(step, return_shape=True)(*args)
        leaves: list[Any] = jax.tree.leaves(args)
        if any(jaxprs.is_nested(eqn, jaxprs.PRODUCTS) for eqn in traced.jaxpr.eqns):
            inlined = functools.partial(jaxprs.inlined, traced, names=jaxprs.PRODUCTS)
            traced = jax.make_jaxpr(inlined)(*leaves)
        jaxpr, nodes = traced.jaxpr, nodes_of(traced)
        events = order.early(nodes, jaxpr.invars, jaxprs.results_of(jaxpr), lag)
        ordered = Ordered(nodes, events)
        seen(ordered)
        return jax.tree.unflatten(jax.tree.structure(shapes), evaluate(traced, leaves, ordered))

    return early
