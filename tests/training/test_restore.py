"""States restored by orbax into other layouts, and parameters put into a state."""

import dataclasses
import gc
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import jdistadam as jda
from jdistadam.core.codecs import REMAINDER16
from support.bits import assert_same_bits, assert_trees_same_bits
from support.lookalike import BATCH, BF16, POLICIES, loss_fn, make_params, make_tx
from support.samples import few, often

# orbax's, about its own future and about files that it leaves open
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

DEVICES = jax.devices("cpu")
REMAINDERS = jda.MixedPrecisionPolicy(main_params_dtype="remainder16")
LABELS = {"a": "x", "b": "y", "bias": "y", "more": "y"}
NO_MAIN = jda.MixedPrecisionPolicy(main_params_dtype=None)


def mesh(*shape):
    size = int(np.prod(shape))
    return jax.make_mesh(shape, ("data", "replica")[: len(shape)], devices=DEVICES[:size])


# The optimizer that restores, and whether its layout is that of the one that saved: 8 devices,
# "optim", float32 main parameters of bfloat16 params.
TARGETS = {
    "8": (lambda: make_tx(8), True),
    "4": (lambda: make_tx(4), False),
    "2": (lambda: make_tx(2), False),
    "1": (lambda: make_tx(1), False),
    "2 x 4, sharded over both": (lambda: make_tx(mesh=mesh(2, 4), shard_axis=("data", "replica")), True),
    "2 x 4, hybrid": (lambda: make_tx(mesh=mesh(2, 4), replica_axis="replica"), False),
    "no_shard": (lambda: make_tx(sharding_strategy="no_shard"), False),
    "optim_grads": (lambda: make_tx(sharding_strategy="optim_grads"), True),
    "optim_grads_params": (lambda: make_tx(sharding_strategy="optim_grads_params"), True),
    "small buckets": (lambda: make_tx(bucket_bytes=16), False),
    "groups": (lambda: make_tx(param_labels=LABELS, groups={"x": {}, "y": {"lr_scale": 0.5}}), True),
    "groups that freeze": (lambda: make_tx(param_labels=LABELS, groups={"x": {"frozen": True}, "y": {}}), False),
    "remainders": (lambda: make_tx(policy=REMAINDERS), False),
    "no main parameters": (lambda: make_tx(policy=NO_MAIN), False),
    "bfloat16 mu": (lambda: make_tx(mu_dtype=BF16), None),
    "float32 params": (lambda: make_tx(8), False),
}  # fmt: skip
OFTEN = {  # what tells layouts apart is in tests/distributed/test_layout_digest.py
    ("2", True), ("2 x 4, hybrid", False), ("groups that freeze", False), ("optim_grads_params", True),
    ("bfloat16 mu", True),
}  # fmt: skip


def params_of(name):
    dtype = jnp.float32 if name == "float32 params" else BF16
    extra = {"more": jnp.ones(7, dtype)}  # packed with bias, if a bucket holds both
    return make_params(dtype) | extra


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint after three steps, and what is in it."""
    tx = make_tx(8)
    state = jda.TrainState.create(params_of("8"), tx)
    step = jda.train_step(loss_fn, tx)
    for i in range(3):
        state, _ = step(state, BATCH + i)
    folder = tmp_path_factory.mktemp("orbax") / "state"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, state)
    exported = jda.to_optax_state(state, tx)
    state, metrics = step(state, BATCH)
    return folder, exported, jda.full_params(state, tx), metrics


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """A failing load of orbax leaves coroutines behind that report themselves when collected."""
    yield
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    gc.collect()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", TARGETS)
@often(lambda name, strict: (name, strict) in OFTEN)
def test_orbax_restores_the_same_state_or_raises(saved, name, strict):
    """Flat sizes agree between most of these; the values belong to other leaves."""
    folder, exported, next_params, next_metrics = saved
    make, same_layout = TARGETS[name]
    tx = make()
    target = jda.TrainState.shapes(params_of(name), tx)
    restore = lambda: ocp.StandardCheckpointer().restore(folder, target, strict=strict)  # noqa: E731
    step = jda.train_step(loss_fn, tx)
    if same_layout is False:
        with pytest.raises((ValueError, jda.LayoutError)) as caught:
            step(restore(), BATCH)  # orbax's own error, where sizes differ and it looks
        if not strict:
            assert isinstance(caught.value, jda.LayoutError), caught.value
        return
    state = restore()
    got = jda.to_optax_state(state, tx)
    if same_layout is None:  # orbax casts to the target's dtype, as a caller would
        assert_trees_same_bits(got[0], exported[0])
        assert_same_bits(got[1][0].mu["a"], exported[1][0].mu["a"].astype(BF16))
        return
    assert_trees_same_bits(got[0], exported[0])
    assert_trees_same_bits(got[1], exported[1])
    state, metrics = step(state, BATCH)
    assert float(metrics["loss"]) == float(next_metrics["loss"])
    if name != "groups":  # which train at another rate from here
        assert_trees_same_bits(jda.full_params(state, tx), next_params)


@pytest.mark.slow
def test_orbax_dictionaries_raise_and_say_what_to_do(saved):
    """orbax without a target returns dictionaries."""
    folder = saved[0]
    tx = make_tx(8)
    raw = ocp.StandardCheckpointer().restore(folder)
    with pytest.raises(jda.TreeError, match=r"state: not a train state: got .*TrainState.shapes"):
        jda.train_step(loss_fn, tx)(raw, BATCH)
    state = jda.TrainState(raw["params"], raw["opt_state"])
    with pytest.raises(jda.TreeError, match=r"opt_state: not the state of a distributed optimizer"):
        jda.train_step(loss_fn, tx)(state, BATCH)


@few(1)
@pytest.mark.parametrize("policy", [k for k in POLICIES if k != "no main"])
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@often(
    lambda policy, strategy: (
        (policy, strategy) in {("bfloat16", "optim_grads_params"), ("remainder16", "optim")}
    )
)
def test_params_put_into_a_state_raise_and_are_reloaded(policy, strategy):
    """w = 10 became -0.001 at the next step: the kernel reads the main parameters."""
    dtype, policy = POLICIES[policy]
    tx = make_tx(2, policy=policy, sharding_strategy=strategy, learning_rate=1e-3)
    step = jda.train_step(loss_fn, tx)
    state, _ = step(jda.TrainState.create(make_params(dtype), tx), BATCH)
    state, _ = step(state, BATCH)
    new = jax.tree.map(lambda x: np.full(x.shape, 10, x.dtype), make_params(dtype))
    edited = dataclasses.replace(state, params=new)
    has_main = state.opt_state.main_params is not None
    if has_main and tx.config.policy.main_params != REMAINDER16:
        with pytest.raises(jda.LayoutError, match=r"params\['\w+'\].*Call reload_main_params"):
            step(edited, BATCH)
    reloaded = jda.reload_main_params(edited, tx)
    assert_trees_same_bits(jda.full_params(reloaded, tx), jax.tree.map(jnp.asarray, new))
    main, opt_state, _ = jda.to_optax_state(reloaded, tx)
    assert all((x == 10).all() for x in jax.tree.leaves(main))
    assert_trees_same_bits(opt_state, jda.to_optax_state(state, tx)[1])  # moments and counts stay
    assert_trees_same_bits(state.replace(params=new, tx=tx), reloaded)
    stepped, _ = step(reloaded, BATCH)
    for x in jax.tree.leaves(jda.full_params(stepped, tx)):
        assert 9 < float(np.min(x.astype(np.float32))) and float(np.max(x)) < 11


def test_a_change_of_one_leaf_is_noticed():
    """Also in place, in a leaf of a packed bucket, and in one element of another device's shard."""
    tx = make_tx(2)
    step = jda.train_step(loss_fn, tx)
    state, _ = step(jda.TrainState.create(make_params(BF16), tx), BATCH)
    last = np.asarray(state.params["b"]).copy()
    last[-1, -1] += 1
    for name, value in (("bias", state.params["bias"] + 1), ("b", jnp.asarray(last))):
        kept = state.params[name]
        state.params[name] = value
        with pytest.raises(jda.LayoutError, match=rf"params\['{name}'\]: differ from the main"):
            step(state, BATCH)
        state.params[name] = kept
    labels = {"a": "x", "b": "y", "bias": "y"}
    frozen = make_tx(2, param_labels=labels, groups={"x": {"frozen": True}, "y": {}})
    state = jda.TrainState.create(make_params(), frozen)
    state.params["a"] = state.params["a"] + 1  # nothing else holds a frozen leaf
    want = np.asarray(state.params["a"])
    state, _ = jda.train_step(loss_fn, frozen)(state, BATCH)
    assert_same_bits(state.params["a"], want)


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
@often(lambda name: name == "bfloat16")
def test_restored_params_that_belong_to_the_state_pass(name):
    """Copies, not the arrays that the step returned; also before the first step, also NaN."""
    dtype, policy = POLICIES[name]
    nan = np.full_like(BATCH, np.nan)
    with_nan = make_params(dtype)
    with_nan["a"] = with_nan["a"].at[0].set(1e-40).at[1, 0].set(jnp.nan)
    for params, loss_scale, batches in (
        (with_nan, None, (BATCH, BATCH + 1)),
        (make_params(dtype), 1.0, (nan, BATCH, nan, BATCH + 1)),  # two of them skipped
    ):
        tx = make_tx(2, policy=policy, loss_scale=loss_scale)
        step = jda.train_step(loss_fn, tx)
        state = jda.TrainState.create(params, tx)
        for value in batches:
            state, _ = step(jax.tree.map(jnp.copy, state), value)
        assert int(state.opt_state.count) == 2
    wide = jda.TrainState.create(make_params(), tx, param_dtypes=dtype)
    wide, _ = step(jax.tree.map(jnp.copy, wide), BATCH)
    assert int(wide.opt_state.count) == 1


def test_replace_of_params_without_tx_raises():
    tx = make_tx()
    state = jda.TrainState.create(make_params(), tx, model_state=jnp.zeros(2))
    with pytest.raises(jda.TreeError, match=r"params: the optimizer would continue .*tx=tx"):
        state.replace(params=make_params())
    assert state.replace(params=state.params).params is state.params
    new = state.replace(model_state=jnp.ones(2))
    assert new.model_state.tolist() == [1, 1] and new.opt_state is state.opt_state
    with pytest.raises(jda.LayoutError, match=r"params: do not fit .*dtype bfloat16 instead of"):
        state.replace(params=make_params(BF16), tx=tx)
    with pytest.raises(jda.LayoutError, match=r"params: do not fit .*leaf \['c'\] is not expected"):
        state.replace(params=make_params() | {"c": jnp.ones(1)}, tx=tx)
    with pytest.raises(TypeError, match="unexpected keyword argument 'oops'"):
        state.replace(oops=1)


@pytest.mark.slow
def test_step_accepts_states_with_other_placements():
    """Host arrays, replicated arrays, and the params of another strategy of the same layout."""
    whole, sharded = make_tx(2), make_tx(2, sharding_strategy="optim_grads_params")
    state = jda.TrainState.create(make_params(BF16), whole)
    replicated = jax.NamedSharding(whole.config.mesh, jax.sharding.PartitionSpec())
    steps = [(tx, jda.train_step(loss_fn, tx)) for tx in (whole, sharded)]
    want, _ = steps[0][1](jax.tree.map(jnp.copy, state), BATCH)
    want = jda.full_params(want, whole)
    for other in (jax.device_get(state), jax.device_put(state, replicated), state):
        for tx, step in steps:
            on_host = isinstance(other.params["a"], np.ndarray)
            mine = jax.tree.map(np.copy if on_host else jnp.copy, other)
            got, _ = step(mine, BATCH)
            assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(got))
            assert_trees_same_bits(jda.full_params(got, tx), want)


@pytest.mark.slow
def test_main_params_of_a_distributed_state_need_tx():
    tx = jda.chain(optax.scale(0.5), make_tx(2))
    state, _ = jda.train_step(loss_fn, tx)(jda.TrainState.create(make_params(BF16), tx), BATCH)
    with pytest.raises(
        jda.TreeError, match=r"tx: needed to find .*main_params\(params, opt_state, tx"
    ):
        jda.main_params(state.params, state.opt_state)
    main = jda.main_params(state.params, state.opt_state, tx)
    assert_trees_same_bits(main, jda.to_optax_state(state, tx)[0])
    rounded = jax.tree.map(lambda x: x.astype(BF16), main)
    assert_trees_same_bits(rounded, jax.tree.map(np.asarray, state.params))
