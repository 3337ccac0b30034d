"""eval_step: the forward pass of train_step, bit for bit, for every way to hold the params."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from jdistadam.core.trees import words_of
from support.bits import assert_same_bits, assert_trees_same_bits
from support.compilations import num_compilations
from support.fast_compilation import AS_FOR_USERS
from support.lookalike import BATCH, make_params, make_tx, other_params
from support.lookalike import loss_fn as sine_loss
from support.model_axes import mesh_of
from support.optimizers import distributed_adamw
from support.samples import few, often

VOCABULARY, WIDTH, LAYERS, LENGTH, ROWS = 97, 64, 3, 4, 16
BF16 = jnp.bfloat16


def tokens(seed=0):
    return np.random.default_rng(seed).integers(0, VOCABULARY, (ROWS, LENGTH)).astype(np.int32)


def label_loss(logits, x):
    """How low the logits of the next tokens are; and what to report: logits, and a number.

    What is added has few bits, so that sums are exact. Logarithms of a softmax are not: XLA fuses
    them in another way where there is no backward pass, with plain ``jax.jit`` too.
    """
    next_ones = jnp.take_along_axis(logits[:, :-1], x[:, 1:, None], axis=-1)
    few_bits = jax.lax.reduce_precision(next_ones, exponent_bits=8, mantissa_bits=7)
    return -few_bits.mean(), {"logits": logits, "seen": x.size}


class Model(nn.Module):
    """An embedding, and a layer with dropout; ``hidden`` says where its units are."""

    hidden: P | None = None

    @nn.compact
    def __call__(self, x, is_deterministic):
        embed = nn.Embed(VOCABULARY, WIDTH, name="embed")
        x = embed(x)
        h = jnp.tanh(nn.Dense(2 * WIDTH, name="up")(x))
        if self.hidden is not None:
            h = jax.lax.with_sharding_constraint(h, self.hidden)
        h = nn.Dropout(0.2, deterministic=is_deterministic)(h)
        return embed.attend(nn.LayerNorm(name="norm")(x + nn.Dense(WIDTH, name="down")(h)))


def linen_loss(params, x, rng=None, model=Model()):  # noqa: B008
    """With its logits; without a key it leaves dropout out."""
    rngs = {} if rng is None else {"dropout": rng}
    logits = model.apply({"params": params}, x, rng is None, rngs=rngs)
    return label_loss(logits, x)


@functools.cache
def linen_params():
    init = functools.partial(Model().init, is_deterministic=True)
    return jax.jit(init)(jax.random.key(0), tokens()[:1])["params"]


def scanned_params():
    rng = np.random.default_rng(0)
    shapes = {"up": (LAYERS, WIDTH, 2 * WIDTH), "down": (LAYERS, 2 * WIDTH, WIDTH)}
    layers = {k: rng.normal(size=s).astype(np.float32) / 8 for k, s in shapes.items()}
    table = rng.normal(size=(VOCABULARY, WIDTH)).astype(np.float32)
    return {"embed": {"embedding": table}, "layers": layers}


def scanned_loss(params, x, rng, tx):
    """Gathers each layer in a scan, as the shards of "optim_grads_params" need it."""
    embed = nn.Embed(VOCABULARY, WIDTH)
    variables = {"params": params["embed"]}

    @functools.partial(jax.checkpoint, policy=jda.remat_policy, prevent_cse=False)
    def body(h, layer_and_key):
        layer, key = layer_and_key
        layer = jda.gather_params(layer, tx)
        inner = nn.Dropout(0.2, deterministic=False).apply(
            {}, jnp.tanh(h @ layer["up"]), rngs={"dropout": key}
        )
        return h + inner @ layer["down"], None

    keys = jax.random.split(rng, LAYERS)
    h, _ = jax.lax.scan(body, embed.apply(variables, x), (params["layers"], keys))
    logits = embed.apply(variables, h, method=embed.attend)
    return label_loss(logits, x)


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(WIDTH, rngs=rngs), nnx.Dropout(0.1)
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, x, rngs):
        return self.head(self.dropout(self.norm(self.embed(x)), rngs=rngs))


def nnx_case():
    graph, params, stats = nnx.split(NnxModel(nnx.Rngs(0)), nnx.Param, nnx.BatchStat)

    def loss(params, x, *, model_state, rng):
        model = nnx.merge(graph, params, model_state, copy=True)
        logits = model(x, nnx.Rngs(rng))
        value, aux = label_loss(logits, x)
        return value, nnx.state(model, nnx.BatchStat), aux

    return params, stats, loss


SPECS = {
    "embed": {"embedding": P(None, "model")},
    "up": {"kernel": P(None, "model"), "bias": P("model")},
    "down": {"kernel": P("model"), "bias": P()},
    "norm": {"scale": P(), "bias": P()},
}


def model_axis_case(strategy="optim"):
    """Split over two devices by XLA: the embedding's columns, too."""
    tx = make_tx(
        mesh=mesh_of("4x2", "auto"), mask=None, param_specs=SPECS, sharding_strategy=strategy
    )
    loss = functools.partial(linen_loss, model=Model(hidden=P(None, None, "model")))
    return tx, linen_params(), loss, {}


def linen_case(n=4, **kwargs):
    return make_tx(n, mask=None, **kwargs), linen_params(), linen_loss, {}


def explicit_case():
    """Split over an Explicit axis, where types say how every value is split."""
    tx = make_tx(mesh=mesh_of("4x2"), mask=None, param_specs={"w": P(None, "model")})

    def loss(params, x, rng):
        noise = 1 + jax.random.normal(rng, ()) / 8
        logits = (noise * jax.nn.one_hot(x, VOCABULARY)) @ params["w"]
        logits = jax.sharding.reshard(logits, P())[..., :VOCABULARY]
        return label_loss(logits, x)

    w = np.random.default_rng(0).normal(size=(VOCABULARY, 128)).astype(np.float32)
    return tx, {"w": w}, loss, {}


def scanned_case(strategy="optim_grads_params"):
    layers = lambda path: "scan" if "layers" in path else None  # noqa: E731
    policy = jda.MixedPrecisionPolicy(param_comm_dtype=BF16)
    tx = make_tx(mask=None, sharding_strategy=strategy, layers=layers, policy=policy)
    return tx, scanned_params(), functools.partial(scanned_loss, tx=tx), {}


def nnx_made():
    params, stats, loss = nnx_case()
    return make_tx(4, mask=None), params, loss, {"model_state": stats}


def wrapped_case():
    """What a chain and injected numbers add to a state plays no part."""
    made = jda.inject_hyperparams(distributed_adamw)
    mesh = jax.make_mesh((2, 2), ("replica", "data"), devices=jax.devices()[:4])
    tx = made(3e-3, mesh=mesh, replica_axis="replica", loss_scale=jda.DynamicLossScale())
    return jda.chain(optax.scale(0.5), tx), linen_params(), linen_loss, {"param_dtypes": BF16}


CASES = {
    "no_shard": lambda: linen_case(n=2, sharding_strategy="no_shard"),
    "optim": linen_case,
    "optim_grads_params, gathered once": lambda: linen_case(
        sharding_strategy="optim_grads_params",
        reshard_after_forward=False,
        policy=jda.MixedPrecisionPolicy(param_comm_dtype=BF16),
    ),
    "optim_grads_params": lambda: linen_case(sharding_strategy="optim_grads_params"),
    "stacked optim_grads_params": scanned_case,
    "4 x 2, optim": model_axis_case,
    "4 x 2, Explicit": explicit_case,
    "4 x 2, optim_grads_params": lambda: model_axis_case("optim_grads_params"),
    "nnx": nnx_made,
    "replicas, chain, inject": wrapped_case,
}


def on_host(tree):
    return [np.array(words_of(x)) for x in jax.tree.leaves(tree)]


@few(1)
@pytest.mark.parametrize("name", CASES)
@often(lambda name: name in ("stacked optim_grads_params", "4 x 2, Explicit", "nnx"))
def test_the_loss_has_the_bits_of_the_training_step(name):
    """Of a state that was trained; with its predictions, and nothing in it donated or changed."""
    tx, params, loss, kwargs = CASES[name]()
    state = jda.TrainState.create(params, tx, rng=jax.random.key(3), **kwargs)
    options = dict(has_aux=True, compiler_options=AS_FOR_USERS)  # others add up in other orders
    step, evaluate = (f(loss, tx, **options) for f in (jda.train_step, jda.eval_step))
    state, _ = step(state, tokens(1))
    before, batch = on_host(state), tokens(2)
    value, aux = evaluate(state, batch)
    compiled = num_compilations()
    again = evaluate(state, jda.shard_batch(batch, tx))
    assert num_compilations() == compiled
    assert_trees_same_bits((value, aux), again)
    assert_trees_same_bits(on_host(state), before)
    state, metrics = step(state, batch)
    assert_same_bits(value, metrics["loss"])
    num_devices = tx.config.parallel.num_devices
    assert_same_bits(aux["logits"], metrics["aux"]["logits"].reshape(aux["logits"].shape))
    assert aux["logits"].shape == (ROWS, LENGTH, VOCABULARY)
    assert aux["seen"].tolist() == num_devices * [ROWS * LENGTH // num_devices]


def test_without_a_key_there_is_no_dropout():
    """The loss is that of ordinary jitted Flax code on the params of a mesh with Auto axes."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    tx = make_tx(mesh=mesh, mask=None)
    state = jda.TrainState.create(linen_params(), tx, rng=jax.random.key(3))
    evaluate = jda.eval_step(linen_loss, tx, has_aux=True)
    dropped, _ = evaluate(state, tokens())
    value, aux = evaluate(state.replace(rng=None), tokens())
    want, wanted = jax.jit(linen_loss)(state.params, jda.shard_batch(tokens(), tx))
    np.testing.assert_allclose(value, want, rtol=1e-6)
    np.testing.assert_allclose(aux["logits"], wanted["logits"], atol=1e-5)
    assert abs(float(dropped) - float(value)) > 1e-3
    other, _ = evaluate(state.replace(rng=jax.random.key(4)), tokens())
    assert float(other) != float(dropped)


# A loss of few operations, whose value says which rows, weights and params it saw.


def weighted_loss(params, batch):
    weight = jnp.sum(batch["valid"])
    return (jnp.sum(batch["x"] * params["w"][0] * batch["valid"]) / weight, weight), batch["x"]


def small(n=4, **kwargs):
    tx = make_tx(n, mask=None, **kwargs)
    return tx, jda.TrainState.create({"w": jnp.full((3,), 2.0)}, tx)


def test_eval_step_weights_examples_and_ignores_padding():
    tx, state = small()
    batch = {"x": np.arange(16, dtype=np.float32), "valid": np.ones(16, np.float32)}
    batch["valid"][:5] = 0  # all that the first device has
    evaluate = jda.eval_step(weighted_loss, tx, has_aux=True, weighted=True)
    loss, rows = evaluate(state, batch)
    assert float(loss) == 2 * batch["x"][5:].sum() / 11
    assert_same_bits(rows, batch["x"])
    step = jda.train_step(weighted_loss, tx, has_aux=True, weighted=True)
    assert_same_bits(loss, step(state, batch)[1]["loss"])


def mean_loss(params, x):
    return jnp.mean(x) * params["w"][0]


def test_eval_step_accepts_averaged_params_and_returns_none_without_aux():
    """What a state is given to be looked at, and not to be trained on, needs no main parameters."""
    tx, state = small()
    evaluate = jda.eval_step(mean_loss, tx)
    averaged = dataclasses.replace(state, params={"w": np.full((3,), 5.0, np.float32)})
    assert [float(evaluate(s, np.ones(8))[0]) for s in (state, averaged)] == [2.0, 5.0]
    assert evaluate(state, np.ones(8))[1] is None
    rows_alone = jda.eval_step(lambda p, x: (0.0, x), tx, has_aux=True)
    assert_same_bits(rows_alone(state, np.arange(8.0, dtype=np.float32))[1], np.float32(range(8)))


def test_a_spec_of_the_batch_that_cuts_another_dimension():
    """Each device has all rows of some columns: what it returns comes behind that of the last."""
    tx, state = small()
    loss = lambda p, x: (jnp.mean(x) * p["w"][0], x)  # noqa: E731
    evaluate = jda.eval_step(loss, tx, has_aux=True, batch_spec=P(None, "data"))
    batch = np.arange(24, dtype=np.float32).reshape(2, 12)
    value, parts = evaluate(state, batch)
    assert float(value) == 2 * 11.5
    assert_same_bits(parts, np.concatenate(np.split(batch, 4, axis=1)))


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@often(lambda strategy: strategy == "optim")
def test_eval_step_inside_a_scan_gives_the_same_loss(strategy):
    """Between the steps of a scan; a state of another layout has no loss there, and raises here."""
    tx = make_tx(4, sharding_strategy=strategy)
    state = jda.TrainState.create(make_params(), tx)
    step, evaluate = jda.train_step(sine_loss, tx), jda.eval_step(sine_loss, tx)

    def body(state, batch):
        state, _ = step(state, batch)
        return state, evaluate(state, BATCH)[0]

    batches = np.stack([BATCH, 2 * BATCH])
    scanned, losses = jax.jit(lambda s, b: jax.lax.scan(body, s, b))(state, batches)
    for batch, loss in zip(batches, losses, strict=True):
        state, _ = step(state, batch)
        assert_same_bits(evaluate(state, BATCH)[0], loss)
    assert_same_bits(evaluate(scanned, BATCH)[0], loss)
    if strategy == "optim":
        foreign = jda.TrainState.create(other_params(), tx)
        mixed = dataclasses.replace(foreign, params=jax.tree.map(jnp.copy, state.params))
        assert np.isnan(jax.jit(evaluate)(mixed, BATCH)[0])
        with pytest.raises(jda.LayoutError, match="the state of another layout"):
            evaluate(mixed, BATCH)


def test_only_a_forward_pass_is_compiled():
    """Nothing is reduced but the loss, and what is gathered is gathered once."""
    tx, params, loss, _ = scanned_case()
    state = jda.TrainState.create(params, tx, rng=jax.random.key(3))
    evaluate = jax.jit(jda.eval_step(loss, tx, has_aux=True))
    text = evaluate.lower(state, jda.shard_batch(tokens(), tx)).compile().as_text()
    assert "reduce-scatter(" not in text and text.count(" all-reduce(") == 1
    assert 1 <= text.count(" all-gather(") <= 3  # the table; in the loop "up" and "down"


def test_wrong_arguments_raise():
    tx, state = small()
    evaluate = jda.eval_step(mean_loss, tx)
    with pytest.raises(jda.ShapeError, match=r"^batch: leading dimension is not divisible"):
        evaluate(state, np.ones(7))
    with pytest.raises(jda.PolicyError, match=r"^loss_fn's loss: already summed over the devices"):
        jda.eval_step(lambda p, x: jax.lax.psum(mean_loss(p, x), "data"), tx)(state, np.ones(8))
    with pytest.raises(jda.TreeError, match=r"^loss_fn: returned something other.*has_aux=True"):
        jda.eval_step(lambda p, x: (mean_loss(p, x), x), tx)(state, np.ones(8))
    with pytest.raises(jda.TreeError, match=r"^state: not a train state"):
        evaluate(state.params, np.ones(8))
    with pytest.raises(jda.PolicyError, match=r"^tx: not a distributed optimizer"):
        jda.eval_step(mean_loss, optax.adamw(1e-3))
    with pytest.raises(jda.MeshError, match=r"^batch_spec: not a PartitionSpec"):
        jda.eval_step(mean_loss, tx, batch_spec=P("rows"))
    with pytest.raises(jda.HyperparameterError, match=r"^compiler_options: not a dict"):
        jda.eval_step(mean_loss, tx, compiler_options=[])
    with pytest.raises(jda.MeshError, match=r"^opt_state.mu: sharded over another mesh"):
        evaluate(small(2)[1], np.ones(8))
    jda.train_step(mean_loss, tx)(state, np.ones(8))
    with pytest.raises(jda.MeshError, match=r"^state: its arrays were donated"):
        evaluate(state, np.ones(8))


def test_an_evaluation_does_not_use_up_the_key(cpu_mesh):
    """Two evaluations of a state return the same; JAX would raise at a step after them."""
    tx = distributed_adamw(1e-2, mesh=cpu_mesh(2))

    def loss(params, batch, rng):
        return jnp.mean((batch @ params["w"] + jax.random.normal(rng, batch.shape[:1])) ** 2)

    with jax.debug_key_reuse(True):
        state = jda.TrainState.create({"w": jnp.ones(3)}, tx, rng=jax.random.key(0))
        evaluate, batch = jda.eval_step(loss, tx), np.ones((4, 3), np.float32)
        assert evaluate(state, batch) == evaluate(state, batch)
        jda.train_step(loss, tx)(state, batch)
