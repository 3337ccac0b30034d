"""Steps of a distributed optimizer on given gradients, different on each device."""

import jax
import jax.numpy as jnp
import numpy as np

import jdistadam as jda
from support.dtypes import dtypes
from support.exact_sums import HYPER, decays, without_empty
from support.exact_sums import SHAPES as SHAPES_AND_EMPTY
from support.exact_sums import random_params as params_and_empty
from support.optimizers import distributed_adamw
from support.placements import make_mesh

SHAPES = without_empty(SHAPES_AND_EMPTY)


def make_tx(mesh, policy=None, **kwargs):
    """``policy``: a policy, or a dict of dtypes including moments; None: sums in float32."""
    policy = dict(grad_reduce_dtype=jnp.float32) if policy is None else policy
    given = dtypes(**policy) if isinstance(policy, dict) else dict(policy=policy)
    return distributed_adamw(**(dict(mesh=make_mesh(**mesh), mask=decays) | given | HYPER | kwargs))


def random_params(dtype=jnp.float32):
    return without_empty(params_and_empty(dtype))


def random_grads(rng, devices=8, micro=1):
    """Different on each device and micro-batch, over many orders of magnitude."""
    return {
        k: (rng.normal(size=(devices, micro, *s)) * 10.0 ** rng.integers(-4, 3)).astype(np.float32)
        for k, s in SHAPES.items()
    }


def own_step(tx, params, *, micro=1, check_vma=False, function=None):
    """A jitted step over given local gradients, of shape (devices, micro-batches, ...)."""
    tx = tx.bind(params)

    def local(grads, state, params):
        if micro == 1:
            return tx.step(jax.tree.map(lambda x: x[0, 0], grads), state, params)
        acc = tx.init_grads(params)
        for i in range(micro):
            acc = tx.accumulate(acc, jax.tree.map(lambda x, i=i: x[0, i], grads))
        return tx.step(acc, state, params)

    specs = tx.param_specs(params), tx.state_specs()
    return jax.jit(
        jax.shard_map(
            function or local,
            mesh=tx.config.mesh,
            in_specs=(tx.config.parallel.batch_spec, specs[1], specs[0]),
            out_specs=specs,
            check_vma=check_vma,
        )
    )


def run(tx, dtype=jnp.float32, *, steps=5, micro=1, devices=8, check_vma=False, params=None):
    """The state after some steps on random gradients: params, main params and optax's state."""
    state = jda.TrainState.create(
        random_params(jnp.float32) if params is None else params, tx, param_dtypes=dtype
    )
    step = own_step(tx, state.params, micro=micro, check_vma=check_vma)
    rng = np.random.default_rng(1)
    params, opt_state = state.params, state.opt_state
    for _ in range(steps):
        params, opt_state = step(
            jda.shard_batch(random_grads(rng, devices, micro), tx), opt_state, params
        )
    state = jda.TrainState(params, opt_state)
    return jda.full_params(state, tx), *jda.to_optax_state(state, tx)[:2]
