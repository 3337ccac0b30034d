"""Weights of micro-batches where gradients of scanned layers are summed in the backward pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdistadam as jda
from support.bits import assert_trees_same_bits
from support.h200 import placed
from support.optimizers import distributed_adamw
from support.placements import FLAT, SQUARE, make_mesh
from support.samples import few, often
from support.scanned import (
    layers_of,
    loss_of,
    make_params,
    scanned_products,
    shapes,
)

PAIR = dict(shape=(2,), names=("data",))
HYPER = dict(learning_rate=3e-3, b1=0.87, b2=0.9973, eps=1e-7, weight_decay=0.13)
KINDS = {
    "flat": (FLAT, {}),
    "twice": (SQUARE, dict(replica_axis="replica", outer_sharding_strategy="optim")),
    "one device": (dict(shape=(1,), names=("data",)), {}),
}


def make_tx(mesh, **kwargs):
    policy = jda.MixedPrecisionPolicy(grad_reduce_dtype="float32")
    return distributed_adamw(**HYPER, mesh=mesh, policy=policy, **kwargs)


def weighted_products(gather):
    """The loss of each part of the batch, with the sum of its examples' weights."""
    products = scanned_products(gather)

    def loss(params, batch):
        return products(params, batch["rows"]), jnp.sum(batch["weight"])

    return loss


def make_batches(micro_batches, steps=4, examples=16):
    """Small integers, with weights that round; those of weight zero hold no number at all."""
    rng = np.random.default_rng(3)
    weight = rng.uniform(0.3, 2, (steps, examples)).astype(np.float32)
    weight.reshape(steps, micro_batches, -1)[:, 1::3] = 0
    weight[-1] = 0  # a step without any weight

    def rows(shape):
        x = rng.integers(-64, 65, (steps, examples, *shape)).astype(np.float32)
        x[weight == 0] = rng.choice([np.nan, np.inf, -np.inf])
        return x

    rows = jax.tree.map(rows, shapes(), is_leaf=lambda s: type(s) is tuple)
    return [
        {"rows": jax.tree.map(lambda x, i=i: x[i], rows), "weight": weight[i]} for i in range(steps)
    ]


def train(tx, loss, batches, dtype, **kwargs):
    state = jda.TrainState.create(make_params(dtype), tx)
    step = jda.train_step(loss, tx, weighted=True, **kwargs)
    norms = []
    for batch in batches:
        state, metrics = step(state, batch)
        assert np.isfinite(metrics["loss"])
        norms.append(metrics["grad_norm"])
    return jda.full_params(state, tx), *jda.to_optax_state(state, tx), norms


@pytest.mark.parametrize("accumulate_steps", [1, 2])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@often(lambda kind, dtype, accumulate_steps: (kind, dtype, accumulate_steps) == ("flat", jnp.bfloat16, 2))  # fmt: skip
def test_weighted_layers_give_the_bits_of_weighted_whole_gradients(kind, dtype, accumulate_steps):
    """Each device's gradient times its weight, in float32, is summed: by layers as at once.

    The gather is jitted by itself, so that JAX could take it from its cache for the weight before.
    """
    mesh, kwargs = KINDS[kind]
    mesh = make_mesh(**mesh)
    batches = make_batches(mesh.size * accumulate_steps)
    tx = make_tx(mesh, sharding_strategy="optim_grads_params", layers=layers_of, **kwargs)
    gather = jax.jit(functools.partial(jda.gather_params, tx=tx))
    loss = weighted_products(gather)
    got = train(tx, loss, batches, dtype, accumulate_steps=accumulate_steps)
    whole = make_tx(mesh, sharding_strategy="optim_grads", **kwargs)
    loss = weighted_products(lambda layer: layer)
    want = train(whole, loss, batches, dtype, accumulate_steps=accumulate_steps)
    assert_trees_same_bits(got[:-1], want[:-1], kind)
    assert got[-1][-1] == 0  # of no weight at all
    assert all(np.isfinite(norm) and norm > 0 for norm in got[-1][:-1])


def test_layers_that_are_not_gathered_raise():
    """On one device, too: a model that forgets to gather does not wait for the second one."""
    mesh = make_mesh(**KINDS["one device"][0])
    tx = make_tx(mesh, sharding_strategy="optim_grads_params", layers=layers_of)

    def loss(params, batch):
        _, layers = jax.lax.scan(
            lambda _, layer: (None, 2 * layer["mlp"]["up"]), None, params["layers"]
        )
        return jnp.sum(layers)

    state = jda.TrainState.shapes(make_params(jnp.float32), tx)
    with pytest.raises(TypeError, match=r"a shard of a parameter.*gather it first"):
        jax.eval_shape(jda.train_step(loss, tx), state, make_batches(1)[0])


@pytest.mark.slow
def test_weights_work_with_keys_model_state_and_aux():
    """The call for the weight alone has the same key and model state, and changes neither."""
    batches, results = make_batches(4), []
    for kwargs in (
        dict(sharding_strategy="optim_grads_params", layers=layers_of),
        dict(sharding_strategy="optim_grads"),
    ):
        tx = make_tx(make_mesh(**PAIR), loss_scale=2.0**7, **kwargs)
        loss = weighted_products(functools.partial(jda.gather_params, tx=tx))

        def noisy(params, batch, model_state, rng, loss=loss):
            factor = jax.random.randint(rng, (), 1, 4).astype(jnp.float32)
            value, weight = loss(params, batch)
            weight *= factor + model_state["calls"]  # known in the call for the weight alone, too
            return (value * factor, weight), {"calls": model_state["calls"] + 1}, factor

        state = jda.TrainState.create(
            make_params(jnp.bfloat16), tx, rng=jax.random.key(5), model_state={"calls": 1.0}
        )
        step = jda.train_step(noisy, tx, weighted=True, has_aux=True, accumulate_steps=2)
        factors = []
        for batch in batches[:-1]:
            state, metrics = step(state, batch)
            factors.append(metrics["aux"])
        main = jda.main_params(state.params, state.opt_state, tx)
        results.append((main, state.model_state, jax.random.key_data(state.rng), factors))
        # The means over two devices, one of which has a micro-batch of weight zero in each step.
        assert state.model_state["calls"] == 1 + 3 * (1 + 2) / 2 and len(np.unique(factors)) > 1
    assert_trees_same_bits(*results, "with all else")


@pytest.mark.slow
def test_negative_weight_gives_nan():
    tx = make_tx(make_mesh(**PAIR), sharding_strategy="optim_grads_params", layers=layers_of)
    state = jda.TrainState.create(make_params(), tx)
    loss = weighted_products(functools.partial(jda.gather_params, tx=tx))
    batch = make_batches(2)[0] | {"weight": np.full(16, -1, np.float32)}
    state, metrics = jda.train_step(loss, tx, weighted=True)(state, batch)
    assert np.isnan(metrics["loss"]) and np.isnan(metrics["grad_norm"])
    assert np.isnan(state.params["layers"]["mlp"]["up"]).all()


@pytest.mark.slow
@pytest.mark.parametrize("accumulate_steps", [1, 2])
@often(lambda accumulate_steps: accumulate_steps == 1)
def test_computing_the_weight_first_adds_no_operations(h200s, accumulate_steps):
    """What loss_fn computes besides the weight is not computed, gathered or sent once more."""
    mesh = h200s(8)
    policy = jda.MixedPrecisionPolicy(grad_comm_dtype="bfloat16")
    tx = distributed_adamw(
        **HYPER, mesh=mesh, policy=policy, sharding_strategy="optim_grads_params", layers=layers_of
    )  # fmt: skip
    params = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.bfloat16), shapes(6, 512), is_leaf=lambda s: type(s) is tuple
    )  # fmt: skip
    batch = {"x": jax.ShapeDtypeStruct((64, 257), jnp.bfloat16), "weight": jax.ShapeDtypeStruct((64,), jnp.float32)}  # fmt: skip
    batch = placed(mesh, batch, tx.config.parallel.batch_spec)

    network = loss_of(functools.partial(jda.gather_params, tx=tx), jda.remat_policy)
    programs = {}
    for weighted in (False, True):

        def loss(params, batch, weighted=weighted):
            loss = network(params, batch["x"])
            return (loss, jnp.sum(batch["weight"])) if weighted else loss

        step = jda.train_step(loss, tx, weighted=weighted, accumulate_steps=accumulate_steps)
        audit = jda.audit(step, jda.TrainState.shapes(params, tx), batch)
        assert audit.passed, str(audit)
        text = audit.program.as_text()
        programs[weighted] = [text.count(f" {op}(") for op in ("while", "tanh", "dot")] + [
            text.count("__cublas")
        ]
    assert programs[True] == programs[False] and programs[True][0] and any(programs[True][2:])


OF_LAYERS = {
    "no_shard": dict(sharding_strategy="no_shard"),
    "gathered once": dict(sharding_strategy="optim_grads_params"),
    "scan": dict(sharding_strategy="optim_grads_params", layers=lambda path: "scan"),
    "block": dict(sharding_strategy="optim_grads_params", layers=lambda path: "block"),
    "scan, peer": dict(
        sharding_strategy="optim_grads_params", layers=lambda path: "scan", communication="peer"
    ),
}


def linear_loss_of(kind, tx):
    """A loss whose gradient is the batch, and which counts its calls, whatever their weights."""

    def body(total, both):
        layer, x = both
        return total + jnp.sum(jda.gather_params(layer, tx)["w"][None] * x), None

    def loss(params, batch, model_state):
        x, zero = jnp.swapaxes(batch["x"], 0, 1), jnp.float32(0)
        if kind.startswith("scan"):
            total, _ = jax.lax.scan(body, zero, (params, x))
        else:
            whole = jda.gather_params(params, tx)
            total = jnp.sum(whole["w"][:, None] * x)
        new = {"mean": jnp.int32(7), "calls": model_state["calls"] + 1}
        return (total, jnp.sum(batch["weight"])), new

    return loss


@few(1)
@pytest.mark.parametrize("kind", OF_LAYERS)
@pytest.mark.parametrize("accumulate_steps", [1, 2])
@often(lambda kind, accumulate_steps: accumulate_steps == 2 or kind == "scan")
def test_a_report_counts_devices_and_nothing_of_weight_zero(cpu_mesh, kind, accumulate_steps):
    """Own gradients of devices, also where they are summed in the backward pass.

    What devices of weight zero make of the model state does not count either; counters go on.
    """
    tx, devices = make_tx(cpu_mesh(4), **OF_LAYERS[kind]), 4
    rng = np.random.default_rng(2)
    rows = devices * accumulate_steps
    x = rng.normal(size=(rows, 2, 128, 128)).astype(np.float32)
    params = {"w": rng.normal(size=x.shape[1:]).astype(np.float32)}
    step = jda.train_step(
        linear_loss_of(kind, tx),
        tx,
        weighted=True,
        report_nonfinite=True,
        accumulate_steps=accumulate_steps,
    )
    for bad in ([], [1], [1, 3]):
        weight = np.ones(rows, np.float32)
        weight[: rows // devices] = 0  # the whole part of the first device
        given = x.copy()
        given[weight == 0] = np.nan
        for device in bad:
            given[(device + 1) * accumulate_steps - 1, 1, 5, 7] = np.inf
        state = jda.TrainState.create(params, tx, model_state={"mean": 0.5, "calls": 0})
        state, metrics = step(state, {"x": given, "weight": weight})
        assert jda.nonfinite_paths(metrics["nonfinite"], state.params) == (
            {"params['w']": len(bad)} if bad else {}
        )
        assert float(state.model_state["mean"]) == (0.5 + 3 * 7) / devices
        assert int(state.model_state["calls"]) == accumulate_steps
        if not bad:
            mean = np.mean(given[weight != 0], axis=0, dtype=np.float64)
            np.testing.assert_allclose(metrics["grad_norm"], np.linalg.norm(mean), rtol=1e-6)


@few(1)
@pytest.mark.parametrize("is_jitted", [False, True])
def test_callbacks_of_a_weighted_loss_run_once(cpu_mesh, is_jitted):
    """Beside layers whose gradients need the weight first: it alone is computed before."""
    tx, calls = make_tx(cpu_mesh(2), **OF_LAYERS["scan"]), []

    def body(x, layer):
        jax.debug.callback(lambda _: calls.append("layer"), x[0, 0])
        return jnp.tanh(x @ jda.gather_params(layer, tx)["w"]), None

    def loss(params, batch):
        jax.debug.callback(lambda: calls.append("loss"))

        def count(total, part):
            jax.debug.callback(lambda _: calls.append("weight"), total)
            return total + part, None

        weight, _ = jax.lax.scan(count, jnp.float32(0), batch["weight"])
        return jnp.mean(jax.lax.scan(body, batch["x"], params)[0]), weight

    step = jda.train_step(jax.jit(loss) if is_jitted else loss, tx, weighted=True)
    state = jda.TrainState.create({"w": np.full((3, 128, 128), 0.01, np.float32)}, tx)
    batch = {"x": np.ones((4, 128), np.float32), "weight": np.ones(4, np.float32)}
    jax.block_until_ready(step(state, batch))
    jax.effects_barrier()
    assert sorted(calls) == ["layer"] * 6 + ["loss"] * 2 + ["weight"] * 4


@pytest.mark.slow
def test_a_derivative_of_its_own_may_gather_in_a_scan(cpu_mesh):
    """Its backward pass gathers once more; the weight reaches it like any other operand."""
    tx = make_tx(cpu_mesh(2), **OF_LAYERS["scan"])

    def layer_of(layer, x):
        return jnp.tanh(x @ jda.gather_params(layer, tx)["w"])

    own = jax.custom_vjp(layer_of)
    own.defvjp(
        lambda *args: (layer_of(*args), args), lambda args, g: jax.vjp(layer_of, *args)[1](g)
    )
    rng, results = np.random.default_rng(5), []
    params = {"w": rng.normal(size=(2, 128, 128)).astype(np.float32) / 9}
    batch = {"x": rng.normal(size=(4, 128)).astype(np.float32)}
    for function in (layer_of, own):

        def loss(params, batch, function=function):
            x, _ = jax.lax.scan(lambda x, layer: (function(layer, x), None), batch["x"], params)
            return jnp.mean(x**2), jnp.sum(batch["weight"])

        step = jda.train_step(loss, tx, weighted=True)
        state = jda.TrainState.create(params, tx)
        given = batch | {"weight": np.float32([1, 2, 3, 4])}
        state, metrics = step(state, given)
        results.append((metrics, jda.to_optax_state(state, tx)[1][0].mu["w"]))
    for got, want in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-8)
