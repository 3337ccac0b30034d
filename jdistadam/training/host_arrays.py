"""Arrays of a mesh, brought to the host whole."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jdistadam.core import trees
from jdistadam.errors import TreeError


def fetch(x: Any) -> np.ndarray:
    """Returns a whole array, also one of which other processes hold parts: all must call this."""
    if isinstance(x, jax.core.Tracer):
        raise TreeError(
            "state: this runs on the host, not inside of a program: "
            "got a traced array, as in jax.jit or jax.lax.scan, expected arrays with values. "
            "Call it outside; in a program jda.full_params(state, tx) has the parameters."
        )
    if isinstance(x, jax.Array) and not x.size:
        return np.zeros(x.shape, x.dtype)  # one that a program cut cannot be read
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        assert isinstance(x.sharding, NamedSharding)
        replicated = NamedSharding(x.sharding.mesh, P())
        x = jax.jit(lambda x: x, out_shardings=replicated)(x)
    return np.asarray(x)


def copy_of(x: Any) -> Any:
    """Returns a numpy array, which shares no memory; of random keys new ones, on no mesh."""
    if trees.is_key(x):
        words = jnp.array(fetch(jax.random.key_data(x)))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
    return np.array(fetch(x))
