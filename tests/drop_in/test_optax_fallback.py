"""Leaves of dtypes that the kernels do not know: optax steps them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdistadam as jda
from support.bits import assert_same_bits, assert_trees_same_bits
from support.samples import few, often
from support.steps import by_update
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
    tx = jda.fused_adam(0.1, b1=0.5, b2=0.9375, eps=0.0, bias_correction=False)
    params = {"z": jnp.zeros(2, jnp.complex64)}
    grads = {"z": jnp.asarray([3 + 4j, 1j], jnp.complex64)}
    updates, _ = tx.update(grads, tx.init(params), params)
    want = -0.1 * np.asarray([0.5 * (3 + 4j) / (0.25 * 5), 0.5j / 0.25])
    np.testing.assert_allclose(updates["z"], want, rtol=1e-6)


@few(1)
@pytest.mark.parametrize("dtype", ["complex64", "float64", "complex128"])
@often(lambda dtype: dtype != "complex128")
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
        their_step = jax.jit(functools.partial(by_update, theirs))
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


INTEGERS = ("int8", "int32", "uint16")


def whole_numbers(rng, dtype, size=4096):
    low = 0 if jnp.dtype(dtype).kind == "u" else -10
    return jnp.asarray(rng.integers(low, 10, size).astype(dtype))


@few(1)
@pytest.mark.parametrize("grad_dtype", [None, F32, BF16], ids=["integers", "float32", "bfloat16"])
@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize(
    "rate", [0.7, optax.linear_schedule(0.7, 0.1, 5)], ids=["number", "schedule"]
)
@often(
    lambda dtype, grad_dtype, rate: (
        (dtype, grad_dtype, callable(rate))
        in {("int8", None, False), ("int32", F32, True), ("uint16", BF16, False)}
    )
)
def test_integers_are_what_jitted_optax_makes_of_them(dtype, grad_dtype, rate):
    """Three steps: updates, params, and a state that begins in integers, whose mu becomes float."""
    kwargs = dict(b1=0.87, b2=0.9, weight_decay=0.13, mask={"a": True, "b": False})
    ours, theirs = jda.fused_adamw(rate, **kwargs), optax.adamw(rate, **kwargs)
    rng = np.random.default_rng(7)
    params = {"a": whole_numbers(rng, dtype), "b": whole_numbers(rng, dtype)}
    state = ours.init(params)
    assert_trees_same_bits(state, theirs.init(params))
    for _ in range(3):
        grads = {name: whole_numbers(rng, grad_dtype or dtype) for name in params}
        got = ours.update(grads, state, params)
        want = jax.jit(theirs.update)(grads, state, params)
        assert_trees_same_bits(got, want)
        updates, state = got
        assert updates["a"].dtype == (grad_dtype or F32)
        params = optax.apply_updates(params, updates)
        assert params["a"].dtype == dtype


@pytest.mark.skipif(
    jax.version.__version_info__ < (0, 11),
    reason="needs jax 0.11: XLA of 0.10 joins the two on CPU, whatever stands between them",
)
@pytest.mark.parametrize("grad_dtype", [jnp.int32, F32], ids=str)
def test_a_step_of_integers_is_an_update_and_apply_updates(grad_dtype):
    """To the last element, beside leaves of the kernel and main parameters; both truncate.

    Compiled together, p - rate * x would be rounded once, and of a million sums that end near a
    whole number thousands would be truncated to another one.
    """
    tx = jda.fused_adamw(0.7, weight_decay=1.4285714, main_params_dtype=F32)
    rng = np.random.default_rng(8)
    params = {
        "n": whole_numbers(rng, jnp.int32, 1 << 18),
        "empty": jnp.zeros((0, 3), jnp.int32),
        "f": jnp.ones(5, BF16),
    }
    state, near = tx.init(params), 0
    for _ in range(3):
        grads = {
            "n": whole_numbers(rng, grad_dtype, 1 << 18),
            "empty": jnp.zeros((0, 3), grad_dtype),
            "f": jnp.full(5, 0.3, BF16),
        }
        updates, want_state = jax.jit(tx.update)(grads, state, params)
        want = optax.apply_updates(params, updates)
        near += int((abs(updates["n"] - jnp.round(updates["n"])) < 1e-5).sum())
        params, state = jax.jit(tx.step)(grads, state, params)
        assert_trees_same_bits((params, state), (want, want_state))
        assert updates["empty"].dtype == state.inner[0].mu["empty"].dtype == F32
    assert near > 1000


def test_integers_without_params():
    """fused_adam reads none; that they are integers is seen by their second moment."""
    tx = jda.fused_adam(0.7)
    params = {"n": jnp.asarray([10, 3], jnp.int32), "f": jnp.ones(2)}
    state = tx.init(params)
    for n in ([100, -3], [0.5, 2.0]):
        grads = {"n": jnp.asarray(n), "f": jnp.ones(2)}
        without = tx.update(grads, state)
        assert_trees_same_bits(without, tx.update(grads, state, params))
        state = without[1]
        assert state[0].mu["n"].dtype == F32 and state[0].nu["n"].dtype == jnp.int32
