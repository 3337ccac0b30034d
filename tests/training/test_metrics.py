"""The metrics of a step are what TensorBoard and Weights & Biases take as it is."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdistadam as jda
from support.samples import few
from support.tensorboard import scalars

ALWAYS = {"loss", "grad_norm", "learning_rate", "skipped", "loss_scale"}


def loss_fn(params, x):
    return jnp.mean(jnp.square(x @ params["w"] - 1.0))


def plain(mesh):
    return jda.distributed(jda.fused_adamw(3e-2, weight_decay=0.1), mesh=mesh)


def with_all(mesh):
    adamw = jda.inject_hyperparams(jda.fused_adamw)(optax.linear_schedule(3e-2, 0.0, 9))
    scale = jda.DynamicLossScale()
    tx = jda.distributed(adamw, mesh=mesh, loss_scale=scale, max_grad_norm=0.5)
    return jda.chain(optax.scale(0.5), tx)


@few(1)
@pytest.mark.parametrize("make", [plain, with_all])
def test_metrics_are_a_flat_dictionary_of_scalars(cpu_mesh, tmp_path, make):
    tensorboard = pytest.importorskip("tensorboardX")
    tx = make(cpu_mesh(4))
    state = jda.TrainState.create({"w": jnp.full((4, 3), 0.1, jnp.bfloat16)}, tx)
    step = jda.train_step(loss_fn, tx, accumulate_steps=2)
    rng, want = np.random.default_rng(4), {}
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        for i in range(10):
            state, metrics = step(state, rng.normal(size=(16, 4)).astype(np.float32))
            assert type(metrics) is dict and set(metrics) == ALWAYS
            for name, value in metrics.items():
                assert isinstance(value, jax.Array) and value.shape == ()
                assert value.dtype in (jnp.float32, jnp.int32) and np.isfinite(value)
                assert value.item() == float(value)  # as W&B asks for it
                writer.add_scalar(name, value, i)
                want[name, i] = float(value)
    assert scalars(tmp_path) == want


def test_the_learning_rate_is_that_of_a_schedule_that_computes_in_16_bits(cpu_mesh):
    def rate(count):
        return jnp.bfloat16(1e-2) * (1 - count.astype(jnp.bfloat16) / jnp.bfloat16(100))

    tx = jda.distributed(jda.fused_adamw(rate), mesh=cpu_mesh(2))
    state = jda.TrainState.create({"w": jnp.full((4, 3), 0.1)}, tx)
    step = jda.train_step(loss_fn, tx)
    for i in range(6):
        state, metrics = step(state, np.ones((2, 4), np.float32))
        assert float(metrics["learning_rate"]) == float(rate(jnp.int32(i)))
