"""Cautious weight decay: where the update and the parameter have the same sign, and nowhere else."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdistadam as jda
from support.bits import assert_trees_same_bits
from support.samples import few

HYPER = dict(learning_rate=3e-2, b1=0.87, b2=0.9973, eps=1e-7, weight_decay=0.7)
CAUTIOUS = HYPER | dict(cautious_weight_decay=True)


def tree_of(seed, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return {"a": rng.normal(size=(40, 33)).astype(dtype), "b": rng.normal(size=7).astype(dtype)}


def by_the_formula(p, grads, keeps_decay):
    """Steps in float64, by the formula of the paper."""
    p, m, v = p.astype(np.float64), 0.0, 0.0
    b1, b2 = HYPER["b1"], HYPER["b2"]
    for t, g in enumerate(grads, 1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        u = m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + HYPER["eps"])
        decay = HYPER["weight_decay"] * p * (u * p >= 0) * keeps_decay
        p = p - HYPER["learning_rate"] * (u + decay)
    return p


def test_ten_steps_are_those_of_the_formula():
    """One leaf is masked. The bound: a float32 ulp of p for each of ten steps, and as many of u."""
    tx = jda.fused_adamw(**CAUTIOUS, mask={"a": True, "b": False})
    params, grads = tree_of(0), [tree_of(i) for i in range(1, 11)]
    new, state = params, tx.init(params)
    for g in grads:
        new, state = jax.jit(tx.step)(g, state, new)
    plain = jda.fused_adamw(**HYPER).step(grads[0], tx.init(params), params)[0]
    assert (np.asarray(plain["a"]) != np.asarray(tx.step(grads[0], tx.init(params), params)[0]["a"])).any()  # fmt: skip
    for name, keeps_decay in (("a", True), ("b", False)):
        want = by_the_formula(params[name], [g[name] for g in grads], keeps_decay)
        np.testing.assert_allclose(new[name], want, rtol=0, atol=20 * np.spacing(np.float32(4)))


@few(1)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
def test_many_devices_and_update_have_the_bits_of_one(cpu_mesh, dtype):
    """Gradients add up exactly, so that only the formula can differ."""
    adamw = jda.fused_adamw(**CAUTIOUS, main_params_dtype=jnp.float32)
    tx = jda.distributed(adamw, mesh=cpu_mesh(4), sharding_strategy="optim_grads")
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), tree_of(0))
    train_state = jda.TrainState.create(params, tx)

    def loss(params, batch):
        terms = jax.tree.map(lambda p, g: jnp.sum(p.astype(jnp.float32) * g[0]), params, batch)
        return sum(jax.tree.leaves(terms))

    step, state = jda.train_step(loss, tx), adamw.init(params)
    for i in range(10):
        grads = jax.tree.map(lambda x: np.round(8 * x).astype(np.float32), tree_of(i + 1))
        batch = jax.tree.map(lambda x: np.stack([x] * 4), grads)
        train_state, _ = step(train_state, batch)
        grads = jax.tree.map(lambda x: jnp.asarray(x, dtype), grads)
        updates, state = jax.jit(adamw.update)(grads, state, params)
        params = optax.apply_updates(params, updates)
        if dtype == jnp.float32:  # else updates lead to the rounded main parameters exactly
            params = jax.device_get(train_state.params)
    assert_trees_same_bits(params, train_state.params)


def test_float64_leaves_and_derivatives_follow_the_formula():
    """float64 by the formula; the derivative by the rate of decay is that of the decayed elements."""
    with jax.enable_x64(True):
        params, grads = tree_of(0, np.float64)["a"], tree_of(1, np.float64)["a"]
        tx = jda.fused_adamw(**CAUTIOUS)
        new, _ = jax.jit(tx.step)(grads, tx.init(params), params)
        np.testing.assert_allclose(new, by_the_formula(params, [grads], True), rtol=1e-12)
    params, grads = tree_of(0)["a"], tree_of(1)["a"]

    def total(decay):
        tx = jda.fused_adamw(**CAUTIOUS | dict(weight_decay=decay))
        return jnp.sum(tx.step(grads, tx.init(params), params)[0])

    decayed = np.where(grads * params >= 0, params, 0)  # after one step u has the sign of g
    want = -HYPER["learning_rate"] * decayed.sum(dtype=np.float64)
    for rate in (0.7, 0.0):
        np.testing.assert_allclose(jax.grad(total)(rate), want, rtol=1e-4)


def test_export_of_cautious_weight_decay_to_torch_raises():
    tx, params = jda.fused_adamw(**CAUTIOUS), tree_of(0)
    with pytest.raises(jda.HyperparameterError, match="cautious_weight_decay for 'a'"):
        jda.interop.from_fused(params, tx.init(params), tx, ["a", "b"])
