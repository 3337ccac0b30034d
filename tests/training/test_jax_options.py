"""JAX's own checks for transfers and leaked tracers are quiet about our steps."""

import jax
import pytest

import jdistadam as jda
from support.lookalike import BATCH, loss_fn, make_params, make_tx
from support.samples import often

STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@often(lambda strategy: strategy in ("optim", "optim_grads_params"))
def test_no_tracer_leaks_from_a_step_or_an_evaluation(strategy):
    """The function that sums a shard's gradients held the shard of the forward pass."""
    tx = make_tx(2, sharding_strategy=strategy)
    state, batch = jda.TrainState.create(make_params(), tx), jda.shard_batch(BATCH, tx)
    with jax.checking_leaks():
        state, _ = jda.train_step(loss_fn, tx, accumulate_steps=2)(state, batch)
        jda.eval_step(loss_fn, tx)(state, batch)


@pytest.mark.parametrize("state_memory", ["device", "pinned_host"])
def test_no_step_moves_arrays_between_host_and_device_unasked(state_memory):
    tx = make_tx(2, state_memory=state_memory, ema_decay=0.9)
    params, batch = make_params(), jda.shard_batch(BATCH, tx)
    with jax.transfer_guard("disallow"):
        state = jda.TrainState.create(params, tx)
        for _ in range(2):
            state, _ = jda.train_step(loss_fn, tx)(state, batch)
