"""A distributed step has no members: vmap says so in words."""

import jax
import jax.numpy as jnp
import pytest

import jdistadam as jda
from jdistadam.errors import PolicyError


@pytest.mark.parametrize("jitted", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("batched", ["state", "batch"])
def test_vmap_of_a_distributed_step_raises(cpu_mesh, batched, jitted):
    tx = jda.distributed_fused_adamw(1e-2, mesh=cpu_mesh(4), shard_axis="data")
    state = jda.TrainState.create({"w": jnp.ones((8, 4))}, tx)
    step = jda.train_step(lambda params, batch: jnp.mean((batch @ params["w"]) ** 2), tx)
    batch = jnp.ones((8, 8))
    axes = (0, None) if batched == "state" else (None, 0)
    if batched == "state":
        state = jax.tree.map(lambda x: jnp.stack([x] * 3), state)
    else:
        batch = jnp.stack([batch] * 3)
    function = jax.vmap(step, in_axes=axes)
    with pytest.raises(PolicyError, match="step: a distributed optimizer cannot run under"):
        (jax.jit(function) if jitted else function)(state, batch)
