"""Loops over layers whose copies run beside the layers before and after; inside ``jax.shard_map``.

[Note: pipelined scan] A step of a loop that gathers the parameters of a layer, uses them, and
exchanges their gradients, is cut in three: ``gathers``, made of the loop's inputs alone; ``main``;
and ``sums``, made of gradients. Step j of the loop that replaces it does::

    start the exchange of the gradients of layer j - 1
    start the gathers of layer j + 1
    the main part of layer j
    wait, and add the gradients of layer j - 1

Gathered parameters and gradients of one layer pass from step to step. The first step, which has no
gradients to add, runs before the loop, and the last one, which has nothing to gather, after it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jdistadam.core import jaxprs
from jdistadam.core.jaxprs import PRODUCTS, contains, has_effects, variables
from jdistadam.kernels import copies


def pipelined(loop: Any, step: Any, args: Sequence[Any]) -> list[Any] | None:
    """Evaluates a scan: [Note: pipelined scan].

    Args:
      loop: Its equation.
      step: The jaxpr of a step, of which nested functions are opened.
      args: The operands.

    Returns:
      The results; None if no copy could run beside another step.
    """
    start, end = jaxprs.carried(loop, step)
    cut = _Cut(step, start, end)
    length, reverse, unroll = jaxprs.length_of(loop)
    if length == 1 or not (cut.gathered or cut.grads):
        return None
    consts, init, xs = args[:start], args[start:end], args[end:]
    first, last, forward = (length - 1, 0, -1) if reverse else (0, length - 1, 1)

    def of_layer(i: Any) -> list[Any]:
        return [lax.dynamic_index_in_dim(x, i, keepdims=False) for x in xs]

    def write(stacks: list[Any], i: Any, arrays: Iterable[Any]) -> list[Any]:
        pairs = zip(stacks, arrays, strict=True)
        return [lax.dynamic_update_index_in_dim(stack, x, i, 0) for stack, x in pairs]

    def run(state: Any, i: Any, *, is_first: bool = False, is_last: bool = False) -> Any:
        carry, gathered, grads, outputs, sums = state
        sums = sums if is_first else write(sums, i - forward, cut.sums(consts, grads))
        following = [] if is_last else cut.gathers(consts, of_layer(i + forward))
        carry, of_main, grads = cut.main(consts, carry, of_layer(i), gathered)
        return carry, following, grads, write(outputs, i, of_main), sums

    outputs, sums = (
        [jnp.zeros((length, *v.aval.shape), v.aval.dtype) for v in which]
        for which in (cut.outputs, cut.summed)
    )
    state: Any = (list(init), cut.gathers(consts, of_layer(first)), [], outputs, sums)
    begin, stop = int(bool(cut.grads)), length - bool(cut.gathered)
    if begin:
        state = run(state, first, is_first=True)
    if begin < stop:
        indices = first + forward * jnp.arange(begin, stop)
        unroll = max(2, unroll)  # otherwise XLA copies what a step passes on
        state, _ = lax.scan(lambda s, i: (run(s, i), None), state, indices, unroll=unroll)
    if stop < length:
        state = run(state, last, is_last=True)
    carry, _, grads, outputs, sums = state
    sums = write(sums, last, cut.sums(consts, grads))
    return [*carry, *cut.in_order(sums, outputs)]


class _Cut:
    """What a step is cut into, as functions of values.

    Attributes:
      gathered: What ``gathers`` returns.
      grads: What ``sums`` takes.
      summed: What ``sums`` returns: outputs of a step.
      outputs: The other ones, which ``main`` returns.
    """

    def __init__(self, step: Any, start: int, end: int) -> None:
        self._jaxpr, self._eqns = step.jaxpr, step.jaxpr.eqns
        self._constants = dict(zip(self._jaxpr.constvars, step.consts, strict=True))
        invars, results = self._jaxpr.invars, self._jaxpr.outvars
        self._consts, self._carry, self._xs = invars[:start], invars[start:end], invars[end:]
        self._carried, ys = results[: end - start], results[end - start :]
        self._gathers, waits, self.gathered = self._find_gathers()
        self._sums, self.grads = self._find_sums()
        self._main = {*range(len(self._eqns))} - waits - self._sums
        of_sums = {v for i in self._sums for v in self._eqns[i].outvars}
        self._is_sum = [bool(variables([v])) and v in of_sums for v in ys]
        self.summed, self.outputs = (
            [v for v, is_sum in zip(ys, self._is_sum, strict=True) if is_sum == wanted]
            for wanted in (True, False)
        )

    def gathers(self, consts: Any, inputs: Any) -> list[Any]:
        """Returns the gathered parameters of a layer."""
        arguments = [*self._consts, *self._xs]
        return self._evaluated(self._gathers, arguments, [*consts, *inputs], self.gathered)

    def main(self, consts: Any, carry: Any, inputs: Any, gathered: Any) -> list[list[Any]]:
        """Returns the carry, the outputs that are no sums, and gradients."""
        arguments = [*self._consts, *self._carry, *self._xs, *self.gathered]
        values = [*consts, *carry, *inputs, *gathered]
        wanted = self._carried, self.outputs, self.grads
        new = self._evaluated(self._main, arguments, values, [v for vs in wanted for v in vs])
        rest = iter(new)
        return [[next(rest) for _ in vs] for vs in wanted]

    def sums(self, consts: Any, grads: Any) -> list[Any]:
        """Returns the sums of the gradients of a layer."""
        arguments = [*self._consts, *self.grads]
        return self._evaluated(self._sums, arguments, [*consts, *grads], self.summed)

    def in_order(self, sums: list[Any], outputs: list[Any]) -> list[Any]:
        """Returns what a step returns besides the carry."""
        rest = {True: iter(sums), False: iter(outputs)}
        return [next(rest[is_sum]) for is_sum in self._is_sum]

    def _evaluated(
        self, indices: Collection[int], arguments: list[Any], values: list[Any], results: list[Any]
    ) -> list[Any]:
        known = self._constants | dict(zip(arguments, values, strict=True))
        eqns = [eqn for i, eqn in enumerate(self._eqns) if i in indices]
        return jaxprs.evaluate_some(self._jaxpr, eqns, known, results)

    def _find_gathers(self) -> tuple[set[int], set[int], list[Any]]:
        """Gathers that take the loop's inputs alone, their waits alone, and their results."""
        of_layer = dict.fromkeys([*self._constants, *self._consts], False)
        of_layer |= dict.fromkeys(self._xs, True)
        made_by, waits, arrived = dict[Any, int](), set[int](), dict[Any, None]()
        for i, eqn in enumerate(self._eqns):
            used = variables(eqn.invars)
            is_wait = bool(used) and _is_passed_on(eqn, arrived)
            if all(v in of_layer for v in used) and not has_effects(eqn):
                is_of_layer = any(of_layer[v] for v in used)
                if not contains(eqn, PRODUCTS | {copies.START, copies.WAIT}):
                    of_layer |= dict.fromkeys(eqn.outvars, is_of_layer)
                    made_by |= dict.fromkeys(eqn.outvars, i)
                is_wait |= is_of_layer and copies.is_start(eqn, gathers=True)
            if is_wait:
                waits.add(i)
                arrived |= dict.fromkeys(eqn.outvars)
        gathers, stack = set(waits), [v for i in waits for v in self._eqns[i].invars]
        while stack:
            i = made_by.get(stack.pop(), -1)
            if i >= 0 and i not in gathers:
                gathers.add(i)
                stack += variables(self._eqns[i].invars)
        return gathers, waits, self._used_outside(waits, waits)

    def _find_sums(self) -> tuple[set[int], list[Any]]:
        """Exchanges, with all that is made of their results, and what they need.

        Nothing if anything else but outputs is made of them.
        """
        sums, results = set[int](), set[Any]()
        for i, eqn in enumerate(self._eqns):
            if copies.is_start(eqn, gathers=False) or not results.isdisjoint(variables(eqn.invars)):
                sums.add(i)
                results.update(eqn.outvars)
        eqns = [self._eqns[i] for i in sums]
        if any(contains(eqn, PRODUCTS) or copies.is_start(eqn, gathers=True) for eqn in eqns):
            return set(), []
        if any(map(has_effects, eqns)) or not results.isdisjoint(variables(self._carried)):
            return set(), []
        for i, eqn in enumerate(self._eqns):  # they copy nothing
            if jaxprs.is_barrier(eqn) and i not in sums:
                if set(eqn.outvars).isdisjoint(self._used_outside({i} | sums, [i])):
                    sums.add(i)
        known = {v for i in sums for v in self._eqns[i].outvars} | {*self._constants, *self._consts}
        needed = [v for i in sorted(sums) for v in variables(self._eqns[i].invars)]
        return sums, [v for v in dict.fromkeys(needed) if v not in known]

    def _used_outside(self, indices: Collection[int], makers: Iterable[int]) -> list[Any]:
        """What these equations make and others than those at these indices use."""
        used = set(variables(self._jaxpr.outvars))
        for i, eqn in enumerate(self._eqns):
            used.update(() if i in indices else variables(eqn.invars))
        return [v for i in sorted(makers) for v in self._eqns[i].outvars if v in used]


def _is_passed_on(eqn: Any, arrived: Collection[Any]) -> bool:
    """Whether an equation only waits for what has been sent, or for what has arrived."""
    if jaxprs.is_barrier(eqn):
        return all(v in arrived for v in variables(eqn.invars))
    return jaxprs.name_of(eqn) == copies.WAIT and eqn.invars[0] in arrived
