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
import itertools
from collections.abc import Callable, Collection, Iterable
from typing import Any

import jax
import numpy as np
from jax.extend import core

from jdistadam.kernels.adam import UPDATES
from jdistadam.kernels.multi_tensor import NORMS
from jdistadam.training.traced_gradients import ReadyQueue, evaluate, evaluate_one, values_of

PRODUCTS = {"dot_general", "conv_general_dilated"}
_GATHERS = {"all_gather", "all_gather_invariant"}


def with_early_updates(step: Callable[..., Any], *, lag: float) -> Callable[..., Any]:
    """Returns a function with the results of ``step``: [Note: early updates].

    Args:
      step: A training step of one device. Its first results replace its first arguments, leaf by
        leaf. Operations after its last product are the optimizer's; if a transformation before it
        has products, little is early.
      lag: The number of kernel calls that make new parameters for which a product does not wait.
    """

    def early(*args: Any) -> Any:
        traced, shapes = jax.make_jaxpr(step, return_shape=True)(*args)
        leaves, treedef = jax.tree.leaves(args), jax.tree.structure(shapes)
        if any(_is_nested(eqn, PRODUCTS) for eqn in traced.jaxpr.eqns):
            traced = jax.make_jaxpr(functools.partial(inlined, traced, names=PRODUCTS))(*leaves)
        return jax.tree.unflatten(treedef, _evaluate(traced, leaves, lag))

    return early


def _evaluate(traced: Any, args: list[Any], lag: float) -> list[Any]:
    """Evaluates a jaxpr: up to its last product in order, the rest as soon as possible."""
    jaxpr = traced.jaxpr
    eqns, known = jaxpr.eqns, dict(zip(jaxpr.constvars, traced.consts, strict=True))
    is_product = [contains(eqn, PRODUCTS) for eqn in eqns]
    num_ordered = len(eqns) - is_product[::-1].index(True) if any(is_product) else 0
    after = _last_uses(jaxpr, num_ordered)
    ready = ReadyQueue()
    for i in range(num_ordered, len(eqns)):
        ready.add(i, {*variables(eqns[i].invars), *after.get(i, ())} - known.keys())

    def assign(variables: Any, values: Any) -> None:
        for v, x in zip(variables, values, strict=True):
            known[v] = x
            ready.found(v)

    def tie(variables: Iterable[Any]) -> None:
        """Lets all later users of some variables wait for all of them."""
        tied = list(dict.fromkeys(variables))
        known.update(zip(tied, jax.lax.optimization_barrier(values_of(tied, known)), strict=True))

    def evaluate(i: int) -> None:
        if i in after:  # its first operand are coefficients, which wait for no other call
            tie([variables(eqns[i].invars)[0], *after[i]])
        assign(eqns[i].outvars, evaluate_one(jaxpr, eqns[i], values_of(eqns[i].invars, known)))

    assign(jaxpr.invars, args)
    is_late = [i >= num_ordered and contains(eqn, _GATHERS) for i, eqn in enumerate(eqns)]
    gathered = [v for i, eqn in enumerate(eqns) if is_late[i] for v in eqn.invars]
    norms = [v for eqn in eqns[num_ordered:] if contains(eqn, NORMS) for v in eqn.outvars]
    outputs, made, late = set(variables(jaxpr.outvars + gathered + norms)), set[Any](), list[int]()
    # Results before the first kernel call and after each, for which no product waited.
    calls: list[list[Any]] = [[]]
    for i in range(num_ordered):
        waits_for = calls[: int(max(0, len(calls) - lag))]
        if is_product[i] and any(waits_for):
            operands = [v for v in variables(eqns[i].invars) if v in made]
            tie(itertools.chain(operands, *waits_for))
            calls = calls[len(waits_for) :] or [[]]
        evaluate(i)
        made.update(eqns[i].outvars)
        while ready:
            k = ready.pop()
            if is_late[k]:
                late.append(k)
                continue
            evaluate(k)
            if k in after:
                calls.append([])
            calls[-1] += [v for v in eqns[k].outvars if v in outputs]
    for k in late:
        ready.add(k)
    while ready:
        evaluate(ready.pop())
    return values_of(jaxpr.outvars, known)


def _is_nested(eqn: Any, names: Collection[str]) -> bool:
    """Whether it is a nested function, or rematerializes, and has operations of these names."""
    return eqn.primitive.name in ("jit", "remat2", "custom_vjp_call") and contains(eqn, names)


def inlined(traced: Any, *args: Any, names: Collection[str]) -> list[Any]:
    """Evaluates a jaxpr, and the operations of nested equations one by one."""

    def opened(eqn: Any, values: list[Any]) -> list[Any] | None:
        if not _is_nested(eqn, names):
            return None
        if eqn.primitive.name == "remat2":
            inner = core.ClosedJaxpr(eqn.params["jaxpr"], ())
            return inlined(inner, *_not_shared(eqn, values), names=names)
        inner = eqn.params["call_jaxpr" if eqn.primitive.name == "custom_vjp_call" else "jaxpr"]
        return inlined(inner, *values, names=names)

    return evaluate(traced, args, opened)


def _not_shared(eqn: Any, values: list[Any]) -> list[Any]:
    """The operands of rematerialized operations, behind the barrier that JAX puts before them."""
    is_kept = np.broadcast_to(eqn.params["prevent_cse"], len(values))
    if not (eqn.params["differentiated"] and is_kept.any()):
        return values
    kept = jax.lax.optimization_barrier([x for x, is_ in zip(values, is_kept, strict=True) if is_])
    rest = iter(kept)
    return [next(rest) if is_ else x for x, is_ in zip(values, is_kept, strict=True)]


def _last_uses(jaxpr: Any, num_ordered: int) -> dict[int, list[Any]]:
    """For kernel calls that make a new argument: results of the last operations with the old one.

    Only operations up to the last product count. A value made of one argument alone is that
    argument: a barrier returns its operands themselves, and XLA computes a transpose at its use.
    """
    eqns, last_use, made_by = jaxpr.eqns, dict[Any, Any](), dict[Any, int]()
    argument_of = {v: v for v in jaxpr.invars}
    for i, eqn in enumerate(eqns):
        made_by |= dict.fromkeys(eqn.outvars, i)
        used = [v for v in eqn.outvars if not isinstance(v, core.DropVar)]
        if i >= num_ordered or not used:
            continue
        operands = [None if isinstance(v, core.Literal) else v for v in eqn.invars]
        arguments = [argument_of.get(v) for v in operands]
        sources = {x for v, x in zip(operands, arguments, strict=True) if v}
        if eqn.primitive.name == "optimization_barrier":
            argument_of |= {v: x for v, x in zip(eqn.outvars, arguments, strict=True) if x}
        elif len(sources) == 1 and None not in sources and not contains(eqn, PRODUCTS):
            argument_of |= dict.fromkeys(used, sources.pop())
        else:
            last_use |= {x: used[0] for x in arguments if x}
    found: dict[int, list[Any]] = {}
    for old, new in zip(jaxpr.invars, jaxpr.outvars, strict=False):
        stack, seen = variables([new]) if old in last_use else [], set[int]()
        while stack:
            i = made_by.get(stack.pop(), -1)
            if i < num_ordered or i in seen:
                continue
            seen.add(i)
            if contains(eqns[i], UPDATES):
                found.setdefault(i, []).append(last_use[old])
            else:
                stack += variables(eqns[i].invars)
    return found


def contains(eqn: Any, names: Collection[str]) -> bool:
    """Whether an equation, or one inside of it, has one of these names; a call has its target's."""
    inner = core.jaxprs_in_params(eqn.params)
    name = eqn.params.get("target_name", eqn.primitive.name)
    return name in names or any(contains(e, names) for j in inner for e in j.eqns)


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Returns those of some atoms that are no literals."""
    return [v for v in atoms if not isinstance(v, core.Literal)]


def has_effects(eqn: Any) -> bool:
    """Whether an equation does more than make results; to know an axis of a mesh is no effect."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)
