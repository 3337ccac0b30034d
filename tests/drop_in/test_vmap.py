"""vmap of a step: each member's bits are those of its own call, in one kernel call for all."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from jdistadam.drop_in.step import tree_step
from jdistadam.kernels import native, partition
from jdistadam.tools import hlo
from support.bits import assert_same_bits, assert_trees_same_bits
from support.fast_compilation import AS_FOR_USERS
from support.samples import few, often

# One power of many numbers and many powers of one are otherwise rounded in different ways.
jit = functools.partial(jax.jit, compiler_options=AS_FOR_USERS)
MEMBERS = 5
HYPER = dict(b1=0.87, b2=0.9973, eps=1e-7, weight_decay=0.13)
# No vector fits into a member of most; one leaf is decayed, the next not.
SHAPES = {"w": (5, 3), "b": (3,), "one": (), "none": (0, 4), "big": (40, 41)}
MASK = {name: name in ("w", "big") for name in SHAPES}
MAINS = pytest.mark.parametrize("main", [None, jnp.float32, "remainder16"], ids=str)
METHODS = pytest.mark.parametrize("method", ["step", "update"])


def random_tree(seed, dtype=jnp.float32, lead=(MEMBERS,)):
    rng = np.random.default_rng(seed)
    return {k: jnp.asarray(rng.normal(size=(*lead, *s)), dtype) for k, s in SHAPES.items()}


def random_numbers(lead=(MEMBERS,)):
    """Hyperparameters that differ between members."""
    rng = np.random.default_rng(7)
    ranges = dict(learning_rate=(1e-3, 1e-2), b1=(0.8, 0.95), b2=(0.9, 0.999), weight_decay=(0, 1))
    return {k: jnp.asarray(rng.uniform(*r, lead), jnp.float32) for k, r in ranges.items()}


def two_steps(numbers, params, grads, later_grads, *, method="step", main=None, mask=MASK):
    """A step that makes moments, and one that uses them."""
    tx = jda.fused_adamw(**numbers, mask=mask, main_params_dtype=main)
    params, state = tx.step(grads, tx.init(params), params)
    return getattr(tx, method)(later_grads, state, params)


def member(tree, i):
    return jax.tree.map(lambda x: x[i], tree)


def assert_members_equal_their_own_calls(function, args, got):
    for i in range(MEMBERS):
        assert_trees_same_bits(member(got, i), function(*member(args, i)))


def compiled_with_calls(function, *args):
    """A program, and how many calls of the kernel are in it."""
    compiled = jit(function).lower(*args).compile()
    return compiled, compiled.as_text().count('custom_call_target="jdistadam_adam"')


@few(1)
@MAINS
@METHODS
@pytest.mark.parametrize("jitted", [True, False], ids=["jit", "eager"])
@often(
    lambda method, main, jitted: (
        (method, main, jitted)
        in {("step", None, True), ("update", jnp.float32, True), ("step", "remainder16", False)}
    )
)
def test_members_with_own_hyperparameters_have_the_bits_of_own_calls(method, main, jitted):
    dtype = jnp.bfloat16 if main else jnp.float32
    function = functools.partial(two_steps, method=method, main=main)
    args = (random_numbers(), *(random_tree(seed, dtype) for seed in range(3)))
    vmapped = jax.vmap(function)
    one = jit(function) if jitted else function
    if jitted:
        compiled, calls = compiled_with_calls(vmapped, *args)
        assert calls == 2  # for the two steps
    got = (compiled if jitted else vmapped)(*args)
    assert_members_equal_their_own_calls(one, args, got)


@METHODS
@often(lambda method: method == "update")
def test_leaves_of_several_dtypes_make_one_call_for_each(method):
    dtypes = {"w": jnp.bfloat16, "b": jnp.float16, "big": jnp.float32}
    trees = [{k: random_tree(s)[k].astype(v) for k, v in dtypes.items()} for s in range(3)]
    args = (random_numbers(), *trees)
    function = functools.partial(two_steps, method=method, mask=None)
    compiled, calls = compiled_with_calls(jax.vmap(function), *args)
    assert_members_equal_their_own_calls(jit(function), args, compiled(*args))
    assert calls == 2 * len(dtypes)


def test_members_that_share_their_numbers_and_the_count():
    """Then nothing tells the call from one of larger leaves."""
    tx = jda.fused_adamw(3e-3, **HYPER)
    params, grads = random_tree(0), random_tree(1)
    state = jax.vmap(tx.init)(params)
    shared = (state[0]._replace(count=jnp.int32(4)), *state[1:])
    axes = (0, (state[0]._replace(count=None, mu=0, nu=0), None, None), 0)
    got = jit(jax.vmap(tx.step, in_axes=axes))(grads, shared, params)
    for i in range(MEMBERS):
        own = (shared[0]._replace(mu=member(shared[0].mu, i), nu=member(shared[0].nu, i)),)
        own = (*own, *shared[1:])
        want = jit(tx.step)(member(grads, i), own, member(params, i))
        assert_trees_same_bits(member(got, i), want)


@few(1)
@pytest.mark.parametrize("batched", ["grads", "state", "params", "numbers", "count"])
def test_any_operand_alone_may_differ_between_members(batched):
    """The others are the same for all; the result has members nonetheless."""
    numbers = {k: v[0] for k, v in random_numbers().items()}
    params, grads = random_tree(0, lead=()), random_tree(1, lead=())
    (adam, *rest) = jda.fused_adamw(1e-3).step(grads, jda.fused_adamw(1e-3).init(params), params)[1]
    args = dict(numbers=numbers, count=adam.count, params=params, grads=grads, state=adam)
    many = dict(
        numbers=random_numbers(), count=jnp.arange(MEMBERS, dtype=jnp.int32), params=random_tree(2),
        grads=random_tree(3), state=adam._replace(count=None, mu=random_tree(4), nu=jax.tree.map(jnp.square, random_tree(5))),
    )  # fmt: skip

    def function(numbers, count, params, grads, state):
        state = (state._replace(count=count), *rest)
        return jda.fused_adamw(**numbers, mask=MASK).step(grads, state, params)

    args["state"] = args["state"]._replace(count=None)
    axes = tuple(0 if name == batched else None for name in args)
    args[batched] = many[batched]
    got = jit(jax.vmap(function, in_axes=axes))(*args.values())
    for i in range(MEMBERS):
        own = {k: member(v, i) if k == batched else v for k, v in args.items()}
        assert_trees_same_bits(member(got, i), jit(function)(*own.values()))


@pytest.mark.slow
def test_members_may_be_in_any_dimension():
    args = (random_numbers(), *(random_tree(seed) for seed in range(3)))
    last = jax.tree.map(lambda x: jnp.moveaxis(x, 0, -1), args)
    axes = (-1, {"w": -1, "b": 1, "one": 0, "none": 2, "big": -1}, -1, -1)
    got = jit(jax.vmap(two_steps, in_axes=axes, out_axes=-1))(*last)
    want = jit(jax.vmap(two_steps))(*args)
    assert_trees_same_bits(jax.tree.map(lambda x: jnp.moveaxis(x, -1, 0), got), want)


@few(1)
@pytest.mark.parametrize("inner", ["numbers", "leaves", "both"])
@pytest.mark.parametrize("outer", ["numbers", "leaves", "both"])
@often(lambda inner, outer: (inner, outer) in {("both", "both"), ("numbers", "leaves")})
def test_vmap_of_vmap_has_the_bits_of_separate_calls(inner, outer):
    """Whichever of the two has numbers of its own: still one call, and each member's own bits."""

    def axes(which):
        return (0 if which != "leaves" else None, *(0 if which != "numbers" else None,) * 3)

    def lead(kind):
        return tuple(n for n, which in ((2, outer), (MEMBERS, inner)) if which in (kind, "both"))

    trees = (random_tree(seed, lead=lead("leaves")) for seed in range(3))
    args = (random_numbers(lead("numbers")), *trees)
    function = jax.vmap(jax.vmap(two_steps, in_axes=axes(inner)), in_axes=axes(outer))
    compiled, calls = compiled_with_calls(function, *args)
    got = compiled(*args)
    for o in range(2):
        for i in range(MEMBERS):
            own = []
            for arg, *mapped in zip(args, axes(outer), axes(inner), strict=True):
                for axis, index in zip(mapped, (o, i), strict=True):
                    arg = arg if axis is None else member(arg, index)
                own.append(arg)
            assert_trees_same_bits(member(member(got, o), i), jit(two_steps)(*own))
    assert calls == 2


def test_vmap_of_injected_states_makes_one_call():
    tx = jda.inject_hyperparams(jda.fused_adamw)(3e-3, **HYPER)
    params, grads = random_tree(0), random_tree(1)
    state = jax.vmap(tx.init)(params)
    state.hyperparams["learning_rate"] = jnp.linspace(1e-3, 1e-2, MEMBERS)
    args = grads, state, params
    compiled, calls = compiled_with_calls(jax.vmap(tx.step), *args)
    assert_members_equal_their_own_calls(jit(tx.step), args, compiled(*args))
    assert calls == 1


def test_a_loop_over_steps_of_all_members():
    numbers, params, grads = random_numbers(), random_tree(0), random_tree(1)

    def train(numbers, params, grads):
        tx = jda.fused_adamw(**numbers, mask=MASK)
        step = lambda carry, g: (tx.step(g, carry[1], carry[0]), None)  # noqa: E731
        batches = jax.tree.map(lambda x: jnp.stack([x, -0.5 * x, 2 * x]), grads)
        return jax.lax.scan(step, (params, tx.init(params)), batches)[0]

    got = jit(jax.vmap(train))(numbers, params, grads)
    assert_members_equal_their_own_calls(jit(train), (numbers, params, grads), got)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "complex64"])
@often(lambda dtype: dtype == "complex64")
def test_leaves_stepped_by_optax_follow_separate_calls(dtype):
    """XLA compiles both: a multiply-add that it contracts in one of them may round otherwise.

    u and p are of order 1 and a step makes a few operations, each within half an ulp of them.
    """
    with jax.enable_x64(True):
        trees = [{k: v.astype(dtype) for k, v in random_tree(seed).items()} for seed in range(3)]
        eps = jnp.finfo(dtype).eps
        # in the leaves' precision: of vectors and of scalars XLA rounds b1 ** count otherwise
        numbers = jax.tree.map(lambda x: x.astype(eps.dtype), random_numbers())
        args = (numbers, *trees)
        got = jit(jax.vmap(two_steps))(*args)
        for i in range(MEMBERS):
            want = jit(two_steps)(*member(args, i))
            for a, b in zip(jax.tree.leaves(member(got, i)), jax.tree.leaves(want), strict=True):
                assert a.dtype == b.dtype
                assert np.all(np.abs(a - b) <= 8 * eps * (1 + np.abs(b)))


def test_vmapped_step_follows_vmapped_optax():
    """One step from zero moments: both round a few times around numbers of order 1 (FMA aside)."""
    args = (random_numbers(), random_tree(0), random_tree(1))

    def step(make, numbers, params, grads):
        tx = make(**numbers, mask=MASK)
        updates, _ = tx.update(grads, tx.init(params), params)
        return updates

    ours, optaxs = (
        jit(jax.vmap(functools.partial(step, make)))(*args)
        for make in (jda.fused_adamw, optax.adamw)
    )
    rates = args[0]["learning_rate"]
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(optaxs), strict=True):
        bound = 8 * jnp.finfo(jnp.float32).eps * 4 * np.reshape(rates, (-1,) + (1,) * (b.ndim - 1))
        assert np.all(np.abs(a - b) <= bound)  # |m_hat / sqrt(v_hat) + wd p| < 4 + 1


def test_the_fallback_steps_members_too(monkeypatch):
    """Close to the kernel: the formula is the same, XLA may contract it."""
    args = (random_numbers(), *(random_tree(seed) for seed in range(3)))
    want, _ = jit(jax.vmap(two_steps))(*args)
    monkeypatch.setattr(native, "choose", lambda compiled, fallback: fallback)
    forget_the_kernel()
    compiled, calls = compiled_with_calls(jax.vmap(two_steps), *args)
    forget_the_kernel()
    assert calls == 0
    got, _ = compiled(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=8 * 2.0**-23 * 4)  # |p| < 4, two steps


def forget_the_kernel():
    """Of what was traced with it, or without it; not of all that other tests compiled."""
    tree_step.clear_cache()
    partition.partitioned_step.cache_clear()


# Where the members and the dimensions of a leaf are cut, by name.
PLACES = {
    "members": lambda x: P("data"),
    "rows": lambda x: P(None, "data") if x.ndim > 1 and x.shape[1] % 4 == 0 else P(),
    "both": lambda x: P("model", "data") if x.ndim > 1 and x.shape[1] % 4 == 0 else P("model"),
}


def sharded_args(mesh, place):
    """A vmapped step's arguments: learning rates, gradients, state, params."""
    rng, members = np.random.default_rng(0), 8
    shapes = {"w": (16, 8), "b": (8,), "c": (4, 6)}
    params, grads = (
        {k: jnp.asarray(rng.normal(size=(members, *s)), jnp.float32) for k, s in shapes.items()}
        for _ in range(2)
    )
    state = jax.vmap(jda.fused_adamw(1e-3).init)(params)
    args = (jnp.linspace(1e-3, 1e-2, members), grads, state, params)
    put = lambda x: jax.device_put(x, NamedSharding(mesh, place(x)))  # noqa: E731
    return args, jax.tree.map(put, args)


def step_with(learning_rate, grads, state, params):
    return jda.fused_adamw(learning_rate, **HYPER).step(grads, state, params)


@few(1)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("place", PLACES)
@often(
    lambda place, axis_type: (
        (place, axis_type) in {("both", AxisType.Explicit), ("rows", AxisType.Auto)}
    )
)
def test_sharded_members_stay_where_they_are(place, axis_type):
    types, devices = (axis_type,) * 2, jax.devices("cpu")[:8]
    mesh = jax.make_mesh((4, 2), ("data", "model"), types, devices=devices)
    here, there = sharded_args(mesh, PLACES[place])
    want = jit(jax.vmap(step_with))(*here)
    compiled = jit(jax.vmap(step_with)).lower(*there).compile()
    got = compiled(*there)
    assert list(hlo.collectives_in(compiled.as_text())) == []
    assert compiled.as_text().count('custom_call_target="jdistadam_adam"') == 1
    for x, y, old in zip(*map(jax.tree.leaves, (got, want, (there[3], there[2]))), strict=True):
        assert x.sharding.is_equivalent_to(old.sharding, x.ndim)
        if x.dtype == jnp.float32:
            assert_same_bits(x, y)


def test_sharded_members_with_equal_hyperparameters():
    """Under jax.set_mesh, coefficients of a member could not be stacked with those of all."""
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Explicit,), devices=jax.devices("cpu")[:8])
    here, there = (x[1:] for x in sharded_args(mesh, PLACES["members"]))
    labels = {"w": "first", "b": "second", "c": "second"}
    groups = {"first": {}, "second": dict(b1=0.5)}
    tx = jda.fused_adamw(**HYPER | dict(learning_rate=1e-2), param_labels=labels, groups=groups)
    step = jax.vmap(tx.step)
    want = jit(step)(*here)
    with jax.set_mesh(mesh):
        got = jit(step)(*there)
    assert_trees_same_bits(got, want)


def test_leaves_whose_members_are_cut_differently():
    """A call has one table of rows: every device then steps all members of all leaves."""
    types, devices = (AxisType.Auto,) * 2, jax.devices("cpu")[:8]
    mesh = jax.make_mesh((4, 2), ("data", "model"), types, devices=devices)
    here, there = sharded_args(mesh, lambda x: P("data") if x.ndim == 3 else P())
    want = jit(jax.vmap(step_with))(*here)
    got = jit(jax.vmap(step_with))(*there)
    for x, y, old in zip(*map(jax.tree.leaves, (got, want, (there[3], there[2]))), strict=True):
        assert x.sharding.is_equivalent_to(old.sharding, x.ndim)
        if x.dtype == jnp.float32:
            assert_same_bits(x, y)


@pytest.mark.parametrize("spec", [P("data"), P(None, "data"), P()], ids=str)
def test_one_call_and_no_copy_on_h200s(h200s, spec):
    """All members in one call, in place, and nothing sent."""
    mesh = h200s(8)

    def shape(*dims, dtype=jnp.float32, spec=spec):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, spec))

    params = {"w": shape(16, 64, 64), "v": shape(16, 8)}
    members = P(*spec[:1])
    state = jax.eval_shape(jax.vmap(jda.fused_adamw(1e-3).init), params)
    count = shape(16, dtype=jnp.int32, spec=members)
    state = (state[0]._replace(count=count, mu=params, nu=params), *state[1:])

    def step(params, state, grads, rates):  # in the order of the results, for donation
        return jax.vmap(step_with)(rates, grads, state, params)

    args = (params, state, params, shape(16, spec=members))
    text = jit(step, donate_argnums=(0, 1)).lower(*args).compile().as_text()
    assert list(hlo.collectives_in(text)) == []
    assert text.count('custom_call_target="jdistadam_adam"') == 1
    assert [line for line in text.splitlines() if " copy(" in line and ",64]" in line] == []
