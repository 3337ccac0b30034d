"""fused_adamw against optax.adamw."""

import copy
import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import freeze
from flax.training import train_state
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from jdistadam.drop_in.step import tree_step
from support.bits import assert_same_bits, assert_trees_same_bits
from support.samples import few, often
from support.ulp import assert_step_close

HYPER = dict(learning_rate=3e-3, b1=0.87, b2=0.9973, eps=1e-7, eps_root=1e-12, weight_decay=0.13)


def random_tree(rng, scale=1.0):
    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape) * scale, jnp.float32)

    return {
        "block": {"w": normal(65, 33), "b": normal(33)},
        "scale": normal(),
        "empty": normal(0, 3),
    }


@few(1)
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("grad_scale", [1e-6, 1.0, 1e3])
@often(lambda grad_scale, nesterov: nesterov == (grad_scale == 1.0))
def test_parity_with_jitted_optax(platform, grad_scale, nesterov):
    """10 steps, each from equal state, nothing at its default, zeros among the gradients.

    Starting every step from optax's state keeps Adam's chaos where nu is near zero from hiding, or
    faking, an error.
    """
    kwargs = HYPER | dict(nesterov=nesterov)
    ours, theirs = jda.fused_adamw(**kwargs), optax.adamw(**kwargs)
    rng = np.random.default_rng(0)
    params = random_tree(rng)
    state = theirs.init(params)
    their_update = jax.jit(theirs.update)
    for count in range(10):
        grads = jax.tree.map(
            lambda x: x * (rng.random(x.shape) > 0.1), random_tree(rng, grad_scale)
        )
        our_params, our_state = ours.step(grads, state, params)
        our_updates, _ = ours.update(grads, state, params)
        updates, new_state = their_update(grads, state, params)
        new_params = optax.apply_updates(params, updates)
        for x in zip(
            *map(jax.tree.leaves, (our_params, our_state[0].mu, our_state[0].nu, our_updates)),
            *map(jax.tree.leaves, (new_params, new_state[0].mu, new_state[0].nu, updates)),
            *map(jax.tree.leaves, (params, state[0].mu, state[0].nu, grads)),
            strict=True,
        ):
            got, want = (
                dict(zip(("params", "mu", "nu", "update"), x[i : i + 4], strict=True))
                for i in (0, 4)
            )
            old = dict(zip(("params", "mu", "nu"), x[8:11], strict=True))
            assert_step_close(got, want, old, x[11], kwargs, count)
        params, state = new_params, new_state


def test_step_equals_update_then_apply():
    """In float32 both add the same float32 update once."""
    tx = jda.fused_adamw(**HYPER)
    rng = np.random.default_rng(1)
    params, state = random_tree(rng), tx.init(random_tree(rng))
    for _ in range(10):
        grads = random_tree(rng)
        updates, other_state = tx.update(grads, state, params)
        applied = optax.apply_updates(params, updates)
        params, state = tx.step(grads, state, params)
        for a, b in zip(
            jax.tree.leaves((applied, other_state)), jax.tree.leaves((params, state)), strict=True
        ):
            assert np.array_equal(a, b)


def test_state_is_optax_pytree():
    """Structure and types, so that checkpoints and optax.tree work unchanged; nu is float32."""
    params = {"w": jnp.ones((3, 2), jnp.bfloat16), "b": jnp.ones(2)}
    mask = {"w": True, "b": False}
    schedule = optax.linear_schedule(1e-2, 1e-3, 10)
    for kwargs in (
        {},
        dict(mask=mask),
        dict(mu_dtype=jnp.bfloat16),
        dict(weight_decay=schedule, mask=mask),
    ):
        ours, theirs = jda.fused_adamw(schedule, **kwargs), optax.adamw(schedule, **kwargs)
        got, want = ours.init(params), theirs.init(params)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, want)
        _, new = ours.step(params, got, params)
        assert jax.tree.structure(new) == jax.tree.structure(want)
        assert jax.tree.map(lambda x: x.dtype, new) == jax.tree.map(lambda x: x.dtype, got)
        assert optax.tree.get(new, "mu")["w"].dtype == optax.tree.get(want, "mu")["w"].dtype
        assert optax.tree.get(new, "nu")["w"].dtype == jnp.float32


def test_schedules_and_mask_follow_optax():
    kwargs = dict(
        learning_rate=optax.linear_schedule(1e-2, 1e-3, 5),
        weight_decay=optax.linear_schedule(0.5, 0.1, 7),
        mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
    )
    ours, theirs = jda.fused_adamw(**kwargs), optax.adamw(**kwargs)
    rng = np.random.default_rng(2)
    params = random_tree(rng)
    ours_now = theirs_now = params
    ours_state, theirs_state = ours.init(params), theirs.init(params)
    for _ in range(12):
        grads = random_tree(rng)
        ours_now, ours_state = ours.step(grads, ours_state, ours_now)
        updates, theirs_state = jax.jit(theirs.update)(grads, theirs_state, theirs_now)
        theirs_now = optax.apply_updates(theirs_now, updates)
        for a, b in zip(jax.tree.leaves(ours_now), jax.tree.leaves(theirs_now), strict=True):
            # 12 steps of learning rate <= 1e-2, each within a few ulp of values of order one
            np.testing.assert_allclose(a, b, rtol=0, atol=12 * 4 * np.spacing(np.float32(4)))
    assert jax.tree.leaves(ours_state[1:]) == jax.tree.leaves(theirs_state[1:]) == [12, 12]


def test_masked_leaf_has_no_decay_at_all():
    tx = jda.fused_adamw(1e-2, weight_decay=0.5, mask={"a": True, "b": False})
    params = {"a": jnp.ones(5), "b": jnp.ones(5)}
    zeros = jax.tree.map(jnp.zeros_like, params)
    new, _ = tx.step(zeros, tx.init(params), params)
    assert (np.asarray(new["b"]) == 1).all() and (np.asarray(new["a"]) < 1).all()


def test_eager_jit_and_scan_give_the_same_bits():
    tx = jda.fused_adamw(
        optax.linear_schedule(1e-2, 1e-3, 10),
        **{k: v for k, v in HYPER.items() if k != "learning_rate"},
    )
    rng = np.random.default_rng(3)
    params = random_tree(rng)
    grads = jax.tree.map(lambda *x: jnp.stack(x), *(random_tree(rng) for _ in range(10)))

    def run(step):
        carry = (params, tx.init(params))
        for i in range(10):
            carry = step(jax.tree.map(lambda x: x[i], grads), carry[1], carry[0])  # noqa: B023
        return carry

    def scan(grads, params):
        body = lambda c, g: (tx.step(g, c[1], c[0]), None)  # noqa: E731
        return jax.lax.scan(body, (params, tx.init(params)), grads)[0]

    results = [run(tx.step), run(jax.jit(tx.step)), jax.jit(scan)(grads, params)]
    for other in results[1:]:
        for a, b in zip(jax.tree.leaves(results[0]), jax.tree.leaves(other), strict=True):
            assert np.array_equal(a, b)


@few(1)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("method", ["step", "update"])
@often(lambda axis_type, method: (axis_type == AxisType.Auto) == (method == "step"))
def test_sharded_arrays_are_neither_gathered_nor_changed(axis_type, method):
    """Without the partitioning rule XLA gathers every operand of the call onto every device."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), (axis_type,) * 2, devices=jax.devices("cpu")[:8])
    tx = jda.fused_adamw(**HYPER)
    rng = np.random.default_rng(4)
    specs = {"a": P("x", "y"), "b": P(None, "x"), "c": P()}
    host = {name: rng.normal(size=(16, 8)).astype(np.float32) for name in specs}
    params = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in host.items()}
    grads = jax.tree.map(lambda x: x * 0.3, params)
    fn = jax.jit(getattr(tx, method))
    text = fn.lower(grads, tx.init(params), params).compile().as_text()
    assert "jdistadam_adam" in text
    for collective in ("all-gather", "all-to-all", "collective-permute", "all-reduce"):
        assert collective not in text
    got, state = fn(grads, tx.init(params), params)
    single = jax.tree.map(jnp.asarray, host)
    want, want_state = getattr(tx, method)(
        jax.tree.map(lambda x: x * 0.3, single), tx.init(single), single
    )
    for name, spec in specs.items():
        assert_same_bits(got[name], want[name], name)
        assert_same_bits(state[0].nu[name], want_state[0].nu[name], name)
        assert got[name].sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
        assert state[0].mu[name].sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)


def test_donated_step_copies_nothing():
    """Arguments in the order of the results: jit pairs donated buffers of equal shape in order."""
    tx = jda.fused_adamw(**HYPER)
    params = random_tree(np.random.default_rng(5))

    def step(params, state, grads):
        return tx.step(grads, state, params)

    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, tx.init(params), params).compile()
    assert [
        line for line in compiled.as_text().splitlines() if re.search(r"f32\[.*\] copy\(", line)
    ] == []
    # all but the gradients is aliased: params, mu, nu (65 * 33 + 33 + 1 elements each) and count
    assert compiled.memory_analysis().alias_size_in_bytes == 3 * 4 * (65 * 33 + 33 + 1) + 4


def test_undonated_step_leaves_the_callers_arrays_alone():
    tx = jda.fused_adamw(**HYPER)
    params = random_tree(np.random.default_rng(6))
    before = jax.tree.map(np.array, params)
    state = tx.init(params)
    tx.step(params, state, params)
    jax.jit(tx.step)(params, state, params)
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(params), strict=True):
        assert_same_bits(a, b)
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(state))


def test_hundred_steps_compile_once():
    tx = jda.fused_adamw(optax.cosine_decay_schedule(1e-2, 100), weight_decay=0.1)
    params = random_tree(np.random.default_rng(7))
    state = tx.init(params)
    step = jax.jit(tx.step)
    params, state = step(params, state, params)
    for _ in range(100):
        params, state = step(params, state, params)
    assert step._cache_size() == 1


def test_traced_hyperparameters_through_inject_hyperparams():
    tx = optax.inject_hyperparams(jda.fused_adamw, static_args=("nesterov",))(
        learning_rate=1e-2, weight_decay=0.1
    )
    params = {"w": jnp.ones(8)}
    state = tx.init(params)
    grads = {"w": jnp.full(8, 0.5)}
    update = jax.jit(tx.update)
    big, _ = update(grads, state, params)
    state.hyperparams["learning_rate"] = jnp.float32(5e-3)
    small, _ = update(grads, state, params)
    np.testing.assert_allclose(big["w"], 2 * small["w"], rtol=1e-6)
    assert update._cache_size() == 1


def test_composes_in_optax_chain():
    tx = optax.chain(optax.clip_by_global_norm(1.0), jda.fused_adamw(**HYPER))
    other = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(**HYPER))
    rng = np.random.default_rng(8)
    params, grads = random_tree(rng), random_tree(rng, 10.0)
    got, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    want, _ = jax.jit(other.update)(grads, other.init(params), params)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-9)


@few(1)
@pytest.mark.filterwarnings("ignore:mu_dtype. a first moment in float16")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=str)
def test_16_bit_params_and_mixed_trees(dtype):
    """Updates have the gradients' dtype, params and moments keep theirs, in one mixed tree."""
    tx = jda.fused_adamw(1e-2, mu_dtype=dtype)
    params = {"low": jnp.ones((9, 5), dtype), "high": jnp.ones(7)}
    grads = {"low": jnp.full((9, 5), 0.5, dtype), "high": jnp.full(7, 0.25, dtype)}
    state = tx.init(params)
    updates, _ = tx.update(grads, state, params)
    assert {k: v.dtype for k, v in updates.items()} == {"low": dtype, "high": dtype}
    new, state = tx.step(grads, state, params)
    assert {k: v.dtype for k, v in new.items()} == {"low": dtype, "high": jnp.float32}
    np.testing.assert_allclose(np.asarray(new["high"]), 0.99, rtol=1e-4)


def test_eager_inject_hyperparams_compiles_once():
    """It makes a new optimizer at each call; compiling each would take a tenth of a second."""
    tx = optax.inject_hyperparams(jda.fused_adamw, static_args=("nesterov",))(learning_rate=0.012)
    params = {"w": jnp.ones(17)}
    state = tx.init(params)
    _, state = tx.update(params, state, params)
    before = tree_step._cache_size()
    for lr in (0.1, 0.2, 0.3):
        state.hyperparams["learning_rate"] = jnp.float32(lr)
        _, state = tx.update(params, state, params)
    assert tree_step._cache_size() == before


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["w", "activation", "is_on", "factor", "layers"],
    meta_fields=[],
)
@dataclasses.dataclass
class Module:
    """As in Equinox: a tree of parameters, functions, numbers and frozen layers."""

    w: Any
    activation: Any
    is_on: Any
    factor: Any
    layers: Any


def parts_of_a_module():
    """All of it, its trained parameters, and gradients: None for the rest."""
    ones, twos = jnp.ones(3), jnp.full(2, 2.0)
    whole = Module(ones, jax.nn.relu, True, 0.5, {"a": twos, "kept": ones, "i": jnp.arange(2)})
    trained = Module(ones, None, None, None, {"a": twos, "kept": None, "i": None})
    return whole, trained, jax.tree.map(lambda x: 0.3 * x, trained)


@few(1)
@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize(
    "options", [{}, dict(mask=lambda tree: jax.tree.map(lambda x: x.size > 2, tree))],
    ids=["plain", "masked"],
)  # fmt: skip
def test_params_may_be_a_whole_module(options, jitted):
    """Leaves without a gradient are not read, as in optax, whose masks need the trained ones."""
    whole, trained, grads = parts_of_a_module()
    results = []
    for make in (jda.fused_adamw, optax.adamw):
        tx = make(1e-2, weight_decay=0.1, **options)
        given = trained if options and make is optax.adamw else whole
        update = lambda g, s: tx.update(g, s, given)  # noqa: B023, E731
        results.append((jax.jit(update) if jitted else update)(grads, tx.init(trained))[0])
    assert jax.tree.structure(results[0]) == jax.tree.structure(results[1])
    for got, want in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w", "b"], meta_fields=[])
@dataclasses.dataclass
class CallableModule:
    """A module that can be called, as those of Equinox."""

    w: Any
    b: Any

    def __call__(self, x):
        return x @ self.w + self.b


def test_a_mask_may_be_a_module_that_can_be_called():
    """It is a tree, as in optax, unless all of its leaves can be called."""
    params = CallableModule(jnp.ones((4, 3)), jnp.ones(3))
    grads, mask = jax.tree.map(lambda x: 0.3 * x, params), CallableModule(True, False)
    results = []
    for make in (jda.fused_adamw, optax.adamw):
        tx = make(1e-2, weight_decay=0.1, mask=mask)
        results.append(jax.jit(tx.update)(grads, tx.init(params), params)[0])
    for got, want in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)
    labels = CallableModule("slow", "")
    groups = {"slow": dict(lr_scale=0.5), "": {}}
    tx = jda.fused_adamw(1e-2, param_labels=labels, groups=groups)
    new, _ = tx.step(grads, tx.init(params), params)
    np.testing.assert_allclose([1 - new.w[0, 0], 1 - new.b[0]], [0.005, 0.01], rtol=1e-3)


def test_params_that_nothing_reads_may_be_anything():
    params, grads = {"a": jnp.ones(3)}, {"a": jnp.full(3, 0.5)}
    tx = jda.fused_adam(1e-2)
    state = tx.init(params)
    want = tx.update(grads, state)
    whole, trained, of_module = parts_of_a_module()
    for given in (freeze(params), (), whole):
        assert_trees_same_bits(tx.update(grads, state, given), want)
    assert_trees_same_bits(
        tx.update(of_module, tx.init(trained), whole), tx.update(of_module, tx.init(trained))
    )


def test_a_gradient_that_is_missing_is_named():
    """A leaf with moments and without a gradient is a mistake, unlike one without both."""
    params = {"a": jnp.ones(3), "b": jnp.ones(2)}
    tx = jda.fused_adamw(1e-2)
    with pytest.raises(jda.TreeError, match=r"^grads\['b'\]: missing, params has it"):
        tx.update({"a": jnp.ones(3), "b": None}, tx.init(params), params)


def test_optax_injects_the_hyperparameters_of_its_adam():
    """``l2`` became an array: then an update needed params, and optax's states did not fit."""
    params = {"w": jnp.ones(3)}
    states, results = [], []
    for make in (jda.fused_adam, optax.adam):
        tx = optax.inject_hyperparams(make)(1e-2)
        states.append(tx.init(params))
        results.append(tx.update(params, states[0])[0]["w"])
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
    np.testing.assert_allclose(*results, rtol=1e-5)


def test_works_in_flax_train_state():
    rng = np.random.default_rng(9)
    params, grads = random_tree(rng), random_tree(rng)
    tx = jda.fused_adamw(**HYPER)
    state = train_state.TrainState.create(apply_fn=None, params=params, tx=tx)
    want, _ = tx.step(grads, tx.init(params), params)
    got = jax.jit(lambda s, g: s.apply_gradients(grads=g))(state, grads)
    assert int(got.step) == 1
    for a, b in zip(jax.tree.leaves(got.params), jax.tree.leaves(want), strict=True):
        assert np.array_equal(a, b)


def test_a_schedule_may_be_any_callable():
    @dataclasses.dataclass
    class Schedule:  # has no hash
        slope: float

        def __call__(self, count):
            return self.slope * count

    tx = jda.fused_adamw(Schedule(1e-2), weight_decay=Schedule(0.5))
    same = jda.fused_adamw(lambda count: 1e-2 * count, weight_decay=lambda count: 0.5 * count)
    params = {"w": jnp.ones(3)}
    state = tx.init(params)
    for _ in range(3):
        want, _ = same.step(params, state, params)
        params, state = tx.step(params, state, params)
        assert_same_bits(params["w"], want["w"])


def test_only_rates_and_decays_may_be_schedules():
    with pytest.raises(jda.HyperparameterError, match="b2: out of range: got <function"):
        jda.fused_adamw(1e-3, b2=lambda count: 0.9)


def test_transformations_can_be_copied():
    ours = jda.fused_adamw(1e-3)
    assert copy.copy(ours).step is ours.step
    for tx in (ours, optax.chain(ours)):
        again = copy.deepcopy(tx)
        params = {"w": jnp.ones(3)}
        updates, _ = again.update(params, again.init(params), params)
        assert updates["w"].shape == (3,) and (np.asarray(updates["w"]) < 0).all()
