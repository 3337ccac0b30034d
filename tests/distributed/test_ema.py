"""The moving average of the exact parameters: ``ema_decay`` and ``ema_params``."""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdistadam as jda
from support import exact_steps
from support.bits import assert_trees_same_bits
from support.exact_steps import GROUPS, LABELS, PLACES, batches, everything, first_state, run
from support.exact_sums import HYPER, decays, linear_loss, random_params
from support.optimizers import distributed_adamw
from support.samples import few, often

DECAY = 0.9
BAD = {4: np.nan, 7: np.nan}  # skipped
ROUND = 2.0**-24


def make_tx(place, policy="float32", ema_decay=DECAY, **kwargs):
    return exact_steps.make_tx(place, policy, ema_decay=ema_decay, **kwargs)


def trained(tx, policy="float32", count=10, micro=1):
    """The last state; and the exact parameters before, and after each step that was applied."""
    first = first_state(tx, policy)
    seen = [jda.main_params(first.params, first.opt_state, tx)]
    steps = run(tx, first, batches(count, BAD), micro)
    for state, metrics in steps:  # noqa: B007
        if int(state.step) == len(seen):
            seen.append(copy.deepcopy(jda.main_params(state.params, state.opt_state, tx)))
    assert int(metrics["skipped"]) == 2 and len(seen) == count - 1
    return state, seen


def last(*args):
    """The state after steps."""
    (*_, (state, _)) = run(*args)
    return state


def assert_average(got, seen):
    """Within the rounding of float32 of a recurrence in float64.

    A step computes old + w (new - old): w, the difference, its product and the sum are rounded, so
    that the error is at most (3 w |new - old| + |sum|) 2^-24. With M above all of these values it
    is (6 w + 1) M 2^-24, of which later steps leave less.
    """
    weight, names = 1 - DECAY, seen[0].keys()
    for name in names:
        values = [np.asarray(x[name], np.float64) for x in seen]
        want, most = values[0], np.max(np.abs(values), axis=0)
        for x in values[1:]:
            want = DECAY * want + weight * x
        bound = (len(seen) - 1) * (6 * weight + 1) * most * ROUND
        assert got[name].dtype == jnp.float32 and got[name].shape == seen[0][name].shape
        assert np.all(np.abs(np.asarray(got[name], np.float64) - want) <= bound), name


@pytest.fixture(scope="module")
def on_one_device():
    tx = make_tx("one device")
    return everything(trained(tx)[0], tx)


@few(1)
@pytest.mark.parametrize("place", PLACES)
def test_average_follows_float64_and_has_the_bits_of_one_device(place, on_one_device):
    tx = make_tx(place)
    state, seen = trained(tx)
    average = jda.ema_params(state, tx)
    assert_average(average, seen)
    assert_trees_same_bits(everything(state, tx), on_one_device, place)
    for name, x in state.params.items():
        assert average[name].sharding.is_equivalent_to(x.sharding, x.ndim), name
    bytes_held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    assert sum(jda.plan(state.params, tx).held.values()) == bytes_held


def test_average_works_with_groups_chains_and_injected_hyperparameters():
    """What is frozen is its own average, of its dtype's values."""
    chosen = dict(param_labels=LABELS, groups=GROUPS, adam=jda.inject_hyperparams(jda.fused_adamw))
    tx = jda.chain(optax.scale(0.5), make_tx("hybrid-optim", "none", **chosen))
    state, seen = trained(tx, "none")
    average = jda.ema_params(state, tx)
    assert_average(average, seen)
    assert np.array_equal(average["small"], seen[0]["small"].astype(np.float32))


def test_a_skipped_step_changes_no_bit():
    tx = make_tx("flat-no_shard")
    state = last(tx, first_state(tx), batches(1))
    before = np.asarray(state.opt_state.ema)
    ((state, metrics),) = run(tx, state, batches(1, {0: np.nan}))
    assert int(metrics["skipped"]) == 1
    assert_trees_same_bits(np.asarray(state.opt_state.ema), before)


def test_average_of_constant_params_stays_constant():
    """The weights of old and new would not add up to 1 in float32."""
    tx = jda.distributed(
        jda.fused_adamw(0.0), mesh=exact_steps.make_mesh(**exact_steps.ONE), ema_decay=0.7
    )
    state = last(tx, jda.TrainState.create(random_params(), tx), batches(10))
    assert_trees_same_bits(jda.ema_params(state, tx), random_params())


@pytest.mark.slow
def test_checkpoint_without_an_average_raises_unless_it_begins_anew(tmp_path):
    """An older one says what to do; then the average begins with the parameters."""
    plain, tx = (
        make_tx("flat-optim", "remainder16", ema_decay=None),
        make_tx("hybrid-optim", "remainder16"),
    )
    state = last(plain, first_state(plain, "remainder16"), batches(2))
    jda.save(tmp_path / "plain", state, plain)
    template = jda.TrainState.shapes(jax.eval_shape(lambda: state.params), tx)
    with pytest.raises(jda.TreeError, match=r"ema\['columns'\]: missing .* begins anew with new="):
        jda.restore(tmp_path / "plain", template, tx)
    is_average = lambda path: path.startswith("ema")  # noqa: E731
    new = jda.restore(tmp_path / "plain", template, tx, new=is_average)
    main = jda.main_params(new.params, new.opt_state, tx)
    assert_trees_same_bits(
        jda.ema_params(new, tx), jax.tree.map(lambda x: x.astype("float32"), main)
    )

    new = last(tx, new, batches(2))
    jda.save(tmp_path / "averaged", new, tx)
    template = jda.TrainState.shapes(jax.eval_shape(lambda: state.params), plain)
    with pytest.raises(jda.TreeError, match=r"ema\['\w+'\]: in the file, and not in .* unused="):
        jda.restore(tmp_path / "averaged", template, plain)
    assert (
        jda.restore(tmp_path / "averaged", template, plain, unused=is_average).opt_state.ema is None
    )
    # A parameter that begins anew has the average of the template.
    other = random_params() | {"small": jnp.full((5, 3), 2.5)}
    template = jda.TrainState.create(other, tx, param_dtypes="bfloat16")
    is_small = lambda path: path == "params['small']"  # noqa: E731
    mixed = jda.ema_params(jda.restore(tmp_path / "averaged", template, tx, new=is_small), tx)
    assert_trees_same_bits(mixed["small"], other["small"])
    assert_trees_same_bits(mixed["rows"], jda.ema_params(new, tx)["rows"])


def test_ema_decay_and_norm_guard_are_not_injected():
    make = jda.inject_hyperparams(distributed_adamw)
    mesh, guard = exact_steps.make_mesh(**exact_steps.ONE), jda.NormGuard(max_norm=1e9)
    tx = make(1e-3, mesh=mesh, ema_decay=DECAY, norm_guard=guard)
    state = last(tx, jda.TrainState.create(random_params(), tx), batches(1))
    assert not {"ema_decay", "norm_guard"} & state.opt_state.hyperparams.keys()
    assert int(state.opt_state.inner_state.guard.steps) == 1


def test_average_can_be_evaluated_and_survives_loading_params():
    tx = make_tx("tuple-optim_grads_params", "remainder16")
    state, seen = trained(tx, "remainder16")
    average = jda.ema_params(state, tx)
    assert_average(average, seen)
    (batch,) = batches(1)
    params = jax.tree.map(lambda x, p: x.astype(p.dtype), average, state.params)
    loss, _ = jda.eval_step(linear_loss, tx)(dataclasses.replace(state, params=params), batch)
    whole = jax.tree.map(np.asarray, params)
    assert np.allclose(float(loss) * 8, float(linear_loss(whole, batch)), rtol=1e-4)
    loaded = state.replace(params=jax.tree.map(jnp.zeros_like, state.params), tx=tx)
    assert_trees_same_bits(jda.ema_params(loaded, tx), average)
    with pytest.raises(jda.ShapeError, match=r"^extra_state\.ema\['rows'\]: shape differs"):
        main, adam, extra = everything(state, tx)
        jda.from_optax_state(main, adam, tx, extra._replace(ema=extra.ema | {"rows": np.zeros(3)}))


def test_optax_incremental_update_of_fused_adamw_follows_float64():
    """The composition that docs/evaluation.md shows."""
    tx, params = jda.fused_adamw(**HYPER), {"w": jnp.linspace(-1, 1, 300)}

    @jax.jit
    def step(params, state, average, grads):
        params, state = tx.step(grads, state, params)
        return params, state, optax.incremental_update(params, average, 1 - DECAY)

    state, average, seen = tx.init(params), params, [params]
    for i in range(10):
        grads = {"w": jnp.sin(params["w"] * i)}
        params, state, average = step(params, state, average, grads)
        seen.append(params)
    assert_average(average, seen)


def test_state_without_ema_decay_holds_no_average():
    tx = make_tx("hybrid-optim", ema_decay=None)
    assert first_state(tx).opt_state.ema is None and tx.state_specs().ema is None
    assert "ema" not in jda.plan(random_params(), tx).held


@few(1)
@pytest.mark.parametrize("policy", ["float32", "remainder16", "none"])
@pytest.mark.parametrize("place", ["one device", "flat-optim", "twice-optim_grads_params"])
@often(
    lambda place, policy: (
        (place, policy)
        in (
            ("one device", "none"),
            ("flat-optim", "remainder16"),
            ("twice-optim_grads_params", "none"),
        )
    )
)
def test_training_on_the_average_raises(place, policy):
    tx = make_tx(place, policy)
    state, _ = trained(tx, policy)
    average = jax.tree.map(lambda x, p: x.astype(p.dtype), jda.ema_params(state, tx), state.params)
    evaluated = dataclasses.replace(state, params=average)
    step = jda.train_step(linear_loss, tx)
    batch = next(batches())
    jda.eval_step(linear_loss, tx)(evaluated, batch)
    if (place, policy) == ("one device", "float32"):  # these params are all that there is
        step(jax.tree.map(jnp.copy, evaluated), batch)
        return
    with pytest.raises(
        jda.LayoutError, match=r"^params: equal to the moving average.*Only evaluate"
    ):
        step(evaluated, batch)
    # States of the same values but unknown origin go on: a copy of all arrays, and as they began.
    first = first_state(tx, policy)
    for same in (first, state):
        step(jax.tree.map(jnp.copy, same), batch)
    count = int(state.step)
    reloaded, _ = step(jda.reload_main_params(evaluated, tx), batch)
    assert int(reloaded.step) == count + 1


def test_errors_say_how_to_evaluate_an_average():
    """A model of 16 bits needs a cast; only dataclasses.replace leaves the main parameters alone."""
    tx = make_tx("flat-optim", "remainder16")
    state = first_state(tx, "remainder16")
    average = jda.ema_params(state, tx)
    evaluate = jda.eval_step(linear_loss, tx)
    with pytest.raises(
        jda.LayoutError,
        match=r"^params\['\w+'\]: dtype differs .* got float32, expected bfloat16\. .*astype",
    ):
        evaluate(dataclasses.replace(state, params=average), next(batches()))
    with pytest.raises(jda.TreeError, match=r"To evaluate .*, write dataclasses\.replace"):
        state.replace(params=average)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["remainder16", "float32"])
@pytest.mark.parametrize("place", ["flat-optim", "twice-optim_grads_params"])
@often(lambda place, policy: (place, policy) == ("twice-optim_grads_params", "remainder16"))
def test_evaluation_of_the_average(place, policy):
    """That of a state with the rounded average in place of its params; also inside a program."""
    tx = make_tx(place, policy)
    state = last(tx, first_state(tx, policy), batches(3))
    average = jax.tree.map(lambda x, p: x.astype(p.dtype), jda.ema_params(state, tx), state.params)
    evaluate, batch = jda.eval_step(linear_loss, tx), next(batches())
    got = evaluate(state, batch, params="ema")
    assert_trees_same_bits(got, evaluate(dataclasses.replace(state, params=average), batch))
    assert float(got[0]) != float(evaluate(state, batch)[0])
    traced = jax.jit(lambda s, b: evaluate(s, b, params="ema"))(state, jda.shard_batch(batch, tx))
    np.testing.assert_allclose(traced[0], got[0], rtol=1e-6)
    with pytest.raises(jda.HyperparameterError, match=r'^params: out of range: got .*"ema"'):
        evaluate(state, batch, params=average)
    with pytest.raises(jda.PolicyError, match="keeps no average"):
        jda.eval_step(linear_loss, make_tx(place, policy, ema_decay=None))(
            state, batch, params="ema"
        )


@few(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_average_that_begins_with_the_params_is_not_taken_for_replaced_ones(dtype):
    """As after a restore without an average: equal in every element, though steps were taken."""
    tx = make_tx("flat-optim", "none")
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), random_params())
    adam = jda.fused_adamw(1e-3, mask=decays).init(params)
    adam = (adam[0]._replace(count=jnp.int32(7)), *adam[1:])
    state = jda.from_optax_state(params, adam, tx)
    assert int(state.step) == 7
    jda.train_step(linear_loss, tx)(jax.tree.map(jnp.copy, state), next(batches()))


def test_params_that_never_moved_are_not_taken_for_the_average():
    """Steps below half a spacing of bfloat16 leave params, and so their average, as they are."""
    tx = make_tx("flat-optim", "none", adam=lambda **kwargs: jda.fused_adamw(**kwargs | dict(learning_rate=1e-12)))  # fmt: skip
    state = last(tx, first_state(tx, "none"), batches(2))
    before = jax.tree.map(np.asarray, state.params)
    assert int(state.step) == 2
    state, _ = jda.train_step(linear_loss, tx)(jax.tree.map(jnp.copy, state), next(batches()))
    assert_trees_same_bits(state.params, before)


@few(1)
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("number", [4, 1])
def test_an_average_outlives_the_next_step(cpu_mesh, number, dtype, strategy):
    """A step donates the state, also the frozen parameters, whose average they are."""
    labels = dict(param_labels={"w": "all", "kept": "none"}, groups={"all": {}, "none": dict(frozen=True)})  # fmt: skip
    tx = jda.distributed(
        jda.fused_adamw(0.1, **labels), mesh=cpu_mesh(number), sharding_strategy=strategy, ema_decay=DECAY
    )  # fmt: skip
    params = {"w": jnp.ones((64, 64), dtype), "kept": jnp.full((8, 64), 2, dtype)}
    step = jda.train_step(lambda p, x: jnp.sum(x @ p["w"].astype(x.dtype)), tx)
    state, batch = jda.TrainState.create(params, tx), np.ones((4, 64), np.float32)
    state, _ = step(state, batch)
    average = jda.ema_params(state, tx)
    want = jax.tree.map(np.array, average)
    step(state, batch)
    assert_trees_same_bits(average, want)
    assert np.all(want["kept"] == 2) and np.all(want["w"] < 1)
