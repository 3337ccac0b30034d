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
  they are added after the backward pass, in which every wait would be for the slowest device. If a
  norm needs all sums, they run in the order in which parts arrive, and the last parts travel beside
  the others' sums.
- The steps of a loop that copies have this order, too: [Note: pipelined scan].
- Copies are sent together until they are ``TOGETHER_BYTES``; gathers start before the next product
  or update in any case. One wait is for all that are sent together, and XLA must keep it. Otherwise
  a result that nobody uses would lose its memory while other devices write it.

What is sent together is therefore what the traced loss uses one after another: tied parameters at
their first use in the forward pass, their gradients at the last in the backward pass.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jdistadam.core import jaxprs, trees
from jdistadam.kernels import copies, parts
from jdistadam.training.order import Policy, overlapping
from jdistadam.training.pipelined_scan import pipelined
from jdistadam.training.reordered import ANCHORS, Ordered, evaluate, nodes_of, unseen

TOGETHER_BYTES = 128 << 20
"""Copies start together, in the order in which they could start, until they are as many bytes."""

AHEAD_BYTES = 2 * TOGETHER_BYTES
"""With little memory, no more gathers start while as many bytes are on their way."""


class _Options(NamedTuple):
    """The options of ``with_overlap``."""

    saves_memory: bool
    unrolls: bool

    @property
    def policy(self) -> Policy:
        """When copies start."""
        ahead_bytes = AHEAD_BYTES if self.saves_memory else math.inf
        return Policy(TOGETHER_BYTES, ahead_bytes, adds_soon=self.saves_memory)


def with_overlap(
    step: Callable[..., Any],
    *,
    saves_memory: bool = False,
    unrolls: bool = False,
    seen: Callable[[Ordered], None] = unseen,
) -> Callable[..., Any]:
    """Returns a function with the results of ``step``: [Note: overlap].

    Args:
      step: The program of one device.
      saves_memory: Whether gathered parameters and whole gradients are to exist for a short time.
      unrolls: Whether loops that copy are unrolled, by at least two. XLA for CPUs must not, as it
        orders the starts of two steps differently on each device.
      seen: Called with the order, when the step is traced.
    """
    options = _Options(saves_memory, unrolls)

    def overlapped(*args: Any) -> Any:
        kinds = list[Any]()

        # Keys enter and leave a function with rules of its own as their words:
        # `jax_debug_key_reuse` takes keys for used that pass through one.
        def in_words(*args: Any) -> Any:
            results = step(*args)
            kinds.extend(map(trees.impl_of_key, jax.tree.leaves(results)))
            return jax.tree.map(trees.words_of, results)

        traced, shapes = jax.make_jaxpr(in_words, return_shape=True)(*args)
        count = len(traced.consts)  # what the loss closes over
        operands = [*traced.consts, *jax.tree.leaves(args)]
        kinds_of_operands = list(map(trees.impl_of_key, operands))

        def program(words: tuple[Any, ...]) -> tuple[Any, list[Any]]:
            values = list(map(trees.from_words, words, kinds_of_operands))
            return jaxprs.with_consts(traced, values[:count]), values[count:]

        def as_traced(*words: Any) -> list[Any]:
            program_of_values, values = program(words)
            return jaxprs.run(program_of_values, *values)

        def in_order(*words: Any) -> list[Any]:
            program_of_values, values = program(words)
            opened, ordered = _in_order(program_of_values, options)
            seen(ordered)
            return evaluate(opened, values, ordered)

        run = _with_rules_of(as_traced, in_order)
        results = map(trees.from_words, run(*map(trees.words_of, operands)), kinds)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return overlapped


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


def _in_order(traced: Any, options: _Options, carry: slice = slice(0)) -> tuple[Any, Ordered]:
    """Returns an equal jaxpr, whose nested functions are opened, and its order: [Note: overlap].

    ``carry``: the arguments that are results of the step before, in a loop.
    """
    opened = _with_narrow_loops(_opened(traced))
    with_loops = functools.partial(jaxprs.evaluate, opened, otherwise=_pipelined)
    traced = jax.make_jaxpr(lambda *args: with_loops(args))(*traced.in_avals)
    jaxpr, nodes = traced.jaxpr, nodes_of(traced)
    first = next(iter(jaxpr.invars[carry]), None)
    arguments, results = [*jaxpr.constvars, *jaxpr.invars], jaxprs.variables(jaxpr.outvars)
    events = overlapping(nodes, arguments, results, options.policy, first)
    eqns, bodies = list(jaxpr.eqns), dict[int, Ordered]()
    for i, eqn in enumerate(eqns):
        if _is_copying_loop(eqn):
            eqns[i], bodies[i] = _loop_in_order(eqn, options)
    return jaxprs.with_eqns(traced, eqns), Ordered(nodes, events, bodies)


def _loop_in_order(loop: Any, options: _Options) -> tuple[Any, Ordered]:
    """A loop whose steps run in another order, and that order."""
    step = jaxprs.step_of(loop)
    step, ordered = _in_order(step, options, slice(*jaxprs.carried(loop, step)))
    new = jax.make_jaxpr(lambda *args: evaluate(step, args, ordered))(*step.in_avals)
    unroll = jaxprs.length_of(loop)[2] if options.unrolls else 1
    return jaxprs.with_step(loop, new, unroll=unroll), ordered


def _opened(traced: Any) -> Any:
    """A jaxpr with the operations of nested functions, and barriers that keep no copies."""
    inlined = functools.partial(jaxprs.inlined, traced, names=ANCHORS | {copies.START})
    opened = jax.make_jaxpr(inlined)(*traced.in_avals)
    return _with_parted_barriers(opened)


def _pipelined(eqn: Any, args: list[Any]) -> list[Any] | None:
    """The results of a scan whose steps copy; None if it stays."""
    if not _is_copying_loop(eqn):
        return None
    return pipelined(eqn, _opened(jaxprs.step_of(eqn)), args)


def _is_copying_loop(eqn: Any) -> bool:
    return jaxprs.is_loop(eqn) and jaxprs.contains(eqn, {copies.START})


def _with_narrow_loops(traced: Any) -> Any:
    """A jaxpr whose loops that copy take what is not widened, and widen it in every step.

    [Note: widened shards] are then those of one layer.
    """
    narrow, eqns = dict[Any, Any](), list[Any]()
    for eqn in traced.jaxpr.eqns:
        if pair := jaxprs.widened(eqn):
            source, result = pair
            narrow[result] = source
        eqns.append(_widening(eqn, narrow) if _is_copying_loop(eqn) else eqn)
    return jaxprs.with_eqns(traced, eqns)


def _widening(loop: Any, narrow: dict[Any, Any]) -> Any:
    """A scan that takes ``narrow`` operands, but for its carry, and widens them itself."""
    step, operands = jaxprs.step_of(loop), list(loop.invars)
    carry, avals = range(*jaxprs.carried(loop, step)), list(step.in_avals)
    for i, v in enumerate(operands):
        if i not in carry and jaxprs.variables([v]) and v in narrow:
            operands[i] = narrow[v]
            avals[i] = avals[i].update(dtype=operands[i].aval.dtype)

    def widened(*args: Any) -> list[Any]:
        pairs = zip(args, step.in_avals, strict=True)
        same = (x if x.dtype == aval.dtype else x.astype(aval.dtype) for x, aval in pairs)
        return jaxprs.run(step, *same)

    return jaxprs.with_step(loop, jax.make_jaxpr(widened)(*avals), invars=operands)


def _with_parted_barriers(traced: Any) -> Any:
    """A jaxpr whose barriers do not keep gathers, and sums over devices, at their place.

    Before layers that are computed again, JAX puts a barrier around all that they need, also what a
    gather sends; within it, XLA would keep widened shards: [Note: widened shards]. [Note: one block
    at a time] has one around sums of gradients.
    """
    eqns = traced.jaxpr.eqns
    simple, sums = {*traced.jaxpr.constvars, *traced.jaxpr.invars}, set[Any]()
    sources = {x.invars[0] for x in eqns if copies.is_start(x, gathers=True)}  # native.unfused
    for eqn in eqns:
        for old, new in _from_to(eqn):
            simple.update([new] if simple.issuperset(old) else ())
            sums.update([new] if old and old <= sums | simple and old & sums else ())
        sums.update(eqn.outvars if jaxprs.contains(eqn, {parts.SUM}) else ())
    sent, parted, same = set[Any](), list[Any](), dict[Any, Any]()
    for eqn in reversed(eqns):
        pairs = _from_to(eqn)
        sent.update(v for old, new in pairs if new in (sent | sources) & simple for v in old)
        if not jaxprs.is_barrier(eqn):
            parted.append(eqn)
            continue
        kinds: dict[bool, list[int]] = {}
        for i, (_, new) in enumerate(pairs):
            if new in sent & simple:
                same[new] = eqn.invars[i]
            else:
                kinds.setdefault(new in sums, []).append(i)
        for indices in kinds.values():
            some = ([x[i] for i in indices] for x in (eqn.invars, eqn.outvars))
            parted.append(eqn.replace(**dict(zip(("invars", "outvars"), some, strict=True))))
    return jaxprs.with_eqns(traced, parted[::-1], same)


def _from_to(eqn: Any) -> list[tuple[set[Any], Any]]:
    """For each result of an equation, what it is made of; none for those of anchors and waits."""
    if jaxprs.is_barrier(eqn):
        each = [set(jaxprs.variables([v])) for v in eqn.invars]
        return list(zip(each, eqn.outvars, strict=True))
    if jaxprs.contains(eqn, ANCHORS | {copies.WAIT}):
        return []
    return [(set(jaxprs.variables(eqn.invars)), v) for v in eqn.outvars]
