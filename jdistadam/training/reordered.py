"""A traced step, evaluated by the events of an order."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jdistadam.core import jaxprs
from jdistadam.kernels import copies, parts
from jdistadam.kernels.adam import UPDATES
from jdistadam.kernels.multi_tensor import NORMS
from jdistadam.training.order import Event, Node, Run, Start, Wait, end_of_model, lines_of

ANCHORS = jaxprs.PRODUCTS | UPDATES | {parts.SUM, parts.STEP}
"""The operations that copies overlap."""


@dataclasses.dataclass(frozen=True)
class Ordered:
    """The order of a step, or of a step of a loop in it.

    Attributes:
      nodes: Its operations.
      events: What happens, in order.
      bodies: The orders of loops, by the index of their node.
    """

    nodes: list[Node]
    events: list[Event]
    bodies: dict[int, Ordered] = dataclasses.field(default_factory=dict)

    @property
    def lines(self) -> list[str]:
        """It as text: a line for each copy, wait, product and update."""
        return lines_of(self.nodes, self.events, {i: x.lines for i, x in self.bodies.items()})


def unseen(ordered: Ordered) -> None:
    """What is called with an order that nobody asks for."""
    del ordered


def nodes_of(traced: Any) -> list[Node]:
    """Returns the operations of a traced step."""
    eqns = traced.jaxpr.eqns
    nodes = list(map(_node_of, eqns))
    last = end_of_model(nodes) - 1
    # Waits take a signal; XLA would transpose a result that is used transposed.
    return [
        dataclasses.replace(node, signals=()) if i != last and jaxprs.transposes(eqns[i]) else node
        for i, node in enumerate(nodes)
    ]


def _node_of(eqn: Any) -> Node:
    makes = jaxprs.kept(eqn.outvars)
    is_start, needs = jaxprs.name_of(eqn) == copies.START, tuple(jaxprs.variables(eqn.invars))
    is_update = jaxprs.contains(eqn, UPDATES | {parts.STEP})
    arrays = [v for v in eqn.outvars if isinstance(getattr(v.aval, "dtype", None), np.dtype)]
    return Node(
        needs=needs,
        makes=tuple(makes),
        name=_name_of(eqn),
        is_product=jaxprs.contains(eqn, jaxprs.PRODUCTS),
        is_update=is_update,
        is_sum=jaxprs.contains(eqn, {parts.SUM}),
        is_start=is_start,
        is_wait=jaxprs.name_of(eqn) == copies.WAIT,
        is_gather=copies.is_start(eqn, gathers=True) or jaxprs.contains(eqn, jaxprs.GATHERS),
        is_norm=jaxprs.contains(eqn, NORMS),
        has_effects=jaxprs.has_effects(eqn),
        is_ordered=jaxprs.has_ordered_effects(eqn),
        num_bytes=jaxprs.num_bytes(eqn.outvars[0]) if is_start else 0,
        travels_with=copies.kind_of(eqn) if is_start else None,
        signals=tuple(sorted(arrays, key=_size)),  # larger ones may be updated in place
        passed_on=jaxprs.passed_on(eqn),
    )


def _size(v: Any) -> int:
    size: int = v.aval.size
    return size


def _name_of(eqn: Any) -> str:
    """What an operation is, of which part of the model, and its first result."""
    name = jaxprs.name_of(eqn)
    words = [] if name in (copies.START, copies.WAIT) else [_WORDS.get(name, name)]
    words += jaxprs.scope_of(eqn)
    return " ".join([*words, eqn.outvars[0].aval.str_short() if eqn.outvars else ""])


_WORDS = {"dot_general": "product", "conv_general_dilated": "convolution", parts.SUM: "sum"}
_WORDS |= dict.fromkeys([*UPDATES, parts.STEP], "update")


def evaluate(traced: Any, args: Sequence[Any], ordered: Ordered) -> list[Any]:
    """Evaluates a traced step by the events of its order, with barriers that keep it.

    Args:
      traced: The jaxpr.
      args: Its arguments.
      ordered: Its order.
    """
    jaxpr, eqns = traced.jaxpr, traced.jaxpr.eqns
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*traced.consts, *args], strict=True))
    for event in ordered.events:
        if isinstance(event, Run):
            eqn = eqns[event.node]
            values = jaxprs.values_of(eqn.invars, known)
            variables, results = eqn.outvars, jaxprs.evaluate_one(jaxpr, eqn, values)
        elif isinstance(event, Start):
            some = [eqns[i] for i in event.nodes]
            values = jaxprs.values_of([eqn.invars[0] for eqn in some], known)
            variables = [eqn.outvars[0] for eqn in some]
            results = copies.start_together(some, values)
        elif isinstance(event, Wait):  # one call takes all, so all are kept until then
            some = [eqns[i] for i in event.starts]
            variables = [eqns[i].outvars[0] for i in event.waits]
            results = copies.wait_together(
                some,
                [v.aval for v in variables],
                jaxprs.values_of([eqn.outvars[0] for eqn in some], known),
                jaxprs.values_of([eqn.invars[0] for eqn in some], known),
                [] if event.after is None else [known[event.after]],
            )
        else:
            variables = event.values
            results = jax.lax.optimization_barrier(jaxprs.values_of(variables, known))
        known.update(zip(variables, results, strict=True))
    return jaxprs.values_of(jaxpr.outvars, known)
