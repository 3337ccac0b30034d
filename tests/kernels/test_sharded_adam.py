"""Under plain jit: where results are, what is sent there, and that no bit depends on it."""

import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from jdistadam.tools import hlo
from support.bits import assert_same_bits
from support.h200 import SIZES
from support.samples import few, often
from support.steps import WAYS, by_update

HYPER = dict(learning_rate=3e-3, b1=0.87, b2=0.9973, weight_decay=0.13)
SPECS = {"none": P(), "rows": P("data"), "columns": P(None, "data"), "model": P("model")}
# params, moments, gradients
MATRIX = {"_".join(names): names for names in itertools.product(SPECS, repeat=3)}
# Every two of the three, in every placement, together.
PAIRS = [
    name
    for name, x in MATRIX.items()
    if sum(map(list(SPECS).index, x[:2])) % 4 == list(SPECS).index(x[2])
]
SHAPE = (16, 8)
MAINS = [None, jnp.float32, "remainder16"]
AXIS_TYPES = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)


def is_explicit(axis_type):
    return axis_type == AxisType.Explicit


def cpu_mesh_of(axis_type):
    return jax.make_mesh(
        (4, 2), ("data", "model"), (axis_type,) * 2, devices=jax.devices("cpu")[:8]
    )


def random_leaves(names, dtype, seed):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=SHAPE).astype(dtype) for name in names}


def placed(mesh, tree, index):
    """Each leaf where its name says that params (0), moments (1) or gradients (2) are."""

    def place(path, x):
        names = [str(getattr(part, "key", "")) for part in path]
        spec = next(SPECS[MATRIX[name][index]] for name in names if name in MATRIX)
        return jax.device_put(x, NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(place, tree)


def placed_state(mesh, state):
    """Moments, float32 main parameters and remainders are all where moments are."""
    leaves, treedef = jax.tree.flatten(state)
    arrays = placed(mesh, jax.tree.map(lambda x: x if x.shape else None, state), 1)
    arrays = iter(jax.tree.leaves(arrays))
    replicated = NamedSharding(mesh, P())
    return treedef.unflatten(
        next(arrays) if x.shape else jax.device_put(x, replicated) for x in leaves
    )


def assert_same(got, want, where):
    """The same bits, and each array of ``got`` where the one in ``where`` is."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, x), y, z in zip(
        jax.tree_util.tree_leaves_with_path(got),
        *map(jax.tree.leaves, (want, where)),
        strict=True,
    ):
        name = jax.tree_util.keystr(path)
        if x.shape:
            assert_same_bits(x, y, name)
            assert x.sharding.is_equivalent_to(z.sharding, x.ndim), (name, x.sharding)
        else:
            assert x == y, name


def setup(axis_type, main, names=PAIRS, mesh=None):
    """Returns (tx, what one device would get, the same in placement): params, state, grads."""
    mesh = mesh or cpu_mesh_of(axis_type)
    tx = jda.fused_adamw(**HYPER, main_params_dtype=main)
    dtype = jnp.bfloat16 if main else jnp.float32
    params, grads = (
        jax.tree.map(jnp.asarray, random_leaves(names, dtype, seed)) for seed in (0, 1)
    )
    state = tx.init(params)
    _, state = tx.step(grads, state, params)  # moments that are not all zero
    here = (params, state, grads)
    there = (placed(mesh, params, 0), placed_state(mesh, state), placed(mesh, grads, 2))
    return tx, here, there


@few(1)
@AXIS_TYPES
@pytest.mark.parametrize("main", MAINS, ids=str)
@pytest.mark.parametrize("method", ["step", "update"])
@pytest.mark.parametrize("names", [PAIRS, MATRIX], ids=len)
@often(
    lambda method, main, axis_type, names: (
        (method == "step") == (main != "remainder16")
        and is_explicit(axis_type) == (main is not None)
        and names is PAIRS
    )
)
def test_results_keep_the_sharding_of_the_arrays_they_replace(method, main, axis_type, names):
    """All combinations at once; updates are where the params are to which they are added."""
    tx, (params, state, grads), there = setup(axis_type, main, names)
    want, want_state = getattr(tx, method)(grads, state, params)
    placed_params, placed_state, placed_grads = there
    got, got_state = jax.jit(getattr(tx, method))(placed_grads, placed_state, placed_params)
    assert_same(got, want, placed_params)
    assert_same(got_state, want_state, placed_state)


@pytest.mark.multigpu
@AXIS_TYPES
@pytest.mark.parametrize("main", MAINS, ids=str)
@pytest.mark.parametrize("method", ["step", "update"])
def test_results_on_gpus_keep_the_sharding_of_the_arrays_they_replace(method, main, axis_type):
    """On as many GPUs as there are, from two: the bits of one of them, in every placement."""
    gpus = jax.devices("gpu")
    n = max(n for n in (2, 4, 8) if n <= len(gpus))
    types = (axis_type,) * 2
    mesh = jax.make_mesh((n // 2, 2), ("data", "model"), types, devices=gpus[:n])
    tx, (params, state, grads), there = setup(axis_type, main, MATRIX, mesh)
    want, want_state = getattr(tx, method)(grads, state, params)
    placed_params, placed_state, placed_grads = there
    got, got_state = jax.jit(getattr(tx, method))(placed_grads, placed_state, placed_params)
    assert_same(got, want, placed_params)
    assert_same(got_state, want_state, placed_state)


@few(1)
@AXIS_TYPES
@pytest.mark.parametrize("method", ["step", "update"])
@often(lambda method, axis_type: (method == "step") == is_explicit(axis_type))
def test_a_loop_carries_params_and_state_in_their_placement(method, axis_type):
    """A carry has no sharding of its own: the gradients of the body must not draw it to theirs."""

    def steps(params, state, grads):
        def body(carry, _):
            params, state = carry
            return WAYS[method](tx, grads, state, params), None

        return jax.lax.scan(body, (params, state), length=2)[0]

    tx, here, there = setup(axis_type, None)
    got, got_state = jax.jit(steps)(*there)
    want, want_state = jax.jit(steps)(*here)
    assert_same(got, want, there[0])
    assert_same(got_state, want_state, there[1])


@AXIS_TYPES
@often(is_explicit)
def test_flax_train_state_keeps_its_placement(axis_type):
    tx, here, there = setup(axis_type, None)

    def stepped(params, opt_state, grads):
        state = train_state.TrainState(jnp.int32(0), None, params, tx, opt_state)
        state = jax.jit(lambda s, g: s.apply_gradients(grads=g))(state, grads)
        return state.params, state.opt_state

    got, got_state = stepped(*there)
    want, want_state = stepped(*here)
    assert_same(got, want, there[0])
    assert_same(got_state, want_state, there[1])


@AXIS_TYPES
@often(is_explicit)
def test_nnx_optimizer_keeps_its_placement(axis_type):
    names = PAIRS
    tx, here, there = setup(axis_type, None)

    class Model(nnx.Module):
        def __init__(self, params):
            for name, x in params.items():
                setattr(self, name, nnx.Param(x))

    def stepped(params, opt_state, grads):
        model = Model(params)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        fill(optimizer, opt_state)
        gradients = nnx.state(Model(grads), nnx.Param)
        nnx.jit(lambda model, optimizer, g: optimizer.update(model, g))(model, optimizer, gradients)
        return pure(model), [
            pure_tree(optimizer.opt_state[0].mu),
            pure_tree(optimizer.opt_state[0].nu),
        ]

    def pure(model):
        return {name: getattr(model, name)[...] for name in names}

    def pure_tree(tree):
        return {name: tree[name][...] for name in names}

    def fill(optimizer, opt_state):
        for kind in ("mu", "nu"):
            variables, values = (getattr(x[0], kind) for x in (optimizer.opt_state, opt_state))
            for name in names:
                variables[name].set_value(values[name])

    got, moments = stepped(*there)
    want, want_moments = stepped(*here)
    assert_same(got, want, there[0])
    assert_same(moments, want_moments, [there[1][0].mu, there[1][0].nu])


@pytest.mark.slow
def test_moves_between_all_kinds_of_shardings_change_no_bit():
    """Also axes that cut one dimension together, and that change places."""
    specs = [
        P(("data", "model")), P("model", "data"), P("data", "model"), P(None, ("model", "data")),
        P(None, None, "model"), P("data", None, "model"), P(("model", "data")), P(),
    ]  # fmt: skip
    mesh = cpu_mesh_of(AxisType.Auto)
    tx = jda.fused_adamw(**HYPER)
    rng = np.random.default_rng(3)
    pairs = {f"{i}_{j}": (specs[i], specs[j]) for i in range(8) for j in range(8)}
    params, grads = (
        {k: jnp.asarray(rng.normal(size=(8, 16, 4)), jnp.float32) for k in pairs} for _ in range(2)
    )
    place = lambda tree, i: {k: jax.device_put(x, NamedSharding(mesh, pairs[k][i])) for k, x in tree.items()}  # noqa: E731  # fmt: skip
    there = place(params, 0)
    state = tx.init(params)
    adam = state[0]._replace(mu=place(state[0].mu, 1), nu=place(state[0].nu, 1))
    got, got_state = jax.jit(tx.step)(place(grads, 0), (adam, *state[1:]), there)
    want, want_state = tx.step(grads, state, params)
    assert_same(got, want, there)
    assert_same(got_state[0].nu, want_state[0].nu, adam.nu)


@AXIS_TYPES
@often(is_explicit)
def test_updates_without_params_lie_where_gradients_do(axis_type):
    tx, (params, _, grads), (_, _, placed_grads) = setup(axis_type, None)
    tx = jda.fused_adam(1e-3)
    state = tx.init(params)
    placed = placed_state(cpu_mesh_of(axis_type), state)
    got, got_state = jax.jit(tx.update)(placed_grads, placed)
    want, want_state = tx.update(grads, state)
    assert_same(got, want, placed_grads)
    assert_same(got_state, want_state, placed)


# What is sent, in programs compiled for 8 H200s.


def received(text, unknown=8):
    """Bytes that a device receives in collectives, as each of them is usually carried out.

    Where the HLO names the devices in a way that is not understood, they are ``unknown`` many.
    """
    total = 0
    for c in hlo.collectives_in(text):
        devices = c.devices or unknown
        size = sum(SIZES[dtype] * elements for dtype, elements in c.arrays)
        if c.op == "reduce-scatter":
            total += size * (devices - 1)
        elif c.op == "collective-permute":
            total += size
        else:
            rounds = 2 if c.op == "all-reduce" else 1
            total += rounds * size * (devices - 1) / devices
    return total


def fused(method):
    return with_step(jda.fused_adamw(**HYPER), WAYS[method])


def unfused(tx):
    return with_step(tx, by_update)


def with_step(tx, take):
    return tx, lambda params, state, grads: take(tx, grads, state, params)


def shapes(mesh, tx, names, shape=(1024, 512), leaves=("w",)):
    """Of (params, state, gradients) in a placement."""
    at = [NamedSharding(mesh, SPECS[name]) for name in names]
    replicated = NamedSharding(mesh, P())
    plain = {k: jax.ShapeDtypeStruct(shape, jnp.float32) for k in leaves}
    state = jax.tree.map(
        lambda x: x.update(sharding=at[1] if x.shape else replicated), jax.eval_shape(tx.init, plain)
    )  # fmt: skip
    params, grads = (jax.tree.map(lambda x: x.update(sharding=s), plain) for s in (at[0], at[-1]))  # noqa: B023
    return params, state, grads


def compiled(function, args, *, pinned=False):
    """Pinned: results are where the first two arguments are because the caller says so."""
    out = jax.tree.map(lambda x: x.sharding, args[:2]) if pinned else None
    return jax.jit(function, donate_argnums=(0, 1), out_shardings=out).lower(*args).compile()


ZERO1 = ("none", "rows", "rows")
# Params cut along the dimension of their moments, by another axis: they are sent to the moments and
# back, where optax makes an update and moves that. One kernel call cannot.
CUT_OTHERWISE = {("rows", "model"), ("model", "rows")}
SAMPLE = {ZERO1, ("rows", "rows", "columns"), ("model", "columns", "rows"), ("rows", "model", "none")}  # fmt: skip


@few(1)
@pytest.mark.parametrize("method", ["step", "update"])
@pytest.mark.parametrize(
    "names",
    [x if x in SAMPLE else pytest.param(x, marks=pytest.mark.slow) for x in MATRIX.values()],
    ids="-".join,
)
@often(lambda names, method: names == ZERO1 or method == "step")
def test_step_sends_no_more_bytes_than_optax(h200s, names, method):
    """optax's results are pinned to where ours are by themselves."""
    mesh = h200s(4, 2, names=("data", "model"))
    texts = []
    for (tx, step), pinned in ((fused(method), False), (unfused(optax.adamw(**HYPER)), True)):
        args = shapes(mesh, tx, names)
        program = compiled(step, args, pinned=pinned)
        for x, y in zip(*map(jax.tree.leaves, (program.output_shardings, args[:2])), strict=True):
            assert x.is_equivalent_to(y.sharding, len(y.shape))
        texts.append(program.as_text())
    ours, theirs = received(texts[0]), received(texts[1], unknown=2)  # the most, and the least
    params, moments, _ = names
    if (params, moments) in CUT_OTHERWISE:
        assert ours <= theirs + math.prod((1024, 512)) * 4 / 2
    else:
        assert ours <= theirs


def test_zero_1_by_annotation_gathers_new_params_and_no_more(h200s):
    mesh = h200s(4, 2, names=("data", "model"))
    tx, step = fused("step")
    text = compiled(step, shapes(mesh, tx, ZERO1)).as_text()
    assert [(c.op, c.arrays) for c in hlo.collectives_in(text)] == [
        ("all-gather", (("f32", 1024 * 512),))
    ]


@pytest.mark.parametrize("main", ["float32", "remainder16"])
def test_16_bit_params_are_gathered_in_16_bits(h200s, main):
    mesh = h200s(8)
    tx = jda.fused_adamw(**HYPER, main_params_dtype=main)
    params = {"w": jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16, sharding=NamedSharding(mesh, P()))}  # fmt: skip
    state = jax.tree.map(
        lambda x: x.update(sharding=NamedSharding(mesh, P("data") if x.shape else P())),
        jax.eval_shape(tx.init, params),
    )
    step = lambda params, state, grads: tx.step(grads, state, params)  # noqa: E731
    text = compiled(step, (params, state, params)).as_text()
    assert [(c.op, c.arrays) for c in hlo.collectives_in(text)] == [
        ("all-gather", (("bf16", 1024 * 512),))
    ]


WIDTH = 512


def loss(params, x):
    for w in params.values():
        x = jnp.tanh(x @ w)
    return jnp.mean(jnp.square(x))


@few(1)
@pytest.mark.parametrize("accumulated", [False, True])
@pytest.mark.parametrize(
    "params_at", ["none", "rows", pytest.param("columns", marks=pytest.mark.slow)]
)
@often(lambda params_at, accumulated: accumulated == (params_at == "rows"))
def test_gradients_of_the_same_program_are_reduced_to_where_moments_lie(
    h200s, params_at, accumulated
):
    """As optax's: scattered, and summed over micro-batches in shards."""
    mesh = h200s(8)
    moments_at = "rows" if params_at == "none" else params_at
    programs = []
    for (tx, step), pinned in ((fused("step"), False), (unfused(optax.adamw(**HYPER)), True)):

        def train(params, state, batches, step=step):
            grad = jax.grad(loss)
            if not accumulated:
                return step(params, state, grad(params, batches[0]))
            add = lambda total, x: (jax.tree.map(jnp.add, total, grad(params, x)), None)  # noqa: E731
            zeros = jax.tree.map(jnp.zeros_like, params)
            return step(params, state, jax.lax.scan(add, zeros, batches)[0])

        params, state, _ = shapes(mesh, tx, (params_at, moments_at), (WIDTH, WIDTH), ("a", "b"))
        batches = jax.ShapeDtypeStruct(
            (3, WIDTH, WIDTH), jnp.float32, sharding=NamedSharding(mesh, P(None, "data"))
        )
        programs.append(compiled(train, (params, state, batches), pinned=pinned).as_text())
    ours, theirs = ([(c.op, c.times) for c in hlo.collectives_in(x)] for x in programs)
    assert sorted(ours) == sorted(theirs) and "all-reduce" not in dict(ours)
    assert received(programs[0]) == received(programs[1])
    if accumulated and params_at != "none":
        (carried,) = re.findall(r"= \((.*)\) while\(", programs[0])
        shard = {"rows": f"f32[{WIDTH // 8},{WIDTH}]", "columns": f"f32[{WIDTH},{WIDTH // 8}]"}
        assert carried.count(shard[params_at]) >= 2 and carried.count(f"[{WIDTH},{WIDTH}]") <= 3


@few(3)
@pytest.mark.parametrize("main", MAINS, ids=str)
@AXIS_TYPES
def test_a_state_made_in_the_program_lies_where_params_do(axis_type, main):
    """Zeros made inside a program are constants, of which XLA would keep all on every device."""
    mesh = cpu_mesh_of(axis_type)
    at = NamedSharding(mesh, P("data"))
    dtype = jnp.float32 if main is None else jnp.bfloat16
    params = {"w": jax.device_put(jnp.full(SHAPE, jnp.nan, dtype), at)}
    tx = jda.fused_adamw(**HYPER, main_params_dtype=main)

    @jax.jit
    def first_step(params):
        return tx.step(params, tx.init(params), params)

    new_params, state = first_step(params)
    made = jax.jit(tx.init)(params)
    for x in jax.tree.leaves((new_params, state, made)):
        assert not x.ndim or x.sharding.is_equivalent_to(at, 2), x.sharding
    for x, y in zip(jax.tree.leaves(made), jax.tree.leaves(tx.init(params)), strict=True):
        if x.ndim:
            assert_same_bits(x, y)  # zeros, also beside NaN


def test_a_state_made_in_the_program_adds_no_traffic(h200s):
    mesh = h200s(8)
    at = NamedSharding(mesh, P("data"))
    params = {k: jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32, sharding=at) for k in "ab"}
    x = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32, sharding=at)
    texts = []
    for (tx, step), pinned in ((fused("step"), False), (unfused(optax.adamw(**HYPER)), True)):

        def train(params, x, tx=tx, step=step):
            return step(params, tx.init(params), jax.grad(loss)(params, x))[0]

        out = jax.tree.map(lambda x: x.sharding, params) if pinned else None
        texts.append(jax.jit(train, out_shardings=out).lower(params, x).compile().as_text())
    assert received(texts[0]) <= received(texts[1])


def test_one_device_runs_the_kernel_alone(h200s):
    """What only says where arrays are leaves no trace: operands are the kernel's, in place."""
    mesh = h200s(1)
    tx = jda.fused_adamw(**HYPER)
    replicated = NamedSharding(mesh, P())
    plain = {"w": jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=replicated)}
    state = jax.tree.map(lambda x: x.update(sharding=replicated), jax.eval_shape(tx.init, plain))
    program = compiled(
        lambda params, state, grads: tx.step(grads, state, params), (plain, state, plain)
    )
    text = program.as_text()
    (call,) = [x for x in text.splitlines() if 'custom_call_target="jdistadam_adam"' in x]
    operands = call.split("operand_layout_constraints={")[1].split("}, output")[0]
    assert operands.count("f32[64,32]") == 4
    made = re.findall(r"= f32\[64,32\]\S* ([\w-]+)\(", text)
    assert set(made) <= {"parameter", "get-tuple-element"} and "Barrier" not in text
    assert program.memory_analysis().alias_size_in_bytes == 3 * 4 * 64 * 32 + 4
