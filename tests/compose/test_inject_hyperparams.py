"""jda.inject_hyperparams: numbers in the state, with the fused step kept."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdistadam as jda
from support.bits import assert_trees_same_bits
from support.trees import random_tree


def test_injected_hyperparameters_reach_the_step():
    """The learning rate is set between steps; one program; step and update agree."""
    tx = jda.inject_hyperparams(jda.fused_adamw)(1e-2, weight_decay=0.1, nesterov=True)
    theirs = optax.inject_hyperparams(optax.adamw)(1e-2, weight_decay=0.1, nesterov=True)
    params = random_tree(np.random.default_rng(3))
    state = tx.init(params)
    assert jax.tree.structure(state) == jax.tree.structure(theirs.init(params))
    step = jax.jit(tx.step)
    for lr in (1e-2, 5e-3, 0.0, 1e-3):
        state.hyperparams["learning_rate"] = jnp.float32(lr)
        grads = jax.tree.map(lambda x: 0.1 * x, params)
        updates, want_state = tx.update(grads, state, params)
        new, state = step(grads, state, params)
        assert_trees_same_bits(new, optax.apply_updates(params, updates))
        assert_trees_same_bits(state, want_state)
        assert (float(abs(new["w"] - params["w"]).max()) == 0) == (lr == 0)
        params = new
    assert step._cache_size() == 1


def test_injected_schedule_equals_the_schedule():
    kwargs = dict(
        weight_decay=0.1, b1=0.5, b2=0.25
    )  # exact powers: traced or not, the same numbers
    by_schedule = jda.fused_adamw(optax.linear_schedule(1e-2, 1e-3, 8), **kwargs)
    injected = jda.inject_hyperparams(jda.fused_adamw)(
        optax.linear_schedule(1e-2, 1e-3, 8), **kwargs
    )
    one = two = random_tree(np.random.default_rng(4))
    state, other = by_schedule.init(one), injected.init(two)
    for _ in range(10):
        grads = jax.tree.map(lambda x: 0.1 * x, one)
        one, state = by_schedule.step(grads, state, one)
        two, other = injected.step(grads, other, two)
        assert_trees_same_bits(one, two)
    assert float(other.hyperparams["learning_rate"]) == pytest.approx(1e-3)


def test_injected_numbers_stay_float32_for_bfloat16_params():
    """In bfloat16 a b2 of 0.999 is 1, and 1 - b2^t is zero."""
    params = {"w": jnp.ones(5, jnp.bfloat16)}
    tx = jda.inject_hyperparams(jda.fused_adamw)(1e-2)
    state = tx.init(params)
    assert state.hyperparams["b2"].dtype == jnp.float32
    new, _ = tx.step(params, state, params)
    assert np.isfinite(np.asarray(new["w"], np.float32)).all()


def test_inject_raises_for_what_has_no_step():
    with pytest.raises(jda.PolicyError, match="cannot be used with this optimizer: got adamw, exp"):
        jda.inject_hyperparams(optax.adamw)(1e-3)


def test_names_in_the_state_are_checked():
    params = {"w": jnp.ones(3)}
    tx = jda.inject_hyperparams(jda.fused_adamw)(1e-3)
    state = tx.init(params)
    state.hyperparams["learning_rates"] = 1.0
    with pytest.raises(jda.HyperparameterError, match=r"\['learning_rates'\]: no hyperparameter"):
        tx.step(params, state, params)


def test_whole_numbers_become_floats():
    """weight_decay=0 may be set to 0.1 later, which is no integer, in the same program."""
    tx = jda.inject_hyperparams(jda.fused_adamw)(1, weight_decay=0)
    hyperparams = tx.init({"w": jnp.ones(3)}).hyperparams
    assert {x.dtype for x in hyperparams.values()} == {jnp.dtype("float32")}


def test_injected_numbers_are_checked_as_they_are_given():
    inject = jda.inject_hyperparams(jda.fused_adamw)
    for kwargs, message in (
        (dict(b1=1.5), r"b1: out of range: got 1.5"),
        (dict(eps=-1.0), r"eps: out of range: got -1.0"),
    ):
        with pytest.raises(jda.HyperparameterError, match=message):
            inject(1e-2, **kwargs)
    with pytest.raises(jda.PolicyError, match="nu_dtype: a second moment in 16 bits, "):
        inject(1e-2, nu_dtype="bfloat16")
    wrapped = jda.inject_hyperparams(lambda learning_rate: jda.fused_adam(learning_rate))(1e-2)
    assert wrapped.init({"w": jnp.ones(3)}).hyperparams.keys() == {"learning_rate"}


def test_injected_schedules_of_every_number_and_a_mask():
    """As in optax any number may be a schedule; a mask is none."""
    mask = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)  # noqa: E731
    tx = jda.inject_hyperparams(jda.fused_adamw)(
        0.0, b1=lambda count: 0.5, weight_decay=0.5, mask=mask, mu_dtype=jnp.float32
    )
    params = {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}
    state = tx.init(params)
    assert set(state.hyperparams) == {
        "learning_rate",
        "b1",
        "b2",
        "eps",
        "eps_root",
        "weight_decay",
    }
    state.hyperparams["learning_rate"] = jnp.float32(0.01)
    zeros = jax.tree.map(jnp.zeros_like, params)
    new, _ = tx.step(zeros, state, params)
    assert (np.asarray(new["w"]) < 1).all() and (np.asarray(new["b"]) == 1).all()


def test_injected_adam_needs_no_params():
    tx = jda.inject_hyperparams(jda.fused_adam)(1e-2)
    grads = {"w": jnp.ones(3)}
    updates, _ = tx.update(grads, tx.init(grads))
    np.testing.assert_allclose(updates["w"], -0.01, rtol=1e-4)
    with_l2 = jda.inject_hyperparams(jda.fused_adam)(1e-2, l2=0.1)
    assert "l2" in with_l2.init(grads).hyperparams
