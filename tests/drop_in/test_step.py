"""A step of a tree: fused_adam, second moments in 16 bits, and the leaves that trees may hold."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding

import jdistadam as jda
from jdistadam.compat import crashes_on_empty_arrays
from jdistadam.core import hyperparameters
from jdistadam.core.hyperparameters import Hyperparameters
from jdistadam.drop_in.step import tree_step
from jdistadam.kernels import reference
from support.bits import assert_same_bits, assert_trees_same_bits
from support.samples import few, often
from support.trees import ADAM, BF16, F32, HYPER, random_tree
from support.ulp import assert_step_close


@few(1)
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("l2", [0.0, 0.07])
@often(lambda nesterov, l2: nesterov == (l2 > 0))
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


@few(1)
@pytest.mark.parametrize("param_dtype", [F32, BF16], ids=str)
def test_bfloat16_second_moment_is_the_reference_bit_for_bit(platform, param_dtype):
    kwargs = HYPER | dict(b2=0.97)
    tx = jda.fused_adamw(**kwargs, nu_dtype=BF16, mu_dtype=BF16)
    rng = np.random.default_rng(2)
    params = random_tree(rng, param_dtype)
    state = tx.init(params)
    hyper = Hyperparameters(**kwargs)
    row = jax.jit(lambda count: hyperparameters.coefficient_row(hyper, count))
    for count in range(10):
        grads = random_tree(rng, scale=10.0 ** rng.integers(-3, 3))
        named = dict(zip(hyperparameters.NAMES, np.asarray(row(count)), strict=True))
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


@pytest.mark.parametrize("nesterov", [False, True])
def test_without_bias_correction(platform, nesterov):
    """The moments as they are: the formula with c1 = c2 = 1, bitwise."""
    tx = jda.fused_adamw(**HYPER, nesterov=nesterov, bias_correction=False)
    rng = np.random.default_rng(9)
    params, state = {"w": jnp.asarray(rng.normal(size=300), F32)}, None
    state = tx.init(params)
    hyper = Hyperparameters(**HYPER, nesterov=nesterov, bias_correction=False)
    for _ in range(3):
        grads = {"w": jnp.asarray(rng.normal(size=300), F32)}
        row = jax.jit(lambda t: hyperparameters.coefficient_row(hyper, t))(state[0].count)
        c = dict(zip(hyperparameters.NAMES, np.asarray(row), strict=True))
        assert c["c1"] == c["c2"] == c["c1_next"] == 1
        leaf = (np.asarray(x["w"]) for x in (grads, params, state[0].mu, state[0].nu))
        want = reference.adam_leaf(
            "step", c, np.float32(1), np.bool_(False), *leaf, flags=hyper.flags
        )
        params, state = tx.step(grads, state, params)
        assert_same_bits(params["w"], want.params)


@pytest.mark.parametrize("main", [None, F32], ids=str)
@often(lambda main: main is not None)
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
    eager = tree_step
    params, state = tx.step(grads, state, params)
    before = eager._cache_size()
    for _ in range(50):
        params, state = tx.step(grads, state, params)
    assert eager._cache_size() == before
    for _ in range(50):
        params, state = step(grads, state, params)
    assert step._cache_size() == 1


LOW_PRECISION = {
    "float32": {},
    "remainder16": dict(main_params_dtype="remainder16"),
    "codes": dict(mu_dtype="block8", nu_dtype="block8", rounding="stochastic"),
}


@few(1)
@pytest.mark.parametrize("kept", LOW_PRECISION)
@pytest.mark.parametrize("old", ["carried", "constant", "sliced"])
@often(lambda old, kept: (old == "carried") == (kept == "remainder16"))
def test_a_loop_may_stack_results(platform, old, kept):
    """XLA for GPUs must not have the kernel read or write slices of the stacks."""
    rng = np.random.default_rng(4)
    tx = jda.fused_adamw(1e-2, weight_decay=0.1, **LOW_PRECISION[kept])
    dtype = BF16 if kept == "remainder16" else F32
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), random_tree(rng))
    grads = [jax.tree.map(lambda x: jnp.asarray(x, dtype), random_tree(rng)) for _ in range(4)]
    step, start = jax.jit(tx.step), (params, tx.init(params))

    def body(carry, slices):
        grads, (params, state) = slices if old == "sliced" else (slices, carry)
        new = tx.step(grads, state, params)
        return (new if old == "carried" else carry), new

    many = jax.tree.map(lambda *x: jnp.stack(x), *grads)
    if old == "sliced":
        many = many, jax.tree.map(lambda x: jnp.stack([x] * len(grads)), start)
    _, got = jax.jit(lambda many: jax.lax.scan(body, start, many))(many)
    before = start
    for i, one in enumerate(grads):
        want = step(one, before[1], before[0])
        assert_trees_same_bits(jax.tree.map(lambda x, i=i: x[i], got), want)
        before = want if old == "carried" else start


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


@pytest.mark.parametrize("kind", [None, jnp.float32])
@often(lambda kind: kind is not None)
def test_parameters_keep_the_layout_that_the_caller_asks_for(kind):
    """A parameter that is stored column by column comes back so, with the bits of one that does not."""
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


@few(1)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
def test_updates_beside_new_params(dtype):
    """Of leaves of every kind; in 16 bits apply_updates of them is exactly the new parameter."""
    tx = jda.fused_adamw(1e-2, main_params_dtype=None if dtype == jnp.float32 else jnp.float32)
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(7, 5)), dtype), "none": None}
    grads = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), params)
    state = tx.init(params)
    want = jax.jit(tx.step)(grads, state, params)
    step = jax.jit(tx.step_with_updates, donate_argnums=(1, 2))
    copies = jax.tree.map(jnp.copy, (state, params))
    new, new_state, updates = step(grads, *copies)
    assert_trees_same_bits((new, new_state), want)
    difference = np.asarray(new["w"], np.float32) - np.asarray(params["w"], np.float32)
    assert_trees_same_bits(updates, {"w": difference, "none": None})
    if dtype == jnp.bfloat16:
        assert_trees_same_bits(optax.apply_updates(params, updates), new)


@few(1)
@pytest.mark.parametrize("dtype", ["complex64", "complex128", "float64", "int32", "uint8"])
def test_updates_of_other_dtypes_lose_nothing(dtype):
    """Differences of numbers that were rounded to float32 were real, or zero."""
    with jax.enable_x64(True):
        tx = jda.fused_adamw(1e-10 if dtype == "float64" else 3.0, weight_decay=0.0)
        start = {"float64": 1.0, "int32": 2**27 + 1}.get(dtype, 7)
        params = {"w": jnp.asarray(np.array([start, start, 0]).astype(dtype))}
        grads = {"w": jnp.asarray([0.5, -2.0, 1.0])}
        if "complex" in dtype:
            params["w"], grads["w"] = (
                x.astype(dtype) * (1 - 2j) for x in (params["w"], grads["w"])
            )
        new, _, updates = tx.step_with_updates(grads, tx.init(params), params)
        wide = np.result_type(params["w"].dtype, np.float64)
        want = np.asarray(new["w"]).astype(wide) - np.asarray(params["w"]).astype(wide)
        assert np.any(want) and (np.any(want.imag) or "complex" not in dtype)
        np.testing.assert_array_equal(np.asarray(updates["w"]), want.astype(updates["w"].dtype))
        is_wide = dtype in ("float64", "complex128", "complex64")
        assert updates["w"].dtype == (dtype if is_wide else jnp.float32)


@few(1)
@pytest.mark.parametrize("main", [None, F32], ids=str)
def test_shards_and_replicated_leaves_in_one_shard_map(cpu_mesh, main):
    """All leaves of a call became shards, which out_specs of the replicated ones refused."""
    dtype = F32 if main is None else BF16
    tx = jda.fused_adamw(**HYPER, main_params_dtype=main)
    rng = np.random.default_rng(5)
    params, grads = (random_tree(rng, dtype) | {"w": jnp.full((8, 3), x, dtype)} for x in (1, 2))
    if crashes_on_empty_arrays(cpu_mesh(2)):
        del params["empty"], grads["empty"]
    alone = jax.jit(tx.step)(grads, tx.init(params), params)

    def spec(path, _):
        return jax.P("data") if "['w']" in jax.tree_util.keystr(path) else jax.P()

    mesh, given = cpu_mesh(2), (grads, params, tx.init(params))
    specs = jax.tree_util.tree_map_with_path(spec, given)
    placed = jax.tree.map(
        lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), given, specs
    )
    step = jax.shard_map(
        lambda grads, params, state: tx.step(grads, state, params),
        mesh=mesh,
        in_specs=specs,
        out_specs=specs[1:],
    )
    assert_trees_same_bits(jax.jit(step)(*placed), alone)
