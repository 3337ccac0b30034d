"""Shards with a type: what a model may do with them before it gathers."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jdistadam as jda
from jdistadam.distributed.shard import Shard, is_shard, leaves_of
from support.bits import assert_trees_same_bits
from support.own_loop import jit_over_mesh
from support.placements import FLAT, make_mesh
from support.samples import few

HYPER = dict(learning_rate=3e-3, b1=0.87, b2=0.9973, eps=1e-7, weight_decay=0.13)
LAYERS, WIDTH = 24, 128
ROWS = 16


def make_tx(strategy="optim_grads_params", mesh=FLAT, **kwargs):
    return jda.distributed(
        jda.fused_adamw(**HYPER), mesh=make_mesh(**mesh), sharding_strategy=strategy, **kwargs
    )


def products(num_layers=LAYERS):
    """Params whose gradients, of whole numbers, have the same sums in any order."""
    rng = np.random.default_rng(0)
    shapes = {"w": (WIDTH, WIDTH), "b": (WIDTH,)}
    return [
        {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}
        for _ in range(num_layers)
    ]


def linear(layer, x):
    """Its gradients are linear in x alone."""
    return jnp.sum(layer["w"] * jnp.sum(x, 0)[:, None]) + jnp.sum(layer["b"] * jnp.sum(x, 0))


def make_batch(num_layers=LAYERS):
    rng = np.random.default_rng(1)
    return rng.integers(-9, 10, (ROWS, num_layers, WIDTH)).astype(np.float32)


def own_step(tx, loss, params):
    """A step in a custom training loop; the loss gets what ``local_params`` returned."""
    opt = tx.bind(params)

    def local_step(params, state, batch):
        shards = jda.local_params(params, opt)
        grads = jax.grad(lambda p: loss(p, batch))(shards)
        return opt.step(grads, state, params)

    return jit_over_mesh(local_step, opt, params, check_vma=False)


def stepped(tx, loss, params, batch):
    state = jda.TrainState.create(params, tx)
    shard = jda.shard_batch(batch, tx)
    new, opt_state = own_step(tx, loss, params)(state.params, state.opt_state, shard)
    return jax.tree.map(np.asarray, (new, jda.main_params(new, opt_state, tx)))


def layer_by_layer(tx):
    def loss(layers, x):
        terms = [linear(jda.gather_params(p, tx), x[:, i]) for i, p in enumerate(layers)]
        return sum(terms[1:], start=terms[0])

    return loss


def switched(tx):
    """Branches of one switch take shards of one type."""

    def loss(layers, x):
        def apply(i):
            return lambda layers: linear(jda.gather_params(layers[i], tx), x[:, i])

        terms = [
            jax.lax.switch(jnp.int32(x.shape[0] > 1), [apply(0), apply(i)], layers)
            for i in range(len(layers))
        ]
        return sum(terms[1:], start=terms[0])

    return loss


def stacked_and_scanned(tx):
    """Equal layers have equal tree structures: they are stacked, and scanned over."""

    def loss(layers, x):
        stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)

        def body(total, layer_and_x):
            layer, x = layer_and_x
            return total + linear(jda.gather_params(layer, tx), x), None

        return jax.lax.scan(body, jnp.float32(0), (stack, jnp.moveaxis(x, 1, 0)))[0]

    return loss


def unstacked_again(tx):
    def loss(layers, x):
        stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
        again = [jax.tree.map(lambda leaf, i=i: leaf[i], stack) for i in range(len(layers))]
        return layer_by_layer(tx)(again, x)

    return loss


def mapped_over_layers(tx):
    """vmap over a stack of layers: each is gathered as one layer is."""

    def loss(layers, x):
        stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
        apply = lambda layer, x: linear(jda.gather_params(layer, tx), x)  # noqa: E731
        return jnp.sum(jax.vmap(apply, in_axes=(0, 1))(stack, x))

    return loss


def tree_map_across_layers(tx):
    def loss(layers, x):
        same = jax.tree.map(lambda a, b: a + 0 * b, layers, layers[1:] + layers[:1])
        return layer_by_layer(tx)(same, x)

    return loss


@few(1)
@pytest.mark.parametrize(
    "of", [layer_by_layer, switched, stacked_and_scanned, unstacked_again, mapped_over_layers, tree_map_across_layers]
)  # fmt: skip
def test_any_way_to_the_layers_gives_the_bits_of_gathering_first(of):
    params, batch = products(3), make_batch(3)
    want = stepped(make_tx("optim"), layer_by_layer(make_tx("optim")), params, batch)
    tx = make_tx()
    assert_trees_same_bits(stepped(tx, of(tx), params, batch), want, of.__name__)


def test_a_block_of_24_layers_is_traced_once():
    """Jitted and checkpointed once, outside of the loop over layers."""
    tx, count = make_tx(), 0

    @jax.jit
    @functools.partial(jax.checkpoint, policy=jda.remat_policy)
    def block(layer, x):
        nonlocal count
        count += 1
        return linear(jda.gather_params(layer, tx), x)

    def loss(layers, x):
        assert len({jax.tree.structure(layer) for layer in layers}) == 1
        terms = [block(p, x[:, i]) for i, p in enumerate(layers)]
        return sum(terms[1:], start=terms[0])

    params, batch = products(), make_batch()
    got = stepped(tx, loss, params, batch)
    assert count == 1
    want = stepped(make_tx("optim"), layer_by_layer(make_tx("optim")), params, batch)
    assert_trees_same_bits(got, want, "24 layers")


def test_step_returns_the_form_that_it_got():
    """Several steps in one program, of shards; also bfloat16 ones, which are widened there."""
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), products(2))
    tx, batch = make_tx(), make_batch(2)
    opt, loss = tx.bind(params), layer_by_layer(tx)

    def two_steps(params, state, batch, *, keep):
        form = jda.local_params(params, opt)
        for _ in range(2):
            shards = form if keep else jda.local_params(form, opt)
            grads = jax.grad(lambda p: loss(p, batch))(shards)
            assert jax.tree.structure(grads) == jax.tree.structure(shards)
            form, state = opt.step(grads, state, form)
            assert is_shard(form[0]["w"]) and form[0]["w"].value.dtype == jnp.float32
            assert not is_shard(form[0]["b"]) and form[0]["b"].dtype == jnp.bfloat16
        return opt.step(grads, state, jda.stored_params(form, opt))

    def alone(params, state, batch):
        for _ in range(2):
            grads = jax.grad(lambda p: loss(p, batch))(jda.local_params(params, opt))
            params, state = opt.step(grads, state, params)
            assert not any(map(is_shard, leaves_of(params)))
        return opt.step(grads, state, params)

    state = jda.TrainState.create(params, tx)
    ends = []
    for program in (functools.partial(two_steps, keep=True), alone):
        run = jit_over_mesh(program, tx, params, check_vma=False)
        ends.append(run(state.params, state.opt_state, jda.shard_batch(batch, tx)))
    assert_trees_same_bits(*ends, "params and state")


def test_a_shard_says_how_it_is_cut_and_no_more():
    """Neither name nor shape: layers of a stack and layers of their own have one structure."""
    params = {"layers": {"w": jnp.zeros((6, 64, 256))}, "alone": {"w": jnp.zeros((64, 256))}}
    tx = make_tx(layers=lambda path: "scan" if "layers" in path else None)
    opt, found = tx.bind(params), []

    def look(params):
        shards = jda.local_params(params, opt)
        stack, alone = shards["layers"], shards["alone"]
        layer = jax.tree.map(lambda x: x[2], stack)
        found.extend([stack["w"], alone["w"], layer["w"]])
        found.append(jda.gather_params(shards, tx))
        found.append(jda.gather_params(layer, tx))
        return jnp.zeros(())

    specs = opt.param_specs(params)
    run = jax.shard_map(
        look, mesh=tx.config.mesh, in_specs=(specs,), out_specs=jax.P(), check_vma=False
    )
    jax.eval_shape(run, jax.device_put(params, opt.param_shardings(params)))
    stack, alone, layer, gathered, gathered_layer = found
    assert jax.tree.structure(layer) == jax.tree.structure(alone) == jax.tree.structure(stack)
    assert (alone.dim, alone.ndim, alone.dtype) == (-2, 2, jnp.float32)
    assert stack.shape == (6, 8, 256) and layer.shape == (8, 256) == alone.shape
    assert stack.is_stack and not layer.is_stack
    assert isinstance(gathered["layers"]["w"], Shard)  # a stack: layer by layer
    assert gathered["alone"]["w"].shape == gathered_layer["w"].shape == (64, 256)


@few(1)
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_flax_models_that_gather_layers_in_the_loss_give_the_same_bits(kind):
    """A model of two dense layers, whose params the loss gathers one layer after the other."""
    rng = np.random.default_rng(2)
    x = rng.integers(-9, 10, (ROWS, WIDTH)).astype(np.float32)
    if kind == "linen":
        dense = nn.Dense(WIDTH)
        init = lambda i: dense.init(jax.random.key(i), x)["params"]  # noqa: E731
        apply = lambda p, x: dense.apply({"params": p}, x)  # noqa: E731
    else:
        module = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        graph, params = nnx.split(module, nnx.Param)
        init = lambda i: jax.tree.map(lambda leaf: leaf * (1 + i), params)  # noqa: E731
        apply = lambda p, x: nnx.merge(graph, p)(x)  # noqa: E731
    params = {"first": init(0), "second": init(1)}

    def loss_of(tx):
        def loss(params, x):
            shards = {k: jda.gather_params(p, tx) for k, p in params.items()}
            return jnp.sum(apply(shards["first"], x)) + jnp.sum(apply(shards["second"], 2 * x))

        return loss

    ends = [stepped(tx, loss_of(tx), params, x) for tx in (make_tx(), make_tx("optim"))]
    assert_trees_same_bits(*ends, kind)


def test_a_program_with_shards_in_it_is_exported():
    """Its arguments are plain arrays."""
    params, batch = products(2), make_batch(2)
    tx = make_tx()
    step = own_step(tx, layer_by_layer(tx), params)
    state = jda.TrainState.create(params, tx)
    arguments = state.params, state.opt_state, jda.shard_batch(batch, tx)
    exported = jax.export.export(step, disabled_checks=jda.export_checks())(*arguments)
    assert_trees_same_bits(exported.call(*arguments), step(*arguments), "exported")


def test_raw_orbax_sees_plain_arrays(tmp_path):
    import orbax.checkpoint as ocp

    params, batch = products(2), make_batch(2)
    tx = make_tx()
    loss = layer_by_layer(tx)
    state = jda.TrainState.create(params, tx)
    state, _ = jda.train_step(lambda p, x: loss(p, x), tx)(state, batch)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state.params)
        checkpointer.wait_until_finished()
        found = checkpointer.restore(tmp_path / "state", state.params)
    assert all(type(x) is type(jnp.zeros(())) for x in jax.tree.leaves(found))
    assert_trees_same_bits(found, state.params, "orbax")


def test_a_gradient_of_a_shards_shape_that_is_no_shard_raises():
    """That a gradient is a sum is told by its type."""
    params = products(1)
    tx = make_tx()
    opt = tx.bind(params)
    step = jax.shard_map(
        lambda p, s: opt.step(p, s, p),
        mesh=tx.config.mesh,
        in_specs=(opt.param_specs(params), opt.state_specs()),
        out_specs=(opt.param_specs(params), opt.state_specs()),
        check_vma=False,
    )
    state = jda.TrainState.create(params, tx)
    with pytest.raises(jda.ShapeError, match=r"grads\[0\]\['w'\]: shape differs from params"):
        jax.eval_shape(step, state.params, state.opt_state)


@pytest.mark.parametrize(
    "use", [jnp.sin, lambda x: 2 * x, lambda x: x @ jnp.ones((256, 2)), lambda x: x[0], lambda x: jnp.ones((2, 8)) @ x, lambda x: -x]
)  # fmt: skip
def test_arithmetic_on_a_shard_raises(use):
    shard = Shard(jnp.ones((8, 256)), -2, 2, jnp.dtype("float32"), jax.P())
    with pytest.raises(
        TypeError, match=r"a shard of a parameter, float32\[8, 256\].*gather it first"
    ):
        use(shard)


@few(1)
@pytest.mark.parametrize("check_vma", [False, True])
def test_shards_are_the_carry_of_a_scan_over_steps(check_vma):
    params, batch, tx = products(2), make_batch(2), make_tx()
    opt, loss = tx.bind(params), layer_by_layer(tx)

    def steps(params, state, batch, *, scans):
        def step(carry, _):
            form, state = carry
            grads = jax.grad(lambda p: loss(p, batch))(form)
            return opt.step(grads, state, form), None

        carry = jda.local_params(params, opt), state
        if scans:
            carry, _ = jax.lax.scan(step, carry, length=3)
        else:
            for _ in range(3):
                carry, _ = step(carry, None)
        return jda.stored_params(carry[0], opt), carry[1]

    state = jda.TrainState.create(params, tx)
    ends = []
    for scans in (True, False):
        run = jit_over_mesh(functools.partial(steps, scans=scans), tx, params, check_vma)
        ends.append(run(state.params, state.opt_state, jda.shard_batch(batch, tx)))
    assert_trees_same_bits(*ends, "three steps")


def test_methods_of_arrays_raise_too():
    shard = Shard(jnp.ones((8, 256)), -2, 2, jnp.dtype("float32"), jax.P())
    with pytest.raises(AttributeError, match=r"'Shard' has no attribute 'sum'.*gather it first"):
        shard.sum()
