"""Groups of parameters, and meshes on which parameters are sharded over an axis of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from support.bits import assert_same_bits, assert_trees_same_bits
from support.given_gradients import SHAPES, make_tx, own_step, random_grads, random_params, run
from support.placements import FLAT, STRATEGIES
from support.samples import often
from support.ulp import assert_step_close

GROUPS = {
    "body": {},
    "head": dict(lr_scale=0.25, weight_decay=0.5, b1=0.5, b2=0.9),
    "warm": dict(lr_scale=lambda count: 1.0 / (count + 1.0)),
    "ice": dict(frozen=True),
}
LABELS = {"rows": "body", "columns": "head", "prime": "ice", "small": "head", "scalar": "warm"}


@pytest.mark.parametrize("strategy", STRATEGIES)
@often(lambda strategy: strategy == "optim_grads")
def test_groups_equal_optimizers_of_their_own(strategy):
    """Each leaf, two steps, against jitted optax with the hyperparameters of its group."""
    base = dict(learning_rate=3e-3, b1=0.87, b2=0.9973, eps=1e-7, eps_root=1e-12, weight_decay=0.13)
    tx = make_tx(FLAT, sharding_strategy=strategy, param_labels=LABELS, groups=GROUPS)
    state = jda.TrainState.create(random_params(), tx)
    step = own_step(tx, state.params)
    rng = np.random.default_rng(6)
    for count in range(2):
        grads = {k: rng.integers(-9, 10, (8, 1, *s)) / 8 for k, s in SHAPES.items()}
        grads = jax.tree.map(lambda x: x.astype(np.float32), grads)
        main, old, _ = jda.to_optax_state(state, tx)
        state = jda.TrainState(*step(jda.shard_batch(grads, tx), state.opt_state, state.params))
        got_main, got_state, _ = jda.to_optax_state(state, tx)
        for name, label in LABELS.items():
            if label == "ice":
                assert_same_bits(got_main[name], np.asarray(random_params()[name]), name)
                assert not np.any(got_state[0].mu[name])
                continue
            own = dict(GROUPS[label])
            scale = own.pop("lr_scale", 1.0)
            scale = scale(count) if callable(scale) else scale
            hyper = base | own | dict(learning_rate=base["learning_rate"] * scale)
            if not SHAPES[name] or len(SHAPES[name]) == 1:
                hyper["weight_decay"] = 0.0  # masked, whatever the group says
            before = dict(params=main[name], mu=old[0].mu[name], nu=old[0].nu[name])
            mean = jnp.asarray(grads[name].sum((0, 1)) / 8)
            theirs = optax.adamw(**hyper)
            adam = optax.ScaleByAdamState(jnp.int32(count), before["mu"], before["nu"])
            like = jax.eval_shape(theirs.init, before["params"])
            updates, new = jax.jit(theirs.update)(
                mean, (adam, *like[1:]), jnp.asarray(before["params"])
            )
            want = dict(
                params=optax.apply_updates(jnp.asarray(before["params"]), updates),
                mu=new[0].mu,
                nu=new[0].nu,
            )
            got = dict(params=got_main[name], mu=got_state[0].mu[name], nu=got_state[0].nu[name])
            assert_step_close(got, want, before, mean, hyper, count)


def groups_of(*labels):
    return {label: GROUPS[label] for label in labels}


def test_frozen_leaves_have_no_state_and_are_not_sent():
    all_frozen = dict.fromkeys(SHAPES, "ice") | {"rows": "body"}
    tx = make_tx(FLAT, param_labels=all_frozen, groups=groups_of("body", "ice"))
    state = jda.TrainState.create(random_params(), tx)
    assert state.opt_state.mu.size == 8 * 19 * 128  # 48 x 400, each eighth up to whole 128s
    text = own_step(tx, state.params).lower(
        jda.shard_batch(random_grads(np.random.default_rng(0)), tx), state.opt_state, state.params
    )
    assert text.as_text().count("stablehlo.all_to_all") == 1


def test_groups_cost_no_further_kernel_call():
    def calls(**kwargs):
        tx = make_tx(FLAT, **kwargs)
        state = jda.TrainState.create(random_params(), tx)
        grads = jda.shard_batch(random_grads(np.random.default_rng(0)), tx)
        return own_step(tx, state.params).lower(grads, state.opt_state, state.params).as_text().count(
            "@jdistadam_adam"
        )  # fmt: skip

    assert calls() == calls(param_labels=LABELS, groups=GROUPS) == 1


def test_labels_may_be_a_function_or_a_prefix_and_must_have_groups():
    params = {"a": {"w": jnp.ones((4, 2)), "b": jnp.ones(3)}, "c": jnp.ones(5)}
    for labels in (
        {"a": "head", "c": "ice"},
        lambda p: jax.tree.map(lambda x: "ice" if x.shape == (5,) else "head", p),
    ):
        tx = make_tx(FLAT, mask=None, param_labels=labels, groups=groups_of("head", "ice"))
        layout = tx.config.layout(params)
        assert [leaf.group for leaf in layout.leaves] == [0, 0, None]
    tx = make_tx(FLAT, mask=None, param_labels={"a": "head", "c": "nose"}, groups=GROUPS)
    with pytest.raises(
        jda.TreeError,
        match=r"params\['c'\]: its label belongs to no group: got 'nose', expected 'b",
    ):
        tx.init(params)
    tx = make_tx(FLAT, mask=None, param_labels={"a": "head"}, groups=GROUPS)
    with pytest.raises(jda.TreeError, match="param_labels: structure differs from params"):
        tx.init(params)
    tx = make_tx(FLAT, mask=None, param_labels={"a": "head", "c": 3}, groups=GROUPS)
    with pytest.raises(jda.DtypeError, match=r"param_labels\['c'\]: not a str: got 3"):
        tx.init(params)


# Tensor-parallel axes. "columns" is cut along its last dimension, "rows" along its first.
SPECS = {"rows": P("model"), "columns": P(None, "model"), "prime": P(), "small": P(), "scalar": P()}
MESHES = {
    "flat": (dict(shape=(4, 2), names=("data", "model")), {}),
    "first": (dict(shape=(2, 4), names=("model", "data")), {}),
    "hybrid": (
        dict(shape=(2, 2, 2), names=("replica", "data", "model")),
        dict(replica_axis="replica"),
    ),
    "twice": (
        dict(shape=(2, 2, 2), names=("replica", "data", "model")),
        dict(replica_axis="replica", outer_sharding_strategy="optim"),
    ),
}


def tensor_step(tx, params, check_vma):
    tx = tx.bind(params)

    def local(grads, state, params):
        return tx.step(jax.tree.map(lambda x: x[0, 0], grads), state, params)

    params_specs, state_specs = tx.param_specs(params), tx.state_specs()
    data = tx.config.parallel.batch_spec[0]
    grads_specs = {name: P(data, None, *spec) for name, spec in SPECS.items()}
    step = jax.shard_map(
        local,
        mesh=tx.config.mesh,
        in_specs=(grads_specs, state_specs, params_specs),
        out_specs=(params_specs, state_specs),
        check_vma=check_vma,
    )
    placed = jax.tree.map(lambda spec: jax.NamedSharding(tx.config.mesh, spec), grads_specs)
    return jax.jit(step), placed


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mesh", MESHES)
@often(
    lambda mesh, strategy, check_vma: (
        (mesh, strategy) == ("first", "optim_grads_params") and check_vma
    )
)
def test_tensor_axes_change_no_bit(mesh, strategy, check_vma):
    """Four steps, masked decay, bfloat16 params; against four devices without the axis."""
    shape, kwargs = MESHES[mesh]
    if strategy == "no_shard" and mesh == "twice":
        kwargs = dict(replica_axis="replica")
    policy = jda.MixedPrecisionPolicy(grad_comm_dtype="bfloat16", grad_reduce_dtype="float32")
    tx = make_tx(shape, policy, sharding_strategy=strategy, param_specs=SPECS, **kwargs)
    state = jda.TrainState.create(random_params(), tx, param_dtypes=jnp.bfloat16)
    step, placed = tensor_step(tx, state.params, check_vma)
    rng = np.random.default_rng(1)
    params, opt_state = state.params, state.opt_state
    for _ in range(4):
        grads = random_grads(rng, 4)
        params, opt_state = step(jax.device_put(grads, placed), opt_state, params)
    state = jda.TrainState(params, opt_state)
    full = jda.full_params(state, tx)
    for name, x in full.items():
        assert len({str(s.index) for s in x.addressable_shards}) == (
            2 if "model" in SPECS[name] or None in SPECS[name] else 1
        )
    alone = make_tx(dict(shape=(4,), names=("data",)), policy)
    want = run(alone, jnp.bfloat16, steps=4, devices=4)
    assert_trees_same_bits((full, *jda.to_optax_state(state, tx)[:2]), want, mesh)
    exact = [x.astype(np.float64).sum((0, 1)) / 4 for x in grads.values()]
    norm = np.sqrt(sum((x**2).sum() for x in exact))
    # Each contribution is rounded to bfloat16: relative 2^-9 on every element, so on the norm.
    np.testing.assert_allclose(opt_state.grad_norm, norm, rtol=2**-9 + 1e-5)

    # And back: the state of the single axis on this mesh.
    again = jda.from_optax_state(*want[1:], tx, param_dtypes=jnp.bfloat16)
    assert_trees_same_bits(jda.to_optax_state(again, tx)[:2], want[1:], mesh)
