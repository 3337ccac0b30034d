"""The order of a step, as a list of events; no JAX.

A step is a list of *nodes*: its operations, each with the values that it needs and makes. A policy
returns *events*: which node runs when, which copies start together, where the program waits for
them, and which values are tied, so that XLA keeps the order. ``reordered.py`` makes the nodes of a
traced step, and evaluates it by the events.

There are two policies: ``overlapping``, for copies between devices, [Note: overlap], and ``early``,
for a state in host memory, [Note: early updates].

An *anchor* is a product or an update: what copies overlap. The *model* are the nodes up to the last
product; after them the optimizer begins.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

Value = Hashable


@dataclasses.dataclass(frozen=True)
class Node:
    """An operation, as far as the order depends on it.

    Attributes:
      needs: The values that it takes.
      makes: Its results.
      name: What it is, for people.
      is_product: Whether it is, or contains, a product.
      is_update: Whether it is, or contains, a kernel call of an update.
      is_sum: Whether it adds what an exchange brought.
      is_start: Whether it starts a copy: ``needs`` is the source, ``makes`` the target.
      is_wait: Whether it waits for a copy: it needs the target.
      is_gather: Whether it starts a gather of parameters, or is one of XLA's. Other starts are
        exchanges of gradients.
      is_norm: Whether it computes norms of gradients.
      has_effects: Whether it does more than make results.
      is_ordered: Whether its effects keep their order, as those of an ordered callback.
      num_bytes: Bytes of the target of a start.
      travels_with: Starts travel together only if this is equal.
      signals: Results for which a later wait can wait, the best one first; of anchors.
      passed_on: For a barrier: its operand for each result, or None.
    """

    needs: tuple[Value, ...]
    makes: tuple[Value, ...]
    name: str = ""
    is_product: bool = False
    is_update: bool = False
    is_sum: bool = False
    is_start: bool = False
    is_wait: bool = False
    is_gather: bool = False
    is_norm: bool = False
    has_effects: bool = False
    is_ordered: bool = False
    num_bytes: int = 0
    travels_with: Hashable = None
    signals: tuple[Value, ...] = ()
    passed_on: tuple[Value, ...] | None = None

    @property
    def is_anchor(self) -> bool:
        """Whether copies overlap it."""
        return self.is_product or self.is_update or self.is_sum


def end_of_model(nodes: Sequence[Node]) -> int:
    """Returns the index after the last product: what follows is the optimizer."""
    return 1 + max((i for i, node in enumerate(nodes) if node.is_product), default=-1)


class Run(NamedTuple):
    """A node runs."""

    node: int


class Start(NamedTuple):
    """Copies start together."""

    nodes: tuple[int, ...]


class Wait(NamedTuple):
    """The program waits for copies that started together, after a value, if one is given."""

    starts: tuple[int, ...]
    waits: tuple[int, ...]
    after: Value | None


class Tie(NamedTuple):
    """All later users of some values wait for all of them."""

    values: tuple[Value, ...]


Event = Run | Start | Wait | Tie


@dataclasses.dataclass(frozen=True)
class Policy:
    """When copies start, and how many.

    Attributes:
      together_bytes: Copies travel together until they are as many bytes. Less are sent before an
        anchor, if they are gathers, before another kind of copy, and when a result is needed.
      ahead_bytes: Gathers of simple values start only while fewer bytes of them are on their way;
        one that is needed starts in any case, with those that are queued before it. This is the
        order of the list: XLA may start such a gather earlier.
      adds_soon: Whether gradients are added when the exchange after theirs has started; if not,
        after the backward pass.
    """

    together_bytes: float
    ahead_bytes: float = math.inf
    adds_soon: bool = False


def overlapping(
    nodes: Sequence[Node],
    arguments: Iterable[Value],
    results: Sequence[Value],
    policy: Policy,
    first: Value | None = None,
) -> list[Event]:
    """Returns the order of a step whose copies overlap products and updates: [Note: overlap].

    Args:
      nodes: The step.
      arguments: Its arguments.
      results: Its results.
      policy: When copies start.
      first: In a loop, an argument that the step before made: the first start waits for it.
    """
    return _Overlapping(nodes, arguments, results, policy, first).events


class _Roles:
    """What each node is to the order of copies.

    Attributes:
      end: The first node after the model.
      made_by: The node that makes a value.
      used: The values that a node or a result needs.
      simple: Values made of arguments alone, without an anchor or an ordered effect; copies of such
        values, too.
      is_start: Starts on whose copies something depends. Others run alone, and XLA leaves them out.
      is_hoisted: Nodes that run as soon as they can: starts, and what they need that is simple or
        after the model, but for waits, anchors and ordered effects.
      is_lazy: Nodes that run only when a result is needed: waits, sums, what is made of them and of
        simple values alone, and all after the model that is neither an anchor nor hoisted.
      is_ahead: Gathers of simple values.
      rank: The order of nodes that can run at the same time: as results are needed.
      wait_of: The node that waits for a target.
      exchanges_of: For sums that are lazy: the exchanges whose parts they add; and the inverse.
    """

    def __init__(
        self, nodes: Sequence[Node], arguments: Iterable[Value], results: Sequence[Value]
    ) -> None:
        self._nodes = nodes
        self.made_by = {v: i for i, node in enumerate(nodes) for v in node.makes}
        self.end = end_of_model(nodes)
        live = self._live(results)
        self.is_start = [node.is_start and i in live for i, node in enumerate(nodes)]
        waits = [i for i, node in enumerate(nodes) if node.is_wait and i in live]
        self.wait_of = {nodes[i].needs[0]: i for i in waits}
        self.simple = self._simple(arguments)
        self.is_hoisted = self._hoisted()
        lazy = self._lazy()
        self.is_lazy = [x and not hoisted for x, hoisted in zip(lazy, self.is_hoisted, strict=True)]
        self.is_ahead = [
            x and node.is_gather and self.simple.issuperset(node.needs)
            for x, node in zip(self.is_start, nodes, strict=True)
        ]
        self.rank = self._ranks()
        self.exchanges_of, self.sums_of = self._exchanges()

    def _live(self, results: Sequence[Value]) -> set[int]:
        """The nodes on which results or effects depend."""
        live = {i for i, node in enumerate(self._nodes) if node.has_effects}
        self.used = set(results)
        for i in reversed(range(len(self._nodes))):
            if i in live or not self.used.isdisjoint(self._nodes[i].makes):
                live.add(i)
                self.used.update(self._nodes[i].needs)
        return live

    def _simple(self, arguments: Iterable[Value]) -> set[Value]:
        simple = set(arguments)
        for node in self._nodes:
            is_other = node.is_anchor or node.is_ordered
            if not is_other and simple.issuperset(node.needs):
                simple.update(node.makes)
        return simple

    def _lazy(self) -> list[bool]:
        lazy, are_lazy = set[Value](), []
        for i, node in enumerate(self._nodes):
            are_lazy.append(self._is_lazy(i, lazy))
            lazy |= set(node.makes) if are_lazy[-1] else set()
        return are_lazy

    def _is_lazy(self, i: int, lazy: set[Value]) -> bool:
        """Whether a node runs only when its result is needed; ``lazy``: results of such nodes."""
        node = self._nodes[i]
        if node.is_wait or node.is_sum:
            return True
        if node.is_anchor or self.is_start[i]:
            return False
        if i >= self.end:  # the optimizer
            return True
        if node.has_effects:
            return False
        used = set(node.needs) - (self.simple - lazy)
        return bool(used) and used <= lazy

    def _hoisted(self) -> list[bool]:
        are_hoisted = list(self.is_start)
        for i in reversed(range(len(self._nodes))):
            if not are_hoisted[i]:
                continue
            for v in self._nodes[i].needs:
                k = self.made_by.get(v, -1)
                if k < 0 or not (k >= self.end or v in self.simple):
                    continue
                maker = self._nodes[k]
                are_hoisted[k] |= not (maker.is_wait or maker.is_anchor or maker.is_ordered)
        return are_hoisted

    def _exchanges(self) -> tuple[dict[int, set[int]], dict[int, list[int]]]:
        nodes, exchanges, sums = self._nodes, dict[int, set[int]](), dict[int, list[int]]()
        goes_on = lambda k: self.is_lazy[k] and not nodes[k].is_anchor  # noqa: E731
        for i, node in enumerate(nodes):
            if self.is_lazy[i] and node.is_anchor:
                found = _makers(nodes, self.made_by, node.needs, goes_on)
                exchanges[i] = {k for k in found if self.is_start[k]}
                for k in exchanges[i]:
                    sums.setdefault(k, []).append(i)
        return exchanges, sums

    def _ranks(self) -> dict[int, int]:
        order, seen = dict[int, int](), set[int]()

        def makers(values: Sequence[Value]) -> list[tuple[int, bool]]:
            nodes = (self.made_by.get(v, -1) for v in reversed(values))
            return [(i, False) for i in nodes if i >= 0 and (self.is_lazy[i] or self.is_hoisted[i])]

        for i, node in enumerate(self._nodes):
            stack = [] if self.is_lazy[i] or self.is_hoisted[i] else makers(node.needs)
            while stack:
                k, are_needs_done = stack.pop()
                if are_needs_done:
                    order[k] = len(order) - len(self._nodes)
                elif k not in seen:
                    seen.add(k)
                    stack += [(k, True), *makers(self._nodes[k].needs)]
        return order


def _makers(
    nodes: Sequence[Node],
    made_by: Mapping[Value, int],
    values: Iterable[Value],
    goes_on: Callable[[int], bool],
) -> set[int]:
    """The nodes that make values; if a node ``goes_on``, also those that make what it needs."""
    found, stack = set[int](), list(values)
    while stack:
        i = made_by.get(stack.pop(), -1)
        if i >= 0 and i not in found:
            found.add(i)
            stack += nodes[i].needs if goes_on(i) else ()
    return found


class _Overlapping:
    """Makes the events of ``overlapping``, as if it evaluated the step."""

    def __init__(
        self,
        nodes: Sequence[Node],
        arguments: Iterable[Value],
        results: Sequence[Value],
        policy: Policy,
        first: Value | None,
    ) -> None:
        arguments = list(arguments)
        self.events: list[Event] = []
        self._nodes, self._policy, self._roles = nodes, policy, _Roles(nodes, arguments, results)
        self._needs = _with_effects_in_order(nodes)
        self._known = set(arguments)
        self._done = [False] * len(nodes)  # for a start: it waits for others to travel with
        self._ready = _Ready()
        self._together: list[int] = []  # starts that travel together, when there are enough
        self._ahead: collections.deque[int] = collections.deque()  # gathers that could start
        self._group_of: dict[Value, tuple[int, ...]] = {}  # by target: what started together
        self._bytes_ahead = 0  # of gathers of simple values that are on their way
        self._to_add: tuple[int, ...] = ()  # exchanges whose sums wait for the next ones to start
        # Targets of starts for which no anchor waits yet. At first the step before, for starts.
        self._pending: list[Value] = [] if first is None else [first]
        self._last: Value | None = None  # a result of the last anchor
        self._all(results)

    def _all(self, results: Sequence[Value]) -> None:
        roles = self._roles
        for i, is_hoisted in enumerate(roles.is_hoisted):
            if is_hoisted:
                missing = set(self._needs[i]) - self._known
                self._ready.add(i, missing, roles.rank.get(i, i))
        self._run_ready()
        self._start_ahead()
        for i in range(len(self._nodes)):  # the model, then sums and updates
            if not (roles.is_lazy[i] or roles.is_hoisted[i]):
                self._run(i)
                self._run_ready()
        for i in range(roles.end, len(self._nodes)):
            if self._nodes[i].has_effects:
                self._run(i)
        self._start_together()
        if self._last is not None:  # for which the last waits wait: they wait for all starts, too
            self._tie([self._last, *self._pending])
        self._demand(results)

    def _run_ready(self) -> None:
        while self._ready:
            self._run(self._ready.pop())

    def _run(self, i: int) -> None:
        """Runs a node, after those that it needs."""
        if not self._done[i]:
            if i >= self._roles.end:
                self._add_as_parts_arrive(i)
            self._demand(self._needs[i])
            self._evaluate(i)

    def _add_as_parts_arrive(self, i: int) -> None:
        """Runs the sums that a node of the optimizer needs, as for a norm.

        The last parts then travel beside sums of others.
        """
        nodes, made_by = self._nodes, self._roles.made_by
        goes_on = lambda k: not (self._done[k] or nodes[k].is_sum)  # noqa: E731
        found = _makers(nodes, made_by, nodes[i].needs, goes_on)
        places = {target: place for place, target in enumerate(self._group_of)}

        def arrival(k: int) -> tuple[int, int]:
            targets = (nodes[x].makes[0] for x in self._roles.exchanges_of.get(k, ()))
            return max((places.get(v, len(places)) for v in targets), default=-1), k

        for k in sorted((k for k in found if nodes[k].is_sum), key=arrival):
            self._run(k)

    def _demand(self, values: Sequence[Value]) -> None:
        """Runs what some values need."""
        stack = list(reversed(values))
        while stack:
            v = stack[-1]
            if v in self._known:
                stack.pop()
                continue
            i = v.node if isinstance(v, _Effect) else self._roles.made_by[v]
            missing = [u for u in self._needs[i] if u not in self._known]
            if self._done[i]:  # a start, which has been collected
                self._start_ahead(until=v)
                self._start_together()
                assert v in self._known, f"{self._nodes[i].name}: needs its own result"
            elif missing:
                stack += missing[::-1]
            else:
                self._evaluate(i)

    def _evaluate(self, i: int) -> None:
        """Runs a node whose needs are known."""
        if self._done[i]:  # as one of several waits
            return
        self._done[i] = True
        node, roles = self._nodes[i], self._roles
        if roles.is_ahead[i]:
            self._ahead.append(i)
        elif roles.is_start[i]:
            self._add(i)
        elif node.is_wait and node.needs[0] in self._group_of:
            self._wait_for(self._group_of[node.needs[0]])
        else:
            if node.is_anchor:
                self._before_anchor(i)
            self._does(Run(i), [*node.makes, _Effect(i)])
            if node.is_anchor:
                self._after_anchor(i)

    def _before_anchor(self, i: int) -> None:
        """Lets an anchor wait for starts: they run when it does, not later."""
        gathers = any(self._nodes[k].is_gather for k in self._together[:1])
        if i >= self._roles.end or gathers:  # nothing else will travel with them
            self._start_together()
        computed = [v for v in self._nodes[i].needs if v in self._roles.made_by][:1]
        if computed:  # a barrier around an argument might copy it
            self._tie([*computed, *self._pending])
            self._pending = []

    def _after_anchor(self, i: int) -> None:
        """Later waits wait for the anchor."""
        signals = self._nodes[i].signals
        if not signals:
            return
        used = [v for v in signals if v in self._roles.used]  # XLA removes others
        self._last = (used or signals)[0]
        if self._roles.is_lazy[i]:  # a sum: the next product waits for it
            self._pending.append(self._last)

    def _add(self, i: int) -> None:
        """Lets a start travel with those before it; sends them all if they are many bytes."""
        first = self._together[:1]
        if first and self._nodes[first[0]].travels_with != self._nodes[i].travels_with:
            self._start_together()
        self._together.append(i)
        if self._bytes_of(self._together) >= self._policy.together_bytes:
            self._start_together()

    def _bytes_of(self, starts: Iterable[int]) -> int:
        return sum(self._nodes[i].num_bytes for i in starts)

    def _start_ahead(self, until: Value | None = None) -> None:
        """Starts gathers of simple values, in the order of the queue, while few bytes travel.

        At least up to the target ``until``, if it is one of theirs.
        """
        targets = [self._nodes[i].makes[0] for i in self._ahead]
        needed = targets.index(until) + 1 if until in targets else 0
        limit = self._policy.ahead_bytes
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
        group, self._together = tuple(self._together), []
        if self._pending:  # starts keep their order
            self._tie([*self._nodes[group[0]].needs[:1], self._pending[-1]])
        started = [self._nodes[i].makes[0] for i in group]
        self._does(Start(group), started)
        self._group_of |= dict.fromkeys(started, group)
        self._pending += started
        if self._policy.adds_soon and not self._nodes[group[0]].is_gather:
            self._add_parts(group)

    def _add_parts(self, started: tuple[int, ...]) -> None:
        """Adds what the exchanges before have brought, while those that have started travel."""
        roles = self._roles
        arrived, self._to_add = self._to_add, started
        for k in dict.fromkeys(k for i in arrived for k in roles.sums_of.get(i, ())):
            if all(self._nodes[i].makes[0] in self._group_of for i in roles.exchanges_of[k]):
                self._run(k)

    def _wait_for(self, group: tuple[int, ...]) -> None:
        """Waits for what has started together."""
        started = [self._nodes[i].makes[0] for i in group]
        self._tie(self._pending)  # with its own starts for those in between, if they are pending
        self._pending = [v for v in self._pending if v not in started]
        waits = tuple(self._roles.wait_of[v] for v in started)
        for i in waits:
            self._done[i] = True
        arrived = [v for i in waits for v in self._nodes[i].makes]
        self._does(Wait(group, waits, self._last), arrived)
        ahead = [i for i in group if self._roles.is_ahead[i]]
        self._bytes_ahead -= self._bytes_of(ahead)
        if ahead:
            self._start_ahead()

    def _does(self, event: Event, makes: Iterable[Value]) -> None:
        self.events.append(event)
        for v in makes:
            self._known.add(v)
            self._ready.learn(v)

    def _tie(self, values: Sequence[Value]) -> None:
        tied = tuple(dict.fromkeys(values))
        if len(tied) > 1:
            self.events.append(Tie(tied))


class _Effect(NamedTuple):
    """That a node has run: the next one with ordered effects needs it."""

    node: int


def _with_effects_in_order(nodes: Sequence[Node]) -> list[tuple[Value, ...]]:
    """What each node needs; for nodes with ordered effects, also the one before."""
    needs, before = [], list[Value]()
    for i, node in enumerate(nodes):
        needs.append((*node.needs, *(before if node.is_ordered else ())))
        before = [_Effect(i)] if node.is_ordered else before
    return needs


def early(
    nodes: Sequence[Node], arguments: Sequence[Value], results: Sequence[Value], lag: float
) -> list[Event]:
    """Returns the order of a step whose updates are early: [Note: early updates].

    The model runs in order, everything else as soon as possible.

    Args:
      nodes: The step.
      arguments: Its arguments.
      results: Its results, or None. The first ones replace the first arguments, one by one.
      lag: The number of updates for which a product does not wait.
    """
    end = end_of_model(nodes)
    after = _last_uses(nodes, arguments, results, end)
    events, ready = list[Event](), _Ready()
    needs = _with_effects_in_order(nodes)
    unknown = {v for i, node in enumerate(nodes) for v in (*node.makes, _Effect(i))}
    for i in range(end, len(nodes)):
        late = {_UPDATED} if nodes[i].is_gather else set[Value]()
        ready.add(i, {*needs[i], *after.get(i, ())} & unknown | late, i)

    def run(i: int) -> None:
        if i in after:  # its first operand are coefficients, which wait for no other call
            events.append(Tie(tuple(dict.fromkeys([nodes[i].needs[0], *after[i]]))))
        events.append(Run(i))
        for v in (*nodes[i].makes, _Effect(i)):
            ready.learn(v)

    gathered = [v for node in nodes[end:] if node.is_gather for v in node.needs]
    norms = [v for node in nodes[end:] if node.is_norm for v in node.makes]
    outputs, computed = {*results, *gathered, *norms}, set[Value]()
    # Results before the first kernel call and after each, for which no product waited.
    calls: list[list[Value]] = [[]]
    for i in range(end):
        waits_for = calls[: int(max(0, len(calls) - lag))]
        if nodes[i].is_product and any(waits_for):
            operands = [v for v in nodes[i].needs if v in computed]
            events.append(
                Tie(tuple(dict.fromkeys([*operands, *(v for x in waits_for for v in x)])))
            )
            calls = calls[len(waits_for) :] or [[]]
        run(i)
        computed.update(nodes[i].makes)
        while ready:
            k = ready.pop()
            run(k)
            if k in after:
                calls.append([])
            calls[-1] += [v for v in nodes[k].makes if v in outputs]
    ready.learn(_UPDATED)
    while ready:
        run(ready.pop())
    return events


_UPDATED: Value = object()
"""Known when all early nodes have run: gathers wait for it."""


def _last_uses(
    nodes: Sequence[Node], arguments: Sequence[Value], results: Sequence[Value], end: int
) -> dict[int, list[Value]]:
    """For updates that make a new argument: results of the last nodes that need the old one.

    Only nodes of the model count. A value made of one argument alone is that argument: a barrier
    returns its operands themselves, and XLA computes a transpose at its use.
    """
    last_use, made_by = dict[Value, Value](), dict[Value, int]()
    argument_of = {v: v for v in arguments}
    for i, node in enumerate(nodes):
        made_by |= dict.fromkeys(node.makes, i)
        if i >= end or not node.makes:
            continue
        sources = {argument_of.get(v) for v in node.needs}
        if node.passed_on is not None:
            pairs = zip(node.makes, node.passed_on, strict=True)
            argument_of |= {new: argument_of[old] for new, old in pairs if old in argument_of}
        elif len(sources) == 1 and None not in sources and not node.is_product:
            argument_of |= dict.fromkeys(node.makes, sources.pop())
        else:
            last_use |= {x: node.makes[0] for x in sources if x is not None}
    uses: dict[int, list[Value]] = {}
    goes_on = lambda i: i >= end and not nodes[i].is_update  # noqa: E731
    for old, new in zip(arguments, results, strict=False):
        found = _makers(nodes, made_by, [new], goes_on) if old in last_use else ()
        for i in found:
            if i >= end and nodes[i].is_update:
                uses.setdefault(i, []).append(last_use[old])
    return uses


class _Ready:
    """Nodes that become ready when all values that they wait for are known."""

    def __init__(self) -> None:
        self._waiting = collections.defaultdict[Value, list[int]](list)
        self._num_missing: dict[int, int] = {}
        self._ranks: dict[int, int] = {}
        self._ready: list[tuple[int, int]] = []

    def __bool__(self) -> bool:
        """Whether a node is ready."""
        return bool(self._ready)

    def add(self, i: int, missing: set[Value], rank: int) -> None:
        """Adds a node that waits for values; of ready ones the lowest rank is first."""
        self._ranks[i], self._num_missing[i] = rank, len(missing)
        for v in missing:
            self._waiting[v].append(i)
        if not missing:
            heapq.heappush(self._ready, (self._ranks[i], i))

    def learn(self, v: Value) -> None:
        """Learns a value: nodes that waited for it alone are ready."""
        for i in self._waiting.pop(v, ()):
            self._num_missing[i] -= 1
            if not self._num_missing[i]:
                heapq.heappush(self._ready, (self._ranks[i], i))

    def pop(self) -> int:
        """Removes the first node that is ready."""
        return heapq.heappop(self._ready)[1]


def lines_of(
    nodes: Sequence[Node], events: Sequence[Event], bodies: Mapping[int, Sequence[str]]
) -> list[str]:
    """Returns events as text: a line for each copy, wait and anchor.

    Args:
      nodes: The nodes.
      events: Their events.
      bodies: The lines of the steps of loops, by node.
    """
    lines = list[str]()
    for event in events:
        if isinstance(event, Run):
            i = event.node
            lines += [nodes[i].name] if nodes[i].is_anchor or i in bodies else []
            lines += ["  " + line for line in bodies.get(i, ())]
        elif isinstance(event, Start):
            some = [nodes[i] for i in event.nodes]
            what = "gather" if some[0].is_gather else "exchange"
            size = sum(node.num_bytes for node in some) / 1e6
            lines.append(f"start {what} of {size:.3g} MB: {_names(some)}")
        elif isinstance(event, Wait):
            lines.append(f"wait for {_names([nodes[i] for i in event.starts])}")
    return lines


def _names(nodes: Sequence[Node]) -> str:
    names = [node.name for node in nodes]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
