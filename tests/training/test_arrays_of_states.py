"""Arrays that a step cannot donate, or not read: those that are there twice, or on the host."""

import dataclasses
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from jdistadam.distributed import global_arrays
from jdistadam.training import train_state
from support.bits import assert_trees_same_bits
from support.optimizers import distributed_adamw
from support.own_loop import make_own_step
from support.samples import few, often

HYPER = dict(learning_rate=3e-3, b1=0.87, b2=0.93, eps=1e-7, weight_decay=0.13)


def loss_fn(params, batch, *, model_state=None, rng=None):
    terms = [jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(params)]
    loss = sum(terms) * jnp.mean(batch)
    return loss if model_state is None else (loss, model_state)


def make(n, strategy="optim", *, axis_type=AxisType.Explicit, **kwargs):
    mesh = jax.make_mesh((n,), ("data",), (axis_type,), devices=jax.devices("cpu")[:n])
    tx = distributed_adamw(**HYPER, mesh=mesh, sharding_strategy=strategy)
    w = np.sin(np.arange(256.0 * 128, dtype=np.float32)).reshape(256, 128)
    return tx, jda.TrainState.create({"w": w, "b": np.ones(3, np.float32)}, tx, **kwargs)


@functools.cache
def step_of(n, strategy):
    """The step of ``make(n, strategy)``, compiled once for several tests."""
    return jda.train_step(loss_fn, make(n, strategy)[0])


def copied(tree):
    """The same values and shardings, in memory of their own."""
    return jax.tree.map(lambda x: jax.device_put(np.array(x), x.sharding), tree)


def with_model_state(state, copy):
    return state.replace(model_state=copy(state.params))


def with_other_arrays_of_it(state, copy):
    """Other arrays in the same memory."""
    alike = jax.tree.map(lambda x: jax.device_put(x, x.sharding), state.params)
    return state.replace(model_state=copy(alike))


def with_one_moment(state, copy):
    opt_state = state.opt_state._replace(nu=copy(state.opt_state.mu))
    return dataclasses.replace(state, opt_state=opt_state)


@few(1)
@pytest.mark.parametrize("twice", [with_model_state, with_other_arrays_of_it, with_one_moment])
@pytest.mark.parametrize(("n", "strategy"), [(1, "optim"), (2, "optim"), (2, "optim_grads_params")])
@often(lambda n, strategy, twice: (n == 1) == (twice is with_one_moment) and strategy == "optim")
def test_arrays_that_a_state_holds_twice_are_copied(n, strategy, twice):
    """Of a new state, and of one that a step returned; JAX would end the process."""
    found = []
    for copy in (lambda x: x, copied):
        step, (_, state) = step_of(n, strategy), make(n, strategy)
        for _ in range(2):
            state, _ = step(twice(state, copy), np.ones((n, 2), np.float32))
        found.append(state)
    assert_trees_same_bits(*found)


@few(1)
@pytest.mark.parametrize("name", ["params", "mu"])
def test_a_batch_that_is_an_array_of_the_state_is_copied(name):
    """Of a new state, and of one that a step returned."""
    found = []
    for copy in (lambda x: x, copied):
        step, (_, state) = step_of(2, "optim_grads_params"), make(2, "optim_grads_params")
        for _ in range(2):
            batch = state.params["w"] if name == "params" else state.opt_state.mu
            state, metrics = step(state, copy(batch))
        found.append((state, metrics))
    assert_trees_same_bits(*found)


@few(1)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_arrays_that_a_state_holds_once_are_not_copied(monkeypatch, axis_type):
    """Neither the arrays of a state that a step returned, nor those beside one that changed."""
    tx, state = make(2, axis_type=axis_type, rng=jax.random.key(0), model_state=jnp.ones(3))
    step = jda.train_step(loss_fn, tx)
    state, _ = step(state, np.ones((4, 2), np.float32))
    numbers, copy_to = [], global_arrays.copy_to

    def counted(tree, sharding):
        numbers.append(len(jax.tree.leaves(tree)))
        return copy_to(tree, sharding)

    for module in (global_arrays, train_state):
        monkeypatch.setattr(module, "copy_to", counted)
    state, _ = step(state, np.ones((4, 2), np.float32))
    assert not numbers
    state, _ = step(state.replace(rng=jax.random.key(1)), np.ones((4, 2), np.float32))
    assert numbers == [1]  # the key, onto the mesh


@few(2)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@pytest.mark.parametrize("spec", [P(None, "data"), P("data"), P()], ids=str)
@pytest.mark.parametrize("dtypes", [jnp.bfloat16, None], ids=str)
def test_parameters_move_between_devices_without_the_host(
    monkeypatch, dtypes, spec, strategy, axis_type
):
    """A program has made them, with other shards than those of the state."""
    tx, expected = make(4, strategy, axis_type=axis_type, param_dtypes=dtypes)
    where, fetched = NamedSharding(tx.config.mesh, spec), []
    w = np.sin(np.arange(256.0 * 128, dtype=np.float32)).reshape(256, 128)
    params = {"w": jax.device_put(w, where), "b": np.ones(3, np.float32)}
    value = type(params["w"])._value
    noted = property(lambda x: (fetched.append(x.nbytes), value.fget(x))[1])
    monkeypatch.setattr(type(params["w"]), "_value", noted)
    monkeypatch.setattr(global_arrays, "_FETCHED_BYTES", w.nbytes)
    state = jda.TrainState.create(params, tx, param_dtypes=dtypes)
    own = tx.init(params)  # of float32 params
    assert all(nbytes < 1024 for nbytes in fetched)
    monkeypatch.undo()
    assert_trees_same_bits(state, expected)
    assert_trees_same_bits(own, make(4, strategy, axis_type=axis_type)[1].opt_state)


def test_a_loop_that_sets_a_rate_or_a_key_waits_for_no_step(monkeypatch):
    """To ask where an array is would wait for the step that makes it."""
    mesh = jax.sharding.Mesh(jax.devices("cpu")[:2], ("data",))
    tx = jda.inject_hyperparams(distributed_adamw)(1e-2, mesh=mesh)
    state = jda.TrainState.create({"w": jnp.ones((64, 64))}, tx, rng=jax.random.key(0))
    step = jda.train_step(lambda p, x, rng: jnp.mean(x) * jnp.sum(p["w"]), tx)
    state, _ = step(state, np.ones((4, 2), np.float32))
    asked, memory_of = [], global_arrays._memory_of
    monkeypatch.setattr(global_arrays, "_memory_of", lambda x: (asked.append(x), memory_of(x))[1])
    for i in range(3):
        state.opt_state.hyperparams["learning_rate"] = 0.1 * i
        state, metrics = step(state.replace(rng=jax.random.key(i)), np.ones((4, 2), np.float32))
        assert float(metrics["learning_rate"]) == np.float32(0.1 * i)
    assert not asked


def test_arrays_of_numpy_may_change_once_a_state_is_made(monkeypatch):
    """The copies of large ones ran later, and had what was written in the meantime."""
    tx, _ = make(8)
    large = {"w": np.ones((1 << 13, 1 << 11), np.float32)}
    state = jda.TrainState.create(large, tx, model_state=large)
    assert all(x.is_ready() for x in jax.tree.leaves((state.params, state.model_state)))

    small, copies = np.zeros(64, np.float32), global_arrays._copies
    small = small[-small.ctypes.data % 64 // 4 :][:16]  # aligned: JAX reads it in its place

    def later(arrays, kinds):
        small[:] = 2
        return copies(arrays, kinds)

    monkeypatch.setattr(global_arrays, "_copies", later)
    assert not np.any(global_arrays.copy_to(small, jax.devices("cpu")[0]))


def test_a_key_that_was_donated_raises():
    """XLA would end the process."""
    tx, state = make(2)
    step = jda.train_step(lambda p, x, rng: loss_fn(p, x), tx)
    key = jax.device_put(jax.random.key(5), NamedSharding(tx.config.mesh, P()))
    state, _ = step(state.replace(rng=key), np.ones((4, 2), np.float32))
    assert key.is_deleted()
    for run in (step, jda.eval_step(loss_fn, tx)):
        with pytest.raises(jda.MeshError, match=r"^state: its arrays were donated"):
            run(state.replace(rng=key), np.ones((4, 2), np.float32))


# Memory of the host


def on_host(tree):
    return jax.tree.map(
        lambda x: jax.device_put(x, x.sharding.with_memory_kind("pinned_host")), tree
    )


def raises(name, kind="pinned_host"):
    text = rf"{name}.*: in host memory, .* got memory kind '{kind}', .*jax\.device_put\("
    return pytest.raises(jda.MeshError, match=text)


@pytest.mark.parametrize("n", [1, 2])
@often(lambda n: n == 2)
def test_a_state_on_the_host_raises(tmp_path, n):
    step, (tx, state), batch = step_of(n, "optim"), make(n), np.ones((n, 2), np.float32)
    jda.save(tmp_path, state, tx)
    moved = state.opt_state._replace(mu=on_host(state.opt_state.mu))
    for given, name in (
        (dataclasses.replace(state, opt_state=moved), r"state\.opt_state\.mu"),
        (dataclasses.replace(state, params=on_host(state.params)), r"state\.params\['b'\]"),
    ):
        with raises(name):
            step(given, batch)
        with raises(name, "host"):
            jax.jit(step)(given, batch)
        with raises(name):
            jda.save(tmp_path / "other", given, tx)
        with raises(name.replace("state", "template", 1)):
            jda.restore(tmp_path, given, tx)
    with raises("like"):
        jda.restore_params(tmp_path, on_host(state.params))
    with raises(r"opt_state\.mu", "host"):
        make_own_step(tx, loss_fn, check_vma=False)(state.params, moved, jda.shard_batch(batch, tx))
    back = jax.device_put(dataclasses.replace(state, opt_state=moved), jax.memory.Space.Device)
    want, _ = step(make(n)[1], batch)
    assert_trees_same_bits(step(back, batch)[0], want)  # as the message says


def test_a_state_of_one_program_on_the_host_raises():
    tx = jda.fused_adamw(**HYPER)
    params = {"w": jnp.ones((4, 3))}
    state = tx.init(params)
    for grads, given, old, name in (
        (on_host(params), state, params, r"grads\['w'\]"),
        (params, on_host(state), params, r"opt_state\[0\]\.count"),
        (params, state, on_host(params), r"params\['w'\]"),
    ):
        for run in (tx.step, tx.update, jax.jit(tx.step), jax.jit(tx.update)):
            with raises(name, "host"):
                run(grads, given, old)
    with raises(r"params\['w'\]"):
        tx.init(on_host(params))
    with raises(r"params\['w'\]", "host"):
        jax.jit(tx.init)(on_host(params))


PLACES = {
    "numpy": lambda state, mesh: jax.device_get(state),
    "one device": lambda state, mesh: jax.device_put(jax.device_get(state), jax.devices("cpu")[0]),
    "replicated": lambda state, mesh: jax.device_put(state, NamedSharding(mesh, P())),
    "uncommitted": lambda state, mesh: jax.tree.map(jnp.asarray, jax.device_get(state)),
}


@few(1)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@pytest.mark.parametrize("place", PLACES)
@often(lambda place, strategy, axis_type: (place == "one device") == (axis_type == AxisType.Auto))
def test_states_in_other_places_are_trained(place, strategy, axis_type):
    """As a checkpoint without shardings, or pickle, leaves them: their params follow."""
    tx, state = make(4, strategy, axis_type=axis_type)
    step, batch = jda.train_step(loss_fn, tx), np.ones((4, 2), np.float32)
    state, _ = step(state, batch)
    moved = PLACES[place](jax.tree.map(jnp.copy, state), tx.config.mesh)
    expected, _ = step(state, batch)
    found, _ = step(moved, batch)
    assert_trees_same_bits(found, expected)


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@pytest.mark.parametrize("kinds", [(AxisType.Auto, AxisType.Explicit), (AxisType.Explicit, AxisType.Auto)], ids=str)  # fmt: skip
def test_a_state_of_the_other_kind_of_mesh_is_trained_and_evaluated(strategy, kinds):
    """Explicit axes are part of the type of an array, on the same devices."""
    (tx, state), (other, _) = (make(4, strategy, axis_type=kind) for kind in kinds)
    batch, results = np.ones((4, 2), np.float32), []
    for used in (other, tx):  # the last one donates
        fresh = jax.tree.map(jnp.copy, state)
        given = dataclasses.replace(state, params=state.params) if used is tx else state
        loss = jda.eval_step(loss_fn, used)(given, batch)
        new, _ = jda.train_step(loss_fn, used)(given, batch)
        results.append(jax.device_get((loss, new)))
        state = fresh
    assert_trees_same_bits(*results)


@few(1)
@pytest.mark.parametrize("dtypes", [None, "bfloat16"])
def test_params_without_elements_have_an_average(dtypes):
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices("cpu")[:2])
    tx = distributed_adamw(1e-2, mesh=mesh, ema_decay=0.5)
    state = jda.TrainState.create({"w": jnp.zeros((0, 3))}, tx, param_dtypes=dtypes)
    state, _ = jda.train_step(lambda p, x: jnp.mean(x) + jnp.sum(p["w"]), tx)(state, jnp.ones(2))
    assert jda.ema_params(state, tx)["w"].shape == (0, 3)


def test_the_same_arrays_in_another_tree_are_asked_again():
    tx, state = make(1)
    step, batch = jda.train_step(loss_fn, tx), np.ones((1, 2), np.float32)
    state, _ = step(state, batch)
    object.__setattr__(state, "opt_state", (state.opt_state,))
    with pytest.raises(jda.errors.TreeError, match="not the state of this optimizer"):
        step(state, batch)


def test_a_save_or_export_by_an_optimizer_without_the_average_is_refused(tmp_path):
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices("cpu")[:1])
    mine, other = (distributed_adamw(1e-2, mesh=mesh, ema_decay=x) for x in (0.5, None))
    state = jda.TrainState.create({"w": jnp.ones(3)}, mine)
    for use in (functools.partial(jda.save, tmp_path), jda.to_optax_state, jda.full_params):
        with pytest.raises(jda.errors.TreeError, match=r"opt_state\.ema: does not fit ema_decay"):
            use(state, other)


def test_a_save_by_a_chain_around_the_optimizer_says_so(tmp_path):
    """And by the optimizer within a chain. The error was jax's, of prefixes of pytrees."""
    tx, state = make(2)
    chain = jda.chain(optax.scale(0.5), tx)
    with pytest.raises(jda.errors.TreeError, match="not the state of this optimizer: got Distr"):
        jda.save(tmp_path, state, chain)
    state = jda.TrainState.create(state.params, chain)
    with pytest.raises(jda.errors.TreeError, match="not the state of this optimizer: got tuple"):
        jda.save(tmp_path, state, tx)
    longer = jda.chain(optax.scale(0.5), optax.scale(0.5), tx)
    with pytest.raises(jda.errors.TreeError, match="got tuple of 2 parts instead of 3, expected"):
        jda.save(tmp_path, state, longer)
    jda.save(tmp_path, state, chain)


@pytest.mark.parametrize("ema_decay", [None, 0.9])
@pytest.mark.parametrize("name", ["mu", "nu", "main_params"])
def test_a_state_without_one_of_its_arrays_is_refused(tmp_path, name, ema_decay):
    """A save wrote what there was; other functions raised errors of None."""
    tx, state = make(2)
    tx = distributed_adamw(**HYPER, mesh=tx.config.mesh, ema_decay=ema_decay)
    state = jda.TrainState.create(state.params, tx)
    state = dataclasses.replace(state, opt_state=state.opt_state._replace(**{name: None}))
    for use in (
        lambda: jda.save(tmp_path, state, tx),
        lambda: jda.to_optax_state(state, tx),
        lambda: jda.train_step(loss_fn, tx)(state, np.ones(2, np.float32)),
    ):
        with pytest.raises(jda.errors.TreeError, match=f"^opt_state.{name}: missing: got None"):
            use()


@pytest.mark.parametrize("name", ["key", "count"])
def test_a_state_without_its_key_or_count_is_refused(tmp_path, name):
    """A restored state had a new key; an exported one had no count."""
    tx, state = make(2)
    rounds = dict(mu_dtype=jnp.bfloat16, nu_dtype=jnp.bfloat16, rounding="stochastic", seed=7)
    tx = distributed_adamw(**HYPER, mesh=tx.config.mesh, **rounds)
    state = jda.TrainState.create(state.params, tx)
    state = dataclasses.replace(state, opt_state=state.opt_state._replace(**{name: None}))
    for use in (lambda: jda.save(tmp_path, state, tx), lambda: jda.to_optax_state(state, tx)):
        with pytest.raises(jda.errors.TreeError, match=f"^opt_state.{name}: missing: got None"):
            use()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_state_with_other_params_is_not_exported(tmp_path, dtype):
    """They were lost: optax and torch got the main parameters, where a save raises."""
    tx, _ = make(2)
    state = jda.TrainState.create({"w": jnp.ones(3, dtype)}, tx)
    average = dataclasses.replace(state, params=jax.tree.map(lambda x: x / 2, state.params))
    to_torch = functools.partial(jda.interop.from_train_state, names=["w"])
    for use in (functools.partial(jda.save, tmp_path), jda.to_optax_state, to_torch):
        with pytest.raises(jda.LayoutError, match=r"params\['w'\]: differ from the main"):
            use(average, tx)
        use(jda.reload_main_params(average, tx), tx)


def test_a_changed_parameter_is_not_named_as_its_neighbour():
    """Leaves that are packed together are compared together: one that had not changed was named."""
    tx, _ = make(2)
    leaves = {name: jnp.ones(3) for name in ("bias", "scale")}
    state = jda.TrainState.create(leaves, tx)
    for name in leaves:
        changed = dataclasses.replace(state, params=leaves | {name: jnp.zeros(3)})
        with pytest.raises(
            jda.LayoutError,
            match=r"^params\['bias'\] and 1 more \(of 2\), or some of these: differ from the main",
        ):
            jda.to_optax_state(changed, tx)


ELSEWHERE = {
    "pickled": lambda x, mesh: pickle.loads(pickle.dumps(x)),
    "numpy": lambda x, mesh: np.asarray(x),
    "one device": lambda x, mesh: jax.device_put(np.asarray(x), jax.devices("cpu")[2]),
    "whole": lambda x, mesh: jax.device_put(x, NamedSharding(mesh, P())),
}


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize("where", ELSEWHERE)
def test_a_state_in_another_place_is_saved_and_exported(tmp_path, where, axis_type):
    mesh = make(2, axis_type=axis_type)[0].config.mesh
    tx = distributed_adamw(**HYPER, mesh=mesh, ema_decay=0.5)
    params = {"w": np.ones((256, 128), np.float32), "b": np.full(3, 1.001, np.float32)}
    state = jda.TrainState.create(params, tx, param_dtypes=jnp.bfloat16)
    moved = jax.tree.map(lambda x: ELSEWHERE[where](x, tx.config.mesh), state)
    assert_trees_same_bits(jda.to_optax_state(moved, tx), jda.to_optax_state(state, tx))
    jda.save(tmp_path, moved, tx)
    assert_trees_same_bits(jda.restore(tmp_path, state, tx), state)
    changed = dataclasses.replace(moved, params=jax.tree.map(lambda x: x / 2, moved.params))
    for use in (functools.partial(jda.save, tmp_path), jda.to_optax_state):
        with pytest.raises(
            jda.LayoutError, match=r"^params\['w'\] and 1 more.*differ from the main"
        ):
            use(changed, tx)
