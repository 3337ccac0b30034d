"""The unsharded parameters of a state: those that the next forward pass computes with."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdistadam as jda
from support.bits import assert_trees_same_bits
from support.optimizers import distributed_adamw
from support.samples import few

LAYERS = dict(sharding_strategy="optim_grads_params")
MESHES = {
    "full": dict(shape=(2,)),
    "gathered once": dict(shape=(2,), reshard_after_forward=False, **LAYERS),
    "layers": dict(shape=(2,), **LAYERS),
    "layers twice": dict(shape=(2, 2), replica_axis="replica", **LAYERS),
}


def loss_fn(params, x):
    """Returns as metrics the very parameters that it got."""
    return sum(jnp.sum(jnp.sin(p)) for p in params.values()) * jnp.mean(x), params


@few(1)
@pytest.mark.parametrize("name", MESHES)
def test_full_params_equal_those_that_the_loss_receives(name):
    """Rounded to param_comm_dtype where they are gathered; what is exported is exact."""
    options = dict(MESHES[name])
    shape = options.pop("shape")
    size = int(np.prod(shape))
    mesh = jax.make_mesh(
        shape, ("data", "replica")[: len(shape)], devices=jax.devices("cpu")[:size]
    )
    policy = jda.MixedPrecisionPolicy(param_comm_dtype=jnp.bfloat16)
    tx = distributed_adamw(1e-2, mesh=mesh, policy=policy, **options)
    params = {"w": jnp.linspace(0.1, 1, 16384), "b": jnp.linspace(0.2, 0.3, 7)}
    state = jda.TrainState.create(params, tx)
    step = jda.train_step(loss_fn, tx, has_aux=True)
    for i in range(2):
        full = jax.device_get(jda.full_params(state, tx))
        main = jda.main_params(state.params, state.opt_state, tx)
        if i == 0:
            assert_trees_same_bits(main, jax.device_get(params))
        state, metrics = step(state, jnp.ones(size))
        for name, seen in jax.device_get(metrics["aux"]).items():
            assert_trees_same_bits(list(seen.reshape(size, -1)), [full[name]] * size)
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), main)
    assert_trees_same_bits(full, jax.device_get(rounded))
