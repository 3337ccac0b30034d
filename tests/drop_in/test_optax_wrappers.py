"""optax's wrappers around fused_adamw: what they make of optax.adamw, and of our updates, in bits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import jdistadam as jda
from support.bits import assert_same_bits, assert_trees_same_bits
from support.samples import few, often
from support.trees import BF16, F32, HYPER, random_tree

FROZEN = {"w": False, "b": True, "one": False, "scalar": True, "empty": False}
TRAINED = {name: not frozen for name, frozen in FROZEN.items()}
LABELS = {name: "frozen" if frozen else "trained" for name, frozen in FROZEN.items()}
RATE = HYPER["learning_rate"]


MAIN_DTYPES = {F32: F32, "remainder16": jnp.uint16}


def is_masked(x):
    return isinstance(x, optax.MaskedNode)


def add_unless_masked(x, param):
    return x if is_masked(x) else x + param.astype(x.dtype)


def odd(step, **extra):
    del extra
    return step % 2 == 1


WRAPPERS = {
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 3).gradient_transformation(),
    "MultiSteps skipping": lambda tx: optax.MultiSteps(tx, 2, should_skip_update_fn=optax.skip_not_finite).gradient_transformation(),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 5),
    "masked": lambda tx: optax.masked(tx, TRAINED),
    "partition": lambda tx: optax.partition({"trained": tx, "frozen": optax.sgd(1e-2)}, LABELS),
    "selective_transform": lambda tx: optax.selective_transform(tx, freeze_mask=FROZEN),
    "freeze": lambda tx: optax.chain(tx, optax.freeze(FROZEN)),
    "conditionally_transform": lambda tx: optax.conditionally_transform(tx, odd),
    "conditionally_mask": lambda tx: optax.conditionally_mask(tx, odd),
    "flatten": optax.flatten,
    "named_chain": lambda tx: optax.named_chain(("clip", optax.clip(0.5)), ("adam", tx)),
    "ema": lambda tx: optax.chain(tx, optax.ema(0.75)),
    "lookahead": lambda tx: optax.lookahead(tx, sync_period=3, slow_step_size=0.5),
    "schedule_free": lambda tx: contrib.schedule_free(tx, RATE, b1=0.9),
    "reduce_on_plateau": lambda tx: optax.chain(tx, contrib.reduce_on_plateau(patience=1, factor=0.5)),
    "mechanize": contrib.mechanize,
    "split_real_and_imaginary": contrib.split_real_and_imaginary,
}  # fmt: skip


def made_around(name, make):
    b1 = 0.0 if name == "schedule_free" else HYPER["b1"]
    return optax.with_extra_args_support(WRAPPERS[name](make(**HYPER | dict(b1=b1))))


def some_gradients(rng, name, step):
    """Of order one; the third holds a NaN for those that look for one."""
    grads = random_tree(rng)
    if name in ("apply_if_finite", "MultiSteps skipping") and step == 2:
        grads["b"] = grads["b"].at[3].set(jnp.nan)
    return grads


def assert_close(got, want, *, reads_params):
    """Two implementations of one step from the same state.

    tests/support/ulp.py bounds the update of a leaf by twice rate (4 ulp(r) + 2 ulp(m) / den) +
    ulp(u), where r, the ratio of the moments, m / den and weight_decay p stay below 4 with
    gradients of order one and at most six steps; u, below 0.02, has a smaller ulp than that. That
    is 12 rate ulp(4), and a wrapper's arithmetic on updates adds less than 4. One that computes
    updates from params adds two ulp of these, which stay below 4. A state holds params, or moments,
    for which ulp.py allows 4 ulp of operands below 4.
    """
    unit = float(np.spacing(np.float32(4)))
    (updates, state), (want_updates, want_state) = got, want
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(updates), jax.tree.leaves(want_updates), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=16 * RATE * unit + 2 * unit * reads_params)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(want_state), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=4 * unit)


# Of the others the tests below say more.
ALWAYS = ("apply_if_finite", "partition", "lookahead", "schedule_free", "mechanize")


@few(1)
@pytest.mark.parametrize("name", WRAPPERS)
@often(lambda name: name in ALWAYS)
def test_each_wrapper_makes_of_ours_what_it_makes_of_optax(name):
    """Six steps, each from equal state; types are equal too, the weak ones of a number included."""
    ours, theirs = made_around(name, jda.fused_adamw), made_around(name, optax.adamw)
    update, their_update = jax.jit(ours.update), jax.jit(theirs.update)
    rng = np.random.default_rng(11)
    params = random_tree(rng)
    if name == "lookahead":
        params = optax.LookaheadParams.init_synced(params)
    state = ours.init(params)
    assert_trees_same_bits(state, theirs.init(params))
    for step in range(6):
        grads = some_gradients(rng, name, step)
        extra = dict(value=jnp.float32([3, 1, 1, 1, 1, 1][step]), unknown=1)
        got = update(grads, state, params, **extra)
        want = their_update(grads, state, params, **extra)
        assert_close(got, want, reads_params=name in ("lookahead", "schedule_free", "mechanize"))
        assert jax.tree.map(jax.typeof, got) == jax.tree.map(jax.typeof, want)
        params, state = optax.apply_updates(params, want[0]), want[1]
    assert update._cache_size() == their_update._cache_size()


PASS_UPDATES_ON = (
    "MultiSteps", "MultiSteps skipping", "apply_if_finite", "masked", "partition",
    "selective_transform", "conditionally_mask", "flatten", "named_chain",
)  # fmt: skip


def of_trained(name, tree):
    """Without the leaves that the optimizer does not get."""
    if name not in ("masked", "partition", "selective_transform"):
        return tree
    return {key: x for key, x in tree.items() if TRAINED[key]}


@few(1)
@often(
    lambda name, kind: (
        (name, kind)
        in {
            ("MultiSteps skipping", F32),
            ("partition", "remainder16"),
            ("flatten", F32),
            ("apply_if_finite", "remainder16"),
        }
    )
)
@pytest.mark.parametrize("kind", [F32, "remainder16"], ids=["float32", "remainder16"])
@pytest.mark.parametrize("name", PASS_UPDATES_ON)
def test_main_params_under_a_wrapper_are_the_float32_run_under_it(name, kind):
    """Bitwise, skipped and accumulated steps too; params are always their rounded values."""
    ours = made_around(name, lambda **kwargs: jda.fused_adamw(main_params_dtype=kind, **kwargs))
    plain = made_around(name, jda.fused_adamw)
    update, plain_update = jax.jit(ours.update), jax.jit(plain.update)
    rng = np.random.default_rng(12)
    params = random_tree(rng, BF16)
    wide = jax.tree.map(lambda x: x.astype(F32), params)
    state, plain_state = ours.init(params), plain.init(wide)
    for step in range(6):
        grads = some_gradients(rng, name, step)  # float32, as apply_if_finite wants them
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        updates, plain_state = plain_update(grads, plain_state, wide)
        wide = optax.apply_updates(wide, updates)
        if name == "flatten":  # main parameters are one vector there
            flat, _ = jax.flatten_util.ravel_pytree(params)
            want, _ = jax.flatten_util.ravel_pytree(wide)
            main = jda.main_params(flat, state)
        else:
            main, want = of_trained(name, jda.main_params(params, state)), of_trained(name, wide)
            flat = of_trained(name, params)
        assert_trees_same_bits(main, want)
        if kind == F32:  # of the remainder's other rounding of ties see test_main_params.py
            assert_trees_same_bits(flat, jax.tree.map(lambda x: x.astype(BF16), main))


def test_main_params_of_two_optimizers_are_joined():
    """One of each kind, and a leaf of a third that keeps none."""
    labels = {"w": "a", "b": "b", "one": "a", "scalar": "c", "empty": "b"}
    kinds = {"a": F32, "b": "remainder16", "c": None}

    def partition(kinds):
        txs = {key: jda.fused_adamw(**HYPER, main_params_dtype=kind) for key, kind in kinds.items()}
        return optax.partition(txs, labels)

    tx, plain = partition(kinds), partition(dict.fromkeys(kinds))
    rng = np.random.default_rng(17)
    params, grads = random_tree(rng, BF16), random_tree(rng)
    wide = jax.tree.map(lambda x: x.astype(F32), params)
    updates, state = tx.update(grads, tx.init(params), params)
    params = optax.apply_updates(params, updates)
    wide = optax.apply_updates(wide, plain.update(grads, plain.init(wide), wide)[0])
    main = jda.main_params(params, state)
    assert_trees_same_bits(main | {"scalar": None}, wide | {"scalar": None})
    assert_same_bits(main["scalar"], params["scalar"])
    moved = {key: x.astype(F32) for key, x in params.items()}
    with pytest.raises(
        jda.DtypeError,
        match=r"opt_state\.main_params\['\w+'\]: does not fit its parameter: .* expected none beside float32",
    ):
        jda.main_params(moved, state)


def test_float32_updates_of_16_bit_gradients_do_not_fit_apply_if_finite():
    """It would return zeros of the gradients' dtype: JAX says so."""
    tx = optax.apply_if_finite(jda.fused_adamw(1e-2, main_params_dtype=F32), 5)
    params = {"w": jnp.ones(3, BF16)}
    with pytest.raises(TypeError, match=r"(?s)cond.*float32\[3\].*bfloat16\[3\]"):
        tx.update(params, tx.init(params), params)


@pytest.mark.parametrize("kind", [None, F32], ids=["none", "float32"])
@often(lambda kind: kind == F32)
def test_accumulated_steps_are_steps_on_the_mean(kind):
    """Whole numbers, of which the mean of two is exact: the bits of tx, every other step."""
    dtype = BF16 if kind else F32
    tx = jda.fused_adamw(**HYPER, main_params_dtype=kind)
    multi = optax.MultiSteps(tx, 2)
    rng = np.random.default_rng(13)
    params = by_hand = {"w": jnp.asarray(rng.normal(size=300), dtype)}
    state, own = multi.init(params), tx.init(params)
    for _ in range(3):
        pair = [{"w": jnp.asarray(rng.integers(-9, 9, 300), dtype)} for _ in range(2)]
        updates, state = jax.jit(multi.update)(pair[0], state, params)
        assert not np.asarray(updates["w"]).any()
        assert_trees_same_bits(state.inner_opt_state, own)
        updates, state = jax.jit(multi.update)(pair[1], state, params)
        params = optax.apply_updates(params, updates)
        mean = jax.tree.map(lambda a, b: (a + b) / 2, *pair)
        by_hand, own = tx.step(mean, own, by_hand)
        assert_trees_same_bits((params, state.inner_opt_state), (by_hand, own))


def test_a_skipped_step_changes_nothing():
    tx = jda.fused_adamw(**HYPER)
    finite = optax.apply_if_finite(tx, 5)
    params = random_tree(np.random.default_rng(14))
    state, own = finite.init(params), tx.init(params)
    for step in range(4):
        grads = jax.tree.map(lambda x: 0.1 * x, params)
        if step == 1:
            grads["one"] = jnp.full(1, jnp.inf)
        updates, state = finite.update(grads, state, params)
        if step == 1:
            assert not any(np.asarray(x).any() for x in jax.tree.leaves(updates))
        else:
            want, own = tx.update(grads, own, params)
            assert_trees_same_bits(updates, want)
        assert_trees_same_bits(state.inner_state, own)
        params = optax.apply_updates(params, updates)
    assert int(state.total_notfinite) == 1 and int(state.inner_state[0].count) == 3


@pytest.mark.parametrize("name", ["masked", "partition", "selective_transform", "freeze"])
def test_leaves_that_are_trained_get_the_bits_of_an_optimizer_of_their_own(name):
    tx, wrapped = jda.fused_adamw(**HYPER), made_around(name, jda.fused_adamw)
    rng = np.random.default_rng(15)
    params = random_tree(rng)
    trained = {key: x for key, x in params.items() if TRAINED[key]}
    state, own = wrapped.init(params), tx.init(trained)
    for _ in range(3):
        grads = random_tree(rng)
        updates, state = wrapped.update(grads, state, params)
        want, own = tx.update({key: grads[key] for key in trained}, own, trained)
        assert_trees_same_bits({key: updates[key] for key in trained}, want)
        for key in FROZEN.keys() - trained.keys():
            factor = {"masked": 1.0, "partition": -1e-2}.get(name, 0.0)
            assert_trees_same_bits(updates[key] + 0.0, factor * grads[key] + 0.0)
        params, trained = optax.apply_updates(params, updates), optax.apply_updates(trained, want)


@few(1)
@pytest.mark.parametrize("name", ["flatten", "conditionally_mask", "schedule_free", "lookahead", "reduce_on_plateau"])  # fmt: skip
def test_what_a_wrapper_takes_from_the_optimizer_is_its_update_in_bits(name):
    """Of each the part that it does not compute with other numbers."""
    kwargs = HYPER | (dict(b1=0.0) if name == "schedule_free" else {})
    tx, wrapped = jda.fused_adamw(**kwargs), made_around(name, jda.fused_adamw)
    rng = np.random.default_rng(16)
    params = random_tree(rng)
    given = optax.LookaheadParams.init_synced(params) if name == "lookahead" else params
    state, own = wrapped.init(given), tx.init(params)
    for step in range(2):
        grads = random_tree(rng)
        updates, new_state = wrapped.update(grads, state, given, value=jnp.float32(1))
        want, new_own = tx.update(grads, own, params)
        if name == "conditionally_mask" and not step:
            want, new_own = jax.tree.map(jnp.zeros_like, want), own
        if name == "schedule_free":
            assert_trees_same_bits(new_state.z, optax.apply_updates(state.z, want))
        elif name == "lookahead":  # the two steps before it synchronises
            assert_trees_same_bits(updates.fast, want)
            assert not any(np.asarray(x).any() for x in jax.tree.leaves(updates.slow))
        else:
            factor = 0.5 if name == "reduce_on_plateau" and step else 1  # no progress
            assert_trees_same_bits(updates, jax.tree.map(lambda x: x * factor, want))  # noqa: B023
        given, state, own = optax.apply_updates(given, updates), new_state, new_own
        params = given.fast if name == "lookahead" else given


@few(1)
@pytest.mark.parametrize("kind", [None, F32, "remainder16"], ids=["none", "float32", "remainder16"])
def test_tree_utilities_find_and_set_every_part_of_a_state(kind):
    """Get, set and map, through a wrapper too; a count that is set is the one of the next step."""
    tx = jda.fused_adamw(optax.linear_schedule(1e-2, 1e-3, 10), main_params_dtype=kind)
    params = {"w": jnp.ones(3, BF16), "b": jnp.ones(2)}
    grads = {"w": jnp.full(3, 0.5, BF16), "b": jnp.full(2, 0.5)}
    for wrapped in (tx, optax.chain(optax.clip(1.0), tx)):
        state = wrapped.init(params)
        counts = [value for _, value in optax.tree.get_all_with_path(state, "count")]
        assert len(counts) == 2 and not any(counts)
        mu = jax.tree.map(lambda x: jnp.full_like(x, 0.25), optax.tree.get(state, "mu"))
        state = optax.tree.set(state, mu=mu, count=jnp.int32(7))
        assert_trees_same_bits(optax.tree.get(state, "mu"), mu)
        updates, after = wrapped.update(grads, state, params)
        assert [int(x) for _, x in optax.tree.get_all_with_path(after, "count")] == [8, 8]
        b = np.asarray(updates["b"])  # rate 3.7e-3 at count 7: mu is 0.275 and nu 0.001 * 0.25
        nu_hat, mu_hat = 0.25e-3 / (1 - 0.999**8), 0.275 / (1 - 0.9**8)
        np.testing.assert_allclose(b, -3.7e-3 * (mu_hat / nu_hat**0.5 + 1e-4), rtol=1e-5)
        if kind:
            assert optax.tree.get(state, "main_params")["w"].dtype == MAIN_DTYPES[kind]
        # float32 leaves have no main parameter; optax's way of mapping over masked trees
        added = optax.tree.map_params(wrapped, add_unless_masked, after, params, is_leaf=is_masked)
        for name in ("w", "b"):
            old, new = (optax.tree.get(state, "nu")[name] for state in (after, added))
            assert_same_bits(new, old + 1)
        assert [int(x) for _, x in optax.tree.get_all_with_path(added, "count")] == [8, 8]
