"""ZeRO-1 in plain ``jax.jit``: ``state_shardings`` for states of optax and of ours."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from jdistadam.drop_in import step as drop_in_step
from support.bits import assert_trees_same_bits
from support.h200 import by_op
from support.samples import few

HYPER = dict(learning_rate=0.02, b1=0.87, b2=0.9973, eps=1e-7, weight_decay=0.13)


def make_mesh(shape=(8,), names=("data",)):
    return Mesh(np.asarray(jax.devices("cpu")[: int(np.prod(shape))]).reshape(shape), names)


def first_params(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    shapes = {"tall": (64, 3), "wide": (5, 48), "odd": (7,), "scalar": ()}
    return {"block": {k: jnp.asarray(rng.normal(size=s), dtype) for k, s in shapes.items()}}


def specs(shardings):
    return jax.tree.map(lambda x: tuple(x.spec), shardings)


MADE = {
    "fused_adamw": lambda: jda.fused_adamw(**HYPER),
    "optax.adamw": lambda: optax.adamw(**HYPER),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), jda.fused_adamw(**HYPER)),
    "parts": lambda: jda.chain(jda.scale_by_adam(), jda.scale_by_learning_rate(0.1)),
    "hyperparameters": lambda: jda.inject_hyperparams(jda.fused_adamw)(**HYPER),
    "MultiSteps": lambda: optax.MultiSteps(jda.fused_adamw(**HYPER), 2),
    "main parameters": lambda: jda.fused_adamw(**HYPER, main_params_dtype=jnp.float32),
}


@pytest.mark.parametrize("made", MADE)
def test_every_array_of_a_parameter_is_cut_once(made):
    tx, params = MADE[made](), first_params(jnp.bfloat16)
    shapes = jax.eval_shape(tx.init, params)
    shardings = jda.state_shardings(shapes, params, make_mesh())
    wanted = {"tall": ("data", None), "wide": (None, "data"), "odd": (), "scalar": ()}
    num_cut = 0
    for (path, x), sharding in zip(
        jax.tree_util.tree_flatten_with_path(shapes)[0], jax.tree.leaves(shardings), strict=True
    ):
        name = getattr(path[-1], "key", None)
        assert tuple(sharding.spec) == (wanted.get(name, ()) if x.ndim else ()), path
        num_cut += "data" in sharding.spec
    assert num_cut == {"MultiSteps": 6, "main parameters": 6}.get(made, 4)


def test_shardings_of_parameters_stay():
    """Over a model axis, beside and on the same dimension; a parameter cut over "data" as it is."""
    mesh = make_mesh((4, 2), ("data", "model"))
    own = {"tall": P("model"), "wide": P(None, "model"), "odd": P(), "scalar": P()}
    params = first_params()["block"]
    params = {k: jax.device_put(x, NamedSharding(mesh, own[k])) for k, x in params.items()}
    params["fsdp"] = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P(None, "data")))
    shardings = jda.state_shardings(jda.fused_adamw(**HYPER).init(params), params, mesh)[0].mu
    assert specs(shardings) == {
        "tall": (("model", "data"), None), "wide": (None, ("model", "data")), "odd": (), "scalar": (), "fsdp": (None, "data"),
    }  # fmt: skip


@few(1)
@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
def test_sharded_state_has_the_bits_of_one_device_and_stays_where_it_is(dtype, explicit):
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((8,), ("data",), (kind,), devices=jax.devices("cpu"))
    params, replicated = first_params(dtype), NamedSharding(mesh, P())
    tx = jda.fused_adamw(**HYPER, main_params_dtype=None if dtype == jnp.float32 else jnp.float32)
    shardings = jda.state_shardings(jax.eval_shape(tx.init, params), params, mesh)
    state = jax.jit(tx.init, out_shardings=shardings)(params)
    one, one_state = params, tx.init(params)
    step, params = jax.jit(tx.step), jax.device_put(params, replicated)
    for i in range(10):
        rng = np.random.default_rng(i)
        grads = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), one)  # noqa: B023
        params, state = step(jax.device_put(grads, replicated), state, params)
        one, one_state = step(grads, one_state, one)
    assert_trees_same_bits((params, state), (one, one_state))
    for x, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(params))


@few(1)
@pytest.mark.parametrize("which", ["params", "state", "both"])
def test_arrays_cut_unequally_within_a_program_have_the_same_bits(which):
    """A constraint may cut 5 rows over 8 devices; XLA's partitioner ended with an internal error."""
    mesh, params, tx = make_mesh(), first_params(), jda.fused_adamw(**HYPER)
    cut = NamedSharding(mesh, P("data"))

    def constrained(tree):
        cut_one = lambda x: jax.lax.with_sharding_constraint(x, cut) if x.ndim else x  # noqa: E731
        return jax.tree.map(cut_one, tree)

    def step(grads, state, params):
        state = state if which == "params" else constrained(state)
        return tx.step(grads, state, params if which == "state" else constrained(params))

    given = params, tx.init(params), params
    assert_trees_same_bits(jax.jit(step)(*given), jax.jit(tx.step)(*given))


def test_new_params_are_gathered_beside_other_calls_with_the_same_bits(monkeypatch):
    """So many bytes are in one call, wherever arrays are."""
    monkeypatch.setattr(drop_in_step, "_BYTES_A_CALL", 4 * 64 * 8)
    mesh, tx = make_mesh(), jda.fused_adamw(**HYPER)
    params = {f"w{i}": jnp.full((64, 8), i + 1.0) for i in range(5)}
    params = jax.device_put(params, NamedSharding(mesh, P()))
    shardings = jda.state_shardings(jax.eval_shape(tx.init, params), params, mesh)
    results, counts = [], []
    for of_state, of_params in ((shardings, P()), (NamedSharding(mesh, P()), P()), (shardings, P("data"))):  # fmt: skip
        placed = jax.device_put(params, NamedSharding(mesh, of_params))
        given = placed, jax.device_put(tx.init(params), of_state), placed
        step = jax.jit(tx.step).lower(*given).compile()
        counts.append(step.as_text().count('custom_call_target="jdistadam_adam"'))
        results.append(step(*given))
    assert counts == [5, 5, 5]
    for other in results[1:]:
        assert_trees_same_bits(other, results[0])


CODED = dict(
    mu_dtype="block8", nu_dtype="block8", main_params_dtype="remainder16", rounding="stochastic"
)
CODED_SHAPES = {
    "blocks": (64, 128), "rows": (8, 1024), "short rows": (128, 33), "wide": (2, 4096), "small": (64,)
}  # fmt: skip


def test_coded_moments_are_cut_in_whole_blocks_with_all_else_of_a_parameter():
    """Or nothing of it is: an array that is cut otherwise would be gathered in every step."""
    mesh, rng = make_mesh(), np.random.default_rng(0)
    draw = lambda shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)  # noqa: E731
    params = {name: draw(shape) for name, shape in CODED_SHAPES.items()}
    tx = jda.fused_adamw(**HYPER | CODED, seed=1)
    shapes = jax.eval_shape(tx.init, params)
    shardings = jda.state_shardings(shapes, params, mesh)
    cut = {"blocks": ("data",), "rows": ("data",), "short rows": (), "wide": (), "small": ("data",)}
    found = dict.fromkeys(cut, 0)
    for path, sharding in jax.tree_util.tree_leaves_with_path(shardings):
        for name in {getattr(key, "key", None) for key in path} & cut.keys():
            assert tuple(sharding.spec) == cut[name], path
            found[name] += 1
    assert found == {"blocks": 5, "rows": 5, "short rows": 5, "wide": 5, "small": 3}
    state = jax.jit(tx.init, out_shardings=shardings)(params)
    one, one_state = params, tx.init(params)
    step, params = jax.jit(tx.step), jax.device_put(params, NamedSharding(mesh, P()))
    for _ in range(3):
        grads = jax.tree.map(lambda x: draw(x.shape), one)
        params, state = step(jax.device_put(grads, NamedSharding(mesh, P())), state, params)
        one, one_state = step(grads, one_state, one)
    assert_trees_same_bits((params, state), (one, one_state))
    for x, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(params))


def test_coded_moments_keep_the_cuts_of_a_parameter():
    mesh = make_mesh((4, 2), ("data", "model"))
    own = {"first": P("model"), "both": P("data"), "second": P(None, "model")}
    params = {
        k: jax.device_put(jnp.ones((64, 128), jnp.bfloat16), NamedSharding(mesh, spec))
        for k, spec in own.items()
    }
    state = jax.eval_shape(jda.fused_adamw(**HYPER | CODED).init, params)
    shardings = jda.state_shardings(state, params, mesh)
    wanted = {"first": (("model", "data"),), "both": ("data",), "second": ()}
    assert specs(shardings.inner.main_params) == wanted
    assert specs(jax.tree.map(lambda x: x.codes, shardings.inner.inner[0].mu, is_leaf=lambda x: hasattr(x, "codes"))) == wanted  # fmt: skip


def test_of_coded_moments_only_new_parameters_are_gathered(h200s):
    mesh, tx = h200s(2), jda.fused_adamw(**HYPER | CODED)
    params = {"w": jax.ShapeDtypeStruct((512, 1024), jnp.bfloat16)}
    state = jax.eval_shape(tx.init, params)
    shardings = jda.state_shardings(state, params, mesh)
    put = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)  # noqa: E731
    everywhere = jax.tree.map(lambda _: NamedSharding(mesh, P()), params)
    given = jax.tree.map(put, (params, state, params), (everywhere, shardings, everywhere))
    text = jax.jit(tx.step, donate_argnums=(1, 2)).lower(*given).compile().as_text()
    assert dict(by_op(text)) == {("all-gather", "bf16"): 512 * 1024}


def test_in_classes_of_flax():
    mesh, params = make_mesh(), {"w": jnp.ones((64, 8))}
    state = TrainState.create(apply_fn=None, params=params, tx=jda.fused_adamw(**HYPER))
    shardings = jda.state_shardings(state.opt_state, params, mesh)
    state = state.replace(opt_state=jax.device_put(state.opt_state, shardings))
    state = jax.jit(lambda s, g: s.apply_gradients(grads=g))(state, params)
    assert state.opt_state[0].mu["w"].addressable_data(0).shape == (8, 8)
    model = nnx.Linear(64, 8, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, jda.fused_adamw(**HYPER), wrt=nnx.Param)
    opt_state = nnx.as_pure(optimizer.opt_state)
    shardings = jda.state_shardings(opt_state, nnx.to_pure_dict(nnx.state(model, nnx.Param)), mesh)
    assert tuple(shardings[0].mu["kernel"].spec) == ("data", None)
    boxed = optimizer.opt_state
    placed = jax.device_put(boxed, jda.state_shardings(boxed, nnx.state(model, nnx.Param), mesh))
    assert placed[0].mu["kernel"][...].addressable_data(0).shape == (8, 8)
    partitioned = nn.Dense(8, kernel_init=nn.with_partitioning(nn.initializers.ones, (None, "x")))
    shapes = jax.eval_shape(partitioned.init, jax.random.key(0), jnp.ones((1, 64)))["params"]
    state = jax.eval_shape(jda.fused_adamw(**HYPER).init, shapes)
    shardings = jda.state_shardings(state, shapes, mesh)
    assert tuple(shardings[0].mu["kernel"].spec) == ("data", None)  # no box around it


@few(1)
@pytest.mark.parametrize("of", ["params", "moments"])
def test_a_state_made_inside_jit_is_sharded_by_a_constraint(of):
    """As in one program that trains in a scan. A moment may stand for the parameters."""
    mesh, tx = make_mesh(), jda.fused_adamw(**HYPER)

    @jax.jit
    def trained(params):
        state = tx.init(params)
        like = params if of == "params" else state[0].mu
        state = jax.lax.with_sharding_constraint(state, jda.state_shardings(state, like, mesh))

        def body(carry, _):
            params, state = carry
            return tx.step(params, state, params), None

        return jax.lax.scan(body, (params, state), length=3)[0]

    params = first_params()
    new, state = trained(params)
    block = state[0].mu["block"]
    assert block["tall"].addressable_data(0).shape == (8, 3)
    assert block["wide"].addressable_data(0).shape == (5, 6)
    alone = params, tx.init(params)
    for _ in range(3):
        alone = jax.jit(tx.step)(alone[0], alone[1], alone[0])
    assert_trees_same_bits((new, state), alone)


@pytest.mark.parametrize("as_spec", [True, False])
def test_shardings_of_params_may_be_given_beside_shapes(as_spec):
    mesh, params = make_mesh((4, 2), ("data", "model")), first_params()["block"]
    specs_of = {"tall": P("model"), "wide": P(None, "model"), "odd": P(), "scalar": P()}
    given = specs_of if as_spec else {k: NamedSharding(mesh, x) for k, x in specs_of.items()}
    state = jax.eval_shape(jda.fused_adamw(**HYPER).init, params)
    shardings = jda.state_shardings(state, params, mesh, param_shardings=given)[0].mu
    assert specs(shardings)["wide"] == (None, ("model", "data"))
    with pytest.raises(jda.TreeError, match=r"^param_shardings\['odd'\]: missing, params has it"):
        jda.state_shardings(state, params, mesh, param_shardings={"tall": P()})


def test_shapes_under_an_explicit_mesh_keep_the_shardings_of_params():
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((4, 2), ("data", "model"), explicit)
    params = {"w": jax.device_put(jnp.ones((64, 16)), NamedSharding(mesh, P(None, "model")))}
    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(lambda: jax.tree.map(lambda x: 2 * x, params))
        state = jax.eval_shape(jda.fused_adamw(**HYPER).init, shapes)
    shardings = jda.state_shardings(state, shapes, mesh)[0].mu
    assert shardings == {"w": NamedSharding(mesh, P("data", "model"))}


@pytest.mark.parametrize("spec", [P("other"), P(("model", "other")), P(None, None, "model")])
def test_a_spec_that_does_not_fit_its_parameter_raises(spec):
    mesh, params = make_mesh((4, 2), ("data", "model")), {"w": jnp.ones((64, 16))}
    with pytest.raises(
        jda.MeshError, match=r"^params\['w'\]: the PartitionSpec does not fit: got P"
    ):
        jda.state_shardings(params, params, mesh, param_shardings={"w": spec})


def test_wrong_meshes_and_leaves_raise():
    params = first_params()
    state = jda.fused_adamw(**HYPER).init(params)
    with pytest.raises(jda.DtypeError, match=r"^params\['f'\]: not an array: got function"):
        jda.state_shardings(state, params | {"f": lambda x: x}, make_mesh())
    with pytest.raises(
        jda.MeshError, match=r"^axis: not an axis of the mesh: got 'model', expected"
    ):
        jda.state_shardings(state, params, make_mesh(), "model")
    other = jax.device_put(params, NamedSharding(make_mesh((2,)), P()))
    with pytest.raises(
        jda.MeshError, match=r"^params\['block'\]\['odd'\]: sharded over another mesh"
    ):
        jda.state_shardings(state, other, make_mesh())
