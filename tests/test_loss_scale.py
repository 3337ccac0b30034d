"""Scaling, skipping and clipping, under every strategy, on a mesh of two axes of data."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bits import assert_same_bits
from test_strategies import (
    PLACEMENTS,
    SHAPES,
    SQUARE,
    STRATEGIES,
    make_tx,
    own_step,
    random_grads,
    random_params,
)

import jdistadam as jda
from jdistadam.core.loss_scale import new_loss_scale, next_loss_scale

HYBRID = dict(replica_axis="replica")
POLICIES = {
    "float32": jda.MixedPrecisionPolicy(),
    "bfloat16": jda.MixedPrecisionPolicy(grad_comm_dtype="bfloat16", grad_reduce_dtype="float32"),
    "comm": jda.MixedPrecisionPolicy(param_comm_dtype="bfloat16"),
    "remainder16": jda.MixedPrecisionPolicy(main_params_dtype="remainder16"),
    "none": jda.MixedPrecisionPolicy(main_params_dtype=None),
}


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_a_first_step_that_is_skipped_does_not_round_params(strategy):
    """They would be rounded to the wire's dtype by the first step that is taken."""
    tx = make_tx(SQUARE, POLICIES["comm"], sharding_strategy=strategy, loss_scale=1.0, **HYBRID)
    params = random_params()
    state = jda.TrainState.create(params, tx)
    step = jda.train_step(lambda p, x: sum(map(jnp.sum, jax.tree.leaves(p))) * jnp.mean(x), tx)
    state, metrics = step(state, np.full((8, 1), np.nan, np.float32))
    assert int(metrics["skipped"]) == 1
    for name, x in params.items():
        assert_same_bits(state.params[name], x, name)


def trained(tx, dtype="float32"):
    """A state after one ordinary step, so that nothing in it is zero; and a step function."""
    state = jda.TrainState.create(random_params(), tx, param_dtypes=dtype)

    def loss_fn(params, batch):
        terms = jax.tree.map(
            lambda p, x: jnp.sum(p.astype(jnp.float32) * jnp.mean(x, 0)), params, batch
        )
        return sum(jax.tree.leaves(terms))

    step = jda.train_step(loss_fn, tx, accumulate_steps=2, report_nonfinite=True)
    state, metrics = step(state, batch_of(np.random.default_rng(0)))
    assert int(metrics["skipped"]) == 0
    return state, step


def batch_of(rng):
    return {k: rng.normal(size=(32, *s)).astype(np.float32) for k, s in SHAPES.items()}


@pytest.mark.parametrize(
    ("policy", "bad"),
    [("float32", np.inf), ("float32", 1e38), *((policy, np.nan) for policy in POLICIES)],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_skipped_step_changes_no_bit(strategy, policy, bad):
    """One bad number in one micro-batch of one of 2 x 4 devices; clipped and scaled.

    1e38 is finite, and overflows when it is multiplied by the scale.
    """
    if strategy == "no_shard" and policy == "comm":
        strategy = "optim"  # no parameters travel without sharding
    assert_skipped_step_changes_no_bit(SQUARE, strategy, policy, bad)


def assert_skipped_step_changes_no_bit(mesh, strategy, policy, bad):
    dtype = "bfloat16" if policy in ("bfloat16", "remainder16", "none") else "float32"
    tx = make_tx(
        mesh,
        POLICIES[policy],
        sharding_strategy=strategy,
        max_grad_norm=0.5,
        loss_scale=jda.DynamicLossScale(init_scale=1024.0),
        **HYBRID,
    )
    state, step = trained(tx, dtype)
    before = jax.tree.map(np.asarray, state)
    batch = batch_of(np.random.default_rng(1))
    batch["columns"][17, 3, 1234] = bad  # one example, so one micro-batch of one device
    state, metrics = step(state, batch)
    after = jax.tree.map(np.asarray, state)
    assert int(metrics["skipped"]) == int(optax.tree.get(state.opt_state, "skipped")) == 1
    assert float(metrics["loss_scale"]) == 1024.0
    assert float(optax.tree.get(state.opt_state, "loss_scale")) == 512.0
    assert jda.nonfinite_paths(metrics["nonfinite"], state.params) == {"params['columns']": 1}
    assert int(after.opt_state.count) == 1
    for name in SHAPES:
        assert_same_bits(after.params[name], before.params[name], name)
        shards = state.params[name].addressable_shards
        where = {}
        for s in shards:  # all devices that hold the same part hold the same bits
            first = where.setdefault(str(s.index), np.asarray(s.data))
            assert_same_bits(np.asarray(s.data), first, name)
    for name in ("main_params", "mu", "nu"):
        x = getattr(after.opt_state, name)
        if x is not None:
            assert_same_bits(x, getattr(before.opt_state, name), name)
    state, metrics = step(state, batch_of(np.random.default_rng(2)))
    assert int(metrics["skipped"]) == 1 and int(state.opt_state.count) == 2
    assert np.isfinite(metrics["grad_norm"]) and not np.any(metrics["nonfinite"])


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_scale_changes_no_bit_of_a_clipped_step(placement):
    """From 1 to 2^24: the norm before clipping, what is clipped to, and every bit of the state."""
    mesh, kwargs = PLACEMENTS[placement]
    results = []
    for scale in (None, 2.0**24, *((1.0, 2.0**10) if placement == "flat-optim" else ())):
        tx = make_tx(mesh, max_grad_norm=0.25, loss_scale=scale, eps=1e-20, **kwargs)
        state = jda.TrainState.create(random_params(), tx)
        step = own_step(tx, state.params, micro=2)
        grads = random_grads(np.random.default_rng(3), micro=2)
        scaled = jax.tree.map(lambda x, k=scale: x * np.float32(k or 1), grads)
        _, opt_state = step(jda.shard_batch(scaled, tx), state.opt_state, state.params)
        results.append(opt_state)
    mean = [x.astype(np.float64).sum((0, 1)) / 16 for x in jax.tree.leaves(grads)]
    norm = np.sqrt(sum((x**2).sum() for x in mean))
    for opt_state in results:
        np.testing.assert_allclose(opt_state.grad_norm, norm, rtol=1e-5)
        # mu = (1 - b1) times the clipped gradient, whose norm is the limit.
        mu = np.asarray(opt_state.mu, np.float64)
        np.testing.assert_allclose(np.linalg.norm(mu), 0.25 * (1 - 0.87), rtol=1e-5)
        for name in ("grad_norm", "mu", "nu"):
            assert_same_bits(getattr(opt_state, name), getattr(results[0], name), name)


def test_the_dynamic_scale_grows_and_shrinks():
    """Against the rules written out in plain Python."""
    config = jda.DynamicLossScale(
        init_scale=64.0, growth_interval=3, hysteresis=2, min_scale=16.0, growth_factor=4.0
    )
    found = np.random.default_rng(4).random(200) < 0.3
    state = new_loss_scale(config)
    update = jax.jit(lambda state, found: next_loss_scale(config, state, found))
    scale, good, left, skipped = 64.0, 0, 2, 0
    seen = set()
    for bad in found:
        state = update(state, bad)
        if bad:
            good, left, skipped = 0, max(left - 1, 0), skipped + 1
            if left == 0:
                scale = max(scale * 0.5, 16.0)
        else:
            good += 1
            if good == 3:
                scale, good, left = scale * 4.0, 0, 2
        assert [float(x) for x in state] == [scale, good, left, skipped]
        seen.add(scale)
    assert len(seen) > 4


def test_the_scale_never_becomes_infinite():
    config = jda.DynamicLossScale(init_scale=2.0**127, growth_interval=1)
    state = next_loss_scale(config, new_loss_scale(config), jnp.bool_(False))
    assert float(state.loss_scale) == 2.0**127


def test_a_static_scale_stays_and_skips():
    tx = make_tx(SQUARE, loss_scale=8.0, **HYBRID)
    state, step = trained(tx)
    batch = batch_of(np.random.default_rng(1))
    batch["scalar"][0] = np.inf
    state, metrics = step(state, batch)
    assert int(metrics["skipped"]) == 1
    assert float(state.opt_state.scaling.loss_scale) == 8.0


def test_without_a_scale_nothing_is_skipped():
    tx = make_tx(SQUARE, **HYBRID)
    state, step = trained(tx)
    batch = batch_of(np.random.default_rng(1))
    batch["scalar"][0] = np.inf
    state, metrics = step(state, batch)
    assert int(metrics["skipped"]) == 0 and float(metrics["loss_scale"]) == 1.0
    assert not np.isfinite(state.params["scalar"])
    assert optax.tree.get(state.opt_state, "skipped") is None


def test_no_recompilation_over_skips():
    tx = make_tx(SQUARE, loss_scale=jda.DynamicLossScale(growth_interval=2), **HYBRID)
    state, step = trained(tx)
    for i in range(6):
        batch = batch_of(np.random.default_rng(i))
        batch["scalar"][0] = np.nan if i % 3 == 0 else 0.0
        state, _ = step(state, batch)
    assert step._jitted._cache_size() == 1


def test_scale_loss_in_an_own_loop():
    """The loss is scaled by what the state says, in float32 also for a float16 loss."""
    tx = make_tx(SQUARE, loss_scale=2.0**17, **HYBRID)
    state = tx.init({"w": jnp.ones(3)})
    scaled = jda.scale_loss(jnp.float16(1.5), state)
    assert scaled.dtype == jnp.float32 and float(scaled) == 1.5 * 2**17
    plain = make_tx(SQUARE, **HYBRID).init({"w": jnp.ones(3)})
    assert jda.scale_loss(jnp.float16(1.5), plain).dtype == jnp.float16


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (dict(growth_factor=1.0), "growth_factor: out of range: got 1.0"),
        (dict(backoff_factor=1.0), "backoff_factor: out of range"),
        (dict(init_scale=0.0), "init_scale: out of range"),
        (dict(growth_interval=0), "growth_interval: out of range: got 0"),
        (dict(hysteresis=1.5), "hysteresis: out of range: got 1.5"),
        (dict(min_scale=np.nan), "min_scale: out of range"),
    ],
    ids=str,
)
def test_bad_scales(kwargs, message):
    with pytest.raises(jda.HyperparameterError, match=message):
        jda.DynamicLossScale(**kwargs)


def test_a_state_without_a_scale_is_refused():
    params = {"w": jnp.ones((8, 2))}
    plain = jda.TrainState.create(params, make_tx(SQUARE, **HYBRID))
    tx = make_tx(SQUARE, loss_scale=1.0, **HYBRID)
    step = jda.train_step(lambda p, x: jnp.sum(p["w"]) * jnp.mean(x), tx)
    with pytest.raises((jda.TreeError, ValueError), match=r"scaling|LossScaleState"):
        step(plain, np.ones((8, 1), np.float32))
