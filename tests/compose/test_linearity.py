"""What may stand before a distributed optimizer: transformations that are linear."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jdistadam as jda
from jdistadam.compose import linearity
from support.exact_sums import make_tx, random_params
from support.samples import few

schedule = optax.linear_schedule(1.0, 0.5, 10)


LINEAR = {
    "identity": optax.identity(),
    "scale": optax.scale(0.5),
    "schedule": optax.scale_by_schedule(schedule),
    "masked": optax.masked(optax.scale(2.0), {"a": True, "b": False}),
    "frozen": optax.masked(optax.set_to_zero(), {"a": True, "b": False}),
    "jitted": optax.stateless(jax.jit(lambda g, p: jax.tree.map(lambda x: jnp.where(x.shape[0] > 2, x, 3 * x), g))),
    "matrix": optax.stateless(lambda g, p: jax.tree.map(lambda x: jnp.ones((len(x), len(x))) @ x / 3, g)),
    "sum": optax.stateless(lambda g, p: jax.tree.map(lambda x: x - jnp.mean(x), g)),
}  # fmt: skip


NOT_LINEAR = {
    "clip_by_global_norm": optax.clip_by_global_norm(1e9),
    "clip": optax.clip(1.0),
    "clip_by_block_rms": optax.clip_by_block_rms(1.0),
    "adaptive_grad_clip": optax.adaptive_grad_clip(0.1),
    "normalize": optax.normalize_by_update_norm(),
    "trust_ratio": optax.scale_by_trust_ratio(),
    "rms": optax.scale_by_rms(),
    "zero_nans": optax.zero_nans(),
    "sign": optax.scale_by_sign(),
    "hidden_sign": optax.stateless(lambda g, p: jax.tree.map(lambda x: x + jnp.round(x), g)),
    "jitted": optax.stateless(jax.jit(lambda g, p: jax.tree.map(lambda x: x * x, g))),
    "apply_if_finite": optax.apply_if_finite(optax.identity(), 3),
    "decay": optax.add_decayed_weights(0.1),
    "constant": optax.stateless(lambda g, p: jax.tree.map(lambda x: x + 1, g)),
    "noise": optax.add_noise(0.1, 0.5, jax.random.key(0)),
    "trace": optax.trace(0.9),
    "ema": optax.ema(0.9),
}


@pytest.mark.parametrize("name", LINEAR)
def test_linear_transformations_are_found(name):
    assert linearity.why_not_linear(LINEAR[name], linearity.example_params()) is None


@few(9)
@pytest.mark.parametrize("name", NOT_LINEAR)
def test_nonlinear_transformations_raise_before_a_distributed_optimizer(cpu_mesh, name):
    """When the chain is made, and where the tree must be known first, when the state is made."""
    with pytest.raises(
        jda.PolicyError, match=r"chain, transformation 1: it would see each device's gradients"
    ):
        jda.chain(optax.scale(0.5), NOT_LINEAR[name], make_tx(cpu_mesh(2)))
    late = optax.masked(NOT_LINEAR[name], {k: True for k in random_params()})
    tx = jda.chain(late, make_tx(cpu_mesh(2)))
    with pytest.raises(
        jda.PolicyError, match=r"transformation 0: .*For clipping pass max_grad_norm"
    ):
        jda.TrainState.create(random_params(), tx)


WRAPPERS = {
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 5),
    "masked": lambda tx: optax.masked(tx, {name: True for name in random_params()}),
    "partition": lambda tx: optax.partition({"a": tx}, {name: "a" for name in random_params()}),
    "chain": lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
    "flatten": optax.flatten,
    "lookahead": lambda tx: optax.lookahead(tx, 3, 0.5),
    "schedule_free": lambda tx: optax.contrib.schedule_free(tx, 1e-2),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_optax_wrappers_around_a_distributed_optimizer_raise(cpu_mesh, name):
    """They would see unreduced gradients; the message names what to use in place of them."""
    tx = make_tx(cpu_mesh(2))
    wrapped = WRAPPERS[name](tx)
    message = r"tx: not a distributed optimizer: .*optax\.chain use jda\.chain; .*accumulate_steps"
    for entry in (
        lambda: jda.TrainState.create(random_params(), wrapped),
        lambda: jda.train_step(lambda params, batch: 0.0, wrapped),
        lambda: jda.plan(random_params(), wrapped),
    ):
        with pytest.raises(jda.PolicyError, match=message):
            entry()
