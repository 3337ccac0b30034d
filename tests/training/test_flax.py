"""``jda.flax`` takes the fused step in Flax's classes; nnx's trees train as dictionaries do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from support.bits import assert_trees_same_bits
from support.samples import few, often

HYPER = dict(b1=0.87, eps=1e-7, weight_decay=0.13)
BF16 = jnp.bfloat16
STEPS = 10
OPTIONS = {
    "float32": (jnp.float32, {}),
    "remainders": (BF16, dict(main_params_dtype="remainder16", mu_dtype=BF16)),
}


def make_tx(options):
    def adamw(learning_rate):
        return jda.fused_adamw(learning_rate, **HYPER | options)

    return jda.chain(optax.clip_by_global_norm(0.7), jda.inject_hyperparams(adamw)(3e-2))


def make_model(dtype, num_devices):
    """A model, its kernels over all devices, and its parameters as dictionaries."""
    mesh = jax.make_mesh(
        (num_devices,), ("x",), (AxisType.Auto,), devices=jax.devices("cpu")[:num_devices]
    )
    model = nnx.Sequential(
        *(nnx.Linear(n, 16, param_dtype=dtype, rngs=nnx.Rngs(n)) for n in (8, 16))
    )
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    of_kernel, of_bias = (NamedSharding(mesh, spec) for spec in (P("x", None), P()))
    params = jax.tree.map(
        lambda x: jax.device_put(x, of_kernel if x.ndim == 2 else of_bias), params
    )
    nnx.update(model, params)
    return model, jax.tree.map(jnp.copy, params)


def gradients(params):
    """Of each step, larger and smaller than the clip."""
    rng = np.random.default_rng(3)
    for i in range(STEPS):
        yield jax.tree.map(
            lambda x, i=i: jnp.asarray(rng.normal(size=x.shape) / 3**i, x.dtype), params
        )


def linen_steps(make_state, model, params, tx):
    state = make_state.create(apply_fn=None, params=jax.tree.map(jnp.copy, params), tx=tx)
    step = jax.jit(lambda state, grads: state.apply_gradients(grads=grads), donate_argnums=0)
    for grads in gradients(params):
        state = step(state, grads)
    assert state.step == STEPS
    return state.params, state.opt_state


def nnx_steps(make_optimizer, model, params, tx):
    nnx.update(model, jax.tree.map(jnp.copy, params))
    optimizer = make_optimizer(model, tx, wrt=nnx.Param)
    boxes = jax.tree.structure(nnx.state(model, nnx.Param))
    step = nnx.jit(
        lambda model, optimizer, grads: optimizer.update(model, grads), donate_argnums=(0, 1)
    )
    for grads in gradients(params):
        step(model, optimizer, boxes.unflatten(jax.tree.leaves(grads)))
    assert optimizer.step == STEPS
    assert jax.tree.structure(nnx.state(model, nnx.Param)) == boxes
    return nnx.to_pure_dict(nnx.state(model, nnx.Param)), optimizer.opt_state


FUSED = {
    "linen": functools.partial(linen_steps, jda.flax.TrainState),
    "nnx": functools.partial(nnx_steps, jda.flax.Optimizer),
}
UNFUSED = {
    "linen": functools.partial(linen_steps, TrainState),
    "nnx": functools.partial(nnx_steps, nnx.Optimizer),
}


@few(1)
@pytest.mark.parametrize("num_devices", [1, 8])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("library", FUSED)
@often(lambda num_devices, options: (num_devices == 8) == (options == "remainders"))
def test_fused_classes_step_as_the_optimizer_does(library, options, num_devices):
    dtype, others = OPTIONS[options]
    tx = make_tx(others)
    model, params = make_model(dtype, num_devices)
    got = FUSED[library](model, params, tx)
    wanted, opt_state = params, tx.init(params)
    step = jda.jit_step(tx)
    for grads in gradients(wanted):
        wanted, opt_state = step(grads, opt_state, wanted)
    assert_trees_same_bits(got[0], wanted)
    assert_trees_same_bits(*map(jax.tree.leaves, (got[1], opt_state)))
    for a, b in zip(*map(jax.tree.leaves, (got[0], wanted)), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


@few(1)
@pytest.mark.parametrize("library", FUSED)
def test_fused_classes_step_as_those_of_flax(library):
    tx = make_tx({})
    given = make_model(jnp.float32, 1)
    fused, unfused = (steps[library](*given, tx) for steps in (FUSED, UNFUSED))
    assert_trees_same_bits(*map(jax.tree.leaves, (fused, unfused)))


def pointers(tree):
    return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree) if jnp.ndim(x) == 2]


def test_a_fused_train_state_is_updated_in_place():
    _, params = make_model(jnp.float32, 1)
    tx = jda.fused_adamw(3e-2, **HYPER)
    state = jda.flax.TrainState.create(apply_fn=None, params=params, tx=tx)
    grads, before = next(gradients(params)), pointers(state)
    assert len(before) == 6
    state = jax.jit(lambda s, g: s.apply_gradients(grads=g), donate_argnums=0)(state, grads)
    assert pointers(state) == before


def test_a_fused_optimizer_of_nnx_updates_in_place():
    model, params = make_model(jnp.float32, 1)
    optimizer = jda.flax.Optimizer(model, jda.fused_adamw(3e-2, **HYPER), wrt=nnx.Param)
    boxes = jax.tree.structure(nnx.state(model, nnx.Param))
    grads = boxes.unflatten(jax.tree.leaves(next(gradients(params))))
    before = [pointers(nnx.state(x)) for x in (model, optimizer)]
    assert [len(x) for x in before] == [2, 4]
    nnx.jit(lambda m, o, g: o.update(m, g), donate_argnums=(0, 1))(model, optimizer, grads)
    assert [pointers(nnx.state(x)) for x in (model, optimizer)] == before


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(4, 32, rngs=rngs), nnx.Linear(32, 3, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(32, rngs=rngs), nnx.Dropout(0.2)

    def __call__(self, x, rngs):
        return self.down(self.dropout(nnx.relu(self.norm(self.up(x))), rngs=rngs))


@pytest.mark.skipif(not hasattr(nnx, "set_graph_mode"), reason="this Flax has no graph mode")
def test_the_graph_mode_of_an_optimizer_is_kept_in_its_steps():
    """Two layers share a weight, which a tree cannot hold twice."""

    def trained(optimizer_class, tx):
        model = nnx.List([nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(2)])
        model[1].kernel = model[0].kernel
        optimizer = optimizer_class(model, tx, wrt=nnx.Param, graph=True)
        for _ in range(3):
            grads = nnx.grad(lambda m: jnp.sum(m[1](m[0](jnp.ones(4))) ** 2), graph=True)(model)
            optimizer.update(model, grads)
        return nnx.to_pure_dict(nnx.state((model, optimizer.opt_state), graph=True))

    tx = jda.fused_adamw(3e-2, **HYPER)
    with nnx.set_graph_mode(False):
        assert_trees_same_bits(trained(jda.flax.Optimizer, tx), trained(nnx.Optimizer, tx))


@few(1)
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_nnx_trains_over_a_mesh_as_dictionaries_do(strategy):
    """Batch statistics, keys of dropout and micro-batches; other data on each device."""
    mesh = jax.sharding.Mesh(jax.devices("cpu"), ("data",))
    tx = jda.distributed(
        jda.fused_adamw(3e-2, **HYPER), mesh=mesh, sharding_strategy=strategy, max_grad_norm=0.4
    )
    graph, *boxed = nnx.split(Net(nnx.Rngs(0)), nnx.Param, nnx.BatchStat)

    def loss_fn(params, x, *, model_state, rng):
        model = nnx.merge(graph, params, model_state, copy=True)
        return jnp.mean(jnp.square(model(x, nnx.Rngs(rng)) - x[:, :1])), nnx.state(
            model, nnx.BatchStat
        )

    def loss_of_dictionaries(params, x, *, model_state, rng):
        model = Net(nnx.Rngs(0))
        nnx.update(model, params, model_state)
        loss = jnp.mean(jnp.square(model(x, nnx.Rngs(rng)) - x[:, :1]))
        return loss, nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))

    batches = np.random.default_rng(5).normal(size=(STEPS, 64, 4)).astype(np.float32)
    results = []
    for loss, (params, stats) in (
        (loss_fn, boxed),
        (loss_of_dictionaries, map(nnx.to_pure_dict, boxed)),
    ):
        state = jda.TrainState.create(params, tx, model_state=stats, rng=jax.random.key(2))
        structure = jax.tree.structure((params, stats))
        step = jda.train_step(loss, tx, accumulate_steps=2)
        losses = []
        for batch in batches:
            state, metrics = step(state, batch)
            losses.append(metrics["loss"])
        assert jax.tree.structure((state.params, state.model_state)) == structure
        state = (jda.full_params(state, tx), state.opt_state, state.model_state)
        results.append(jax.tree.leaves((losses, state)))
    assert_trees_same_bits(*results)
    model = nnx.merge(graph, *boxed)
    assert not np.array_equal(model.norm.mean[...], state[2]["norm"]["mean"])  # they moved


WITHOUT_STEP = {
    "chain": optax.chain,
    "masked": lambda tx: optax.masked(tx, True),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "not last": lambda tx: jda.chain(tx, optax.clip(0.5)),
    "optax's": lambda tx: jda.chain(optax.clip(1.0), optax.adamw(1e-3)),
}


@few(2)
@pytest.mark.parametrize("wrap", WITHOUT_STEP)
def test_optimizers_without_step_warn_and_update(wrap):
    """As Flax's own classes do; with MultiSteps they said that there is no attribute 'step'."""
    tx = WITHOUT_STEP[wrap](jda.fused_adamw(1e-3))
    params = {"w": jnp.ones(3)}
    with pytest.warns(UserWarning, match=r"^tx: has no fused step.* in place of those of optax"):
        got = jda.flax.TrainState.create(apply_fn=None, params=params, tx=tx).apply_gradients(
            grads=params
        )
    want = TrainState.create(apply_fn=None, params=params, tx=tx).apply_gradients(grads=params)
    assert_trees_same_bits((got.params, got.opt_state), (want.params, want.opt_state))
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    optimizer = jda.flax.Optimizer(model, tx, wrt=nnx.Param)
    with pytest.warns(UserWarning, match="^tx: has no fused step"):
        optimizer.update(model, nnx.state(model, nnx.Param))
    assert int(optimizer.step[...]) == 1


def test_a_step_that_a_user_wrote_is_taken_without_a_warning():
    tx, params = jda.fused_adamw(1e-3), {"w": jnp.ones(3)}

    def step(grads, state, params):
        new, state = tx.step(grads, state, params)
        return jax.tree.map(lambda x: -x, new), state

    mine = jda.FusedTransformation(tx.init, tx.update, step)
    state = jda.flax.TrainState.create(apply_fn=None, params=params, tx=mine)
    assert float(state.apply_gradients(grads=params).params["w"][0]) < 0


def test_distributed_optimizers_in_the_classes_raise():
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices("cpu")[:2])
    tx, params = jda.distributed(jda.fused_adamw(1e-3), mesh=mesh), {"w": jnp.ones(3)}
    state = jda.flax.TrainState.create(apply_fn=None, params=params, tx=tx)
    with pytest.raises(jda.PolicyError, match=r"^update: .*expected jda\.train_step"):
        state.apply_gradients(grads=params)


def test_keywords_are_passed_on():
    """Fields of a subclass of TrainState, and arguments of a transformation, as Flax does."""

    class State(jda.flax.TrainState):
        seen: int = 0

    params = {"w": jnp.ones(3)}
    state = State.create(apply_fn=None, params=params, tx=jda.fused_adamw(1e-3))
    assert state.apply_gradients(grads=params, seen=7).seen == 7
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    scale = optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(),
        lambda g, s, p=None, *, factor, **_: (jax.tree.map(lambda x: factor * x, g), s),
    )
    optimizer = jda.flax.Optimizer(model, jda.chain(scale, jda.fused_adamw(1e-3)), wrt=nnx.Param)
    before = model.kernel[...]
    optimizer.update(model, nnx.state(model, nnx.Param), factor=0.0)
    np.testing.assert_allclose(model.kernel[...], before * (1 - 1e-7), rtol=1e-6)


def test_constraints_over_the_data_axis_raise_with_the_path():
    """Of annotated parameters, and of activations; JAX's own error names neither."""
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices("cpu")[:2])
    tx, x = jda.distributed(jda.fused_adamw(1e-3), mesh=mesh), np.ones((4, 8), np.float32)
    annotated = nn.with_partitioning(nn.initializers.lecun_normal(), ("data", None))
    model = nn.Dense(4, kernel_init=annotated)
    boxed = model.init(jax.random.key(0), x)["params"]
    plain = nn.meta.unbox(boxed)

    def loss(params, batch):
        return jnp.mean(model.apply({"params": params}, batch) ** 2)

    def constrained(params, batch):
        hidden = jax.lax.with_sharding_constraint(batch @ params["kernel"], P("data"))
        return jnp.mean(hidden**2)

    def trained(params, loss):
        return jda.train_step(loss, tx)(jda.TrainState.create(params, tx), x)

    trained(plain, loss)
    message = r"^loss_fn: {}an activation: constrained over an axis of the data.*drop_in"
    with pytest.raises(jda.PolicyError, match=message.format(r"params\['kernel'\], or ")):
        trained(boxed, loss)
    with jax.set_mesh(mesh), pytest.raises(jda.PolicyError, match=message.format("")):
        trained(plain, constrained)
    by_rank = lambda p, x: jnp.mean(  # noqa: E731
        jax.lax.with_sharding_constraint(x @ p["kernel"], P(None, None, None))
    )
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="values of rank at least 3") as found:
        trained(plain, by_rank)
    assert not isinstance(found.value, jda.PolicyError)
