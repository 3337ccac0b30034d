"""A skipped step on any mesh, and everything that it must not change."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdistadam as jda
from support.bits import assert_same_bits, assert_trees_same_bits
from support.given_gradients import SHAPES, make_tx, random_params

HYBRID = dict(replica_axis="replica")
POLICIES = {
    "float32": dict(),
    "bfloat16": dict(grad_comm_dtype="bfloat16", grad_reduce_dtype="float32"),
    "comm": dict(param_comm_dtype="bfloat16"),
    "remainder16": dict(main_params_dtype="remainder16"),
    "none": dict(main_params_dtype=None),
    "8 bits": dict(
        main_params_dtype="remainder16", mu_dtype="block8", nu_dtype="block8", rounding="stochastic"
    ),
}


def trained(tx, dtype="float32"):
    """A state after one ordinary step, so nothing in it is zero; and a step function."""
    state = jda.TrainState.create(random_params(), tx, param_dtypes=dtype)

    def loss_fn(params, batch):
        terms = jax.tree.map(
            lambda p, x: jnp.sum(p.astype(jnp.float32) * jnp.mean(x, 0)), params, batch
        )
        return sum(jax.tree.leaves(terms))

    step = jda.train_step(loss_fn, tx, accumulate_steps=2, report_nonfinite=True)
    state, metrics = step(state, batch_of(np.random.default_rng(0)))
    assert int(metrics["skipped"]) == 0
    return state, step


def batch_of(rng):
    return {k: rng.normal(size=(32, *s)).astype(np.float32) for k, s in SHAPES.items()}


def assert_skipped_step_changes_no_bit(mesh, strategy, policy, bad):
    dtype = "bfloat16" if policy in ("bfloat16", "remainder16", "none", "8 bits") else "float32"
    tx = make_tx(
        mesh,
        POLICIES[policy],
        sharding_strategy=strategy,
        max_grad_norm=0.5,
        loss_scale=jda.DynamicLossScale(init_scale=1024.0),
        **HYBRID,
    )
    state, step = trained(tx, dtype)
    before = jax.tree.map(np.asarray, state)
    batch = batch_of(np.random.default_rng(1))
    batch["columns"][17, 3, 1234] = bad  # one example, so one micro-batch of one device
    state, metrics = step(state, batch)
    after = jax.tree.map(np.asarray, state)
    assert int(metrics["skipped"]) == int(optax.tree.get(state.opt_state, "skipped")) == 1
    assert float(metrics["loss_scale"]) == 1024.0
    assert float(optax.tree.get(state.opt_state, "loss_scale")) == 512.0
    assert jda.nonfinite_paths(metrics["nonfinite"], state.params) == {"params['columns']": 1}
    assert int(after.opt_state.count) == 1
    for name in SHAPES:
        assert_same_bits(after.params[name], before.params[name], name)
        shards = state.params[name].addressable_shards
        where = {}
        for s in shards:  # devices with the same part have the same bits
            first = where.setdefault(str(s.index), np.asarray(s.data))
            assert_same_bits(np.asarray(s.data), first, name)
    for name in ("main_params", "mu", "nu"):
        x = getattr(after.opt_state, name)
        if x is not None:
            assert_trees_same_bits(x, getattr(before.opt_state, name))
    state, metrics = step(state, batch_of(np.random.default_rng(2)))
    assert int(metrics["skipped"]) == 1 and int(state.opt_state.count) == 2
    assert np.isfinite(metrics["grad_norm"]) and not np.any(metrics["nonfinite"])
