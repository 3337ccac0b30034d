"""ZeRO-1 on one to eight devices against one device, bit for bit wherever sums are exact."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jdistadam as jda
from support.bits import assert_same_bits
from support.exact_sums import (
    HYPER,
    SHAPES,
    decays,
    exact_batch,
    linear_loss,
    make_tx,
    mean_gradient,
    random_params,
)
from support.flat import leaves_of_flat
from support.reduced import reduced
from support.samples import often
from support.ulp import assert_step_close

MESH_SIZES = (1, 2, 3, 4, 8)


@pytest.mark.parametrize("comm", [jnp.float32, jnp.bfloat16], ids=str)
@pytest.mark.parametrize("n", MESH_SIZES)
@often(lambda n: n in (1, 3))
def test_reduced_gradients_are_the_sum_within_a_derived_bound(cpu_mesh, n, comm):
    """Different data on each device; a contribution that is lost or counted twice shows at once.

    Bound: each of N contributions is rounded once to the communication dtype and enters at most N - 1
    rounded additions, so |error| <= ((1 + u)^N - 1) * sum |x_r|, u its unit roundoff.
    """
    mesh = cpu_mesh(n)
    tx = make_tx(mesh, comm)
    rng = np.random.default_rng(n)
    params = random_params()
    layout = tx.config.layout(params)
    local = {
        k: rng.normal(size=(n, *s)).astype(np.float32) * 10.0 ** rng.integers(-3, 4)
        for k, s in SHAPES.items()
    }

    flat, dtypes = reduced(tx, params, local)
    assert dtypes and all(dtype == comm for dtype in dtypes)
    sums = leaves_of_flat(layout, flat)
    unit = float(jnp.finfo(comm).eps) / 2
    for got, x in zip(sums, jax.tree.leaves(local), strict=True):
        exact = x.astype(np.float64).sum(0)
        bound = ((1 + unit) ** n - 1) * np.abs(x).astype(np.float64).sum(0)
        assert (np.abs(np.asarray(got, np.float64) - exact) <= bound).all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
@pytest.mark.parametrize("n", MESH_SIZES)
@often(lambda n, dtype: n == 3 and dtype == jnp.bfloat16)
def test_training_step_equals_one_device_optax(cpu_mesh, n, dtype):
    """10 steps, each from equal state, with masked decay, against jitted optax on the mean gradient.

    The gradients' sums are exact, so what remains is the step itself; main parameters are float32
    on both sides also where the model computes in bfloat16.
    """
    tx = make_tx(cpu_mesh(n))
    state = jda.TrainState.create(random_params(dtype), tx)
    step = jda.train_step(linear_loss, tx)
    theirs = optax.adamw(**HYPER, mask=decays)
    their_update = jax.jit(theirs.update)
    rng = np.random.default_rng(n)
    for count in range(10):
        # signs: a device's sum over examples is exact also in a bfloat16 gradient
        batch = jax.tree.map(np.sign, exact_batch(rng))
        main, old, _ = jda.to_optax_state(state, tx)
        main = jax.tree.map(jnp.asarray, main)
        state, metrics = step(state, batch)
        grads = mean_gradient(batch, n)
        updates, want_state = their_update(grads, old, main)
        want_main = optax.apply_updates(main, updates)
        got_main, got_state, _ = jda.to_optax_state(state, tx)
        for name in SHAPES:
            hyper = HYPER | dict(
                weight_decay=HYPER["weight_decay"] if len(SHAPES[name]) > 1 else 0.0
            )
            got = dict(params=got_main[name], mu=got_state[0].mu[name], nu=got_state[0].nu[name])
            want = dict(
                params=want_main[name], mu=want_state[0].mu[name], nu=want_state[0].nu[name]
            )
            before = dict(params=main[name], mu=old[0].mu[name], nu=old[0].nu[name])
            assert_step_close(got, want, before, grads[name], hyper, count)
        np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(grads), rtol=1e-5)
    main, opt_state, _ = jda.to_optax_state(state, tx)
    assert int(opt_state[0].count) == 10
    for name in SHAPES:  # the model's parameters are the rounded main parameters, exactly
        assert_same_bits(state.params[name], main[name].astype(dtype), name)


@pytest.mark.slow  # compiled cases stand for it
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
def test_meshes_and_buckets_give_the_same_bits(cpu_mesh, dtype):
    """With exact sums and an exact 1/N nothing is left that may differ, packing included."""

    def run(n, bucket_bytes):
        tx = make_tx(cpu_mesh(n), bucket_bytes=bucket_bytes)
        state = jda.TrainState.create(random_params(dtype), tx)
        step = jda.train_step(
            lambda p, batch: linear_loss(p, batch) * n, tx
        )  # so that the mean is equal for all n
        rng = np.random.default_rng(0)
        for _ in range(10):
            # signs: a device's sum over examples is exact also in a bfloat16 gradient
            state, _ = step(state, jax.tree.map(np.sign, exact_batch(rng)))
        return state.params, *jda.to_optax_state(state, tx)[:2]

    want = run(1, 1 << 25)
    for n in (2, 4, 8):
        for bucket_bytes in (1, 4000, 1 << 25):
            got = run(n, bucket_bytes)
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                assert np.array_equal(a, b), f"{n} devices, bucket_bytes={bucket_bytes}"


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@often(lambda axis_type: axis_type == AxisType.Auto)  # others are Explicit
def test_auto_and_explicit_meshes_train(axis_type):
    mesh = jax.make_mesh((2,), ("data",), (axis_type,), devices=jax.devices("cpu")[:2])
    tx = make_tx(mesh)
    state = jda.TrainState.create(random_params(), tx)
    state, metrics = jda.train_step(linear_loss, tx)(state, exact_batch(np.random.default_rng(0)))
    assert np.isfinite(metrics["loss"]) and metrics["loss"].sharding.is_fully_replicated


def test_state_is_a_few_flat_arrays_split_evenly(cpu_mesh):
    tx = make_tx(cpu_mesh(8))
    state = jda.TrainState.create(random_params(), tx)
    num_params = sum(x.size for x in jax.tree.leaves(state.params))
    assert len(jax.tree.leaves(state.opt_state)) == 6
    assert state.opt_state.layout_digest.dtype == np.uint8
    for name in ("main_params", "mu", "nu"):
        flat = getattr(state.opt_state, name)
        sizes = {s.data.size for s in flat.addressable_shards}
        assert sizes == {flat.size // 8}
        assert num_params / 8 <= sizes.pop() <= num_params / 8 + 128 * len(SHAPES)


def test_two_runs_give_the_same_bits(cpu_mesh):
    tx = make_tx(cpu_mesh(8), comm=jnp.bfloat16, max_grad_norm=0.5)
    step = jda.train_step(linear_loss, tx)

    def run():
        state = jda.TrainState.create(random_params(), tx)
        rng = np.random.default_rng(2)
        for _ in range(5):
            state, _ = step(state, exact_batch(rng))
        return jax.tree.leaves(state)

    for a, b in zip(run(), run(), strict=True):
        assert np.array_equal(a, b)


def test_clipping_with_a_norm_that_is_not_a_number(cpu_mesh):
    """As in optax, every gradient becomes NaN: none may slip through unclipped."""
    tx = make_tx(cpu_mesh(2), max_grad_norm=1.0, mask=None)
    state = jda.TrainState.create({"a": jnp.ones(3), "b": jnp.ones(3)}, tx)
    batch = {"a": np.full((2, 3), 100, np.float32), "b": np.full((2, 3), np.nan, np.float32)}
    state, metrics = jda.train_step(linear_loss, tx)(state, batch)
    assert np.isnan(metrics["grad_norm"])
    assert all(np.isnan(x).all() for x in jax.tree.leaves(state.params))


def test_16_bit_communication_rounds_also_on_one_device(cpu_mesh):
    """XLA drops a collective over one device; its rounding must not go with it."""
    results = {}
    for comm in (jnp.float32, jnp.bfloat16):
        tx = make_tx(cpu_mesh(1), comm)
        state = jda.TrainState.create({"w": jnp.zeros(1000)}, tx)
        x = np.random.default_rng(0).normal(size=(1, 1000)).astype(np.float32)
        state, _ = jda.train_step(linear_loss, tx)(state, {"w": x})
        (results[comm],) = jax.tree.leaves(jda.to_optax_state(state, tx)[1][0].mu)
    g = (x[0] / 64).astype(jnp.bfloat16).astype(np.float32)
    one_minus_b1 = np.float32(1 - HYPER["b1"])
    assert_same_bits(results[jnp.bfloat16], one_minus_b1 * g + np.float32(0))
    assert not np.array_equal(results[jnp.float32], results[jnp.bfloat16])


def test_create_copies_and_the_step_donates(cpu_mesh):
    """Device 0's replica is where the caller's array is: donating it must not delete that."""
    params = random_params()
    before = jax.tree.map(np.array, params)
    for n in (1, 2):
        tx = make_tx(cpu_mesh(n))
        state = jda.TrainState.create(params, tx)
        new, _ = jda.train_step(linear_loss, tx)(state, exact_batch(np.random.default_rng(5)))
        # on one device float32 params are their own main parameters
        donated = [
            state.opt_state.mu,
            state.opt_state.nu,
            *jax.tree.leaves(state.opt_state.main_params),
        ]
        assert len(donated) == (2 if n == 1 else 3) and all(x.is_deleted() for x in donated)
        for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(before), strict=True):
            assert_same_bits(a, b)
        assert not any(x.is_deleted() for x in jax.tree.leaves(new))


@pytest.mark.slow
def test_state_moves_between_meshes_exactly(cpu_mesh):
    """8 -> 3 -> 1 devices with other buckets: same bits, and the next step does not notice."""
    rng = np.random.default_rng(6)
    batches = [exact_batch(rng) for _ in range(3)]
    tx = make_tx(cpu_mesh(8))
    state = jda.TrainState.create(random_params(), tx)
    step = jda.train_step(linear_loss, tx)
    for batch in batches[:2]:
        state, _ = step(state, batch)
    first = exported = jda.to_optax_state(state, tx)
    for n, bucket_bytes in ((3, 500), (1, 1)):
        other = make_tx(cpu_mesh(n), bucket_bytes=bucket_bytes)
        main, opt_state, extra = exported
        moved = jda.from_optax_state(main, opt_state, other, extra)
        exported = jda.to_optax_state(moved, other)
        assert jax.tree.structure(exported[1]) == jax.tree.structure(
            optax.adamw(**HYPER, mask=decays).init(random_params())
        )
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(exported), strict=True):
            assert np.array_equal(a, b)
    main, opt_state, extra = exported
    again = jda.from_optax_state(main, opt_state, tx, extra)
    for a, b in zip(*(jax.tree.leaves(step(s, batches[2])) for s in (again, state)), strict=True):
        assert np.array_equal(a, b)


def test_conversion_leaves_the_given_state_alone(cpu_mesh):
    """The new state is donated; the caller's optax state must survive that."""
    for n in (1, 4):
        tx = make_tx(cpu_mesh(n), mask=None)
        step = jda.train_step(lambda p, x: jnp.mean(x) * jnp.sum(p["w"]), tx)
        params = {"w": jnp.ones((4, 3))}
        theirs = optax.adamw(**HYPER)
        opt_state = theirs.init(params)
        for _ in range(2):
            state = jda.from_optax_state(params, opt_state, tx)
            step(state, np.ones((4, 1), np.float32))
            assert not any(x.is_deleted() for x in jax.tree.leaves((params, opt_state)))


def test_optax_state_with_schedules_has_their_counts(cpu_mesh):
    tx = make_tx(
        cpu_mesh(2),
        learning_rate=optax.linear_schedule(1e-2, 1e-3, 5),
        weight_decay=optax.constant_schedule(0.1),
    )
    state = jda.TrainState.create(random_params(), tx)
    step = jda.train_step(linear_loss, tx)
    for seed in range(3):
        state, _ = step(state, exact_batch(np.random.default_rng(seed)))
    _, opt_state, _ = jda.to_optax_state(state, tx)
    assert [int(x) for x in jax.tree.leaves(opt_state[1:])] == [3, 3]


def test_hundred_steps_compile_once(cpu_mesh):
    tx = make_tx(cpu_mesh(2), learning_rate=optax.cosine_decay_schedule(1e-2, 100))
    state = jda.TrainState.create({"w": jnp.ones(10)}, tx)
    step = jda.train_step(lambda p, x: jnp.mean(x) * jnp.sum(p["w"]), tx)
    for _ in range(100):
        state, _ = step(state, np.ones((2, 1), np.float32))
    assert step._jitted._cache_size() == 1
    assert int(state.opt_state.count) == 100
