"""The drop-in as Flax calls it: ``nnx.Optimizer``, and parameters in boxes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from support.bits import assert_trees_same_bits
from support.optimizers import distributed_adamw
from support.samples import often

HYPER = dict(learning_rate=3e-3, b1=0.87, eps=1e-7, weight_decay=0.13)
BOTH = dict(mu_dtype="block8", nu_dtype="block8", rounding="stochastic", seed=7)
BF16 = jnp.bfloat16


def gradients_at(step, params):
    def normal(x):
        rng = np.random.default_rng(1 + step)
        return jnp.asarray(rng.normal(size=x.shape).astype(np.float32).astype(x.dtype))

    return jax.tree.map(normal, params)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "dtype", "transform"),
    [
        (dict(mu_dtype="block16"), jnp.float32, nnx.jit),
        (BOTH | dict(main_params_dtype="remainder16"), BF16, nnx.jit),
        (BOTH, jnp.float32, lambda function: function),
    ],
    ids=["mu", "all", "eager"],
)
@often(lambda options: "nu_dtype" in options)
def test_nnx_optimizer_with_moments_in_codes(options, dtype, transform):
    model = nnx.Linear(64, 128, param_dtype=dtype, rngs=nnx.Rngs(0))
    tx = jda.fused_adamw(**HYPER | options)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    state = tx.init(params)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    structure = jax.tree.structure(optimizer.opt_state)
    step = transform(lambda model, optimizer, grads: optimizer.update(model, grads))
    for i in range(3):
        grads = gradients_at(i, params)
        updates, state = jax.jit(tx.update)(grads, state, params)
        params = optax.apply_updates(params, updates)
        boxed = jax.tree.structure(nnx.state(model, nnx.Param)).unflatten(jax.tree.leaves(grads))
        step(model, optimizer, boxed)
    assert_trees_same_bits(nnx.to_pure_dict(nnx.state(model, nnx.Param)), params)
    assert jax.tree.structure(optimizer.opt_state) == structure
    got, want = (jax.tree.leaves(x) for x in (optimizer.opt_state, state))
    assert_trees_same_bits(got, want)
    decoded = jda.decoded(optimizer.opt_state)
    assert_trees_same_bits(jax.tree.leaves(decoded), jax.tree.leaves(jda.decoded(state)))


def optimizer_of(model, **options):
    tx = jda.fused_adamw(**HYPER | dict(learning_rate=optax.constant_schedule(3e-3)) | options)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    optimizer.update(model, gradients_at(0, nnx.state(model, nnx.Param)))
    return optimizer


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, BOTH | dict(main_params_dtype="remainder16")], ids=["floats", "codes"]
)
@often(lambda options: bool(options))
def test_restore_returns_the_tree_of_nnx(options, tmp_path):
    model = nnx.Linear(64, 128, param_dtype=BF16 if options else jnp.float32, rngs=nnx.Rngs(0))
    optimizer = optimizer_of(model, **options)
    state = {"params": nnx.state(model, nnx.Param), "opt_state": optimizer.opt_state}
    jda.save(tmp_path, state)
    restored = jda.restore(tmp_path, state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert_trees_same_bits(*map(jax.tree.leaves, (restored, state)))
    grads = gradients_at(1, state["params"])
    results = []
    for opt_state in (state["opt_state"], restored["opt_state"]):
        copy = nnx.clone(model)
        optimizer.opt_state = nnx.data(opt_state)
        optimizer.update(copy, grads)
        results.append(nnx.to_pure_dict(nnx.state(copy)))
    assert_trees_same_bits(*results)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, BOTH | dict(main_params_dtype="remainder16")], ids=["floats", "codes"]
)
@often(lambda options: bool(options))
def test_a_checkpoint_of_nnx_is_one_of_dictionaries(options, tmp_path):
    dtype = BF16 if options else jnp.float32
    model = nnx.Sequential(nnx.Linear(64, 128, param_dtype=dtype, rngs=nnx.Rngs(0)))
    optimizer = optimizer_of(model, **options)
    params = nnx.state(model, nnx.Param)
    boxed = {"params": params, "opt_state": optimizer.opt_state, "model_state": params}
    pure = nnx.to_pure_dict(params)
    plain = {
        "params": pure,
        "opt_state": optimizer.tx.init(pure),
        "model_state": pure,
    }
    for i, (saved, template) in enumerate(((boxed, plain), (plain, boxed))):
        folder = tmp_path / str(i)
        jda.save(folder, saved)
        restored = jda.restore(folder, template)
        assert jax.tree.structure(restored) == jax.tree.structure(template)
        assert_trees_same_bits(*map(jax.tree.leaves, (restored, saved)))


def test_params_of_nnx_and_its_statistics_come_back_without_a_template(tmp_path):
    model = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
    want = nnx.clone(model)
    _, params, stats = nnx.split(model, nnx.Param, nnx.BatchStat)
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices("cpu")[:4])
    tx = distributed_adamw(**HYPER, mesh=mesh)
    jda.save(tmp_path, jda.TrainState.create(params, tx, model_state=stats), tx)
    restored = jda.restore(tmp_path, jda.TrainState.shapes(nnx.to_pure_dict(params), tx), tx)
    params = jda.restore_params(tmp_path)
    assert_trees_same_bits(params, restored.params)
    model.scale[...] = model.mean[...] = jnp.full(8, 7.0)
    nnx.update(model, params, restored.model_state)
    assert_trees_same_bits(*(nnx.to_pure_dict(nnx.state(m)) for m in (model, want)))


def test_main_params_of_nnx():
    model = nnx.Linear(4, 3, param_dtype=BF16, rngs=nnx.Rngs(0))
    optimizer, params = optimizer_of(model, main_params_dtype=jnp.float32), nnx.state(model)
    main = jda.main_params(params, optimizer.opt_state)
    assert jax.tree.structure(main) == jax.tree.structure(params)
    assert_trees_same_bits(*map(jax.tree.leaves, (main, optimizer.opt_state.main_params)))


def test_the_state_of_nnx_over_a_mesh():
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    optimizer, params = optimizer_of(model), nnx.state(model)
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices("cpu")[:4])
    hyper = HYPER | dict(learning_rate=optax.constant_schedule(3e-3))
    tx = distributed_adamw(**hyper, mesh=mesh)
    state = jda.from_optax_state(params, optimizer.opt_state, tx)
    assert jax.tree.structure(state.params) == jax.tree.structure(params)
    main, opt_state, _ = jda.to_optax_state(state, tx)
    want = params, optimizer.opt_state
    assert_trees_same_bits(*map(jax.tree.leaves, ((main, opt_state), want)))


def test_paths_in_nnx_are_the_same_at_first_and_later():
    model = nnx.Sequential(*[nnx.Linear(64, 64, rngs=nnx.Rngs(0)) for _ in range(2)])
    path = "['layers'][0]['kernel']"
    optimizer = optimizer_of(model, mu_dtype="block16", float32_moments=path.__eq__)
    first, second = (optimizer.opt_state[0].mu["layers"][i]["kernel"] for i in range(2))
    assert first[...].dtype == jnp.float32 and second.codes[...].dtype == jnp.uint16


def test_a_state_of_nnx_as_params():
    _, boxed = nnx.split(nnx.Linear(64, 128, rngs=nnx.Rngs(0)))
    tx = jda.fused_adamw(**HYPER | BOTH)
    results = []
    for params in (boxed, nnx.to_pure_dict(boxed)):
        state = tx.init(params)
        structure = jax.tree.structure(state)
        params, state = jax.jit(tx.step)(gradients_at(0, params), state, params)
        assert jax.tree.structure(state) == structure
        results.append(jax.tree.leaves((params, state)))
    assert_trees_same_bits(*results)


def sharded_linen(mesh, x):
    init = nn.with_partitioning(nn.initializers.lecun_normal(), ("model", None))
    model = nn.Dense(128, kernel_init=init)
    tx = jda.fused_adamw(**HYPER | dict(mu_dtype="block16"))

    def create(key):
        return TrainState.create(apply_fn=model.apply, params=model.init(key, x), tx=tx)

    shardings = nn.get_sharding(jax.eval_shape(create, jax.random.key(0)), mesh)
    state = jax.jit(create, out_shardings=shardings)(jax.random.key(0))
    return state, lambda state: state.opt_state[0].mu["params"]["kernel"]


def test_codes_in_boxes_of_linen_are_placed_as_their_parameter():
    mesh = jax.make_mesh((4,), ("model",), (AxisType.Auto,), devices=jax.devices("cpu")[:4])
    state, moment = sharded_linen(mesh, jnp.ones((1, 64)))
    structure = jax.tree.structure(state)
    step = jax.jit(lambda s, g: s.apply_gradients(grads=g))
    for i in range(2):
        assert moment(state).codes.value.sharding.spec[0] == "model"
        assert moment(state).scales.value.sharding.spec == P("model")
        grads = gradients_at(i, state.params)
        state = step(state, grads)
    assert jax.tree.structure(state) == structure


def test_codes_in_boxes_of_nnx_are_placed_as_their_parameter():
    mesh = jax.make_mesh((4,), ("model",), (AxisType.Auto,), devices=jax.devices("cpu")[:4])
    with jax.set_mesh(mesh):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("model", None))
        model = nnx.Linear(64, 128, kernel_init=init, rngs=nnx.Rngs(0))
        tx = jda.fused_adamw(**HYPER | dict(mu_dtype="block16"))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        grads = gradients_at(0, nnx.state(model, nnx.Param))
        step = nnx.jit(lambda m, o, g: o.update(m, g))
        for _ in range(2):
            moment = optimizer.opt_state[0].mu["kernel"]
            assert moment.codes[...].sharding.spec[0] == "model"
            assert moment.scales[...].sharding.spec == P("model")
            specs = nnx.get_partition_spec(nnx.state(optimizer))["opt_state"][0]["mu"]["kernel"]
            assert specs["scales"].get_value() == P("model")
            step(model, optimizer, grads)


def test_trees_of_nnx_in_a_step_say_which_variable_differs():
    """The state of nnx.Optimizer has Variables of its own; the message stays short in any model."""
    model = nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(0)) for _ in range(40)])
    optimizer = nnx.Optimizer(model, jda.fused_adamw(1e-2), wrt=nnx.Param)
    params = nnx.state(model, nnx.Param)
    message = r"^opt_state\[0\]\.mu\[0\]\['bias'\]: tree .*got .*OptVariable.*expected .*Param"
    with pytest.raises(jda.TreeError, match=message) as caught:
        optimizer.tx.step(params, optimizer.opt_state, params)
    assert len(str(caught.value)) < 500
    given = map(nnx.as_pure, (params, optimizer.opt_state, params))
    assert jax.tree.structure(optimizer.tx.step(*given)[0]) == jax.tree.structure(
        nnx.as_pure(params)
    )
    with pytest.raises(
        jda.TreeError, match=r"^mask: structure differs from params: got "
    ) as caught:
        jda.fused_adamw(1e-2, mask=[True] * 39).init(params)
    assert len(str(caught.value)) < 500


def test_labels_in_other_containers_than_nnx_params_raise_in_words():
    params = nnx.state(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Param)
    plain = nnx.to_pure_dict(params)
    labels, groups = {"kernel": "a", "bias": "b"}, {"a": {}, "b": {}}
    make = functools.partial(jda.fused_adamw, 1e-2, groups=groups)
    for given, of, got in (
        (labels, params, r"dict, expected flax\.\S*\.State\."),
        (nnx.State(labels), plain, r"flax\.\S*\.State, expected dict\."),
    ):
        with pytest.raises(jda.TreeError, match=f"^param_labels: structure .* got {got} Give each"):
            make(param_labels=given).init(of)
    for given, of in ((labels, plain), (nnx.State(labels), params)):
        make(param_labels=given).init(of)
