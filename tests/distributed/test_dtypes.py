"""What is stored and communicated: every field of the policy, under every strategy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from support.bits import assert_same_bits, assert_trees_same_bits
from support.given_gradients import make_tx, own_step, random_params, run
from support.placements import FLAT, STRATEGIES
from support.samples import often

SUMMED = dict(grad_reduce_dtype="float32")


COMMS = [
    ("float32", "bfloat16"), ("float32", "float16"), ("float32", "float8_e5m2"),
    ("float32", "float8_e4m3fn"), ("bfloat16", "float8_e4m3fn"), ("bfloat16", "float16"),
]  # fmt: skip


@functools.cache
def plain_run(dtype, strategy, devices):
    """Without a dtype of its own for the communication of parameters."""
    mesh = dict(shape=(devices,), names=("data",))
    tx = make_tx(mesh, jda.MixedPrecisionPolicy(**SUMMED), sharding_strategy=strategy)
    return run(tx, dtype, devices=devices)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["optim", "optim_grads"])
@pytest.mark.parametrize(("dtype", "comm"), COMMS)
@often(lambda strategy, dtype, comm: (strategy, dtype, comm) == ("optim", "bfloat16", "float16"))
def test_params_are_main_params_rounded_to_the_communication_dtype(strategy, dtype, comm):
    """Every device computes with the main parameters rounded to the communication dtype, its own too."""
    policy = jda.MixedPrecisionPolicy(param_comm_dtype=comm, **SUMMED)
    for shape in ((8,), (1,)):
        mesh = dict(shape=shape, names=("data",))
        kwargs = dict(sharding_strategy=strategy)
        devices = shape[0]
        params, main, state = run(make_tx(mesh, policy, **kwargs), dtype, devices=devices)
        _, want_main, want_state = plain_run(dtype, strategy, devices)
        assert_trees_same_bits(state, want_state, comm)
        for name, x in params.items():
            if shape == (8,) or dtype == "bfloat16":
                assert_same_bits(main[name], want_main[name], name)
            rounded = jnp.asarray(want_main[name]).astype(dtype).astype(comm).astype(dtype)
            assert_same_bits(x, rounded, name)


def test_gathered_params_travel_in_param_comm_dtype():
    """Under optim_grads_params the shards keep their bits; what the model sees is rounded."""
    policy = jda.MixedPrecisionPolicy(param_comm_dtype="bfloat16")
    tx = make_tx(FLAT, policy, sharding_strategy="optim_grads_params")
    state = jda.TrainState.create(random_params(), tx)
    opt = tx.bind(state.params)
    seen = jax.jit(
        jax.shard_map(
            lambda p: jda.gather_params(jda.local_params(p, opt), tx),
            mesh=tx.config.mesh,
            in_specs=(tx.param_specs(state.params),),
            out_specs=P(),
            check_vma=False,
        )
    )(state.params)
    for name, x in random_params().items():
        is_sharded = name in ("rows", "columns")
        want = x.astype(jnp.bfloat16).astype(jnp.float32) if is_sharded else x
        assert_same_bits(seen[name], want, name)
        assert_same_bits(state.params[name], x, name)


@pytest.mark.parametrize("strategy", STRATEGIES)
@often(lambda strategy: strategy == "optim_grads")
def test_accumulation_is_in_main_grads_dtype(strategy):
    """In bfloat16 a sum of many small gradients stands still; in float32 it does not."""
    sums = {}
    for dtype in ("float32", "bfloat16"):
        policy = jda.MixedPrecisionPolicy(main_grads_dtype=dtype, **SUMMED)
        tx = make_tx(FLAT, policy, sharding_strategy=strategy, average_grads=False)
        params = {"w": jnp.zeros((64, 512))}
        state = jda.TrainState.create(params, tx)
        grads = {"w": np.full((8, 3, 64, 512), 2.0**-9, np.float32)}
        grads["w"][:, 0] = 1.0
        _, opt_state = own_step(tx, state.params, micro=3)(
            jda.shard_batch(grads, tx), state.opt_state, state.params
        )
        sums[dtype] = float(np.asarray(opt_state.mu)[0]) / (1 - 0.87)
        bound = tx.bind(params)
        acc = jax.eval_shape(
            jax.shard_map(
                lambda p, tx=bound: tx.init_grads(p).sums, mesh=tx.config.mesh,
                in_specs=(tx.param_specs(params),), out_specs=P("data"), check_vma=False,
            ),
            state.params,
        )  # fmt: skip
        assert {x.dtype for x in jax.tree.leaves(acc)} == {jnp.dtype(dtype)}
    assert sums["float32"] == pytest.approx(8 * (1 + 2 * 2.0**-9), rel=1e-6)
    assert sums["bfloat16"] == pytest.approx(8, rel=1e-6)  # 1 + 2^-9 rounds to 1


@pytest.mark.parametrize("summed", [None, "float32"])
@pytest.mark.parametrize("shape", [(1,), (8,)])
@often(lambda shape, summed: (shape == (8,)) == (summed is None))
def test_small_numbers_survive_communication_in_float16(shape, summed):
    """Subnormal in float16, and exact in it: 3 * 2^-24 on each device."""
    policy = jda.MixedPrecisionPolicy(grad_comm_dtype="float16", grad_reduce_dtype=summed)
    tx = make_tx(dict(shape=shape, names=("data",)), policy)
    state = jda.TrainState.create({"w": jnp.zeros((64, 512))}, tx)
    grads = {"w": np.full((*shape, 1, 64, 512), 3 * 2.0**-24, np.float32)}
    _, opt_state = own_step(tx, state.params)(
        jda.shard_batch(grads, tx), state.opt_state, state.params
    )
    assert np.asarray(opt_state.mu)[0] == np.float32(1 - 0.87) * np.float32(3 * 2.0**-24)
