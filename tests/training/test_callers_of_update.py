"""What calls ``tx.update`` of a distributed optimizer: wrappers of optax, Flax's classes, users.

A wrapper saw one device's gradients, and the main parameters did not follow its updates; nothing
said so. ``update`` cannot see what stands around it, so it raises; ``unwrapped`` is for users.
"""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from support.bits import assert_trees_same_bits
from support.lookalike import BATCH, make_params, make_tx
from support.samples import few

ALTERNATIVES = ("jda.train_step", "tx.step", "jda.chain", "max_grad_norm", "accumulate_steps", "loss_scale", "fused_adamw", "unwrapped")  # fmt: skip
WRAPPERS = {
    "chain with clip_by_global_norm": lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
    "chain with clip": lambda tx: optax.chain(optax.clip(1.0), tx),
    "chain with adaptive_grad_clip": lambda tx: optax.chain(optax.adaptive_grad_clip(0.1), tx),
    "chain with normalize": lambda tx: optax.chain(optax.normalize_by_update_norm(), tx),
    "chain with a scale after it": lambda tx: optax.chain(tx, optax.scale(0.5)),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "masked": lambda tx: optax.masked(tx, lambda p: jax.tree.map(lambda _: True, p)),
    "inject_hyperparams": lambda tx: optax.inject_hyperparams(lambda unused: tx)(unused=1.0),
    "nothing": lambda tx: tx,
}


def raises_with_alternatives():
    return pytest.raises(
        jda.PolicyError, match="^update: " + "".join(f"(?=.*{x})" for x in ALTERNATIVES)
    )


def loss(params, x):
    return sum(jnp.sum(p.astype(jnp.float32)) for p in jax.tree.leaves(params)) * jnp.mean(x)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_update_raises_in_a_shard_map_whatever_wraps_it(wrapper, check_vma):
    tx = make_tx()
    wrapped, params = WRAPPERS[wrapper](tx), make_params()

    def local_step(params, x):
        grads = jax.grad(loss)(jda.local_params(params, tx), x)
        updates, _ = wrapped.update(grads, wrapped.init(params), params)
        return optax.apply_updates(params, updates)

    step = jax.shard_map(
        local_step,
        mesh=tx.config.mesh,
        in_specs=(P(), P("data")),
        out_specs=P(),
        check_vma=check_vma,
    )
    with raises_with_alternatives():
        jax.eval_shape(step, params, jda.shard_batch(BATCH, tx))


def test_update_raises_in_flax_train_state():
    params = make_params()
    state = TrainState.create(apply_fn=None, params=params, tx=make_tx())
    with raises_with_alternatives():
        state.apply_gradients(grads=params)


def test_update_raises_in_nnx_optimizer():
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, make_tx(), wrt=nnx.Param)
    with raises_with_alternatives():
        optimizer.update(model, nnx.state(model, nnx.Param))


@few(6)
@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("made", ["distributed", "chain", "inject_hyperparams", "bind", "copy"])
def test_update_raises_outside_of_a_shard_map(made, run):
    params, tx = make_params(), make_tx()
    tx = {
        "distributed": lambda: tx,
        "chain": lambda: jda.chain(optax.scale(2.0), tx),
        "inject_hyperparams": lambda: jda.inject_hyperparams(make_tx_with_rate)(1e-3),
        "bind": lambda: tx.bind(params),
        "copy": lambda: copy.copy(tx),
    }[made]()
    with raises_with_alternatives():
        run(tx.update)(params, tx.init(params), params)


def make_tx_with_rate(learning_rate):
    return make_tx(learning_rate=learning_rate)


def test_wrapped_fused_adamw_trains_with_sharded_state(cpu_mesh):
    """What the message names: in jax.jit the clip sees whole gradients (of +-1: an exact norm)."""
    mesh, params = cpu_mesh(8), {"w": jnp.linspace(-1.0, 1.0, 512).reshape(64, 8)}
    tx = optax.chain(optax.clip_by_global_norm(1.0), jda.fused_adamw(1e-2, weight_decay=0.1))
    plain = TrainState.create(apply_fn=None, params=params, tx=tx)
    sharded = jax.device_put(plain.params, jax.NamedSharding(mesh, P()))
    state = TrainState.create(apply_fn=None, params=sharded, tx=tx)
    place = lambda x: jax.device_put(x, jax.NamedSharding(mesh, P("data") if x.ndim else P()))  # noqa: E731
    state = state.replace(opt_state=jax.tree.map(place, state.opt_state))
    step = jax.jit(lambda s, g: s.apply_gradients(grads=g))
    for i in range(10):
        grads = {"w": jnp.sign(jnp.sin(jnp.arange(512.0) * (i + 1) + 0.5)).reshape(64, 8)}
        plain, state = step(plain, grads), step(state, grads)
    assert_trees_same_bits(plain.params, state.params)
    assert state.opt_state[1][0].mu["w"].sharding.spec[0] == "data"


# --- the optimizers as trees of functions


@pytest.mark.parametrize("tx", [jda.fused_adamw(1e-3), make_tx(), jda.chain(optax.scale(2.0), make_tx())])  # fmt: skip
def test_tree_map_keeps_step_and_configuration(tx):
    same = jax.tree.map(lambda f: f, tx)
    assert type(same) is type(tx) and same == tx and vars(same) == vars(tx)
    assert len(jax.tree.leaves(tx)) == 3  # init, update, step
    counted = jax.tree.map(lambda f: lambda *args: f(*args), tx)
    assert counted.step is not tx.step and not counted.is_as_made


def test_nnx_optimizer_prints(capsys):
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    print(nnx.Optimizer(model, jda.fused_adamw(1e-3), wrt=nnx.Param))
    assert "opt_state" in capsys.readouterr().out


def test_fused_optimizers_in_place_of_those_of_optax(monkeypatch):
    """A user may replace optax's functions for code that takes them by name."""
    params = {"w": np.ones(3, np.float32)}
    want = [f(1e-2).update(params, f(1e-2).init(params), params)[0] for f in (jda.fused_adamw, jda.fused_adam)]  # fmt: skip
    injected = jda.inject_hyperparams(jda.fused_adamw)(1e-2)
    want.append(injected.update(params, injected.init(params), params)[0])
    monkeypatch.setattr(optax, "adamw", jda.fused_adamw)
    monkeypatch.setattr(optax, "adam", jda.fused_adam)
    for name in ("chain", "scale_by_adam", "add_decayed_weights", "scale_by_learning_rate"):
        monkeypatch.setattr(optax, name, getattr(jda, name))
    monkeypatch.setattr(optax, "inject_hyperparams", jda.inject_hyperparams)
    made = optax.adamw(1e-2), optax.adam(1e-2), optax.inject_hyperparams(optax.adamw)(1e-2)
    integers = {"n": np.arange(3, dtype=np.int32)}  # for which ours calls the functions of optax
    made[0].step(integers, made[0].init(integers), integers)
    for tx, updates in zip(made, want, strict=True):
        assert_trees_same_bits(tx.update(params, tx.init(params), params)[0], updates)
