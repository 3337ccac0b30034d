"""What parts of a chain do goes into the kernel as numbers: bits of factors, clips and decays."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from jdistadam.drop_in.effects import clip_factor
from support.bits import assert_trees_same_bits
from support.h200 import SIZES, placed
from support.samples import few
from support.steps import WAYS

ADAM = dict(b1=0.87, b2=0.9973, eps=1e-7, eps_root=1e-9)
HYPER = ADAM | dict(weight_decay=0.13)
SCHEDULE = optax.linear_schedule(0.03, 0.01, 7)
OTHER = optax.linear_schedule(0.5, 1.5, 9)
GROUPS = dict(
    param_labels={"w": "one", "b": "two", "c": "still"},
    groups={"one": dict(lr_scale=0.5), "two": dict(weight_decay=0.3), "still": dict(frozen=True)},
)
CODES = dict(mu_dtype="block8", nu_dtype="block8", rounding="stochastic", seed=3)

# Arguments of fused_adamw, and the dtypes of params and gradients.
CONFIGS = {
    "float32": ({}, "float32", "float32"),
    "narrow gradients": ({}, "float32", "bfloat16"),
    "main": (dict(main_params_dtype=jnp.float32), "bfloat16", "bfloat16"),
    "remainder": (dict(main_params_dtype="remainder16"), "bfloat16", "bfloat16"),
    "codes": (CODES, "float32", "bfloat16"),
    "groups": (GROUPS, "float32", "float32"),
    "schedules": (dict(learning_rate=SCHEDULE, weight_decay=OTHER), "float32", "float32"),
}


def random(seed, dtype, scale=1.0):
    rng = np.random.default_rng(seed)
    shapes = {"w": (65, 67), "b": (33,), "c": (5,)}
    eighths = {k: np.round(8 * rng.normal(size=s)) / 8 for k, s in shapes.items()}
    return {k: jnp.asarray(x * scale, dtype) for k, x in eighths.items()}


def run(tx, config, *, steps=10, take="step", jitted=True, scale=lambda i: 1.0, before=lambda x: x):
    """Params and state after some steps."""
    _, param_dtype, grad_dtype = CONFIGS[config]
    params = random(0, param_dtype)
    state = tx.init(params)

    def step(grads, state, params):
        return WAYS[take](tx, grads, state, params)

    step = jax.jit(step) if jitted else step
    for i in range(steps):
        params, state = step(before(random(i + 1, grad_dtype, scale(i))), state, params)
    return params, state


def adamw(config, rate=0.02, **changes):
    return jda.fused_adamw(**dict(learning_rate=rate) | HYPER | CONFIGS[config][0] | changes)


def by_hand(grads):
    """Clipped gradients, written out in float32 by numpy."""
    factor = np.asarray(clip_factor(grads, 1.0))
    return jax.tree.map(lambda g: np.asarray(g, np.float32) * factor, grads)


def rewritten(max_norm):
    """Gradients times a clip's factor, written out in float32."""

    def update(grads, params):
        factor = jax.lax.optimization_barrier(clip_factor(grads, max_norm))
        return jax.tree.map(lambda g: g.astype(jnp.float32) * factor, grads)

    return optax.stateless(update)


def unlike(i):  # half of the steps are clipped; sums of squares are exact in every order
    return 2.0**-7 if i % 2 else 4.0


@few(1)
@pytest.mark.parametrize("config", CONFIGS)
def test_a_clip_in_the_kernel_has_the_bits_of_rewritten_gradients(config):
    clipped = jda.chain(optax.clip_by_global_norm(1.0), adamw(config))
    assert clipped.is_fused
    got = run(clipped, config, scale=unlike)
    want = run(adamw(config), config, scale=unlike, before=by_hand)
    assert_trees_same_bits((got[0], got[1][1]), want)
    assert_trees_same_bits(run(clipped, config, scale=unlike, jitted=False), got)
    plain = run(adamw(config), config, scale=unlike)
    assert not np.array_equal(plain[0]["w"], got[0]["w"])


@few(1)
@pytest.mark.parametrize("max_norm", [0.7, np.float32(0.7), 1e6, 0.0], ids=repr)
def test_a_clip_is_that_of_optax_but_for_its_rounding(max_norm):
    """Also of inject_hyperparams, whose maximum is an array, and to nothing."""
    theirs = optax.chain(optax.clip_by_global_norm(max_norm), adamw("float32"))
    ours = jda.chain(optax.clip_by_global_norm(max_norm), adamw("float32"))
    made = jda.inject_hyperparams(
        lambda max_norm: jda.chain(optax.clip_by_global_norm(max_norm), adamw("float32"))
    )(max_norm)
    want, (got, state) = run(theirs, "float32", take="update"), run(ours, "float32")
    assert jax.tree.structure(state) == jax.tree.structure(want[1])
    for name in got:
        np.testing.assert_allclose(got[name], want[0][name], rtol=1e-5, atol=1e-6)
    assert_trees_same_bits(run(made, "float32")[0], got)


@few(1)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_clip_of_nonfinite_gradients_is_that_of_optax(value):
    tx, grads = optax.clip_by_global_norm(1.0), {"w": jnp.asarray([1.0, value])}
    made = jda.chain(tx, jda.fused_adam(1.0, b1=0.0, b2=0.5, eps=1e-3))
    params = {"w": jnp.ones(2)}
    _, (_, (adam, *_)) = made.step(grads, made.init(params), params)
    want, _ = tx.update(grads, tx.init(params))
    np.testing.assert_array_equal(adam.mu["w"], want["w"])


WRAPPED = {
    "MultiSteps": lambda tx: jda.MultiSteps(tx, 2),
    "apply_if_finite": lambda tx: jda.apply_if_finite(tx, 3),
    "chain": lambda tx: jda.chain(optax.trace(0.5), tx),
    "named_chain": lambda tx: jda.named_chain(("trace", optax.trace(0.5)), ("adam", tx)),
    "partition": lambda tx: jda.partition({0: tx, 1: jda.fused_adam(1e-2)}, dict(w=0, b=1, c=0)),
}


@few(1)
@pytest.mark.parametrize("wrapper", WRAPPED)
def test_a_clip_inside_of_wrappers(wrapper):
    made = [
        WRAPPED[wrapper](jda.chain(clip, adamw("float32")))
        for clip in (optax.clip_by_global_norm(1.0), rewritten(1.0))
    ]
    got, want = (run(tx, "float32", scale=unlike) for tx in made)
    assert made[0].is_fused
    assert_trees_same_bits(got, want)


@pytest.mark.parametrize("wrapper", ["chain", "named_chain", "partition"])
def test_a_clip_outside_of_wrappers(wrapper):
    """Its factor reaches what comes first inside: gradients are multiplied for other parts."""
    inner = WRAPPED[wrapper](adamw("float32"))
    made = [jda.chain(clip, inner) for clip in (optax.clip_by_global_norm(1.0), rewritten(1.0))]
    assert_trees_same_bits(*(run(tx, "float32", scale=unlike) for tx in made))


@pytest.mark.parametrize("kind", ["complex", "integer"])
def test_a_clip_of_other_numbers_is_that_of_optax(kind):
    """Gradients that the kernel does not take are rewritten; an integer's are multiplied."""
    param = jnp.asarray([3, 4]) if kind == "integer" else jnp.asarray([3 + 4j, 1j])
    grad = jnp.asarray([300.0, 4.0], jnp.float32 if kind == "integer" else jnp.complex64)
    params = {"w": jnp.ones(3), "n": param}
    grads = {"w": jnp.ones(3), "n": grad * (1.0 if kind == "integer" else 1j)}
    clip = optax.clip_by_global_norm(1.0)
    tx = jda.chain(clip, adamw("float32"))
    got, (_, state) = jax.jit(tx.step)(grads, tx.init(params), params)
    clipped = jax.jit(lambda g: clip.update(g, ())[0])(grads)
    want = jax.jit(adamw("float32").step)(clipped, tx.init(params)[1], params)
    if kind == "complex":
        assert_trees_same_bits((got, state), want)
    for x, y in zip(jax.tree.leaves((got, state)), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5)


def test_each_member_of_a_vmap_is_clipped_by_itself():
    """Against gradients written out for all members, because XLA sums norms of many otherwise."""
    clip, inner = optax.clip_by_global_norm(1.0), adamw("narrow gradients")
    txs = [jda.chain(first, inner) for first in (clip, rewritten(1.0))]
    steps = [jax.jit(jax.vmap(tx.step)) for tx in txs]
    scales = jnp.asarray([0.01, 3.0, 1.0], jnp.bfloat16)
    params = jax.tree.map(lambda x: jnp.stack([x, 2 * x, -x]), random(0, jnp.float32))
    made = [(params, jax.vmap(tx.init)(params)) for tx in txs]
    for n in range(10):
        grads = jax.tree.map(
            lambda x: jnp.stack([x * s for s in scales]), random(n + 1, jnp.bfloat16)
        )
        made = [
            step(grads, state, params) for step, (params, state) in zip(steps, made, strict=True)
        ]
    assert_trees_same_bits(*made)
    member = lambda tree: jax.tree.map(lambda x: x[1], tree)  # noqa: E731
    alone = jax.jit(txs[0].step)(member(grads), member(made[0][1]), member(made[0][0]))
    together = member(steps[0](grads, made[0][1], made[0][0]))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), alone, together)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_sharded_gradients_are_clipped_by_the_norm_of_all(axis_type):
    tx = jda.chain(optax.clip_by_global_norm(1.0), adamw("float32"), optax.scale(0.5))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    params, grads = ({"w": random(i, jnp.float32)["w"][:64]} for i in (0, 1))
    want, _ = jax.jit(tx.step)(grads, tx.init(params), params)
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, P("data"))
        params, grads = (jax.device_put(x, sharding) for x in (params, grads))
        got, _ = jax.jit(tx.step)(grads, tx.init(params), params)
    assert got["w"].sharding.spec[0] == "data"
    np.testing.assert_allclose(got["w"], want["w"], rtol=1e-6, atol=1e-7)


def test_the_derivative_of_a_clip_is_that_of_optax():
    clip, adam = optax.clip_by_global_norm(1.0), jda.fused_adamw(0.02, **HYPER)
    params, grads = random(0, jnp.float32), random(1, jnp.float32)
    state = jax.tree.map(lambda x: x + 0.1 if x.dtype == jnp.float32 else x, adam.init(params))

    def total(grads, is_ours):
        if is_ours:
            tx = jda.chain(clip, adam)
            new, _ = tx.step(grads, (optax.EmptyState(), state), params)
        else:
            new, _ = adam.step(clip.update(grads, ())[0], state, params)
        return sum(jnp.sum(jnp.sin(x)) for x in new.values())

    got, want = (jax.grad(total)(grads, is_ours) for is_ours in (True, False))
    for name in got:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-3, atol=1e-8)


def test_norms_are_those_of_clipped_gradients():
    tx = jda.chain(optax.clip_by_global_norm(0.5), adamw("float32"))
    params, grads = random(0, jnp.float32), random(1, jnp.float32)
    *_, norms = tx.step_with_norms(grads, tx.init(params), params)
    np.testing.assert_allclose(norms["grad_norm"], 0.5, rtol=1e-6)


def times(*factors):
    """A schedule of the product in float32, in this order."""

    def rate(count):
        product = jnp.float32(1.0)
        for factor in factors:
            product = product * jnp.float32(factor(count) if callable(factor) else factor)
        return product

    return rate


FACTORS = {
    "number": ([optax.scale(0.3)], [0.3]),
    "schedules": ([optax.scale_by_schedule(SCHEDULE), optax.scale_by_schedule(OTHER)], [SCHEDULE, OTHER]),
    "array": ([optax.scale(jnp.float32(0.3)), optax.scale(0.7)], [0.3, 0.7]),
}  # fmt: skip


@few(2)
@pytest.mark.parametrize("take", ["step", "update"])
@pytest.mark.parametrize("case", FACTORS)
@pytest.mark.parametrize("config", ["float32", "main", "remainder", "codes"])
def test_factors_follow_fused_adamw(config, case, take):
    """With main parameters too, which optax.chain would leave behind."""
    given, numbers = FACTORS[case]
    tx = jda.chain(adamw(config), *given)
    whole = adamw(config, rate=times(0.02, *numbers))
    got, want = (run(x, config, take=take) for x in (tx, whole))
    assert tx.is_fused
    assert_trees_same_bits(got[0], want[0])
    names = ("mu", "nu", "main_params", "codes")
    moments = [
        [x for path, x in jax.tree_util.tree_leaves_with_path(s) if any(n in str(path) for n in names)]
        for s in (got[1], want[1])
    ]  # fmt: skip
    assert moments[0]
    assert_trees_same_bits(*moments)
    like = optax.chain(adamw(config), *given).init(random(0, CONFIGS[config][1]))
    assert jax.tree.structure(got[1]) == jax.tree.structure(like)
    # Unoptimized, as in tests, XLA of jax 0.11 contracts a schedule otherwise before a product.
    if take == "step" and (case != "schedules" or jax.__version_info__ >= (0, 12)):
        assert_trees_same_bits(run(tx, config, steps=3), run(tx, config, steps=3, jitted=False))


def test_factors_follow_groups_and_injected_numbers():
    half = optax.scale(0.5)
    got = run(jda.chain(adamw("groups"), half), "groups")
    want = run(adamw("groups", rate=0.01), "groups")
    assert_trees_same_bits((got[0], got[1][0]), want)
    injected = jda.inject_hyperparams(jda.fused_adamw)(SCHEDULE, **HYPER)
    tx = jda.chain(injected, half)
    whole = jda.inject_hyperparams(jda.fused_adamw)(times(SCHEDULE, 0.5), **HYPER)
    got, want = run(tx, "float32"), run(whole, "float32")
    assert tx.is_fused
    assert_trees_same_bits(got[0], want[0])
    assert got[1][0].count == 10


def test_a_skipped_step_keeps_the_counts_of_all_factors():
    inner = jda.chain(
        optax.clip_by_global_norm(1.0), adamw("float32"), optax.scale_by_schedule(OTHER)
    )
    tx = jda.apply_if_finite(inner, 3)
    params = random(0, jnp.float32)
    state = tx.init(params)
    for i in range(4):
        grads = random(i + 1, jnp.float32)
        if i in (1, 2):
            grads["b"] = grads["b"].at[0].set(np.nan)
        old = params, state.inner_state
        params, state = tx.step(grads, state, params)
        if i in (1, 2):
            assert_trees_same_bits((params, state.inner_state), old)
    assert state.inner_state[2].count == 2


def test_masked_parts_change_the_leaves_they_select():
    """Decay of some leaves and factors of others are groups of one optimizer, in one call."""
    weights = dict(w=True, b=False, c=True)
    tx = jda.chain(
        jda.scale_by_adam(**ADAM),
        jda.masked(jda.add_decayed_weights(0.13), lambda p: {k: x.ndim > 1 for k, x in p.items()}),
        jda.masked(optax.scale(0.5), weights),
        jda.masked(optax.scale_by_schedule(OTHER), dict(w=False, b=True, c=True)),
        optax.scale_by_learning_rate(SCHEDULE),
    )
    labels = dict(w="w", b="b", c="c")
    rates = dict(w=times(0.5, SCHEDULE), b=times(OTHER, SCHEDULE), c=times(0.5, OTHER, SCHEDULE))
    groups = {k: dict(learning_rate=x) for k, x in rates.items()}
    whole = jda.fused_adamw(
        1.0, **ADAM, weight_decay=0.13, mask=dict(w=True, b=False, c=False),
        param_labels=labels, groups=groups,
    )  # fmt: skip
    assert tx.is_fused
    for take in ("step", "update"):
        got, want = (run(x, "float32", take=take) for x in (tx, whole))
        assert_trees_same_bits(got[0], want[0])
    theirs = optax.chain(
        optax.scale_by_adam(**ADAM),
        optax.add_decayed_weights(0.13, dict(w=True, b=False, c=False)),
        optax.masked(optax.scale(0.5), weights),
        optax.masked(optax.scale_by_schedule(OTHER), dict(w=False, b=True, c=True)),
        optax.scale_by_learning_rate(SCHEDULE),
    )
    params, state = run(theirs, "float32", take="update")
    assert jax.tree.structure(state) == jax.tree.structure(got[1])
    for name in params:
        np.testing.assert_allclose(got[0][name], params[name], rtol=1e-5, atol=1e-6)
    text = jax.jit(tx.step).lower(random(1, "float32"), state, params).as_text()
    assert text.count("@jdistadam_adam(") == 1


@pytest.mark.parametrize("decay", [0.13, SCHEDULE], ids=["number", "schedule"])
def test_decay_of_optax_is_recognized_unless_it_has_a_mask(decay):
    rate = optax.scale_by_learning_rate(0.02)
    tx, whole = (
        jda.chain(jda.scale_by_adam(**ADAM), part(decay), rate)
        for part in (optax.add_decayed_weights, jda.add_decayed_weights)
    )
    assert tx.is_fused
    assert_trees_same_bits(run(tx, "float32"), run(whole, "float32"))
    weights = dict(w=True, b=False, c=True)
    for masked in (
        optax.add_decayed_weights(decay, weights),
        optax.masked(optax.add_decayed_weights(decay), weights),
    ):
        unfused = jda.chain(jda.scale_by_adam(), masked, rate)
        assert "1 follows the optimizer, and hides what it does" in unfused.why_not_fused
        assert "write jda.masked" in unfused.why_not_fused
    parts = optax.chain(optax.scale(0.5), rate)
    assert "write its parts" in jda.chain(jda.scale_by_adam(), parts).why_not_fused


@pytest.mark.parametrize("take", ["step", "update"])
def test_decay_after_numbers_and_updates_set_to_zero_have_the_bits_of_groups(take):
    """The parts of big_vision, in its order: decay follows the learning rate."""
    tx = jda.chain(
        jda.scale_by_adam(**ADAM),
        optax.scale(0.3),
        jda.masked(optax.scale(0.7), dict(w=True, b=False, c=False)),
        jda.add_decayed_weights(0.003, dict(w=True, b=False, c=False)),
        jda.add_decayed_weights(0.001, dict(w=False, b=True, c=True)),
        jda.masked(optax.scale_by_schedule(OTHER), dict(w=True, b=True, c=False)),
        jda.masked(optax.set_to_zero(), dict(w=False, b=False, c=True)),
        optax.scale(-1.0),
    )
    first, second = (float(np.float32(x)) for x in (0.3, 0.7))
    groups = dict(
        w=dict(learning_rate=times(0.3, 0.7, OTHER), weight_decay=0.003 / (first * second)),
        b=dict(learning_rate=times(0.3, OTHER), weight_decay=0.001 / first),
        c=dict(learning_rate=0.0),
    )
    whole = jda.fused_adamw(
        1.0, **ADAM, weight_decay=0.0, param_labels={k: k for k in groups}, groups=groups
    )

    def nan_of_still(grads):
        return grads | {"c": grads["c"].at[0].set(np.nan)}

    assert tx.is_fused
    got, want = (run(x, "float32", take=take, before=nan_of_still) for x in (tx, whole))
    assert_trees_same_bits(got[0]["c"], random(0, "float32")["c"])
    assert_trees_same_bits([got[0][k] for k in "wb"], [want[0][k] for k in "wb"])
    assert_trees_same_bits((got[1][0].mu, got[1][0].nu), (want[1][0].mu, want[1][0].nu))


@pytest.mark.parametrize("other", [0.2, OTHER], ids=["number", "schedule"])
def test_decays_of_several_parts_are_added(other, cpu_mesh):
    inner = jda.chain(jda.scale_by_adam(**ADAM), jda.add_decayed_weights(0.1))
    rate = optax.scale_by_learning_rate(0.02)
    tx = jda.chain(inner, jda.add_decayed_weights(other), rate)
    both = 0.1 + 0.2 if other is not OTHER else lambda count: jnp.float32(0.1) + OTHER(count)
    whole = jda.fused_adamw(0.02, **ADAM, weight_decay=both)
    assert tx.is_fused
    assert_trees_same_bits(run(tx, "float32")[0], run(whole, "float32")[0])
    with pytest.raises(jda.PolicyError):
        jda.distributed(tx, mesh=cpu_mesh(2))


NO_CONSTANTS = {
    "schedule": [optax.scale_by_schedule(SCHEDULE)],
    "zero": [optax.scale(0.0)],
    "negative": [optax.scale(-0.1)],
    "set to zero": [optax.set_to_zero()],
}


@pytest.mark.parametrize("case", NO_CONSTANTS)
def test_decay_after_what_cannot_divide_it_is_not_joined(case):
    parts = [*NO_CONSTANTS[case], jda.add_decayed_weights(0.13), optax.scale(-0.1)]
    tx = jda.chain(jda.scale_by_adam(**ADAM), *parts)
    assert "put it directly after jda.scale_by_adam" in tx.why_not_fused
    whole = optax.chain(jda.scale_by_adam(**ADAM), *parts)
    assert_trees_same_bits(run(tx, "float32"), run(whole, "float32", take="update"))


@pytest.mark.parametrize("before", [[], [optax.clip_by_global_norm(1.0)]], ids=len)
def test_numbers_out_of_range_raise_when_the_chain_is_made(before):
    with pytest.raises(jda.HyperparameterError, match=r"^weight_decay: out of range"):
        jda.chain(*before, jda.scale_by_adam(), jda.add_decayed_weights(-0.1), optax.scale(-1.0))
    with pytest.raises(jda.HyperparameterError, match=r"^learning_rate: out of range"):
        jda.chain(*before, jda.fused_adamw(0.1), optax.scale(np.inf))


def test_other_parts_are_not_taken_for_those_of_optax():
    """The same shape and state, but other code: they are called as they are."""

    def update(updates, state, params=None):
        return jax.tree.map(lambda g: 2 * g, updates), state

    mine = optax.GradientTransformation(lambda p: optax.EmptyState(), update)
    for tx in (mine, optax.scale(jnp.ones(3)), optax.scale(1j), optax.clip(1.0)):
        assert not jda.chain(adamw("float32"), tx).is_fused
        assert not jda.chain(jda.scale_by_adam(), tx, optax.scale(-1.0)).is_fused
    extra = optax.with_extra_args_support(optax.scale(0.5))
    assert not jda.chain(adamw("float32"), extra).is_fused
    for tx in (jda.add_decayed_weights(0.1), optax.clip_by_global_norm(1.0)):
        assert not jda.chain(adamw("float32"), tx).is_fused


CHAINS = {
    "parts": lambda: jda.chain(
        jda.scale_by_adam(**ADAM), jda.add_decayed_weights(0.13), optax.scale_by_schedule(SCHEDULE),
        optax.scale(-1.0),
    ),
    "after fused_adamw": lambda: jda.chain(
        jda.fused_adamw(-1.0 + 2.0, **HYPER), optax.scale_by_schedule(SCHEDULE)
    ),
}  # fmt: skip


@few(1)
@pytest.mark.parametrize("case", CHAINS)
def test_chains_with_factors_are_distributed(cpu_mesh, case):
    results = []
    for adam in (CHAINS[case](), jda.fused_adamw(SCHEDULE, **HYPER)):
        tx = jda.distributed(adam, mesh=cpu_mesh(2), max_grad_norm=1.0)
        step = jda.train_step(lambda p, x: jnp.mean(jnp.square(x @ p["w"])), tx)
        state = jda.TrainState.create({"w": jnp.ones((64, 8))}, tx)
        for i in range(10):
            x = np.random.default_rng(i).normal(size=(4, 64)).astype(np.float32)
            state, metrics = step(state, x)
        results.append((state.params, state.opt_state, metrics))
        exported = jda.to_optax_state(state, tx)
        back = jda.from_optax_state(*exported[:2], tx, exported[2])
        assert_trees_same_bits(back.opt_state.mu, state.opt_state.mu)
        if adam is not None and case == "parts" and len(results) == 1:
            like = adam.init({"w": jnp.ones((64, 8))})
            assert jax.tree.structure(exported[1]) == jax.tree.structure(like)
    assert_trees_same_bits(*results)


def test_numbers_of_chains_are_injected_into_a_distributed_optimizer(cpu_mesh):
    """Set in the state between steps, and multiplied by the factors in each."""

    def half(learning_rate, weight_decay):
        adam = jda.fused_adamw(learning_rate, **HYPER | dict(weight_decay=weight_decay))
        return jda.chain(adam, optax.scale(0.5), optax.scale_by_schedule(OTHER))

    def whole(learning_rate, weight_decay):
        rate = times(lambda _: learning_rate, 0.5, OTHER)
        return jda.fused_adamw(rate, **HYPER | dict(weight_decay=weight_decay))

    results = []
    for make in (half, whole):
        tx = jda.distributed(jda.inject_hyperparams(make)(0.02, 0.13), mesh=cpu_mesh(2))
        step = jda.train_step(lambda p, x: jnp.mean(jnp.square(x @ p["w"])), tx)
        state = jda.TrainState.create({"w": jnp.ones((64, 8))}, tx)
        for i in range(10):
            x = np.random.default_rng(i).normal(size=(4, 64)).astype(np.float32)
            state, _ = step(state, x)
            state.opt_state.hyperparams["learning_rate"] = 0.03 + 0.01 * i
        results.append(state.params)
    assert_trees_same_bits(*results)


REFUSED = {
    "max_grad_norm": lambda: jda.chain(optax.clip_by_global_norm(1.0), adamw("float32")),
    "param_labels": lambda: jda.partition({0: adamw("float32")}, 0),
    "and groups": lambda: jda.masked(adamw("float32"), True),
    "learning rate": lambda: jda.scale_by_adam(),
}


@pytest.mark.parametrize("said", REFUSED)
def test_distributed_says_what_to_do_about_other_chains(cpu_mesh, said):
    with pytest.raises(jda.PolicyError, match=said):
        jda.distributed(REFUSED[said](), mesh=cpu_mesh(2))


def bytes_moved(text):
    """Bytes of large operands and results of the instructions of a compiled program."""
    entry = text[text.index("\nENTRY") :]
    sizes, total = {}, 0
    for name, kinds, op, operands in re.findall(
        r"^\s+(?:ROOT )?%(\S+) = (.*?) (fusion|custom-call|parameter|copy|get-tuple-element)\((.*?)\)",
        entry,
        re.M,
    ):
        arrays = re.findall(r"(\w+)\[([\d,]+)\]", kinds)
        size = sum(SIZES[kind] * int(np.prod([int(n) for n in dims.split(",")])) for kind, dims in arrays if kind in SIZES)  # fmt: skip
        sizes[name] = size
        if op in ("fusion", "custom-call", "copy"):
            total += size + sum(sizes.get(x, 0) for x in re.findall(r"%([\w.\-]+)", operands))
    return total


@few(1)
@pytest.mark.h200
@pytest.mark.parametrize(
    ("grad_dtype", "expected", "before"), [("bfloat16", 28, 32), ("float32", 32, 40)]
)
def test_a_clip_reads_gradients_twice_and_writes_none(h200s, grad_dtype, expected, before):
    """Bytes a parameter after the backward pass: one read for the norm, and those of the step."""
    n = 1 << 22
    found = []
    clip = optax.clip_by_global_norm(1.0)
    in_turn = optax.stateless(lambda grads, _: clip.update(grads, optax.EmptyState())[0])
    for first in (clip, in_turn):
        tx = jda.chain(first, adamw("float32"))
        params, grads = ({"w": jax.ShapeDtypeStruct((n,), x)} for x in ("float32", grad_dtype))
        args = placed(h200s(1), (params, jax.eval_shape(tx.init, params), grads), P())

        def step(params, state, grads, tx=tx):
            return tx.step(grads, state, params)

        compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*args).compile()
        found.append(bytes_moved(compiled.as_text()) / n)
    assert np.allclose(found, [expected, before], atol=0.1)
