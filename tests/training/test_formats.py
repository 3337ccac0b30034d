"""Training steps whose parameters, and the flat state, are not row-major: nothing else changes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from jdistadam.core.formats import order_of
from support.bits import assert_trees_same_bits
from support.convolutions import OHWI, ORDERS, SHAPES, loss, moved, numbers, orders_in
from support.exact_sums import HYPER, linear_loss
from support.model_axes import mesh_of
from support.scanned import is_stacked, make_params, scanned_products

pytestmark = pytest.mark.slow

# Scattered: k (along its last dimension, as stored its first) and w. The others are packed.
SMALL = {"k": (3, 3, 16, 128), "w": (128, 256), "s": (8, 24), "odd": (3, 5, 7), "b": (5,)}
ORDER = {"k": OHWI, "w": (1, 0), "s": (1, 0), "odd": (2, 0, 1), "b": None}
POLICIES = {
    "float32": {},
    "sent in bfloat16": dict(
        grad_comm_dtype="bfloat16", param_comm_dtype="bfloat16", grad_reduce_dtype="float32"
    ),
    "remainder16": dict(main_params_dtype="remainder16", grad_reduce_dtype="float32"),
}
STRATEGIES = {
    "no_shard": dict(sharding_strategy="no_shard"),
    "optim": dict(sharding_strategy="optim"),
    "optim_grads": dict(sharding_strategy="optim_grads"),
    "optim_grads_params": dict(sharding_strategy="optim_grads_params"),
    "at rest": dict(params_at_rest="shard"),
    "peer": dict(communication="peer"),
}
SPECS = {"k": P(None, None, None, "model"), "w": P("model"), "s": P(None, "model"), "odd": P()}
SPECS["b"] = None


def batch(seed, rows=8):
    """Small integers: every sum over rows and devices is exact."""
    rng = np.random.default_rng(seed)
    return {k: rng.integers(-64, 65, (rows, *s)).astype(np.float32) for k, s in SMALL.items()}


def make_tx(formats, *, mesh=None, policy="float32", **kwargs):
    policy = jda.MixedPrecisionPolicy(**POLICIES[policy])
    if kwargs.get("communication") == "peer":
        policy = dataclasses.replace(policy, grad_reduce_dtype="float32")
    mesh = jax.make_mesh((8,), ("data",)) if mesh is None else mesh
    return jda.distributed_fused_adamw(**HYPER, mesh=mesh, policy=policy, formats=formats, **kwargs)


def train(tx, *, dtype=jnp.float32, steps=3, accumulate=1):
    state = jda.TrainState.create(numbers(SMALL, 0), tx, param_dtypes=dtype)
    step = jda.train_step(linear_loss, tx, accumulate_steps=accumulate)
    for i in range(steps):
        state, _ = step(state, batch(i, rows=16))
    return state


def assert_same(tx, state, plain, expected):
    """The same values, in the orders that were asked for, and the same exported state."""
    assert {k: order_of(x) for k, x in state.params.items()} == ORDER
    assert_trees_same_bits(jda.full_params(state, tx), jda.full_params(expected, plain))
    ours, theirs = jda.to_optax_state(state, tx), jda.to_optax_state(expected, plain)
    assert_trees_same_bits(ours[:2], theirs[:2])


WITHOUT = {
    ("no_shard", "sent in bfloat16"),
    *(("peer", p) for p in list(POLICIES)[1:]),
}  # these raise
CASES = [(s, p) for s in STRATEGIES for p in POLICIES if (s, p) not in WITHOUT]


@pytest.mark.parametrize(("strategy", "policy"), CASES)
def test_same_bits(strategy, policy):
    kwargs = STRATEGIES[strategy] | dict(policy=policy)
    dtype = jnp.bfloat16 if policy == "remainder16" else jnp.float32
    accumulate = 2 if "grads" in strategy else 1
    tx, plain = make_tx(ORDER, **kwargs), make_tx(None, **kwargs)
    state = train(tx, dtype=dtype, accumulate=accumulate)
    assert_same(tx, state, plain, train(plain, dtype=dtype, accumulate=accumulate))


@pytest.mark.parametrize("kind", ["explicit", "auto"])
@pytest.mark.parametrize("strategy", list(STRATEGIES)[1:5])
def test_model_axes(strategy, kind):
    """The parts along a tensor axis are in that order, too; w is cut by both axes."""
    kwargs = STRATEGIES[strategy] | dict(mesh=mesh_of("4x2", kind), param_specs=SPECS)
    tx, plain = make_tx(ORDER, **kwargs), make_tx(None, **kwargs)
    accumulate = 2 if "grads" in strategy else 1
    state, expected = train(tx, accumulate=accumulate), train(plain, accumulate=accumulate)
    assert_same(tx, state, plain, expected)


def test_scanned_layers():
    """Each layer is gathered in its order; layers themselves stay the slowest dimension."""
    down = (0, 2, 1)
    formats = {"embed": None, "head": (1, 0), "layers": None}
    formats["layers"] = {"mlp": {"up": None, "down": down}, "scale": None, "odd": None}
    kwargs = dict(sharding_strategy="optim_grads_params", stacked=is_stacked)
    found = []
    for given in (formats, None):
        policy = "float32"
        tx = make_tx(given, policy=policy, **kwargs)
        state = jda.TrainState.create(make_params(), tx)
        step = jda.train_step(
            scanned_products(lambda layer, tx=tx: jda.gather_params(layer, tx)), tx
        )
        for i in range(2):
            rng = np.random.default_rng(i)
            rows = jax.tree.map(
                lambda x: rng.integers(-9, 9, (8, *x.shape)).astype(np.float32), make_params()  # noqa: B023
            )  # fmt: skip
            state, _ = step(state, rows)
        if given:
            assert order_of(state.params["layers"]["mlp"]["down"]) == down
            bucket = next(b for b in tx.layout(make_params()).buckets if b.num_layers and b.orders)
            assert bucket.orders == (down,) and bucket.shard_shape[0] == 6
        found.append((jda.full_params(state, tx), jda.to_optax_state(state, tx)[:2]))
    assert_trees_same_bits(*found)
    formats["layers"]["mlp"]["down"] = (2, 0, 1)
    tx = make_tx(formats, **kwargs)
    with pytest.raises(jda.ShapeError, match=r"formats\['layers'\]\['mlp'\]\['down'\]: the layers .*Pass \(0, 2, 1\)"):  # fmt: skip
        tx.param_specs(make_params())


def test_a_shard_map_of_ones_own():
    """Params and gradients have the shapes of the model; where they are in memory is up to jit."""
    results = []
    for formats in (ORDER, None):
        tx = make_tx(formats, sharding_strategy="optim_grads_params")
        params = jax.device_put(numbers(SMALL, 0), tx.param_formats(numbers(SMALL, 0)))
        state = tx.init(params)

        def local(params, state, rows, tx=tx):
            whole = lambda p: linear_loss(jda.gather_params(p, tx), rows)  # noqa: E731
            grads = jax.grad(whole)(jda.local_params(params, tx))
            return tx.step(grads, state, params)

        specs = tx.param_specs(params), tx.state_specs()
        run = jax.shard_map(local, mesh=tx.config.mesh, in_specs=(*specs, P("data")), out_specs=specs)  # fmt: skip
        placed = tx.param_formats(params), None
        jitted = jax.jit(run, donate_argnums=(0, 1), out_shardings=placed if formats else None)
        rows = jax.device_put(batch(1), NamedSharding(tx.config.mesh, P("data")))
        params, state = jitted(params, state, rows)
        assert (order_of(params["k"]) == OHWI) == bool(formats)
        results.append(jax.device_get(params))
    assert_trees_same_bits(*results)


def test_the_order_is_a_part_of_the_layout_and_not_of_what_is_exported(tmp_path):
    tx, plain = make_tx(ORDER), make_tx(None)
    state = train(tx, steps=1)
    with pytest.raises(
        jda.LayoutError, match=r"leaf \['k'\]: order \[3, 0, 1, \.\.\.\] instead of none"
    ):
        plain.check_state(state.opt_state, state.params)
    exported = jda.to_optax_state(state, tx)
    back = jda.from_optax_state(*exported[:2], tx, exported[2])
    assert_trees_same_bits(back, state)
    assert orders_in(back.params) == orders_in(state.params)
    jda.save(tmp_path, state, tx)
    target = make_tx(ORDER, mesh=jax.make_mesh((4,), ("data",), devices=jax.devices()[:4]), params_at_rest="shard")  # fmt: skip
    shapes = jax.eval_shape(lambda: numbers(SMALL, 0))
    expected = {k: order_of(x) for k, x in jda.TrainState.shapes(shapes, tx).params.items()}
    assert expected == ORDER
    for other in (plain, target):
        found = jda.restore(tmp_path, jda.TrainState.shapes(shapes, other), other)
        assert_trees_same_bits(jda.to_optax_state(found, other)[:2], exported[:2])
        order = {k: order_of(x) for k, x in found.params.items()}
        assert order == (dict.fromkeys(ORDER) if other is plain else ORDER)
        step = jda.train_step(linear_loss, other)
        new, _ = step(step(found, batch(5))[0], batch(6))
        assert {k: order_of(x) for k, x in new.params.items()} == order
        if other is not plain:
            (program,) = step._programs.values()
            assert program._cache_size() == 1  # what was restored is in that order already


def test_states_made_in_other_ways():
    """A tree map, other params and reloaded ones are brought to the order, and stay in it."""
    tx = make_tx(ORDER)
    step = jda.train_step(linear_loss, tx)
    state = train(tx, steps=1)
    mapped = jax.tree.map(lambda x: jax.device_put(np.asarray(x), x.sharding), state)
    assert order_of(mapped.params["k"]) is None
    (expected, _), (got, _) = step(state, batch(3)), step(mapped, batch(3))
    assert_trees_same_bits(got, expected)
    assert {k: order_of(x) for k, x in got.params.items()} == ORDER
    (program,) = step._programs.values()
    assert program._cache_size() == 1  # for both
    new = got.replace(params=numbers(SMALL, 7), tx=tx)
    assert {k: order_of(x) for k, x in new.params.items()} == ORDER
    plain = make_tx(None)
    same, _ = jda.train_step(linear_loss, plain)(train(plain, steps=1), batch(3))
    same = same.replace(params=numbers(SMALL, 7), tx=plain)
    rows = jax.tree.map(lambda a, b: np.stack([a, b]), batch(4), batch(5))
    last, _ = jax.jit(lambda state, rows: jax.lax.scan(step, state, rows))(new, rows)
    for i in (4, 5):
        same, _ = jda.train_step(linear_loss, plain)(same, batch(i))
    assert_trees_same_bits(jda.to_optax_state(last, tx)[:2], jda.to_optax_state(same, plain)[:2])


@pytest.mark.parametrize("n", [1, 8])
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_a_convolutional_net_moves_no_kernel(h200s, n, strategy):
    counts = []
    for formats in (None, ORDERS):
        mesh = h200s(n)
        tx = jda.distributed_fused_adamw(1e-3, mesh=mesh, formats=formats, sharding_strategy=strategy)  # fmt: skip
        params = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in SHAPES.items()}
        state = jda.TrainState.shapes(params, tx)
        x = jax.ShapeDtypeStruct((8 * n, 64, 64, 3), jnp.bfloat16, sharding=NamedSharding(mesh, P("data")))  # fmt: skip
        compiled = jda.train_step(loss, tx).lower(state, x, is_verified=True).compile()
        counts.append(len(moved(compiled.as_text())))
    assert counts[0] >= 6 and counts[1] == 0


@pytest.mark.gpu
def test_same_bits_on_a_gpu():
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices("gpu")[:1])
    tx, plain = make_tx(ORDER, mesh=mesh), make_tx(None, mesh=mesh)
    assert_same(tx, train(tx), plain, train(plain))
