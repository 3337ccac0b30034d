"""What was wrong without a word: metrics as weights, weights that are no numbers, skips, sums."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from support.bits import assert_same_bits, assert_trees_same_bits
from support.lookalike import BATCH, BF16, make_params, make_tx
from support.optimizers import distributed_adamw
from support.own_loop import jit_over_mesh
from support.samples import few, often
from support.steps import by_update


def plain_loss(params, x):
    total = sum(jnp.sum(jnp.sin(p.astype(jnp.float32))) for p in jax.tree.leaves(params))
    return total * jnp.mean(x)


_last = {"made_of": (None, None, {}), "step": None}


def step_of(tx, loss, **kwargs):
    """The same step for runs in a row with the same optimizer and loss: it compiles once."""
    last_tx, last_loss, last_kwargs = _last["made_of"]
    if last_tx is not tx or last_loss is not loss or last_kwargs != kwargs:
        _last.update(made_of=(tx, loss, kwargs), step=jda.train_step(loss, tx, **kwargs))
    return _last["step"]


def run(tx, loss, batches, params=None, state_kwargs=None, **kwargs):
    """Returns the state and the metrics of every step."""
    state = jda.TrainState.create(params or make_params(), tx, **(state_kwargs or {}))
    step, metrics = step_of(tx, loss, **kwargs), []
    for batch in batches:
        state, last = step(state, batch)
        metrics.append(jax.device_get(last))
    return state, metrics


def trace(tx, loss, batch, **kwargs):
    """What loss_fn may return shows while it is traced."""
    state = jda.TrainState.shapes(make_params(), tx)
    return jax.eval_shape(jda.train_step(loss, tx, **kwargs), state, batch)


# --- a pair that loss_fn returns


@pytest.mark.parametrize("second", [0.0, 0.93, {"accuracy": 0.5}, None])
def test_a_pair_is_a_weight_only_if_asked_for(second):
    """Trained with the accuracy as weight; with 0. not at all. jax.grad raises on it, too."""
    loss = lambda p, x: (plain_loss(p, x), second)  # noqa: E731
    with pytest.raises(
        jda.TreeError,
        match=r"loss_fn: .*got 2 values, expected loss\. .*has_aux=True.*weighted=True",
    ):
        trace(make_tx(), loss, BATCH)
    if second is not None:
        trace(make_tx(), loss, BATCH, has_aux=True)


def test_a_step_without_memory_says_what_it_needs(cpu_mesh):
    """XLA says only how many bytes it did not get, and only to who reads a result."""
    tx = distributed_adamw(1e-3, mesh=cpu_mesh(2))

    def loss(params, x):
        terms = jnp.arange(1 << 24, dtype=jnp.float32) * params["w"][0, 0]
        large = jnp.cumsum(jnp.broadcast_to(terms, (1 << 20, 1 << 24)), 0)[-1]  # 70 TB
        return jnp.sum(x @ params["w"]) + jnp.sum(large)

    step = jda.train_step(loss, tx)
    state = jda.TrainState.create({"w": jnp.ones((512, 256))}, tx)
    with pytest.raises(jda.OutOfMemoryError, match=r"too little memory: got .RESOURCE_") as error:
        step(state, jnp.ones((2, 512)))
    plan = jda.plan({"w": jax.ShapeDtypeStruct((512, 256), jnp.float32)}, tx)
    held, largest = plan.held_bytes / 1e6, plan.largest[1] / 1e6
    assert f"room for params and state of {held:.2f} MB" in str(error.value)
    assert f"largest part is {plan.largest[0]}, {largest:.2f} MB. To lower it: " in str(error.value)
    assert isinstance(error.value.__cause__, jax.errors.JaxRuntimeError)
    assert isinstance(error.value, jax.errors.JaxRuntimeError)


def test_weighted_needs_a_pair():
    for loss, got in (
        (plain_loss, "the loss alone"),
        (lambda p, x: (plain_loss(p, x),), "1 values"),
        (lambda p, x: (plain_loss(p, x), 1.0, 2.0), "3 values"),
    ):
        with pytest.raises(jda.TreeError, match=rf"got {got}, expected \(loss, weight\)"):
            trace(make_tx(), loss, BATCH, weighted=True)
    for loss, kwargs in (
        (lambda p, x: ((plain_loss(p, x), 2.0), x), dict(weighted=True, has_aux=True)),
        (lambda p, x: (plain_loss(p, x), x), dict(has_aux=True)),
    ):
        _, (metrics,) = run(make_tx(2), loss, [BATCH], **kwargs)
        assert_same_bits(metrics["aux"].reshape(-1), BATCH)
    with pytest.raises(jda.TreeError, match=r"got 2 values, expected a tuple \(loss, aux\)"):
        trace(make_tx(), lambda p, x: ((plain_loss(p, x), 2.0), x), BATCH, has_aux=True)


# --- weights


def weighted_loss(params, batch):
    return plain_loss(params, batch["x"]), jnp.sum(batch["weight"])


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("strategy", ["optim", "optim_grads"])
@often(lambda steps, strategy: (steps, strategy) == (2, "optim_grads"))
def test_invalid_weights_skip_the_step_or_give_nan(steps, strategy):
    """It gave a gradient of zero and a loss of 0.0, and nothing was skipped."""
    x, weight = np.tile(BATCH, steps), np.ones(8 * steps, np.float32)
    kwargs = dict(weighted=True, accumulate_steps=steps)
    for loss_scale in (None, 4.0):
        tx = make_tx(2, sharding_strategy=strategy, loss_scale=loss_scale)
        once, _ = run(tx, weighted_loss, [{"x": x, "weight": weight}], **kwargs)
        for bad in (np.nan, -9.0, np.inf):  # of a part whose others are 1
            bad_weight = weight.copy()
            bad_weight[3] = bad
            batches = [{"x": x, "weight": w} for w in (weight, bad_weight)]
            state, metrics = run(tx, weighted_loss, batches, **kwargs)
            assert np.isfinite(metrics[0]["loss"]) and not np.isfinite(metrics[1]["loss"])
            assert not np.isfinite(metrics[1]["grad_norm"])
            if loss_scale is None:
                for leaf in jax.tree.leaves(state.params):
                    assert not np.isfinite(np.asarray(leaf)).any()
            else:
                assert [int(m["skipped"]) for m in metrics] == [0, 1]
                assert_trees_same_bits(state.params, once.params)


SCALES = [None, 4.0, jda.DynamicLossScale(growth_interval=1)]


@few(1)
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("loss_scale", SCALES)
@pytest.mark.parametrize("policy", [{}, {"param_comm_dtype": BF16}])
@often(
    lambda steps, loss_scale, policy: (
        (steps, len(policy)) == [(1, 1), None, (2, 0)][SCALES.index(loss_scale)]
    )
)
def test_batch_with_zero_total_weight_changes_no_state(steps, loss_scale, policy):
    """Padding alone: as if the step had not been. Decay, moments and count went on."""
    policy = jda.MixedPrecisionPolicy(**policy)
    schedule = optax.scale_by_schedule(lambda count: 1.0 / (1 + count))
    tx = jda.chain(schedule, make_tx(2, loss_scale=loss_scale, policy=policy))

    def loss(params, batch, model_state):
        loss, weight = weighted_loss(params, batch)
        return (loss, weight), model_state + 1

    def batches(*weights):
        x = np.tile(BATCH, steps)
        return [{"x": x + i, "weight": np.full_like(x, w)} for i, w in enumerate(weights)]

    kwargs = dict(
        weighted=True, accumulate_steps=steps, state_kwargs=dict(model_state=jnp.zeros(()))
    )
    full = batches(1, 0, 2)
    state, metrics = run(tx, loss, full, **kwargs)
    assert metrics[1]["loss"] == metrics[1]["grad_norm"] == 0
    assert [int(m["skipped"]) for m in metrics] == [0, 0, 0]
    without, _ = run(tx, loss, [full[0], full[2]], **kwargs)
    assert_trees_same_bits(state, without)
    nothing, _ = run(tx, loss, full[1:2], **kwargs)
    fresh, _ = run(tx, loss, [], **kwargs)
    assert_trees_same_bits(nothing, fresh)  # also before the first step
    acc_is_empty = lambda p, s: tx.step(tx.init_grads(p), s, p)  # noqa: E731
    specs = (P(), tx.state_specs())
    step = jax.shard_map(acc_is_empty, mesh=tx.config.mesh, in_specs=specs, out_specs=specs)
    params, opt_state = jax.jit(step)(without.params, without.opt_state)
    assert_trees_same_bits(params, without.params)
    assert_trees_same_bits(opt_state[1][:4], without.opt_state[1][:4])


def test_weights_are_not_rounded():
    """265 tokens on every device: bfloat16 knows 264 and 266, and the total was exact."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 4096)).astype(np.float32)
    loss = lambda p, x: (jnp.sum(p["w"] * x[0]), 265)  # noqa: E731
    policy = jda.MixedPrecisionPolicy(main_grads_dtype=BF16)
    tx = make_tx(1, policy=policy, b1=0.5, weight_decay=0.0)
    state, _ = run(tx, loss, [x[:1]], {"w": jnp.zeros(4096)}, weighted=True)
    mu = np.asarray(jda.to_optax_state(state, tx)[1][0].mu["w"])
    stored = (
        (x[0] * np.float32(265)).astype(BF16).astype(np.float32)
    )  # one rounding, of the product
    assert_same_bits(mu, np.float32(0.5) * (stored * (np.float32(1) / np.float32(265))))
    assert abs(np.mean(mu / (0.5 * x[0])) - 1) < 2e-4  # it was 3.9e-3


# --- skipped steps


def test_a_skipped_step_is_as_if_it_had_not_been():
    """Params, moments, count, model state and schedules before the optimizer; rng goes on.

    A schedule that counted skipped steps left mu 26 % off after three steps; a model state that
    became NaN stayed so for good.
    """
    schedule = optax.scale_by_schedule(lambda count: 1.0 / (1 + count))
    growing = optax.masked(
        optax.scale_by_schedule(lambda count: 0.5 * (1 + count)),
        {"a": True, "b": False, "bias": True},
    )
    tx = jda.chain(schedule, growing, make_tx(2, loss_scale=jda.DynamicLossScale(init_scale=4.0)))

    def loss(params, x, model_state, rng):
        del rng
        return plain_loss(params, x), jax.tree.map(lambda s: 0.9 * s + jnp.mean(x), model_state)

    kwargs = dict(state_kwargs=dict(model_state={"m": jnp.zeros(3)}, rng=jax.random.key(0)))
    nan = np.full_like(BATCH, np.nan)
    state, metrics = run(tx, loss, [BATCH, nan, BATCH + 1, nan, nan, BATCH + 2], **kwargs)
    without, _ = run(tx, loss, [BATCH, BATCH + 1, BATCH + 2], **kwargs)
    assert [int(m["skipped"]) for m in metrics] == [0, 1, 1, 2, 3, 3]
    assert [float(m["loss_scale"]) for m in metrics] == [4, 4, 2, 2, 1, 1]
    assert not np.isfinite(metrics[1]["grad_norm"]) and not np.isfinite(metrics[1]["loss"])
    assert_trees_same_bits(state.params, without.params)
    assert_trees_same_bits(state.model_state, without.model_state)
    assert_trees_same_bits(state.opt_state[:2], without.opt_state[:2])
    kept = ("count", "main_params", "mu", "nu", "grad_norm")
    for name in kept:
        ours, theirs = (getattr(s.opt_state[2], name) for s in (state, without))
        assert_same_bits(ours, theirs, name)
    assert np.any(jax.random.key_data(state.rng) != jax.random.key_data(without.rng))


@few(1)
@pytest.mark.parametrize("update", [True, False])
def test_skips_in_an_own_loop_keep_the_chain(update):
    """step and update of a chain in a custom training loop keep the counts of schedules, too."""
    tx = jda.chain(
        optax.scale_by_schedule(lambda count: 1.0 / (1 + count)), make_tx(2, loss_scale=1.0)
    )
    params = make_params()
    state = jda.TrainState.create(params, tx)

    def local_step(params, opt_state, x):
        grads = jax.grad(plain_loss)(jda.local_params(params, tx), x)
        if not update:
            return tx.step(grads, opt_state, params)
        return by_update(tx.unwrapped(), grads, opt_state, params)

    own = jit_over_mesh(local_step, tx, params)
    params, opt_state = state.params, state.opt_state
    for x in (BATCH, np.full_like(BATCH, np.nan), BATCH):
        params, opt_state = own(params, opt_state, jda.shard_batch(x, tx))
    assert int(opt_state[0].count) == int(opt_state[1].count) == 2


# --- sums over devices, batches, gradients


@pytest.mark.parametrize("steps", [1, 2])
@often(lambda steps: steps == 2)
def test_a_loss_that_was_summed_raises(steps):
    """The gradient norm was 8 times as large. A mean, or a sum over a sum, stays allowed."""
    total = lambda p, x: jax.lax.psum(plain_loss(p, x), "data")  # noqa: E731
    wrapped = lambda p, x: jax.jit(total)(p, x).astype(BF16).reshape(1)[0]  # noqa: E731
    mean = lambda p, x: jax.lax.pmean(plain_loss(p, x), "data")  # noqa: E731
    by_hand = lambda p, x: total(p, x) / jax.lax.psum(1, "data")  # noqa: E731
    x = np.tile(BATCH, steps)
    for loss in (total, wrapped):
        with pytest.raises(
            jda.PolicyError, match=r"loss_fn's loss: already summed over .*axis 'data'"
        ):
            trace(make_tx(), loss, x, accumulate_steps=steps)
    _, want = run(make_tx(2), plain_loss, [x], accumulate_steps=steps)
    for loss in (mean, by_hand):
        _, got = run(make_tx(2), loss, [x], accumulate_steps=steps)
        np.testing.assert_allclose(got[0]["grad_norm"], want[0]["grad_norm"], rtol=1e-5)
    trace(make_tx(1), total, x)  # the sum over one device is the loss


SPECS = [P(("a", "b")), P(("b", "a")), P("b"), P("a", "b"), None]


@few(1)
@pytest.mark.parametrize("accumulate_steps", [1, 2])
@pytest.mark.parametrize("spec", SPECS)
@often(lambda spec, accumulate_steps: accumulate_steps == 2 and spec in SPECS[1:4])
def test_aux_is_in_the_order_of_the_batch(spec, accumulate_steps):
    """Rows 0 ... 7 came back as 0, 2, 4, 6, 1, 3, 5, 7."""
    mesh = jax.make_mesh((2, 4), ("a", "b"), devices=jax.devices("cpu"))
    tx = make_tx(mesh=mesh, shard_axis=("a", "b"))
    rows = {P("b"): 4, P("a", "b"): 2}.get(spec, 8) * accumulate_steps
    x = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)
    loss = lambda p, x: (plain_loss(p, x), {"first": x[0, 0]})  # noqa: E731
    kwargs = dict(has_aux=True, batch_spec=spec, accumulate_steps=accumulate_steps)
    _, (metrics,) = run(tx, loss, [x], **kwargs)
    got = metrics["aux"]["first"]
    assert got.shape == (8 * accumulate_steps,)
    if spec == P("b"):  # both devices along a have the same rows
        want = x[:, 0].reshape(4, 1, -1).repeat(2, 1).reshape(-1)
    elif spec == P("a", "b"):  # columns over b
        want = np.stack(
            [
                x[i * accumulate_steps + k, j]
                for i in range(2)
                for j in range(4)
                for k in range(accumulate_steps)
            ]
        )
    else:
        want = x[:, 0]
    assert_same_bits(got, want)


def test_malformed_batches_raise():
    tx = make_tx()
    loss = lambda p, batch: plain_loss(p, batch["x"])  # noqa: E731
    for batch, error, message in (
        ({"x": BATCH, "y": BATCH[:0]}, jda.ShapeError, r"batch\['y'\]: leading dimension differs from that of batch\['x'\]: got 0, expected 8"),
        ({"x": BATCH, "y": np.ones(16)}, jda.ShapeError, r"batch\['y'\]: leading dimension differs .*got 16, expected 8"),
        ({"x": BATCH, "y": "name"}, jda.DtypeError, r"batch\['y'\]: not an array of numbers: got <U4"),
        ({"x": BATCH, "y": object()}, jda.DtypeError, r"batch\['y'\]: not an array of numbers: got object"),
        ({"x": BATCH, "y": 1.0}, jda.ShapeError, r"batch\['y'\]: a leaf without dimensions cannot be split"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            run(tx, loss, [batch])
    step = jax.jit(jda.train_step(loss, tx))
    with pytest.raises(
        jda.ShapeError, match=r"batch\['x'\]: leading dimension is not divisible .*got \(7,\)"
    ):
        step(jda.TrainState.create(make_params(), tx), {"x": BATCH[:7]})


@pytest.mark.parametrize("n", [1, 8])
def test_a_buffer_that_is_filled_again_does_not_change_the_batch(n):
    """On CPUs JAX reads an aligned numpy array in its place, when the step runs."""
    buffer = np.zeros(8 * 16 + 16, np.float32)
    buffer = buffer[-buffer.ctypes.data % 64 // 4 :][: 8 * 16].reshape(8, 16)
    batch = jda.shard_batch({"x": buffer, "view": buffer[:, :8]}, make_tx(n))
    buffer[:] = 1
    assert not np.asarray(batch["x"]).any() and not np.asarray(batch["view"]).any()


def test_a_negative_learning_rate_warns():
    """optax climbs without a word; so do we, with one."""
    for make in (jda.fused_adamw, jda.fused_adam, jda.inject_hyperparams(jda.fused_adamw)):
        with pytest.warns(
            UserWarning, match="learning_rate: below zero, as optax allows: got -0.1"
        ) as caught:
            make(-0.1)
        is_injected = make not in (jda.fused_adamw, jda.fused_adam)
        assert is_injected or caught[0].filename == __file__
    with pytest.warns(UserWarning, match="learning_rate: below zero"):
        make_tx(learning_rate=-1.0)


def test_remainders_round_ties_away_from_zero():
    """0x3f808000 is between two bfloat16 numbers: remainders round it up, casts to even."""
    from jdistadam.kernels import reference

    tie = np.asarray([0x3F808000, 0x3F818000], np.uint32).view(np.float32)
    upper, lower = reference.split_halves(tie, BF16, np)
    assert upper.view(np.uint16).tolist() == [16257, 16258]
    assert tie.astype(BF16).view(np.uint16).tolist() == [16256, 16258]
    assert_same_bits(reference.join_halves(upper, lower, np), tie)
    for text in (jda.fused_adamw.__doc__, jda.MixedPrecisionPolicy.__doc__):
        assert "ties away from zero" in " ".join(text.split())
    groups = dict(param_labels={"ice": "ice", "w": ""}, groups={"": {}, "ice": {"frozen": True}})
    tx = make_tx(1, main_params_dtype="remainder16", **groups)
    for dtype in (np.float32, np.float16):
        state = jda.TrainState.create({"ice": tie, "w": tie.astype(dtype)}, tx, param_dtypes=BF16)
        assert_same_bits(state.params["ice"], tie.astype(BF16))  # it has no remainder
        assert_same_bits(state.params["w"], upper)
        assert_same_bits(jda.main_params(state.params, state.opt_state, tx)["w"], tie)
