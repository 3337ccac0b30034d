"""JAX's own checks for transfers, leaked tracers and used keys are quiet about our steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdistadam as jda
from support.lookalike import BATCH, loss_fn, make_params, make_tx
from support.samples import few, often

STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]


@few(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
@often(lambda strategy: strategy in ("optim", "optim_grads_params"))
def test_no_tracer_leaks_from_a_step_or_an_evaluation(strategy):
    """The function that sums a shard's gradients held the shard of the forward pass."""
    tx = make_tx(2, sharding_strategy=strategy)
    state, batch = jda.TrainState.create(make_params(), tx), jda.shard_batch(BATCH, tx)
    with jax.checking_leaks():
        state, _ = jda.train_step(loss_fn, tx, accumulate_steps=2)(state, batch)
        jda.eval_step(loss_fn, tx)(state, batch)


@few(1)
@pytest.mark.parametrize("state_memory", ["device", "pinned_host"])
def test_no_step_moves_arrays_between_host_and_device_unasked(state_memory):
    tx = make_tx(2, state_memory=state_memory, ema_decay=0.9)
    params, batch = make_params(), jda.shard_batch(BATCH, tx)
    with jax.transfer_guard("disallow"):
        state = jda.TrainState.create(params, tx)
        for _ in range(2):
            state, _ = jda.train_step(loss_fn, tx)(state, batch)


@few(1)
@pytest.mark.parametrize("communication", ["xla", "peer"])
def test_no_step_uses_a_key_twice(cpu_mesh, communication):
    """Those that a step returns, and those that the loss only folds numbers into, are not used up."""
    policy = jda.MixedPrecisionPolicy(grad_reduce_dtype=jnp.float32)
    given = dict(mesh=cpu_mesh(2), policy=policy, communication=communication)
    tx, base = jda.distributed(jda.fused_adamw(1e-2), **given), jax.random.key(7)

    def loss(params, batch, model_state, rng):
        keys = [rng, *(jax.random.fold_in(key, 1) for key in (base, model_state))]
        return jnp.mean(batch @ params["w"]) * sum(map(jax.random.normal, keys)), model_state

    with jax.debug_key_reuse(True):
        keys = dict(rng=jax.random.key(0), model_state=jax.random.key(1, impl="rbg"))
        state = jda.TrainState.create({"w": jnp.ones(3)}, tx, **keys)
        step = jda.train_step(loss, tx, accumulate_steps=2)
        for _ in range(3):
            state, _ = step(state, np.ones((4, 3), np.float32))
    assert jax.random.key_impl(state.model_state) == "rbg"
