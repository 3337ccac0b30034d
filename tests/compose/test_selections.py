"""``masked``, ``partition`` and ``named_chain``: optax's states and meaning, with the fused step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdistadam as jda
from support.bits import assert_trees_same_bits
from support.samples import few
from support.steps import by_step, by_update

ADAM = dict(b1=0.87, b2=0.9973, eps=1e-7, eps_root=1e-9)
HYPER = ADAM | dict(weight_decay=0.13)
SCHEDULE = optax.linear_schedule(0.03, 0.01, 7)
LABELS = {"w": "body", "b": "head", "n": {"x": "head", "y": "still", "none": None}}

CONFIGS = {
    "float32": ({}, "float32", "float32"),
    "narrow gradients": ({}, "float32", "bfloat16"),
    "main": (dict(main_params_dtype=jnp.float32), "bfloat16", "bfloat16"),
    "remainder": (dict(main_params_dtype="remainder16"), "bfloat16", "bfloat16"),
    "codes": (dict(mu_dtype="block8", nu_dtype="block16"), "float32", "float32"),
}


def random(seed, dtype="float32"):
    rng = np.random.default_rng(seed)
    shapes = {"w": (65, 67), "b": (33,), "n": {"x": (4, 3), "y": (5,), "none": None}}
    return jax.tree.map(
        lambda s: s and jnp.asarray(rng.normal(size=s), dtype),
        shapes,
        is_leaf=lambda s: isinstance(s, tuple),
    )


def run(tx, *, config="float32", take=by_step, steps=10, jitted=True, restored=False):
    _, param_dtype, grad_dtype = CONFIGS[config]
    params = random(0, param_dtype)
    state = tx.init(params)

    def step(g, s, p):
        return take(tx, g, s, p)

    step = jax.jit(step) if jitted else step
    for i in range(steps):
        if restored and i == steps // 2:
            leaves, treedef = jax.tree.flatten(state)
            state = treedef.unflatten([jnp.asarray(np.array(x)) for x in leaves])
        params, state = step(random(i + 1, grad_dtype), state, params)
    return params, state


def two(config, package=jda):
    """Two optimizers and a third that changes nothing."""
    options = CONFIGS[config][0]
    return package.partition(
        {
            "body": jda.fused_adamw(SCHEDULE, **HYPER, **options),
            "head": jda.fused_adamw(0.02, **HYPER | dict(b1=0.8, weight_decay=0.3), **options),
            "still": optax.set_to_zero(),
        },
        LABELS,
    )


def in_groups(config):
    groups = dict(
        body=dict(learning_rate=SCHEDULE), head=dict(b1=0.8, weight_decay=0.3), still=dict(frozen=True)
    )  # fmt: skip
    return jda.fused_adamw(0.02, **HYPER, **CONFIGS[config][0], param_labels=LABELS, groups=groups)


@few(1)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("take", [by_step, by_update])
def test_a_partition_has_the_bits_of_groups_and_the_state_of_optax(take, config):
    tx = two(config)
    got, want = (run(x, config=config, take=take) for x in (tx, in_groups(config)))
    assert tx.is_fused
    assert_trees_same_bits(got[0], want[0])
    theirs = two(config, optax)
    assert jax.tree.structure(got[1]) == jax.tree.structure(
        theirs.init(random(0, CONFIGS[config][1]))
    )
    in_optax = run(theirs, config=config, take=by_update)
    if take is by_update:
        assert_trees_same_bits(got, in_optax)
    else:
        assert_trees_same_bits(run(tx, config=config, restored=True), got)
        assert_trees_same_bits(run(tx, config=config, steps=3, jitted=False), run(tx, config=config, steps=3))  # fmt: skip


def test_main_parameters_of_a_partition_are_found():
    params, state = run(two("main"), config="main")
    main = jda.main_params(params, state)
    assert main["w"].dtype == main["b"].dtype == jnp.float32
    assert main["n"]["y"].dtype == jnp.bfloat16
    assert_trees_same_bits(main["w"].astype(jnp.bfloat16), params["w"])


@few(1)
@pytest.mark.parametrize("prefix", [True, False])
def test_a_clip_and_a_schedule_around_a_partition(prefix):
    """kauldron's shape: the parts of each label, and what all labels share, in one chain."""
    labels = {"w": "a", "b": "b", "n": "b"} if prefix else lambda p: jax.tree.map(_label, p)
    parts = {"a": dict(b1=0.8), "b": dict(b1=0.9, nesterov=True)}

    def made(package):
        inner = {k: package.scale_by_adam(**ADAM | x) for k, x in parts.items()}
        partition = jda.partition if package is jda else optax.partition
        return [
            optax.clip_by_global_norm(1.0),
            partition(inner, labels),
            package.add_decayed_weights(0.13),
            optax.scale_by_schedule(SCHEDULE),
            optax.scale(-1.0),
        ]

    tx, theirs = jda.chain(*made(jda)), optax.chain(*made(optax))
    assert tx.is_fused
    got, want = run(tx), run(theirs, take=by_update)
    assert jax.tree.structure(got[1]) == jax.tree.structure(want[1])
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)
    updates, _ = run(tx, take=by_update)
    for x, y in zip(jax.tree.leaves(got[0]), jax.tree.leaves(updates), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7)
    whole = jda.partition(
        {k: jda.fused_adamw(SCHEDULE, **ADAM | x, weight_decay=0.13) for k, x in parts.items()},
        labels,
    )
    assert_trees_same_bits(got[0], run(jda.chain(optax.clip_by_global_norm(1.0), whole))[0])


def _label(x):
    return "a" if x.size > 1000 else "b"


def test_transformations_without_a_step_take_their_leaves_along():
    """What optax updates, what no label's kernel touches, and the factor of all of them."""
    sgd = optax.sgd(0.1, momentum=0.9)
    mixed = {"body": jda.fused_adamw(0.02, **HYPER), "head": sgd, "still": optax.set_to_zero()}
    ours = jda.chain(jda.partition(mixed, LABELS), optax.scale(0.5))
    theirs = optax.chain(optax.partition(mixed, LABELS), optax.scale(0.5))
    assert ours.is_fused
    clip = optax.clip_by_global_norm(1.0)
    got, want = run(jda.chain(clip, ours)), run(optax.chain(clip, theirs), take=by_update)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)
    got, want = run(ours), run(theirs, take=by_update)
    assert_trees_same_bits(got[0]["n"], want[0]["n"])
    assert_trees_same_bits(got[0]["b"], want[0]["b"])
    assert_trees_same_bits(got[1], want[1])
    np.testing.assert_allclose(got[0]["w"], want[0]["w"], rtol=1e-6, atol=1e-7)


def test_factors_of_some_leaves_follow_a_partition():
    """Inside of each label the leaves are others, and so are those that a mask selects."""
    sgd = optax.sgd(0.1, momentum=0.9)
    mixed = {"body": jda.fused_adamw(0.02, **HYPER), "head": sgd, "still": optax.set_to_zero()}
    labels = LABELS | {"b": "body", "n": LABELS["n"] | {"y": "body"}}
    mask = {"w": True, "b": False, "n": {"x": False, "y": True, "none": None}}
    ours, theirs = (
        package.chain(package.partition(mixed, labels), package.masked(optax.scale(0.5), mask))
        for package in (jda, optax)
    )
    assert ours.is_fused
    got, want = run(ours), run(theirs, take=by_update)
    assert_trees_same_bits(got[1], want[1])
    for x, y in zip(jax.tree.leaves(got[0]), jax.tree.leaves(want[0]), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7)
    assert_trees_same_bits(run(ours, take=by_update), want)


def test_other_leaves_of_masked_get_their_gradients():
    mask = {"w": True, "b": False, "n": {"x": True, "y": False, "none": None}}
    ours, theirs = (x.masked(jda.fused_adamw(0.02, **HYPER), mask) for x in (jda, optax))
    assert ours.is_fused
    got, want = run(ours, take=by_update), run(theirs, take=by_update)
    assert_trees_same_bits(got, want)
    params, state = run(ours)
    assert_trees_same_bits(state, want[1])
    assert_trees_same_bits((params["b"], params["n"]["y"]), (want[0]["b"], want[0]["n"]["y"]))
    np.testing.assert_allclose(params["w"], want[0]["w"], rtol=1e-6, atol=1e-7)
    rest = jax.tree.map(lambda x: not x, mask)
    both = jda.chain(ours, jda.masked(jda.fused_adamw(0.02, **HYPER), rest))
    assert_trees_same_bits(run(both)[0]["b"], run(jda.fused_adamw(0.02, **HYPER))[0]["b"])


WRAPPERS = {
    "MultiSteps": lambda tx: jda.MultiSteps(tx, 2),
    "apply_if_finite": lambda tx: jda.apply_if_finite(tx, 3),
    "named_chain": lambda tx: jda.named_chain(("clip", optax.clip(0.5)), ("adam", tx)),
    "masked": lambda tx: jda.masked(tx, lambda p: jax.tree.map(lambda x: True, p)),
    "partition": lambda tx: jda.partition({"all": tx}, "all"),
}


@few(1)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_of_a_partition(wrapper):
    tx = WRAPPERS[wrapper](two("float32"))
    whole = WRAPPERS[wrapper](in_groups("float32"))
    assert tx.is_fused
    got = run(tx)
    assert_trees_same_bits(got[0], run(whole)[0])
    if wrapper in ("MultiSteps", "apply_if_finite", "named_chain"):
        return
    assert_trees_same_bits(run(tx, take=by_update)[0], run(whole, take=by_update)[0])


def test_a_skipped_step_changes_nothing_in_a_partition():
    sgd = optax.sgd(SCHEDULE, momentum=0.9)
    mixed = {"body": jda.fused_adamw(SCHEDULE, **HYPER), "head": sgd, "still": optax.set_to_zero()}
    tx = jda.apply_if_finite(jda.partition(mixed, LABELS), 3)
    params = random(0)
    state = tx.init(params)
    for i in range(3):
        grads = random(i + 1)
        if i == 1:
            grads["w"] = grads["w"].at[0, 0].set(np.inf)
        old = params, state.inner_state
        params, state = jax.jit(tx.step)(grads, state, params)
        if i == 1:
            assert_trees_same_bits((params, state.inner_state), old)
        else:
            assert not np.array_equal(params["b"], old[0]["b"])


def test_members_of_a_vmap():
    tx = two("float32")
    params = jax.tree.map(lambda x: jnp.stack([x, -x]), random(0))
    state = jax.vmap(tx.init)(params)
    grads = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), random(1))
    got = jax.jit(jax.vmap(tx.step))(grads, state, params)
    member = lambda tree, i: jax.tree.map(lambda x: x[i], tree)  # noqa: E731
    for i in range(2):
        alone = jax.jit(tx.step)(*(member(x, i) for x in (grads, state, params)))
        assert_trees_same_bits(member(got, i), alone)


def test_norms_are_of_all_trained_leaves():
    sgd = optax.sgd(0.1)
    mixed = {"body": jda.fused_adamw(0.02, **HYPER), "head": sgd, "still": optax.set_to_zero()}
    tx, params, grads = jda.partition(mixed, LABELS), random(0), random(1)
    new, _, norms = tx.step_with_norms(grads, tx.init(params), params)
    without = lambda tree: [tree["w"], tree["b"], tree["n"]["x"]]  # noqa: E731
    want = {"grad": grads, "param": new, "update": jax.tree.map(jnp.subtract, new, params)}
    for name, tree in want.items():
        np.testing.assert_allclose(norms[f"{name}_norm"], optax.tree.norm(without(tree)), rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_norms_of_16_bits_are_summed_in_float32(dtype):
    """Squares of float16 overflow, and those of bfloat16 are rounded to 8 bits."""
    tx = jda.partition(
        {"ours": jda.fused_adamw(0.1), "theirs": optax.sgd(0.01)}, {"w": "ours", "b": "theirs"}
    )
    params = {"w": jnp.ones(3), "b": jnp.full(10007, 3, dtype)}
    grads = {"w": jnp.ones(3), "b": jnp.full(10007, 3.1, dtype)}
    new, _, norms = tx.step_with_norms(grads, tx.init(params), params)
    exact = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32), tree)  # noqa: E731
    updates = jax.tree.map(jnp.subtract, exact(new), exact(params))
    for name, tree in {"grad": grads, "param": new, "update": updates}.items():
        want = optax.tree.norm(exact(tree))
        np.testing.assert_allclose(norms[f"{name}_norm"], want, rtol=1e-6)


def test_a_named_chain_is_a_chain_with_names():
    clip, factor = optax.clip_by_global_norm(1.0), optax.scale_by_schedule(SCHEDULE)
    parts = [clip, jda.scale_by_adam(**ADAM), jda.add_decayed_weights(0.13), factor, optax.scale(-1.0)]  # fmt: skip
    names = ["clip", "adam", "decay", "rate", "sign"]
    named, chain = jda.named_chain(*zip(names, parts, strict=True)), jda.chain(*parts)
    assert named.is_fused
    like = optax.named_chain(*zip(names, parts, strict=True)).init(random(0))
    for take in (by_step, by_update):
        got, want = run(named, take=take), run(chain, take=take)
        assert_trees_same_bits((got[0], tuple(got[1].values())), want)
        assert jax.tree.structure(got[1]) == jax.tree.structure(like)
    unfused = jda.named_chain(("adam", jda.scale_by_adam()), ("clip", optax.clip(1.0)))
    assert "transformation 1" in unfused.why_not_fused
    assert_trees_same_bits(run(unfused), run(optax.named_chain(("adam", jda.scale_by_adam()), ("clip", optax.clip(1.0))), take=by_update))  # fmt: skip


def test_transformations_without_an_optimizer_are_those_of_optax():
    assert not isinstance(jda.masked(optax.adam(0.1), True), jda.FusedTransformation)
    tx = jda.partition({0: optax.adam(0.1), 1: optax.sgd(0.1)}, {"w": 0, "b": 1, "n": 1})
    assert "no transformation in it has a fused step" in tx.why_not_fused
    theirs = optax.partition({0: optax.adam(0.1), 1: optax.sgd(0.1)}, {"w": 0, "b": 1, "n": 1})
    assert_trees_same_bits(run(tx), run(theirs, take=by_update))


def test_wrappers_inside_of_a_partition_step():
    """Each label accumulates or skips by itself, as with optax."""
    labels, body, head = {"w": 0, "b": 1, "n": 1}, jda.fused_adamw(0.1), jda.fused_adamw(0.02)

    def made(package):
        wrapped = package.MultiSteps(body, 2), package.apply_if_finite(head, 2)
        return package.partition(dict(enumerate(wrapped)), labels)

    def take(tx, grads, state, params):
        grads["b"] = jnp.where(jnp.max(grads["n"]["x"]) > 1.5, jnp.nan, grads["b"])
        return (by_step if tx is ours else by_update)(tx, grads, state, params)

    ours = made(jda)
    got, want = (run(tx, take=take, steps=9) for tx in (ours, made(optax)))
    assert ours.is_fused
    assert 0 < got[1].inner_states[1].inner_state.total_notfinite < 10
    assert_trees_same_bits(got, want)
    params = random(0)
    text = jax.jit(ours.step).lower(params, got[1], params).as_text()
    assert text.count("@jdistadam_adam(") == 2
    norms = ours.step_with_norms(params, got[1], params)[2]
    assert float(norms["update_norm"]) > 0
    assert "cannot take what follows it" in jda.chain(ours, optax.scale(0.5)).why_not_fused
    outside = jda.MultiSteps(jda.chain(optax.clip_by_global_norm(1.0), ours), 2)
    outside.step(params, outside.init(params), params)


def test_a_label_without_a_fused_step_is_named():
    body = jda.fused_adamw(0.1)
    labels = {"w": 0, "b": 1, "n": 1}
    for other in (body, jda.chain(body, optax.clip(1.0))):
        tx = jda.partition({0: jda.chain(body, optax.clip(1.0)), 1: other}, labels)
        assert "transformation 1 and later ones" in tx.why_not_fused
    assert jda.partition({0: jda.chain(optax.clip(1.0), optax.sgd(0.1)), 1: body}, labels).is_fused


def test_directions_need_a_learning_rate():
    tx = jda.partition({0: jda.scale_by_adam(), 1: jda.fused_adamw(0.1)}, {"w": 0, "b": 1, "n": 1})
    assert "nothing multiplies by a learning rate" in tx.why_not_fused
    assert not jda.chain(tx, jda.add_decayed_weights(0.1), optax.scale(-0.1)).is_fused
    scaled, params = jda.chain(tx, optax.scale(-0.1)), random(0)
    assert "nothing multiplies by a learning rate" in scaled.why_not_fused
    scaled.step(params, scaled.init(params), params)


def test_mistakes_raise(cpu_mesh):
    tx, params = two("float32"), random(0)
    state = tx.init(params)
    with pytest.raises(jda.TreeError, match="not a state of partition: got tuple"):
        tx.step(params, (), params)
    with pytest.raises(jda.TreeError, match="not a state of masked"):
        jda.masked(jda.fused_adamw(0.1), True).step(params, state, params)
    named = jda.named_chain(("adam", jda.fused_adamw(0.1)))
    with pytest.raises(jda.TreeError, match=r"not a state of this named_chain: got \['other'\]"):
        named.step(params, {"other": ()}, params)
    scaled = jda.chain(jda.fused_adamw(0.1), optax.scale_by_schedule(SCHEDULE))
    with pytest.raises(jda.TreeError, match="not the state of a schedule: got EmptyState"):
        scaled.step(params, (scaled.init(params)[0], optax.EmptyState()), params)
    with pytest.raises(jda.ShapeError, match=r"grads\['b'\]"):
        tx.step(params | {"b": jnp.ones(7)}, state, params)
    with pytest.raises(jda.TreeError, match="param_labels"):
        jda.partition({"a": jda.fused_adamw(0.1)}, {"w": "a"}).step(params, state, params)
    with pytest.raises(ValueError, match="no corresponding transformation"):
        jda.partition({"a": jda.fused_adamw(0.1)}, LABELS).init(params)
    with pytest.raises(ValueError, match="unique names"):
        jda.named_chain(("a", optax.scale(1.0)), ("a", jda.fused_adamw(0.1)))
    with pytest.raises(ValueError, match="params"):
        tx.step(params, state, None)
    distributed = jda.distributed(jda.fused_adamw(0.1), mesh=cpu_mesh(2))
    for make in (
        lambda: jda.partition({"a": distributed}, "a"),
        lambda: jda.masked(distributed, True),
        lambda: jda.named_chain(("a", distributed)),
    ):
        with pytest.raises(jda.PolicyError, match="pass param_labels and groups"):
            make()


def test_updates_take_whole_modules():
    """Equinox passes all of a module as params; leaves without gradients need no update."""
    tx = jda.partition({"a": jda.fused_adamw(0.1), "b": optax.set_to_zero()}, {"w": "a", "f": "b"})
    clip = optax.clip_by_global_norm(1.0)
    chains = [tx, jda.chain(clip, tx, optax.scale(0.5)), jda.chain(clip, jda.fused_adamw(0.1))]
    grads, params = {"w": jnp.ones(3), "f": None}, {"w": jnp.ones(3), "f": jnp.tanh}
    for tx in chains:
        updates, _ = tx.update(grads, tx.init(grads), params)
        assert updates["f"] is None and updates["w"][0] < 0
