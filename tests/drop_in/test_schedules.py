"""Schedules: when they are called, and at which count.

They look at their own count in optax's state, which may not be the one of Adam.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdistadam as jda
from support.bits import assert_same_bits, assert_trees_same_bits
from support.compilations import num_compilations
from support.samples import few, often

RATE, DECAY = optax.linear_schedule(0.5, 0.0, 100), optax.linear_schedule(0.3, 0.1, 50)
MASK = {"w": True, "b": False}


@pytest.mark.slow
@pytest.mark.parametrize("is_kept", [False, True], ids=["params", "main"])
@pytest.mark.parametrize(
    "options",
    [{}, dict(weight_decay=DECAY), dict(weight_decay=DECAY, mask=MASK)],
    ids=["rate", "decay", "masked"],
)
def test_a_schedule_that_was_restarted_starts_again(options, is_kept):
    """The moments and their bias correction stay: as optax, within the roundings of its formula."""
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(5, 3)), "b": rng.normal(size=3)}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    kept = dict(main_params_dtype=jnp.float32) if is_kept else {}
    ours, theirs = jda.fused_adamw(RATE, **options, **kept), optax.adamw(RATE, **options)
    _, state = theirs.update(params, theirs.init(params), params)
    for _ in range(9):
        _, state = theirs.update(params, state, params)

    def from_now(schedule):
        return lambda count: schedule(count - 10)

    moved = {"weight_decay": from_now(DECAY)} if "weight_decay" in options else {}
    shifted = jda.fused_adamw(from_now(RATE), **options | moved, **kept)
    restarted = (state[0], *jax.tree.map(jnp.zeros_like, state[1:]))
    results = []
    for tx, start in ((theirs, restarted), (ours, restarted), (shifted, state)):
        if is_kept and tx is not theirs:
            start = tx.init(params)._replace(inner=start)
        updates = []
        for _ in range(3):
            update, start = tx.update(params, start, params)
            updates.append(update)
        results.append((updates, start))
    assert_trees_same_bits(results[1][0], results[2][0])
    for got, want in zip(*(jax.tree.leaves(x) for x, _ in results[:2]), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
    counts = jax.tree.leaves((results[1][1].inner if is_kept else results[1][1])[1:])
    assert [int(x) for x in counts] == [3] * len(counts)


def of_variable(variable):
    return lambda count: variable["rate"]


def of_variable_and_count(variable):
    return lambda count: variable["rate"] / (count + 1)


def of_table(variable):
    return lambda count: jnp.full(3, variable["rate"])[count % 3]


def with_branch(variable):
    return lambda count: variable["rate"] if count < 4 else 1e-3


def of_numpy(variable):
    return lambda count: np.interp(count, [0, 6], [variable["rate"], 0.0])


KINDS = (of_variable, of_variable_and_count, of_table, with_branch, of_numpy)
PARTS = {"optax": (optax, optax.chain), "ours": (jda, jda.chain)}
MAKERS = {
    "rate": lambda whose, s: (jda.fused_adamw if whose == "ours" else optax.adamw)(s),
    "decay": lambda whose, s: (jda.fused_adamw if whose == "ours" else optax.adamw)(
        1e-2, weight_decay=s
    ),
    "parts": lambda whose, s: PARTS[whose][1](
        PARTS[whose][0].scale_by_adam(),
        PARTS[whose][0].add_decayed_weights(s),
        PARTS[whose][0].scale_by_learning_rate(s),
    ),
    "MultiSteps": lambda whose, s: PARTS[whose][0].MultiSteps(MAKERS["rate"](whose, s), 1),
    "apply_if_finite": lambda whose, s: PARTS[whose][0].apply_if_finite(
        MAKERS["rate"](whose, s), 2
    ),
}


def trained(tx, variable, method):
    """Parameters after each of six steps outside of jit; the variable is 0 from the third on."""
    params = {"w": jnp.linspace(0.5, 1.5, 4)}
    state, found = tx.init(params), []
    for i in range(6):
        variable["rate"] = 0.3 if i < 2 else 0.0
        grads = jax.tree.map(lambda x, i=i: jnp.sin(3 * x + i), params)
        if method == "step":
            params, state = tx.step(grads, state, params)
        else:
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        found.append(params["w"])
    return jnp.stack(found)


@few(1)
@pytest.mark.parametrize("method", ["step", "update"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("maker", MAKERS)
@often(lambda maker, kind: maker == "rate" or kind is of_variable_and_count)
def test_outside_of_jit_schedules_are_called_in_every_step(maker, kind, method):
    """They saw the first value of a variable alone, and could not read the count, unlike optax."""
    if maker in ("MultiSteps", "apply_if_finite") and kind in (with_branch, of_numpy):
        return  # optax traces what it wraps
    results = []
    for whose in ("ours", "optax"):
        variable = {"rate": 0.3}
        tx = MAKERS[maker](whose, kind(variable))
        results.append(trained(tx, variable, method if whose == "ours" else "update"))
    # six steps of at most 0.3, each within a few roundings of numbers of order one
    np.testing.assert_allclose(*results, rtol=0, atol=6 * 8 * 2.0**-24)


def test_a_program_that_is_traced_later_calls_schedules_again():
    """With the same optimizer and shapes, the second program had the first one's value."""
    variable, params = {"rate": 0.5}, {"w": jnp.ones(3)}
    tx = jda.fused_adamw(of_variable(variable), weight_decay=0.0)
    state, found = tx.init(params), []
    for rate in (0.5, 0.25):
        variable["rate"] = rate
        new, _ = jax.jit(lambda *args: tx.step(*args))(params, state, params)
        found.append(float(1 - new["w"][0]))
    np.testing.assert_allclose(found, [0.5, 0.25], rtol=1e-5)  # the first bias correction is 1e-3


def by_division(count):
    return (count + 1) / 7.0 / 30.0


@few(1)
@pytest.mark.parametrize("schedule", [by_division, RATE, optax.cosine_decay_schedule(0.1, 9)])
def test_schedules_have_the_same_bits_outside_of_jit(schedule):
    """One operation at a time has others: a compiler multiplies by the inverse of a constant."""
    params = {"w": jnp.asarray(np.random.default_rng(2).normal(size=9), jnp.float32)}
    tx = jda.fused_adamw(schedule, weight_decay=DECAY)
    results = []
    for step in (tx.step, jax.jit(tx.step)):
        now, state = params, tx.init(params)
        for _ in range(8):
            now, state = step(now, state, now)
        results.append((now, state))
    assert_trees_same_bits(*results)
    if schedule is by_division:
        counts, jitted = map(jnp.int32, range(8)), jax.jit(schedule)
        assert any(schedule(x) != jitted(x) for x in counts)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_what_a_schedule_computes_in_16_bits_has_16_bits_in_a_step(dtype):
    """XLA computes it in float32, and would drop the rounding before a cast to float32."""

    def rate(count):
        return jnp.asarray(1e-2, dtype) * (1 - count.astype(dtype) / jnp.asarray(100, dtype))

    params = {"w": jnp.asarray(np.random.default_rng(2).normal(size=9), jnp.float32)}
    found = []
    for now in (rate, lambda count: float(rate(count))):  # the second one is called outside of jit
        tx, new = jda.fused_adamw(now, weight_decay=now), params
        state = tx.init(params)
        for _ in range(8):
            new, state = tx.step(params, state, new)
        found.append(new)
    assert_trees_same_bits(*found)


def test_new_rates_and_schedules_compile_nothing():
    params = {"w": jnp.ones(19)}
    state, scheduled = (jda.fused_adamw(x).init(params) for x in (1e-3, RATE))

    def steps(rate):
        jda.fused_adamw(rate, weight_decay=2 * rate).step(params, state, params)
        jda.fused_adamw(lambda count: rate).step(params, scheduled, params)
        jda.fused_adamw(lambda count: 1e-3 / (count + 1)).step(params, scheduled, params)
        array = jnp.asarray(rate)
        jda.fused_adamw(lambda count: array / (count + 1)).step(params, scheduled, params)

    steps(1e-3)
    steps(1)  # an array of another dtype
    before = num_compilations()
    for rate in (2e-3, 0.3, 1):
        steps(rate)
    assert num_compilations() == before


def test_a_whole_number_is_a_rate():
    """Larger than int32, too: it is an operand of the program, as a float."""
    params = {"w": jnp.ones(3)}
    got, want = (jda.fused_adamw(x, weight_decay=0.0) for x in (2**40, 2.0**40))
    state = want.init(params)
    updates = (tx.update(params, state, params)[0]["w"] for tx in (got, want))
    assert_same_bits(*updates)


@few(1)
@pytest.mark.parametrize("transform", [jax.vmap, jax.grad, lambda f: jax.vmap(jax.grad(f))])
@pytest.mark.parametrize("jitted", [False, True])
def test_a_schedule_may_read_what_is_differentiated_or_batched(transform, jitted):
    params = {"w": jnp.ones(3)}
    results = []
    for make in (jda.fused_adamw, optax.adamw):

        def moved(rate, make=make):
            tx = make(lambda count: rate * jnp.exp(-count), eps_root=1e-8)
            state, total = tx.init(params), 0.0
            for _ in range(2):
                updates, state = tx.update(params, state, params)
                total += jnp.sum(jnp.square(updates["w"]))
            return total

        rates = jnp.asarray(0.3) if transform is jax.grad else jnp.array([0.1, 0.2, 0.3])
        function = transform(moved)
        results.append((jax.jit(function) if jitted else function)(rates))
    np.testing.assert_allclose(*results, rtol=1e-5)


READERS = {  # what a schedule reads is in a program inside of it, or on the host
    "jit": lambda table: jax.jit(lambda count: jnp.asarray(table)[count]),
    "jit of a jit": lambda table: jax.jit(jax.jit(lambda count: jnp.asarray(table)[count])),
    "cond": lambda table: (
        lambda count: jax.lax.cond(
            count < 9, jax.jit(lambda i: jnp.asarray(table)[i]), lambda i: 0.0 * i, count
        )
    ),
    "callback": lambda table: (
        lambda count: jax.pure_callback(
            lambda i: np.float32(table[int(i)]), jax.ShapeDtypeStruct((), jnp.float32), count
        )
    ),
}


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
def test_schedules_that_differ_in_what_they_read_share_no_program(read, kind):
    """Their text is equal, and the second optimizer had the learning rates of the first."""
    params = {"w": jnp.ones(3)}
    for rates in ([0.1, 0.2], [0.01, 0.5]):
        schedule = READERS[read](kind(rates, jnp.float32))
        for step in ((tx := jda.fused_adamw(schedule, weight_decay=0.0)).step, jax.jit(tx.step)):
            new, state = params, tx.init(params)
            for rate in rates:
                old = new
                new, state = step(params, state, new)
                moved = np.asarray(old["w"] - new["w"])
                # 1 - b2 is 0.001, of a number that is rounded at 2**-24.
                np.testing.assert_allclose(moved, rate, rtol=2**-24 / 0.001)
        if read != "callback":  # traced anew, but compiled once
            compiled = num_compilations()
            tx.step(params, state, new)
            assert num_compilations() == compiled


@pytest.mark.parametrize("value", [None, "0.1", jnp.ones(2), 1j])
def test_schedules_that_return_no_number_raise(value):
    tx = jda.fused_adamw(lambda count: value)
    params = {"w": jnp.ones(3)}
    for step in (tx.step, jax.jit(tx.step)):
        with pytest.raises(jda.HyperparameterError, match=r"^learning_rate: not one number"):
            step(params, tx.init(params), params)


@pytest.mark.parametrize("jitted", [False, True])
def test_no_tracer_leaks_from_a_schedule(jitted):
    """jax.checking_leaks raised in every step with one."""
    schedule = optax.cosine_decay_schedule(1e-2, 10)
    params = {"w": jnp.ones(4)}
    tx = jda.fused_adamw(schedule, weight_decay=schedule)
    step, state = jax.jit(tx.step) if jitted else tx.step, tx.init(params)
    with jax.checking_leaks():
        step(params, state, params)
