"""What moves between optimizers beside plain matrices: exact shards, schedules, empty leaves, numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from jdistadam.training.admission import check_params_follow
from support.bits import assert_same_bits, assert_trees_same_bits
from support.optimizers import distributed_adamw
from support.samples import few, often

BF16 = jnp.bfloat16
DEVICES = jax.devices("cpu")


def loss_fn(params, x):
    return sum(jnp.sum(jnp.sin(p.astype(jnp.float32))) for p in params.values()) * jnp.mean(x)


def mesh_of(n, kind=AxisType.Auto):
    return jax.make_mesh((n,), ("data",), (kind,), devices=DEVICES[:n])


@pytest.mark.parametrize("reshard", [True, False])
@often(lambda reshard: reshard)
def test_shards_that_are_the_main_params_are_not_rounded(tmp_path, reshard):
    """param_comm_dtype rounds what is sent, not what devices hold."""
    policy = jda.MixedPrecisionPolicy(param_comm_dtype=BF16)
    options = dict(mesh=mesh_of(4), policy=policy, sharding_strategy="optim_grads_params")
    tx = distributed_adamw(1e-2, reshard_after_forward=reshard, **options)
    params = {"w": jnp.linspace(0.1, 1, 16384), "b": jnp.linspace(0.2, 0.3, 24)}
    state, _ = jda.train_step(loss_fn, tx)(jda.TrainState.create(params, tx), jnp.ones(4))
    jda.save(tmp_path, state, tx)
    restored = jda.restore(tmp_path, jda.TrainState.shapes(params, tx), tx)
    assert_trees_same_bits(restored.params, state.params)
    assert_trees_same_bits(*(jda.to_optax_state(x, tx)[:2] for x in (restored, state)))


FLOAT8, OTHER = jnp.float8_e5m2, jnp.float8_e4m3fn
LAYERS = dict(sharding_strategy="optim_grads_params")
ONCE = LAYERS | dict(reshard_after_forward=False)


@few(1)
@pytest.mark.parametrize(
    ("dtype", "source", "target", "sent", "sent_then"),
    [
        (jnp.float32, {}, LAYERS, FLOAT8, FLOAT8),  # whose shards are the main parameters
        (jnp.float32, LAYERS, ONCE, FLOAT8, OTHER),
        (BF16, ONCE, {}, FLOAT8, FLOAT8),  # what devices hold was not sent yet
        (BF16, {}, ONCE, FLOAT8, FLOAT8),  # and is held without having been
        (BF16, {}, {}, FLOAT8, OTHER),
    ],
    ids=["to shards", "between shards", "from shards", "gathered once", "another dtype"],
)
@often(lambda source, target: ONCE not in (source, target))
def test_params_are_rounded_as_the_target_sends_them(
    tmp_path, dtype, source, target, sent, sent_then
):
    """Not as the optimizer that saved did, of which the main parameters know nothing."""
    params = {"w": jnp.linspace(0.1, 1, 16384), "b": jnp.linspace(0.2, 0.3, 7)}
    one, two = (
        distributed_adamw(
            1e-2, mesh=mesh_of(2), policy=jda.MixedPrecisionPolicy(param_comm_dtype=comm), **options
        )
        for options, comm in ((source, sent), (target, sent_then))
    )
    state = jda.TrainState.create(params, one, param_dtypes=dtype)
    state, _ = jda.train_step(loss_fn, one)(state, jnp.ones(2))
    jda.save(tmp_path, state, one)
    restored = jda.restore(tmp_path, jda.TrainState.shapes(params, two, param_dtypes=dtype), two)
    main, opt_state, extra = jda.to_optax_state(state, one)
    assert_trees_same_bits(jda.to_optax_state(restored, two)[0], main)
    converted = jda.from_optax_state(main, opt_state, two, extra, param_dtypes=dtype)
    assert_trees_same_bits(restored, converted)
    check_params_follow(restored.params, restored.opt_state, two)


DECAY = dict(weight_decay=lambda count: 0.1 / (1.0 + count))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "options",
    [
        DECAY,
        DECAY | dict(mask={"w": True, "empty": False}),
        dict(learning_rate=lambda count: 0.1 / (1.0 + count)),
    ],
    ids=["decay", "masked decay", "rate"],
)
@often(lambda options, dtype: ("mask" in options) == (dtype == BF16) and options != DECAY)
def test_schedules_and_empty_leaves_move_between_optimizers(tmp_path, options, dtype):
    params = {
        "w": jnp.linspace(0, 1, 24).reshape(6, 4).astype(dtype),
        "empty": jnp.zeros((0, 4), dtype),
    }
    options = dict(learning_rate=1e-2) | options
    tx = distributed_adamw(mesh=mesh_of(2), **options)
    one = jda.fused_adamw(**options, main_params_dtype=None if dtype == jnp.float32 else "float32")
    new, opt_state = jax.jit(one.step)(params, one.init(params), params)
    jda.save(tmp_path / "one", first := {"params": new, "opt_state": opt_state})
    moved = jda.restore(tmp_path / "one", jda.TrainState.shapes(params, tx), tx)
    assert int(moved.step) == 1
    jda.save(tmp_path / "two", moved, tx)
    back = jda.restore(tmp_path / "two", jax.eval_shape(lambda: first))
    assert jax.tree.structure(back) == jax.tree.structure(first)
    assert_trees_same_bits(*map(jax.tree.leaves, (back, first)))


@pytest.mark.slow
@pytest.mark.parametrize("moments", ["float32", "block8"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@often(lambda kind, moments: (kind, moments) == (AxisType.Explicit, "block8"))
def test_a_state_of_numpy_arrays_is_saved_and_converted(tmp_path, kind, moments):
    """As pickle leaves it."""
    given = dict(mu_dtype=moments, nu_dtype=moments)
    tx = distributed_adamw(1e-3, b1=0.8, b2=0.88, mesh=mesh_of(2, kind), **given)
    params = {"w": jnp.linspace(0, 1, 8192).reshape(64, 128)}
    state, _ = jda.train_step(loss_fn, tx)(
        jda.TrainState.create(params, tx), np.ones(2, np.float32)
    )
    host = jax.tree.map(np.asarray, state)
    jda.save(tmp_path, host, tx)
    restored = jda.restore(tmp_path, jda.TrainState.shapes(params, tx), tx)
    assert_trees_same_bits(restored.opt_state, state.opt_state)
    assert_trees_same_bits(*(jda.to_optax_state(x, tx)[:2] for x in (host, state)))


def test_a_tree_without_elements_moves_with_coded_moments():
    tx = distributed_adamw(1e-3, mesh=mesh_of(2), mu_dtype="block16")
    state = jda.TrainState.create({"empty": jnp.zeros((2, 0))}, tx)
    moved = jda.from_optax_state(*jda.to_optax_state(state, tx)[:2], tx)
    assert_trees_same_bits(moved.opt_state, state.opt_state)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(4,), (2, 2), (2,)], ids=str)
@often(lambda shape: shape == (2, 2))
def test_dropout_depends_on_how_many_devices_share_the_batch(tmp_path, shape):
    """As the page says: the key comes back, and each device folds its index into it."""

    def loss_of(params, x, *, rng):
        mask = jax.random.bernoulli(rng, 0.5, x.shape).astype(jnp.float32)
        return jnp.mean(x * mask) * jnp.sum(params["w"]), mask

    def make(mesh, **options):
        tx = distributed_adamw(1e-2, mesh=mesh, **options)
        return tx, jda.train_step(loss_of, tx, has_aux=True)

    one, step = make(mesh_of(4))
    params, batch = {"w": jnp.ones(4)}, jnp.ones((8, 16))
    state, _ = step(jda.TrainState.create(params, one, rng=jax.random.key(3)), batch)
    jda.save(tmp_path, state, one)
    size, names = int(np.prod(shape)), ("data", "replica")[: len(shape)]
    mesh = jax.make_mesh(shape, names, devices=DEVICES[:size])
    two, next_step = make(mesh, replica_axis="replica" if len(shape) > 1 else None)
    state, metrics = step(state, batch)
    again = jda.restore(tmp_path, jda.TrainState.shapes(params, two), two)
    again, found = next_step(again, batch)
    assert_trees_same_bits(*(jax.device_get(jax.random.key_data(s.rng)) for s in (again, state)))
    masks = [np.asarray(m["aux"]).reshape(8, 16) for m in (found, metrics)]
    assert np.array_equal(*masks) == (size == 4)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@often(lambda kind: kind == AxisType.Explicit)
def test_an_empty_leaf_that_a_model_axis_cuts_is_read_and_converted(tmp_path, kind):
    """A program's result of that kind has whole parts on each device, and cannot be read."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), (kind,) * 2, devices=DEVICES[:4])
    specs = {"w": P(None, "model"), "empty": P(None, "model")}
    tx = distributed_adamw(1e-3, mesh=mesh, param_specs=specs)
    params = {"w": jnp.ones((8, 4)), "empty": jnp.zeros((0, 4))}
    state, shapes = jda.TrainState.create(params, tx), jda.TrainState.shapes(params, tx)
    jda.save(tmp_path, state, tx)
    restored = jda.restore(tmp_path, shapes, tx)
    assert_trees_same_bits(jax.device_get(restored.params), jax.device_get(params))
    want = jda.to_optax_state(state, tx)[:2]
    assert_trees_same_bits(jda.to_optax_state(restored, tx)[:2], want)
    half = jax.tree.map(lambda x: x.update(dtype=BF16), shapes.params)
    for like in (shapes.params, half):
        found = jda.restore_params(tmp_path, like, cast=True)["empty"]
        assert np.asarray(found).shape == (0, 4) and found.sharding == like["empty"].sharding
    place = shapes.params["empty"].sharding
    computed = jax.jit(lambda: jnp.zeros((0, 4)), out_shardings=place)()
    state = jda.TrainState(state.params | {"empty": computed}, state.opt_state)
    assert_trees_same_bits(jda.to_optax_state(state, tx)[:2], want)


@few(1)
@pytest.mark.parametrize("main", ["float32", "remainder16"])
def test_an_empty_leaf_is_placed_as_the_others(main):
    policy = jda.MixedPrecisionPolicy(main_params_dtype=main)
    tx = distributed_adamw(1e-3, mesh=mesh_of(2), policy=policy)
    params = {"w": jnp.ones((4, 4)), "empty": jnp.zeros((0, 4))}
    state = jda.TrainState.create(params, tx, param_dtypes=BF16)
    shapes = jda.TrainState.shapes(params, tx, param_dtypes=BF16)
    assert jax.tree.all(
        jax.tree.map(lambda x, y: x.sharding == y.sharding, state.params, shapes.params)
    )


def test_the_seed_of_random_bits_moves_between_optimizers(tmp_path):
    """In both directions, into optimizers with other seeds, which then take the saved one's."""

    def adam(seed):
        coded = dict(mu_dtype="block8", nu_dtype="block8", rounding="stochastic", seed=seed)
        return jda.fused_adamw(1e-2, weight_decay=0.1, **coded)

    params = {"w": jnp.linspace(0.1, 1, 16384, dtype=BF16), "b": jnp.ones(24, BF16)}
    grads = jax.tree.map(lambda p: jnp.sin(3 * p), params)
    options = dict(mesh=mesh_of(4), policy=jda.MixedPrecisionPolicy(main_params_dtype=None))
    one, several, other = adam(7), jda.distributed(adam(1), **options), adam(2)
    step = jax.jit(one.step)
    params, state = step(grads, one.init(params), params)
    jda.save(tmp_path / "one", {"params": params, "opt_state": state}, one)
    moved = jda.restore(tmp_path / "one", jda.TrainState.shapes(params, several), several)
    assert moved.opt_state.key.tolist() == state.key.tolist() == [7, 0]
    jda.save(tmp_path / "several", moved, several)
    template = {"params": params, "opt_state": other.init(params)}
    back = jda.restore(tmp_path / "several", template, other)
    got = jax.jit(other.step)(grads, back["opt_state"], back["params"])
    assert_trees_same_bits(got, step(grads, state, params))


def test_a_field_of_the_name_of_main_parameters_raises(tmp_path):
    """It was restored as params."""
    tx, params = jda.fused_adamw(1e-2), {"w": jnp.ones(3)}
    state = {"params": params, "opt_state": tx.init(params)}
    mine = state | {"main_params": {"w": jnp.full(3, 7.0)}}
    jda.save(tmp_path / "state", state)
    for call in (jda.save, jda.restore):
        with pytest.raises(jda.TreeError, match=r"^main_params: the optimizer's arrays have this"):
            call(tmp_path / "state", mine)


def test_a_field_whose_name_begins_as_a_scalar_of_the_optimizer_is_not_left_out(tmp_path):
    """A template without it restores only what another optimizer may lack."""
    tx, params = jda.fused_adamw(1e-2), {"w": jnp.ones(3)}
    state = {"params": params, "opt_state": tx.init(params)}
    jda.save(tmp_path, state | {"grad_norms": jnp.ones(4)})
    with pytest.raises(jda.TreeError, match="grad_norms: in the file, and not in the template"):
        jda.restore(tmp_path, state)


def test_the_seed_is_no_other_array_of_that_name(tmp_path):
    """A field "key" of the user, and a file without a seed."""
    coded = dict(mu_dtype="block8", nu_dtype="block8", rounding="stochastic")
    at_random, nearest = jda.fused_adamw(1e-2, **coded, seed=7), jda.fused_adamw(1e-2)
    params = {"w": jnp.ones((64, 128))}
    template = {"params": params, "opt_state": at_random.init(params)}
    mine = {"params": params, "opt_state": nearest.init(params), "key": jax.random.PRNGKey(99)}
    jda.save(tmp_path / "mine", mine, nearest)
    with pytest.raises(jda.TreeError, match="key: two arrays of the state have this name"):
        jda.save(tmp_path / "both", template | {"key": mine["key"]}, at_random)
    del mine["key"]
    jda.save(tmp_path / "none", mine, nearest)
    with pytest.raises(
        jda.TreeError, match=r"key: missing .* new=lambda path: path.startswith\('key'\)"
    ):
        jda.restore(tmp_path / "none", template, at_random)
    restored = jda.restore(tmp_path / "none", template, at_random, new=lambda path: path == "key")
    assert restored["opt_state"].key.tolist() == [7, 0]
    jda.save(tmp_path / "one", template, at_random)
    assert_trees_same_bits(jda.restore(tmp_path / "one", mine, nearest)["params"], params)
    several = jda.distributed(nearest, mesh=mesh_of(4))
    assert jda.restore(tmp_path / "one", jda.TrainState.shapes(params, several), several).opt_state.key is None  # fmt: skip


def test_a_key_of_the_user_is_not_the_seed(tmp_path):
    """As in Flax's train states with dropout: each was restored as the other, or left out."""
    coded = dict(mu_dtype="block8", nu_dtype="block8", rounding="stochastic")
    at_random, nearest = jda.fused_adamw(1e-2, **coded, seed=7), jda.fused_adamw(1e-2)
    params, key = {"w": jnp.ones((64, 128))}, jax.random.PRNGKey(99)
    mine = {"params": params, "opt_state": nearest.init(params), "key": key}
    seeded = {"params": params, "opt_state": at_random.init(params)}
    jda.save(tmp_path / "mine", mine)
    jda.save(tmp_path / "seeded", seeded)
    assert_same_bits(jda.restore(tmp_path / "mine", mine)["key"], key)
    for saved, template in (("mine", seeded), ("seeded", mine)):
        with pytest.raises(jda.TreeError, match="key: missing in the file"):
            jda.restore(tmp_path / saved, template)
    begun = jda.restore(tmp_path / "seeded", mine, new=lambda path: path == "key")
    assert_same_bits(begun["key"], key)
    tx = jda.distributed(at_random, mesh=mesh_of(4))
    without = {"params": params, "opt_state": nearest.init(params)}
    for template, optimizer in ((without, None), (jda.TrainState.shapes(params, tx), tx)):
        with pytest.raises(jda.TreeError, match="key: in the file, and not in the template"):
            jda.restore(tmp_path / "mine", template, optimizer)
        jda.restore(tmp_path / "mine", template, optimizer, unused=lambda path: path == "key")
    with pytest.raises(jda.TreeError, match="key: two arrays of the state have this name"):
        jda.restore(tmp_path / "seeded", seeded | {"key": key})


def test_a_counter_of_the_user_is_not_that_of_a_schedule(tmp_path):
    """It was left out, or began with the optimizer's count, if it is a tuple of a count alone."""
    tx, params = jda.fused_adamw(1e-2), {"w": jnp.ones(3)}
    state = {"params": params, "opt_state": tx.init(params)}
    mine = state | {"seen": optax.ScaleByScheduleState(jnp.float32(0.5))}
    jda.save(tmp_path / "mine", mine)
    jda.save(tmp_path / "state", state)
    assert_trees_same_bits(jda.restore(tmp_path / "mine", mine), mine)
    for saved, template, where in (
        ("mine", state, "in the file, and not in the template"),
        ("state", mine, "missing in the file"),
    ):
        with pytest.raises(jda.TreeError, match=f"seen: {where}"):
            jda.restore(tmp_path / saved, template)
