"""``scale_by_adam`` and its neighbours: optax's parts one by one, and one kernel in ``jda.chain``."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdistadam as jda
from support.bits import assert_trees_same_bits
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


def by_step(tx, grads, state, params):
    return tx.step(grads, state, params)


def by_update(tx, grads, state, params):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


CASES = {
    "numbers": {},
    "schedules": dict(rate=SCHEDULE, decay=SCHEDULE),
    "no mask": dict(decay_mask=None),
    "nesterov": dict(nesterov=True),
    "bfloat16 moments": dict(mu_dtype=jnp.bfloat16),
}


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
    tx = jda.chain(*parts(jda), optax.scale(0.5))
    whole = optax.chain(*parts(jda), optax.scale(0.5))
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
