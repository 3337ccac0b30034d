"""A transformation keeps its step, and what else hangs on it, however it is copied."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdistadam as jda
from support.optimizers import distributed_adamw


def make_fused(cpu_mesh):
    del cpu_mesh
    return jda.fused_adamw(1e-2)


def make_chain(cpu_mesh):
    del cpu_mesh
    return jda.chain(optax.clip_by_global_norm(1.0), jda.fused_adamw(1e-2))


def make_injected(cpu_mesh):
    del cpu_mesh
    return jda.inject_hyperparams(jda.fused_adamw)(1e-2)


def make_distributed(cpu_mesh):
    return distributed_adamw(1e-2, mesh=cpu_mesh(2))


def make_distributed_chain(cpu_mesh):
    return jda.chain(optax.scale(0.5), distributed_adamw(1e-2, mesh=cpu_mesh(2)))


MAKERS = (make_fused, make_chain, make_injected, make_distributed, make_distributed_chain)


def attributes(tx):
    return {name: getattr(tx, name) for name in (*tx._fields, *vars(tx))}


@pytest.mark.parametrize("make", MAKERS)
def test_replacing_init_keeps_everything_else(make, cpu_mesh):
    """A named tuple's own _replace would drop ``step``: it knows of init and update alone."""
    tx = make(cpu_mesh)
    new = tx._replace(init=optax.identity().init)
    assert type(new) is type(tx) and tuple(new) == (new.init, new.update)
    assert new.init is not tx.init
    assert attributes(new) == attributes(tx) | {"init": new.init}
    assert "step" in vars(new)


@pytest.mark.parametrize("make", MAKERS)
def test_every_attribute_can_be_replaced_and_no_other(make, cpu_mesh):
    tx = make(cpu_mesh)
    for name in (*tx._fields, *vars(tx)):
        new = tx._replace(**{name: print})
        assert attributes(new) == attributes(tx) | {name: print}
    before = attributes(tx)
    with pytest.raises((TypeError, ValueError), match=r"unexpected field names.*learning_rate"):
        tx._replace(learning_rate=1.0)
    assert attributes(tx) == before


def test_step_stays_where_update_alone_is_replaced():
    """As the docstring says: ``step`` is no function of ``update``."""
    tx = jda.fused_adamw(1e-2)
    params = {"w": jnp.ones(3)}
    want, _ = tx.step(params, tx.init(params), params)
    frozen = tx._replace(update=optax.set_to_zero().update)
    got, _ = frozen.step(params, frozen.init(params), params)
    np.testing.assert_array_equal(got["w"], want["w"])
    updates, _ = frozen.update(params, frozen.init(params), params)
    assert not updates["w"].any()


def test_a_replaced_transformation_still_takes_a_fused_step_in_a_chain():
    plain = jda.fused_adamw(1e-2)
    params = {"w": jnp.linspace(-1, 1, 5)}
    zeros = plain._replace(init=lambda p: jax.tree.map(jnp.zeros_like, plain.init(p)))
    for tx in (plain, jda.chain(zeros)):
        new, _ = tx.step(params, tx.init(params), params)
        np.testing.assert_array_equal(
            new["w"], plain.step(params, plain.init(params), params)[0]["w"]
        )


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
@pytest.mark.parametrize("make", MAKERS)
def test_copies_are_the_same(make, copied, cpu_mesh):
    tx = make(cpu_mesh)
    assert copied(tx) is tx
    assert copied({"tx": tx})["tx"] is tx


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_transformation_pickles_where_its_functions_do(protocol):
    tx = jda.FusedTransformation(optax.apply_updates, optax.global_norm, optax.incremental_update)
    tx.note = "kept"
    same = pickle.loads(pickle.dumps(tx, protocol))
    assert type(same) is jda.FusedTransformation and attributes(same) == attributes(tx)


@pytest.mark.parametrize("make", MAKERS)
def test_optimizers_with_other_functions_are_unequal(make, cpu_mesh):
    """A named tuple compares init and update alone, and so did jax.jit for static arguments."""
    tx = make(cpu_mesh)
    same = tx._replace()
    assert tx == same and not tx != same and hash(tx) == hash(same)
    for name in {"init", "update", "step", "full_step"} & attributes(tx).keys():
        other = tx._replace(**{name: print})
        assert tx != other and not tx == other
    assert tx != tuple(tx)


def test_a_jitted_function_runs_the_step_of_its_own_optimizer():
    """Flax's TrainState has its optimizer as static data."""
    params = {"w": jnp.ones(3)}
    tx = jda.fused_adamw(1e-2)
    kept = tx._replace(step=lambda grads, state, params, **extra_args: (params, state))
    apply = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))
    for optimizer, is_kept in ((tx, False), (kept, True)):
        state = jda.flax.TrainState.create(apply_fn=None, params=params, tx=optimizer)
        new = apply(state, params)
        assert np.array_equal(new.params["w"], params["w"]) == is_kept


def test_every_optimizer_is_rebuilt_from_its_functions_and_attributes():
    """MultiSteps has other arguments: a pickler that pickles functions by value failed."""
    tx = jda.MultiSteps(jda.fused_adamw(1e-2), 2)
    for optimizer in (tx, jda.fused_adamw(1e-2), jda.apply_if_finite(tx, 3)):
        rebuild, arguments, *_ = optimizer.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        same = rebuild(*arguments)
        assert type(same) is type(optimizer) and same is not optimizer
        assert same == optimizer and attributes(same) == attributes(optimizer)
