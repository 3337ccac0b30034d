"""Parameters of a convolutional net that a user laid out in memory: each path has the same bits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from support.bits import assert_trees_same_bits
from support.convolutions import OHWI, ORDERS, SHAPES, in_order, loss, numbers, orders_in
from support.exact_sums import HYPER, linear_loss
from support.optimizers import distributed_adamw
from support.own_loop import jit_over_mesh
from support.samples import few, often

SMALL = {"k": (3, 3, 16, 128), "w": (128, 256), "s": (8, 24), "b": (5,)}
ORDER = {"k": OHWI, "w": (1, 0), "s": (1, 0), "b": None}
KINDS = {
    "float32": (jnp.float32, {}),
    "remainder16": (jnp.bfloat16, dict(main_params_dtype="remainder16")),
    "block8": (jnp.float32, dict(mu_dtype="block8", nu_dtype="block8", rounding="stochastic")),
}
STRATEGIES = {
    "no_shard": dict(sharding_strategy="no_shard"),
    "optim": dict(sharding_strategy="optim"),
    "optim_grads": dict(sharding_strategy="optim_grads"),
    "optim_grads_params": dict(sharding_strategy="optim_grads_params"),
    "peer": dict(
        communication="peer", policy=jda.MixedPrecisionPolicy(grad_reduce_dtype="float32")
    ),
}


@few(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("jit", ["jit", "jit_step", "eager", "sharded", "sharded, explicit"])
def test_drop_in_steps_have_the_same_bits_in_any_layout(platform, kind, jit):
    """Also where params are donated; results are laid out as they were, or row-major."""
    dtype, options = KINDS[kind]
    tx = jda.fused_adamw(**HYPER, **options)
    params, place = numbers(SMALL, 0, dtype), None
    if "sharded" in jit:
        type = AxisType.Explicit if "explicit" in jit else AxisType.Auto
        devices = jax.devices(platform)
        mesh = jax.make_mesh((1,), ("data",), axis_types=(type,), devices=devices[:1])
        if len(devices) >= 8:
            mesh = jax.make_mesh((8,), ("data",), axis_types=(type,), devices=devices[:8])
        place = {k: NamedSharding(mesh, P("data") if k == "w" else P()) for k in SMALL}
        params = jax.device_put(params, place)
    expected, laid = params, in_order(jax.tree.map(jnp.copy, params), ORDER)
    assert orders_in(laid)["k"] == OHWI
    state, expected_state = tx.init(laid), tx.init(expected)
    step = {"jit": jax.jit(tx.step), "eager": tx.step}.get(jit) or jda.jit_step(tx)
    plain = jax.jit(tx.step)
    for i in range(1, 4):
        grads = numbers(SMALL, i, dtype)
        grads = grads if place is None else jax.device_put(grads, place)
        laid, state = step(in_order(grads, ORDER), state, laid)
        expected, expected_state = plain(grads, expected_state, expected)
        assert_trees_same_bits((laid, state), (expected, expected_state))


def batch(seed):
    """Small integers: every sum over rows and devices is exact."""
    rng = np.random.default_rng(seed)
    return {k: rng.integers(-64, 65, (16, *s)).astype(np.float32) for k, s in SMALL.items()}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@often(lambda strategy: strategy == "optim_grads_params")
def test_train_step_has_the_same_bits_in_any_layout(strategy, tmp_path):
    """Created from such params, given them in the middle of training, saved and restored."""
    tx = distributed_adamw(**HYPER, mesh=jax.make_mesh((8,), ("data",)), **STRATEGIES[strategy])
    step = jda.train_step(linear_loss, tx)
    results = []
    for order in (ORDER, {}):
        state = jda.TrainState.create(in_order(numbers(SMALL, 0), order), tx)
        state, _ = step(state, batch(1))
        state = dataclasses.replace(state, params=in_order(state.params, order))
        assert not order or orders_in(state.params)["k"] == OHWI
        jda.save(tmp_path / str(len(order)), state, tx)
        evaluated, _ = jda.eval_step(linear_loss, tx)(state, batch(2))
        state, metrics = step(state, batch(2))
        state, _ = step(state, batch(3))
        shapes = jda.TrainState.shapes(state.params, tx)
        restored = jda.restore(tmp_path / str(len(order)), shapes, tx)
        exported = [jda.to_optax_state(x, tx)[:2] for x in (state, restored)]
        results.append((jda.full_params(state, tx), exported, metrics, evaluated))
    assert_trees_same_bits(*results)


@few(1)
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_custom_loop_has_the_same_bits_in_any_layout(strategy):
    tx = distributed_adamw(**HYPER, mesh=jax.make_mesh((8,), ("data",)), sharding_strategy=strategy)

    opt = tx.bind(numbers(SMALL, 0))

    def local(params, state, rows):
        whole = lambda p: linear_loss(jda.gather_params(p, tx), rows)  # noqa: E731
        return opt.step(jax.grad(whole)(jda.local_params(params, opt)), state, params)

    results = []
    for order in (ORDER, {}):
        shardings = tx.param_shardings(numbers(SMALL, 0))
        params = in_order(jax.device_put(numbers(SMALL, 0), shardings), order)
        assert not order or orders_in(params)["k"] == OHWI
        run = jit_over_mesh(local, tx, params, donate_argnums=(0, 1))
        rows = jax.device_put(batch(1), NamedSharding(tx.config.mesh, P("data")))
        state = tx.init(in_order(numbers(SMALL, 0), order))
        results.append(run(params, state, rows))
    assert_trees_same_bits(*results)


def test_convolutional_net_has_the_same_bits_in_any_layout():
    """Where its kernels are in memory does not change what a net in NHWC learns."""
    tx = distributed_adamw(**HYPER, mesh=jax.make_mesh((2,), ("data",), devices=jax.devices("cpu")[:2]))  # fmt: skip
    step = jda.train_step(loss, tx)
    x = np.random.default_rng(0).normal(size=(4, 16, 16, 3)).astype(np.float32)
    results = []
    for order in (ORDERS, {}):
        state = jda.TrainState.create(numbers(SHAPES, 0), tx)
        for _ in range(3):
            state = dataclasses.replace(state, params=in_order(state.params, order))
            state, metrics = step(state, x)
        results.append((jda.full_params(state, tx), metrics))
    assert_trees_same_bits(*results)


@pytest.mark.gpu
def test_train_step_on_a_gpu_has_the_same_bits_in_any_layout():
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices("gpu")[:1])
    tx = distributed_adamw(**HYPER, mesh=mesh)
    results = []
    for order in (ORDER, {}):
        step, state = jda.train_step(linear_loss, tx), None
        state = jda.TrainState.create(numbers(SMALL, 0), tx)
        for i in range(3):
            state = dataclasses.replace(state, params=in_order(state.params, order))
            state, _ = step(state, batch(i))
        results.append((jda.full_params(state, tx), jda.to_optax_state(state, tx)[:2]))
    assert_trees_same_bits(*results)
