"""Arguments, trees, placements and gradients for which a distributed optimizer raises."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from support.exact_sums import exact_batch, linear_loss, make_tx, random_params, without_empty


def test_gradients_that_were_already_summed_raise(cpu_mesh):
    """With check_vma=True, jax.grad sums over the devices by itself unless params are local."""
    mesh = cpu_mesh(4)
    tx = make_tx(mesh)
    state = jda.TrainState.create(without_empty(random_params()), tx)

    def wrong(params, opt_state, batch):
        return tx.step(jax.grad(linear_loss)(params, batch), opt_state, params)

    specs = (P(), tx.state_specs())
    mapped = jax.shard_map(wrong, mesh=mesh, in_specs=(*specs, P("data")), out_specs=specs)
    batch = jda.shard_batch(without_empty(exact_batch(np.random.default_rng(8))), tx)
    with pytest.raises(
        jda.MeshError, match=r"grads\['.*'\]: already reduced over the mesh.*local_params"
    ):
        jax.jit(mapped)(state.params, state.opt_state, batch)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        (dict(shard_axis="dta"), jda.MeshError, r"shard_axis 'dta': not an axis of the mesh: got axes \('data',\).*shard_axis='data'\?"),
        (dict(mesh="x"), jda.MeshError, r"mesh: not a mesh: got str, expected jax.sharding.Mesh. Make one"),
        (dict(sharding_strategy="optim_grad"), jda.PolicyError, r"sharding_strategy: unknown: got 'optim_grad', .*sharding_strategy='optim_grads'\?"),
        (dict(outer_sharding_strategy="optim"), jda.PolicyError, r"outer_sharding_strategy: 'optim' shards .*got sharding_strategy='optim', replica_axis=None"),
        (dict(replica_axis="data"), jda.MeshError, r"shard_axis: names no axis, or one of replica_axis: got shard_axis='data', replica_axis='data'"),
        (dict(shard_axis=("data", "data")), jda.MeshError, r"shard_axis: names an axis twice"),
        (dict(shard_axis=()), jda.MeshError, r"shard_axis: names no axis, or one of replica_axis"),
        (dict(replica_axis="rep"), jda.MeshError, r"replica_axis 'rep': not an axis of the mesh"),
        (dict(loss_scale=0), jda.HyperparameterError, r"loss_scale: out of range: got 0, expected a number between 0 and inf"),
        (dict(loss_scale="dynamic"), jda.HyperparameterError, r"loss_scale: out of range: got 'dynamic'"),
        (dict(groups={"a": {}}), jda.HyperparameterError, r"groups: labels and groups belong together"),
        (dict(groups={"a": dict(lr=1)}, param_labels="a"), jda.HyperparameterError, r"groups\['a'\]: unknown setting lr: got \{'lr': 1\}, expected a dict with some of lr_scale"),
        (dict(groups={"a": dict(b2=0.999)}, param_labels="a", policy=jda.MixedPrecisionPolicy(nu_dtype=jnp.bfloat16), b2=0.9), jda.PolicyError, r"cannot decay at this b2"),
        (dict(max_grad_norm=0.0), jda.HyperparameterError, r"max_grad_norm: out of range: got 0.0, expected a finite"),
        (dict(b2=1.0), jda.HyperparameterError, r"b2: out of range: got 1.0, expected a number in \[0, 1\)"),
        (dict(bucket_bytes=0), jda.HyperparameterError, r"bucket_bytes: out of range: got 0"),
        (dict(max_grad_norm="1"), jda.HyperparameterError, r"max_grad_norm: out of range: got '1', expected a finite"),
        (dict(policy="bf16"), jda.PolicyError, r"policy: not a policy: got 'bf16', expected jdistadam.MixedPrecisionPol"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_arguments(cpu_mesh, kwargs, error, message):
    with pytest.raises(error, match=message):
        make_tx(kwargs.pop("mesh", cpu_mesh(2)), **kwargs)


def test_an_axis_without_a_purpose_raises():
    mesh = jax.make_mesh((4, 2), ("data", "model"), devices=jax.devices("cpu")[:8])
    with pytest.raises(
        jda.MeshError,
        match=r"mesh: axis 'model' has no purpose: got \{'data': 4, 'model': 2\}, expected only",
    ):
        make_tx(mesh)


def test_bad_trees_and_placements(cpu_mesh):
    tx = make_tx(cpu_mesh(2))
    params = {"w": jnp.ones((4, 2))}
    state = jda.TrainState.create(params, tx)
    with pytest.raises(
        jda.DtypeError, match=r"params\['n'\]: dtype cannot be used: got int32, expected float32 or"
    ):
        jda.TrainState.create({"n": jnp.arange(3)}, tx)
    with pytest.raises(
        jda.ShapeError,
        match=r"batch\['x'\]: leading dimension .*got \(3, 2\), expected a multiple of 2",
    ):
        jda.shard_batch({"x": np.ones((3, 2))}, tx)
    with pytest.raises(
        jda.MeshError, match=r"step: called outside of jax.shard_map: .*expected axes 'data'"
    ):
        tx.step(params, state.opt_state, params)
    other = jda.TrainState.create({"w": jnp.ones((4000, 2))}, tx)
    step = jda.train_step(lambda p, x: jnp.mean(x) * jnp.sum(p["w"]), tx)
    with pytest.raises(
        jda.LayoutError,
        match=r"opt_state.layout_identity: the state of another layout: got .*shape \[4000, 2\] instead",
    ):
        step(jda.TrainState(state.params, other.opt_state), np.ones((2, 1)))
    with pytest.raises(ValueError, match="not passing `params`"):
        tx.update(params, state.opt_state)
    with pytest.raises(jda.TreeError, match=r"opt_state: not the state of optax's optimizer"):
        jda.from_optax_state(params, optax.sgd(1e-3).init(params), tx)
    adam = jda.to_optax_state(state, tx)[1]
    with pytest.raises(
        jda.ShapeError, match=r"opt_state\[0\].mu\['w'\]: shape differs from params: got \(4, 2\)"
    ):
        jda.from_optax_state({"w": jnp.ones((2, 2))}, adam, tx)


def test_state_of_another_policy_raises(cpu_mesh):
    tx = make_tx(cpu_mesh(2), mask=None)
    state = jda.TrainState.create({"w": jnp.ones((4, 2))}, tx)
    low = state.opt_state._replace(nu=state.opt_state.nu.astype(jnp.bfloat16))
    step = jda.train_step(lambda p, x: jnp.mean(x) * jnp.sum(p["w"]), tx)
    with pytest.raises(
        jda.DtypeError,
        match=r"opt_state.nu: dtype differs from the policy: .* float32. Cast it, or set nu_dtype",
    ):
        step(jda.TrainState(state.params, low), np.ones((2, 1), np.float32))


def test_a_dtype_that_no_option_says(cpu_mesh):
    """The action names none: the policy has no mu.scales_dtype."""
    policy = jda.MixedPrecisionPolicy(mu_dtype="block16")
    tx = make_tx(cpu_mesh(2), mask=None, policy=policy)
    state = jda.TrainState.create({"w": jnp.ones((64, 128))}, tx)
    mu = state.opt_state.mu._replace(scales=state.opt_state.mu.scales.astype(jnp.bfloat16))
    step = jda.train_step(lambda p, x: jnp.mean(x) * jnp.sum(p["w"]), tx)
    with pytest.raises(
        jda.DtypeError,
        match=r"opt_state.mu.scales: .* expected float32. Make the state with init\(params\)",
    ):
        step(
            jda.TrainState(state.params, state.opt_state._replace(mu=mu)),
            np.ones((2, 1), np.float32),
        )


def test_wrong_gradients_inside_shard_map(cpu_mesh):
    mesh = cpu_mesh(2)
    tx = make_tx(mesh, mask=None)
    state = jda.TrainState.create({"w": jnp.ones((4, 2))}, tx)
    cases = (
        (
            {"w": jnp.ones((1, 2))},
            jda.ShapeError,
            r"grads\['w'\]: shape differs from params: got \(1, 2\), expected",
        ),
        ({"v": jnp.ones((4, 2))}, jda.TreeError, r"grads\['w'\]: missing, params has it"),
        (
            {"w": jnp.ones((4, 2), jnp.int32)},
            jda.DtypeError,
            r"grads\['w'\]: dtype cannot be used: got int32",
        ),
    )
    for grads, error, message in cases:
        own = lambda p, s: tx.step(grads, s, p)  # noqa: E731, B023
        specs = (P(), tx.state_specs())
        with pytest.raises(error, match=message):
            mapped = jax.shard_map(own, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)
            jax.eval_shape(mapped, state.params, state.opt_state)
