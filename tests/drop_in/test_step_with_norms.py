"""``tx.step_with_norms``: the step's bits, and norms of gradients, parameters and updates."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from support.bits import assert_trees_same_bits
from support.samples import few

HYPER = dict(learning_rate=0.05, b1=0.87, b2=0.9973, eps=1e-7, weight_decay=0.13)
CODES = dict(mu_dtype="block8", nu_dtype="block8", rounding="stochastic", seed=1)
CASES = {
    "float32": (jnp.float32, {}),
    "bfloat16": (jnp.bfloat16, {}),
    "main parameters": (jnp.bfloat16, dict(main_params_dtype=jnp.float32)),
    "remainders": (jnp.bfloat16, dict(main_params_dtype="remainder16")),
    "codes": (jnp.float32, CODES),
    "codes, remainders": (jnp.bfloat16, CODES | dict(main_params_dtype="remainder16")),
    "frozen": (
        jnp.float32,
        dict(
            param_labels={"tall": "body", "wide": "still", "odd": "body"},
            groups={"body": {}, "still": {"frozen": True}},
        ),
    ),
}


def tree(rng, dtype=jnp.float32):
    shapes = {"tall": (512, 24), "wide": (40, 256), "odd": (7,)}
    return {k: jnp.asarray(rng.normal(size=s), dtype) for k, s in shapes.items()}


def exact(params, state, tx):
    """Main parameters in float64, without frozen leaves."""
    mains = jda.main_params(params, state)
    frozen = {"wide"} if tx.algorithm.groups.row_of_leaves(params).count(None) else set()
    return {k: np.asarray(x, np.float64) for k, x in mains.items() if k not in frozen}


def norm(leaves):
    return np.sqrt(sum(np.square(x).sum() for x in leaves))


@few(1)
@pytest.mark.parametrize("case", CASES)
def test_norms_equal_those_of_float64_and_the_step_its_own_bits(case):
    """Derivation of the bound: 2^-24 for each rounding of a square, of which one passes through at
    most 40 (distributed/norms.py), halved by the root. The stored update is a difference of rounded
    numbers: codes round the parameters not at all, 16 bits do, so that these are only close."""
    dtype, options = CASES[case]
    tx, rng = jda.fused_adamw(**HYPER, **options), np.random.default_rng(0)
    params = tree(rng, dtype)
    state = tx.init(params)
    step, with_norms = jax.jit(tx.step), jax.jit(tx.step_with_norms)
    for _ in range(3):
        grads, before = tree(rng, dtype), exact(params, state, tx)
        want = step(grads, state, params)
        params, state, norms = with_norms(grads, state, params)
        assert_trees_same_bits((params, state), want)
        after = exact(params, state, tx)
        assert set(norms) == {"grad_norm", "param_norm", "update_norm"}
        assert all(x.dtype == jnp.float32 and x.shape == () for x in norms.values())
        bound = 41 * 2.0**-24
        of_grads = norm(np.asarray(grads[k], np.float64) for k in before)
        np.testing.assert_allclose(norms["grad_norm"], of_grads, rtol=bound)
        # A stored number differs from p - u by half a unit in its last place.
        unit = 2.0**-9 if case == "bfloat16" else 2.0**-24
        rounding = unit * norm(after.values())
        np.testing.assert_allclose(
            norms["param_norm"], norm(after.values()), rtol=bound, atol=rounding
        )
        updates = norm(after[k] - before[k] for k in before)
        np.testing.assert_allclose(norms["update_norm"], updates, rtol=bound, atol=2 * rounding)


@few(1)
@pytest.mark.parametrize("explicit", [False, True, "under set_mesh"])
@pytest.mark.parametrize("case", ["float32", "main parameters", "codes"])
@pytest.mark.parametrize("spec", ["replicated", "sharded", "two axes"])
def test_norms_of_a_sharded_state_count_every_element_once(case, spec, explicit):
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    devices = np.asarray(jax.devices("cpu")[:8]).reshape(4, 2)
    mesh = Mesh(devices, ("data", "model"), axis_types=(kind, kind))
    dtype, options = CASES[case]
    tx, rng = jda.fused_adamw(**HYPER, **options), np.random.default_rng(1)
    params, grads = tree(rng, dtype), tree(rng, dtype)
    state = tx.init(params)
    want_params, want_state, want = jax.jit(tx.step_with_norms)(grads, state, params)
    replicated = NamedSharding(mesh, P())
    if spec == "two axes" and case != "codes":
        placed = NamedSharding(mesh, P(None, "model"))
        params = {
            k: jax.device_put(x, replicated if k == "odd" else placed) for k, x in params.items()
        }
    else:
        params = jax.device_put(params, replicated)
    grads = jax.tree.map(lambda g, p: jax.device_put(g, p.sharding), grads, params)
    if spec != "replicated":
        shardings = jda.state_shardings(state, params, mesh, "data")
    else:
        shardings = jax.tree.map(lambda _: replicated, state)
    state = jax.device_put(state, shardings)
    under = jax.set_mesh(mesh) if explicit == "under set_mesh" else contextlib.nullcontext()
    with under:
        new_params, new_state, norms = jax.jit(tx.step_with_norms)(grads, state, params)
    assert_trees_same_bits((new_params, new_state), (want_params, want_state))
    for name, x in norms.items():
        np.testing.assert_allclose(x, want[name], rtol=41 * 2.0**-24)
        assert x.sharding.is_fully_replicated


def test_norms_in_a_chain_are_of_the_gradients_that_reach_the_optimizer():
    tx = jda.chain(optax.clip_by_global_norm(0.5), jda.fused_adamw(**HYPER))
    rng = np.random.default_rng(2)
    params, grads = tree(rng), tree(rng)
    _, _, norms = tx.step_with_norms(grads, tx.init(params), params)
    clipped, _ = optax.clip_by_global_norm(0.5).update(grads, optax.EmptyState())
    want = norm(np.asarray(x, np.float64) for x in clipped.values())
    np.testing.assert_allclose(norms["grad_norm"], want, rtol=41 * 2.0**-24)


def test_injected_hyperparameters_are_those_of_the_state():
    tx = jda.inject_hyperparams(jda.fused_adamw)(**HYPER)
    rng = np.random.default_rng(2)
    params, grads = tree(rng), tree(rng)
    state = tx.init(params)
    state.hyperparams["learning_rate"] = jnp.float32(0)
    new, state, norms = jax.jit(tx.step_with_norms)(grads, state, params)
    assert_trees_same_bits(new, params)
    assert float(norms["update_norm"]) == 0 and int(state.count) == 1


def test_leaves_that_optax_steps_count_too():
    tx = jda.fused_adamw(**HYPER)
    rng = np.random.default_rng(3)
    params = {"whole": jnp.arange(6), "w": jnp.asarray(rng.normal(size=9), jnp.float32)}
    grads = {k: jnp.asarray(rng.normal(size=x.shape), jnp.float32) for k, x in params.items()}
    new, _, norms = tx.step_with_norms(grads, tx.init(params), params)
    for name, leaves in (
        ("grad_norm", grads),
        ("param_norm", new),
        ("update_norm", jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), new, params)),
    ):
        want = norm(np.asarray(x, np.float64) for x in jax.tree.leaves(leaves))
        np.testing.assert_allclose(norms[name], want, rtol=1e-6)


def test_squares_of_leaves_that_optax_steps_do_not_overflow():
    tx = jda.fused_adamw(1.0)
    params = {"large": jnp.full(2, 100_000), "small": jnp.full(3, 200, jnp.uint8)}
    grads = jax.tree.map(lambda x: jnp.full(x.shape, 300, jnp.float16), params)
    new, _, norms = tx.step_with_norms(grads, tx.init(params), params)
    for name, leaves in (("grad_norm", grads), ("param_norm", new)):
        want = norm(np.asarray(x, np.float64) for x in jax.tree.leaves(leaves))
        np.testing.assert_allclose(norms[name], want, rtol=1e-6)


def test_norms_of_nothing_are_zero():
    tx = jda.fused_adamw(1e-3)
    for params in ({}, {"w": jnp.ones((0, 3))}):
        norms = tx.step_with_norms(params, tx.init(params), params)[2]
        assert [float(x) for x in norms.values()] == [0, 0, 0]


def test_what_has_no_norms_says_so(cpu_mesh):
    tx, params = jda.fused_adamw(1e-3), {"w": jnp.ones((2, 3))}
    state = tx.init(params)
    with pytest.raises(jda.PolicyError, match=r"jax\.vmap over 2"):
        states = jax.vmap(tx.init)(params)
        jax.vmap(tx.step_with_norms)(params, states, params)
    with pytest.raises(jda.PolicyError, match="derivative"):
        jax.grad(lambda p: tx.step_with_norms(p, state, p)[2]["grad_norm"])(params)
    distributed = jda.distributed(jda.fused_adamw(1e-3), mesh=cpu_mesh(2))
    with pytest.raises(jda.PolicyError, match=r"Pass norms=\"total\""):
        distributed.step_with_norms(params, state, params)
    with pytest.raises(jda.PolicyError, match="replaced"):
        tx._replace(step=tx.step, update=lambda *_: None).step_with_norms(params, state, params)
