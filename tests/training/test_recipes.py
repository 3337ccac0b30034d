"""What docs/recipes.md says beside what its examples assert, which run in tests/test_readme.py."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdistadam as jda
from support.bits import assert_same_bits, assert_trees_same_bits
from support.paths import ROOT

EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "docs/recipes.md").read_text(), re.S)
NOISE = next(
    re.search(r"def noise_in_gradient.*?\n\n\n", x, re.S) for x in EXAMPLES if "noise" in x
)
PAGE: dict = {"jax": jax, "jnp": jnp}
exec(NOISE[0], PAGE)
HYPER = dict(b1=0.87, eps=1e-7, weight_decay=0.13)


def test_noise_reaches_the_gradient_and_not_the_loss():
    """A step with the noise in the loss is one with the mean of the devices' noises added."""
    mesh = jax.sharding.Mesh(jax.devices("cpu"), ("data",))
    params = {"a": jnp.zeros((3, 50)), "b": jnp.zeros(1)}
    tx = jda.distributed(jda.fused_adamw(1e-2, **HYPER), mesh=mesh)
    noises = []

    def loss_fn(params, x, *, rng):
        noise = jax.grad(PAGE["noise_in_gradient"])(params, rng)
        return jnp.sum(x) + PAGE["noise_in_gradient"](params, rng), noise

    state = jda.TrainState.create(params, tx, rng=jax.random.key(3))
    step = jda.train_step(loss_fn, tx, accumulate_steps=2, has_aux=True)
    for i in range(10):
        state, metrics = step(state, np.full((16, 1), i, np.float32))
        assert metrics["loss"] == i
        each = np.concatenate([np.reshape(x, (16, -1)) for x in jax.tree.leaves(metrics["aux"])], 1)
        assert len(np.unique(each)) > 0.99 * each.size  # of every device, micro-batch and leaf
        norm = np.sqrt(np.sum(np.mean(each, 0, dtype=np.float64) ** 2))
        # Sums of 16 float32 numbers and of 151 squares: relative errors below 16 and 151 roundings.
        np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=170 * 2.0**-24)
        noises.append(each)
    # The standard deviation of n numbers is known to 1 / sqrt(2 n); six of these.
    noises = np.stack(noises)
    assert abs(noises.std() - 1) < 6 / np.sqrt(2 * noises.size)
    mean = noises.mean(1)
    assert abs(mean.std() * 4 - 1) < 6 / np.sqrt(2 * mean.size)


def test_reduce_on_plateau_gives_the_same_rates_in_a_chain_and_from_the_loop():
    """The learning rates are the same ones, also where a number in the state takes them."""
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=2)
    params = {"w": jnp.linspace(-1.0, 1.0, 40)}
    behind = jda.chain(jda.fused_adamw(1e-2, **HYPER), plateau)
    adamw = lambda learning_rate: jda.fused_adamw(learning_rate, **HYPER)  # noqa: E731
    set_from_loop = jda.inject_hyperparams(adamw)(1e-2)
    states = [behind.init(params), set_from_loop.init(params)]
    plateau_state = plateau.init(params)
    steps = [jax.jit(tx.step) for tx in (behind, set_from_loop)]
    rng, rates = np.random.default_rng(2), []
    both = [params, params]
    for i in range(12):
        grads = {"w": jnp.asarray(rng.normal(size=40), jnp.float32)}
        value = jnp.float32(3.0 if i < 4 else 2.0)
        rate, plateau_state = plateau.update(jnp.float32(1e-2), plateau_state, value=value)
        states[1].hyperparams["learning_rate"] = rate
        rates.append(float(rate))
        both[0], states[0] = steps[0](grads, states[0], both[0], value=value)
        both[1], states[1] = steps[1](grads, states[1], both[1])
        assert_trees_same_bits(states[0][1], plateau_state)
    assert len(set(rates)) == 5  # halved four times
    # Powers of two: a scaled update and a scaled learning rate differ in no bit.
    assert_same_bits(both[0]["w"], both[1]["w"])
