"""Copies between devices run beside the rest of a step; inside ``jax.shard_map``.

[Note: overlap]
kernels/copies.py makes a copy as a start and, immediately after it, a wait. XLA orders custom calls
as it likes, often both at the end of a program. The step is therefore traced, and evaluated in
another order, which barriers and operands enforce:

- A start runs as soon as its operands are known: gradients are sent during the backward pass, and
  new parameters during the updates. The next product, or update, waits for the start.
- A wait runs where its result is first needed, with what is made of it and of arguments alone. It
  waits for the product, or update, before, and for starts before it.
- Gathers of what is known from the beginning start in the order in which their results are needed:
  all at first, or, if memory is to be saved, no more than ``AHEAD_BYTES`` at a time.
- If memory is to be saved, gradients are added when the exchange after theirs has started. If not,
  they are added after the backward pass, in which every wait would be for the slowest device.
- The steps of a loop that copies have this order, too: [Note: pipelined scan].
- Copies are sent together until they are ``TOGETHER_BYTES``; gathers start before the next product
  or update in any case. One wait is for all that are sent together, and XLA must keep it. Otherwise
  a result that nobody uses would lose its memory while other devices write it.

What is sent together is therefore what the traced loss uses one after another: tied parameters at
their first use in the forward pass, their gradients at the last in the backward pass.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

from jdistadam.core import trees
from jdistadam.kernels import copies, parts
from jdistadam.kernels.adam import UPDATES
from jdistadam.training.early_updates import PRODUCTS, contains, has_effects, inlined, variables
from jdistadam.training.pipelined_scan import carried, pipelined
from jdistadam.training.traced_gradients import ReadyQueue, evaluate, evaluate_one, values_of

_ANCHORS = PRODUCTS | UPDATES | {parts.SUM, parts.STEP}

TOGETHER_BYTES = 128 << 20
"""Copies start together, in the order in which they could start, until they are as many bytes."""

AHEAD_BYTES = 2 * TOGETHER_BYTES
"""With little memory, no more gathers start while as many bytes are on their way."""


class _Options(NamedTuple):
    """The options of ``with_overlap``."""

    saves_memory: bool
    unrolls: bool


def with_overlap(
    step: Callable[..., Any], *, saves_memory: bool = False, unrolls: bool = False
) -> Callable[..., Any]:
    """Returns a function with the results of ``step``: [Note: overlap].

    Args:
      step: The program of one device.
      saves_memory: Whether gathered parameters and whole gradients are to exist for a short time.
      unrolls: Whether loops that copy are unrolled, by at least two. XLA for CPUs must not, as it
        orders the starts of two steps differently on each device.
    """
    options = _Options(saves_memory, unrolls)

    def overlapped(*args: Any) -> Any:
        kinds = list[Any]()

        def in_words(*args: Any) -> Any:
            results = step(*args)
            kinds.extend(map(_kind_of_key, jax.tree.leaves(results)))
            return jax.tree.map(_words, results)

        traced, shapes = jax.make_jaxpr(in_words, return_shape=True)(*args)
        count = len(traced.consts)  # what the loss closes over
        given = [*traced.consts, *jax.tree.leaves(args)]
        kinds_given = list(map(_kind_of_key, given))

        def program(words: tuple[Any, ...]) -> tuple[Any, list[Any]]:
            values = list(map(_from_words, words, kinds_given))
            return core.ClosedJaxpr(traced.jaxpr, values[:count]), values[count:]

        def as_traced(*words: Any) -> list[Any]:
            program_of_values, values = program(words)
            return core.jaxpr_as_fun(program_of_values)(*values)

        run = _with_rules_of(as_traced, lambda *words: _in_another_order(*program(words), options))
        results = map(_from_words, run(*map(_words, given)), kinds)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return overlapped


# Keys enter and leave a function with rules of its own as their words: `jax_debug_key_reuse` takes
# keys for used that pass through one.


def _kind_of_key(x: Any) -> Any:
    """The implementation of a random key; None for other arrays."""
    return jax.random.key_impl(x) if trees.is_key(x) else None


def _words(x: Any) -> Any:
    return jax.random.key_data(x) if trees.is_key(x) else x


def _from_words(x: Any, kind: Any) -> Any:
    return x if kind is None else jax.random.wrap_key_data(x, impl=kind)


def _with_rules_of(step: Callable[..., list[Any]], ordered: Callable[..., list[Any]]) -> Any:
    """``ordered``, with the derivatives and batches of ``step``, an equal function.

    In ``ordered`` copies of parameters wait for products, which may have tangents; copies have no
    rules for them.
    """

    @jax.custom_batching.custom_vmap
    def batched(*args: Any) -> list[Any]:
        return ordered(*args)

    @batched.def_vmap
    def _(axis_size: int, is_batched: list[bool], *args: Any) -> tuple[list[Any], list[bool]]:
        axes = tuple(0 if x else None for x in is_batched)
        results = jax.vmap(step, axes, axis_size=axis_size)(*args)
        return results, [True] * len(results)

    differentiable = jax.custom_jvp(batched)

    def jvp(primals: Any, tangents: Any) -> Any:
        is_zero = [isinstance(t, jax.custom_derivatives.SymbolicZero) for t in tangents]
        moved = [i for i, is_ in enumerate(is_zero) if not is_]

        def of_moved(*values: Any) -> list[Any]:
            known = dict(zip(moved, values, strict=True))
            return step(*(known.get(i, x) for i, x in enumerate(primals)))

        return jax.jvp(of_moved, [primals[i] for i in moved], [tangents[i] for i in moved])

    differentiable.defjvp(jvp, symbolic_zeros=True)
    return differentiable


def _in_another_order(
    traced: Any, args: list[Any], options: _Options, carry: slice = slice(0)
) -> list[Any]:
    """Evaluates a jaxpr: [Note: overlap].

    ``carry``: the arguments that are results of the step before, in a loop.
    """
    opened = _with_narrow_loops(_opened(traced))
    with_loops = functools.partial(evaluate, opened, otherwise=_pipelined)
    traced = jax.make_jaxpr(lambda *args: with_loops(args))(*args)
    return _Evaluation(traced, args, options, carry).results()


def _opened(traced: Any) -> Any:
    """A jaxpr with the operations of nested functions, and barriers that keep no copies."""
    names = _ANCHORS | {copies.START}
    opened = jax.make_jaxpr(functools.partial(inlined, traced, names=names))(*traced.in_avals)
    return _with_parted_barriers(opened)


def _pipelined(eqn: Any, args: list[Any]) -> list[Any] | None:
    """The results of a scan whose steps copy; None if it stays."""
    if not _is_copying_loop(eqn):
        return None
    return pipelined(eqn, _opened(eqn.params["jaxpr"]), args)


def _is_copying_loop(eqn: Any) -> bool:
    return eqn.primitive.name == "scan" and contains(eqn, {copies.START})


def _with_narrow_loops(traced: Any) -> Any:
    """A jaxpr whose loops that copy take what is not widened, and widen it in every step.

    [Note: widened shards] are then those of one layer.
    """
    narrow, eqns = dict[Any, Any](), list[Any]()
    for eqn in traced.jaxpr.eqns:
        if eqn.primitive is jax.lax.convert_element_type_p and variables(eqn.invars):
            (source,), (result,) = eqn.invars, eqn.outvars
            if source.aval.dtype.itemsize < result.aval.dtype.itemsize:
                narrow[result] = source
        eqns.append(_widening(eqn, narrow) if _is_copying_loop(eqn) else eqn)
    return core.ClosedJaxpr(traced.jaxpr.replace(eqns=eqns), traced.consts)


def _widening(loop: Any, narrow: dict[Any, Any]) -> Any:
    """A scan that takes ``narrow`` operands, but for its carry, and widens them itself."""
    step, given = loop.params["jaxpr"], list(loop.invars)
    carry, avals = range(*carried(loop, step)), list(step.in_avals)
    for i, v in enumerate(given):
        if i not in carry and not isinstance(v, core.Literal) and v in narrow:
            given[i] = narrow[v]
            avals[i] = avals[i].update(dtype=given[i].aval.dtype)

    def widened(*args: Any) -> list[Any]:
        pairs = zip(args, step.in_avals, strict=True)
        same = (x if x.dtype == aval.dtype else x.astype(aval.dtype) for x, aval in pairs)
        return core.jaxpr_as_fun(step)(*same)

    return loop.replace(
        invars=given, params=loop.params | {"jaxpr": jax.make_jaxpr(widened)(*avals)}
    )


def _with_parted_barriers(traced: Any) -> Any:
    """A jaxpr whose barriers do not keep gathers, and sums over devices, at their place.

    Before layers that are computed again, JAX puts a barrier around all that they need, also what a
    gather sends; within it, XLA would keep widened shards: [Note: widened shards]. [Note: one block
    at a time] has one around sums of gradients.
    """
    eqns = traced.jaxpr.eqns
    given, sums = {*traced.jaxpr.constvars, *traced.jaxpr.invars}, set[Any]()
    sources = {x.invars[0] for x in eqns if copies.is_start(x, gathers=True)}  # native.unfused
    for eqn in eqns:
        for old, new in _from_to(eqn):
            given.update([new] if given.issuperset(old) else ())
            sums.update([new] if old and old <= sums | given and old & sums else ())
        sums.update(eqn.outvars if contains(eqn, {parts.SUM}) else ())
    sent, found, same = set[Any](), list[Any](), dict[Any, Any]()
    for eqn in reversed(eqns):
        pairs = _from_to(eqn)
        sent.update(v for old, new in pairs if new in (sent | sources) & given for v in old)
        if eqn.primitive.name != "optimization_barrier":
            found.append(eqn)
            continue
        kinds: dict[bool, list[int]] = {}
        for i, (_, new) in enumerate(pairs):
            if new in sent & given:
                same[new] = eqn.invars[i]
            else:
                kinds.setdefault(new in sums, []).append(i)
        for part in kinds.values():
            of_part = ([x[i] for i in part] for x in (eqn.invars, eqn.outvars))
            found.append(eqn.replace(**dict(zip(("invars", "outvars"), of_part, strict=True))))
    return _renamed(core.ClosedJaxpr(traced.jaxpr.replace(eqns=found[::-1]), traced.consts), same)


def _renamed(traced: Any, same: dict[Any, Any]) -> Any:
    """A jaxpr in which some variables, or literals, stand for others."""

    def known(atoms: Iterable[Any]) -> list[Any]:
        found = list(atoms)
        for i, v in enumerate(found):
            while not isinstance(v, core.Literal) and v in same:
                v = found[i] = same[v]
        return found

    jaxpr = traced.jaxpr
    eqns = [eqn.replace(invars=known(eqn.invars)) for eqn in jaxpr.eqns]
    return core.ClosedJaxpr(jaxpr.replace(eqns=eqns, outvars=known(jaxpr.outvars)), traced.consts)


def _from_to(eqn: Any) -> list[tuple[set[Any], Any]]:
    """For each result of an equation, what it is made of; none for those of anchors and waits."""
    if eqn.primitive.name == "optimization_barrier":
        each = [set(variables([v])) for v in eqn.invars]
        return list(zip(each, eqn.outvars, strict=True))
    if contains(eqn, _ANCHORS | {copies.WAIT}):
        return []
    return [(set(variables(eqn.invars)), v) for v in eqn.outvars]


class _Evaluation:
    """Evaluates a jaxpr in another order.

    An *anchor* is a product or an update: what copies overlap.
    """

    def __init__(self, traced: Any, args: list[Any], options: _Options, carry: slice) -> None:
        self._options = options
        self._jaxpr, self._eqns = traced.jaxpr, traced.jaxpr.eqns
        self._known = dict(zip(self._jaxpr.constvars, traced.consts, strict=True))
        self._known |= zip(self._jaxpr.invars, args, strict=True)
        self._made_by = {v: i for i, eqn in enumerate(self._eqns) for v in eqn.outvars}
        targets = [x.params.get("target_name") for x in self._eqns]
        live, self._used = self._live()  # XLA could not leave out a start that travels with others
        self._is_start = [x == copies.START and i in live for i, x in enumerate(targets)]
        self._is_wait = [x == copies.WAIT for x in targets]
        self._wait_of = {
            eqn.invars[0]: i for i, eqn in enumerate(self._eqns) if self._is_wait[i] and i in live
        }
        self._is_anchor = [contains(x, _ANCHORS) for x in self._eqns]
        products = [i for i, eqn in enumerate(self._eqns) if contains(eqn, PRODUCTS)]
        self._end = products[-1] + 1 if products else 0
        self._simple = self._made_of_arguments()
        self._is_ahead = [
            x
            and copies.is_start(eqn, gathers=True)
            and self._simple.issuperset(variables(eqn.invars))
            for x, eqn in zip(self._is_start, self._eqns, strict=True)
        ]
        self._is_lazy = self._lazy()
        self._is_hoisted = self._hoisted()
        self._rank = self._ranks()
        self._exchanges_of, self._sums_of = self._sums_of_copies()
        self._done = [False] * len(self._eqns)
        self._ready = ReadyQueue()
        self._together: list[int] = []  # starts that travel together, when there are enough
        self._ahead: collections.deque[int] = collections.deque()  # gathers that could start
        self._group_of: dict[Any, list[int]] = {}  # by target: what has started together
        self._bytes_ahead = 0  # of gathers that have started before what they need was known
        self._to_add: list[int] = []  # exchanges whose sums wait for the next ones to start
        # Targets of starts for which no anchor waits yet. At first the step before, for starts.
        self._pending: list[Any] = self._jaxpr.invars[carry][:1]
        self._last: Any = None  # a result of the last anchor

    def results(self) -> list[Any]:
        """Evaluates it."""
        for i, is_hoisted in enumerate(self._is_hoisted):
            if is_hoisted:
                missing = set(variables(self._eqns[i].invars)) - self._known.keys()
                self._ready.add(i, missing, self._rank.get(i))
        self._run_ready()
        self._start_ahead()
        for i in range(len(self._eqns)):  # the model, then sums and updates
            if not (self._is_lazy[i] or self._is_hoisted[i]):
                self._run(i)
                self._run_ready()
        for i in range(self._end, len(self._eqns)):
            if has_effects(self._eqns[i]):
                self._run(i)
        self._start_together()
        if self._last is not None:  # for which the last waits wait: they wait for all starts, too
            self._tie([self._last, *self._pending])
        self._demand(self._jaxpr.outvars)
        return values_of(self._jaxpr.outvars, self._known)

    def _live(self) -> tuple[set[int], set[Any]]:
        """The equations on which results or effects depend, and the variables."""
        live = {i for i, eqn in enumerate(self._eqns) if has_effects(eqn)}
        needed = set(variables(self._jaxpr.outvars))
        for i in reversed(range(len(self._eqns))):
            if i in live or not needed.isdisjoint(self._eqns[i].outvars):
                live.add(i)
                needed.update(variables(self._eqns[i].invars))
        return live, needed

    def _made_of_arguments(self) -> set[Any]:
        """What is *simple*: made of arguments alone, without a product or an update."""
        simple = {*self._jaxpr.invars, *self._jaxpr.constvars}
        for i, eqn in enumerate(self._eqns):
            if not self._is_anchor[i] and simple.issuperset(variables(eqn.invars)):
                simple.update(eqn.outvars)
        return simple

    def _lazy(self) -> list[bool]:
        """Waits, what is made of their results and simple ones alone, and all after the model."""
        lazy, found = set[Any](), []
        for i, eqn in enumerate(self._eqns):
            used = set(variables(eqn.invars)) - (self._simple - lazy)
            is_sum = contains(eqn, {parts.SUM})
            is_lazy = (
                self._is_wait[i]
                or is_sum
                or (
                    not (self._is_anchor[i] or self._is_start[i])
                    and (i >= self._end or (bool(used) and used <= lazy))
                    and not (i < self._end and has_effects(eqn))
                )
            )
            lazy |= set(eqn.outvars) if is_lazy else set()
            found.append(is_lazy)
        return found

    def _hoisted(self) -> list[bool]:
        """Starts, and what they need that is simple, or after the last product."""
        found = list(self._is_start)
        for i in reversed(range(len(self._eqns))):
            if not found[i]:
                continue
            for v in variables(self._eqns[i].invars):
                k = self._made_by.get(v, -1)
                is_early = k >= self._end or v in self._simple
                if k >= 0 and is_early and not (self._is_wait[k] or self._is_anchor[k]):
                    found[k], self._is_lazy[k] = True, False
        return found

    def _sums_of_copies(self) -> tuple[dict[int, set[int]], dict[int, list[int]]]:
        """For sums before the last product: the exchanges whose parts they add; and the inverse."""
        exchanges, sums = dict[int, set[int]](), dict[int, list[int]]()
        for i, eqn in enumerate(self._eqns):
            if not (self._is_lazy[i] and self._is_anchor[i]):
                continue
            stack, seen = variables(eqn.invars), set[Any]()
            while stack:
                v = stack.pop()
                k = self._made_by.get(v, -1)
                if k < 0 or k in seen:
                    continue
                seen.add(k)
                if self._is_start[k]:
                    exchanges.setdefault(i, set()).add(k)
                    sums.setdefault(k, []).append(i)
                elif self._is_lazy[k] and not self._is_anchor[k]:
                    stack += variables(self._eqns[k].invars)
        return exchanges, sums

    def _ranks(self) -> dict[int, int]:
        """The order of starts whose operands are known from the beginning: as results are needed.

        By equation: of starts, and of what they need.
        """
        order, seen = dict[int, int](), set[int]()

        def makers(atoms: Any) -> list[tuple[int, bool]]:
            found = (self._made_by.get(v, -1) for v in reversed(variables(atoms)))
            return [
                (i, False) for i in found if i >= 0 and (self._is_lazy[i] or self._is_hoisted[i])
            ]

        for i, eqn in enumerate(self._eqns):
            stack = [] if self._is_lazy[i] or self._is_hoisted[i] else makers(eqn.invars)
            while stack:
                k, are_operands_done = stack.pop()
                if are_operands_done:
                    order[k] = len(order) - len(self._eqns)
                elif k not in seen:
                    seen.add(k)
                    stack += [(k, True), *makers(self._eqns[k].invars)]
        return order

    def _run_ready(self) -> None:
        while self._ready:
            self._run(self._ready.pop())

    def _run(self, i: int) -> None:
        """Evaluates an equation, after those that it needs."""
        if not self._done[i]:
            self._demand(self._eqns[i].invars)
            self._evaluate(i)

    def _demand(self, atoms: Iterable[Any]) -> None:
        """Evaluates what some variables need."""
        stack = variables(atoms)[::-1]
        while stack:
            v = stack[-1]
            if v in self._known:
                stack.pop()
                continue
            i = self._made_by[v]
            missing = [u for u in variables(self._eqns[i].invars) if u not in self._known]
            if self._done[i]:  # a start, which has been collected
                self._start_ahead(until=v)
                self._start_together()
            elif missing:
                stack += missing[::-1]
            else:
                self._evaluate(i)

    def _evaluate(self, i: int) -> None:
        """Evaluates an equation whose operands are known."""
        if self._done[i]:  # as one of several waits
            return
        self._done[i] = True
        eqn = self._eqns[i]
        if self._is_ahead[i]:
            self._ahead.append(i)
            return
        if self._is_start[i]:
            self._add(i)
            return
        if self._is_wait[i] and eqn.invars[0] in self._group_of:
            self._wait_for(self._group_of[eqn.invars[0]])
            return
        if self._is_anchor[i]:
            self._before_anchor(i)
        values = values_of(eqn.invars, self._known)
        if _is_copying_loop(eqn):
            eqn = self._with_overlap(eqn)
        self._assign(eqn.outvars, evaluate_one(self._jaxpr, eqn, values))
        plain = [v for v in eqn.outvars if isinstance(getattr(v.aval, "dtype", None), np.dtype)]
        # Waits take the last result; XLA would transpose one that is used transposed.
        if self._is_anchor[i] and plain and (i + 1 == self._end or not _transposes(eqn)):
            # Larger results may be updated in place.
            used = [v for v in plain if v in self._used] or plain  # XLA removes others
            self._last = min(used, key=lambda v: v.aval.size)
            if self._is_lazy[i]:  # a sum: the next product waits for it
                self._pending.append(self._last)

    def _with_overlap(self, loop: Any) -> Any:
        """A loop with each step in another order."""
        step, carry = loop.params["jaxpr"], slice(*carried(loop, loop.params["jaxpr"]))
        run = lambda *args: _in_another_order(step, list(args), self._options, carry)  # noqa: E731
        step = jax.make_jaxpr(run)(*step.in_avals)
        unroll = loop.params["unroll"] if self._options.unrolls else 1
        return loop.replace(params=loop.params | {"jaxpr": step, "unroll": unroll})

    def _before_anchor(self, i: int) -> None:
        """Lets an anchor wait for starts: they run when it does, not later."""
        gathers = any(copies.is_start(self._eqns[k], gathers=True) for k in self._together[:1])
        if i >= self._end or gathers:  # nothing else will travel with them
            self._start_together()
        made = [v for v in variables(self._eqns[i].invars) if v in self._made_by][:1]
        if made:  # a barrier around an argument might copy it
            self._tie([*made, *self._pending])
            self._pending = []

    def _add(self, i: int) -> None:
        """Lets a start travel with those before it, unless they are many bytes already."""
        first = self._together[:1]
        if first and copies.kind_of(self._eqns[first[0]]) != copies.kind_of(self._eqns[i]):
            self._start_together()
        self._together.append(i)
        if self._bytes_of(self._together) >= TOGETHER_BYTES:
            self._start_together()

    def _bytes_of(self, starts: Iterable[int]) -> int:
        avals = [self._eqns[i].outvars[0].aval for i in starts]
        return sum(x.size * x.dtype.itemsize for x in avals)

    def _start_ahead(self, until: Any = None) -> None:
        """Starts gathers of what is known from the beginning, as results are needed.

        Until the target ``until`` has started, if it is one of them, and bytes are on their way.
        """
        targets = [self._eqns[i].outvars[0] for i in self._ahead]
        needed = targets.index(until) + 1 if until in targets else 0
        limit = AHEAD_BYTES if self._options.saves_memory else math.inf
        if not self._ahead or (not needed and self._bytes_ahead >= limit):
            return
        self._start_together()  # others
        while self._ahead and (needed > 0 or self._bytes_ahead < limit):
            self._bytes_ahead += self._bytes_of([self._ahead[0]])
            self._add(self._ahead.popleft())
            needed -= 1
        self._start_together()

    def _start_together(self) -> None:
        if not self._together:
            return
        group, self._together = self._together, []
        eqns = [self._eqns[i] for i in group]
        sources = [eqn.invars[0] for eqn in eqns]
        if self._pending:  # starts keep their order
            self._tie([sources[0], self._pending[-1]])
        started = [eqn.outvars[0] for eqn in eqns]
        self._assign(started, copies.start_together(eqns, values_of(sources, self._known)))
        self._group_of |= dict.fromkeys(started, group)
        self._pending += started
        if self._options.saves_memory and copies.is_start(eqns[0], gathers=False):
            self._add_parts(group)

    def _add_parts(self, started: list[int]) -> None:
        """Adds what the exchanges before have brought, while those that have started travel."""
        arrived, self._to_add = self._to_add, started
        for k in dict.fromkeys(k for i in arrived for k in self._sums_of.get(i, ())):
            if all(self._eqns[i].outvars[0] in self._group_of for i in self._exchanges_of[k]):
                self._run(k)

    def _wait_for(self, group: list[int]) -> None:
        """Waits for what has started together.

        One call takes all sources and targets, so all of them are kept until then.
        """
        eqns = [self._eqns[i] for i in group]
        started, sources = [eqn.outvars[0] for eqn in eqns], [eqn.invars[0] for eqn in eqns]
        self._tie(self._pending)  # for starts in between, too
        self._pending = [v for v in self._pending if v not in started]
        waits = [self._wait_of[v] for v in started]
        arrived = copies.wait_together(
            eqns,
            [self._eqns[i].outvars[0].aval for i in waits],
            values_of(started, self._known),
            values_of(sources, self._known),
            [] if self._last is None else [self._known[self._last]],
        )
        for i, x in zip(waits, arrived, strict=True):
            self._done[i] = True
            self._assign(self._eqns[i].outvars, [x])
        ahead = [i for i in group if self._is_ahead[i]]
        self._bytes_ahead -= self._bytes_of(ahead)
        if ahead:
            self._start_ahead()

    def _assign(self, made: Iterable[Any], values: Iterable[Any]) -> None:
        for v, x in zip(made, values, strict=True):
            self._known[v] = x
            self._ready.found(v)

    def _tie(self, tied: list[Any]) -> None:
        """Lets all later users of some variables wait for all of them."""
        tied = list(dict.fromkeys(v for v in tied if not isinstance(v, core.Literal)))
        if len(tied) < 2:
            return
        values = jax.lax.optimization_barrier(values_of(tied, self._known))
        self._known.update(zip(tied, values, strict=True))


def _transposes(eqn: Any) -> bool:
    """Whether a product is over other dimensions than the last of its first operand."""
    if eqn.primitive.name != "dot_general":
        return False
    ((contracted, _), _), ndim = eqn.params["dimension_numbers"], eqn.invars[0].aval.ndim
    return tuple(contracted) != (ndim - 1,)
