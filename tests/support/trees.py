"""A small tree with leaves of every kind, and non-default hyperparameters."""

import jax.numpy as jnp
import numpy as np

F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16
ADAM = dict(learning_rate=3e-3, b1=0.87, b2=0.9973, eps=1e-7, eps_root=1e-12)
HYPER = ADAM | dict(weight_decay=0.13)


def random_tree(rng, dtype=F32, scale=1.0):
    shapes = {"w": (65, 33), "b": (33,), "one": (1,), "scalar": (), "empty": (0, 3)}
    numbers = {k: np.asarray(rng.normal(size=s) * scale, np.float32) for k, s in shapes.items()}
    return {k: jnp.asarray(x.astype(dtype)) for k, x in numbers.items()}
