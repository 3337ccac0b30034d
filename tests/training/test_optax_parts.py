"""States of optax's chains and wrappers, as a distributed optimizer takes them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdistadam as jda
from support.bits import assert_trees_same_bits
from support.optimizers import distributed_adamw

RATE = optax.linear_schedule(0.5, 0.0, 100)
PARAMS = {"w": jnp.ones((8, 3)), "b": jnp.ones(3)}


def made(cpu_mesh):
    return distributed_adamw(RATE, mesh=cpu_mesh(2), max_grad_norm=1.0)


def after(tx, steps=3):
    state = tx.init(PARAMS)
    for _ in range(steps):
        _, state = tx.update(PARAMS, state, PARAMS)
    return state


def test_state_of_a_chain_with_clipping_is_accepted(cpu_mesh):
    tx = made(cpu_mesh)
    for adamw in (optax.adamw(RATE), jda.fused_adamw(RATE)):
        chained = after(optax.chain(optax.clip_by_global_norm(1.0), adamw))
        got, want = (jda.from_optax_state(PARAMS, x, tx) for x in (chained, chained[1]))
        assert int(got.step) == 3
        assert_trees_same_bits(got.opt_state, want.opt_state)


@pytest.mark.parametrize(
    ("wrapped", "where", "part"),
    [
        (optax.MultiSteps(optax.adamw(RATE), 2), "mini_step", "inner_opt_state"),
        (optax.apply_if_finite(optax.adamw(RATE), 3), "notfinite_count", "inner_state"),
        (jda.fused_adamw(RATE, main_params_dtype="float32"), "main_params", "inner"),
    ],
    ids=["MultiSteps", "apply_if_finite", "main_params"],
)
def test_state_of_a_wrapper_raises_and_names_the_part_to_pass(cpu_mesh, wrapped, where, part):
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    with pytest.raises(jda.TreeError) as caught:
        jda.from_optax_state(PARAMS, wrapped.init(params), made(cpu_mesh))
    assert str(caught.value).startswith(f"opt_state.{where}")
    assert f"Pass opt_state.{part}" in str(caught.value)
    assert ("jda.main_params(" in str(caught.value)) == (part == "inner")


def test_a_schedule_at_another_step_than_adam_raises(cpu_mesh):
    adam, *rest = after(optax.adamw(RATE), 5)
    state = (adam, *jax.tree.map(lambda x: np.int32(2), rest))
    with pytest.raises(jda.TreeError, match=r"^opt_state\[2\]: .*count 2.*count 5.*step - 3\)"):
        jda.from_optax_state(PARAMS, state, made(cpu_mesh))
