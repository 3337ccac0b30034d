"""The pieces of a custom training loop, with and without vma checks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from support.bits import assert_trees_same_bits
from support.exact_sums import (
    HYPER,
    exact_batch,
    linear_loss,
    make_tx,
    random_params,
    without_empty,
)
from support.own_loop import jit_over_mesh, make_own_step, own_state
from support.samples import few, often
from support.steps import by_update

BF16 = jnp.bfloat16


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(("n", "dtype", "comm"), [(8, jnp.float32, jnp.float32), (8, BF16, BF16), (1, BF16, jnp.float32), (1, jnp.float32, BF16)], ids=str)  # fmt: skip
@often(
    lambda n, dtype, micro_batches, check_vma: (
        check_vma and (n, dtype, micro_batches) == (8, jnp.float32, 3)
    )
)
def test_own_loop_is_train_step(cpu_mesh, n, dtype, comm, micro_batches, check_vma):
    """10 steps of decayed, different data: params and state bitwise, and one program.

    The norm is a sum that XLA orders as it likes, in each program anew: n additions of float32
    are off by at most n roundings.
    """
    tx = make_tx(cpu_mesh(n), comm)
    rng = np.random.default_rng(0)
    noise = 0.0 if dtype == BF16 else 1.0

    def example(x):
        # XLA may skip the rounding of a gradient to bfloat16 in one program and not in another:
        # 16-bit params get gradients that are exact.
        x = x + noise * rng.normal(size=x.shape)
        return (np.sign(x) if dtype == BF16 else x).astype(np.float32)

    batches = [jax.tree.map(example, without_empty(exact_batch(rng))) for _ in range(10)]
    traces = []

    def loss(params, batch):
        traces.append(1)
        return linear_loss(params, batch)

    start = without_empty(random_params(dtype))
    norm_error = sum(x.size for x in jax.tree.leaves(start)) * 2.0**-24
    state = jda.TrainState.create(start, tx)
    step = jda.train_step(linear_loss, tx, accumulate_steps=micro_batches)
    params, opt_state = own_state(tx, start, check_vma)
    assert_trees_same_bits(opt_state, state.opt_state)
    own = make_own_step(tx, loss, check_vma, micro_batches)
    for i, batch in enumerate(batches):
        batch = jda.shard_batch(batch, tx)
        state, metrics = step(state, batch)
        params, opt_state, norm = own(params, opt_state, batch)
        if i == 0:
            traces_of_first_call = len(traces)
        norms = np.asarray([norm, opt_state.grad_norm])
        np.testing.assert_allclose(norms, metrics["grad_norm"], rtol=norm_error)
    assert len(traces) == traces_of_first_call
    zero = {"grad_norm": jnp.zeros(())}
    own_result = params, opt_state._replace(**zero)
    assert_trees_same_bits(own_result, (state.params, state.opt_state._replace(**zero)))


def test_clipping_in_an_own_loop(cpu_mesh):
    """The step clips by the norm that it reports, and that grad_norm gave before."""
    tx = make_tx(cpu_mesh(8), max_grad_norm=0.25, mask=None)
    params, state = own_state(tx, without_empty(random_params()), True)
    batch = jda.shard_batch(without_empty(exact_batch(np.random.default_rng(4))), tx)
    _, state, norm = make_own_step(tx, linear_loss, True)(params, state, batch)
    assert float(norm) > 0.25
    mu = np.asarray(state.mu, np.float64) / (1 - HYPER["b1"])
    np.testing.assert_allclose(np.sqrt((mu**2).sum()), 0.25, rtol=1e-5)


@few(1)
@pytest.mark.parametrize("check_vma", [True, False])
def test_update_and_apply_is_step(cpu_mesh, check_vma):
    """The optax way in a custom training loop: float32 updates land exactly on the 16-bit params."""
    tx = make_tx(cpu_mesh(4), BF16)
    batch = jda.shard_batch(without_empty(exact_batch(np.random.default_rng(1))), tx)

    def train(take, params, state, batch):
        grads = jax.grad(linear_loss)(jda.local_params(params, tx), batch)
        return take(grads, state, params)

    results = []
    for take in (functools.partial(by_update, tx.unwrapped()), tx.step):
        params, state = own_state(tx, without_empty(random_params(BF16)), check_vma)
        own = jit_over_mesh(functools.partial(train, take), tx, params, check_vma)
        for _ in range(3):
            params, state = own(params, state, batch)
        results.append((params, state))
    assert_trees_same_bits(*results)


@few(1)
@pytest.mark.parametrize("check_vma", [True, False])
def test_weights_in_an_own_loop(cpu_mesh, check_vma):
    """Weights by hand are the weights of train_step."""
    tx = make_tx(cpu_mesh(8), mask=None)
    x = np.random.default_rng(2).normal(size=(24, 7)).astype(np.float32)
    params = {"w": jnp.ones(7)}
    loss = lambda p, x: jnp.mean(jnp.square(x * p["w"][None]))  # noqa: E731
    weight = lambda x: jnp.sum(x > 0).astype(jnp.float32)  # noqa: E731
    state = jda.TrainState.create(params, tx)
    want, _ = jda.train_step(lambda p, x: (loss(p, x), weight(x)), tx, weighted=True)(state, x)

    def local_step(params, state, x):
        grads = jax.grad(loss)(jda.local_params(params, tx), x)
        return tx.step(tx.accumulate(tx.init_grads(params), grads, weight(x)), state, params)

    params, state = own_state(tx, params, check_vma)
    own = jit_over_mesh(local_step, tx, params, check_vma)
    got, _ = own(params, state, jda.shard_batch(x, tx))
    assert_trees_same_bits(got, want.params)


@pytest.mark.parametrize("where", ["step", "update", "accumulate", "grad_norm"])
def test_reduced_gradients_raise(cpu_mesh, where):
    """Gradients of replicated params are summed by jax.grad itself, under vma checks."""
    tx = make_tx(cpu_mesh(2), mask=None)
    params, state = own_state(tx, {"w": jnp.ones((4, 3))}, True)

    def local_step(params, state, batch):
        grads = jax.grad(lambda p: jnp.sum(p["w"]) * jnp.mean(batch))(params)  # no local_params
        if where == "accumulate":
            grads = tx.accumulate(tx.init_grads(params), grads)
        if where == "grad_norm":
            return params, state, tx.grad_norm(grads, state)
        new, state = (tx.unwrapped().update if where == "update" else tx.step)(grads, state, params)
        return new, state, jnp.zeros(())

    specs = (P(), tx.state_specs())
    own = jax.shard_map(
        local_step, mesh=tx.config.mesh, in_specs=(*specs, P("data")), out_specs=(*specs, P())
    )
    with pytest.raises(
        jda.MeshError, match=r"grads\['w'\]: already reduced over the mesh: .*local_params"
    ):
        jax.jit(own)(params, state, jda.shard_batch(np.ones((2, 1), np.float32), tx))


@pytest.mark.parametrize("sharding_strategy", ["optim", "optim_grads_params"])
def test_params_that_differ_along_a_data_axis_raise(cpu_mesh, sharding_strategy):
    """A step would make experts equal; shards, which differ too, and equal params are taken."""
    params = {"experts": jnp.arange(4.0), "w": jnp.ones((128, 128))}
    tx = make_tx(cpu_mesh(4), mask=None, sharding_strategy=sharding_strategy)
    opt = tx.bind(params)

    def state_of(specs, opt):
        init = jax.shard_map(
            opt.init, mesh=tx.config.mesh, in_specs=(specs,), out_specs=tx.state_specs()
        )
        place = lambda x, spec: jax.device_put(x, jax.NamedSharding(tx.config.mesh, spec))  # noqa: E731
        return jax.jit(init)(jax.tree.map(place, params, specs))

    specs = opt.param_specs(params)
    assert_trees_same_bits(state_of(specs, opt), tx.init(params))
    apart = specs | {"experts": P("data")}
    opt = tx.bind(params | {"experts": jnp.ones(1)})
    message = r"^params\['experts'\]: may differ between devices, .* data axis 'data', expected"
    with pytest.raises(jda.MeshError, match=message):
        state_of(apart, opt)


def test_a_gradient_that_was_summed_counts_once(cpu_mesh):
    """Whichever device's part of the sum is not finite; others count each device of theirs."""
    params = {"b": jnp.ones(3), "w": jnp.ones((128, 128))}
    tx = make_tx(cpu_mesh(4), mask=None, sharding_strategy="optim_grads_params")
    opt = tx.bind(params)

    def count(params, x):
        def loss(params):
            whole = jda.gather_params(params, opt)
            return jnp.sum(whole["w"] * x[0]) + jnp.sum(whole["b"]) * x[0, 0, 0]

        return jda.count_nonfinite(jax.grad(loss)(jda.local_params(params, opt)), opt)

    x = np.ones((4, 128, 128), np.float32)
    x[1:3, 0, 0] = np.inf
    for check_vma in (True, False):
        specs = (tx.param_specs(params), P("data"))
        counts = jax.shard_map(
            count, mesh=tx.config.mesh, in_specs=specs, out_specs=P(), check_vma=check_vma
        )
        placed = jax.device_put(params, tx.param_shardings(params))
        got = jax.jit(counts)(placed, jda.shard_batch(x, tx))
        assert jda.nonfinite_paths(got, params) == {"params['b']": 2, "params['w']": 1}


def test_outside_of_a_shard_map_every_piece_says_so(cpu_mesh):
    tx = make_tx(cpu_mesh(2), mask=None)
    params = {"w": jnp.ones(3)}
    state = tx.init(params)
    for name, call in {
        "step": lambda: tx.step(params, state, params),
        "grad_norm": lambda: tx.grad_norm(params, state),
        "init_grads": lambda: tx.init_grads(params),
        "local_params": lambda: jda.local_params(params, tx),
        "accumulate": lambda: tx.accumulate(
            jda.AccumulatedGrads(params, jnp.zeros(()), ("float32",)), params
        ),
    }.items():
        with pytest.raises(jda.MeshError, match=f"{name}: called outside of jax.shard_map"):
            call()


def test_accumulate_raises_for_other_trees_and_weights(cpu_mesh):
    tx = make_tx(cpu_mesh(2), mask=None)

    def weigh(params):
        return tx.accumulate(tx.init_grads(params), params, jnp.ones(1)).weight[None]

    own = jax.shard_map(
        weigh, mesh=tx.config.mesh, in_specs=(P(),), out_specs=P("data"), check_vma=False
    )
    with pytest.raises(jda.ShapeError, match=r"weight: not a scalar: got \(1,\), expected \(\)"):
        own({"w": jnp.ones(3)})

    def local(params):
        return tx.accumulate(tx.init_grads(params), {"w": params["w"][:1]}).weight[None]

    own = jax.shard_map(
        local, mesh=tx.config.mesh, in_specs=(P(),), out_specs=P("data"), check_vma=False
    )
    with pytest.raises(
        jda.ShapeError,
        match=r"grads\['w'\]: shape differs from accumulated grads: got \(1,\), expected \(3,\)",
    ):
        own({"w": jnp.ones(3)})


def test_hyperparameters_of_the_state_are_its_own(cpu_mesh):
    """A distributed optimizer inside a chain, in a custom training loop: specs are those of the chain."""
    tx = jda.chain(optax.scale(2.0), make_tx(cpu_mesh(4), mask=None))
    plain = make_tx(cpu_mesh(4), mask=None)
    batch = jda.shard_batch(without_empty(exact_batch(np.random.default_rng(3))), tx)
    params = without_empty(random_params())
    state = tx.init(params)
    own = make_own_step(tx, linear_loss, True)
    mine = jax.tree.map(jnp.copy, params)  # device_put may hand out the caller's own buffers
    got, state, _ = own(jax.device_put(mine, jax.NamedSharding(tx.config.mesh, P())), state, batch)
    want, _ = jda.train_step(lambda p, b: 2 * linear_loss(p, b), plain)(
        jda.TrainState.create(params, plain), batch
    )
    assert_trees_same_bits(got, want.params)
    assert HYPER["learning_rate"] == tx.config.algorithm.hyper.learning_rate
