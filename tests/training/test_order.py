"""The order of a step as a list: a pure function, tried with made-up nodes."""

import dataclasses
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdistadam.training import order
from jdistadam.training.order import Node, Policy, Run, Start, Tie, Wait

KINDS = ("product", "plain", "gather", "exchange", "effect")
ARGUMENTS = ("a0", "a1", "a2", "a3")


class Program:
    """A step that a test writes down, node by node."""

    def __init__(self):
        self.nodes, self.values, self.count = [], list(ARGUMENTS), itertools.count()

    def add(self, *needs, visible=True, **kwargs):
        made = f"v{next(self.count)}"
        self.nodes.append(Node(needs, (made,), **({"name": made} | kwargs)))
        if visible:
            self.values.append(made)
        return made

    def product(self, *needs):
        made = self.add(*needs, is_product=True)
        self.nodes[-1] = dataclasses.replace(self.nodes[-1], signals=(made,))
        return made

    def copy(self, source, num_bytes=1, is_gather=True):
        start = dict(is_start=True, is_gather=is_gather, num_bytes=num_bytes)
        target = self.add(source, visible=False, travels_with=is_gather, **start)
        return self.add(target, is_wait=True)

    def sum(self, *needs):
        made = self.add(*needs, is_sum=True)
        self.nodes[-1] = dataclasses.replace(self.nodes[-1], signals=(made,))
        return made

    def update(self, *needs):
        made = self.add(*needs, is_update=True)
        self.nodes[-1] = dataclasses.replace(self.nodes[-1], signals=(made,))
        return made


def program_of(choices, num_updates):
    """A model of random operations, then an optimizer that updates and gathers."""
    program, sent = Program(), []
    for kind, i, j, num_bytes in choices:
        one, two = (program.values[k % len(program.values)] for k in (i, j))
        if kind == "product":
            program.product(one, two)
        elif kind == "plain":
            program.add(one, two)
        elif kind == "effect":
            program.add(one, has_effects=True, is_ordered=True)
        elif kind == "gather":  # of an argument, or of what a product made
            is_made = any(one in node.makes and node.is_product for node in program.nodes)
            program.copy(one if is_made else ARGUMENTS[i % 4], num_bytes)
        else:  # of a gradient
            sent.append(program.copy(program.product(one, two), num_bytes, is_gather=False))
            program.values.pop()
    program.product(program.values[-1], ARGUMENTS[0])
    sums = [program.sum(x, ARGUMENTS[1]) for x in sent] or program.values[-1:]
    results = [program.copy(program.update(x)) for x in sums[:num_updates]]
    results.append(program.add(program.values[-1], has_effects=True, is_ordered=True))
    return program.nodes, results


programs = st.builds(
    program_of,
    st.lists(st.tuples(st.sampled_from(KINDS), *[st.integers(0, 50)] * 2, st.integers(1, 4)), max_size=25),
    st.integers(1, 4),
)  # fmt: skip
policies = st.builds(
    Policy, st.sampled_from([1, 3, math.inf]), st.sampled_from([2, 5, math.inf]), st.booleans()
)


def needed_by(nodes, values):
    """All values on which some depend, and the nodes that make them."""
    made_by = {v: i for i, node in enumerate(nodes) for v in node.makes}
    stack, found = list(values), set()
    while stack:
        v = stack.pop()
        if v not in found:
            found.add(v)
            stack += nodes[made_by[v]].needs if v in made_by else ()
    return found


def check(nodes, results, policy, events):
    """Raises AssertionError unless an order keeps what the step means, and what it is for."""
    known, ran = set(ARGUMENTS), []
    on_way, ahead = {}, set()  # starts without their wait; those of arguments alone
    simple = order._Roles(nodes, ARGUMENTS, results).simple
    for k, event in enumerate(events):
        if isinstance(event, Tie):
            assert len(set(event.values)) > 1 and known.issuperset(event.values)
            continue
        if isinstance(event, Wait):
            assert set(event.starts) <= on_way.keys(), "a wait before its start"
            assert {nodes[i].needs[0] for i in event.waits} == {
                nodes[i].makes[0] for i in event.starts
            }
            assert event.after is None or event.after in known
            check_is_needed(nodes, results, events, k)
            for i in event.starts:
                del on_way[i]
        mine = (
            event.waits
            if isinstance(event, Wait)
            else event.nodes
            if isinstance(event, Start)
            else (event.node,)
        )
        for i in mine:
            assert known.issuperset(nodes[i].needs), "a node before what it needs"
            known.update(nodes[i].makes)
        if isinstance(event, Start):
            check_bytes(
                nodes, policy, events, k, sum(on_way[i] for i in ahead & on_way.keys()), simple
            )
            on_way |= {i: nodes[i].num_bytes for i in event.nodes}
            ahead |= {
                i for i in event.nodes if nodes[i].is_gather and simple.issuperset(nodes[i].needs)
            }
            assert len({nodes[i].travels_with for i in event.nodes}) == 1
        ran += mine
    assert len(ran) == len(set(ran)) and known.issuperset(results)
    effects = [i for i in ran if nodes[i].has_effects]
    assert effects == [i for i, node in enumerate(nodes) if node.has_effects], "effects in order"
    sources = [v for node in nodes if node.is_start for v in node.needs]
    sent, roles = needed_by(nodes, sources), order._Roles(nodes, ARGUMENTS, results)
    model = [i for i in ran if i < roles.end and not (roles.is_lazy[i] or roles.is_start[i])]
    model = [i for i in model if nodes[i].is_product or sent.isdisjoint(nodes[i].makes)]
    assert model == sorted(model), "the model keeps its order"


def check_is_needed(nodes, results, events, k):
    """A wait is where its result is first needed: what runs next needs it, or only makes it so."""
    made = {v for i in events[k].waits for v in nodes[i].makes}
    is_lazy = order._Roles(nodes, ARGUMENTS, results).is_lazy
    for event in events[k + 1 :]:
        if isinstance(event, Run):
            if not made.isdisjoint(needed_by(nodes, nodes[event.node].needs)):
                return
            if nodes[event.node].is_sum:  # of exchanges that started before
                continue
            is_for_results = is_lazy[event.node] and not nodes[event.node].has_effects
            assert is_for_results and not nodes[event.node].is_anchor, "a wait before it is needed"
    assert not made.isdisjoint(needed_by(nodes, results)) or any(
        not made.isdisjoint(nodes[i].needs)
        for e in events[k:]
        if isinstance(e, Start)
        for i in e.nodes
    )


def check_bytes(nodes, policy, events, k, before, simple):
    """Gathers of arguments start while few bytes are on their way, or if they are needed next."""
    group = events[k].nodes
    if not (nodes[group[0]].is_gather and simple.issuperset(nodes[group[0]].needs)):
        return
    waits = [event for event in events[k + 1 :] if isinstance(event, Wait)][:1]
    is_next = bool(waits) and not set(group).isdisjoint(waits[0].starts)
    without_last = before + sum(nodes[i].num_bytes for i in group[:-1])
    assert without_last < policy.ahead_bytes or is_next, "too many bytes ahead"


@settings(max_examples=300, deadline=None, derandomize=True)
@given(programs, policies)
def test_an_order_keeps_what_a_step_means(program, policy):
    nodes, results = program
    check(nodes, results, policy, order.overlapping(nodes, ARGUMENTS, results, policy))


def without_demands(monkeypatch):
    monkeypatch.setattr(order._Overlapping, "_demand", lambda self, values: None)


def with_waits_at_once(monkeypatch):
    start = order._Overlapping._start_together

    def start_and_wait(self):
        group = tuple(self._together)
        start(self)
        if group and all(
            not any(self._done[i] for i in [self._roles.wait_of[self._nodes[k].makes[0]]])
            for k in group
        ):
            self._wait_for(group)

    monkeypatch.setattr(order._Overlapping, "_start_together", start_and_wait)


def with_all_ahead(monkeypatch):
    start = order._Overlapping._start_ahead

    def start_all(self, until=None):
        self._policy = dataclasses.replace(self._policy, ahead_bytes=math.inf)
        start(self, until)

    monkeypatch.setattr(order._Overlapping, "_start_ahead", start_all)


def with_late_effects(monkeypatch):
    is_lazy = order._Roles._is_lazy
    late = lambda self, i, lazy: self._nodes[i].has_effects or is_lazy(self, i, lazy)  # noqa: E731
    monkeypatch.setattr(order._Roles, "_is_lazy", late)


def without_a_wait(monkeypatch):
    wait_for = order._Overlapping._wait_for

    def lost(self, group):
        wait_for(self, group)
        self.events = [event for event in self.events if not isinstance(event, Wait)]

    monkeypatch.setattr(order._Overlapping, "_wait_for", lost)


def with_more_hoisted(monkeypatch):
    hoisted = order._Roles._hoisted

    def more(self):
        is_plain = [i > 4 and node.name == "plain" for i, node in enumerate(self._nodes)]
        return [x or plain for x, plain in zip(hoisted(self), is_plain, strict=True)]

    monkeypatch.setattr(order._Roles, "_hoisted", more)


def with_mixed_copies(monkeypatch):
    add = order._Overlapping._add

    def mixed(self, i):
        self._nodes = [dataclasses.replace(node, travels_with=None) for node in self._nodes]
        add(self, i)

    monkeypatch.setattr(order._Overlapping, "_add", mixed)


FAULTS = [
    without_demands, with_waits_at_once, with_all_ahead, with_late_effects, without_a_wait,
    with_mixed_copies,
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(monkeypatch, fault):
    """By the properties above, on one program."""
    program = Program()
    gathered = [program.copy(ARGUMENTS[i % 4], 3) for i in range(3)]
    x = y = program.product(ARGUMENTS[0], gathered[0])
    program.add(x, has_effects=True, is_ordered=True)
    x = program.product(x, gathered[1])
    x = program.product(x, program.add(y, name="plain"))
    sent = program.copy(x, 2, is_gather=False)
    x = program.product(program.copy(x), gathered[2])
    results = [program.copy(program.update(program.sum(sent), x))]
    results.append(program.add(results[0], has_effects=True, is_ordered=True))
    policy = Policy(together_bytes=math.inf if fault is with_mixed_copies else 1, ahead_bytes=4)
    find = lambda: order.overlapping(program.nodes, ARGUMENTS, results, policy)  # noqa: E731
    check(program.nodes, results, policy, find())
    fault(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        check(program.nodes, results, policy, find())


def texts(nodes, events):
    """Events as words."""
    name = lambda i: nodes[i].name  # noqa: E731
    found = []
    for event in events:
        if isinstance(event, Run):
            found.append(name(event.node))
        elif isinstance(event, Start):
            found.append("start " + "+".join(map(name, event.nodes)))
        elif isinstance(event, Wait):
            found.append("wait " + "+".join(map(name, event.starts)))
    return found


def test_gradients_are_sent_beside_the_products_that_follow():
    """Two layers: the gradient of the second one travels while that of the first one is made."""
    program = Program()
    y = program.product("a0", "a1")
    second, first = program.product(y, "a2"), program.product(y, "a3")
    sent = [program.copy(x, is_gather=False) for x in (second, first)]
    results = [program.update(program.sum(x)) for x in sent]
    events = order.overlapping(program.nodes, ARGUMENTS, results, Policy(together_bytes=1))
    assert texts(program.nodes, events) == [
        "v0", "v1", "start v3", "v2", "start v5", "wait v3", "v7", "v8", "wait v5", "v9", "v10"
    ]  # fmt: skip
    # The product after a start waits for it, and the wait for a start waits for the product.
    assert Tie(("v0", "v3")) in events and Wait((3,), (4,), "v2") in events


def test_sums_for_a_norm_run_as_parts_arrive():
    """Not as the norm names them: the last parts travel beside the sums of others."""
    program = Program()
    y = program.product("a0", "a1")
    second, first = program.product(y, "a2"), program.product(y, "a3")
    sent = [program.copy(x, is_gather=False) for x in (second, first)]
    sums = [program.sum(x) for x in sent[::-1]]
    norm = program.add(*sums, name="norm")
    results = [program.update(x, norm) for x in sums]
    events = order.overlapping(program.nodes, ARGUMENTS, results, Policy(together_bytes=1))
    assert texts(program.nodes, events) == [
        "v0", "v1", "start v3", "v2", "start v5", "wait v3", "v8", "wait v5", "v7", "norm", "v10", "v11"
    ]  # fmt: skip


def test_gathers_start_as_results_are_needed():
    """The second gather is needed first; the third one only when bytes have arrived."""
    program = Program()
    later, first, last = (program.copy(x, num_bytes=2) for x in ("a1", "a2", "a3"))
    x = program.product("a0", first)
    x = program.product(x, later)
    results = [program.product(x, last)]
    policy = Policy(together_bytes=1, ahead_bytes=3)
    events = order.overlapping(program.nodes, ARGUMENTS, results, policy)
    assert texts(program.nodes, events) == [
        "start v2", "start v0", "wait v2", "start v4", "v6", "wait v0", "v7", "wait v4", "v8"
    ]  # fmt: skip


def test_updates_run_as_soon_as_gradients_are_known():
    """And the products that follow wait for all but the last one; the old parameter is read before."""
    program = Program()
    y = program.product("a0", "a1")
    gradients = [program.product(y, "a2"), program.product(y, "a0"), program.product(y, "a3")]
    news = [
        program.add(x, old, is_update=True)
        for x, old in zip(gradients, ("a1", "a2", "a3"), strict=True)
    ]
    events = order.early(program.nodes, ARGUMENTS, ["a0", *news], lag=1)
    runs = [event.node for event in events if isinstance(event, Run)]
    assert runs == [0, 1, 4, 2, 5, 3, 6]
    assert Tie(("v1", "v0")) in events  # the update of a1 waits for the last product with it
    assert Tie(("v0", "v4")) in events  # the third product waits for the first update


@settings(max_examples=100, deadline=None, derandomize=True)
@given(programs, st.sampled_from([0, 1, math.inf]))
def test_early_updates_keep_what_a_step_means(program, lag):
    nodes, results = program
    events = order.early(nodes, ARGUMENTS, results, lag)
    known, runs = set(ARGUMENTS), []
    for event in events:
        if isinstance(event, Tie):
            assert known.issuperset(event.values)
            continue
        assert known.issuperset(nodes[event.node].needs)
        known.update(nodes[event.node].makes)
        runs.append(event.node)
    assert sorted(runs) == list(range(len(nodes)))
    end = max(i for i, node in enumerate(nodes) if node.is_product)
    assert [i for i in runs if i <= end] == list(range(end + 1))
