"""Models that scan over stacked layers, whose parameters are gathered one layer at a time."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdistadam as jda
from jdistadam.tools import hlo
from support.bits import assert_trees_same_bits
from support.dtypes import dtypes
from support.fast_compilation import AS_FOR_USERS
from support.h200 import placed, products_beside
from support.optimizers import distributed_adamw
from support.own_loop import jit_over_mesh
from support.paths import ROOT
from support.placements import FLAT, make_mesh
from support.samples import often
from support.scanned import LAYERS, layers_of, loss_of, make_params, scanned_products, shapes

HYPER = dict(learning_rate=3e-3, b1=0.87, b2=0.9973, eps=1e-7, weight_decay=0.13)
TWO = dict(shape=(2,), names=("data",))
SUMMED = dict(grad_reduce_dtype="float32")


def make_tx(mesh, *, policy=SUMMED, **kwargs):
    return distributed_adamw(**HYPER, mesh=mesh, **dtypes(**policy), **kwargs)


def train(tx, loss, batches, **kwargs):
    state = jda.TrainState.create(make_params(), tx)
    step = jda.train_step(loss, tx, compiler_options=AS_FOR_USERS, **kwargs)
    for batch in batches:
        state, metrics = step(state, batch)
    return jda.full_params(state, tx), *jda.to_optax_state(state, tx)[:2], metrics["loss"]


@pytest.fixture(scope="module")
def batches():
    rng = np.random.default_rng(1)
    return [rng.normal(size=(16, 257)).astype(np.float32) for _ in range(2)]


@pytest.mark.slow
def test_what_stands_before_an_optimizer_sees_whole_gradients_of_layers():
    tx = make_tx(make_mesh(**TWO), sharding_strategy="optim_grads", layers=layers_of)
    tx = jda.chain(optax.centralize(), tx)  # subtracts a mean over what may be cut
    batch = jax.tree.map(lambda x: np.ones((16, *x.shape), np.float32), make_params())
    batch = jax.tree.map(lambda x: x * np.cos(np.arange(x[0].size)).reshape(x[0].shape), batch)
    loss = scanned_products(lambda layer: layer)
    results = [train(tx, loss, [batch], report_nonfinite=each)[:-1] for each in (False, True)]
    assert_trees_same_bits(*results, "chain")


def test_what_stands_before_an_optimizer_mixes_no_elements_of_shards_of_layers():
    """Where gradients of layers are shards of their sum: elementwise, or it raises."""
    tx = make_tx(make_mesh(**FLAT), sharding_strategy="optim_grads_params", layers=layers_of)
    loss = scanned_products(functools.partial(jda.gather_params, tx=tx))
    batch = jax.tree.map(lambda x: np.ones((16, *x.shape), np.float32), make_params())

    def trace(before, **kwargs):
        chained = jda.chain(before, tx)
        state = jda.TrainState.create(make_params(), chained)
        return jax.eval_shape(jda.train_step(loss, chained, **kwargs), state, batch)

    trace(optax.masked(optax.scale(0.5), lambda params: jax.tree.map(lambda x: True, params)))
    with pytest.raises(
        jda.PolicyError, match=r"transformation 0: .*summed gradients, and it is not"
    ):
        trace(optax.centralize())
    by_size = lambda tree: jax.tree.map(lambda x: x.size > 20_000, tree)  # noqa: E731
    by_place = lambda g: g * jax.lax.broadcasted_iota(g.dtype, g.shape, 0)  # noqa: E731
    for before in (
        optax.masked(optax.scale(0.5), by_size),
        optax.stateless(lambda grads, _: jax.tree.map(lambda g: g / g.size, grads)),
        optax.stateless(lambda grads, _: jax.tree.map(by_place, grads)),
    ):
        with pytest.raises(jda.PolicyError, match=r"transformation 0: .*looks at shapes or places"):
            trace(before)


def test_whole_params_are_not_cut_across_layers():
    """As many layers as devices: their state is sharded within a layer all the same."""
    params = {"layers": jax.ShapeDtypeStruct((8, 64, 513), jnp.float32)}
    layouts = [
        make_tx(make_mesh(**FLAT), sharding_strategy="optim", layers=layers).layout(params)
        for layers in (None, layers_of)
    ]
    assert [layout.buckets[0].dim for layout in layouts] == [0, 1]


def test_layers_lie_sharded_within_themselves():
    tx = make_tx(make_mesh(**FLAT), sharding_strategy="optim_grads_params", layers=layers_of)
    state = jda.TrainState.create(make_params(), tx)
    held = jax.tree.map(lambda x: x.addressable_shards[0].data.shape, state.params)
    assert held["layers"] == {
        "mlp": {"up": (6, 8, 256), "down": (6, 32, 64)}, "scale": (6, 64), "odd": (6, 3001),
    }  # fmt: skip
    assert held["head"] == (8, 512) and held["embed"] == (257, 8)
    assert_trees_same_bits(jda.full_params(state, tx), make_params(), "full_params")


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [False, True])
@often(lambda check_vma: check_vma)
def test_custom_loop_over_stacked_layers_is_train_step(check_vma, batches):
    """With types on and off, as train_step."""
    mesh = make_mesh(**FLAT)
    tx = make_tx(mesh, sharding_strategy="optim_grads_params", layers=layers_of)
    tx = tx.bind(make_params())
    loss = loss_of(functools.partial(jda.gather_params, tx=tx), jda.remat_policy)

    def local_step(params, state, x):
        def whole_loss(params, x):
            return loss(jda.gather_params(params, tx), x)

        grads = jax.grad(whole_loss)(jda.local_params(params, tx), x)
        return tx.step(grads, state, params)

    state = jda.TrainState.create(make_params(), tx)
    step = jit_over_mesh(local_step, tx, state.params, check_vma, compiler_options=AS_FOR_USERS)
    params, opt_state = state.params, state.opt_state
    for batch in batches:
        params, opt_state = step(params, opt_state, jda.shard_batch(batch, tx))
    want, *_ = train(tx, loss, batches)
    assert_trees_same_bits(
        jda.full_params(jda.TrainState(params, opt_state), tx), want, "custom training loop"
    )


def compile_for_h200s(
    h200s,
    policy,
    layers=LAYERS,
    width=1024,
    strategy="optim_grads_params",
    checkpoint=jax.checkpoint,
    **kwargs,
):
    mesh = h200s(8)
    tx = make_tx(
        mesh,
        policy=dict(grad_comm_dtype="bfloat16"),
        sharding_strategy=strategy,
        layers=layers_of,
    )
    params = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.bfloat16), shapes(layers, width), is_leaf=lambda s: type(s) is tuple
    )  # fmt: skip
    state = jda.TrainState.shapes(params, tx)
    batch = placed(
        mesh, jax.ShapeDtypeStruct((64, 257), jnp.bfloat16), tx.config.parallel.batch_spec
    )
    step = jda.train_step(
        loss_of(functools.partial(jda.gather_params, tx=tx), policy, checkpoint), tx, **kwargs
    )
    return step, state, batch


@functools.cache
def audited(h200s, policy, prevent_cse):
    """The audit of a step of eight layers, each gathered in the scan."""
    checkpoint = functools.partial(jax.checkpoint, prevent_cse=prevent_cse)
    return jda.audit(*compile_for_h200s(h200s, policy, layers=8, checkpoint=checkpoint))


@pytest.mark.parametrize("accumulate_steps", [1, 2])
@often(lambda accumulate_steps: accumulate_steps == 2)
def test_each_layer_is_gathered_twice_and_reduced_once(h200s, accumulate_steps):
    """Asynchronously, in bfloat16, inside of the loops over layers; the audit agrees."""
    checkpoint = functools.partial(jax.checkpoint, prevent_cse=False)
    step, state, batch = compile_for_h200s(
        h200s, jda.remat_policy, checkpoint=checkpoint, accumulate_steps=accumulate_steps
    )
    audit = jda.audit(step, state, batch)
    assert audit.passed, str(audit)
    size = 4 * 1024 * 1024  # of up and of down, which are sent together
    sizes = {"all-gather": size, "reduce-scatter": size // 8}
    sent, looped = dict.fromkeys(sizes, 0), 0
    for c in hlo.collectives_in(audit.program.as_text()):
        if number := c.arrays.count(("bf16", sizes.get(c.op))):
            assert c.is_async
            sent[c.op] += c.times * number
            looped += c.times * (c.op == "reduce-scatter" and c.times > 1)
    assert sent["reduce-scatter"] == 2 * LAYERS * accumulate_steps
    assert sent["all-gather"] == 2 * 2 * LAYERS * accumulate_steps
    # XLA may take the first or the last of the iterations, two layers each, out of a loop.
    assert looped >= (LAYERS - 2) * accumulate_steps


def test_layers_are_sent_beside_the_products_of_others(h200s):
    """Every gather and reduction in a loop; fewer, or none, in the backward one behind a barrier."""
    found = {}
    for prevent_cse in (False, True):
        audit = audited(h200s, jda.remat_policy, prevent_cse)
        found[prevent_cse] = products_beside(audit.program.as_text())
    gathers = {key: [n for op, n in rows if op == "all-gather"] for key, rows in found.items()}
    # Two loops, which are unrolled by two.
    assert len(gathers[False]) == 4 >= len(gathers[True])
    assert all(n > 0 for _, n in found[False])
    assert sum(gathers[True][2:]) < sum(gathers[False][2:])


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
@often(lambda strategy: strategy == "optim")
def test_whole_layers_are_never_gathered_in_a_scan(h200s, strategy):
    """What is planned is one reduction of each micro-batch or step, and one gather."""
    case = compile_for_h200s(
        h200s, jda.remat_policy, width=256, strategy=strategy, accumulate_steps=2
    )
    audit = jda.audit(*case)
    assert audit.passed, str(audit)
    times = {"no_shard": 1, "optim": 1, "optim_grads": 2}[strategy]
    up = [c for c in jda.plan(case[1].params, case[0].tx, accumulate_steps=2).collectives if "up" in str(c.leaves)]  # fmt: skip
    assert up[0].times == times
    assert [c.times for c in up[1:]] == [1] * len(up[1:])
    assert {c.elements for c in up} == {LAYERS * 256 * 1024}


@pytest.mark.slow
def test_gathering_once_costs_memory_and_is_found(h200s):
    """Without remat_policy, all gathered layers wait for the backward pass."""
    audits = [
        audited(h200s, policy, True)
        for policy in (jda.remat_policy, jax.checkpoint_policies.everything_saveable)
    ]
    (failed,) = [row for row in audits[1].rows if not row.passed]
    assert failed.op == "all-gather" and failed.found < failed.planned
    temporary = [audit.program.memory_analysis().temp_size_in_bytes for audit in audits]
    weights = 2 * 8 * 1024 * 1024  # of a layer: up and down
    assert temporary[1] - temporary[0] >= 5 * weights


def test_wrong_stacked_raises():
    mesh = make_mesh(**FLAT)
    with pytest.raises(jda.HyperparameterError, match="layers: not a function"):
        make_tx(mesh, sharding_strategy="optim_grads_params", layers="layers")
    tx = make_tx(
        mesh,
        sharding_strategy="optim_grads_params",
        layers=lambda path: "scan" if "lyers" in path else None,
    )
    with pytest.raises(jda.TreeError, match=r"layers: selects no leaf: got .*'embed'.*5 more"):
        tx.init(make_params())


@pytest.mark.slow  # test_gathering_once_costs_memory_and_is_found stands for it
def test_a_model_of_1_3e9_parameters_holds_three_of_its_layers(h200s):
    """The Flax model of train_lm.py, every layer recomputed, compiled for eight H200s.

    The limit: 1.05 of what the same model needs besides its whole gradients, the shards of these,
    and the weights and gradients of three of the 26 layers: XLA unrolls the loop by two, so that
    one iteration uses two layers while a third is gathered or reduced.
    """
    sys.path.insert(0, str(ROOT / "experiments"))
    from lm import gpt

    mesh, config = h200s(8), gpt.PRESETS["gpt-1.3b"]
    nothing = jax.checkpoint_policies.nothing_saveable
    tokens = jnp.zeros((1, config.length), jnp.int32)
    model = gpt.GPT(config, jnp.bfloat16, scans=True, remat_policy=nothing)
    with jax.numpy_rank_promotion("allow"):
        params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), params)
    size = sum(x.size for x in jax.tree.leaves(params))
    layer = sum(x.size for x in jax.tree.leaves(params["layers"])) // config.layers
    assert 1.3e9 < size < 1.35e9
    temporary = {}
    for strategy in ("optim_grads", "optim_grads_params"):
        gathers = strategy == "optim_grads_params"
        tx = make_tx(
            mesh, policy=dict(grad_comm_dtype="bfloat16"), sharding_strategy=strategy,
            layers=layers_of if gathers else None,
        )  # fmt: skip
        gather = functools.partial(jda.gather_params, tx=tx) if gathers else None
        state = jda.TrainState.shapes(params, tx)
        batch = jax.ShapeDtypeStruct((32, config.length + 1), jnp.int32)
        batch = placed(mesh, batch, tx.config.parallel.batch_spec)
        step = jda.train_step(gpt.loss_fn(model.clone(gather=gather)), tx)
        with jax.numpy_rank_promotion("allow"):  # Flax adds biases so
            audit = jda.audit(step, state, batch)
        assert audit.passed, str(audit)
        temporary[strategy] = audit.program.memory_analysis().temp_size_in_bytes
    without_grads = temporary["optim_grads"] - 2 * size
    limit = 1.05 * without_grads + 2 * size / 8 + 3 * (2 * layer + 2 * layer)
    assert temporary["optim_grads_params"] <= limit
