"""Groups of parameters on one device: the bits of an optimizer for each, and of the sharded one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdistadam as jda
from jdistadam.checkpoint.parts import adam_of
from support.bits import assert_same_bits, assert_trees_same_bits
from support.samples import few

F32, BF16 = jnp.float32, jnp.bfloat16
HYPER = dict(b1=0.87, b2=0.9973, eps=1e-7, eps_root=1e-12, weight_decay=0.13)
RATE = optax.linear_schedule(3e-3, 1e-3, 7)
GROUPS = {
    "body": {},
    "head": dict(lr_scale=0.25, weight_decay=0.5, b1=0.5, b2=0.9),
    "warm": dict(
        lr_scale=lambda count: 1.0 / (count + 1.0), weight_decay=lambda count: 0.1 * count
    ),
    "own": dict(learning_rate=optax.linear_schedule(1e-2, 0.0, 9), b2=0.95),
    "ice": dict(frozen=True),
}
LABELS = {"cold": "ice", "rows": "body", "columns": "head", "small": "warm", "scalar": "own"}
SHAPES = {"cold": (64, 80), "rows": (48, 400), "columns": (5, 1200), "small": (7, 3), "scalar": ()}
EIGHT = dict(mu_dtype="block8", nu_dtype="block8", rounding="stochastic", seed=2**35 + 5)
KINDS = {
    "float32": (F32, {}),
    "without bias correction": (F32, dict(bias_correction=False)),
    "float32 main": (BF16, dict(main_params_dtype=F32)),
    "remainders": (BF16, dict(main_params_dtype="remainder16")),
    "block8": (BF16, dict(main_params_dtype="remainder16", **EIGHT)),
    "no main": (BF16, dict(main_params_dtype=None, **EIGHT)),
}


def decays(params):
    return jax.tree.map(lambda x: np.ndim(x) != 1, params)


def random_tree(seed, dtype):
    rng = np.random.default_rng(seed)
    return {k: jnp.asarray(rng.normal(size=s), F32).astype(dtype) for k, s in SHAPES.items()}


def make(dtypes, **kwargs):
    groups = dict(param_labels=LABELS, groups=GROUPS)
    return jda.fused_adamw(RATE, mask=decays, **HYPER, **groups, **dtypes, **kwargs)


@few(1)
@pytest.mark.parametrize("kind", KINDS)
def test_groups_give_the_bits_of_a_mesh_of_one_device(kind, cpu_mesh):
    """Ten steps; one of the leaves before all others is frozen, so that leaves keep their numbers."""
    dtype, dtypes = KINDS[kind]
    tx = make(dtypes)
    one = jda.distributed(make(dtypes), mesh=cpu_mesh(1), policy=jda.MixedPrecisionPolicy())
    params, state = random_tree(0, dtype), tx.init(random_tree(0, dtype))
    train_state = jda.TrainState.create(params, one)

    def loss(params, batch):
        terms = jax.tree.map(lambda p, g: jnp.sum(p.astype(F32) * g[0]), params, batch)
        return sum(jax.tree.leaves(terms))

    step = jda.train_step(loss, one)
    jitted = jda.jit_step(tx)
    for i in range(10):
        grads = random_tree(i + 1, dtype)
        batch = jax.tree.map(lambda x: x.astype(F32)[None], grads)
        train_state, _ = step(train_state, batch)
        params, state = jitted(grads, state, params)
    assert_trees_same_bits(params, train_state.params)
    assert_same_bits(params["cold"], random_tree(0, dtype)["cold"])
    assert int(adam_of(state).count) == 10


@few(1)
@pytest.mark.parametrize("method", ["step", "update"])
def test_each_group_is_an_optimizer_of_its_own(method):
    """Also a leaf of integers, which optax steps."""
    tx, params = make({}), random_tree(0, F32) | {"whole": jnp.arange(6)}
    labels = LABELS | {"whole": "head"}
    tx = jda.fused_adamw(0.5, **HYPER, param_labels=labels, groups=GROUPS)
    grads = random_tree(1, F32) | {"whole": jnp.arange(6) - 2}
    got, state = getattr(tx, method)(grads, tx.init(params), params)
    for name in set(labels.values()) - {"ice"}:
        given = dict(GROUPS[name])
        scale = given.pop("lr_scale", 1.0)
        rate = (lambda n, scale=scale: 0.5 * scale(n)) if callable(scale) else 0.5 * scale
        own = jda.fused_adamw(**HYPER | dict(learning_rate=rate) | given)
        only = lambda tree, name=name: {k: x for k, x in tree.items() if labels[k] == name}  # noqa: E731
        want, _ = getattr(own, method)(only(grads), own.init(only(params)), only(params))
        assert_trees_same_bits(only(got), want, name)
    cold = params["cold"] if method == "step" else jnp.zeros_like(params["cold"])
    assert_same_bits(got["cold"], cold)
    assert isinstance(state[0].mu["cold"], optax.MaskedNode)


@pytest.mark.slow
def test_frozen_leaves_have_no_state_and_the_rest_goes_round(tmp_path):
    """A checkpoint, a chain, hyperparameters as state, members, a derivative, main parameters."""
    dtype, dtypes = KINDS["block8"]
    tx, params = make(dtypes), random_tree(0, dtype)
    params, state = jda.jit_step(tx)(random_tree(1, dtype), tx.init(params), params)
    jda.save(tmp_path, {"params": params, "opt_state": state})
    empty = random_tree(9, dtype)
    again = jda.restore(tmp_path, {"params": empty, "opt_state": tx.init(empty)})
    assert_trees_same_bits(again, {"params": params, "opt_state": state})
    main = jda.main_params(params, state)
    assert main["rows"].dtype == F32 and main["cold"].dtype == dtype

    injected = jda.inject_hyperparams(jda.fused_adamw)(
        0.5, weight_decay=0.1, param_labels=LABELS, groups=GROUPS
    )
    chained = jda.chain(optax.scale(0.5), injected)
    params, grads = random_tree(0, F32), random_tree(1, F32)
    state = chained.init(params)
    stepped, _ = chained.step(grads, state, params)

    def step_with(numbers):
        tx = jda.fused_adamw(**numbers, param_labels=LABELS, groups=GROUPS)
        half = jax.tree.map(lambda x: x * 0.5, grads)
        return tx.step(half, tx.init(params), params)[0]

    assert_trees_same_bits(stepped, jax.jit(step_with)(state[1].hyperparams))

    def total(rate):
        tx = jda.fused_adamw(rate, param_labels=LABELS, groups=GROUPS)
        new, _ = tx.step(grads, tx.init(params), params)
        return sum(jnp.sum(x) for x in jax.tree.leaves(new))

    slope = jax.grad(total)(0.5)
    numeric = (total(jnp.float32(0.75)) - total(jnp.float32(0.25))) / 0.5  # linear in the rate
    np.testing.assert_allclose(slope, numeric, rtol=1e-3)
    members = jax.vmap(total)(jnp.array([0.25, 0.75]))
    np.testing.assert_allclose(members[1] - members[0], 0.5 * slope, rtol=1e-3)


def test_gradients_that_do_not_fit_raise():
    """Also those of frozen leaves, which nothing reads."""
    tx, params = make({}), random_tree(0, F32)
    grads = dict(params)
    del grads["rows"]
    with pytest.raises(jda.TreeError, match=r"grads.*rows"):
        tx.step(grads, tx.init(params), params)
    for method in (tx.step, tx.update):
        with pytest.raises(jda.ShapeError, match=r"grads\['cold'\]: shape differs"):
            method(params | {"cold": jnp.ones((2, 64, 80))}, tx.init(params), params)


def test_updates_of_frozen_leaves_lie_where_the_params_do(cpu_mesh):
    mesh = cpu_mesh(4)
    place = lambda spec: jax.device_put(random_tree(0, F32), jax.NamedSharding(mesh, spec))  # noqa: E731
    shapes = {"cold": LABELS["cold"], "rows": LABELS["rows"]}
    pick = lambda tree: {name: tree[name] for name in shapes}  # noqa: E731
    groups = {name: GROUPS[name] for name in ("body", "ice")}
    tx = jda.fused_adamw(0.1, param_labels=shapes, groups=groups)
    params = pick(place(jax.sharding.PartitionSpec()))
    grads = jax.device_put(params, jax.NamedSharding(mesh, jax.sharding.PartitionSpec("data")))
    updates, _ = tx.update(grads, tx.init(params), params)
    for name, x in optax.apply_updates(params, updates).items():
        assert x.sharding.is_equivalent_to(params[name].sharding, x.ndim), name


def test_functions_of_params_see_frozen_leaves_too():
    mask = lambda params: {name: x.ndim > 1 for name, x in params.items()}  # noqa: E731
    params = random_tree(0, F32)
    by_tree = {name: x.ndim > 1 for name, x in params.items()}
    steps = [
        jda.fused_adamw(0.1, weight_decay=0.5, mask=x, param_labels=LABELS, groups=GROUPS)
        for x in (mask, by_tree)
    ]
    got, want = (tx.step(params, tx.init(params), params)[0] for tx in steps)
    assert_trees_same_bits(got, want)


def test_schedules_of_a_group_look_at_the_count_of_adam():
    """Where optax has no count of decay, whatever the learning rate is."""
    groups = dict(
        param_labels={"w": "a"}, groups={"a": dict(weight_decay=lambda count: 1.0 * count)}
    )
    params, found = {"w": jnp.ones(3)}, []
    for rate in (0.1, lambda count: 0.1 + 0 * count):
        tx = jda.fused_adam(rate, **groups)
        state = tx.init(params)
        state = (state[0]._replace(count=jnp.int32(10)), *state[1:])
        found.append(tx.step(params, state, params)[0]["w"])
    assert_same_bits(*found)


def test_a_group_that_is_no_dict_raises():
    for groups in ({"a": 3}, {"a": None}, 3):
        with pytest.raises(jda.HyperparameterError, match="groups"):
            jda.fused_adam(0.1, param_labels="a", groups=groups)


def test_frozen_leaves_survive_export_to_torch_and_import():
    tx, params = make({}), random_tree(0, F32)
    params, state = tx.step(random_tree(1, F32), tx.init(params), params)
    plain = jda.fused_adamw(0.1, param_labels=LABELS, groups=GROUPS | {"warm": {}})
    params, state = plain.step(random_tree(1, F32), plain.init(params), params)
    names = sorted(params)
    theirs = jda.interop.from_fused(params, state, plain, names)
    assert theirs.leaves["cold"].mu is None and theirs.leaves["rows"].mu is not None
    again, state_again = jda.interop.to_fused(theirs, plain, params)
    assert_trees_same_bits(again, jax.device_get(params))
    assert_trees_same_bits(state_again, jax.device_get(state))


def test_nothing_is_computed_for_frozen_leaves():
    """The program of a step reads no gradient of theirs, and no state."""
    tx, params = make({}), random_tree(0, F32)
    text = jax.jit(tx.step).lower(params, tx.init(params), params).compile().as_text()
    assert "f32[64,80]" not in text.split("jdistadam_adam", 1)[1].splitlines()[0]
    assert len(jax.tree.leaves(tx.init(params)[0].mu)) == len(SHAPES) - 1


def test_mask_function_may_return_a_tree_that_can_be_called():
    """As modules of Equinox can: the result was called again."""

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Layer:
        w: object
        b: object

        def __call__(self, x):
            raise AssertionError("nothing computes with a mask")

    params = Layer(jnp.ones((4, 3)), jnp.ones(3))
    tx = jda.fused_adamw(1e-2, weight_decay=0.5, mask=lambda params: Layer(True, False))
    like = {"w": params.w, "b": params.b}
    plain = jda.fused_adamw(1e-2, weight_decay=0.5, mask={"w": True, "b": False})
    got, _ = tx.step(params, tx.init(params), params)
    want, _ = plain.step(like, plain.init(like), like)
    assert_trees_same_bits({"w": got.w, "b": got.b}, want)
