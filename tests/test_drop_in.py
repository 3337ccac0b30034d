"""fused_adam, main parameters, second moments in 16 bits, and the leaves that trees may hold."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bits import assert_same_bits
from flax.training import train_state
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from ulp import assert_step_close

import jdistadam as jda
from jdistadam.core.hyperparameters import Hyperparameters
from jdistadam.kernels import coefficients, reference

ADAM = dict(learning_rate=3e-3, b1=0.87, b2=0.9973, eps=1e-7, eps_root=1e-12)
HYPER = ADAM | dict(weight_decay=0.13)
F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16


def random_tree(rng, dtype=F32, scale=1.0):
    shapes = {"w": (65, 33), "b": (33,), "one": (1,), "scalar": (), "empty": (0, 3)}
    return {
        k: jnp.asarray(rng.normal(size=s) * scale, F32).astype(dtype) for k, s in shapes.items()
    }


def assert_trees_same_bits(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_flatten_with_path(got)[0]]
    for path, a, b in zip(paths, jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        if a.dtype.kind in "iu":
            assert np.array_equal(a, b), path
        else:
            assert_same_bits(a, b, path)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("l2", [0.0, 0.07])
def test_fused_adam_follows_jitted_optax(platform, l2, nesterov):
    """10 steps, each from equal state; L2 is optax.adam on the gradient plus l2 * params."""
    kwargs = ADAM | dict(nesterov=nesterov)
    ours, theirs = jda.fused_adam(**kwargs, l2=l2), optax.adam(**kwargs)
    rng = np.random.default_rng(0)
    params = random_tree(rng)
    state = theirs.init(params)
    their_update = jax.jit(theirs.update)
    for count in range(10):
        grads = random_tree(rng)
        decayed = jax.tree.map(
            lambda g, p: np.asarray(g) + np.float32(l2) * np.asarray(p), grads, params
        )
        new, new_state = ours.step(grads, state, params)
        updates, want_state = their_update(decayed, state, params)
        want = optax.apply_updates(params, updates)
        for x in zip(
            *map(jax.tree.leaves, (new, new_state[0].mu, new_state[0].nu)),
            *map(jax.tree.leaves, (want, want_state[0].mu, want_state[0].nu)),
            *map(jax.tree.leaves, (params, state[0].mu, state[0].nu, decayed)),
            strict=True,
        ):
            names = ("params", "mu", "nu")
            got, expected, old = (dict(zip(names, x[i : i + 3], strict=True)) for i in (0, 3, 6))
            assert_step_close(got, expected, old, x[9], kwargs | dict(weight_decay=0.0), count)
        params, state = want, want_state


def test_fused_adam_has_optax_state_and_needs_no_params():
    schedule = optax.linear_schedule(1e-2, 1e-3, 10)
    rng = np.random.default_rng(1)
    params, grads = random_tree(rng), random_tree(rng)
    ours, theirs = jda.fused_adam(schedule), optax.adam(schedule)
    state = ours.init(params)
    assert_trees_same_bits(state, theirs.init(params))
    assert_trees_same_bits(ours.update(grads, state), ours.update(grads, state, params))
    for tx in (jda.fused_adam(1e-3, l2=0.1), jda.fused_adam(1e-3, main_params_dtype=F32)):
        with pytest.raises(ValueError, match="not passing `params`"):
            tx.update(grads, tx.init(params))


@pytest.mark.parametrize("param_dtype", [F32, BF16], ids=str)
def test_bfloat16_second_moment_is_the_oracle_bit_for_bit(platform, param_dtype):
    kwargs = HYPER | dict(b2=0.97)
    tx = jda.fused_adamw(**kwargs, nu_dtype=BF16, mu_dtype=BF16)
    rng = np.random.default_rng(2)
    params = random_tree(rng, param_dtype)
    state = tx.init(params)
    hyper = Hyperparameters(**kwargs)
    row = jax.jit(lambda count: coefficients.coefficient_row(hyper, count))
    for count in range(10):
        grads = random_tree(rng, scale=10.0 ** rng.integers(-3, 3))
        named = dict(zip(coefficients.NAMES, np.asarray(row(count)), strict=True))
        want = {
            k: reference.adam_leaf("step", named, np.float32(1), False, *map(np.asarray, (grads[k], params[k], state[0].mu[k], state[0].nu[k])))
            for k in params
        }  # fmt: skip
        params, state = tx.step(grads, state, params)
        for k, leaf in want.items():
            assert state[0].nu[k].dtype == BF16
            assert_same_bits(params[k], leaf.params, k)
            assert_same_bits(state[0].mu[k], leaf.mu, k)
            assert_same_bits(state[0].nu[k], leaf.nu, k)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("make", [jda.fused_adamw, jda.fused_adam])
def test_main_params_are_a_float32_run(platform, make, dtype):
    """20 steps of 16-bit params with main parameters: the float32 run on the same gradients.

    Both ways of applying land on the rounded main parameters in every bit, the unfused one with
    optax's own apply_updates.
    """
    kwargs = HYPER if make is jda.fused_adamw else ADAM
    tx, plain = make(**kwargs, main_params_dtype=F32), make(**kwargs)
    rng = np.random.default_rng(3)
    params = applied = random_tree(rng, dtype)
    main = jax.tree.map(lambda x: x.astype(F32), params)
    state, other_state, plain_state = tx.init(params), tx.init(params), plain.init(main)
    step, update, plain_step = jax.jit(tx.step), jax.jit(tx.update), jax.jit(plain.step)
    for _ in range(20):
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
def test_remainders_are_the_float32_run(platform, make):
    """20 steps of bfloat16 params and 16 bits more: the bits of float32 main parameters.

    Both ways of applying agree; params are nearest to the main parameters, ties away from zero.
    """
    kwargs = HYPER if make is jda.fused_adamw else ADAM
    tx, full = (make(**kwargs, main_params_dtype=kind) for kind in ("remainder16", F32))
    rng = np.random.default_rng(3)
    params = applied = full_params = random_tree(rng, BF16)
    state, other, full_state = tx.init(params), tx.init(params), full.init(params)
    assert {x.dtype for x in jax.tree.leaves(state.main_params)} == {jnp.dtype(jnp.uint16)}
    step, update, full_step = jax.jit(tx.step), jax.jit(tx.update), jax.jit(full.step)
    for _ in range(20):
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
            assert_same_bits(low, reference.split(np.asarray(main), np.asarray(low).dtype, np)[0])


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


def test_remainders_are_refused_where_they_cannot_be():
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


def test_remainders_of_leaves_that_optax_steps():
    """float64 gradients: optax's arithmetic, on the joined halves."""
    with jax.enable_x64(True):
        params = {"w": jnp.ones(5, BF16)}
        grads = {"w": jnp.full(5, 0.3, jnp.float64)}
        results = []
        for kind in ("remainder16", F32):
            tx = jda.fused_adamw(1e-3, main_params_dtype=kind)
            new, state = params, tx.init(params)
            for _ in range(5):
                new, state = tx.step(grads, state, new)
            results.append((jda.main_params(new, state), state.inner))
        assert_trees_same_bits(*results)


@pytest.mark.parametrize("nesterov", [False, True])
def test_without_bias_correction(platform, nesterov):
    """The moments as they are: the formula with c1 = c2 = 1, in every bit."""
    tx = jda.fused_adamw(**HYPER, nesterov=nesterov, bias_correction=False)
    rng = np.random.default_rng(9)
    params, state = {"w": jnp.asarray(rng.normal(size=300), F32)}, None
    state = tx.init(params)
    hyper = Hyperparameters(**HYPER, nesterov=nesterov, bias_correction=False)
    for _ in range(3):
        grads = {"w": jnp.asarray(rng.normal(size=300), F32)}
        row = jax.jit(lambda t: coefficients.coefficient_row(hyper, t))(state[0].count)
        c = dict(zip(coefficients.NAMES, np.asarray(row), strict=True))
        assert c["c1"] == c["c2"] == c["c1_next"] == 1
        leaf = (np.asarray(x["w"]) for x in (grads, params, state[0].mu, state[0].nu))
        want = reference.adam_leaf(
            "step", c, np.float32(1), np.bool_(False), *leaf, nesterov=nesterov
        )
        params, state = tx.step(grads, state, params)
        assert_same_bits(params["w"], want.params)


def test_without_bias_correction_for_leaves_that_optax_steps():
    """Complex leaves, too: after one step mu = (1 - b1) g, and the update is mu / sqrt(nu)."""
    tx = jda.fused_adam(0.1, b1=0.5, b2=0.75, eps=0.0, bias_correction=False)
    params = {"z": jnp.zeros(2, jnp.complex64)}
    grads = {"z": jnp.asarray([3 + 4j, 1j], jnp.complex64)}
    updates, _ = tx.update(grads, tx.init(params), params)
    want = -0.1 * np.asarray([0.5 * (3 + 4j) / (0.5 * 5), 0.5j / 0.5])
    np.testing.assert_allclose(updates["z"], want, rtol=1e-6)


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


@pytest.mark.parametrize("main", [None, F32], ids=str)
def test_hundred_steps_compile_once(main):
    """A schedule, a mask and a state that goes round: one program, also called without jit."""
    tx = jda.fused_adamw(
        optax.cosine_decay_schedule(1e-2, 100),
        weight_decay=optax.linear_schedule(0.1, 0.0, 100),
        mask=lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree),
        main_params_dtype=main,
    )
    params = random_tree(np.random.default_rng(5), BF16)
    state = tx.init(params)
    grads = jax.tree.map(lambda x: 0.1 * x, params)
    step = jax.jit(tx.step)
    eager = jda.tree_step.tree_step
    params, state = tx.step(grads, state, params)
    before = eager._cache_size()
    for _ in range(50):
        params, state = tx.step(grads, state, params)
    assert eager._cache_size() == before
    for _ in range(50):
        params, state = step(grads, state, params)
    assert step._cache_size() == 1


def test_trees_with_nothing_none_and_masked_nodes():
    """None and MaskedNode pass through; a tree without leaves is a tree."""
    tx = jda.fused_adamw(**HYPER)
    params = {"a": jnp.ones(3), "b": None, "c": optax.MaskedNode(), "d": ()}
    state = tx.init(params)
    new, state = tx.step(params, state, params)
    assert new["b"] is None and isinstance(new["c"], optax.MaskedNode) and new["d"] == ()
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(params))
    for empty in ({}, (), {"x": None}):
        updates, state = tx.update(empty, tx.init(empty), empty)
        assert updates == empty and int(state[0].count) == 1


def test_masked_leaves_are_left_to_others():
    """optax.masked and optax.partition hand out trees with MaskedNode in them."""
    params = {"a": jnp.ones((3, 2)), "b": jnp.ones(3)}
    grads = jax.tree.map(lambda x: x * 0.1, params)
    labels = {"a": "ours", "b": "sgd"}
    for make in (jda.fused_adamw, optax.adamw):
        tx = optax.partition({"ours": make(**HYPER), "sgd": optax.sgd(1.0)}, labels)
        updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
        np.testing.assert_allclose(updates["b"], -0.1, rtol=1e-6)
    masked = optax.masked(jda.fused_adamw(**HYPER), {"a": True, "b": False})
    updates, _ = masked.update(grads, masked.init(params), params)
    want, _ = jda.fused_adamw(**HYPER).update({"a": grads["a"]}, jda.fused_adamw(**HYPER).init({"a": params["a"]}), {"a": params["a"]})  # fmt: skip
    assert_same_bits(updates["a"], want["a"])
    assert updates["b"] is grads["b"] or (np.asarray(updates["b"]) == np.asarray(grads["b"])).all()


@pytest.mark.parametrize("dtype", ["complex64", "float64", "complex128"])
def test_other_numbers_are_left_to_optax(dtype):
    """In one tree with float32: bit for bit what jitted optax computes; float32 stays ours."""
    with jax.enable_x64(True):
        kwargs = HYPER | dict(mask={"a": True, "b": False, "f": True})
        ours, theirs = jda.fused_adamw(**kwargs), optax.adamw(**kwargs)
        rng = np.random.default_rng(6)

        def tree():
            z = rng.normal(size=(2, 50)) + 1j * rng.normal(size=(2, 50))
            z = z if dtype.startswith("complex") else z.real
            return {
                "a": jnp.asarray(z[0], dtype),
                "b": jnp.asarray(z[1], dtype),
                "f": jnp.ones(5, F32),
            }

        params = tree()
        state, their_state = ours.init(params), theirs.init(params)
        step = jax.jit(ours.step)
        their_step = jax.jit(
            lambda g, s, p: (lambda u, n: (optax.apply_updates(p, u), n))(*theirs.update(g, s, p))
        )
        their_params = params
        for _ in range(5):
            grads = tree()
            params, state = step(grads, state, params)
            their_params, their_state = their_step(grads, their_state, their_params)
        for name in ("a", "b"):
            for got, want in ((params, their_params), (state[0].mu, their_state[0].mu), (state[0].nu, their_state[0].nu)):  # fmt: skip
                assert got[name].dtype == want[name].dtype
                # the same expressions; XLA may contract them differently in another program
                eps = jnp.finfo(want[name].dtype).eps
                np.testing.assert_allclose(got[name], want[name], rtol=0, atol=float(50 * eps))
        assert params["f"].dtype == F32 and ours.update(grads, state, params)[0]["a"].dtype == dtype


@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_a_step_without_the_kernel_can_be_mapped_and_differentiated(transform):
    """Over the learning rate too, as optax's: nothing foreign stands in its program."""

    def stepped(tx, learning_rate, z):
        tx = tx(learning_rate, weight_decay=0.13)
        updates, _ = tx.update(z * (2 - 1j), tx.init(z), z)
        return optax.apply_updates(z, updates)

    def results(tx):
        if transform == "vmap":
            return jax.jit(jax.vmap(lambda rate, z: stepped(tx, rate, z)))(rates, z)
        return jax.jit(jax.grad(lambda rate: jnp.real(stepped(tx, rate, z)).sum()))(rates[0])

    rates = jnp.asarray([1e-2, 3e-3])
    z = jnp.asarray([[1 + 2j, 0.5j], [3 - 1j, 0.25]], jnp.complex64)
    ours = results(jda.inject_hyperparams(jda.fused_adamw))
    theirs = results(optax.inject_hyperparams(optax.adamw))
    assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


def test_main_params_of_leaves_that_optax_steps():
    """float64 gradients of bfloat16 params: optax's arithmetic, on the main parameters."""
    with jax.enable_x64(True):
        tx = jda.fused_adamw(1e-3, main_params_dtype=F32)
        params = applied = {"w": jnp.ones(5, BF16), "v": jnp.ones(4, BF16)}
        grads = {"w": jnp.full(5, 0.3, jnp.float64), "v": jnp.full(4, 0.3, BF16)}
        state = other = tx.init(params)
        for _ in range(20):
            params, state = tx.step(grads, state, params)
            updates, other = tx.update(grads, other, applied)
            applied = optax.apply_updates(applied, updates)
        np.testing.assert_allclose(state.main_params["w"], 1 - 20e-3, rtol=1e-4)
        for name in params:
            assert params[name].dtype == BF16
            assert_same_bits(params[name], state.main_params[name].astype(BF16))
            assert_same_bits(applied[name], params[name])


def test_works_with_map_params_and_tree_get():
    """optax.tree.map_params calls init with a placeholder; sharding annotations are made so."""
    for tx in (
        jda.fused_adamw(1e-3, mask={"w": True}),
        jda.fused_adamw(1e-3, main_params_dtype=F32),
    ):
        params = {"w": jnp.ones(3, BF16)}
        state = tx.init(params)
        doubled = optax.tree.map_params(tx, lambda x: x + 1, state)
        assert (np.asarray(optax.tree.get(doubled, "mu")["w"], np.float32) == 1).all()
        assert int(optax.tree.get(doubled, "count")) == 0
    assert (np.asarray(doubled.main_params["w"]) == 2).all()


def test_multi_steps_and_apply_if_finite():
    params = {"w": jnp.ones(4)}
    tx = optax.MultiSteps(jda.fused_adamw(1e-2), 2)
    state = tx.init(params)
    for expected in (True, False):
        updates, state = tx.update({"w": jnp.ones(4)}, state, params)
        assert bool((updates["w"] == 0).all()) == expected
    tx = optax.apply_if_finite(jda.fused_adamw(1e-2), 5)
    state = tx.init(params)
    updates, state = tx.update({"w": jnp.array([1.0, np.nan, 1.0, 1.0])}, state, params)
    assert not np.asarray(updates["w"]).any() and int(state.total_notfinite) == 1
    assert not np.asarray(state.inner_state[0].mu["w"]).any()


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


@pytest.mark.parametrize("kind", [None, jnp.float32])
def test_parameters_keep_the_layout_that_the_caller_asks_for(kind):
    """A parameter that lies column by column comes back so, with the bits of one that does not."""
    dtype = jnp.bfloat16 if kind else jnp.float32
    tx = jda.fused_adamw(**HYPER, main_params_dtype=kind)
    rng = np.random.default_rng(12)
    params, grads = ({"w": jnp.asarray(rng.normal(size=(48, 40)), dtype)} for _ in range(2))
    columns = Format(Layout((1, 0)), params["w"].sharding)
    results = []
    for placement in (params["w"].format, columns):
        placed = jax.device_put(params, {"w": placement})
        step = jax.jit(tx.step, donate_argnums=(1, 2), out_shardings=({"w": placement}, None))
        state = tx.init(placed)
        for _ in range(3):
            placed, state = step(grads, state, placed)
        assert placed["w"].format.layout.major_to_minor == placement.layout.major_to_minor
        results.append((placed, state))
    assert columns.layout.major_to_minor != params["w"].format.layout.major_to_minor
    assert_trees_same_bits(results[1], results[0])
