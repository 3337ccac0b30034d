"""Two trees with different leaves and flat arrays of equal size, and an optimizer for them."""

import jax
import jax.numpy as jnp
import numpy as np

from support.dtypes import dtypes
from support.exact_sums import HYPER
from support.optimizers import distributed_adamw

BF16 = jnp.bfloat16
WIDE, TALL = (256, 128), (128, 256)  # of equal size, for any number of shards


def make_tx(n=8, mesh=None, policy=None, **kwargs):
    """``policy``: a policy, or a dict of dtypes including moments."""
    given = dtypes(**policy) if isinstance(policy, dict) else dict(policy=policy)
    mesh = mesh or jax.make_mesh((n,), ("data",), devices=jax.devices("cpu")[:n])
    return distributed_adamw(**(dict(mesh=mesh) | given | HYPER | kwargs))


def make_params(dtype=jnp.float32, a=WIDE, b=TALL):
    rng = np.random.default_rng(0)
    return {
        name: jnp.asarray(rng.normal(size=shape), dtype)
        for name, shape in {"a": a, "b": b, "bias": (5,)}.items()
    }


def other_params(dtype=jnp.float32):
    """Other leaves with other values; their flat arrays have the same size."""
    return jax.tree.map(lambda x: -x, make_params(dtype, a=TALL, b=WIDE))


def loss_fn(params, x):
    total = sum(jnp.sum(jnp.sin(p.astype(jnp.float32))) for p in jax.tree.leaves(params))
    return total * jnp.mean(x)


BATCH = np.linspace(0.5, 1.5, 8, dtype=np.float32)
POLICIES = {
    "float32": (jnp.float32, dict()),
    "bfloat16": (BF16, dict()),
    "remainder16": (BF16, dict(main_params_dtype="remainder16")),
    "no main": (BF16, dict(main_params_dtype=None)),
    "comm": (jnp.float32, dict(param_comm_dtype=BF16)),
    "8 bits": (
        BF16,
        dict(
            main_params_dtype=None,
            mu_dtype="block8",
            nu_dtype="block8",
            rounding="stochastic",
            seed=5,
        ),
    ),
}
