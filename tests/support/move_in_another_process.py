"""Restores on two devices what test_extra_state.py saved on eight; writes what it then exports.

Usage: move_in_another_process.py FOLDER typed|raw
"""

import os
import pathlib
import pickle
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

import jdistadam as jda
from support.lookalike import BF16, make_params, make_tx


def target(tx, kind):
    """The export of a new state: orbax restores into its types."""
    model_state = {
        "mean": jnp.zeros(3, BF16),
        "steps": jnp.int32(0),
        "seen": jnp.zeros(2, jnp.bool_),
        "key": jax.random.key(0, impl="rbg"),
        "nothing": None,
    }
    rng = jax.random.key(0) if kind == "typed" else jax.random.PRNGKey(0)
    state = jda.TrainState.create(make_params(), tx, model_state=model_state, rng=rng)
    return jda.to_optax_state(state, tx)


def main():
    folder, kind = pathlib.Path(sys.argv[1]), sys.argv[2]
    assert jax.device_count() == 2
    tx = make_tx(2, loss_scale=jda.DynamicLossScale(), sharding_strategy="optim_grads_params")
    saved = {
        "pickle": pickle.loads((folder / "state.pickle").read_bytes()),
        "orbax": ocp.StandardCheckpointer().restore(folder / "orbax", target(tx, kind)),
    }
    for name, (main_params, opt_state, extra_state) in saved.items():
        state = jda.from_optax_state(main_params, opt_state, tx, extra_state, param_dtypes=BF16)
        assert int(state.step) == 3
        (folder / f"again.{name}").write_bytes(pickle.dumps(jda.to_optax_state(state, tx)))


main()
