"""States saved under one mesh, strategy and policy, and restored under another, bit for bit."""

import asyncio
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from jdistadam.checkpoint import storage
from jdistadam.core.trees import words_of
from support.bits import assert_trees_same_bits
from support.lookalike import BATCH, BF16, make_params, make_tx
from support.optimizers import distributed_adamw
from support.samples import often

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

DEVICES = jax.devices("cpu")
REMAINDERS = jda.MixedPrecisionPolicy(main_params_dtype="remainder16")
COMM = jda.MixedPrecisionPolicy(param_comm_dtype=BF16)
LABELS = {"a": "x", "b": "y", "bias": "y", "more": "y"}
SPECS = {"a": P("model"), "b": P(None, "model"), "bias": P(), "more": P()}
SCALE = jda.DynamicLossScale(init_scale=8.0, growth_interval=2)


def mesh(*shape, names=("data", "replica"), **kwargs):
    size = int(np.prod(shape))
    return jax.make_mesh(shape, names[: len(shape)], devices=DEVICES[:size], **kwargs)


def with_model_axis(**kwargs):
    both = dict(mesh=mesh(2, 4, names=("data", "model")), param_specs=SPECS)
    return scaled(**both, **kwargs)


def scaled(n=8, **kwargs):
    return make_tx(n, **(dict(loss_scale=SCALE) | kwargs))


# One of them restores what every other one saved, and every other one what one saved: a checkpoint
# has each part of a state by parameter, and says nothing of how it was cut.
OPTIMIZERS = {
    "8": lambda: scaled(8),
    "4": lambda: scaled(4),
    "2, Auto axes": lambda: scaled(mesh=mesh(2, axis_types=(AxisType.Auto,))),
    "1": lambda: scaled(1),
    "2 x 4, hybrid": lambda: scaled(mesh=mesh(2, 4), replica_axis="replica"),
    "2 x 4, sharded twice": lambda: scaled(
        mesh=mesh(4, 2), replica_axis="replica", outer_sharding_strategy="optim",
        sharding_strategy="optim_grads_params",
    ),
    "no_shard": lambda: scaled(sharding_strategy="no_shard"),
    "optim_grads": lambda: scaled(sharding_strategy="optim_grads"),
    "optim_grads_params": lambda: scaled(sharding_strategy="optim_grads_params"),
    "small buckets": lambda: scaled(bucket_bytes=16),
    "groups": lambda: scaled(param_labels=LABELS, groups={"x": {}, "y": {"lr_scale": 0.5}}),
    "remainders": lambda: scaled(policy=REMAINDERS),
    "remainders, 4, params sharded": lambda: scaled(
        4, policy=REMAINDERS, sharding_strategy="optim_grads_params"
    ),
    "model axis": lambda: with_model_axis(),
    "model axis, params sharded": lambda: with_model_axis(sharding_strategy="optim_grads_params"),
}  # fmt: skip
ONE = "remainders, 4, params sharded"
PAIRS = [*((ONE, target) for target in OPTIMIZERS), *((x, "8") for x in OPTIMIZERS if x != ONE)]
OFTEN = {(ONE, "2, Auto axes")}


def loss_fn(params, x, *, model_state, rng):
    noise = jax.random.uniform(rng, ())
    total = sum(jnp.sum(jnp.sin(p.astype(jnp.float32) + noise)) for p in jax.tree.leaves(params))
    return total * jnp.mean(x), {"mean": model_state["mean"] + jnp.mean(x)}


def params_of(dtype=BF16):
    return make_params(dtype) | {"more": jnp.ones(7, dtype)}


def trained(tx, steps=3, dtypes=BF16):
    """A state after some steps, of which one was skipped."""
    params = params_of(jnp.float32)
    state = jda.TrainState.create(
        params, tx, param_dtypes=dtypes, model_state={"mean": jnp.zeros(2)}, rng=jax.random.key(5)
    )
    step = jda.train_step(loss_fn, tx)
    for i in range(steps):
        state, _ = step(state, BATCH + i if i != 1 else BATCH * np.nan)
    return state, step


def shapes_of(tx, dtype=BF16):
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params_of(dtype))
    return jda.TrainState.shapes(shapes, tx)


def assert_same_state(got, tx, want):
    """Everything, as optax would hold it: main params, moments, counts, and all else."""
    mine = jda.to_optax_state(got, tx)
    assert_trees_same_bits(mine[:2], want[:2])
    for pair in zip(mine[2], want[2], strict=True):
        assert_trees_same_bits(*jax.tree.map(words_of, pair))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Saves a state of an optimizer once: the folder, what is in it, and its params."""
    made = {}

    def of(name):
        if name not in made:
            tx = OPTIMIZERS[name]()
            state, _ = trained(tx)
            folder = tmp_path_factory.mktemp("checkpoint")
            assert jda.save(folder, state, tx) == 2
            made[name] = (
                folder,
                jda.to_optax_state(state, tx),
                jax.tree.map(np.asarray, state.params),
            )
        return made[name]

    return of


@pytest.mark.parametrize(("source", "target"), PAIRS)
@often(lambda source, target: (source, target) in OFTEN)
def test_state_is_restored_under_another_mesh_strategy_and_policy(saved, source, target):
    folder, exported, _ = saved(source)
    tx = OPTIMIZERS[target]()
    state = jda.restore(folder, shapes_of(tx), tx)
    assert_same_state(state, tx, exported)
    main, opt_state, extra = exported
    like = jda.from_optax_state(main, opt_state, tx, extra, param_dtypes=BF16)
    template = shapes_of(tx)
    for field in ("params", "opt_state"):  # placed as the step wants it, or it copies
        want = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), getattr(template, field))
        mine = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), getattr(state, field))
        assert mine == want
    step = jda.train_step(loss_fn, tx)
    state, metrics = step(state, BATCH)
    like, like_metrics = step(like, BATCH)
    assert_same_state(state, tx, jda.to_optax_state(like, tx))
    assert_trees_same_bits(jda.full_params(state, tx), jda.full_params(like, tx))
    assert metrics["loss"] == like_metrics["loss"] and int(state.step) == 3


KINDS = {
    "float32 main": (BF16, {}),
    "remainders": (BF16, dict(policy=REMAINDERS)),
    "no main": (BF16, dict(policy=jda.MixedPrecisionPolicy(main_params_dtype=None))),
    "float32 params": (jnp.float32, {}),
    "sent in bfloat16": (jnp.float32, dict(policy=COMM)),
    "bfloat16 moments": (BF16, dict(mu_dtype=BF16)),
}


@pytest.mark.slow  # tests/test_differential.py saves and restores, too
@pytest.mark.parametrize("name", KINDS)
def test_training_goes_on_as_if_it_had_not_stopped(tmp_path, name):
    dtype, given = KINDS[name]
    tx = scaled(**given)
    state, step = trained(tx, dtypes=dtype)
    jda.save(tmp_path, state, tx)
    again = jda.restore(tmp_path, shapes_of(tx, dtype), tx)
    assert_trees_same_bits(again.params, state.params)
    for i in range(3):
        state, metrics = step(state, BATCH + i)
        again, same = step(again, BATCH + i)
        assert float(metrics["loss"]) == float(same["loss"])
        assert_same_state(again, tx, jda.to_optax_state(state, tx))
        assert_trees_same_bits(again.params, state.params)


def noted_batches(monkeypatch):
    """Bytes of the arrays of each batch that is written."""
    batches, serialize = [], ocp.type_handlers.ArrayHandler.serialize

    def noted(self, values, infos, args=None):
        batches.append([x.nbytes for x in values])
        return serialize(self, values, infos, args)

    monkeypatch.setattr(ocp.type_handlers.ArrayHandler, "serialize", noted)
    return batches


def test_a_large_array_is_written_alone_and_makes_no_other_batch_larger(tmp_path, monkeypatch):
    """Two batches of a save overlap: both together would be twice the largest array."""
    monkeypatch.setattr(storage, "BATCH_BYTES", 4096)
    batches = noted_batches(monkeypatch)
    params = {f"{i}": jnp.full((4096 if i == 2 else 256,), i, jnp.float32) for i in range(7)}
    state = {"params": params, "opt_state": optax.adam(0.1).init(params)}
    jda.save(tmp_path, state)
    assert max(map(sum, batches)) == 4 * 4096 and len(batches) > 6
    assert all(len(batch) == 1 or sum(batch) <= 4096 for batch in batches)
    assert_trees_same_bits(jda.restore(tmp_path, state), state)


@pytest.mark.parametrize("in_background", [True, False])
@often(lambda in_background: not in_background)  # in the background batches do not wait
def test_arrays_are_saved_and_restored_in_many_batches(tmp_path, monkeypatch, in_background):
    """Each group of arrays is written, and each bucket read, by itself."""
    monkeypatch.setattr(storage, "BATCH_BYTES", 1)
    tx = make_tx(2, bucket_bytes=16)
    params = {f"{name}{i}": x + i for i in range(2) for name, x in make_params().items()}
    params |= {f"s{i}": jnp.full(5, i, jnp.float32) for i in range(5)}
    state = jda.TrainState.create(params, tx, param_dtypes=BF16)
    batches, reads, read = noted_batches(monkeypatch), [], storage.Reader.load

    def noted(self, wanted):
        reads.append(sum(len(entry.shape) > 1 for entry, _ in wanted))
        return read(self, wanted)

    monkeypatch.setattr(storage.Reader, "load", noted)
    with jda.Checkpointer(tmp_path, tx, in_background=in_background) as checkpointer:
        for step in range(2):
            checkpointer.save(state, step=step)
    assert len(batches) > 20
    assert max(map(len, batches)) < 5  # the leaves of a packed bucket are made together
    got = jda.restore(tmp_path, state, tx)
    assert sum(reads) == 12 and max(reads) == 3  # main parameters, mu and nu of one large leaf
    assert_same_state(got, tx, jda.to_optax_state(state, tx))


def test_params_may_be_a_single_array(tmp_path):
    params = jnp.arange(3.0) / 7
    state = {"params": params, "opt_state": optax.adamw(0.1).init(params)}
    jda.save(tmp_path, state)
    assert_trees_same_bits(jda.restore_params(tmp_path), params)
    assert_trees_same_bits(jda.restore(tmp_path, state), state)


def test_save_and_restore_work_in_an_event_loop(tmp_path):
    """As in a notebook."""
    tx = scaled(2)
    state = jda.TrainState.create(params_of(BF16), tx)

    async def cell():
        jda.save(tmp_path, state, tx)
        return jda.restore(tmp_path, shapes_of(tx), tx)

    assert_same_state(asyncio.run(cell()), tx, jda.to_optax_state(state, tx))


def test_event_loop_keeps_the_context_of_64_bits(tmp_path):
    """JAX keeps such settings for each thread, and an event loop cannot run in one that has one."""

    async def cell():
        jda.save(tmp_path, state)
        return jda.restore(tmp_path, state)

    params = {"w": jnp.ones(3)}
    with jax.enable_x64(True):
        more = {"seen": jnp.int64(2**40 + 5), "mean": jnp.arange(3.0) / 3}
        state = {"params": params, "opt_state": optax.adam(0.1).init(params), "model_state": more}
        assert more["mean"].dtype == jnp.float64
        assert_trees_same_bits(asyncio.run(cell()), state)


@pytest.mark.parametrize("in_loop", [False, True])
@often(lambda in_loop: in_loop)
def test_save_and_restore_work_with_jit_disabled(tmp_path, in_loop):
    """As while debugging; an event loop, as a notebook's, has orbax write from another thread."""
    tx = scaled(2)
    state = jda.TrainState.create(params_of(BF16), tx)

    def moved():
        jda.save(tmp_path, state, tx)
        return jda.restore(tmp_path, shapes_of(tx), tx)

    async def cell():
        return moved()

    jax.config.update("jax_disable_jit", True)
    try:
        got = asyncio.run(cell()) if in_loop else moved()
    finally:
        jax.config.update("jax_disable_jit", False)
    assert got.opt_state.mu.sharding == state.opt_state.mu.sharding
    assert_same_state(got, tx, jda.to_optax_state(state, tx))


@pytest.mark.slow
def test_params_that_no_step_has_sent_yet_stay(tmp_path):
    """After reload_main_params they have bits that a step sends no more."""
    tx = scaled(policy=COMM)
    state, _ = trained(tx, dtypes=jnp.float32)
    new = jax.tree.map(lambda x: x + jnp.float32(1 / 3), jda.full_params(state, tx))
    state = state.replace(params=new, tx=tx)
    jda.save(tmp_path, state, tx)
    again = jda.restore(tmp_path, shapes_of(tx, jnp.float32), tx)
    assert_trees_same_bits(again.params, state.params)


@pytest.mark.slow
def test_chains_and_injected_hyperparameters_are_restored(tmp_path):
    def make(n, learning_rate):
        inner = jda.inject_hyperparams(distributed_adamw)(
            learning_rate, mesh=mesh(n), weight_decay=0.1
        )
        return jda.chain(optax.scale(0.5), optax.scale_by_schedule(lambda c: 1 / (1 + c)), inner)

    def loss(params, x):
        return sum(jnp.sum(jnp.sin(p)) for p in jax.tree.leaves(params)) * jnp.mean(x)

    tx, other = make(8, 0.1), make(2, 0.3)
    params = params_of(jnp.float32) | {"none": None}
    state = jda.TrainState.create(params, tx)
    step = jda.train_step(loss, tx)
    for _ in range(2):
        state, _ = step(state, BATCH)
    jda.save(tmp_path, state, tx)
    template = jda.TrainState.create(params, other)
    again = jda.restore(tmp_path, template, other)
    assert_same_state(again, other, jda.to_optax_state(state, tx))
    again, metrics = jda.train_step(loss, other)(again, BATCH)
    assert float(metrics["learning_rate"]) == np.float32(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fused", "main", "remainders", "optax", "flax"])
@often(lambda kind: kind == "flax")
def test_states_of_one_program_move_to_the_mesh_and_back(tmp_path, kind):
    """fused_adamw and optax.adamw, in dictionaries and in Flax's TrainState."""
    from flax.training import train_state as flax_state

    schedule = optax.linear_schedule(0.1, 0.01, 10)
    make = {
        "fused": lambda: jda.fused_adamw(schedule, weight_decay=0.1),
        "main": lambda: jda.fused_adamw(schedule, weight_decay=0.1, main_params_dtype=jnp.float32),
        "remainders": lambda: jda.fused_adamw(schedule, weight_decay=0.1, main_params_dtype="remainder16"),
    }.get(kind, lambda: optax.adamw(schedule, weight_decay=0.1))  # fmt: skip
    dtype = BF16 if kind in ("main", "remainders") else jnp.float32
    local, params = make(), params_of(dtype)
    state = local.init(params)
    grads = jax.tree.map(jnp.cos, params)
    for _ in range(2):
        updates, state = jax.jit(local.update)(grads, state, params)
        params = optax.apply_updates(params, updates)
    first = {"params": params, "opt_state": state}
    if kind == "flax":
        first = flax_state.TrainState(2, None, params, local, state)
    assert jda.save(tmp_path / "one", first) == 2

    tx = distributed_adamw(schedule, mesh=mesh(4), weight_decay=0.1)
    moved = jda.restore(tmp_path / "one", shapes_of(tx, dtype), tx)
    main = jda.main_params(params, state)
    adam = state.inner[0] if dtype == BF16 else state[0]
    got_main, got_state, extra = jda.to_optax_state(moved, tx)
    f32 = lambda tree: jax.tree.map(lambda x: np.asarray(x, np.float32), tree)  # noqa: E731
    assert_trees_same_bits(got_main, f32(main))
    assert_trees_same_bits(got_state[0].mu, f32(adam.mu))
    assert_trees_same_bits(got_state[0].nu, f32(adam.nu))
    assert int(extra.step) == 2

    jda.save(tmp_path / "two", moved, tx)
    shapes = jax.eval_shape(lambda: first) if kind != "flax" else first
    back = jda.restore(tmp_path / "two", shapes)
    assert jax.tree.structure(back) == jax.tree.structure(first)
    assert_trees_same_bits(back, jax.tree.map(jnp.asarray, first))


def test_states_of_optax_are_placed_like_the_template(tmp_path):
    tx, params = optax.adamw(optax.constant_schedule(0.1)), params_of(jnp.float32)
    jda.save(tmp_path, {"params": params, "opt_state": tx.init(params)})
    everywhere = jax.NamedSharding(mesh(4), P())
    template = jax.device_put({"params": params, "opt_state": tx.init(params)}, everywhere)
    template["params"]["a"] = jax.device_put(params["a"], jax.NamedSharding(mesh(4), P("data")))
    got = jda.restore(tmp_path, template)
    for x, like in zip(jax.tree.leaves(got), jax.tree.leaves(template), strict=True):
        assert x.sharding.is_equivalent_to(like.sharding, x.ndim)


def test_restore_params_returns_params_in_any_dtype_and_sharding(saved):
    folder, (main, *_), want = saved(ONE)
    assert_trees_same_bits(jda.restore_params(folder), want)
    sharding = jax.NamedSharding(mesh(2), P("data"))
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), want)
    like["a"] = jax.ShapeDtypeStruct((256, 128), jnp.float32, sharding=sharding)
    got = jda.restore_params(folder, like, step=2)
    assert got["a"].sharding.is_equivalent_to(sharding, 2) and got["a"].dtype == jnp.float32
    assert_trees_same_bits(got, main)
    half = like | {"a": jax.ShapeDtypeStruct((256, 128), BF16)}
    got = jda.restore_params(folder, half)
    assert_trees_same_bits(got, main | {"a": want["a"]})


@pytest.mark.slow
def test_new_leaves_and_newly_trained_leaves_begin_anew(tmp_path):
    """What the file lacks stays as it is; what is trained anew begins with moments of zero."""
    groups = {"x": {"frozen": True}, "y": {}}
    old = scaled(2, param_labels=LABELS, groups=groups)
    state, _ = trained(old)
    jda.save(tmp_path, state, old)
    tx = scaled(2)
    params = params_of() | {"more": 2 * jnp.ones((3, 5), BF16), "head": 3 * jnp.ones(9, BF16)}
    template = jda.TrainState.create(params, tx, model_state={"mean": jnp.zeros(2)})
    new = {"params['head']", "params['more']", "params['a']"}
    with pytest.raises(jda.ShapeError, match=r"header.json: params\['more'\]: has another shape"):
        jda.restore(tmp_path, template, tx, new=lambda path: path in new - {"params['more']"})
    got = jda.restore(tmp_path, template, tx, new=lambda path: path in new)
    for name in ("a", "b", "bias"):
        assert_trees_same_bits(got.params[name], state.params[name])
    assert_trees_same_bits(got.params["more"], template.params["more"])
    assert_trees_same_bits(got.params["head"], template.params["head"])
    main, (adam, *_), _ = jda.to_optax_state(got, tx)
    was_main, (was, *_), _ = jda.to_optax_state(state, old)
    for name in ("b", "bias"):
        assert_trees_same_bits((main[name], adam.mu[name], adam.nu[name]),
                               (was_main[name], was.mu[name], was.nu[name]))  # fmt: skip
    assert all(not np.any(adam.nu[name]) for name in ("a", "head", "more"))
    assert main["head"].tolist() == [3] * 9
    shapes = dataclasses.replace(template, params=shapes_of(tx).params)
    del shapes.params["more"]
    with pytest.raises(jda.TreeError, match=r"params\['more'\]: in the file, and not in the templ"):
        jda.restore(tmp_path, dataclasses.replace(jda.TrainState.shapes(shapes.params, tx), rng=None), tx,
                    new=lambda path: path in new)  # fmt: skip
    frozen = scaled(2, param_labels=LABELS, groups={"x": {}, "y": {"frozen": True}})
    args = dict(new=lambda path: path == "params['a']", unused=lambda path: path != "params['a']")
    got = jda.restore(tmp_path, shapes_of(frozen), frozen, **args)
    assert_trees_same_bits(got.params, state.params)
