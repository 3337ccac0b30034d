"""``scale_by_adam`` and its neighbours: optax's parts one by one, and one kernel in ``jda.chain``."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdistadam as jda
from support.bits import assert_trees_same_bits
from support.samples import few
from support.steps import by_step, by_update
from support.ulp import assert_step_close

ADAM = dict(b1=0.87, b2=0.9973, eps=1e-7, eps_root=1e-9)
SCHEDULE = optax.linear_schedule(0.03, 0.01, 5)


def mask(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


def first_params(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    shapes = {"w": (37, 5), "b": (7,), "none": None}
    return {k: s and jnp.asarray(rng.normal(size=s), dtype) for k, s in shapes.items()}


def gradients(params, count=10):
    for i in range(count):
        rng = np.random.default_rng(i + 1)
        yield jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), params)  # noqa: B023


def parts(package, rate=0.02, decay=0.13, decay_mask=mask, **adam):
    return [
        package.scale_by_adam(**ADAM | adam),
        package.add_decayed_weights(decay, decay_mask),
        package.scale_by_learning_rate(rate),
    ]


def run(take, tx, params):
    """Params and state after ten jitted steps."""
    state = tx.init(params)
    step = jax.jit(lambda g, s, p: take(tx, g, s, p))
    for grads in gradients(params):
        params, state = step(grads, state, params)
    return params, state


CASES = {
    "numbers": {},
    "schedules": dict(rate=SCHEDULE, decay=SCHEDULE),
    "no mask": dict(decay_mask=None),
    "nesterov": dict(nesterov=True),
    "bfloat16 moments": dict(mu_dtype=jnp.bfloat16),
}


@few(1)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("take", [by_step, by_update])
def test_joined_parts_have_the_bits_of_fused_adamw(take, case):
    given = dict(rate=0.02, decay=0.13, decay_mask=mask) | CASES[case]
    whole = jda.fused_adamw(given.pop("rate"), weight_decay=given.pop("decay"), mask=given.pop("decay_mask"), **ADAM | given)  # fmt: skip
    joined = jda.chain(*parts(jda, **CASES[case]))
    params = first_params()
    got, want = run(take, joined, params), run(take, whole, params)
    assert_trees_same_bits(got[0], want[0])
    assert_trees_same_bits(jax.tree.leaves(got[1]), jax.tree.leaves(want[1]))
    assert jax.tree.structure(got[1]) == jax.tree.structure(optax.chain(*parts(optax, **CASES[case])).init(params))  # fmt: skip


FACTORS = {
    "schedule, scale": (SCHEDULE, lambda: [optax.scale_by_schedule(SCHEDULE), optax.scale(-1.0)]),
    "scale": (0.02, lambda: [optax.scale(-0.02)]),
    "scales": (0.02, lambda: [optax.scale(-1), optax.scale(np.float32(0.04)), optax.scale(0.5)]),
    "optax's rate": (SCHEDULE, lambda: [optax.scale_by_learning_rate(SCHEDULE)]),
    "scale, rate": (
        SCHEDULE,
        lambda: [optax.scale(-1.0), jda.scale_by_learning_rate(SCHEDULE, flip_sign=False)],
    ),
    "of an array": (0.02, lambda: [optax.scale(jnp.float32(-0.02))]),
}


@few(1)
@pytest.mark.parametrize("decays", [True, False])
@pytest.mark.parametrize("case", FACTORS)
def test_factors_of_optax_join_with_its_state(case, decays):
    """Factors that round their product differ from optax, which multiplies one after the other."""
    rate, factors = FACTORS[case][0], FACTORS[case][1]()
    adam, decay = jda.scale_by_adam(**ADAM), jda.add_decayed_weights(0.13, mask)
    joined = jda.chain(adam, *[decay] * decays, *factors)
    assert joined.is_fused and joined.why_not_fused == ""
    theirs = [optax.scale_by_adam(**ADAM), *[optax.add_decayed_weights(0.13, mask)] * decays]
    params = first_params()
    like = optax.chain(*theirs, *factors).init(params)
    assert jax.tree.structure(joined.init(params)) == jax.tree.structure(like)
    given = dict(weight_decay=0.13, mask=mask) if decays else {}
    whole = (jda.fused_adamw if decays else jda.fused_adam)(rate, **given, **ADAM)
    for take in (by_step, by_update):
        got, want = (run(take, tx, params) for tx in (joined, whole))
        assert_trees_same_bits(got[0], want[0])
        assert_trees_same_bits(jax.tree.leaves(got[1]), jax.tree.leaves(want[1]))
    state, (given_grads, *_) = joined.init(params), gradients(params)
    outside, _ = joined.step(given_grads, state, params)  # and outside of jit
    assert_trees_same_bits(outside, jax.jit(joined.step)(given_grads, state, params)[0])


def test_a_skipped_step_keeps_the_count_of_a_joined_schedule():
    factors = [optax.scale_by_schedule(SCHEDULE), optax.scale(-1.0)]
    parts_of = lambda p: [p.scale_by_adam(**ADAM), p.add_decayed_weights(0.13), *factors]  # noqa: E731
    ours = jda.apply_if_finite(jda.chain(*parts_of(jda)), 3)
    theirs = optax.apply_if_finite(optax.chain(*parts_of(optax)), 3)
    params = first_params()
    mine, others = (params, ours.init(params)), (params, theirs.init(params))
    for i, grads in enumerate(gradients(params, 5)):
        if i in (1, 2):
            grads = grads | {"b": grads["b"].at[0].set(jnp.nan)}
        mine = ours.step(grads, mine[1], mine[0])
        others = by_update(theirs, grads, others[1], others[0])
        counts = [x for x in jax.tree.leaves(mine[1]) if x.dtype == jnp.int32]
        assert counts == [x for x in jax.tree.leaves(others[1]) if x.dtype == jnp.int32]
    np.testing.assert_allclose(mine[0]["w"], others[0]["w"], rtol=1e-6, atol=1e-7)


WHY_NOT = {
    "nothing multiplies by a learning rate": lambda: [jda.scale_by_adam()],
    "no transformation in it": lambda: [optax.clip(1.0), optax.adam(0.1)],
    "transformation 1 and later ones follow": lambda: [
        jda.scale_by_adam(),
        optax.scale(jnp.ones(3)),
    ],
    "2 and later ones": lambda: [
        jda.scale_by_adam(),
        jda.add_decayed_weights(0.1),
        optax.clip(1.0),
        optax.scale(-1.0),
    ],
    "1 and later ones": lambda: [jda.fused_adamw(0.1), optax.clip(1.0)],
    "1 and later ones follow": lambda: [jda.chain(jda.fused_adamw(0.1), optax.clip(1.0))],
    "the step of transformation 1 cannot take": lambda: [
        optax.clip(1.0),
        jda.MultiSteps(jda.fused_adamw(0.1), 2),
        optax.scale(0.5),
    ],
}


@pytest.mark.parametrize("why", WHY_NOT)
def test_a_chain_says_why_it_is_not_fused(why):
    tx = jda.chain(*WHY_NOT[why]())
    assert not tx.is_fused and why in tx.why_not_fused
    with pytest.raises(jda.PolicyError, match=why):
        tx.step_with_norms({}, tx.init({}), {})


def test_optimizers_say_that_they_are_fused():
    adamw = jda.fused_adamw(0.1)
    distributed = jda.distributed(adamw, mesh=jax.make_mesh((1,), ("data",)))
    several = [adamw, jda.MultiSteps(adamw, 2), jda.apply_if_finite(adamw, 2), distributed]
    for tx in [*several, jda.inject_hyperparams(jda.fused_adamw)(0.1), jda.chain(distributed)]:
        assert tx.is_fused and tx.why_not_fused == ""
    assert adamw._replace(step=max).why_not_fused == "its functions were replaced"


def test_joined_parts_without_decay_have_the_bits_of_fused_adam():
    joined = jda.chain(jda.scale_by_adam(**ADAM), jda.scale_by_learning_rate(0.02))
    got, want = (run(by_step, tx, first_params()) for tx in (joined, jda.fused_adam(0.02, **ADAM)))
    assert_trees_same_bits(got[0], want[0])


def test_joined_parts_after_a_clip_keep_the_state_of_optax():
    clip = optax.clip_by_global_norm(0.5)
    joined = jda.chain(clip, *parts(jda))
    whole = jda.chain(clip, jda.fused_adamw(0.02, weight_decay=0.13, mask=mask, **ADAM))
    got, want = (run(by_step, tx, first_params()) for tx in (joined, whole))
    assert_trees_same_bits(got[0], want[0])
    like = optax.chain(clip, *parts(optax)).init(first_params())
    assert jax.tree.structure(got[1]) == jax.tree.structure(like)


@pytest.mark.parametrize("nesterov", [False, True])
def test_direction_is_that_of_optax(nesterov):
    """In ten steps from equal states, within the bounds of support/ulp.py."""
    ours, theirs = (p.scale_by_adam(**ADAM, nesterov=nesterov) for p in (jda, optax))
    params = first_params()
    state = theirs.init(params)
    assert jax.tree.structure(state) == jax.tree.structure(ours.init(params))
    hyper = ADAM | dict(learning_rate=1.0, weight_decay=0.0, nesterov=nesterov)
    for i, grads in enumerate(gradients(params)):
        got, got_state = jax.jit(ours.update)(grads, state, params)
        want, new = jax.jit(theirs.update)(grads, state, params)
        assert int(got_state.count) == int(new.count) == i + 1
        for name in ("w", "b"):
            results = (
                dict(params=u[name], mu=s.mu[name], nu=s.nu[name])
                for u, s in ((got, got_state), (want, new))
            )
            old = dict(params=0 * params[name], mu=state.mu[name], nu=state.nu[name])
            assert_step_close(*results, old, grads[name], hyper, i)
        state = new


def test_direction_of_16_bits_is_the_negative_update_of_fused_adam():
    tx, adam, params = (
        jda.scale_by_adam(**ADAM),
        jda.fused_adam(1.0, **ADAM),
        first_params(jnp.bfloat16),
    )
    updates, state = tx.update(params, tx.init(params), params)
    want, (want_state, _) = adam.update(params, adam.init(params), params)
    assert_trees_same_bits((jax.tree.map(jnp.negative, updates), state), (want, want_state))


def test_parts_compose_with_optax():
    """In optax.chain with optax's own parts: the kernel's direction, and optax does the rest."""
    mixed = optax.chain(jda.scale_by_adam(**ADAM), *parts(optax)[1:])
    joined = jda.chain(
        jda.scale_by_adam(**ADAM), *parts(optax)[1:]
    )  # unfused: closures are not read
    got, want = run(by_update, mixed, first_params()), run(by_step, joined, first_params())
    assert_trees_same_bits(got, want)
    masked = optax.masked(jda.scale_by_adam(), mask)
    updates, _ = masked.update(first_params(), masked.init(first_params()), first_params())
    assert_trees_same_bits(updates["b"], first_params()["b"])
    injected = optax.inject_hyperparams(jda.scale_by_adam)(b1=0.87)
    state = injected.init(first_params())
    assert set(state.hyperparams) >= {"b1", "b2"}
    jax.jit(injected.update)(first_params(), state)


def test_parts_that_do_not_end_a_chain_are_not_joined():
    tx = jda.chain(*parts(jda), optax.clip(0.01))
    whole = optax.chain(*parts(jda), optax.clip(0.01))
    assert_trees_same_bits(run(by_step, tx, first_params()), run(by_update, whole, first_params()))
    climbing = jda.chain(jda.scale_by_adam(), jda.scale_by_learning_rate(0.1, flip_sign=False))
    got, _ = climbing.step(
        {"w": jnp.ones(3)}, climbing.init({"w": jnp.ones(3)}), {"w": jnp.ones(3)}
    )
    assert float(got["w"][0]) > 1


def test_joined_parts_can_be_distributed_and_injected(cpu_mesh):
    mesh, params = cpu_mesh(2), {"w": jnp.ones((64, 8))}
    whole = jda.fused_adamw(0.02, weight_decay=0.13, **ADAM)
    results = []
    for adam in (jda.chain(*parts(jda, decay_mask=None)), whole):
        tx = jda.distributed(adam, mesh=mesh, max_grad_norm=1.0)
        step = jda.train_step(lambda p, x: jnp.mean(x @ p["w"]), tx)
        state, _ = step(jda.TrainState.create(params, tx), np.ones((4, 64), np.float32))
        results.append((state.params, state.opt_state))
    assert_trees_same_bits(*results)
    make = jda.inject_hyperparams(lambda learning_rate: jda.chain(*parts(jda, learning_rate)))
    got, _ = run(by_step, make(0.02), first_params())
    assert_trees_same_bits(got, run(by_step, jda.chain(*parts(jda)), first_params())[0])


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: jda.scale_by_adam(b1=1.5), jda.HyperparameterError),
        (lambda: jda.scale_by_adam(eps=-1.0), jda.HyperparameterError),
        (lambda: jda.scale_by_adam(mu_dtype="int8"), jda.PolicyError),
    ],
)
def test_arguments_out_of_range_raise(make, error):
    with pytest.raises(error):
        make()
