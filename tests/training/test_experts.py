"""The ways to train experts in docs/experts.md, against a loop over all experts in float64."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from jdistadam.distributed import schedule
from support.bits import assert_trees_same_bits
from support.optimizers import distributed_adamw
from support.paths import ROOT
from support.samples import few, often

MODEL, *WAYS = re.findall(r"```python\n(.*?)```", (ROOT / "docs/experts.md").read_text(), re.S)
HYPER = dict(learning_rate=3e-3, b1=0.87, b2=0.9973, eps=1e-7, weight_decay=0.13)
MAX_NORM, DEVICES, STEPS, U = 0.03, 8, 6, 2.0**-24


@functools.cache
def model():
    """The names that the page defines before it chooses a way."""
    page: dict = {}
    exec(MODEL, page)
    return page


def of_page(way):
    """The names that the page defines before it trains, with a loss in float64."""

    def device_loss(params, tokens):
        return model()["device_loss"](*jax.tree.map(jnp.float64, (params, tokens)))

    adamw = jda.fused_adamw(**HYPER)
    page = model() | {"device_loss": device_loss, "adamw": adamw, "MAX_NORM": MAX_NORM}
    exec(way.partition("for _ in range(20):")[0], page)
    return page


class WithTrainStep:
    """One optimizer."""

    def __init__(self, way):
        self.page = of_page(way)

    def step(self, tokens):
        """The loss of the step."""
        self.page["state"], metrics = self.page["step"](self.page["state"], tokens)
        return metrics["loss"]

    def states(self):
        """States and optimizers; each clips by the norm of its own parameters."""
        return [(self.page["state"], self.page["tx"])]


class WithTwoOptimizers:
    """One for the dense parameters, and one for the experts."""

    def __init__(self, way):
        self.page = of_page(way)

    def step(self, tokens):
        *self.page["pairs"], loss = self.page["step"](*self.page["pairs"], tokens)
        return loss

    def states(self):
        both = self.page["dense_tx"], self.page["expert_tx"]
        return [(jda.TrainState(*x), tx) for x, tx in zip(self.page["pairs"], both, strict=True)]


def dense_loss(params, tokens):
    """The loss of one device's tokens, and how many places at experts were missing: no axis."""
    x = jnp.tanh(tokens @ params["embed"])
    probs = jax.nn.softmax(x @ params["router"])
    first, second = jnp.argsort(-probs)[:, :2].T

    def add(sums, expert):
        y, balance, missing = sums
        e, up, down = expert
        goes = jnp.stack([first == e, second == e])  # all first choices come before the second ones
        place = (jnp.cumsum(goes.reshape(-1)) - 1).reshape(goes.shape)
        is_there = jnp.any(goes & (place < model()["CAPACITY"]), 0)
        y += jnp.where(is_there, probs[:, e], 0)[:, None] * (jnp.tanh(x @ up) @ down)
        balance += jnp.mean(first == e) * jnp.mean(probs[:, e])
        return (y, balance, missing + jnp.sum(goes) - jnp.sum(is_there)), None

    count = model()["EXPERTS"]
    experts = jnp.arange(count), params["up"], params["down"]
    (y, balance, missing), _ = jax.lax.scan(add, (jnp.zeros_like(x), 0.0, 0), experts)
    return jnp.mean(jnp.square(x + y - tokens)) + 0.01 * count * balance, missing


@functools.cache
def of_devices():
    """Losses, missing places and gradients of each device, for all of the tokens by device."""
    loss = jax.value_and_grad(dense_loss, has_aux=True)
    return jax.jit(jax.vmap(loss, (None, 0)))


def read(states):
    """Main parameters, moments and norms as float64, for each optimizer by leaf."""
    found = []
    for state, tx in states:
        params, (adam, *_), _ = jda.to_optax_state(state, tx)
        assert_trees_same_bits(jda.full_params(state, tx), params)
        arrays = {"params": params, "mu": adam.mu, "nu": adam.nu}
        found.append((jax.tree.map(np.float64, arrays), float(state.opt_state.grad_norm)))
    return found


def check_step(old, new, grads, norm, count):
    """One step of one optimizer from gradients in float64.

    Each device's contribution is rounded to float32 once, and passes at most 7 additions; their
    mean is an exact product: 8 u times the mean of their absolute values. A norm is wrong by the
    norm of these errors, and by half of its own roundings (distributed/norms.py), 34 here: 1, 7,
    1, 10, 2 for pairs of buckets, 8 for devices, 2 for scales, 3 for square root and clip. A moment
    adds two products, each of at most 8 roundings: of coefficients, factors and sum. The update has
    the bounds of ``Bound`` in tests/interop/test_torch.py, here at our own moments. 1 % stands for
    terms of second order.
    """
    b1, b2, u = HYPER["b1"], HYPER["b2"], 1.01 * U
    mean = {k: x.mean(0) for k, x in grads.items()}
    error = {k: 8 * u * np.abs(x).mean(0) for k, x in grads.items()}
    exact, off = (np.sqrt(sum((x**2).sum() for x in tree.values())) for tree in (mean, error))
    assert abs(norm - exact) <= off + 17 * u * exact
    assert exact > 1.5 * MAX_NORM  # so that it clips
    c1, c2 = 1 - b1**count, 1 - b2**count
    of_c1, of_c2 = ((count + 8) * u * (1 - c) / c + 2 * u for c in (c1, c2))
    for k, grad in mean.items():
        clipped = MAX_NORM / norm * grad
        apart = MAX_NORM / norm * error[k]
        limits = {
            "mu": (1 - b1) * apart + 8 * u * (b1 * np.abs(old["mu"][k]) + np.abs(clipped)),
            "nu": (1 - b2) * (2 * np.abs(clipped) + apart) * apart
            + 12 * u * (b2 * old["nu"][k] + (1 - b2) * clipped**2),
        }
        wanted = {
            "mu": b1 * old["mu"][k] + (1 - b1) * clipped,
            "nu": b2 * old["nu"][k] + (1 - b2) * clipped**2,
        }
        update = new["mu"][k] / c1 / (np.sqrt(new["nu"][k] / c2) + HYPER["eps"])
        largest = np.maximum(np.abs(old["params"][k]), np.abs(new["params"][k]))
        limits["params"] = 6 * u * largest
        limits["params"] += HYPER["learning_rate"] * np.abs(update) * (of_c1 + of_c2 / 2 + 16 * u)
        decayed = update + HYPER["weight_decay"] * old["params"][k]
        wanted["params"] = old["params"][k] - HYPER["learning_rate"] * decayed
        for name, want in wanted.items():
            far = np.abs(new[name][k] - want)
            assert (far <= limits[name]).all(), (k, name, count, (far / limits[name]).max())
            assert np.abs(want).max() > 1e4 * limits[name].max()  # the bound says something


def assert_trains(way):
    """Six clipped, decayed steps, each from our own state; some tokens find their experts full."""
    rng, num_missing = np.random.default_rng(0), 0
    with jax.enable_x64(True):
        states = read(way.states())
        for count in range(1, STEPS + 1):
            tokens = np.float32(rng.normal(size=model()["tokens"].shape))
            before = {k: x for arrays, _ in states for k, x in arrays["params"].items()}
            parts = np.float64(tokens).reshape(DEVICES, -1, tokens.shape[1])
            (losses, missing), grads = jax.device_get(of_devices()(before, parts))
            got = way.step(tokens)
            assert abs(float(got) - losses.mean()) <= 8 * U * np.abs(losses).mean()
            for (old, _), (new, norm) in zip(states, after := read(way.states()), strict=True):
                check_step(old, new, {k: grads[k] for k in old["mu"]}, norm, count)
            states, num_missing = after, num_missing + missing.sum()
    assert 0 < num_missing < STEPS * 2 * len(tokens) / 2


@pytest.mark.parametrize(
    ("make", "way"),
    [(WithTrainStep, 0), (WithTrainStep, 1), (WithTwoOptimizers, 2)],
    ids=["one optimizer", "a model axis", "two optimizers"],
)
@often(lambda way: way == 0)  # the examples of all run, too
def test_experts_train_as_in_a_loop_over_all_of_them(make, way):
    assert_trains(make(WAYS[way]))


@pytest.mark.slow
def test_each_device_can_have_experts_of_its_own():
    """No axis is left over which their gradients would be summed."""
    alone = 'jax.make_mesh((8,), ("expert",), axis_types=(AxisType.Auto,))'
    way = WAYS[0].replace("mesh=mesh", f"mesh={alone}").replace('("data", "expert")', '"expert"')
    assert way.count('"expert"') == 2
    assert_trains(WithTrainStep(way))


def with_sums_over_experts(monkeypatch):
    """Gradients of experts are summed over their own axis, too."""
    of_bucket = schedule._PhaseMaker.bucket_schedule

    def wrong(self, bucket, paths, whole_size):
        entry = of_bucket(self, bucket, paths, whole_size)
        axes = self.parallel.splitting(bucket.tensor_axes)
        more = self._all_reduce(paths, bucket.inner_size, axes, jnp.float32) if axes else ()
        return dataclasses.replace(entry, reduce_outer=more)

    monkeypatch.setattr(schedule._PhaseMaker, "bucket_schedule", wrong)


@pytest.mark.slow  # in a schedule, tests/test_interpreter.py finds it
def test_a_sum_over_the_axis_of_experts_is_found(monkeypatch):
    with_sums_over_experts(monkeypatch)
    with pytest.raises(AssertionError):
        assert_trains(WithTrainStep(WAYS[0]))


# -- states, plans and what raises

LEAVES = {"w": (128, 136), "b": (7,), "up": (8, 96, 128), "down": (8, 5, 3)}  # cut and packed
SPECS = {"w": P(), "b": None, "up": P("expert"), "down": P("expert")}
SHARDED = dict(sharding_strategy="optim_grads_params")
FIRST = ("expert", "data")
CODED = dict(mu_dtype="block8", nu_dtype="block16")
PARAMS = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in LEAVES.items()}


def tx_on(*shape, names=("data", "expert"), **kwargs):
    names, num_devices = names[: len(shape)], math.prod(shape)
    devices = jax.devices("cpu")[:num_devices]
    mesh = jax.make_mesh(shape, names, (AxisType.Auto,) * len(shape), devices=devices)
    given = dict(shard_axis=names, param_specs=SPECS if "expert" in names else None) | kwargs
    return distributed_adamw(**(dict(mesh=mesh) | HYPER | given))


def random_state(tx):
    """A state whose elements all differ, and what it was made of."""
    rng = np.random.default_rng(5)
    draw = lambda x: np.float32(rng.random(x.shape))  # noqa: E731
    params, mu, nu = (jax.tree.map(draw, PARAMS) for _ in range(3))
    adam = optax.ScaleByAdamState(jnp.int32(3), mu, nu)
    theirs = adam, optax.EmptyState(), optax.EmptyState()
    return jda.from_optax_state(params, theirs, tx), (params, mu, nu)


def assert_holds(state, tx, arrays):
    params, (adam, *_), _ = jda.to_optax_state(state, tx)
    assert_trees_same_bits((params, adam.mu, adam.nu), arrays)
    assert_trees_same_bits(jax.device_get(jda.full_params(state, tx)), arrays[0])


@few(1)
@pytest.mark.parametrize(
    "move",
    {
        "to 4 devices": (lambda: tx_on(2, 4), lambda: tx_on(2, 2)),
        "to no experts": (lambda: tx_on(2, 4), lambda: tx_on(4)),
        "from none": (lambda: tx_on(8), lambda: tx_on(2, 4)),
        "first axis": (lambda: tx_on(4, 2, names=FIRST), lambda: tx_on(2, 2, names=FIRST)),
        "all axes, and ZeRO-3": (
            lambda: tx_on(4, names=("expert",)),
            lambda: tx_on(2, 4, **SHARDED),
        ),
        "codes": (lambda: tx_on(2, 4, **CODED), lambda: tx_on(1, 2, **CODED)),
    }.items(),
    ids=lambda x: x[0],
)
@often(lambda move: move[0] in ("to 4 devices", "first axis"))
def test_states_move_between_meshes(tmp_path, move):
    """Bits stay, through files and through optax's form; a step is not needed to see it."""
    source, target = (make() for make in move[1])
    state, arrays = random_state(source)
    if source.config.algorithm.storage.is_any:  # what codes hold of the moments
        params, (adam, *_), _ = jda.to_optax_state(state, source)
        arrays = jax.device_get((params, adam.mu, adam.nu))
    assert_holds(state, source, arrays)
    jda.save(tmp_path, state, source)
    restored = jda.restore(tmp_path, jda.TrainState.shapes(PARAMS, target), target)
    assert_holds(restored, target, arrays)


def test_digests_say_along_which_axis_leaves_differ():
    """Even if all flat arrays have the same sizes. Names of axes do not count."""
    over_data = {"w": P(), "b": None, "up": P("data"), "down": P("data")}
    given = {
        "none": dict(param_specs=None),
        "second": {},
        "first": dict(param_specs=over_data),
        "also first": dict(shard_axis=("expert", "data")),
    }
    texts = {}
    for name, kwargs in given.items():
        tx = tx_on(2, 2, **kwargs)
        texts[name] = tx.config.layout_text(tx.layout(PARAMS))
    assert texts["first"] == texts["also first"]
    assert len(set(texts.values())) == 3
    assert "shard_parts" not in texts["none"] and '"shard_parts":[2,2]' in texts["second"]


def moved(x, w):
    """Each device's rows of ``w`` go to the devices whose experts they are for, and back."""
    sent = jax.lax.all_to_all(jnp.tanh(x @ w).reshape(8, -1), "expert", 0, 0, tiled=True)
    return jax.lax.all_to_all(jnp.square(sent), "expert", 0, 0, tiled=True)


def small_loss(params, x):
    y = moved(x, params["w"])
    own = sum(jnp.sum(params[name]) for name in ("up", "down"))
    return jnp.mean(y) + jnp.sum(params["b"]) + own * jnp.mean(x)


@pytest.mark.parametrize("reduce_dtype", [None, jnp.float32])
@often(lambda reduce_dtype: reduce_dtype is not None)
def test_plan_and_audit_know_which_devices_have_an_expert(reduce_dtype):
    """The sums over "expert" in float32 are an all-to-all, as the model's own."""
    policy = jda.MixedPrecisionPolicy(grad_reduce_dtype=reduce_dtype)
    tx = tx_on(2, 4, policy=policy)
    plan = jda.plan(PARAMS, tx)
    assert plan.held["mu"] == 4 * (128 * 136 // 8 + 96 * 128 + 128 + 128)
    assert plan.held["params"] == 4 * (128 * 136 + 7 + 2 * 96 * 128 + 2 * 15)
    axes = {c.leaves: c.axes for c in plan.collectives if c.op == "all-gather"}
    both, data = ("data", "expert"), ("data",)
    assert axes == {("params['w']",): both, ("params['b']",): both} | {
        (f"params['{name}']",): data for name in ("up", "down")
    }
    state = jda.TrainState.shapes(PARAMS, tx)
    found = jda.audit(jda.train_step(small_loss, tx), state, jnp.ones((64, 128)))
    assert found.passed, str(found)
    of_model = [row for row in found.rows if row.of_model]
    assert {(row.op, row.devices) for row in of_model} == {("all-to-all", 4)}


@pytest.mark.slow
def test_a_custom_loop_with_experts_is_train_step():
    """With the checks of types; float32 sums are the same trees in both programs."""
    policy = jda.MixedPrecisionPolicy(grad_reduce_dtype=jnp.float32)
    tx, x = tx_on(2, 4, policy=policy, max_grad_norm=0.5), jnp.linspace(0, 1, 64 * 128)
    x, (state, _) = x.reshape(64, 128), random_state(tx)

    def local_step(params, opt_state, x):
        local = jda.local_params(params, tx)
        grads = tx.accumulate(tx.init_grads(params), jax.grad(small_loss)(local, x))
        return *tx.step(grads, opt_state, params), tx.grad_norm(grads, opt_state)

    specs = tx.param_specs(PARAMS), tx.state_specs()
    own = jax.jit(jax.shard_map(local_step, mesh=tx.config.mesh, in_specs=(*specs, P(("data", "expert"))), out_specs=(*specs, P())))  # fmt: skip
    init = jax.shard_map(tx.init, mesh=tx.config.mesh, in_specs=specs[:1], out_specs=specs[1])
    assert_trees_same_bits(jax.jit(init)(state.params), tx.init(state.params))
    params, opt_state, norm = own(state.params, state.opt_state, x)
    loss, _ = jda.eval_step(small_loss, tx)(state, x)
    state, metrics = jda.train_step(small_loss, tx)(state, x)
    assert norm == metrics["grad_norm"] > 0.5
    assert_trees_same_bits((params, opt_state), (state.params, state.opt_state))
    np.testing.assert_allclose(loss, metrics["loss"], rtol=8 * U)  # sums of 8 in another order


def test_an_audit_finds_what_is_summed_over_experts(monkeypatch):
    with_sums_over_experts(monkeypatch)
    tx = tx_on(2, 4)
    step = jda.train_step(small_loss, tx)
    lowered = step.lower(jda.TrainState.shapes(PARAMS, tx), jnp.ones((64, 128)))
    monkeypatch.undo()
    monkeypatch.setattr(step, "lower", lambda *_: lowered)
    tx.config._schedules.clear()  # the plan is right
    found = jda.audit(step, jda.TrainState.shapes(PARAMS, tx), jnp.ones((64, 128)))
    assert not found.passed


def test_a_loss_without_the_other_parts_raises():
    """As with specs for FSDP, where each device would train a part of the model."""
    tx, x = tx_on(2, 4), jnp.ones((64, 128))
    step = jda.train_step(lambda params, x: jnp.mean(x @ params["w"]) * jnp.sum(params["up"]), tx)
    with pytest.raises(
        jda.MeshError, match=r"^params\['down'\]: differs along axis 'expert', over"
    ):
        step.lower(jda.TrainState.shapes(PARAMS, tx), x)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(sharding_strategy="no_shard"), "got sharding_strategy 'no_shard' beside it"),
        (dict(shard_axis="expert", replica_axis="data"), "got replica axis 'data' beside it"),
        (dict(shard_axis="expert"), "got model axis 'data' beside it"),
    ],
)
def test_experts_beside_what_does_not_work_raise(given, message):
    with pytest.raises(jda.MeshError, match=rf"^params\['down'\]: .*'expert', which .*{message}"):
        jda.plan(PARAMS, tx_on(2, 4, **given))


def trained_over(means, mesh, strategy, micro, **kwargs):
    """What four steps with experts on every device make, and the norms."""
    policy = jda.MixedPrecisionPolicy(grad_comm_dtype=kwargs.pop("comm", None), grad_reduce_dtype=jnp.float32)  # fmt: skip
    tx = distributed_adamw(mesh=mesh, **HYPER, shard_axis="expert", param_specs=SPECS, policy=policy, communication=means, sharding_strategy=strategy, **kwargs)  # fmt: skip
    assert tx.config.transport.name == means
    state, rng, norms = random_state(tx)[0], np.random.default_rng(3), []
    step = jda.train_step(small_loss, tx, accumulate_steps=micro)
    for _ in range(4):
        x = rng.normal(size=(micro * 8 * mesh.size, 128)).astype(np.float32)
        state, metrics = jax.block_until_ready(step(state, x))
        norms.append(metrics["grad_norm"])
    return state, norms, tx


@few(1)
@pytest.mark.parametrize("strategy", ["optim", "optim_grads", "optim_grads_params"])
@pytest.mark.parametrize("micro", [2, 1])
@pytest.mark.parametrize(
    "kwargs",
    [dict(max_grad_norm=0.5, comm=jnp.bfloat16), {}, dict(norms="leaves", ema_decay=0.9)],
    ids=["clip", "plain", "norms"],
)
def test_dense_parameters_are_copied_beside_experts(strategy, micro, kwargs):
    mesh = jax.make_mesh((4,), ("expert",), (AxisType.Auto,), devices=jax.devices("cpu")[:4])
    one, two = (trained_over(x, mesh, strategy, micro, **kwargs)[:2] for x in ("xla", "peer"))
    assert_trees_same_bits(one, two)


@pytest.mark.multigpu
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@pytest.mark.parametrize("clip", [0.5, None])
def test_dense_parameters_are_copied_beside_experts_on_gpus(strategy, clip):
    gpus = jax.devices("gpu")[:2]  # by which eight experts divide
    mesh = jax.make_mesh((2,), ("expert",), (AxisType.Auto,), devices=gpus)
    one, two = (trained_over(x, mesh, strategy, 2, max_grad_norm=clip)[:2] for x in ("xla", "peer"))
    assert_trees_same_bits(one, two)


@few(1)
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@pytest.mark.parametrize("is_gpu", [True, False])
def test_nothing_of_an_expert_is_copied(request, strategy, is_gpu):
    """Each device has all of its experts, and the gradients from all devices."""
    kwargs = dict(policy=jda.MixedPrecisionPolicy(grad_reduce_dtype=jnp.float32))
    if is_gpu:
        kwargs["mesh"] = request.getfixturevalue("h200s")(8, names=("expert",))
    kwargs |= dict(communication="peer", names=("expert",))
    tx = tx_on(8, **kwargs, sharding_strategy=strategy)
    dense = ("params['b']",), ("params['w']",)
    planned = jda.plan(PARAMS, tx)
    sent = planned.collectives
    assert "reduced gradients" in planned.buffers  # parts are added before the update
    assert {(c.leaves, c.transport) for c in sent} == {(x, "peer") for x in dense}
    step, state = jda.train_step(small_loss, tx), jda.TrainState.shapes(PARAMS, tx)
    found = jda.audit(step, state, jax.ShapeDtypeStruct((64, 128), jnp.float32))
    assert found.passed, str(found)
    of_model = {(row.op, row.devices) for row in found.rows if row.of_model}
    assert of_model == {("all-to-all", 8)}


@pytest.mark.parametrize("specs", [SPECS, lambda _: SPECS])
def test_auto_leaves_experts_to_xla(specs):
    policy = jda.MixedPrecisionPolicy(grad_reduce_dtype=jnp.float32)
    tx = tx_on(8, policy=policy, names=("expert",), param_specs=specs)
    assert tx.config.transport.why_not_peer.startswith("param_specs")


def test_a_weight_after_the_sum_over_tokens_raises():
    """The gradient of an expert is of the tokens of several devices, of different weights."""
    tx = tx_on(2, 4)

    def local(params, weight):
        mine = jda.local_params(params, tx)
        return tx.accumulate(tx.init_grads(params), mine, weight[0]).sums

    specs = tx.param_specs(PARAMS)
    run = jax.shard_map(local, mesh=tx.config.mesh, in_specs=(specs, P(("data", "expert"))), out_specs=P())  # fmt: skip
    with pytest.raises(jda.MeshError, match=r"^params\['down'\]: .* weight comes too late"):
        jax.eval_shape(run, PARAMS, jnp.ones(8))
