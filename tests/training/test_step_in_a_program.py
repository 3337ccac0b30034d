"""A training step as a part of a larger program: jit, a scan over batches, shapes alone."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from jdistadam.distributed import bucket_leaves
from support.bits import assert_trees_same_bits
from support.h200 import WIDTH, collectives, loss_fn, params_of, placed
from support.optimizers import distributed_adamw
from support.samples import often

HYPER = dict(learning_rate=3e-3, b1=0.87, b2=0.9973, eps=1e-7, weight_decay=0.13)
STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]


def loss(params, x):
    return jnp.mean(jnp.square(x @ params["w"].astype(jnp.float32) - params["b"][None]))


def made(cpu_mesh, strategy="optim", **kwargs):
    tx = distributed_adamw(mesh=cpu_mesh(4), sharding_strategy=strategy, loss_scale=8.0, **HYPER)
    rng = np.random.default_rng(0)
    params = {
        "w": jnp.asarray(rng.normal(size=(256, 128)), jnp.bfloat16),
        "b": jnp.asarray(rng.normal(size=128), jnp.float32),
    }
    batches = rng.normal(size=(10, 16, 256)).astype(np.float32)
    step = jda.train_step(loss, tx, accumulate_steps=2, **kwargs)
    return step, jda.TrainState.create(params, tx), batches


@pytest.mark.parametrize("strategy", STRATEGIES)
@often(lambda strategy: strategy == "optim")
def test_a_scan_over_batches_gives_the_bits_of_calls(cpu_mesh, strategy):
    """The gradients of both come from the same program, once inlined in a loop."""
    step, state, batches = made(cpu_mesh, strategy)
    scanned, metrics = jax.jit(lambda state, batches: jax.lax.scan(step, state, batches))(
        state, batches
    )
    losses = []
    for batch in batches:
        state, one = step(state, batch)
        losses.append(float(one["loss"]))
    assert losses[-1] < losses[0]
    np.testing.assert_array_equal(np.asarray(metrics["loss"]), np.float32(losses))
    assert_trees_same_bits(scanned.params, state.params)
    assert_trees_same_bits(scanned.opt_state, state.opt_state)
    after, _ = step(scanned, batches[0])  # and goes on outside of the program
    assert int(after.opt_state.count) == 11


@pytest.mark.parametrize("many_leaves", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@often(lambda strategy, many_leaves: strategy == "optim_grads_params" or many_leaves)
def test_params_are_read_and_replaced_in_a_program(cpu_mesh, monkeypatch, strategy, many_leaves):
    if many_leaves:  # so that fields begin bucket by bucket
        monkeypatch.setattr(bucket_leaves, "_MANY", 0)
    step, state, batches = made(cpu_mesh, strategy)
    tx = step.tx
    state, _ = step(state, batches[0])
    want = jax.tree.map(jnp.copy, jda.full_params(state, tx))
    assert_trees_same_bits(jax.jit(lambda s: jda.full_params(s, tx))(state), want)

    def halved(state):
        return state.replace(params=jax.tree.map(lambda x: x / 2, state.params), tx=tx)

    def replaced_between(state, batch):
        state, metrics = step(state, batch)
        return halved(state), metrics["loss"]

    scanned, losses = jax.jit(lambda s, b: jax.lax.scan(replaced_between, s, b))(
        state, batches[1:4]
    )
    for batch, loss in zip(batches[1:4], losses, strict=True):
        state, metrics = step(state, batch)
        assert metrics["loss"] == loss
        state = halved(state)
    assert_trees_same_bits(scanned.params, state.params)
    assert_trees_same_bits(scanned.opt_state, state.opt_state)


def test_a_conversion_in_a_program_raises(cpu_mesh):
    step, state, _ = made(cpu_mesh)
    with pytest.raises(jda.TreeError, match=r"^state: this runs on the host, not inside"):
        jax.jit(lambda s: jda.to_optax_state(s, step.tx)[0])(state)


def test_eval_shape_and_make_jaxpr_accept_a_step(cpu_mesh):
    step, state, batches = made(cpu_mesh)
    shapes, metrics = jax.eval_shape(step, state, batches[0])
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(
        lambda x: (x.shape, x.dtype), state
    )
    assert metrics["loss"].shape == ()
    assert "jdistadam" in str(jax.make_jaxpr(step)(state, batches[0]))


def test_compiled_programs_have_the_names_of_the_functions(cpu_mesh, caplog):
    """Profiles, and errors for lack of memory, name them."""
    step, state, batches = made(cpu_mesh)
    evaluate = jda.eval_step(loss, step.tx)
    assert "@jit_train_step" in step.lower(state, batches[0]).as_text()
    with jax.log_compiles(), caplog.at_level("WARNING"):
        state, _ = step(state, batches[0])
        evaluate(state, batches[0])
    compiled = [text for text in caplog.messages if "Finished XLA compilation of" in text]
    for name in ("jit(train_step)", "jit(eval_step)"):
        assert any(name in text for text in compiled), compiled


def test_given_compiler_options_override_chosen_ones(cpu_mesh, h200s):
    step, *_ = made(cpu_mesh)
    assert step.compiler_options == {}
    given = {"xla_gpu_all_gather_combine_threshold_bytes": 1}
    tx = distributed_adamw(1e-3, mesh=h200s(2))
    step = jda.train_step(loss, tx, compiler_options=given)
    chosen = step.compiler_options
    assert chosen["xla_gpu_all_gather_combine_threshold_bytes"] == 1
    assert chosen["xla_gpu_reduce_scatter_combine_threshold_bytes"] == 256 << 20


def test_options_follow_the_kind_of_layers(h200s):
    """It is known once there are params: models that scan are pipelined, others never merge."""
    found = {}
    for kind in ("scan", "block"):
        given = dict(sharding_strategy="optim_grads_params", layers=lambda path, kind=kind: kind)
        tx = distributed_adamw(1e-3, mesh=h200s(2), **given)
        step, evaluate = jda.train_step(loss, tx), jda.eval_step(loss, tx)
        for program in (step, evaluate):
            with pytest.raises(
                jda.TreeError, match=r"^compiler_options: depend on layers, .*got no"
            ):
                _ = program.compiler_options
        jda.TrainState.shapes(params_of(jnp.float32), tx)
        assert step.compiler_options == evaluate.compiler_options
        found[kind] = step.compiler_options
    merged = [x["xla_gpu_all_gather_combine_threshold_bytes"] for x in found.values()]
    assert merged == [256 << 20, 1]
    assert ["xla_gpu_enable_while_loop_unrolling" in x for x in found.values()] == [True, False]


@pytest.mark.parametrize("n", [1, 2])
def test_options_that_do_not_reach_the_program_warn_once_on_gpus(h200s, n):
    tx = distributed_adamw(1e-3, mesh=h200s(n))
    state = jda.TrainState.shapes(params_of(jnp.float32), tx)
    batch = placed(h200s(n), jax.ShapeDtypeStruct((16, WIDTH), jnp.float32), P("data"))
    step = jda.train_step(loss_fn, tx)
    if n == 1:  # nothing is sent: no option is missed
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            jax.eval_shape(step, state, batch)
        return
    with pytest.warns(UserWarning, match="compiler_options=step.compiler_options"):
        jax.eval_shape(step, state, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(lambda state, batch: step(state, batch), state, batch)  # traced again


@pytest.mark.slow
def test_options_of_the_outer_program_make_the_same_collectives(h200s):
    """With them a traced step sends as many arrays one by one as a call of it does."""
    mesh = h200s(2)
    tx = distributed_adamw(1e-3, mesh=mesh)
    state = jda.TrainState.shapes(params_of(jnp.float32), tx)
    batch = placed(mesh, jax.ShapeDtypeStruct((16, WIDTH), jnp.float32), P("data"))
    options = {"xla_gpu_reduce_scatter_combine_threshold_bytes": 1}
    step = jda.train_step(loss_fn, tx, compiler_options=options)

    def count(program):
        text = program.compile().as_text()
        return sum(op == "reduce-scatter" for op, _ in collectives(text))

    alone = count(step.lower(state, batch))
    with pytest.warns(UserWarning, match="compiler_options"):
        traced = jax.jit(step, donate_argnums=0, compiler_options=step.compiler_options)
        inside = count(traced.lower(state, batch))
    assert inside == alone > 1
    assert count(jax.jit(step, donate_argnums=0).lower(state, batch)) < alone
