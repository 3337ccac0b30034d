"""Models that gather their blocks one by one, without a scan: ``layers`` that are "block"."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdistadam as jda
from support.h200 import placed
from support.placements import FLAT, make_mesh
from support.samples import few

HYPER = dict(learning_rate=3e-3, b1=0.87, b2=0.9973, eps=1e-7, weight_decay=0.13)
BLOCKS, WIDTH = 4, 64


def layers_of(path):
    return "block" if is_block(path) else None


def is_block(path):
    return "block" in path


def make_tx(mesh, strategy="optim_grads_params", policy=None, **kwargs):
    return jda.distributed(
        jda.fused_adamw(**HYPER),
        mesh=mesh,
        sharding_strategy=strategy,
        policy=jda.MixedPrecisionPolicy(**(policy or {})),
        **kwargs,
    )


def make_params(dtype=jnp.float32, blocks=BLOCKS, width=WIDTH):
    rng = np.random.default_rng(0)
    shapes = {"up": (width, 4 * width), "down": (4 * width, width), "scale": (width,)}
    block = lambda: {k: jnp.asarray(rng.normal(size=s) / 8, dtype) for k, s in shapes.items()}  # noqa: E731
    return {"embed": jnp.asarray(rng.normal(size=(257, width)) / 8, dtype)} | {
        f"block{i}": block() for i in range(blocks)
    }


def products(tx):
    """A loss whose gradient is the mean of the batch's rows: whole numbers, of which sums are exact."""
    dot = lambda p, x: jnp.sum(p.astype(jnp.float32) * x.mean(0))  # noqa: E731

    @functools.partial(jax.checkpoint, policy=jda.remat_policy)
    def block(params, rows):
        return sum(jax.tree.leaves(jax.tree.map(dot, jda.gather_params(params, tx), rows)))

    def loss(params, batch):
        terms = [block(params[k], batch[k]) for k in params if is_block(k)]
        return sum(terms, start=dot(params["embed"], batch["embed"]))

    return loss


def make_batches(steps, rows=32):
    rng = np.random.default_rng(1)
    shapes = jax.tree.map(jnp.shape, make_params())
    draw = lambda s: rng.integers(-9, 10, (rows, *s)).astype(np.float32)  # noqa: E731
    return [jax.tree.map(draw, shapes, is_leaf=lambda s: type(s) is tuple) for _ in range(steps)]


def test_eval_step_gathers_the_same_way():
    tx = make_tx(make_mesh(**FLAT), layers=layers_of)
    state = jda.TrainState.create(make_params(), tx)
    (batch,) = make_batches(1)
    loss, _ = jda.eval_step(products(tx), tx)(state, batch)
    _, metrics = jda.train_step(products(tx), tx)(state, batch)
    assert loss == metrics["loss"]


def test_a_model_that_forgets_to_gather_raises():
    tx = make_tx(make_mesh(**FLAT), layers=layers_of)
    state = jda.TrainState.shapes(make_params(), tx)
    loss = lambda params, batch: jnp.sum(params["block0"]["up"] * 2.0)  # noqa: E731
    with pytest.raises(TypeError, match=r"a shard of a parameter, float32\[.*gather it first"):
        jax.eval_shape(jda.train_step(loss, tx), state, make_batches(1)[0])


def test_wrong_layers_raise():
    with pytest.raises(jda.HyperparameterError, match="layers: not a function"):
        make_tx(make_mesh(**FLAT), layers="block")
    tx = make_tx(make_mesh(**FLAT), layers=lambda path: "block" if "blok" in path else None)
    with pytest.raises(jda.TreeError, match=r"layers: selects no leaf: got None for"):
        tx.init(make_params())


def residual(tx):
    """A residual network; each block is one call of the same function."""

    @functools.partial(jax.checkpoint, policy=jda.remat_policy)
    def block(params, x, before):
        params = jda.gather_params(params, tx, after=before)
        h = jnp.tanh((x * params["scale"][None]) @ params["up"])
        return x + h @ params["down"]

    def loss(params, batch):
        x = before = params["embed"][batch]
        for i in range(len(params) - 1):
            x, before = block(params[f"block{i}"], x, before), x
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    return loss


def audited(h200s, micro=1, blocks=8, width=1024, **kwargs):
    mesh = h200s(8)
    tx = make_tx(mesh, policy=dict(grad_comm_dtype="bfloat16"), **kwargs)
    shapes = jax.eval_shape(lambda: make_params(jnp.bfloat16, blocks, width))
    state = jda.TrainState.shapes(shapes, tx)
    batch = placed(mesh, jax.ShapeDtypeStruct((64,), jnp.int32), tx.config.parallel.batch_spec)
    return jda.audit(jda.train_step(residual(tx), tx, accumulate_steps=micro), state, batch)


@few(1)
@pytest.mark.parametrize("micro", [1, 2])
def test_blocks_are_gathered_as_planned(h200s, micro):
    """In the forward pass and again in the backward one, in every micro-batch."""
    audit = audited(h200s, micro, layers=layers_of)
    assert audit.passed, audit
    (gathers,) = [row for row in audit.rows if row.op == "all-gather"]
    assert gathers.found >= 2 * micro * 8 * 8 * 1024 * 1024


@pytest.mark.slow
def test_memory_holds_at_most_three_whole_blocks(h200s):
    """Beside the shards of gradients, in bfloat16: gathering first keeps the weights of all."""
    found = {
        chosen: audited(h200s, blocks=16, layers=chosen)
        .program.memory_analysis()
        .temp_size_in_bytes
        for chosen in (layers_of, None)
    }
    block = 2 * 8 * 1024 * 1024  # bytes of its weights, and as many of its gradients
    shards = 16 * block // 8
    assert found[None] >= 16 * block
    assert found[layers_of] <= shards + 3 * block, found


def test_waiting_changes_no_bit_of_a_gradient():
    """Not even the sign of a zero."""
    tx = make_tx(make_mesh(**FLAT), layers=layers_of)
    params = make_params()
    opt = tx.bind(params)

    def gradient(params, x, factors):
        def loss(shards, x):
            block = jda.gather_params(shards["block0"], opt, after={"x": x, "n": jnp.int32(3)})
            return jnp.sum(block["up"]) + jnp.sum(x * factors)

        return jax.grad(loss, argnums=1)(jda.local_params(params, opt), x)

    run = jax.shard_map(
        gradient,
        mesh=tx.config.mesh,
        in_specs=(opt.param_specs(params), jax.P(), jax.P()),
        out_specs=jax.P(),
        check_vma=False,
    )
    factors = np.array([-0.0, 0.0, 1.5, -np.inf], np.float32)
    placed_params = jax.device_put(params, opt.param_shardings(params))
    got = jax.jit(run)(placed_params, jnp.zeros(4), factors)
    np.testing.assert_array_equal(np.asarray(got).view(np.uint32), factors.view(np.uint32))
