"""fused_adamw on arrays that are not row-major: the same bits, and nothing moved."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from jdistadam.core.formats import with_order
from support.bits import assert_trees_same_bits
from support.convolutions import OHWI, ORDERS, SHAPES, in_order, loss, moved, numbers, orders_in
from support.samples import often

pytestmark = pytest.mark.slow

HYPER = dict(b1=0.87, b2=0.9973, eps=1e-7, weight_decay=0.13)
SMALL = {"k": (3, 2, 8, 16), "w": (8, 24), "b": (5,)}
ORDER = {"k": OHWI, "w": (1, 0), "b": None}


def row_major(tree):
    return jax.tree.map(lambda x: tuple(range(x.ndim)), tree)


@pytest.mark.parametrize("formats", [None, ORDERS], ids=["row-major", "formats"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@often(lambda dtype, formats: dtype == "bfloat16")
def test_a_convolutional_net_moves_no_kernel(h200s, formats, dtype):
    """Row-major, the gradient of each of three kernels is transposed, by two kernels of XLA."""
    mesh = h200s(1)
    place = NamedSharding(mesh, P())
    tx = jda.fused_adamw(1e-3, formats=formats)

    def shape(path, x):
        order = (formats or {}).get(getattr(path[-1], "key", None))
        order = order if order and len(order) == len(x.shape) else None
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=with_order(place, order))

    params = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in SHAPES.items()}
    state = jax.eval_shape(tx.init, params)
    params, state = jax.tree_util.tree_map_with_path(shape, (params, state))
    x = jax.ShapeDtypeStruct((8, 64, 64, 3), dtype, sharding=place)

    def step(params, state, x):
        return tx.step(jax.grad(loss)(params, x), state, params)

    placed = jda.formats_of((params, state))
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=placed)
    compiled = jitted.lower(params, state, x).compile()
    assert len(moved(compiled.as_text())) == (0 if formats else 6)
    num_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((params, state)))
    assert compiled.memory_analysis().alias_size_in_bytes == num_bytes


def test_the_compiler_says_which_formats(h200s):
    mesh = h200s(1)
    place = NamedSharding(mesh, P())
    params = {k: jax.ShapeDtypeStruct(s, jnp.float32, sharding=place) for k, s in SHAPES.items()}
    x = jax.ShapeDtypeStruct((8, 64, 64, 3), jnp.bfloat16, sharding=place)
    with_state = lambda params, x, rng: ((loss(params, x), rng), {"state": x})  # noqa: E731
    for found in (
        jda.preferred_formats(loss, params, x),
        jda.preferred_formats(with_state, params, x, rng=jax.random.key(0)),
    ):
        orders = {k: f.layout.major_to_minor for k, f in found.items()}
        assert orders == {k: ORDERS[k] or tuple(range(len(SHAPES[k]))) for k in SHAPES}
        assert all(f.sharding == place and not f.layout.tiling for f in found.values())


def test_parameters_that_a_loss_does_not_use():
    params = {"used": jnp.ones((2, 3)), "unused": jnp.ones((4, 5, 6)), "scalar": jnp.ones(())}
    loss = lambda params, x: jnp.sum(params["used"] * x) + params["scalar"]  # noqa: E731
    found = jda.preferred_formats(loss, params, jnp.ones((2, 3)), num_shards=8)
    orders = {k: f.layout.major_to_minor for k, f in found.items()}
    assert orders == {"used": (0, 1), "unused": (0, 1, 2), "scalar": ()}


@pytest.mark.slow
@pytest.mark.parametrize(("num_shards", "out"), [(1, (0, 1, 2)), (8, (2, 0, 1))])
def test_what_is_cut_begins_with_a_dimension_that_divides(h200s, num_shards, out):
    """12 heads do not divide by 8; the gradient of the output kernel begins with the width."""
    place = NamedSharding(h200s(1), P())
    shapes = {"qkv": (768, 12, 64), "out": (12, 64, 768)}
    params = {k: jax.ShapeDtypeStruct(s, jnp.float32, sharding=place) for k, s in shapes.items()}
    x = jax.ShapeDtypeStruct((7, 128, 768), jnp.float32, sharding=place)

    def loss(params, x):
        y = jnp.tanh(jnp.einsum("btd,dhk->bthk", x, params["qkv"]))
        return jnp.mean(jnp.square(jnp.einsum("bthk,hkd->btd", y, params["out"])))

    found = jda.preferred_formats(loss, params, x, num_shards=num_shards)
    orders = {k: f.layout.major_to_minor for k, f in found.items()}
    assert orders == {"qkv": (0, 1, 2), "out": out}


KINDS = {
    "float32": (jnp.float32, None),
    "bfloat16": (jnp.bfloat16, None),
    "float32 main": (jnp.bfloat16, "float32"),
    "remainder16": (jnp.bfloat16, "remainder16"),
}


@pytest.mark.parametrize("mode", ["step", "update"])
@pytest.mark.parametrize("kind", KINDS)
@often(lambda kind, mode: (kind, mode) in {("float32", "step"), ("remainder16", "update")})
def test_same_bits_and_same_formats(platform, kind, mode):
    dtype, main = KINDS[kind]
    plain = jda.fused_adamw(3e-3, main_params_dtype=main, **HYPER)
    tx = jda.fused_adamw(3e-3, main_params_dtype=main, formats=ORDER, **HYPER)
    params = numbers(SMALL, 0, dtype)
    laid = in_order(params, ORDER)
    expected, state = plain.init(params), tx.init(laid)
    assert orders_in(laid)["k"] == OHWI
    adam = state.inner[0] if main else state[0]
    assert orders_in(adam.mu) == orders_in(adam.nu) == orders_in(laid)
    step = jax.jit(getattr(tx, mode), out_shardings=jda.formats_of((laid, state)))
    for i in range(1, 4):
        grads = numbers(SMALL, i, dtype)
        theirs, expected = getattr(plain, mode)(grads, expected, params)
        ours, state = step(in_order(grads, ORDER), state, laid)
        assert_trees_same_bits((ours, state), (theirs, expected))
        assert orders_in(ours) == orders_in(laid)
        if mode == "step":
            params, laid = theirs, ours
    assert orders_in(state) == orders_in(tx.init(laid))


@pytest.mark.parametrize("donor", ["laid out", "row-major"])
def test_wrong_formats_cost_speed_alone(donor):
    """Arrays of another order than formats says are transposed, whichever of the two is right."""
    plain = jda.fused_adamw(3e-3, **HYPER)
    tx = jda.fused_adamw(3e-3, formats=ORDER if donor == "row-major" else None, **HYPER)
    params, grads = numbers(SMALL, 0), numbers(SMALL, 1)
    given = in_order(params, {"k": (1, 3, 2, 0), "w": (1, 0)} if donor == "laid out" else {})
    got = jax.jit(tx.step)(grads, plain.init(params), given)
    assert_trees_same_bits(got, jax.jit(plain.step)(grads, plain.init(params), params))


def test_an_eager_step_keeps_formats():
    tx = jda.fused_adamw(3e-3, main_params_dtype="float32", formats=ORDER, **HYPER)
    params = in_order(numbers(SMALL, 0, jnp.bfloat16), ORDER)
    grads = numbers(SMALL, 1, jnp.bfloat16)
    state = tx.init(params)
    new, new_state = tx.step(grads, state, params)
    assert orders_in((new, new_state)) == orders_in((params, state))
    assert orders_in(new_state.main_params)["k"] == OHWI


def test_jit_step_keeps_formats_and_updates_in_place():
    tx = jda.fused_adamw(3e-3, formats=ORDER, **HYPER)
    plain = jda.fused_adamw(3e-3, **HYPER)
    params = in_order(numbers(SMALL, 0), ORDER)
    expected = numbers(SMALL, 0), plain.init(numbers(SMALL, 0))
    state, step, step_plain = tx.init(params), jda.jit_step(tx), jda.jit_step(plain)
    for i in range(1, 4):
        before, orders = params["k"].unsafe_buffer_pointer(), orders_in((params, state))
        params, state = step(in_order(numbers(SMALL, i), ORDER), state, params)
        expected = step_plain(numbers(SMALL, i), expected[1], expected[0])
        assert_trees_same_bits((params, state), expected)
        assert orders_in((params, state)) == orders and orders[0]["k"] == OHWI
        assert params["k"].unsafe_buffer_pointer() == before
    fused = jda.fused_adamw(1e-3, formats=lambda p: jax.tree.map(lambda x: (1, 0), p))
    step = jda.jit_step(fused)
    for name in ("w", "x"):  # another tree needs another program
        params, grads = ({name: laid(i)} for i in range(2))
        new, _ = step(grads, fused.init(params), params)
        assert orders_in(new) == {name: (1, 0)}


def laid(seed):
    return in_order(numbers({"w": (3, 4)}, seed), ORDER)["w"]


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [P("data"), P(None, "data")], ids=str)
def test_sharded_arrays(spec, axis_type):
    """Each device's part is laid out so; nothing is gathered."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    place = NamedSharding(mesh, spec)
    params = {"w": jax.device_put(numbers({"w": (16, 24)}, 0)["w"], place)}
    grads = {"w": jax.device_put(numbers({"w": (16, 24)}, 1)["w"], place)}
    plain, tx = (jda.fused_adamw(3e-3, formats=f, **HYPER) for f in (None, (1, 0)))
    laid = {"w": jax.device_put(params["w"], Format(Layout((1, 0)), place))}
    state = tx.init(laid)
    assert orders_in(state[0].mu) == {"w": (1, 0)}
    expected = jax.jit(plain.step)(grads, plain.init(params), params)
    step = jda.jit_step(tx)
    text = step.lower(grads, state, laid).compile().as_text()
    assert "all-gather" not in text and "all-to-all" not in text
    got = step(grads, state, laid)
    assert_trees_same_bits(got, expected)
    assert orders_in(got[0]) == {"w": (1, 0)} and got[0]["w"].sharding.is_equivalent_to(place, 2)


def test_members_of_an_ensemble():
    """vmap puts a dimension in front, which stays the slowest."""
    shapes = {k: (3, *s) for k, s in SMALL.items()}
    params, grads = numbers(shapes, 0), numbers(shapes, 1)
    rates = jnp.array([1e-3, 3e-3, 1e-2])

    def stepped(formats):
        def one(rate, params, grads):
            tx = jda.fused_adamw(rate, formats=formats, **HYPER)
            return tx.step(grads, tx.init(params), params)

        return jax.jit(jax.vmap(one))(rates, params, grads)

    assert_trees_same_bits(stepped(ORDER), stepped(None))


def test_formats_by_prefix_function_and_in_chains():
    params, grads = numbers(SMALL, 0), numbers(SMALL, 1)
    by_rank = lambda p: jax.tree.map(lambda x: OHWI if x.ndim == 4 else None, p)  # noqa: E731
    format = Format(Layout((1, 0)), params["w"].sharding)
    both = {"a": params, "c": {"w": params["w"], "v": params["w"]}}
    for formats in (by_rank, {"a": by_rank(params), "c": format}, {"a": None, "c": Layout((1, 0))}):
        tx = jda.chain(jda.fused_adamw(3e-3, formats=formats, **HYPER))
        tx = jda.inject_hyperparams(lambda learning_rate, tx=tx: tx)(learning_rate=1e-3)
        state = tx.init(both)
        text = jax.jit(tx.step).lower(both, state, both).as_text()
        assert "operand_layouts" in text
    injected = jda.inject_hyperparams(jda.fused_adamw)(3e-3, formats=by_rank, **HYPER)
    plain = jda.inject_hyperparams(jda.fused_adamw)(3e-3, **HYPER)
    got = injected.step(grads, injected.init(params), params)
    assert_trees_same_bits(got, plain.step(grads, plain.init(params), params))
    assert orders_in(got[0])["k"] == OHWI


@pytest.mark.parametrize(
    "formats, error, message",
    [
        ({"k": (0, 1), "w": None, "b": None}, jda.ShapeError, r"formats\['k'\]: not an order .*got \(0, 1\), expected each of 0 to 3 once"),
        ({"k": (0, 1, 2, 2), "w": None, "b": None}, jda.ShapeError, r"formats\['k'\]: not an order"),
        ({"k": Layout((3, 0, 1, 2), ((8, 128),)), "w": None, "b": None}, jda.ShapeError, r"formats\['k'\]: a layout with tiles.*Pass \(3, 0, 1, 2\)"),
        ({"k": None, "w": None}, jda.TreeError, "formats: structure differs from params"),
        ({"k": "OHWI", "w": None, "b": None}, jda.DtypeError, r"formats\['k'\]: not a Format: got 'OHWI'"),
        ({"k": Format(Layout.AUTO), "w": None, "b": None}, jda.DtypeError, r"formats\['k'\]: leaves the layout open"),
    ],
    ids=["rank", "twice", "tiles", "tree", "kind", "auto"],
)  # fmt: skip
def test_formats_that_do_not_fit(formats, error, message):
    tx = jda.fused_adamw(1e-3, formats=formats)
    params = {k: np.zeros(s, np.float32) for k, s in SMALL.items()}
    with pytest.raises(error, match=message):
        tx.init(params)
    state = jda.fused_adamw(1e-3).init(params)
    with pytest.raises(error, match=message):
        jax.jit(tx.step)(params, state, params)


def test_row_major_formats_change_no_program():
    params = numbers(SMALL, 0)
    texts = []
    for formats in (None, row_major(params), {"k": None, "w": None, "b": None}):
        tx = jda.fused_adamw(1e-3, formats=formats)
        texts.append(jax.jit(tx.step).lower(params, tx.init(params), params).as_text())
    assert texts[0] == texts[1] == texts[2]
