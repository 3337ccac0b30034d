"""jda.MultiSteps and jda.apply_if_finite: optax's wrappers, with the fused step."""

import copy
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from support.bits import assert_trees_same_bits
from support.samples import few
from support.steps import by_update
from support.trees import HYPER, random_tree

MADE = {
    "fused_adamw": lambda: jda.fused_adamw(**HYPER),
    "fused_adam": lambda: jda.fused_adam(2e-2, l2=0.1),
    "bfloat16": lambda: jda.fused_adamw(**HYPER),
    "schedules": lambda: jda.fused_adamw(
        optax.linear_schedule(0.1, 0.01, 3), weight_decay=optax.linear_schedule(0.2, 0.0, 5)
    ),
    "chain": lambda: jda.chain(optax.clip(0.5), optax.trace(0.5), jda.fused_adamw(**HYPER)),
    "parts": lambda: jda.chain(jda.scale_by_adam(), jda.scale_by_learning_rate(0.1)),
    "inject_hyperparams": lambda: jda.inject_hyperparams(jda.fused_adamw)(
        optax.linear_schedule(0.1, 0.01, 3), weight_decay=0.1
    ),
    "groups": lambda: jda.fused_adamw(
        **HYPER,
        param_labels=lambda params: {k: "ab"[i % 2] for i, k in enumerate(sorted(params))},
        groups={"a": {"frozen": True}, "b": {"lr_scale": 0.5}},
    ),
    "quantized": lambda: jda.fused_adamw(
        **HYPER, mu_dtype="block8", nu_dtype="block8", rounding="stochastic", seed=3
    ),
    "main parameters": lambda: jda.fused_adamw(**HYPER, main_params_dtype=jnp.float32),
    "remainders": lambda: jda.fused_adamw(**HYPER, main_params_dtype="remainder16"),
}
BFLOAT16 = ("bfloat16", "main parameters", "remainders")


def test_leaves_that_optax_steps_are_kept_too():
    """Integers, whose first moments become floats in the first step, skipped or not."""
    tx = jda.MultiSteps(jda.fused_adamw(**HYPER), 2)
    params = {"whole": jnp.asarray([5, -7])}
    state, grads = tx.init(params), {"whole": jnp.asarray([2.0, 3.0])}
    for n in range(4):
        new, state = tx.step(grads, state, params)
        is_kept = np.array_equal(new["whole"], params["whole"])
        assert is_kept == (n % 2 == 0) or n == 3
        assert np.array_equal(state.inner_opt_state[0].mu["whole"] == 0, [n == 0] * 2)
        params = new


def test_gradients_of_complex_params_need_complex_sums():
    """optax keeps the imaginary part of the last gradient alone."""
    params = {"z": jnp.asarray([1 + 2j, 0.5j], jnp.complex64)}
    with pytest.raises(jda.DtypeError, match=r"^params\['z'\]: complex, but sums"):
        jda.MultiSteps(jda.fused_adamw(**HYPER), 2).init(params)

    def loss(params, x):
        return jnp.sum(jnp.square(jnp.abs(params["z"] - x)))

    adamw = jda.fused_adamw(**HYPER)
    tx = jda.MultiSteps(adamw, 2, accumulator_dtype=jnp.complex64)
    state, new = tx.init(params), params
    grads = [jax.grad(loss)(params, x) for x in (1 - 3j, 2 + 5j)]
    for one in grads:
        new, state = tx.step(one, state, new)
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *grads)
    want, _ = adamw.step(mean, adamw.init(params), params)
    assert np.all(np.imag(new["z"]) != np.imag(params["z"]))
    np.testing.assert_allclose(new["z"], want["z"], rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_accumulated_steps_have_the_same_bits_outside_of_jit(dtype):
    """Means were rounded after each operation: seen if XLA optimizes, as in .ci/long."""
    rng = np.random.default_rng(5)
    params = {"w": jnp.asarray(rng.normal(size=(64, 512)), dtype)}
    adamw = jda.fused_adamw(1e-2, main_params_dtype=jnp.float32)
    tx = jda.MultiSteps(jda.chain(optax.clip_by_global_norm(0.5), adamw), 3)
    grads = [{"w": jnp.asarray(rng.normal(size=(64, 512)), dtype)} for _ in range(6)]
    results = []
    for step in (tx.step, jax.jit(tx.step)):
        new, state = params, tx.init(params)
        for one in grads:
            new, state = step(one, state, new)
        results.append((new, state))
    assert_trees_same_bits(*results)


def params_of(case, rng):
    """Leaves of every size."""
    dtype = jnp.bfloat16 if case in BFLOAT16 else jnp.float32
    params = jax.tree.map(lambda x: x.astype(dtype), dict(random_tree(rng)))
    params["large"] = jnp.asarray(rng.normal(size=(64, 96)), dtype)
    return params


def grads_like(params, rng):
    """Multiples of 1/16: exact in a chain, whatever the compiler fuses."""

    def one(x):
        return jnp.asarray(np.round(16 * rng.normal(size=x.shape)) / 16, x.dtype)

    return jax.tree.map(one, params)


@jax.jit
def mean_with(acc, grads, n):
    """The mean of n gradients and one more, as optax computes it."""
    return jax.tree.map(lambda a, g: a + (g - a) / (n + 1), acc, grads)


@few(1)
@pytest.mark.parametrize("case", MADE)
def test_a_step_on_accumulated_gradients_and_nothing_in_between(case):
    """Four steps: by hand, the optimizer's own step on the mean of three, or two, gradients."""
    rng = np.random.default_rng(0)
    inner, k = MADE[case](), 2 if case == "chain" else 3
    tx = jda.MultiSteps(inner, k)
    params = by_hand = params_of(case, rng)
    state, inner_state = tx.init(params), inner.init(params)
    assert_trees_same_bits(state, optax.MultiSteps(inner, k).init(params))
    step, inner_step = jax.jit(tx.step), jax.jit(inner.step)
    for i in range(4):
        acc = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), params)
        for n in range(k):
            grads, before = grads_like(params, rng), (params, state.inner_opt_state)
            acc = mean_with(acc, grads, jnp.int32(n))
            params, state = step(grads, state, params)
            assert bool(tx.has_updated(state)) == (n == k - 1)
            if n < k - 1:
                assert_trees_same_bits((params, state.inner_opt_state), before)
                assert_trees_same_bits(state.acc_grads, acc)
        mean = jax.tree.map(lambda a, g: a.astype(g.dtype), acc, grads)
        by_hand, inner_state = inner_step(mean, inner_state, by_hand)
        assert_trees_same_bits((params, state.inner_opt_state), (by_hand, inner_state))
        assert (int(state.mini_step), int(state.gradient_step)) == (0, i + 1)
        assert all(not x.any() for x in jax.tree.leaves(state.acc_grads))


@few(1)
@pytest.mark.parametrize("mean", [True, False])
def test_every_call_equals_update_of_optax(mean):
    """With float32 leaves, a varying k and calls that are rejected: the same parameters, state."""

    def skip(updates, gradient_step, params):
        del gradient_step, params
        first = jax.tree.leaves(updates)[0].reshape(-1)[0]
        return first > 0.8, {"first": first}

    def k_of(step):
        return jnp.where(step < 2, 2, 3)

    rng = np.random.default_rng(1)
    made = MADE["chain"]()
    ours = jda.MultiSteps(made, k_of, mean, skip)
    theirs = optax.MultiSteps(made, k_of, mean, skip)
    params = their_params = random_tree(rng)
    state, their_state = ours.init(params), theirs.init(params)

    their_step = jax.jit(functools.partial(by_update, theirs))
    step, rejected = jax.jit(ours.step), 0
    for _ in range(12):
        grads = random_tree(rng)
        rejected += int(jax.tree.leaves(grads)[0].reshape(-1)[0] > 0.8)
        params, state = step(grads, state, params)
        their_params, their_state = their_step(grads, their_state, their_params)
        assert_trees_same_bits(params, their_params)
        zeros_without_sign = jax.tree.map(
            lambda x: x + 0 if x.dtype == jnp.float32 else x, their_state
        )
        assert_trees_same_bits(state, zeros_without_sign)
    assert 0 < rejected < 12 and int(state.gradient_step) >= 3


@few(1)
@pytest.mark.parametrize("case", MADE)
def test_steps_with_non_finite_gradients_are_skipped_until_there_are_too_many(case):
    rng = np.random.default_rng(2)
    inner = MADE[case]()
    tx = jda.apply_if_finite(inner, 2)
    params = params_of(case, rng)
    state = tx.init(params)
    assert_trees_same_bits(state, optax.apply_if_finite(inner, 2).init(params))
    step = jax.jit(tx.step)
    for bad in (False, True, True, False):
        grads = grads_like(params, rng)
        if bad:
            grads["large"] = grads["large"].at[3, 5].set(jnp.nan)
        before = params, state.inner_state
        want = before if bad else jax.jit(inner.step)(grads, state.inner_state, params)
        params, state = step(grads, state, params)
        assert_trees_same_bits((params, state.inner_state), want)
        assert bool(state.last_finite) != bad
    assert int(state.total_notfinite) == 2 and int(state.notfinite_count) == 0
    for i in range(3):
        grads = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), grads)
        before, (params, state) = params, step(grads, state, params)
        is_as_before = all(
            np.array_equal(*pair, equal_nan=False)
            for pair in zip(jax.tree.leaves(before), jax.tree.leaves(params), strict=True)
        )
        assert is_as_before == (i < 2)


def test_wrappers_in_each_other_keep_all_states_of_a_skipped_call():
    """apply_if_finite around MultiSteps: a bad call counts nowhere. The other way: a bad mean."""
    rng = np.random.default_rng(3)
    params = random_tree(rng)
    bad = jax.tree.map(lambda x: jnp.full_like(x, jnp.inf), params)

    def first_element(updates, gradient_step, params):
        del gradient_step, params
        return jnp.bool_(False), jax.tree.leaves(updates)[0].reshape(-1)[0]

    inner = jda.MultiSteps(jda.fused_adamw(**HYPER), 2, should_skip_update_fn=first_element)
    outer = jda.apply_if_finite(inner, 5)
    state = outer.init(params)
    good = random_tree(rng)
    _, once = outer.step(good, state, params)
    same, skipped = outer.step(bad, once, params)
    assert_trees_same_bits((same, skipped.inner_state), (params, once.inner_state))
    new, last = outer.step(good, skipped, params)
    assert int(last.inner_state.gradient_step) == 1
    assert not np.array_equal(jax.tree.leaves(new)[0], jax.tree.leaves(params)[0])

    inner = jda.MultiSteps(jda.apply_if_finite(jda.fused_adamw(**HYPER), 5), 2)
    state = inner.init(params)
    same, state = inner.step(bad, state, params)
    assert int(state.inner_opt_state.total_notfinite) == 0  # not asked yet
    same, state = inner.step(good, state, same)
    assert_trees_same_bits(same, params)
    assert int(state.inner_opt_state.total_notfinite) == 1


def test_the_compiled_step_has_one_kernel_call_and_no_second_accumulator():
    """Params, moments and sums are donated: temporary memory is below one of them.

    The compiler of jax 0.10 copies the sums on CPU, as it does without the barrier.
    """
    params = {"w": jnp.ones((512, 512))}
    tx = jda.MultiSteps(jda.fused_adamw(**HYPER), 4)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads):
        return tx.step(grads, state, params)

    compiled = step.lower(params, tx.init(params), params).compile()
    assert compiled.as_text().count('custom_call_target="jdistadam_adam"') == 1
    memory = compiled.memory_analysis()
    is_old = jax.__version_info__ < (0, 11)
    assert memory.temp_size_in_bytes < (1.01 if is_old else 0.01) * params["w"].nbytes
    assert memory.alias_size_in_bytes >= 4 * params["w"].nbytes


def test_a_sharded_state_stays_where_it_is(cpu_mesh):
    mesh = cpu_mesh(8)
    rng = np.random.default_rng(4)
    params = {"w": jnp.asarray(rng.normal(size=(16, 24)), jnp.float32)}
    tx = jda.MultiSteps(jda.fused_adamw(**HYPER), 2)
    state = tx.init(params)
    want = params, state
    params = jax.device_put(params, NamedSharding(mesh, P()))
    state = jax.device_put(state, jda.state_shardings(state, params, mesh))
    assert state.acc_grads["w"].sharding.spec == P("data", None)
    for _ in range(4):
        grads = {"w": jnp.asarray(rng.normal(size=(16, 24)), jnp.float32)}
        want = jax.jit(tx.step)(grads, want[1], want[0])
        params, state = jax.jit(tx.step)(grads, state, params)
        assert state.acc_grads["w"].sharding.spec[0] == "data"
        assert state.inner_opt_state[0].mu["w"].sharding.spec[0] == "data"
    assert_trees_same_bits((params, state), want)


@few(1)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("init", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_sums_are_sharded_like_params_from_the_start(init, axis_type):
    devices = jax.devices("cpu")[:8]
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(axis_type,) * 2, devices=devices)
    params = {"w": jax.device_put(jnp.ones((8, 16)), NamedSharding(mesh, P("x", "y")))}
    tx = jda.MultiSteps(jda.fused_adamw(**HYPER), 2, should_skip_update_fn=optax.skip_not_finite)
    state = init(tx.init)(params)
    assert state.acc_grads["w"].sharding.spec == P("x", "y")
    whole = jax.tree.map(jnp.asarray, jax.device_get(params))
    want = whole, tx.init(whole)
    for i in range(4):
        grads = jax.tree.map(lambda x, i=i: (i + 1) / 7 * x, params)
        want = jax.jit(tx.step)(jax.device_get(grads), want[1], want[0])
        params, state = jax.jit(tx.step)(grads, state, params)
    assert_trees_same_bits((params, state), want)


def test_shards_and_replicated_leaves_in_one_shard_map(cpu_mesh):
    """A barrier of jax 0.10 made all leaves vary like shards, which out_specs refused."""
    tx, theirs = (make(optimizer, 2) for make, optimizer in (
        (jda.MultiSteps, jda.fused_adamw(**HYPER)), (optax.MultiSteps, optax.adamw(**HYPER))
    ))  # fmt: skip
    mesh, params = cpu_mesh(4), {"cut": jnp.ones((8, 3)), "whole": jnp.arange(4.0)}

    def spec(path, _):
        return P("data") if "['cut']" in jax.tree_util.keystr(path) else P()

    state, want, their_state = tx.init(params), params, theirs.init(params)
    specs = jax.tree_util.tree_map_with_path(spec, (params, state))
    place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    placed, state = jax.tree.map(place, (params, state), specs)
    step = jax.shard_map(
        lambda params, state: tx.step(params, state, params),
        mesh=mesh, in_specs=specs, out_specs=specs,
    )  # fmt: skip
    for _ in range(2):
        placed, state = jax.jit(step)(placed, state)
        updates, their_state = theirs.update(want, their_state, want)
        want = optax.apply_updates(want, updates)
    for got, expected in zip(*map(jax.tree.leaves, (placed, want)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_flax_and_nnx_call_the_step():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    optimizer = jda.flax.Optimizer(model, jda.MultiSteps(jda.fused_adamw(0.1), 2), wrt=nnx.Param)
    before = np.asarray(model.kernel[...])
    for i in range(2):
        optimizer.update(model, nnx.grad(lambda model: model(jnp.ones(2)).sum())(model))
        assert np.array_equal(before, model.kernel[...]) == (i == 0)
    params = {"w": jnp.ones(3)}
    tx = jda.apply_if_finite(jda.fused_adamw(0.1), 2)
    ours = jda.flax.TrainState.create(apply_fn=None, params=params, tx=tx)
    theirs = TrainState.create(apply_fn=None, params=params, tx=tx)
    for grad in (1.0, jnp.nan, 2.0):
        grads = {"w": jnp.full(3, grad)}
        ours, theirs = (x.apply_gradients(grads=grads) for x in (ours, theirs))
        assert_trees_same_bits(ours.params, theirs.params)
        assert_trees_same_bits(ours.opt_state, theirs.opt_state)


def test_optimizers_without_a_fused_step_raise(cpu_mesh):
    distributed = jda.distributed(jda.fused_adamw(1e-3), mesh=cpu_mesh(2))
    replaced = jda.fused_adamw(1e-3)._replace(step=lambda g, s, p: (p, s))
    for tx, said in (
        (optax.adamw(1e-3), "Write jda.chain"),
        (jda.chain(jda.fused_adamw(1e-3), optax.clip(0.5)), "jda.add_decayed_weights and what"),
        (replaced, "its functions were replaced"),
        (distributed, "accumulate_steps="),
    ):
        for wrap in (jda.MultiSteps, jda.apply_if_finite):
            with pytest.raises(jda.PolicyError, match=said):
                wrap(tx, 2)
            with pytest.raises(jda.PolicyError, match="accumulate_steps, for apply_if_finite"):
                jda.distributed(wrap(jda.fused_adamw(1e-3), 2), mesh=cpu_mesh(2))


@pytest.mark.parametrize("given", [0, -1, 2.5, "2", None, True])
def test_wrong_numbers_raise(given):
    tx = jda.fused_adamw(1e-3)
    with pytest.raises(jda.HyperparameterError, match=r"^every_k_schedule"):
        jda.MultiSteps(tx, given)
    if given != 0:
        with pytest.raises(jda.HyperparameterError, match=r"^max_consecutive_errors"):
            jda.apply_if_finite(tx, given)


def test_every_k_may_be_an_array():
    params = {"w": jnp.ones(3)}
    states = []
    for k in (2, jnp.int32(2), np.int64(2)):
        tx = jda.MultiSteps(jda.fused_adamw(1e-3), k)
        state = tx.init(params)
        states.append([f(params, state, params) for f in (tx.step, tx.update)])
    for other in states[1:]:
        assert_trees_same_bits(other, states[0])


def test_a_mean_that_is_not_finite_is_forgotten_after_the_step():
    """optax multiplies it by zero, and it stays."""
    tx = jda.MultiSteps(jda.apply_if_finite(jda.fused_adamw(1e-2), 5), 2)
    params = {"w": jnp.ones(3)}
    state = tx.init(params)
    for grad in (jnp.nan, 1.0, 1.0, 1.0):
        params, state = tx.step({"w": jnp.full(3, grad)}, state, params)
    assert int(state.inner_opt_state.total_notfinite) == 1
    assert int(state.inner_opt_state.inner_state[0].count) == 1


def test_a_copy_and_a_tree_map_keep_the_step():
    tx = jda.MultiSteps(jda.fused_adamw(1e-2), 2)
    params = {"w": jnp.ones(3)}
    want = tx.step(params, tx.init(params), params)
    rebuild, arguments, *_ = tx.__reduce_ex__(2)  # as pickle does
    copies = copy.copy(tx), copy.deepcopy(tx), rebuild(*arguments)
    for other in (*copies, jax.tree.map(lambda f: f, tx), tx._replace()):
        assert_trees_same_bits(other.step(params, other.init(params), params), want)
        assert jda.apply_if_finite(other, 1).step is not None


@pytest.mark.parametrize("decision", [jnp.int32(0), 0, jnp.zeros(2, bool), "no"], ids=str)
def test_a_decision_that_is_no_bool_raises(decision):
    """``~0`` is true: nothing changed any more but the number of steps. optax raises, too."""
    params = {"w": jnp.ones(3)}
    good = jda.MultiSteps(jda.fused_adamw(1e-2), 2, should_skip_update_fn=optax.skip_not_finite)
    state = good.init(params)
    skips = lambda *args: (decision, state.skip_state)  # noqa: E731
    tx = jda.MultiSteps(jda.fused_adamw(1e-2), 2, should_skip_update_fn=skips)
    said = "^should_skip_update_fn: its decision is not one bool"
    for call in (tx.step, tx.update, jax.jit(tx.step)):
        with pytest.raises(jda.HyperparameterError, match=said):
            call(params, state, params)
    if isinstance(decision, jax.Array):
        theirs = optax.MultiSteps(optax.adamw(1e-2), 2, should_skip_update_fn=skips)
        with pytest.raises(ValueError, match="boolean scalar"):
            theirs.update(params, theirs.init(params), params)


@pytest.mark.parametrize("decision", [False, True, np.bool_(False)], ids=str)
def test_a_decision_may_be_a_bool_of_python(decision):
    params = {"w": jnp.ones(3)}
    results = []
    for given in (decision, jnp.bool_(decision)):
        tx = jda.MultiSteps(
            jda.fused_adamw(1e-2), 2, should_skip_update_fn=lambda *args, given=given: (given, ())
        )
        now, state = params, tx.init(params)
        for _ in range(3):
            now, state = tx.step(params, state, now)
        updates, last = tx.update(params, state, now)
        results.append((now, state, updates, last))
    assert_trees_same_bits(*results)
    assert int(state.gradient_step) == (0 if decision else 1)


def test_states_of_other_optimizers_raise():
    params = {"w": jnp.ones(3)}
    inner = jda.fused_adamw(1e-3)
    for tx in (jda.MultiSteps(inner, 2), jda.apply_if_finite(inner, 2)):
        with pytest.raises(jda.TreeError, match="not a state of"):
            tx.step(params, inner.init(params), params)


@few(1)
@pytest.mark.parametrize("jitted", [True, False])
@pytest.mark.parametrize("main", [None, jnp.float32, "remainder16"], ids=str)
def test_members_decide_for_themselves(main, jitted):
    """Bits of separate calls where counts and non-finite gradients differ."""
    inner = jda.fused_adamw(**HYPER, main_params_dtype=main)
    tx = jda.apply_if_finite(jda.MultiSteps(inner, 2), 3)
    rng = np.random.default_rng(5)
    dtype = jnp.float32 if main is None else jnp.bfloat16
    shapes = {"w": (3, 4, 5), "b": (3, 7)}
    params = {k: jnp.asarray(rng.normal(size=s), dtype) for k, s in shapes.items()}
    state = jax.vmap(tx.init)(params)
    first = jnp.asarray([0, 1, 0], jnp.int32)
    state = state._replace(inner_state=state.inner_state._replace(mini_step=first))
    member = lambda tree, i: jax.tree.map(lambda x: x[i], tree)  # noqa: E731
    alone = [(member(params, i), member(state, i)) for i in range(3)]
    many, one = jax.vmap(tx.step), jax.jit(tx.step)
    many = jax.jit(many) if jitted else many
    for n in range(10):
        grads = {k: jnp.asarray(rng.normal(size=s), dtype) for k, s in shapes.items()}
        if n % 3 == 1:
            grads["b"] = grads["b"].at[n % 2, 0].set(jnp.nan)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "step: skipped for some of 3 members")
            params, state = many(grads, state, params)
        alone = [one(member(grads, i), s, p) for i, (p, s) in enumerate(alone)]
        assert_trees_same_bits([(member(params, i), member(state, i)) for i in range(3)], alone)


def test_derivatives_of_members_that_skip_are_finite():
    tx = jda.apply_if_finite(jda.fused_adamw(**HYPER), 3)
    params = {"w": jnp.ones((2, 3))}
    state = jax.vmap(tx.init)(params)
    grads = {"w": jnp.ones((2, 3)).at[0, 1].set(jnp.nan)}

    def total(params):
        return jnp.sum(jax.vmap(tx.step)(grads, state, params)[0]["w"])

    with pytest.warns(UserWarning, match="skipped for some of 2"):
        by_params = jax.grad(total)(params)["w"]
    assert_trees_same_bits(by_params[0], jnp.ones(3))
    assert np.allclose(by_params[1], 1 - HYPER["learning_rate"] * HYPER["weight_decay"])
