"""The traced derivative of a loss: the order of its gradients, and its evaluation."""

from __future__ import annotations

import collections
import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core, source_info_util
from jax.interpreters import partial_eval

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
    results = core.jaxpr_as_fun(traced)(*jax.tree.leaves(params))
    ranks = _ranks(traced.jaxpr)[len(shapes) - len(jax.tree.leaves(params)) :]
    order = tuple(sorted(range(len(ranks)), key=ranks.__getitem__))
    return jax.tree.unflatten(treedef, results), order


def _ranks(jaxpr: Any) -> list[tuple[int, ...]]:
    """For each result of a jaxpr, the equation that makes it, and those within nested ones."""
    found: dict[Any, tuple[int, ...]] = {}
    wanted = {v for v in jaxpr.outvars if not isinstance(v, core.Literal)}
    for i, eqn in enumerate(jaxpr.eqns):
        if wanted.isdisjoint(eqn.outvars):
            continue
        inner: list[tuple[int, ...]] = [()] * len(eqn.outvars)
        if eqn.primitive.name in ("jit", "remat2"):
            nested = eqn.params["jaxpr"]
            inner = _ranks(getattr(nested, "jaxpr", nested))
        found |= {v: (i, *rank) for v, rank in zip(eqn.outvars, inner, strict=True)}
    return [() if isinstance(v, core.Literal) else found.get(v, ()) for v in jaxpr.outvars]


def without_effects(function: Callable[..., Any], *args: Any) -> Any:
    """Returns ``function(*args)``, an array, and runs nothing that it does not depend on.

    Callbacks and prints that do not make it are left out, also those in loops.
    """
    traced = jax.make_jaxpr(function)(*args)
    jaxpr, is_used = partial_eval.dce_jaxpr(_results_alone(traced.jaxpr), [True])
    used = (x for x, is_ in zip(jax.tree.leaves(args), is_used, strict=True) if is_)
    return core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, traced.consts))(*used)[0]


def _results_alone(jaxpr: Any) -> Any:
    """A jaxpr, and those in it, without effects and what is made for them alone."""

    def nested(x: Any) -> Any:
        if isinstance(x, tuple | list):
            is_any = any(isinstance(y, core.ClosedJaxpr | core.Jaxpr) for y in x)
            return type(x)(map(nested, x)) if is_any else x
        if isinstance(x, core.ClosedJaxpr):
            return core.ClosedJaxpr(_results_alone(x.jaxpr), x.consts)
        return _results_alone(x) if isinstance(x, core.Jaxpr) else x

    needed, eqns = {v for v in jaxpr.outvars if not isinstance(v, core.Literal)}, list[Any]()
    for eqn in reversed(jaxpr.eqns):
        if needed.isdisjoint(eqn.outvars):
            continue
        params = {name: nested(x) for name, x in eqn.params.items()}
        eqns.append(eqn.replace(params=params, effects=core.no_effects))
        needed.update(v for v in eqn.invars if not isinstance(v, core.Literal))
    return jaxpr.replace(eqns=eqns[::-1], effects=core.no_effects)


def evaluate(
    traced: Any, args: Sequence[Any], otherwise: Callable[[Any, list[Any]], list[Any] | None]
) -> list[Any]:
    """Evaluates a jaxpr; equations for which ``otherwise`` returns results have these."""
    jaxpr = traced.jaxpr
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*traced.consts, *args], strict=True))
    for eqn in jaxpr.eqns:
        values = values_of(eqn.invars, known)
        names = source_info_util.current_name_stack() + eqn.source_info.name_stack
        with source_info_util.set_name_stack(names):  # of operations in place of the equation
            results = otherwise(eqn, values)
        if results is None:
            results = evaluate_one(jaxpr, eqn, values)
        known.update(zip(eqn.outvars, results, strict=True))
    return values_of(jaxpr.outvars, known)


def values_of(atoms: Iterable[Any], known: Mapping[Any, Any]) -> list[Any]:
    """The values of variables and literals of a jaxpr."""
    return [v.val if isinstance(v, core.Literal) else known[v] for v in atoms]


def evaluate_one(jaxpr: Any, eqn: Any, values: list[Any]) -> list[Any]:
    """Evaluates one equation like JAX, with its context and its name."""
    arguments = {
        v: x for v, x in zip(eqn.invars, values, strict=True) if not isinstance(v, core.Literal)
    }
    one = jaxpr.replace(constvars=[], invars=list(arguments), outvars=list(eqn.outvars), eqns=[eqn])
    return jax.core.eval_jaxpr(one, [], *arguments.values())


class ReadyQueue:
    """Equations that become ready when all variables that they wait for are known."""

    def __init__(self) -> None:
        self._waiting = collections.defaultdict[Any, list[int]](list)
        self._num_missing: dict[int, int] = {}
        self._ranks: dict[int, int] = {}
        self._ready: list[tuple[int, int]] = []

    def __bool__(self) -> bool:
        """Whether an equation is ready."""
        return bool(self._ready)

    def add(self, i: int, missing: Iterable[Any] = (), rank: int | None = None) -> None:
        """Adds an equation that waits for variables; of ready ones the lowest rank is first."""
        unknown = set(missing)
        self._ranks[i], self._num_missing[i] = i if rank is None else rank, len(unknown)
        for v in unknown:
            self._waiting[v].append(i)
        if not unknown:
            heapq.heappush(self._ready, (self._ranks[i], i))

    def found(self, v: Any) -> None:
        """A variable is known."""
        for i in self._waiting.pop(v, ()):
            self._num_missing[i] -= 1
            if not self._num_missing[i]:
                heapq.heappush(self._ready, (self._ranks[i], i))

    def pop(self) -> int:
        """Removes the first equation that is ready."""
        return heapq.heappop(self._ready)[1]
