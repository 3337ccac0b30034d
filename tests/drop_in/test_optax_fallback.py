"""Leaves of dtypes that the kernels do not know: optax steps them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdistadam as jda
from support.bits import assert_same_bits, assert_trees_same_bits
from support.trees import BF16, F32, HYPER


def test_remainders_of_leaves_that_optax_steps():
    """float64 gradients: optax's arithmetic, on the joined halves."""
    with jax.enable_x64(True):
        params = {"w": jnp.ones(5, BF16)}
        grads = {"w": jnp.full(5, 0.3, jnp.float64)}
        results = []
        for kind in ("remainder16", F32):
            tx = jda.fused_adamw(1e-3, main_params_dtype=kind)
            new, state = params, tx.init(params)
            for _ in range(5):
                new, state = tx.step(grads, state, new)
            results.append((jda.main_params(new, state), state.inner))
        assert_trees_same_bits(*results)


def test_without_bias_correction_for_leaves_that_optax_steps():
    """Complex leaves, too: after one step mu = (1 - b1) g, and the update is mu / sqrt(nu)."""
    tx = jda.fused_adam(0.1, b1=0.5, b2=0.75, eps=0.0, bias_correction=False)
    params = {"z": jnp.zeros(2, jnp.complex64)}
    grads = {"z": jnp.asarray([3 + 4j, 1j], jnp.complex64)}
    updates, _ = tx.update(grads, tx.init(params), params)
    want = -0.1 * np.asarray([0.5 * (3 + 4j) / (0.5 * 5), 0.5j / 0.5])
    np.testing.assert_allclose(updates["z"], want, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["complex64", "float64", "complex128"])
def test_other_numbers_are_left_to_optax(dtype):
    """In one tree with float32: bit for bit what jitted optax computes; float32 stays ours."""
    with jax.enable_x64(True):
        kwargs = HYPER | dict(mask={"a": True, "b": False, "f": True})
        ours, theirs = jda.fused_adamw(**kwargs), optax.adamw(**kwargs)
        rng = np.random.default_rng(6)

        def tree():
            z = rng.normal(size=(2, 50)) + 1j * rng.normal(size=(2, 50))
            z = z if dtype.startswith("complex") else z.real
            return {
                "a": jnp.asarray(z[0], dtype),
                "b": jnp.asarray(z[1], dtype),
                "f": jnp.ones(5, F32),
            }

        params = tree()
        state, their_state = ours.init(params), theirs.init(params)
        step = jax.jit(ours.step)
        their_step = jax.jit(
            lambda g, s, p: (lambda u, n: (optax.apply_updates(p, u), n))(*theirs.update(g, s, p))
        )
        their_params = params
        for _ in range(5):
            grads = tree()
            params, state = step(grads, state, params)
            their_params, their_state = their_step(grads, their_state, their_params)
        for name in ("a", "b"):
            for got, want in ((params, their_params), (state[0].mu, their_state[0].mu), (state[0].nu, their_state[0].nu)):  # fmt: skip
                assert got[name].dtype == want[name].dtype
                # the same expressions; XLA may contract them differently in another program
                eps = jnp.finfo(want[name].dtype).eps
                np.testing.assert_allclose(got[name], want[name], rtol=0, atol=float(50 * eps))
        assert params["f"].dtype == F32 and ours.update(grads, state, params)[0]["a"].dtype == dtype


@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_a_step_without_the_kernel_can_be_mapped_and_differentiated(transform):
    """Over the learning rate too, as optax's: nothing foreign stands in its program."""

    def stepped(tx, learning_rate, z):
        tx = tx(learning_rate, weight_decay=0.13)
        updates, _ = tx.update(z * (2 - 1j), tx.init(z), z)
        return optax.apply_updates(z, updates)

    def results(tx):
        if transform == "vmap":
            return jax.jit(jax.vmap(lambda rate, z: stepped(tx, rate, z)))(rates, z)
        return jax.jit(jax.grad(lambda rate: jnp.real(stepped(tx, rate, z)).sum()))(rates[0])

    rates = jnp.asarray([1e-2, 3e-3])
    z = jnp.asarray([[1 + 2j, 0.5j], [3 - 1j, 0.25]], jnp.complex64)
    ours = results(jda.inject_hyperparams(jda.fused_adamw))
    theirs = results(optax.inject_hyperparams(optax.adamw))
    assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


def test_main_params_of_leaves_that_optax_steps():
    """float64 gradients of bfloat16 params: optax's arithmetic, on the main parameters."""
    with jax.enable_x64(True):
        tx = jda.fused_adamw(1e-3, main_params_dtype=F32)
        params = applied = {"w": jnp.ones(5, BF16), "v": jnp.ones(4, BF16)}
        grads = {"w": jnp.full(5, 0.3, jnp.float64), "v": jnp.full(4, 0.3, BF16)}
        state = other = tx.init(params)
        for _ in range(20):
            params, state = tx.step(grads, state, params)
            updates, other = tx.update(grads, other, applied)
            applied = optax.apply_updates(applied, updates)
        np.testing.assert_allclose(state.main_params["w"], 1 - 20e-3, rtol=1e-4)
        for name in params:
            assert params[name].dtype == BF16
            assert_same_bits(params[name], state.main_params[name].astype(BF16))
            assert_same_bits(applied[name], params[name])
