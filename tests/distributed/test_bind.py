"""The layout of some params is made once, whatever is done with them."""

import jax
import jax.numpy as jnp
import pytest

import jdistadam as jda
from jdistadam.distributed import config
from support.optimizers import distributed_adamw
from support.samples import few


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2) + jnp.sum(params["b"] ** 2)


@few(2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_a_layout_is_made_once(cpu_mesh, monkeypatch, strategy):
    made = []
    make_layout = config.make_layout
    monkeypatch.setattr(
        config, "make_layout", lambda *args, **kw: made.append(args) or make_layout(*args, **kw)
    )
    tx = distributed_adamw(1e-3, mesh=cpu_mesh(4), sharding_strategy=strategy)
    params = {"w": jnp.ones((256, 128)), "b": jnp.ones(3)}
    state = jda.TrainState.create(params, tx)
    step = jda.train_step(loss_fn, tx, accumulate_steps=2)
    for _ in range(2):
        state, _ = step(state, jnp.ones((8, 256)))
    jda.to_optax_state(state, tx)
    assert len(made) == 1
    tx.layout({"w": jax.ShapeDtypeStruct((256, 256), jnp.float32)})
    assert len(made) == 2  # of other params


def test_optimizers_made_alike_stay_alike(cpu_mesh):
    """The layouts that one has made are no part of its configuration."""
    mesh, hyper = cpu_mesh(4), jda.fused_adamw(1e-3)
    one, other = (
        jda.distributed(hyper, mesh=mesh, sharding_strategy="optim_grads_params") for _ in range(2)
    )
    jda.TrainState.create({"w": jnp.ones((256, 128))}, one)
    assert one.config == other.config and vars(one.config) != vars(other.config)
