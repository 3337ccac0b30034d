"""jda.chain: optax's combinator, with the fused step kept."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from support.bits import assert_trees_same_bits
from support.compilations import num_compilations
from support.exact_sums import exact_batch, linear_loss, make_tx, random_params
from support.samples import often
from support.trees import HYPER, random_tree


def test_chain_is_optax_chain_with_a_step():
    """3 clipped steps: the state of optax.chain, and gradients times one number."""
    inner = jda.fused_adamw(**HYPER)
    clip = optax.clip_by_global_norm(1.0)
    ours, theirs = jda.chain(clip, inner), optax.chain(clip, inner)
    rng = np.random.default_rng(0)
    params = by_hand = random_tree(rng)
    state, adam_state = ours.init(params), inner.init(params)
    assert_trees_same_bits(state, theirs.init(params))

    def clipped(grads):  # XLA would divide in place of multiplying by a quotient
        factor = np.float32(1.0) / np.asarray(jax.jit(optax.tree.norm)(grads))
        return jax.tree.map(lambda g: np.asarray(g) * factor, grads)

    step, update, hand_update, hand_step = map(
        jax.jit, (ours.step, ours.update, inner.update, inner.step)
    )
    for _ in range(3):
        grads = random_tree(rng, scale=3.0)
        by_hand_updates, _ = hand_update(clipped(grads), adam_state, params)
        assert_trees_same_bits(update(grads, state, params)[0], by_hand_updates)
        params, state = step(grads, state, params)
        by_hand, adam_state = hand_step(clipped(grads), adam_state, by_hand)
        assert_trees_same_bits((params, state[1]), (by_hand, adam_state))


def test_chain_whose_last_has_no_step_updates_and_applies():
    rng = np.random.default_rng(1)
    params, grads = random_tree(rng), random_tree(rng)
    tx = jda.chain(jda.fused_adamw(**HYPER), optax.clip(0.5))
    updates, want_state = tx.update(grads, tx.init(params), params)
    got, state = tx.step(grads, tx.init(params), params)
    assert_trees_same_bits(got, optax.apply_updates(params, updates))
    assert_trees_same_bits(state, want_state)


def test_chains_nest_and_pass_extra_arguments():
    seen = []

    def spy(updates, state, params=None, **extra):
        seen.append(extra)
        return updates, state

    spying = optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), spy)
    tx = jda.chain(spying, jda.chain(spying, jda.fused_adam(1e-2)))
    params = {"w": jnp.ones(3)}
    tx.step(params, tx.init(params), params, value=3)
    tx.update(params, tx.init(params), params, value=4)
    assert seen == [{"value": 3}] * 2 + [{"value": 4}] * 2


def test_wrong_chains_and_states_raise(cpu_mesh):
    main = jda.fused_adamw(1e-3, main_params_dtype=jnp.float32)
    with pytest.raises(
        jda.PolicyError, match="chain, transformation 0: params must follow its main"
    ):
        jda.chain(main, optax.clip(0.5)).init({"w": jnp.ones(3, jnp.bfloat16)})
    tx = make_tx(cpu_mesh(2))
    with pytest.raises(
        jda.PolicyError, match="transformation 1: a distributed optimizer must come last"
    ):
        jda.chain(optax.identity(), tx, optax.scale(0.5))
    with pytest.raises(jda.PolicyError, match="chain: empty"):
        jda.chain()
    two = jda.chain(optax.scale(1.0), jda.fused_adam(1e-3))
    with pytest.raises(
        jda.TreeError, match="opt_state: not a state of this chain: got 3 parts, expected 2"
    ):
        two.step({}, (1, 2, 3), {})


@pytest.mark.parametrize("accumulate_steps", [1, 3])
@often(lambda accumulate_steps: accumulate_steps == 3)
def test_distributed_chain_trains_exports_and_returns(cpu_mesh, accumulate_steps):
    """Halving gradients in the chain is halving the loss: powers of two, so bit for bit."""
    plain = make_tx(cpu_mesh(2))
    chained = jda.chain(optax.scale(0.5), optax.scale_by_schedule(lambda count: 1.0), plain)
    states = [jda.TrainState.create(random_params(), tx) for tx in (chained, plain)]
    steps = [
        jda.train_step(linear_loss, chained, accumulate_steps=accumulate_steps),
        jda.train_step(
            lambda p, b: linear_loss(p, b) / 2, plain, accumulate_steps=accumulate_steps
        ),
    ]
    rng = np.random.default_rng(2)
    for _ in range(3):
        batch = exact_batch(rng)
        (states[0], metrics), (states[1], want) = (
            s(x, batch) for s, x in zip(steps, states, strict=True)
        )
    assert_trees_same_bits(states[0].params, states[1].params)
    assert float(metrics["grad_norm"]) == float(want["grad_norm"])
    main, opt_state, extra = jda.to_optax_state(states[0], chained)
    assert int(opt_state[1].count) == 3 and int(opt_state[2][0].count) == 3
    other = jda.chain(
        optax.scale(0.5), optax.scale_by_schedule(lambda count: 1.0), make_tx(cpu_mesh(3))
    )
    moved = jda.from_optax_state(main, opt_state, other, extra)
    main, opt_state, extra = jda.to_optax_state(moved, other)
    assert_trees_same_bits(jda.from_optax_state(main, opt_state, chained, extra), states[0])


def scaled(factor):
    """Multiplies each gradient by a number that is computed from its parameter."""

    def update(grads, state, params):
        return jax.tree.map(lambda g, p: g * factor(p), grads, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def by_sum(p):
    return jnp.where(jnp.sum(p) > 0, 2.0, 0.5)


def by_size(p):
    return 2.0 if p.size > 10_000 else 1.0


SHARDED = [
    dict(sharding_strategy="optim_grads_params", reshard_after_forward=x) for x in (True, False)
]


def after_a_step(mesh, *transformations, **kwargs):
    tx = jda.chain(*transformations, make_tx(mesh, average_grads=False, **kwargs))
    state, batch = jda.TrainState.create(random_params(), tx), exact_batch(np.random.default_rng(6))
    state, _ = jda.train_step(linear_loss, tx)(state, batch)
    return jda.to_optax_state(state, tx)[:2]


def test_transformations_that_read_params_see_whole_ones_or_raise(cpu_mesh):
    """Whole ones as one device does; strategies that shard params raise when the chain is made."""
    got, want = (
        after_a_step(cpu_mesh(n), scaled(by_sum), sharding_strategy="optim_grads") for n in (8, 1)
    )
    assert_trees_same_bits(got, want)
    late = optax.masked(scaled(by_sum), {name: name == "rows" for name in random_params()})
    message = r"chain, transformation 1: it would see a device's shard of parameters, and it reads"
    for kwargs in SHARDED:
        with pytest.raises(jda.PolicyError, match=message):
            jda.chain(optax.scale(0.5), scaled(by_sum), make_tx(cpu_mesh(8), **kwargs))
        tx = jda.chain(optax.scale(0.5), late, make_tx(cpu_mesh(8), **kwargs))
        with pytest.raises(jda.PolicyError, match=message):
            jda.TrainState.create(random_params(), tx)


@pytest.mark.parametrize("kwargs", SHARDED)
@often(lambda kwargs: kwargs["reshard_after_forward"])
def test_transformations_see_shapes_of_unsharded_params(cpu_mesh, kwargs):
    mixed = optax.masked(scaled(by_size), {name: name != "scalar" for name in random_params()})
    got, want = (after_a_step(cpu_mesh(n), mixed, **kwargs) for n in (8, 1))
    assert_trees_same_bits(got, want)


@pytest.mark.parametrize("check_vma", [True, False])
@often(lambda check_vma: check_vma)
def test_every_piece_of_a_distributed_chain_agrees(cpu_mesh, check_vma):
    """update, step, grad_norm and the state's norm, for gradients and for accumulated ones."""
    tx = jda.chain(optax.scale(0.5), make_tx(cpu_mesh(4), mask=None))
    params = {"w": jnp.ones((4, 16))}
    state = tx.init(params)
    specs = (P(), tx.state_specs())

    def local(params, state, batch):
        grads = jax.grad(lambda p: jnp.sum(p["w"]) * jnp.mean(batch))(jda.local_params(params, tx))
        acc = tx.accumulate(tx.accumulate(tx.init_grads(params), grads, 2.0), grads)
        out = []
        for given in (grads, acc):
            new, after = tx.step(given, state, params)
            updates, other = tx.unwrapped().update(given, state, params)
            applied = optax.apply_updates(params, updates)
            norms = tx.grad_norm(given, state), after[1].grad_norm, other[1].grad_norm
            out.append((new, applied, jnp.stack(norms)))
        return out

    own = jax.shard_map(
        local, mesh=tx.config.mesh, in_specs=(*specs, P("data")), out_specs=P(), check_vma=check_vma
    )
    batch = jda.shard_batch(np.ones((4, 2), np.float32), tx)
    for new, applied, norms in jax.jit(own)(params, state, batch):
        np.testing.assert_allclose(norms, 0.5 * 8, rtol=1e-6)
        np.testing.assert_allclose(new["w"], applied["w"], rtol=1e-6)


def test_a_chain_owns_its_state_and_compiles_once(cpu_mesh):
    """What stands before a distributed optimizer may hold the caller's arrays: donation spares them."""
    size = jnp.float32(0.5)
    scale = optax.inject_hyperparams(optax.scale)(step_size=size)
    key = jax.random.key(5)
    keyed = optax.GradientTransformation(lambda params: {"key": key}, lambda g, s, p=None: (g, s))
    tx = jda.chain(scale, keyed, make_tx(cpu_mesh(2)))
    state = jda.TrainState.create(random_params(), tx)
    step = jda.train_step(linear_loss, tx)
    rng = np.random.default_rng(5)
    state, _ = step(state, exact_batch(rng))
    compiled = num_compilations()
    for _ in range(3):
        state, _ = step(state, exact_batch(rng))
    assert num_compilations() == compiled
    assert not size.is_deleted() and not key.is_deleted()
    *exported, extra = jda.to_optax_state(state, tx)
    again = jda.from_optax_state(*exported, tx, extra)
    batch = exact_batch(rng)
    (again, _), (state, _) = step(again, batch), step(state, batch)
    assert_trees_same_bits(again.params, state.params)
    assert np.array_equal(jax.random.key_data(again.opt_state[1]["key"]), jax.random.key_data(key))
