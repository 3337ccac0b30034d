"""Numbers that a user put into the state of ``inject_hyperparams``, as a program takes them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jdistadam.core import trees
from jdistadam.distributed.state import is_distributed_state
from jdistadam.errors import HyperparameterError
from jdistadam.training.state_memory import is_known, remember_params
from jdistadam.training.train_state import TrainState


def with_numbers_as_arrays(state: TrainState, mesh: Mesh) -> TrainState:
    """Returns a state whose hyperparameters are replicated arrays: the same state if they are.

    A Python number, or an array on one device, is an argument of another type than the one that the
    step returned, for which it would be compiled again.

    Args:
      state: A train state. The params in it are the same arrays, so that a step knows them.
      mesh: The mesh.

    Raises:
      HyperparameterError: A hyperparameter is not one number.
    """
    if not _has_injected(state.opt_state):
        return state
    replicated = NamedSharding(mesh, P())

    def as_arrays(part: Any) -> Any:
        if not _is_injected(part):
            return part
        items = part.hyperparams.items()
        return part._replace(hyperparams={k: _as_array(k, x, replicated) for k, x in items})

    is_part = lambda x: _is_injected(x) or is_distributed_state(x)  # noqa: E731
    opt_state = jax.tree.map(as_arrays, state.opt_state, is_leaf=is_part)
    new = dataclasses.replace(state, opt_state=opt_state)
    leaves = jax.tree.leaves(state.params)
    return remember_params(new, leaves) if is_known(state, leaves) else new


def _as_array(name: str, x: Any, replicated: NamedSharding) -> jax.Array:
    if isinstance(x, jax.Array) and x.shape == () and x.sharding == replicated:
        return x
    is_number = trees.is_number(x) and not isinstance(x, bool) and np.shape(x) == ()
    if not is_number or not _is_real(jnp.result_type(x)):
        raise HyperparameterError(
            f"opt_state.hyperparams[{name!r}]: not one real number: got {x!r}, expected a scalar. "
            "Set a Python number or an array of shape ()."
        )
    keeps_dtype = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, np.floating)
    return jax.device_put(x if keeps_dtype else np.float32(x), replicated)


def _has_injected(opt_state: Any) -> bool:
    """Whether ``inject_hyperparams`` made a part of a state; at no cost for the plain one."""
    if is_distributed_state(opt_state):
        return False
    return any(map(_is_injected, jax.tree.leaves(opt_state, is_leaf=_is_injected)))


def _is_injected(x: Any) -> bool:
    return isinstance(x, optax.InjectStatefulHyperparamsState)


def _is_real(dtype: Any) -> bool:
    return any(jnp.issubdtype(dtype, kind) for kind in (np.integer, np.floating))
