"""Sharded parameters that a step gathers once: what it sends, holds, and lets a model do.

That every mesh and policy gives the bits of the interpreter is in tests/test_compiled_cases.py.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from support.bits import assert_trees_same_bits
from support.dtypes import dtypes
from support.optimizers import distributed_adamw
from support.own_loop import jit_over_mesh
from support.samples import few

SHAPES = {"rows": (128, 192), "columns": (3, 8192), "bias": (24,), "odd": (5,), "scalar": ()}
SHARDED = {"rows", "columns"}
HYPER = dict(b1=0.87, b2=0.93, eps=1e-3, weight_decay=0.11)
MESHES = {
    "flat": ((8,), ("data",), {}),
    "twice": (
        (2, 4),
        ("replica", "data"),
        dict(replica_axis="replica", outer_sharding_strategy="optim"),
    ),
}


def make_tx(mesh="flat", *, reshard=False, policy=None, **kwargs):
    shape, names, axes = MESHES[mesh]
    return distributed_adamw(
        optax.linear_schedule(0.02, 0.01, 7),
        mesh=jax.make_mesh(shape, names),
        **dtypes(**(policy or {})),
        reshard_after_forward=reshard,
        **dict(sharding_strategy="optim_grads_params") | HYPER | axes | kwargs,
    )


def params_of(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return {k: jnp.asarray(rng.normal(size=shape), dtype) for k, shape in SHAPES.items()}


def loss_fn(params, batch):
    """Its gradients are the batch: small integers, whose sums are exact in every order."""
    terms = [jnp.sum(p.astype(jnp.float32) * batch[k].sum(0)) for k, p in params.items()]
    return sum(terms)


def batches(steps, rows=16):
    rng = np.random.default_rng(1)
    for _ in range(steps):
        yield {k: rng.integers(-9, 10, (rows, *x)).astype(np.float32) for k, x in SHAPES.items()}


def train(tx, state, steps=3, micro=2):
    step = jda.train_step(loss_fn, tx, accumulate_steps=micro)
    for batch in batches(steps):
        state, metrics = step(state, batch)
    return state, metrics


def exported(state, tx):
    return jda.full_params(state, tx), *jda.to_optax_state(state, tx)[:2]


@few(1)
@pytest.mark.parametrize("mesh", MESHES)
def test_a_step_gathers_and_reduces_once_whatever_the_micro_batches(mesh):
    tx = make_tx(mesh, policy=dict(param_comm_dtype="float16", grad_reduce_dtype="float32"))
    state = jda.TrainState.create(params_of(), tx)
    sent = []
    for micro in (1, 4):
        planned = tx.config.schedule(params_of(), accumulate_steps=micro).collectives
        assert all(c.times == 1 for c in planned)
        step = jda.train_step(loss_fn, tx, accumulate_steps=micro)
        found = jda.audit(step, state, next(batches(1, rows=32)))
        assert found.passed or found.only_widened, found
        sent.append(collections.Counter((c.op, c.dtype, c.elements) for c in planned))
    assert sent[0] == sent[1]
    again = make_tx(mesh, reshard=True).config.schedule(params_of(), accumulate_steps=4)
    assert max(c.times for c in again.collectives) == 4


def test_reshard_after_forward_changes_no_layout():
    """One layout and one placement: a state passes between the two, and has the same bits."""
    once, often = make_tx(), make_tx(reshard=True)
    assert once.layout(params_of()) == often.layout(params_of())
    state = jda.TrainState.create(params_of(), once)
    for name, x in state.params.items():
        shape = x.addressable_shards[0].data.shape
        assert (np.prod(shape) == x.size // 8) == (name in SHARDED), name
    state, _ = train(once, state)
    moved, _ = train(often, jax.tree.map(jnp.copy, state))
    stayed, _ = train(once, state)
    assert_trees_same_bits(exported(moved, often), exported(stayed, once))


def test_state_is_saved_and_restored_between_strategies(tmp_path):
    once = make_tx("twice")
    state, _ = train(once, jda.TrainState.create(params_of(), once))
    jda.save(tmp_path, state, once)
    for other in (make_tx("flat"), make_tx("twice", reshard=True)):
        found = jda.restore(tmp_path, jda.TrainState.shapes(params_of(), other), other)
        assert_trees_same_bits(exported(found, other), exported(state, once))


def own_step(tx, micro):
    """A loop that gathers once, before it differentiates."""
    tx = tx.bind(params_of())

    def local_step(params, state, batch):
        local = jda.gather_params(jda.local_params(params, tx), tx)
        parts = jax.tree.map(lambda x: x.reshape(micro, x.shape[0] // micro, *x.shape[1:]), batch)
        acc = tx.init_grads(params)
        for i in range(micro):
            grads = jax.grad(loss_fn)(local, jax.tree.map(lambda x, i=i: x[i], parts))
            acc = tx.accumulate(acc, grads)
        return tx.step(acc, state, params)

    return jit_over_mesh(local_step, tx, params_of())


@few(1)
@pytest.mark.parametrize("mesh", MESHES)
def test_custom_training_loop_is_train_step(mesh):
    tx = make_tx(mesh)
    state = jda.TrainState.create(params_of(), tx)
    params, opt_state = state.params, state.opt_state
    step = own_step(tx, 2)
    for batch in batches(3):
        params, opt_state = step(params, opt_state, jda.shard_batch(batch, tx))
    want, _ = train(tx, state)
    assert_trees_same_bits(exported(jda.TrainState(params, opt_state), tx), exported(want, tx))


def test_a_custom_training_loop_may_differentiate_what_is_gathered():
    """The gradient of a shard is summed in the backward pass, as with resharding."""
    ends = []
    for reshard in (False, True):
        tx = make_tx(reshard=reshard).bind(params_of(jnp.bfloat16))
        state = jda.TrainState.create(params_of(jnp.bfloat16), tx)

        def local_step(params, state, batch, tx=tx):
            loss = lambda p: loss_fn(jda.gather_params(p, tx), batch)  # noqa: E731
            grads = jax.grad(loss)(jda.local_params(params, tx))
            return *tx.step(grads, state, params), tx.grad_norm(grads, state)

        specs = tx.param_specs(state.params), tx.state_specs()
        step = jax.shard_map(
            local_step, mesh=tx.config.mesh, in_specs=(*specs, P("data")), out_specs=(*specs, P())
        )
        batch = jda.shard_batch(next(batches(1)), tx)
        ends.append(jax.jit(step)(state.params, state.opt_state, batch))
    assert_trees_same_bits(*ends)


@pytest.mark.parametrize("weight", [None, 2.0])
def test_gradients_of_shards_are_no_whole_sums(weight):
    """Summed already, they cannot be added to gradients of this device alone."""
    tx = make_tx().bind(params_of())
    params = jax.device_put(params_of(), tx.param_shardings(params_of()))

    def shard_grads(params):
        acc = tx.init_grads(params)
        return tx.accumulate(acc, jda.local_params(params, tx), weight).weight

    specs = tx.param_specs(params)
    mapped = jax.shard_map(
        shard_grads, mesh=tx.config.mesh, in_specs=(specs,), out_specs=P(), check_vma=False
    )
    with pytest.raises(
        jda.MeshError, match=r"grads\['columns'\]: already summed .* with respect to gather_params"
    ):
        jax.eval_shape(mapped, params)


def test_layers_of_a_scan_are_gathered_before_it():
    """The model may gather in its scan all the same: there layers are whole."""

    def scanned(tx):
        def loss(params, x):
            def body(x, layer):
                layer = jda.gather_params(layer, tx)
                return jnp.tanh(x @ layer["w"] + layer["scale"][None]), None

            return jnp.mean(jax.lax.scan(body, x, params["layers"])[0])

        return loss

    rng = np.random.default_rng(4)
    shapes = dict(w=(3, 96, 96), scale=(3, 96))
    params = {"layers": {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}}
    batches = rng.normal(size=(2, 16, 96)).astype(np.float32)
    ends = []
    for strategy in (dict(reshard=True, sharding_strategy="optim"), {}):
        tx = make_tx(layers=lambda path: "scan" if "layers" in path else None, **strategy)
        step = jda.train_step(scanned(tx), tx)
        state = jda.TrainState.create(params, tx)
        for batch in batches:
            state, metrics = step(state, batch)
        ends.append((jda.full_params(state, tx), state.opt_state.count, metrics["loss"]))
    assert_trees_same_bits(*ends)
    assert state.params["layers"]["w"].sharding.spec[:2] == (None, "data")
    planned = tx.config.schedule(params, accumulate_steps=3).collectives
    assert all(c.times == 1 and c.when == "step" for c in planned)


def test_reshard_after_forward_works_with_skips_chains_and_injection():
    """A non-finite gradient leaves all shards as they are."""

    def make(reshard):
        inner = jda.inject_hyperparams(distributed_adamw)(
            learning_rate=0.02, mesh=jax.make_mesh((8,), ("data",)), loss_scale=2.0,
            sharding_strategy="optim_grads_params", reshard_after_forward=reshard, **HYPER,
        )  # fmt: skip
        return jda.chain(optax.scale(0.5), inner)

    ends = []
    for reshard in (False, True):
        tx = make(reshard)
        step = jda.train_step(loss_fn, tx)
        state = jda.TrainState.create(params_of(), tx)
        for i, batch in enumerate(batches(3)):
            batch["rows"][3, 5] = np.nan if i == 1 else 1.0
            state, metrics = step(state, batch)
        assert int(metrics["skipped"]) == 1 and int(state.step) == 2
        ends.append(exported(state, tx))
    assert_trees_same_bits(*ends)


@few(1)
@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_model_axes_give_the_same_bits_with_and_without_resharding(kind):
    type = {"explicit": jax.sharding.AxisType.Explicit, "auto": jax.sharding.AxisType.Auto}[kind]
    mesh = jax.make_mesh((2, 2, 2), ("replica", "data", "model"), axis_types=(type,) * 3)
    specs = dict(rows=P("model"), columns=P(None, "model"), bias=P("model"), odd=None, scalar=P())
    make = functools.partial(
        distributed_adamw, 0.02, mesh=mesh, param_specs=specs, replica_axis="replica",
        outer_sharding_strategy="optim", sharding_strategy="optim_grads_params", **HYPER,
    )  # fmt: skip
    ends = []
    for reshard in (False, True):
        tx = make(reshard_after_forward=reshard)
        state, _ = train(tx, jda.TrainState.create(params_of(), tx))
        ends.append(exported(state, tx))
    assert_trees_same_bits(*ends)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        (dict(sharding_strategy="optim", reshard_after_forward=False), jda.PolicyError, r"^reshard_after_forward: parameters are not sharded under this strategy: got False with sharding_strategy='optim'"),
        (dict(sharding_strategy="optim_grads_params", reshard_after_forward="no"), jda.HyperparameterError, r"^reshard_after_forward: .*got 'no'"),
    ],
)  # fmt: skip
def test_unsupported_reshard_after_forward_raises(kwargs, error, message):
    with pytest.raises(error, match=message):
        distributed_adamw(1e-3, mesh=jax.make_mesh((8,), ("data",)), **kwargs)
