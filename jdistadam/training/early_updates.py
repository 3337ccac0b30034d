"""Kernel calls of a step run as soon as their gradients are known; inside ``jax.shard_map``.

[Note: early updates] A state in host memory moves during the backward pass only if kernel calls,
which wait for its windows, run during the backward pass. XLA orders a program by rules of its own:
it often runs all of them at the end, when nothing hides the transfer, and keeps all gradients until
then. So the step is traced, and evaluated in another order: each operation of the optimizer as soon
as its operands are known. A barrier makes the next matrix product, or the next block of
rematerialized layers, wait for the kernel call before it. On several devices it waits for an
earlier call, so that sums over devices overlap the backward pass too.
"""

from __future__ import annotations

import collections
import functools
import heapq
from collections.abc import Callable, Collection, Iterable
from typing import Any

import jax
from jax.extend import core

from jdistadam.training.traced_gradients import evaluate_one, values_of

_PRODUCTS = {"dot_general", "conv_general_dilated"}
_KERNELS = {"ffi_call"}


def with_early_updates(step: Callable[..., Any], lag: int) -> Callable[..., Any]:
    """Returns a function with the results of ``step``: [Note: early updates].

    Args:
      step: A training step of one device. Operations after its last product are the optimizer's.
      lag: The number of kernel calls that a product does not wait for.
    """

    def early(*args: Any) -> Any:
        traced, shapes = jax.make_jaxpr(step, return_shape=True)(*args)
        leaves, treedef = jax.tree.leaves(args), jax.tree.structure(shapes)
        if any(map(_is_nested, traced.jaxpr.eqns)):
            traced = jax.make_jaxpr(functools.partial(_inlined, traced))(*leaves)
        return jax.tree.unflatten(treedef, _evaluate(traced, leaves, lag))

    return early


def _evaluate(traced: Any, args: list[Any], lag: int) -> list[Any]:
    """Evaluates a jaxpr: up to its last product in order, the rest as soon as possible."""
    jaxpr = traced.jaxpr
    eqns, known = jaxpr.eqns, dict(zip(jaxpr.constvars, traced.consts, strict=True))
    is_product = [_contains(eqn, _PRODUCTS) for eqn in eqns]
    num_ordered = len(eqns) - is_product[::-1].index(True) if any(is_product) else 0
    users, num_missing = collections.defaultdict[Any, list[int]](list), [0] * len(eqns)
    for i in range(num_ordered, len(eqns)):
        for v in set(_variables(eqns[i].invars)) - known.keys():
            users[v].append(i)
            num_missing[i] += 1
    ready = [i for i in range(num_ordered, len(eqns)) if not num_missing[i]]

    def assign(variables: Any, values: Any) -> None:
        for v, x in zip(variables, values, strict=True):
            known[v] = x
            for i in users.pop(v, ()):
                num_missing[i] -= 1
                if not num_missing[i]:
                    heapq.heappush(ready, i)

    def evaluate(i: int) -> None:
        assign(eqns[i].outvars, evaluate_one(jaxpr, eqns[i], values_of(eqns[i].invars, known)))

    assign(jaxpr.invars, args)
    kept, calls, made = _kept_results(eqns), list[Any](), set[Any]()
    for i in range(num_ordered):
        if is_product[i] and len(calls) > lag:
            waiting = [v for v in dict.fromkeys(_variables(eqns[i].invars)) if v in made]
            values, calls = values_of(waiting, known), calls[len(calls) - lag - 1 :]
            tied, _ = jax.lax.optimization_barrier((values, calls.pop(0)))
            known.update(zip(waiting, tied, strict=True))
        evaluate(i)
        made.update(eqns[i].outvars)
        while ready:
            k = heapq.heappop(ready)
            evaluate(k)
            calls += values_of(kept.get(k, ()), known)
    while ready:
        evaluate(heapq.heappop(ready))
    return values_of(jaxpr.outvars, known)


def _is_nested(eqn: Any) -> bool:
    return eqn.primitive.name == "jit" and _contains(eqn, _PRODUCTS)


def _inlined(traced: Any, *args: Any) -> list[Any]:
    """Evaluates a jaxpr, and the operations of a nested ``jax.jit`` with products one by one."""
    jaxpr = traced.jaxpr
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*traced.consts, *args], strict=True))
    for eqn in jaxpr.eqns:
        values = values_of(eqn.invars, known)
        if _is_nested(eqn):
            results = _inlined(eqn.params["jaxpr"], *values)
        else:
            results = evaluate_one(jaxpr, eqn, values)
        known.update(zip(eqn.outvars, results, strict=True))
    return values_of(jaxpr.outvars, known)


def _kept_results(eqns: Any) -> dict[int, list[Any]]:
    """For each kernel call one result on the device that no other call overwrites, if any.

    A barrier that keeps an array which is overwritten in place would copy it.
    """
    found, overwritten = dict[int, list[Any]](), set[Any]()
    for i in reversed(range(len(eqns))):
        eqn = eqns[i]
        if eqn.primitive.name == "optimization_barrier":
            pairs = zip(eqn.invars, eqn.outvars, strict=True)
            overwritten.update(_variables(v for v, result in pairs if result in overwritten))
        elif _contains(eqn, _KERNELS):
            used = [v for v in eqn.outvars if not isinstance(v, core.DropVar)]
            on_device = [v for v in used if v.aval.memory_space != jax.memory.Space.Host]
            found[i] = [v for v in on_device if v not in overwritten][:1]
            overwritten.update(_variables(eqn.invars))
    return found


def _contains(eqn: Any, names: Collection[str]) -> bool:
    inner = core.jaxprs_in_params(eqn.params)
    return eqn.primitive.name in names or any(_contains(e, names) for j in inner for e in j.eqns)


def _variables(atoms: Iterable[Any]) -> list[Any]:
    return [v for v in atoms if not isinstance(v, core.Literal)]
