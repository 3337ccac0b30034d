"""Scaling, skipping and clipping, under every strategy, on a mesh of two axes of data."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdistadam as jda
from support.bits import assert_same_bits, assert_trees_same_bits
from support.given_gradients import make_tx, own_step, random_grads, random_params
from support.placements import PLACEMENTS, SQUARE, STRATEGIES
from support.samples import often
from support.skipped_step import (
    HYBRID,
    POLICIES,
    assert_skipped_step_changes_no_bit,
    batch_of,
    trained,
)


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
@often(lambda strategy: strategy == "optim_grads_params")
def test_a_first_step_that_is_skipped_does_not_round_params(strategy):
    """They would be rounded to the communication dtype by the first step that is taken."""
    tx = make_tx(SQUARE, POLICIES["comm"], sharding_strategy=strategy, loss_scale=1.0, **HYBRID)
    params = random_params()
    state = jda.TrainState.create(params, tx)
    step = jda.train_step(lambda p, x: sum(map(jnp.sum, jax.tree.leaves(p))) * jnp.mean(x), tx)
    state, metrics = step(state, np.full((8, 1), np.nan, np.float32))
    assert int(metrics["skipped"]) == 1
    for name, x in params.items():
        assert_same_bits(state.params[name], x, name)


@pytest.mark.parametrize(
    ("policy", "bad"),
    [("float32", np.inf), ("float32", 1e38), *((policy, np.nan) for policy in POLICIES)],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
@often(
    lambda strategy, policy, bad: (strategy, policy, bad) == ("optim_grads_params", "float32", 1e38)
)
def test_a_skipped_step_changes_no_bit(strategy, policy, bad):
    """One bad number in one micro-batch of one of 2 x 4 devices; clipped and scaled.

    1e38 is finite, and overflows when it is multiplied by the scale.
    """
    if strategy == "no_shard" and policy == "comm":
        strategy = "optim"  # no parameters are communicated without sharding
    assert_skipped_step_changes_no_bit(SQUARE, strategy, policy, bad)


@pytest.mark.parametrize("placement", PLACEMENTS)
@often(lambda placement: placement == "hybrid-optim")
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


def test_a_scale_does_not_grow_until_gradients_are_zero():
    """From 2^62: one over 2^122, times the mean and the clip, is zero on CPUs. No step was skipped."""
    growing = jda.DynamicLossScale(init_scale=2.0**62, growth_factor=2.0**30, growth_interval=1)
    results = []
    for scale in (1.0, growing):
        tx = make_tx(SQUARE, max_grad_norm=0.25, loss_scale=scale, eps=1e-20, **HYBRID)
        state, step = trained(tx)
        for i in range(3):
            state, metrics = step(state, batch_of(np.random.default_rng(i)))
        assert int(metrics["skipped"]) == 0
        results.append((state.params, metrics["grad_norm"]))
    assert_trees_same_bits(*results)


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


def test_a_state_without_a_scale_raises():
    params = {"w": jnp.ones((8, 2))}
    plain = jda.TrainState.create(params, make_tx(SQUARE, **HYBRID))
    tx = make_tx(SQUARE, loss_scale=1.0, **HYBRID)
    step = jda.train_step(lambda p, x: jnp.sum(p["w"]) * jnp.mean(x), tx)
    with pytest.raises((jda.TreeError, ValueError), match=r"scaling|LossScaleState"):
        step(plain, np.ones((8, 1), np.float32))
