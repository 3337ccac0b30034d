"""Main parameters of 16-bit params, whole or as remainders, in one program."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from jdistadam.kernels import reference
from support.bits import assert_same_bits, assert_trees_same_bits
from support.samples import few, often
from support.trees import ADAM, BF16, F16, F32, HYPER, random_tree


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("make", [jda.fused_adamw, jda.fused_adam])
@often(lambda make, dtype: (make is jda.fused_adamw) == (dtype == F16))
def test_main_params_are_a_float32_run(platform, make, dtype):
    """10 steps of 16-bit params with main parameters: the float32 run on the same gradients.

    Both ways of applying land on the rounded main parameters bitwise, the unfused one with
    optax's own apply_updates.
    """
    kwargs = HYPER if make is jda.fused_adamw else ADAM
    tx, plain = make(**kwargs, main_params_dtype=F32), make(**kwargs)
    rng = np.random.default_rng(3)
    params = applied = random_tree(rng, dtype)
    main = jax.tree.map(lambda x: x.astype(F32), params)
    state, other_state, plain_state = tx.init(params), tx.init(params), plain.init(main)
    step, update, plain_step = jax.jit(tx.step), jax.jit(tx.update), jax.jit(plain.step)
    for _ in range(10):
        grads = random_tree(rng, dtype, 10.0 ** rng.integers(-2, 2))
        params, state = step(grads, state, params)
        updates, other_state = update(grads, other_state, applied)
        assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype(F32)}
        applied = optax.apply_updates(applied, updates)
        main, plain_state = plain_step(grads, plain_state, main)
        assert_trees_same_bits(state.main_params, main)
        assert_trees_same_bits(state.inner, plain_state)
        assert_trees_same_bits(params, jax.tree.map(lambda x: x.astype(dtype), main))
        assert_trees_same_bits((applied, other_state), (params, state))


@pytest.mark.parametrize("make", [jda.fused_adamw, jda.fused_adam])
@often(lambda make: make is jda.fused_adamw)
def test_remainders_are_the_float32_run(platform, make):
    """5 steps of bfloat16 params and 16 bits more: the bits of float32 main parameters.

    Both ways of applying agree; params are nearest to the main parameters, ties away from zero.
    """
    kwargs = HYPER if make is jda.fused_adamw else ADAM
    tx, full = (make(**kwargs, main_params_dtype=kind) for kind in ("remainder16", F32))
    rng = np.random.default_rng(3)
    params = applied = full_params = random_tree(rng, BF16)
    state, other, full_state = tx.init(params), tx.init(params), full.init(params)
    assert {x.dtype for x in jax.tree.leaves(state.main_params)} == {jnp.dtype(jnp.uint16)}
    step, update, full_step = jax.jit(tx.step), jax.jit(tx.update), jax.jit(full.step)
    for _ in range(5):
        grads = random_tree(rng, BF16, 10.0 ** rng.integers(-2, 2))
        params, state = step(grads, state, params)
        updates, other = update(grads, other, applied)
        applied = optax.apply_updates(applied, updates)
        full_params, full_state = full_step(grads, full_state, full_params)
        assert_trees_same_bits(jda.main_params(params, state), full_state.main_params)
        assert_trees_same_bits(jda.main_params(full_params, full_state), full_state.main_params)
        assert_trees_same_bits(state.inner, full_state.inner)
        assert_trees_same_bits((applied, other), (params, state))
        for low, main in zip(*map(jax.tree.leaves, (params, full_state.main_params)), strict=True):
            assert_same_bits(
                low, reference.split_halves(np.asarray(main), np.asarray(low).dtype, np)[0]
            )


def test_remainders_move_26_bytes_and_are_updated_in_place():
    tx = jda.fused_adamw(**HYPER, main_params_dtype="remainder16")
    params = {"w": jnp.ones((65, 33), BF16), "f": jnp.ones(5)}
    state = tx.init(params)
    assert isinstance(state.main_params["f"], optax.MaskedNode)

    def step(params, state):
        return tx.step(jax.tree.map(lambda x: 0.1 * x, params), state, params)

    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state).compile()
    assert not re.search(r"(u16|bf16|f32)\[.+\] copy\(", compiled.as_text())
    assert compiled.memory_analysis().alias_size_in_bytes == (2 + 2 + 8) * 65 * 33 + 12 * 5 + 4
    new, _ = step(params, state)
    assert new["w"].dtype == BF16 and new["f"].dtype == F32


def test_remainders_raise_where_they_cannot_be():
    tx = jda.fused_adamw(1e-3, main_params_dtype="remainder16")
    with pytest.raises(jda.DtypeError, match=r"params\['w'\]: has no remainder: got float16"):
        tx.init({"w": jnp.ones(3, F16)})
    params = {"w": jnp.ones(3, BF16)}
    full = jda.fused_adamw(1e-3, main_params_dtype=F32)
    message = r"main_params\['w'\]: does not fit its parameter: got \(\(3,\), dtype\('float32'\)\), expected \(\(3,\), 'uint16'\)"
    with pytest.raises(jda.DtypeError, match=message):
        tx.step(params, full.init(params), params)
    plain = jda.fused_adamw(1e-3)
    assert jda.main_params(params, plain.init(params)) is params


def test_main_params_exist_only_for_16_bit_leaves():
    tx = jda.fused_adamw(**HYPER, main_params_dtype=F32)
    plain = jda.fused_adamw(**HYPER)
    params = {"low": jnp.ones(300, BF16), "high": jnp.full(7, 0.3), "none": None}
    grads = {"low": jnp.full(300, 0.25, BF16), "high": jnp.full(7, 0.1), "none": None}
    state = tx.init(params)
    assert isinstance(state, jda.MainParamsState)
    assert isinstance(state.main_params["high"], optax.MaskedNode)
    assert [x.shape for x in jax.tree.leaves(state.main_params)] == [(300,)]
    new, state = tx.step(grads, state, params)
    updates, _ = tx.update(grads, tx.init(params), params)
    assert updates["high"].dtype == F32 and updates["none"] is None
    want, _ = plain.step(grads, plain.init(params), params)
    assert_same_bits(new["high"], want["high"])
    assert new["low"].dtype == BF16 and state.main_params["low"].dtype == F32
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(params))
    numbers = tx.init({"low": jnp.ones(3, BF16), "python": 1.0})
    assert isinstance(numbers.main_params["python"], optax.MaskedNode)


def test_apply_updates_is_exact_up_to_a_factor_of_2_16():
    """Where a parameter shrinks by more in one step, p + u is rounded once; the state stays exact."""
    for factor, exact in ((2.0**-15, True), (2.0**-25, False)):
        old = jnp.asarray([1.0 + 2**-7], BF16)
        new = (old.astype(F32) * factor).astype(BF16)
        applied = optax.apply_updates(old, new.astype(F32) - old.astype(F32))
        assert bool(applied[0] == new[0]) == exact


def test_state_and_main_params_must_fit():
    params = {"w": jnp.ones(3, BF16)}
    tx, plain = jda.fused_adamw(1e-3, main_params_dtype=F32), jda.fused_adamw(1e-3)
    with pytest.raises(
        jda.TreeError, match="opt_state: does not fit main_params_dtype: got tuple, expected MainP"
    ):
        tx.step(params, plain.init(params), params)
    with pytest.raises(jda.TreeError, match="got MainParamsState, expected optax's own state"):
        plain.step(params, tx.init(params), params)
    state = tx.init(params)
    for main, got in (
        (jnp.ones(3, BF16), r"\(\(3,\), dtype\(bfloat16\)\)"),
        (jnp.ones(1), r"\(\(1,\), dtype\('float32'\)\)"),
        (optax.MaskedNode(), "MaskedNode"),
    ):
        wrong = state._replace(main_params={"w": main})
        message = r"opt_state.main_params\['w'\]: does not fit its parameter: got " + got
        with pytest.raises(jda.DtypeError, match=message):
            tx.step(params, wrong, params)
    with pytest.raises(jda.TreeError, match=r"opt_state.main_params: tree structure differs"):
        tx.step(params, state._replace(main_params={"v": jnp.ones(3)}), params)


@few(1)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_sharded_main_params_are_not_gathered(axis_type):
    mesh = jax.make_mesh((4, 2), ("x", "y"), (axis_type,) * 2, devices=jax.devices("cpu")[:8])
    sharding = NamedSharding(mesh, P("x", "y"))
    tx = jda.fused_adamw(**HYPER, main_params_dtype=F32)
    host = np.random.default_rng(4).normal(size=(16, 8)).astype(np.float32)
    params = {"w": jax.device_put(jnp.asarray(host, BF16), sharding)}
    state = tx.init(params)
    assert state.main_params["w"].sharding.is_equivalent_to(sharding, 2)
    for method in (tx.step, tx.update):
        text = jax.jit(method).lower(params, state, params).compile().as_text()
        assert "jdistadam_adam" in text
        for collective in ("all-gather", "all-to-all", "collective-permute", "all-reduce"):
            assert collective not in text
    got, _ = jax.jit(tx.step)(params, state, params)
    single = {"w": jnp.asarray(host, BF16)}
    want, _ = tx.step(single, tx.init(single), single)
    assert_same_bits(got["w"], want["w"])


def test_donated_step_with_main_params_copies_nothing():
    tx = jda.fused_adamw(**HYPER, main_params_dtype=F32)
    params = {"w": jnp.ones((65, 33), BF16), "b": jnp.ones(33, BF16)}
    state = tx.init(params)

    def step(params, state):
        grads = jax.tree.map(lambda x: 0.1 * x, params)
        return tx.step(grads, state, params)

    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state).compile()
    assert not [
        x for x in compiled.as_text().splitlines() if re.search(r"f(32|16)\[.+\] copy\(", x)
    ]
    # main, mu and nu in place, the new params in the buffers of the old ones
    assert compiled.memory_analysis().alias_size_in_bytes == (3 * 4 + 2) * (65 * 33 + 33) + 4


def test_main_params_where_a_mask_covers_a_subtree():
    """optax puts one MaskedNode in the place of all that a label or mask of a prefix leaves out."""
    params = {part: {"w": jnp.full(4, 1 / 3, BF16), "b": jnp.ones(2)} for part in ("body", "head")}
    grads = jax.tree.map(jnp.ones_like, params)
    tx, sgd = jda.fused_adamw(1e-3, main_params_dtype=F32), optax.sgd(0.1)
    for wrapped in (
        optax.multi_transform({"a": tx, "b": sgd}, {"body": "a", "head": "b"}),
        optax.masked(tx, {"body": True, "head": False}),
    ):
        updates, state = wrapped.update(grads, wrapped.init(params), params)
        new = optax.apply_updates(params, updates)
        main = jda.main_params(new, state)
        alone, want = tx.step(grads["body"], tx.init(params["body"]), params["body"])
        assert_trees_same_bits(main["body"], jda.main_params(alone, want))
        assert main["body"]["w"].dtype == F32 and main["head"]["w"].dtype == BF16
        with pytest.raises(jda.TreeError, match=r"main_params: tree structure differs from params"):
            jda.main_params(new | {"more": new["body"]}, state)


def test_main_params_in_flax_train_state():
    """Unchanged Flax code, bfloat16 model: many steps too small for bfloat16 still add up."""
    params = {"w": jnp.ones(64, BF16)}
    grads = {"w": jnp.ones(64, BF16)}
    moved = {}
    for main in (None, F32):
        tx = jda.fused_adamw(1e-4, weight_decay=0.0, main_params_dtype=main)
        state = train_state.TrainState.create(apply_fn=None, params=params, tx=tx)
        step = jax.jit(lambda s: s.apply_gradients(grads=grads))
        for _ in range(100):
            state = step(state)
        moved[main] = 1 - float(state.params["w"][0])
    assert moved[None] == 0  # each step is a fortieth of the spacing of bfloat16 below 1
    assert abs(moved[F32] - 1e-2) < 2**-8


@pytest.mark.parametrize("jit_step", [jax.jit, jda.jit_step], ids=["jit", "jit_step"])
@often(lambda jit_step: jit_step is jda.jit_step)
def test_params_that_were_changed_by_hand_give_nan(jit_step):
    params = random_tree(np.random.default_rng(3), BF16)
    grads = jax.tree.map(jnp.copy, params)
    tx = jda.fused_adamw(0.1, main_params_dtype=F32)
    step = jda.jit_step(tx) if jit_step is jda.jit_step else jit_step(tx.step)
    params, state = step(grads, tx.init(params), params)
    edited = jax.tree.map(lambda x: 2 * x + 1, params)
    old = jax.tree.map(jnp.copy, state)
    bad, _ = step(grads, old, jax.tree.map(jnp.copy, edited))
    assert any(jnp.isnan(x).any() for x in jax.tree.leaves(bad))
    state = state._replace(main_params=tx.init(edited).main_params)
    good, _ = step(grads, state, jax.tree.map(jnp.copy, edited))
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(good))


@pytest.mark.parametrize("way", ["step", "update"])
def test_main_params_that_float16_rounds_up_to_a_normal_number_are_no_change(way):
    """reduce_precision would make zero of them, where a cast gives 6.104e-5."""
    rate = float(np.float32(np.float16(1.6102e-4)) - np.float32(6.1010e-5))
    tx = jda.fused_adamw(rate, weight_decay=0.0, main_params_dtype=F32)
    params = {"w": jnp.asarray([1.6102e-4, 0.5], F16)}
    state, run = tx.init(params), jax.jit(getattr(tx, way))
    for grad in (1e-2, 0.0, 0.0):
        new, state = run({"w": jnp.full(2, grad, F16)}, state, params)
        params = new if way == "step" else optax.apply_updates(params, new)
        if grad:
            main = float(state.main_params["w"][0])
            assert 6.10054e-5 < main < 2.0**-14 and float(params["w"][0]) == 2.0**-14
    assert jnp.isfinite(params["w"]).all()


@few(1)
@pytest.mark.parametrize("under_vmap", [False, True])
def test_updates_that_were_changed_give_nan(under_vmap):
    """Main parameters would go on from where the params are not."""
    params = random_tree(np.random.default_rng(3), BF16)
    tx = jda.fused_adamw(0.1, main_params_dtype=F32)
    changed = optax.chain(tx, optax.scale(0.1))

    @functools.partial(jax.jit, static_argnums=0)
    def two_steps(tx, params):
        state = tx.init(params)
        for _ in range(2):
            updates, state = tx.update(params, state, params)
            params = optax.apply_updates(params, updates)
        return updates

    if under_vmap:  # of two members, of which one is changed
        params = jax.tree.map(lambda x: jnp.stack([x, x]), params)

        def one_step(params, factor):
            updates, state = tx.update(params, tx.init(params), params)
            updates = jax.tree.map(lambda x: factor * x, updates)
            return tx.update(params, state, optax.apply_updates(params, updates))[0]

        both = jax.jit(jax.vmap(one_step))(params, jnp.array([1.0, 0.1]))
        good, bad = (jax.tree.map(lambda x: x[i], both) for i in (0, 1))  # noqa: B023
    else:
        good, bad = two_steps(tx, params), two_steps(changed, params)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(good))
    assert any(jnp.isnan(x).any() for x in jax.tree.leaves(bad))


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@often(lambda dtype: dtype == BF16)
def test_updates_in_one_program_are_not_taken_for_changed_ones(dtype):
    """XLA may keep more bits of params between two updates than they have."""
    tx = jda.fused_adamw(**HYPER, main_params_dtype=F32)
    params = random_tree(np.random.default_rng(5), dtype)

    def steps(params, state):
        for _ in range(3):
            updates, state = tx.update(params, state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    want = steps(params, tx.init(params))
    got = jax.jit(steps)(params, tx.init(params))
    assert_trees_same_bits(got, want)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(got))


def test_updates_where_gradients_are_sharded_otherwise():
    """On Explicit axes, whose types must agree."""
    mesh = jax.make_mesh((4,), ("x",), (AxisType.Explicit,), devices=jax.devices("cpu")[:4])
    tx = jda.fused_adamw(**HYPER, main_params_dtype=F32)
    host = jnp.asarray(np.random.default_rng(4).normal(size=(8, 8)), BF16)
    params = jax.device_put({"w": host}, NamedSharding(mesh, P(None, "x")))
    grads = jax.device_put({"w": host}, NamedSharding(mesh, P("x")))
    with jax.set_mesh(mesh):
        updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    want, _ = tx.update({"w": host}, tx.init({"w": host}), {"w": host})
    assert_trees_same_bits(updates, want)
