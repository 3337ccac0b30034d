"""A whole train state moves: loss scale, counters, model state, random key and step, too."""

import functools
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType

import jdistadam as jda
from jdistadam.core.guards import GUARDS, continued
from jdistadam.core.trees import words_of
from support.bits import assert_trees_same_bits
from support.lookalike import BF16, POLICIES, make_params, make_tx
from support.paths import TESTS, environment
from support.samples import few, often

SCRIPT = TESTS / "support" / "move_in_another_process.py"
DYNAMIC = jda.DynamicLossScale(init_scale=64.0, growth_interval=3, hysteresis=2)
REMAINDERS = jda.MixedPrecisionPolicy(main_params_dtype="remainder16")
KEYS = {"typed": jax.random.key, "raw": jax.random.PRNGKey}
NAN = 3  # the step whose batch is non-finite; another one comes later


def loss_fn(params, x, model_state, rng):
    noise = 1 + jax.random.normal(rng, ()) / 8
    total = sum(jnp.sum(jnp.sin(p.astype(jnp.float32) * noise)) for p in jax.tree.leaves(params))
    mean = jnp.mean(x)
    new = model_state | {
        "mean": 0.9 * model_state["mean"] + 0.1 * mean,
        "steps": model_state["steps"] + 1,
        "seen": model_state["seen"] | (mean > 1.5),
    }
    return total * mean, new


def model_state():
    return {
        "mean": jnp.full((3,), 0.25, BF16),
        "steps": jnp.int32(5),
        "seen": jnp.zeros((2,), jnp.bool_),
        "key": jax.random.key(7, impl="rbg"),
        "nothing": None,
    }


def batches():
    rng = np.random.default_rng(4)
    made = [rng.uniform(0.5, 2, 16).astype(np.float32) for _ in range(8)]
    for i in (NAN, NAN + 1, 6):
        made[i][5] = np.nan
    return made


def on_host(tree):
    return jax.tree.map(lambda x: np.array(words_of(x)), tree)


def assert_same(got, want):
    assert_trees_same_bits(on_host(got), on_host(want))


def make_source(dtype=BF16, **kwargs):
    """An optimizer, a new state and the step of two micro-batches."""
    tx = make_tx(**(dict(loss_scale=DYNAMIC) | kwargs))
    rng = jax.random.key(11)
    state = jda.TrainState.create(
        make_params(), tx, param_dtypes=dtype, model_state=model_state(), rng=rng
    )
    return tx, state, jda.train_step(loss_fn, tx, accumulate_steps=2)


def dtypes_of(state):
    return jax.tree.map(lambda x: x.dtype, state.params)


def moved(state, tx, to):
    main_params, opt_state, extra_state = jda.to_optax_state(state, tx)
    dtypes = dtypes_of(state)
    return jda.from_optax_state(main_params, opt_state, to, extra_state, param_dtypes=dtypes)


def hybrid():
    mesh = jax.make_mesh((2, 4), ("replica", "data"), (AxisType.Auto,) * 2)
    return dict(mesh=mesh, replica_axis="replica", outer_sharding_strategy="optim")


VIA = {
    "1 device": lambda: dict(n=1),
    "3 devices": lambda: dict(n=3),
    "small buckets": lambda: dict(bucket_bytes=16),
    "hybrid": hybrid,
    "no_shard": lambda: dict(sharding_strategy="no_shard"),
    "optim_grads_params": lambda: dict(sharding_strategy="optim_grads_params"),
    "remainders": lambda: dict(policy=REMAINDERS),
}
SOURCES = {
    "float32": dict(),
    "bfloat16": dict(sharding_strategy="optim_grads"),
    "remainder16": dict(sharding_strategy="optim_grads_params"),
    "no main": dict(),
    "8 bits": dict(),
    "comm": dict(max_grad_norm=0.5),
    "comm, sharded": dict(sharding_strategy="optim_grads_params"),
}


FEW = ("1 device", "hybrid", None, None, "3 devices", None, None, "optim_grads_params")
EVERY = (*VIA, "3 devices")


@pytest.mark.slow
@pytest.mark.parametrize(("source", "via"), [("comm", FEW), *((name, EVERY) for name in SOURCES)])
@often(lambda via: via is FEW)
def test_state_that_moves_and_returns_trains_on_with_the_same_bits(source, via):
    """Before steps moved to another optimizer and back; three of the steps are skipped."""
    dtype, policy = POLICIES[source.partition(",")[0]]
    tx, state, step = make_source(dtype, policy=policy, **SOURCES[source])
    back = state
    for i, (batch, name) in enumerate(zip(batches(), via, strict=True)):
        if name is not None and (name != "remainders" or dtype == BF16):
            other = make_tx(loss_scale=DYNAMIC, **VIA[name]())
            back = moved(moved(back, tx, other), other, tx)
        assert_same(back, state)
        assert jax.tree.map(lambda x: x.sharding, back) == jax.tree.map(lambda x: x.sharding, state)
        (state, want), (back, got) = step(state, batch), step(back, batch)
        assert_same(got, want)
        assert int(back.step) == i + 1 - int(want["skipped"])
    assert_same(back, state)
    assert int(want["skipped"]) == 3 and float(want["loss_scale"]) not in (1.0, 64.0)
    assert int(state.model_state["steps"]) == 5 + 2 * 5


@pytest.mark.slow
@pytest.mark.parametrize("kind", KEYS)
def test_extra_state_holds_plain_arrays_that_later_steps_keep(kind):
    """Plain arrays, of no mesh, that later steps leave alone; keys are keys of the same kind."""
    tx = jda.chain(optax.scale(0.5), make_tx(2, loss_scale=DYNAMIC))
    rng = KEYS[kind](3)
    state = jda.TrainState.create(make_params(), tx, model_state=model_state(), rng=rng)
    step = jda.train_step(loss_fn, tx, accumulate_steps=2)
    for batch in batches()[: NAN + 1]:
        state, _ = step(state, batch)
    exported = jda.to_optax_state(state, tx)
    extra = exported[2]
    assert isinstance(extra, jda.ExtraState)
    before, copied = on_host(exported), pickle.loads(pickle.dumps(exported))
    for path, x in jax.tree_util.tree_leaves_with_path(extra):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        assert isinstance(x, np.ndarray) != is_key, path
        assert not is_key or len(x.sharding.device_set) == 1
    assert extra.step == state.step == 3 and extra.scaling.skipped == 1
    assert extra.scaling.loss_scale == 128.0 and extra.scaling.hysteresis_count == 1
    assert extra.model_state["steps"] == 11 and extra.model_state["nothing"] is None
    assert jnp.issubdtype(extra.rng.dtype, jax.dtypes.prng_key) == (kind == "typed")
    assert jax.random.key_impl(extra.model_state["key"]) == jax.random.key_impl(
        model_state()["key"]
    )
    again = jda.from_optax_state(*copied[:2], tx, copied[2])
    batch = batches()[0]
    (state, want), (again, got) = step(state, batch), step(again, batch)
    assert_same((again, got), (state, want))
    assert_same(exported, before)  # it is the caller's


STATIC = 8.0
OTHER = jda.DynamicLossScale(init_scale=2.0**10, hysteresis=1, min_scale=128.0)
FOUND = jda.LossScaleState(32.0, 2, 2, 3)  # of DYNAMIC: shrunk, and finite twice since


@pytest.mark.parametrize(
    ("saved", "config", "want"),
    [
        (None, STATIC, (8.0, 0, 0, 0)),
        (None, DYNAMIC, (64.0, 0, 2, 0)),
        ((4.0, None, None, 3), STATIC, (8.0, 0, 0, 3)),
        ((4.0, None, None, 3), DYNAMIC, (64.0, 0, 2, 3)),
        (FOUND, STATIC, (8.0, 0, 0, 3)),
        (FOUND, DYNAMIC, (32.0, 2, 2, 3)),
        (FOUND, OTHER, (128.0, 2, 1, 3)),
        ((16.0, 0, 0, 3), DYNAMIC, (16.0, 0, 0, 3)),  # counts as of a constant one, but found
    ],
)
def test_a_loss_scale_goes_on_in_another_setting(saved, config, want):
    saved = saved and jda.LossScaleState(*saved)
    got = continued(GUARDS[0], config, saved)
    assert got == want
    assert [x.dtype for x in got] == [np.float32, np.int32, np.int32, np.int32]


SETTINGS = {"none": None, "static": STATIC, "dynamic": DYNAMIC}


@functools.cache
def trained(name):
    """An optimizer with a loss scale and a state of it: three steps, then one that is skipped."""
    tx, state, step = make_source(n=2, loss_scale=SETTINGS[name])
    for batch in batches()[: NAN + (name != "none")]:
        state, _ = step(state, batch)
    return tx, state, step


@few(1)
@pytest.mark.parametrize("there", SETTINGS)
@pytest.mark.parametrize("here", SETTINGS)
@often(lambda here, there: (here, there) in {("static", "dynamic"), ("dynamic", "dynamic"), ("dynamic", "none")})  # fmt: skip
def test_states_move_between_settings_of_the_loss_scale(here, there):
    """The next step multiplies by the scale that ``from_optax_state`` says, and goes on counting."""
    (tx, state, _), (other, _, step) = trained(here), trained(there)
    extra = jda.to_optax_state(state, tx)[2]
    assert (extra.scaling is None) == (here == "none")
    assert here != "static" or extra.scaling.growth_count is None
    away, metrics = step(moved(state, tx, other), batches()[0])
    has_found = (here, there) == ("dynamic", "dynamic")  # grown once, and one of two skips left
    scale = {"none": 1.0, "static": STATIC, "dynamic": 128.0 if has_found else 64.0}[there]
    assert float(metrics["loss_scale"]) == scale
    assert int(metrics["skipped"]) == ("none" not in (here, there))
    assert int(away.step) == NAN + 1
    if there == "none":
        assert away.opt_state.scaling is None
    else:
        left = {"static": 0, "dynamic": 1 if has_found else 2}[there]
        assert int(away.opt_state.scaling.hysteresis_count) == left


def test_a_state_of_optax_begins_a_new_loss_scale():
    tx, state, _ = make_source()
    main_params, opt_state, _ = jda.to_optax_state(state, tx)
    new = jda.from_optax_state(main_params, opt_state, tx)
    assert new.model_state is None and new.rng is None
    assert_same(new.opt_state.scaling, jda.LossScaleState(*map(jnp.asarray, (64.0, 0, 2, 0))))


def test_step_property_counts_applied_updates():
    """Applied updates: traced, in a chain, on the host, of shapes, and copied."""
    tx = jda.chain(optax.scale(2.0), make_tx(2, loss_scale=DYNAMIC))
    state = jda.TrainState.create(
        make_params(), tx, model_state=model_state(), rng=jax.random.key(0)
    )
    step = jda.train_step(loss_fn, tx)

    def body(state, batch):
        new, _ = step(state, batch)
        return new, (state.step, new.step)

    state, (before, after) = jax.jit(lambda s, x: jax.lax.scan(body, s, x))(
        state, np.stack(batches())
    )
    assert before.tolist() == [0, 1, 2, 3, 3, 3, 4, 4]
    assert after.tolist() == [1, 2, 3, 3, 3, 4, 4, 5]
    host = jax.tree.map(lambda x: x, jax.device_get(state))
    for copy in (state, host, pickle.loads(pickle.dumps(host)), state.replace(rng=None)):
        assert isinstance(copy.step, jax.Array)
        assert (copy.step.dtype, copy.step.shape, int(copy.step)) == (jnp.int32, (), 5)
    assert jda.TrainState.shapes(make_params(), tx).step.shape == ()
    with pytest.raises(jda.TreeError, match=r"opt_state: not the state of a distributed optimizer"):
        _ = jda.TrainState(make_params(), optax.adamw(1e-3).init(make_params())).step


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # orbax's
@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.slow  # tests/test_train_lm_resume.py goes on in another process, too
def test_a_saved_state_trains_on_in_a_process_with_other_devices(tmp_path, kind):
    """By pickle and by orbax; a process with two devices restores, and exports it again."""
    tx, state, step = make_source()
    state = state.replace(rng=KEYS[kind](11))
    for batch in batches()[: NAN + 1]:
        state, _ = step(state, batch)
    exported = jda.to_optax_state(state, tx)
    (tmp_path / "state.pickle").write_bytes(pickle.dumps(exported))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", exported)
    command = [sys.executable, "-P", SCRIPT, tmp_path, kind]
    done = subprocess.run(
        command, env=environment(JAX_PLATFORMS="cpu"), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for name in ("pickle", "orbax"):
        again = pickle.loads((tmp_path / f"again.{name}").read_bytes())
        assert_same(again, exported)
        back = jda.from_optax_state(*again[:2], tx, again[2], param_dtypes=dtypes_of(state))
        assert_same(back, state)
