"""A distributed step has neither members nor a derivative: vmap and grad say so in words."""

import jax
import jax.numpy as jnp
import pytest

import jdistadam as jda
from jdistadam.errors import PolicyError
from support.optimizers import distributed_adamw


@pytest.fixture(scope="module")
def made():
    """An optimizer, a state, which no test donates, and a step."""
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices("cpu")[:4])
    tx = distributed_adamw(1e-2, mesh=mesh)
    step = jda.train_step(lambda params, batch: jnp.mean((batch @ params["w"]) ** 2), tx)
    return tx, jda.TrainState.create({"w": jnp.ones((8, 4))}, tx), step


@pytest.mark.parametrize("jitted", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("batched", ["state", "batch"])
def test_vmap_of_a_distributed_step_raises(made, batched, jitted):
    _, state, step = made
    batch = jnp.ones((8, 8))
    axes = (0, None) if batched == "state" else (None, 0)
    if batched == "state":
        state = jax.tree.map(lambda x: jnp.stack([x] * 3), state)
    else:
        batch = jnp.stack([batch] * 3)
    function = jax.vmap(step, in_axes=axes)
    with pytest.raises(PolicyError, match="step: a distributed optimizer cannot run under"):
        (jax.jit(function) if jitted else function)(state, batch)


@pytest.mark.parametrize("jitted", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("differentiate", [jax.grad, jax.jacfwd, jax.linearize])
def test_a_derivative_of_a_distributed_step_raises(made, differentiate, jitted):
    _, state, step = made

    def loss(batch):
        return jnp.sum(step(state, batch)[0].params["w"])

    function = jax.jit(loss) if jitted else loss
    with pytest.raises(PolicyError, match="step: a distributed optimizer cannot be differentiated"):
        if differentiate is jax.linearize:
            jax.linearize(function, jnp.ones((8, 8)))
        else:
            differentiate(function)(jnp.ones((8, 8)))


def test_a_derivative_of_an_initial_state_raises(cpu_mesh):
    tx = distributed_adamw(1e-2, mesh=cpu_mesh(4))
    with pytest.raises(PolicyError, match="init: a distributed optimizer cannot be differentiated"):
        jax.grad(lambda w: jnp.sum(tx.init({"w": w}).main_params))(jnp.ones((8, 4)))


def test_constants_of_a_derivative_are_stepped(made):
    """What is no operand of it, and what stop_gradient makes none."""
    tx, state, step = made

    def loss(batch):
        copied = jax.tree.map(jnp.copy, state)  # it is donated
        stepped = step(copied, jax.lax.stop_gradient(batch))[0].params["w"]
        return jnp.sum(batch @ stepped)

    batch = jda.shard_batch(jnp.ones((8, 8)), tx)
    assert jax.jvp(loss, (batch,), (batch,))[1] != 0
