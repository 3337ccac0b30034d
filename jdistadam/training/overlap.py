"""Copies between devices run beside the rest of a step; inside ``jax.shard_map``.

[Note: overlap]
kernels/copies.py makes a copy as a start and, immediately after it, a wait. XLA orders custom calls
as it likes, often both at the end of a program. So the step is traced, and evaluated in another
order, which barriers and operands enforce:

- A start runs as soon as its operands are known: gradients are sent during the backward pass, and
  new parameters during the updates. The next product, or update, waits for the start.
- A wait runs where its result is first needed, with what is made of it and of arguments alone. It
  waits for the product, or update, before, and for starts before it.
- Gathers before the loss start first, in the order in which their results are needed.
- Copies travel together until they are ``TOGETHER_BYTES``; those of an update's parameters start
  right after it.

What travels together is therefore what the traced loss uses one after another: tied parameters at
their first use in the forward pass, their gradients at the last in the backward pass.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.extend import core

from jdistadam.kernels import copies, parts
from jdistadam.kernels.adam import UPDATES
from jdistadam.training.early_updates import PRODUCTS, contains, inlined, variables
from jdistadam.training.traced_gradients import evaluate_one, values_of


def with_overlap(step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function with the results of ``step``: [Note: overlap]."""

    def overlapped(*args: Any) -> Any:
        traced, shapes = jax.make_jaxpr(step, return_shape=True)(*args)
        leaves, treedef = jax.tree.leaves(args), jax.tree.structure(shapes)
        names = _ANCHORS | {copies.START}
        traced = jax.make_jaxpr(functools.partial(inlined, traced, names=names))(*leaves)
        return jax.tree.unflatten(treedef, _Evaluation(traced, leaves).results())

    return overlapped


_ANCHORS = PRODUCTS | UPDATES | {parts.SUM, parts.STEP}

TOGETHER_BYTES = 128 << 20
"""Copies start together, in the order in which they could start, until they are as many bytes."""


class _Evaluation:
    """Evaluates a jaxpr in another order.

    An *anchor* is a product or an update: what copies overlap.
    """

    def __init__(self, traced: Any, args: list[Any]) -> None:
        self._jaxpr, self._eqns = traced.jaxpr, traced.jaxpr.eqns
        self._known = dict(zip(self._jaxpr.constvars, traced.consts, strict=True))
        self._known |= zip(self._jaxpr.invars, args, strict=True)
        self._is_start = [x.params.get("target_name") == copies.START for x in self._eqns]
        self._is_wait = [x.params.get("target_name") == copies.WAIT for x in self._eqns]
        self._is_anchor = [contains(x, _ANCHORS) for x in self._eqns]
        self._made_by = {v: i for i, eqn in enumerate(self._eqns) for v in eqn.outvars}
        self._is_lazy = self._lazy()
        self._is_hoisted = self._hoisted()
        self._rank = self._ranks()
        self._done = [False] * len(self._eqns)
        self._users: dict[Any, list[int]] = {}
        self._num_missing: dict[int, int] = {}
        self._ready: list[tuple[int, int]] = []
        self._together: list[int] = []  # starts that travel together, when there are enough
        self._pending: list[Any] = []  # targets of starts for which no anchor waits yet
        self._last: Any = None  # a result of the last anchor

    def results(self) -> list[Any]:
        """Evaluates it."""
        for i, is_hoisted in enumerate(self._is_hoisted):
            if is_hoisted:
                missing = set(variables(self._eqns[i].invars)) - self._known.keys()
                self._num_missing[i] = len(missing)
                for v in missing:
                    self._users.setdefault(v, []).append(i)
                if not missing:
                    self._is_ready(i)
        self._run_ready()
        for i in range(len(self._eqns)):
            if not (self._is_lazy[i] or self._is_hoisted[i]):
                self._run(i)
                self._run_ready()
        for i in range(self._end, len(self._eqns)):  # in the order of sums and updates
            if self._is_anchor[i] or self._eqns[i].effects:
                self._run(i)
                self._run_ready()
        self._start_together()
        if self._last is not None:  # for which the last waits wait: they wait for all starts, too
            self._tie([self._last, *self._pending])
        self._demand(self._jaxpr.outvars)
        return values_of(self._jaxpr.outvars, self._known)

    def _lazy(self) -> list[bool]:
        """Waits, what is made of their results and of arguments alone, and all after the model."""
        products = [i for i, eqn in enumerate(self._eqns) if contains(eqn, PRODUCTS)]
        self._end = products[-1] + 1 if products else 0
        lazy, arguments = set[Any](), {*self._jaxpr.invars, *self._jaxpr.constvars}
        found = []
        for i, eqn in enumerate(self._eqns):
            used = set(variables(eqn.invars))
            is_lazy = self._is_wait[i] or (
                not (self._is_anchor[i] or self._is_start[i])
                and (i >= self._end or (bool(used & lazy) and used <= lazy | arguments))
                and not (i < self._end and eqn.effects)
            )
            lazy |= set(eqn.outvars) if is_lazy else set()
            found.append(is_lazy)
        return found

    def _hoisted(self) -> list[bool]:
        """Starts, and what they need that is made of arguments alone, or after the last product."""
        simple = {*self._jaxpr.invars, *self._jaxpr.constvars}
        for i, eqn in enumerate(self._eqns):
            if not self._is_anchor[i] and simple.issuperset(variables(eqn.invars)):
                simple.update(eqn.outvars)
        found = list(self._is_start)
        for i in reversed(range(len(self._eqns))):
            if not found[i]:
                continue
            for v in variables(self._eqns[i].invars):
                k = self._made_by.get(v, -1)
                is_early = k >= self._end or v in simple
                if k >= 0 and is_early and not (self._is_wait[k] or self._is_anchor[k]):
                    found[k], self._is_lazy[k] = True, False
        return found

    def _ranks(self) -> dict[int, int]:
        """The order of starts whose operands are known from the beginning: as results are needed.

        By equation: of starts, and of what they need.
        """
        order, seen = dict[int, int](), set[int]()

        def visit(atoms: Any) -> None:
            for v in variables(atoms):
                i = self._made_by.get(v, -1)
                if i < 0 or i in seen or not (self._is_lazy[i] or self._is_hoisted[i]):
                    continue
                seen.add(i)
                visit(self._eqns[i].invars)
                order[i] = len(order) - len(self._eqns)

        for i, eqn in enumerate(self._eqns):
            if not (self._is_lazy[i] or self._is_hoisted[i]):
                visit(eqn.invars)
        return order

    def _is_ready(self, i: int) -> None:
        heapq.heappush(self._ready, (self._rank.get(i, i), i))

    def _run_ready(self) -> None:
        while self._ready:
            self._run(heapq.heappop(self._ready)[1])

    def _demand(self, atoms: Iterable[Any]) -> None:
        """Evaluates what some variables need."""
        for v in variables(atoms):
            if v not in self._known:
                self._run(self._made_by[v])
            if v not in self._known:
                self._start_together()

    def _run(self, i: int) -> None:
        """Evaluates an equation, after those that it needs."""
        if self._done[i]:
            return
        self._done[i] = True
        eqn = self._eqns[i]
        self._demand(eqn.invars)
        if self._is_anchor[i] and (i >= self._end or self._gathers()):
            self._start_together()
        if self._is_anchor[i] and self._pending:
            made = [v for v in variables(eqn.invars) if v in self._made_by][:1]
            self._tie([*made, *self._pending])
            self._pending = []
        if self._is_start[i]:
            self._add(i)
            return
        if self._is_wait[i]:  # which takes the target: nothing may use it any more
            self._tie(self._pending)
            self._pending = [v for v in self._pending if v is not eqn.invars[0]]
        values = values_of(eqn.invars, self._known)
        if self._is_wait[i] and self._last is not None:
            results = copies.wait_after(eqn, values, self._known[self._last])
        else:
            results = evaluate_one(self._jaxpr, eqn, values)
        self._assign(eqn.outvars, results)
        if self._is_anchor[i]:
            # Larger results may be updated in place.
            self._last = min(eqn.outvars, key=lambda v: v.aval.size)

    def _add(self, i: int) -> None:
        """Lets a start travel with those before it, unless they are many bytes already."""
        first = self._together[:1]
        if first and copies.kind_of(self._eqns[first[0]]) != copies.kind_of(self._eqns[i]):
            self._start_together()
        self._together.append(i)
        avals = [self._eqns[k].outvars[0].aval for k in self._together]
        if sum(x.size * x.dtype.itemsize for x in avals) >= TOGETHER_BYTES:
            self._start_together()

    def _gathers(self) -> bool:
        """Whether gathers are collected: all that can start have."""
        return any(copies.kind_of(self._eqns[i])[0] for i in self._together[:1])

    def _start_together(self) -> None:
        if not self._together:
            return
        eqns = [self._eqns[i] for i in self._together]
        self._together = []
        sources = [eqn.invars[0] for eqn in eqns]
        if self._pending:  # starts keep their order
            self._tie([sources[0], self._pending[-1]])
        targets = copies.start_together(eqns, values_of(sources, self._known))
        variables_ = [eqn.outvars[0] for eqn in eqns]
        self._assign(variables_, targets)
        self._pending += variables_

    def _assign(self, made: Iterable[Any], values: Iterable[Any]) -> None:
        for v, x in zip(made, values, strict=True):
            self._known[v] = x
            for k in self._users.pop(v, ()):
                self._num_missing[k] -= 1
                if not self._num_missing[k]:
                    self._is_ready(k)

    def _tie(self, tied: list[Any]) -> None:
        """Lets all later users of some variables wait for all of them."""
        tied = list(dict.fromkeys(v for v in tied if not isinstance(v, core.Literal)))
        if len(tied) < 2:
            return
        values = jax.lax.optimization_barrier(values_of(tied, self._known))
        self._known.update(zip(tied, values, strict=True))
