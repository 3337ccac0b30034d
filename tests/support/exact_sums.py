"""A model whose gradients are sums of small integers: exact in every order, so bits can agree."""

import jax
import jax.numpy as jnp
import numpy as np

import jdistadam as jda
from support.optimizers import distributed_adamw

HYPER = dict(learning_rate=3e-3, b1=0.87, b2=0.9973, eps=1e-7, eps_root=1e-12, weight_decay=0.13)
EXAMPLES = 24  # divides by every mesh size
SHAPES = {
    "rows": (48, 400),
    "columns": (5, 7200),
    "prime": (20_011,),
    "small": (7, 3),
    "scalar": (),
    "empty": (0, 4),
}


def decays(params):
    return jax.tree.map(lambda x: len(x.shape) > 1, params)


def make_tx(mesh, comm=jnp.float32, **kwargs):
    policy = jda.MixedPrecisionPolicy(grad_comm_dtype=comm)
    return distributed_adamw(**(dict(mesh=mesh, policy=policy, mask=decays) | HYPER | kwargs))


def random_params(dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(rng.normal(size=shape), jnp.float32).astype(dtype)
        for name, shape in SHAPES.items()
    }


def exact_batch(rng):
    """One gradient per example, small integers: every sum over examples is exact in float32."""
    return {
        name: rng.integers(-64, 65, (EXAMPLES, *shape)).astype(np.float32)
        for name, shape in SHAPES.items()
    }


def without_empty(tree):
    """For tests with their own jax.shard_map: jaxlib 0.11 crashes on zero-size arguments."""
    return {name: x for name, x in tree.items() if name != "empty"}


def linear_loss(params, batch):
    """Its gradient is the sum of the batch over examples / 64: exact in float32."""
    terms = jax.tree.map(
        lambda p, x: jnp.sum(p.astype(jnp.float32) * (jnp.sum(x, 0) / 64)), params, batch
    )
    return sum(jax.tree.leaves(terms))


def mean_gradient(batch, n):
    """The mean over n devices of their gradients: an exact sum, times 1 / n in float32."""
    return jax.tree.map(lambda x: jnp.asarray(x.sum(0) / np.float32(64) * np.float32(1 / n)), batch)
