"""jda.chain and jda.inject_hyperparams: optax's combinators, with the fused step kept."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bits import num_compilations
from jax.sharding import PartitionSpec as P
from test_distributed import exact_batch, linear_loss, make_tx, random_params
from test_drop_in import HYPER, assert_trees_same_bits, random_tree

import jdistadam as jda
from jdistadam.compose import linearity


def test_chain_is_optax_chain_with_a_step():
    """10 clipped steps: state and updates of optax.chain; step equals clip, then the fused step."""
    inner = jda.fused_adamw(**HYPER)
    clip = optax.clip_by_global_norm(1.0)
    ours, theirs = jda.chain(clip, inner), optax.chain(clip, inner)
    rng = np.random.default_rng(0)
    params = by_hand = random_tree(rng)
    state, adam_state = ours.init(params), inner.init(params)
    assert_trees_same_bits(state, theirs.init(params))

    @jax.jit
    def hand_step(grads, adam_state, params):
        clipped, _ = clip.update(grads, optax.EmptyState())
        return inner.step(clipped, adam_state, params)

    for _ in range(10):
        grads = random_tree(rng, scale=3.0)
        assert_trees_same_bits(
            ours.update(grads, state, params), theirs.update(grads, state, params)
        )
        params, state = jax.jit(ours.step)(grads, state, params)
        by_hand, adam_state = hand_step(grads, adam_state, by_hand)
        assert_trees_same_bits((params, state[1]), (by_hand, adam_state))


def test_chain_whose_last_has_no_step_updates_and_applies():
    rng = np.random.default_rng(1)
    params, grads = random_tree(rng), random_tree(rng)
    tx = jda.chain(jda.fused_adamw(**HYPER), optax.scale(0.5))
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


def test_chain_refuses_what_would_go_wrong(cpu_mesh):
    main = jda.fused_adamw(1e-3, main_params_dtype=jnp.float32)
    with pytest.raises(
        jda.PolicyError, match="chain, transformation 0: params must follow its main"
    ):
        jda.chain(main, optax.scale(0.5)).init({"w": jnp.ones(3, jnp.bfloat16)})
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


schedule = optax.linear_schedule(1.0, 0.5, 10)
LINEAR = {
    "identity": optax.identity(),
    "scale": optax.scale(0.5),
    "schedule": optax.scale_by_schedule(schedule),
    "masked": optax.masked(optax.scale(2.0), {"a": True, "b": False}),
    "frozen": optax.masked(optax.set_to_zero(), {"a": True, "b": False}),
    "jitted": optax.stateless(jax.jit(lambda g, p: jax.tree.map(lambda x: jnp.where(x.shape[0] > 2, x, 3 * x), g))),
    "matrix": optax.stateless(lambda g, p: jax.tree.map(lambda x: jnp.ones((len(x), len(x))) @ x / 3, g)),
    "sum": optax.stateless(lambda g, p: jax.tree.map(lambda x: x - jnp.mean(x), g)),
}  # fmt: skip
NOT_LINEAR = {
    "clip_by_global_norm": optax.clip_by_global_norm(1e9),
    "clip": optax.clip(1.0),
    "clip_by_block_rms": optax.clip_by_block_rms(1.0),
    "adaptive_grad_clip": optax.adaptive_grad_clip(0.1),
    "normalize": optax.normalize_by_update_norm(),
    "trust_ratio": optax.scale_by_trust_ratio(),
    "rms": optax.scale_by_rms(),
    "zero_nans": optax.zero_nans(),
    "sign": optax.scale_by_sign(),
    "hidden_sign": optax.stateless(lambda g, p: jax.tree.map(lambda x: x + jnp.round(x), g)),
    "jitted": optax.stateless(jax.jit(lambda g, p: jax.tree.map(lambda x: x * x, g))),
    "apply_if_finite": optax.apply_if_finite(optax.identity(), 3),
    "decay": optax.add_decayed_weights(0.1),
    "constant": optax.stateless(lambda g, p: jax.tree.map(lambda x: x + 1, g)),
    "noise": optax.add_noise(0.1, 0.5, jax.random.key(0)),
    "trace": optax.trace(0.9),
    "ema": optax.ema(0.9),
}


@pytest.mark.parametrize("name", LINEAR)
def test_linear_transformations_are_found(name):
    assert linearity.why_not_linear(LINEAR[name], linearity.example_params()) is None


@pytest.mark.parametrize("name", NOT_LINEAR)
def test_others_are_refused_before_a_distributed_optimizer(cpu_mesh, name):
    """When the chain is made, and where the tree must be known first, when the state is made."""
    with pytest.raises(
        jda.PolicyError, match=r"chain, transformation 1: it would see each device's gradients"
    ):
        jda.chain(optax.scale(0.5), NOT_LINEAR[name], make_tx(cpu_mesh(2)))
    late = optax.masked(NOT_LINEAR[name], {k: True for k in random_params()})
    tx = jda.chain(late, make_tx(cpu_mesh(2)))
    with pytest.raises(
        jda.PolicyError, match=r"transformation 0: .*For clipping pass max_grad_norm"
    ):
        jda.TrainState.create(random_params(), tx)


@pytest.mark.parametrize("accumulate_steps", [1, 3])
def test_distributed_chain_trains_exports_and_returns(cpu_mesh, accumulate_steps):
    """Halving gradients in the chain is halving the loss: powers of two, so bit for bit."""
    plain = make_tx(cpu_mesh(8))
    chained = jda.chain(optax.scale(0.5), optax.scale_by_schedule(lambda count: 1.0), plain)
    states = [jda.TrainState.create(random_params(), tx) for tx in (chained, plain)]
    steps = [
        jda.train_step(linear_loss, chained, accumulate_steps=accumulate_steps),
        jda.train_step(
            lambda p, b: linear_loss(p, b) / 2, plain, accumulate_steps=accumulate_steps
        ),
    ]
    rng = np.random.default_rng(2)
    for _ in range(10):
        batch = exact_batch(rng)
        (states[0], metrics), (states[1], want) = (
            s(x, batch) for s, x in zip(steps, states, strict=True)
        )
    assert_trees_same_bits(states[0].params, states[1].params)
    assert float(metrics["grad_norm"]) == float(want["grad_norm"])
    main, opt_state = jda.to_optax_state(states[0], chained)
    assert int(opt_state[1].count) == 10 and int(opt_state[2][0].count) == 10
    other = jda.chain(
        optax.scale(0.5), optax.scale_by_schedule(lambda count: 1.0), make_tx(cpu_mesh(3))
    )
    moved = jda.from_optax_state(main, opt_state, other)
    again = jda.from_optax_state(*jda.to_optax_state(moved, other), chained)
    # the norm of the last gradient is not part of what optax keeps
    norm = states[0].opt_state[2].grad_norm
    own = again.opt_state[2]._replace(grad_norm=norm)
    assert_trees_same_bits(
        (again.params, *again.opt_state[:2], own), (states[0].params, *states[0].opt_state)
    )


def test_injected_hyperparameters_reach_the_step():
    """The learning rate is set between steps; one program; step and update agree."""
    tx = jda.inject_hyperparams(jda.fused_adamw)(1e-2, weight_decay=0.1, nesterov=True)
    theirs = optax.inject_hyperparams(optax.adamw)(1e-2, weight_decay=0.1, nesterov=True)
    params = random_tree(np.random.default_rng(3))
    state = tx.init(params)
    assert jax.tree.structure(state) == jax.tree.structure(theirs.init(params))
    step = jax.jit(tx.step)
    for lr in (1e-2, 5e-3, 0.0, 1e-3):
        state.hyperparams["learning_rate"] = jnp.float32(lr)
        grads = jax.tree.map(lambda x: 0.1 * x, params)
        updates, want_state = tx.update(grads, state, params)
        new, state = step(grads, state, params)
        assert_trees_same_bits(new, optax.apply_updates(params, updates))
        assert_trees_same_bits(state, want_state)
        assert (float(abs(new["w"] - params["w"]).max()) == 0) == (lr == 0)
        params = new
    assert step._cache_size() == 1


def test_injected_schedule_equals_the_schedule():
    kwargs = dict(
        weight_decay=0.1, b1=0.5, b2=0.25
    )  # exact powers: traced or not, the same numbers
    by_schedule = jda.fused_adamw(optax.linear_schedule(1e-2, 1e-3, 8), **kwargs)
    injected = jda.inject_hyperparams(jda.fused_adamw)(
        optax.linear_schedule(1e-2, 1e-3, 8), **kwargs
    )
    one = two = random_tree(np.random.default_rng(4))
    state, other = by_schedule.init(one), injected.init(two)
    for _ in range(10):
        grads = jax.tree.map(lambda x: 0.1 * x, one)
        one, state = by_schedule.step(grads, state, one)
        two, other = injected.step(grads, other, two)
        assert_trees_same_bits(one, two)
    assert float(other.hyperparams["learning_rate"]) == pytest.approx(1e-3)


def test_injected_numbers_stay_float32_for_bfloat16_params():
    """In bfloat16 a b2 of 0.999 is 1, and 1 - b2^t is zero."""
    params = {"w": jnp.ones(5, jnp.bfloat16)}
    tx = jda.inject_hyperparams(jda.fused_adamw)(1e-2)
    state = tx.init(params)
    assert state.hyperparams["b2"].dtype == jnp.float32
    new, _ = tx.step(params, state, params)
    assert np.isfinite(np.asarray(new["w"], np.float32)).all()


def test_inject_refuses_what_has_no_plain_step():
    with pytest.raises(
        jda.PolicyError, match="inject_hyperparams: cannot be used with this optimizer: got distrib"
    ):
        jda.inject_hyperparams(jda.distributed_fused_adamw)
    with pytest.raises(jda.PolicyError, match="got adamw, expected fused_adamw or fused_adam"):
        jda.inject_hyperparams(optax.adamw)(1e-3).init({"w": jnp.ones(3)})


def test_injected_numbers_are_checked_as_they_are_given():
    inject = jda.inject_hyperparams(jda.fused_adamw)
    for kwargs, message in (
        (dict(b1=1.5), r"b1: out of range: got 1.5"),
        (dict(eps=-1.0), r"eps: out of range: got -1.0"),
    ):
        with pytest.raises(jda.HyperparameterError, match=message):
            inject(1e-2, **kwargs)
    with pytest.raises(jda.PolicyError, match="nu_dtype: a second moment in bfloat16 cannot decay"):
        inject(1e-2, nu_dtype="bfloat16")
    wrapped = jda.inject_hyperparams(lambda learning_rate: jda.fused_adam(learning_rate))(1e-2)
    assert wrapped.init({"w": jnp.ones(3)}).hyperparams.keys() == {"learning_rate"}


def test_injected_schedules_of_every_number_and_a_mask():
    """As in optax any number may be a schedule; a mask is none."""
    mask = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)  # noqa: E731
    tx = jda.inject_hyperparams(jda.fused_adamw)(
        0.0, b1=lambda count: 0.5, weight_decay=0.5, mask=mask, mu_dtype=jnp.float32
    )
    params = {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}
    state = tx.init(params)
    assert set(state.hyperparams) == {
        "learning_rate",
        "b1",
        "b2",
        "eps",
        "eps_root",
        "weight_decay",
    }
    state.hyperparams["learning_rate"] = jnp.float32(0.01)
    zeros = jax.tree.map(jnp.zeros_like, params)
    new, _ = tx.step(zeros, state, params)
    assert (np.asarray(new["w"]) < 1).all() and (np.asarray(new["b"]) == 1).all()


def test_injected_adam_needs_no_params():
    tx = jda.inject_hyperparams(jda.fused_adam)(1e-2)
    grads = {"w": jnp.ones(3)}
    updates, _ = tx.update(grads, tx.init(grads))
    np.testing.assert_allclose(updates["w"], -0.01, rtol=1e-4)
    with_l2 = jda.inject_hyperparams(jda.fused_adam)(1e-2, l2=0.1)
    assert "l2" in with_l2.init(grads).hyperparams


@pytest.mark.parametrize("check_vma", [True, False])
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
            updates, other = tx.update(given, state, params)
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
    tx = jda.chain(scale, keyed, make_tx(cpu_mesh(8)))
    state = jda.TrainState.create(random_params(), tx)
    step = jda.train_step(linear_loss, tx)
    rng = np.random.default_rng(5)
    state, _ = step(state, exact_batch(rng))
    compiled = num_compilations()
    for _ in range(3):
        state, _ = step(state, exact_batch(rng))
    assert num_compilations() == compiled
    assert not size.is_deleted() and not key.is_deleted()
    exported = jda.to_optax_state(state, tx)
    again = jda.from_optax_state(*exported, tx)
    batch = exact_batch(rng)
    (again, _), (state, _) = step(again, batch), step(state, batch)
    assert_trees_same_bits(again.params, state.params)
    assert np.array_equal(jax.random.key_data(again.opt_state[1]["key"]), jax.random.key_data(key))
