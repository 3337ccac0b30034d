"""train_step: micro-batches, weights, auxiliary values, model state and random keys."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdistadam as jda
from support.bits import assert_same_bits, assert_trees_same_bits
from support.compilations import num_compilations
from support.exact_sums import HYPER, exact_batch, linear_loss, make_tx, random_params
from support.samples import often

BF16 = jnp.bfloat16


def train(tx, loss, batches, dtype=jnp.float32, params=None, **kwargs):
    state_kwargs = {k: kwargs.pop(k) for k in ("model_state", "rng") if k in kwargs}
    state = jda.TrainState.create(params or random_params(dtype), tx, **state_kwargs)
    step = jda.train_step(loss, tx, **kwargs)
    compiled = None
    for batch in batches:
        state, metrics = step(state, batch)
        compiled = num_compilations() if compiled is None else compiled
    assert num_compilations() == compiled  # by the first step
    return state, metrics


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, BF16], ids=str)
@pytest.mark.parametrize(("n", "steps"), [(8, 3), (4, 6), (2, 4), (1, 24)])
@often(lambda n, dtype: (n, dtype) == (2, BF16))
def test_micro_batches_give_the_bits_of_one_batch(cpu_mesh, n, steps, dtype):
    """Sums are exact here, so cutting a batch into micro-batches must change nothing at all.

    linear_loss sums over its examples: the mean over micro-batches is made a sum again. Batches
    differ between steps, devices and micro-batches; decay is masked; the norm clips.
    """
    rng = np.random.default_rng(0)
    batches = [jax.tree.map(np.sign, exact_batch(rng)) for _ in range(3)]
    tx = make_tx(cpu_mesh(n), average_grads=False, max_grad_norm=1.0)
    want, want_metrics = train(tx, linear_loss, batches, dtype)
    got, metrics = train(tx, linear_loss, batches, dtype, accumulate_steps=steps)
    assert_trees_same_bits(got, want)
    np.testing.assert_allclose(metrics["loss"] * steps, want_metrics["loss"], rtol=1e-5)


@pytest.mark.parametrize("n", [1, 8])
@often(lambda n: n == 8)
def test_mean_over_micro_batches_and_devices(cpu_mesh, n):
    """The metrics and the first moment are those of the mean loss over all parts, in float64."""
    rng = np.random.default_rng(1)
    params = {"w": jnp.asarray(rng.normal(size=(40, 3)), jnp.float32)}
    x = rng.normal(size=(24, 40)).astype(np.float32)
    loss = lambda p, x: jnp.mean(jnp.square(x @ p["w"]))  # noqa: E731
    tx = make_tx(cpu_mesh(n), mask=None)
    state, metrics = train(tx, loss, [x], params=params, accumulate_steps=3)
    w, x = np.asarray(params["w"], np.float64), x.astype(np.float64)
    grad = 2 * x.T @ (x @ w) / (24 * 3)
    np.testing.assert_allclose(metrics["loss"], np.mean(np.square(x @ w)), rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], np.linalg.norm(grad), rtol=1e-5)
    mu = jda.to_optax_state(state, tx)[1][0].mu["w"]
    scale = np.abs(grad).max()
    np.testing.assert_allclose(mu, (1 - HYPER["b1"]) * grad, rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize("steps", [1, 3])
@often(lambda steps: steps == 3)
def test_weights_make_the_weighted_mean(cpu_mesh, steps):
    """Masked tokens, spread unevenly: the loss and gradient of one device that sees all of them."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(24, 16)).astype(np.float32)
    valid = (rng.random((24, 16)) < np.linspace(0.05, 0.95, 24)[:, None]).astype(np.float32)
    params = {"w": jnp.asarray(rng.normal(size=16), jnp.float32)}

    def loss(params, batch):
        weight = jnp.sum(batch["valid"])
        errors = jnp.square(batch["x"] * params["w"][None]) * batch["valid"]
        return jnp.sum(errors) / jnp.maximum(weight, 1), weight

    tx = make_tx(cpu_mesh(8), mask=None)
    batch = {"x": x, "valid": valid}
    state, metrics = train(tx, loss, [batch], params=params, accumulate_steps=steps, weighted=True)
    w = np.asarray(params["w"], np.float64)
    total = valid.sum()
    grad = (2 * x.astype(np.float64) ** 2 * valid).sum(0) * w / total
    np.testing.assert_allclose(metrics["loss"], (np.square(x * w) * valid).sum() / total, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], np.linalg.norm(grad), rtol=1e-5)
    mu = jda.to_optax_state(state, tx)[1][0].mu["w"]
    np.testing.assert_allclose(mu, (1 - HYPER["b1"]) * grad, rtol=2e-5)
    unweighted = jda.train_step(lambda p, b: loss(p, b)[0], tx, accumulate_steps=steps)
    _, plain = unweighted(jda.TrainState.create(params, tx), batch)
    assert abs(float(plain["loss"]) / float(metrics["loss"]) - 1) > 1e-2  # the weights matter here


def test_zero_total_weight_gives_zero_gradients(cpu_mesh):
    """A batch of padding alone: loss 0 and a gradient of zero, not NaN."""
    tx = make_tx(cpu_mesh(2), mask=None, weight_decay=0.0)
    loss = lambda p, x: (jnp.sum(p["w"]) * jnp.mean(x), jnp.zeros(()))  # noqa: E731
    state, metrics = train(
        tx, loss, [np.ones(4, np.float32)], params={"w": jnp.ones(3)}, weighted=True
    )
    assert float(metrics["loss"]) == float(metrics["grad_norm"]) == 0
    assert_same_bits(state.params["w"], np.ones(3, np.float32))


@pytest.mark.parametrize("steps", [1, 2])
@often(lambda steps: steps == 2)
def test_a_micro_batch_of_padding_does_not_count(cpu_mesh, steps):
    """Its means over no tokens are NaN; its weight is zero, and so is what it adds."""

    def loss(params, batch, model_state):
        weight = jnp.sum(batch["valid"])
        mean = jnp.sum(batch["x"] * batch["valid"]) / weight
        value = jnp.sum(jnp.square(params["w"] - batch["x"]) * batch["valid"]) / weight
        new = {"sum": model_state["sum"] + mean, "calls": model_state["calls"] + 1}
        return (value, weight), new | {"key": jax.random.fold_in(model_state["key"], 1)}

    batch = {"x": np.arange(32, dtype=np.float32), "valid": np.ones(32, np.float32)}
    batch["valid"][: 4 // steps] = 0  # all that the first micro-batch of the first device has
    batch["x"][: 4 // steps] = 1e6
    tx = make_tx(cpu_mesh(8), mask=None)
    params = {"w": jnp.zeros(())}
    start = {"sum": jnp.zeros(()), "calls": 0, "key": jax.random.key(3)}
    given = dict(accumulate_steps=steps, weighted=True, model_state=start)
    state, metrics = train(tx, loss, [batch], params=params, **given)
    seen = batch["x"][4 // steps :].astype(np.float64)
    np.testing.assert_allclose(metrics["loss"], np.mean(seen**2), rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], 2 * seen.mean(), rtol=1e-5)
    np.testing.assert_allclose(state.model_state["sum"], seen.sum() / (32 // steps), rtol=1e-5)
    key = start["key"]
    for _ in range(steps):
        key = jax.random.fold_in(key, 1)
    assert state.model_state["calls"] == steps and state.model_state["key"] == key
    assert np.isfinite(float(state.params["w"]))


def test_python_numbers_and_keys_in_the_state_compile_once(cpu_mesh):
    """Weakly typed params, a Python number and random keys in the model state."""

    def loss(params, x, model_state, rng):
        del rng
        value = jnp.sum(params["w"]) * jnp.mean(x)
        return value, model_state | {"count": model_state["count"] + 1}

    start = {"count": jnp.asarray(2), "keys": jax.random.split(jax.random.key(3), 2), "scale": 1.5}
    tx = make_tx(cpu_mesh(4), mask=None)
    state, _ = train(
        tx, loss, [np.ones(4, np.float32)] * 3, params={"w": jnp.full((3,), 1.0)}, model_state=start, rng=jax.random.key(0)
    )  # fmt: skip
    assert int(state.model_state["count"]) == 5 and float(state.model_state["scale"]) == 1.5
    keys = jax.random.key_data(state.model_state["keys"])
    assert np.array_equal(keys, jax.random.key_data(start["keys"]))


@pytest.mark.parametrize("steps", [1, 3])
@often(lambda steps: steps == 3)
def test_aux_has_every_micro_batch_in_the_order_of_the_batch(cpu_mesh, steps):
    batch = np.arange(24, dtype=np.float32)
    loss = lambda p, x: (jnp.sum(p["w"]) * jnp.mean(x), {"first": x[0], "all": x})  # noqa: E731
    tx = make_tx(cpu_mesh(8), mask=None)
    _, metrics = train(
        tx, loss, [batch], params={"w": jnp.ones(3)}, has_aux=True, accumulate_steps=steps
    )
    per = 24 // 8 // steps
    assert np.array_equal(metrics["aux"]["first"], batch[::per])
    assert np.array_equal(metrics["aux"]["all"], batch.reshape(8 * steps, per))


@pytest.mark.parametrize("steps", [1, 3])
@often(lambda steps: steps == 3)
def test_model_state_passes_through_micro_batches_and_is_averaged(cpu_mesh, steps):
    """Batch statistics as in batch normalisation, against the same recurrence in numpy."""
    rng = np.random.default_rng(3)
    batches = [rng.normal(size=(24, 5)).astype(np.float32) for _ in range(4)]

    def loss(params, x, model_state):
        mean = 0.9 * model_state["mean"] + 0.1 * jnp.mean(x, 0)
        return jnp.sum(params["w"][None] * (x - mean[None])), {
            "mean": mean,
            "seen": model_state["seen"] + len(x),
        }

    start = {"mean": jnp.zeros(5), "seen": jnp.zeros((), jnp.int32)}
    tx = make_tx(cpu_mesh(8), mask=None)
    state, _ = train(
        tx, loss, batches, params={"w": jnp.ones(5)}, model_state=start, accumulate_steps=steps
    )
    mean = np.zeros(5)
    for batch in batches:
        means = []
        for part in batch.reshape(8, steps, -1, 5).astype(np.float64):
            local = mean
            for micro in part:
                local = 0.9 * local + 0.1 * micro.mean(0)
            means.append(local)
        mean = np.mean(means, 0)
    np.testing.assert_allclose(state.model_state["mean"], mean, atol=1e-6)
    assert int(state.model_state["seen"]) == 4 * 3  # examples of one device
    assert not start["mean"].is_deleted() and not np.asarray(start["mean"]).any()


def test_a_model_state_in_float64_keeps_its_bits(cpu_mesh):
    """Its mean over devices was computed in float32."""
    with jax.enable_x64(True):
        start = {"sum": jnp.asarray(1 / 3), "seen": jnp.asarray(2.0**30 + 1)}
        ones = lambda state, x: jax.tree.map(lambda y: y * x[0], state)  # noqa: E731
        loss = lambda p, x, model_state: (jnp.sum(p["w"]) * x[0], ones(model_state, x))  # noqa: E731
        tx = make_tx(cpu_mesh(8), mask=None)
        params, batch = {"w": jnp.ones(3, jnp.float32)}, np.ones(8, np.float32)
        state, _ = train(tx, loss, [batch], params=params, model_state=start)
    assert_trees_same_bits(state.model_state, start)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("steps", [1, 3])
@often(lambda steps, weighted: steps == 3)
def test_a_model_state_that_the_loss_keeps_keeps_its_bits(cpu_mesh, steps, weighted):
    """The mean of eight equal floats differs from most of them, and that of the largest is inf."""
    numbers = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    start = {"target": numbers, "best": jnp.finfo(jnp.float32).max, "seen": np.zeros(5, np.float32)}

    def loss(params, x, model_state):
        value = jnp.sum(x @ params["w"])
        state = model_state | {"seen": model_state["seen"] + jnp.mean(x, 0)}
        return ((value, jnp.float32(1)) if weighted else value), state

    options = dict(accumulate_steps=steps, weighted=weighted, model_state=start)
    batches = [np.ones((24, 5), np.float32)] * 3
    state, _ = train(
        make_tx(cpu_mesh(8), mask=None), loss, batches, params={"w": jnp.ones(5)}, **options
    )
    kept = {name: state.model_state[name] for name in ("target", "best")}
    assert_trees_same_bits(kept, {"target": numbers, "best": np.float32(start["best"])})
    assert np.array_equal(state.model_state["seen"], np.full(5, 3.0 * steps))


@pytest.mark.slow
def test_every_device_micro_batch_and_step_has_its_own_key(cpu_mesh):
    """The key of each is a function of the first key, the step, the device and the micro-batch."""

    def loss(params, x, rng):
        return jnp.sum(params["w"]) * jnp.mean(x), jax.random.uniform(rng)

    tx = make_tx(cpu_mesh(8), mask=None)
    for key in (jax.random.key(7), jax.random.PRNGKey(7), jax.random.key(7, impl="unsafe_rbg")):
        seen = []
        state = jda.TrainState.create({"w": jnp.ones(3)}, tx, rng=key)
        step = jda.train_step(loss, tx, has_aux=True, accumulate_steps=3)
        for _ in range(3):
            state, metrics = step(state, np.ones(24, np.float32))
            seen.extend(np.asarray(metrics["aux"]).tolist())
        assert len(set(seen)) == 3 * 8 * 3
        _, step_key = jax.random.split(key)
        want = jax.random.uniform(jax.random.fold_in(step_key, 5 * 3 + 2))
        assert seen[5 * 3 + 2] == float(want)
        assert not key.is_deleted()


def test_all_keywords_together_with_donation_and_bfloat16(cpu_mesh):
    def loss(params, x, model_state, rng):
        noise = jax.random.normal(rng, x.shape)
        value = jnp.mean(jnp.square((x + 0.1 * noise) @ params["w"].astype(jnp.float32)))
        return (value, jnp.float32(x.shape[0])), model_state + 1, {"noise": noise[0, 0]}

    params = {"w": jnp.asarray(np.random.default_rng(4).normal(size=(6, 2)), BF16)}
    count = jnp.zeros(())
    tx = make_tx(cpu_mesh(4), mask=None, learning_rate=3e-2, comm=BF16)
    state = jda.TrainState.create(params, tx, model_state=count, rng=jax.random.key(0))
    step = jda.train_step(loss, tx, has_aux=True, weighted=True, accumulate_steps=2)
    losses = []
    for _ in range(30):
        old = state
        state, metrics = step(state, np.ones((16, 6), np.float32))
        losses.append(float(metrics["loss"]))
        assert old.params["w"].is_deleted() and old.rng.is_deleted()
    assert losses[-1] < 0.2 * losses[0] and float(state.model_state) == 60
    assert metrics["aux"]["noise"].shape == (8,)
    assert not params["w"].is_deleted() and not count.is_deleted()


@pytest.mark.parametrize("reduce", ["pmean", "psum of both"])
@often(lambda reduce: reduce == "psum of both")
def test_a_loss_that_communicates_is_differentiated_once(cpu_mesh, reduce):
    """A loss averaged by the user, or statistics over all devices, as in synchronised batch norm.

    Without vma checks the transpose of a sum over devices is a sum over devices: the mean of the
    local gradients is the gradient of what the devices compute together, not a multiple of it.
    """
    rng = np.random.default_rng(5)
    x = rng.normal(size=(16, 5)).astype(np.float32)
    params = {"w": jnp.asarray(rng.normal(size=5), jnp.float32)}

    def synced(params, x):
        y = x * params["w"][None]
        total = jax.lax.psum(jnp.sum(y), "data") / 16
        errors = jnp.square(y - total)
        if reduce == "pmean":
            return jax.lax.pmean(jnp.mean(errors), "data")
        return jax.lax.psum(jnp.sum(errors), "data") / jax.lax.psum(errors.size, "data")

    def on_one_device(params):
        y = x * params["w"][None]
        return jnp.mean(jnp.square(y - jnp.sum(y) / 16))

    tx = make_tx(cpu_mesh(8), mask=None)
    state, metrics = train(tx, synced, [x], params=params)
    want_loss, grad = jax.value_and_grad(on_one_device)(params)
    np.testing.assert_allclose(metrics["loss"], want_loss, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(grad), rtol=1e-5)
    mu = jda.to_optax_state(state, tx)[1][0].mu["w"]
    np.testing.assert_allclose(mu, (1 - HYPER["b1"]) * np.asarray(grad["w"]), rtol=2e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2])
@often(lambda n: n == 1)
def test_main_params_exist_only_where_dtype_or_sharding_differ(cpu_mesh, n):
    """On one device float32 params are their own main params, also in a tree with 16-bit ones.

    3 steps of the mixed tree equal, bit for bit, separate runs of its leaves of each dtype.
    """
    tx = make_tx(cpu_mesh(n), mask=None)
    params = random_params() | {"low": random_params(BF16)["rows"]}
    state = jda.TrainState.create(params, tx)
    kept = state.opt_state.main_params
    total = sum(x.size for x in jax.tree.leaves(params))
    low = params["low"].size
    assert kept.size < low + 128 if n == 1 else kept.size > total
    assert state.opt_state.mu.size >= total
    alone = jda.TrainState.create(random_params(), tx)
    assert (alone.opt_state.main_params is None) == (n == 1)

    rng = np.random.default_rng(6)
    batches = []
    for _ in range(3):
        batch = jax.tree.map(np.sign, exact_batch(rng))
        batches.append(batch | {"low": batch["rows"]})
    got, _ = train(tx, linear_loss, batches, params=params)
    main, *_ = jda.to_optax_state(got, tx)
    assert_same_bits(got.params["low"], main["low"].astype(BF16))
    for names in ([*random_params()], ["low"]):
        some = lambda tree, names=names: {name: tree[name] for name in names}  # noqa: E731
        one, _ = train(tx, linear_loss, list(map(some, batches)), params=some(params))
        assert_trees_same_bits(some(got.params), one.params)
        assert_trees_same_bits(some(main), jda.to_optax_state(one, tx)[0])
    moved = make_tx(cpu_mesh(3 - n), mask=None)
    dtypes = jax.tree.map(lambda x: x.dtype, params)
    *exported, extra = jda.to_optax_state(got, tx)
    there = jda.from_optax_state(*exported, moved, extra, param_dtypes=dtypes)
    *exported, extra = jda.to_optax_state(there, moved)
    back = jda.from_optax_state(*exported, tx, extra, param_dtypes=dtypes)
    assert_trees_same_bits(back.opt_state, got.opt_state)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2])
@often(lambda n: n == 2)
def test_main_params_begin_with_the_given_values(cpu_mesh, n):
    """Of a model in bfloat16 made from float32 values, the main parameters keep every bit of them.

    Then 3 steps of it are those of the float32 model on the same gradients.
    """
    tx = make_tx(cpu_mesh(n))
    given = random_params()
    dtypes = {name: BF16 if x.ndim > 1 else jnp.float32 for name, x in given.items()}
    state = jda.TrainState.create(given, tx, param_dtypes=dtypes)
    exact = jda.TrainState.create(given, tx)
    assert jax.tree.map(lambda x: x.dtype, state.params) == jax.tree.map(jnp.dtype, dtypes)
    assert_trees_same_bits(jda.to_optax_state(state, tx), jda.to_optax_state(exact, tx))
    rounded = jda.TrainState.create(jax.tree.map(lambda x, d: x.astype(d), given, dtypes), tx)
    assert not np.array_equal(*(jda.to_optax_state(s, tx)[0]["rows"] for s in (state, rounded)))
    step = jda.train_step(linear_loss, tx)
    rng = np.random.default_rng(9)
    for _ in range(3):
        batch = jax.tree.map(np.sign, exact_batch(rng))
        (state, _), (exact, _) = step(state, batch), step(exact, batch)
    assert_trees_same_bits(jda.to_optax_state(state, tx), jda.to_optax_state(exact, tx))
    for bad, error in (({"rows": BF16}, jda.TreeError), (jnp.int8, jda.PolicyError)):
        with pytest.raises(error, match="param_dtypes"):
            jda.TrainState.create(given, tx, param_dtypes=bad)


def trace(tx, loss, batch, params, model_state=None, **kwargs):
    """What a loss returns is looked at while it is traced."""
    state = dataclasses.replace(jda.TrainState.shapes(params, tx), model_state=model_state)
    jax.eval_shape(jda.train_step(loss, tx, **kwargs), state, batch)


def test_malformed_results_of_a_loss_raise(cpu_mesh):
    tx = make_tx(cpu_mesh(2), mask=None)
    params, batch = {"w": jnp.ones(3)}, np.ones(4, np.float32)
    good = lambda p, x: jnp.sum(p["w"]) * jnp.mean(x)  # noqa: E731
    cases = (
        (lambda p, x: p["w"] * jnp.mean(x), {}, jda.ShapeError, r"loss_fn's loss: not a scalar: got \(3,\), expected \(\)"),
        (lambda p, x: (good(p, x), x), dict(weighted=True), jda.ShapeError, r"loss_fn's weight: not a scalar: got \(2,\)"),
        (good, dict(has_aux=True), jda.TreeError, r"loss_fn: returned something other .*expected a tuple \(loss, aux\)"),
        (lambda p, x: (good(p, x), 1, 2), {}, jda.TreeError, r"loss_fn: returned something other than expected: got 3 values, expected loss\. .*has_aux=True.*weighted=True"),
        (lambda p, x: jnp.sum(p["w"]).astype(jnp.int32), {}, jda.DtypeError, r"loss_fn's loss: cannot be differentiated: got int32, expected a floating"),
        (lambda p, x: jnp.sum(p["w"]) * (1 + 1j), {}, jda.DtypeError, r"loss_fn's loss: not a real number: got complex64"),
        (lambda p, x: [good(p, x)], {}, jda.DtypeError, r"loss_fn's loss: not a real number: got list"),
        (good, dict(accumulate_steps=3), jda.ShapeError, r"batch: a device's part does not divide into micro-batches: got \(2,\), expected a leading dimension that is a multiple of 3"),
    )  # fmt: skip
    for loss, kwargs, error, message in cases:
        with pytest.raises(error, match=message):
            trace(tx, loss, batch, params, **kwargs)
    with pytest.raises(
        jda.ShapeError,
        match=r"loss_fn's model_state\['m'\]: shape differs from the state's model_state: got \(2,\)",
    ):
        given = {"m": jnp.zeros(3)}
        trace(tx, lambda p, x, model_state: (good(p, x), {"m": x}), batch, params, given)
    with pytest.raises(jda.TreeError, match=r"expected a tuple \(loss, model_state\)"):
        trace(tx, lambda p, x, model_state: good(p, x), batch, params, jnp.zeros(3))
    with pytest.raises(jda.TreeError, match=r"loss_fn's model_state: .*the state's"):
        trace(tx, lambda p, x, model_state: (good(p, x), None), batch, params, jnp.zeros(3))
    for function in (
        lambda: jda.TrainState.create(params, jda.fused_adamw(1e-3)),
        lambda: jda.train_step(good, jda.fused_adamw(1e-3)),
    ):
        with pytest.raises(
            jda.PolicyError, match="tx: not a distributed optimizer: got FusedTransformation"
        ):
            function()
    for bad in (0, -1, 1.5, True, "2"):
        with pytest.raises(
            jda.HyperparameterError,
            match=r"accumulate_steps: out of range: got .*a whole number of at least 1",
        ):
            jda.train_step(good, tx, accumulate_steps=bad)


def test_zero_size_constants_of_a_loss_do_not_crash(cpu_mesh):
    """jax 0.11 would end the process; where it would, an error says so before."""
    empty = jnp.zeros((0, 2))
    tx = make_tx(cpu_mesh(2), mask=None)
    loss = lambda p, x: jnp.sum(p["w"]) * jnp.mean(x) + jnp.sum(empty)  # noqa: E731
    run = lambda: train(tx, loss, [np.ones(4, np.float32)], params={"w": jnp.ones(3)})  # noqa: E731
    if jax.__version_info__[:2] == (0, 11):
        with pytest.raises(
            jda.ShapeError, match=r"loss_fn: closes over a zero-size array, .*got \(0, 2\)"
        ):
            run()
    else:
        assert np.isfinite(float(run()[1]["loss"]))
