"""A distributed step has neither members nor a derivative: vmap and grad say so in words."""

import jax
import jax.numpy as jnp
import pytest

import jdistadam as jda
from jdistadam.errors import PolicyError
from support.bits import assert_trees_same_bits
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


SUMS = jda.MixedPrecisionPolicy(grad_reduce_dtype=jnp.float32)


def scanning(cpu_mesh, communication, over_layers):
    """A step of two layers, which ``over_layers(function, layers)`` gathers; and its state."""
    tx = distributed_adamw(
        1e-2,
        mesh=cpu_mesh(4),
        sharding_strategy="optim_grads_params",
        layers=lambda path: "scan",
        policy=SUMS,
        communication=communication,
    )

    def loss(params, x):
        whole = over_layers(lambda layer: jda.gather_params(layer, tx), params)
        return jnp.mean(jnp.tanh(x @ whole["w"][0] @ whole["w"][1]))

    params = {"w": jax.random.normal(jax.random.key(1), (2, 128, 128)) / 8}
    return jda.train_step(loss, tx), jda.TrainState.create(params, tx)


def by_vmap(function, layers):
    return jax.vmap(function)(layers)


def by_map(function, layers):
    return jax.lax.map(function, layers)


def test_layers_gathered_by_vmap_have_the_bits_of_a_loop(cpu_mesh):
    """Gradients summed in float32, too: the kernel that adds them had no rule for vmap."""
    x, made = jax.random.normal(jax.random.key(0), (8, 128)), []
    for over_layers in (by_vmap, by_map):
        step, state = scanning(cpu_mesh, "xla", over_layers)
        made.append(jax.device_get(step(state, x)))
    assert_trees_same_bits(*made)


def test_copies_under_vmap_raise(cpu_mesh):
    step, state = scanning(cpu_mesh, "peer", by_vmap)
    with pytest.raises(PolicyError, match=r"^gather_params: copies over .* jax.vmap: got vmap ov"):
        step(state, jnp.ones((8, 128)))


@pytest.mark.parametrize("communication", ["xla", "peer"])
def test_vmap_of_a_step_that_gathers_layers_raises(cpu_mesh, communication):
    step, state = scanning(cpu_mesh, communication, by_map)
    with pytest.raises(PolicyError, match=r"^train_step: a distributed optimizer cannot run under"):
        jax.vmap(step, in_axes=(None, 0))(state, jnp.ones((3, 8, 128)))
