"""Gradients that gather_params summed: in float32 from there into the kernel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdistadam as jda
from jdistadam.distributed import shard
from jdistadam.distributed.config import DistributedConfig
from support.bits import assert_trees_same_bits
from support.dtypes import dtypes
from support.h200 import placed
from support.optimizers import distributed_adamw
from support.placements import FLAT, make_mesh
from support.samples import few, often
from support.scanned import (
    layers_of,
    loss_of,
    make_params,
    scanned_products,
    shapes,
)

HYPER = dict(learning_rate=3e-3, b1=0.87, b2=0.9973, eps=1e-7, weight_decay=0.13)


def make_tx(mesh, policy=None, **kwargs):
    given = dtypes(**({"grad_reduce_dtype": "float32"} | (policy or {})))
    return distributed_adamw(**HYPER, mesh=mesh, **given, **kwargs)


def make_batches(steps):
    """Local gradients that bfloat16 holds, of which it does not hold the sums."""
    rng = np.random.default_rng(1)
    return [
        jax.tree.map(
            lambda x: rng.integers(-64, 65, (16, *x.shape)).astype(np.float32), make_params()
        )
        for _ in range(steps)
    ]


def train(tx, loss, batches, **kwargs):
    state = jda.TrainState.create(make_params(jnp.bfloat16), tx)
    step = jda.train_step(loss, tx, **kwargs)
    norms = []
    for batch in batches:
        state, metrics = step(state, batch)
        norms.append(metrics["grad_norm"])
    main = jda.main_params(state.params, state.opt_state, tx)
    return main, jda.full_params(state, tx), *jda.to_optax_state(state, tx), norms


@functools.cache
def trained_whole(accumulate_steps):
    """What the same model with unsharded parameters gives, whose gradients are summed in a step."""
    tx = make_tx(make_mesh(**FLAT), sharding_strategy="optim_grads")
    loss = scanned_products(lambda layer: layer)
    return train(tx, loss, make_batches(3), accumulate_steps=accumulate_steps)


def own_step(tx, loss, check_vma, micro_batches):
    """A step of a custom training loop, and its own norm; all shards are gathered in the loss."""
    tx = tx.bind(make_params(jnp.bfloat16))

    def local_step(params, state, batch):
        local = jda.local_params(params, tx)

        def whole_loss(shards, batch):
            return loss(jda.gather_params(shards, tx), batch)

        if micro_batches == 1:
            grads = jax.grad(whole_loss)(local, batch)
        else:
            parts = jax.tree.map(lambda x: x.reshape(micro_batches, -1, *x.shape[1:]), batch)

            def body(acc, part):
                return tx.accumulate(acc, jax.grad(whole_loss)(local, part)), None

            grads, _ = jax.lax.scan(body, tx.init_grads(local), parts)
        return *tx.step(grads, state, params), tx.grad_norm(grads, state)

    specs = tx.param_specs(make_params(jnp.bfloat16)), tx.state_specs()
    mapped = jax.shard_map(
        local_step, mesh=tx.config.mesh, in_specs=(*specs, tx.config.parallel.batch_spec), out_specs=(*specs, jax.P()), check_vma=check_vma
    )  # fmt: skip
    return jax.jit(mapped)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("check_vma", [False, True])
@often(lambda check_vma, micro_batches: check_vma and micro_batches == 2)
def test_custom_training_loop_takes_the_bits_of_float32_sums(check_vma, micro_batches):
    mesh = make_mesh(**FLAT)
    tx = make_tx(mesh, sharding_strategy="optim_grads_params", layers=layers_of)
    loss = scanned_products(functools.partial(jda.gather_params, tx=tx))
    step = own_step(tx, loss, check_vma, micro_batches)
    state = jda.TrainState.create(make_params(jnp.bfloat16), tx)
    params, opt_state = state.params, state.opt_state
    for batch in make_batches(3):
        params, opt_state, norm = step(params, opt_state, jda.shard_batch(batch, tx))
        assert norm == opt_state.grad_norm
    got = jda.main_params(params, opt_state, tx)
    assert_trees_same_bits(got, trained_whole(micro_batches)[0], "main params")


@pytest.mark.parametrize("policy", [{}, dict(grad_comm_dtype="bfloat16", grad_reduce_dtype=None)])
def test_loss_sees_only_sharded_stacked_leaves_widened(policy):
    """Shards that hold the sums of their gradients; what it gathers, and all else, as it is."""
    tx = make_tx(
        make_mesh(**FLAT), policy, sharding_strategy="optim_grads_params", layers=layers_of
    )
    wide = tx.config.policy.reduced_dtype
    assert wide == (jnp.bfloat16 if policy else jnp.float32)
    loss = scanned_products(functools.partial(jda.gather_params, tx=tx))

    def looking(params, batch):
        seen = jax.tree.map(lambda x: x.dtype, shard.plain(params))
        narrow = jnp.dtype(jnp.bfloat16)
        assert seen == {
            "embed": narrow, "head": narrow,
            "layers": {"mlp": {"up": wide, "down": wide}, "scale": narrow, "odd": narrow},
        }  # fmt: skip
        layer = jax.tree.map(lambda x: x[0], params["layers"])
        assert jax.tree.leaves(jda.gather_params(layer, tx))[-1].dtype == narrow
        assert jda.gather_params(params, tx)["layers"]["mlp"]["up"].value.dtype == wide  # as it is
        return loss(params, batch)

    step = jda.train_step(looking, tx)
    state = jda.TrainState.shapes(make_params(jnp.bfloat16), tx)
    jax.eval_shape(step, state, *make_batches(1))


@few(1)
@pytest.mark.parametrize("communication", ["xla", "peer"])
def test_widened_shards_cost_at_most_one_float32_copy(h200s, monkeypatch, communication):
    """Compiled for eight H200s: 4 bytes for each element of a shard, and 2 for its wider gradient.

    Without the copy the program is the one with bfloat16 gradients of the shards. Over peer memory
    layers are widened one by one.
    """
    mesh = h200s(8)
    params = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.bfloat16), shapes(12, 1024), is_leaf=lambda s: type(s) is tuple
    )  # fmt: skip

    def compiled():
        tx = make_tx(
            mesh, dict(grad_comm_dtype="bfloat16"), sharding_strategy="optim_grads_params", layers=layers_of,
            communication=communication,
        )  # fmt: skip

        loss = loss_of(functools.partial(jda.gather_params, tx=tx), jda.remat_policy)

        batch = jax.ShapeDtypeStruct((64, 257), jnp.bfloat16)
        batch = placed(mesh, batch, tx.config.parallel.batch_spec)
        audit = jda.audit(jda.train_step(loss, tx), jda.TrainState.shapes(params, tx), batch)
        assert audit.passed, str(audit)
        return jda.plan(params, tx), audit.program.memory_analysis().temp_size_in_bytes

    plan, wide = compiled()
    elements = 12 * 8 * 1024 * 1024 // 8  # of the shards of up and down
    copied = 4 * elements if communication == "xla" else 0
    assert plan.buffers.get("widened shards", 0) == copied
    monkeypatch.setattr(DistributedConfig, "differentiated_dtype", lambda self, dtype: dtype)
    plan, narrow = compiled()
    assert "widened shards" not in plan.buffers
    of_layers = 3 * 6 * elements // 12  # in flight: this layer, the one before and the next
    assert 0 < wide - narrow <= copied + 2 * elements * 1.02 + of_layers
