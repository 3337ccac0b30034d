"""Partitioned models as users write them: own regions, Flax's metadata, and what raises."""

import functools
import os
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from support.bits import assert_trees_same_bits
from support.model_axes import TYPES, mesh_of
from support.optimizers import distributed_adamw
from support.placements import STRATEGIES
from support.samples import few, often

BF16 = jnp.bfloat16
WIDTH, HIDDEN = 64, 512
SPECS = {"w": P(None, "model"), "b": P("model")}


def make_tx(mesh="4x2", kind="auto", **kwargs):
    given = dict(b1=0.87, b2=0.9973, weight_decay=0.13, param_specs=SPECS) | kwargs
    return distributed_adamw(3e-3, mesh=mesh_of(mesh, kind), **given)


def params_of(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    w, b = rng.normal(size=(WIDTH, HIDDEN)), rng.normal(size=HIDDEN)
    return {"w": jnp.asarray(w, dtype), "b": jnp.asarray(b, dtype)}


def batches(n=3):
    rng = np.random.default_rng(1)
    return [np.float32(rng.normal(size=(8, WIDTH))) for _ in range(n)]


def loss_fn(params, x):
    return jnp.mean(jnp.square(x @ params["w"] + params["b"][None]))


def trained(tx, loss_fn=loss_fn, params=None, **kwargs):
    state = jda.TrainState.create(params_of() if params is None else params, tx)
    step = jda.train_step(loss_fn, tx, **kwargs)
    for x in batches():
        state, metrics = step(state, x)
    return state, metrics


# -- a user's own region


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("strategy", STRATEGIES)
@often(
    lambda strategy, kind, check_vma: (
        (strategy, kind, check_vma) == ("optim_grads_params", "explicit", True)
    )
)
def test_custom_loop_with_a_model_axis_is_train_step(strategy, kind, check_vma):
    """Manual over the data axes alone; init, accumulate, grad_norm and step."""
    tx = make_tx(kind=kind, sharding_strategy=strategy, max_grad_norm=1.0)
    want, metrics = trained(tx, accumulate_steps=2)
    tx = tx.bind(params_of())
    shards = strategy == "optim_grads_params"

    def local(params, state, batch):
        mine = jda.local_params(params, tx)
        full = jda.gather_params(mine, tx) if shards else mine

        def body(acc, x):
            return tx.accumulate(acc, jax.grad(loss_fn)(full, x)), None

        acc, _ = lax.scan(body, tx.init_grads(mine), batch.reshape(2, -1, WIDTH))
        norm = tx.grad_norm(acc, state)
        return *tx.step(acc, state, params), norm

    specs = tx.data_specs((tx.param_specs(params_of()), tx.state_specs()))
    step = jax.jit(
        jax.shard_map(
            local,
            mesh=tx.config.mesh,
            in_specs=(*specs, P("data")),
            out_specs=(*specs, P()),
            axis_names={"data"},
            check_vma=check_vma,
        )
    )
    state = jda.TrainState.create(params_of(), tx)
    params, opt_state = state.params, state.opt_state
    for x in batches():
        params, opt_state, norm = step(params, opt_state, jda.shard_batch(x, tx))
    assert_trees_same_bits(
        (params, opt_state, norm), (want.params, want.opt_state, metrics["grad_norm"]), strategy
    )


@pytest.mark.parametrize("kind", TYPES)
@often(lambda kind: kind == "explicit")
def test_grad_norm_in_a_custom_loop_divides_by_the_loss_scale(kind):
    """Of 4096 gradients whose mean over the devices is 3."""
    tx = make_tx(kind=kind, loss_scale=1024.0, param_specs={"w": P(None, "model")})
    params = {"w": jnp.ones((64, 64))}
    norm = jax.shard_map(
        lambda params, state, x: tx.grad_norm({"w": 1024 * x[0] * params["w"]}, state),
        mesh=tx.config.mesh,
        in_specs=(*tx.data_specs((tx.param_specs(params), tx.state_specs())), P("data")),
        out_specs=P(),
        axis_names={"data"},
        check_vma=False,
    )
    state = jda.TrainState.create(params, tx)
    x = jda.shard_batch(np.float32([1, 2, 3, 6]), tx)
    assert float(jax.jit(norm)(state.params, state.opt_state, x)) == 3 * 64


def test_a_zero_size_gradient_in_a_custom_loop_is_no_reduced_one():
    auto, one = (AxisType.Auto,) * 2, jax.devices("cpu")[:1]
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=auto, devices=one)
    specs = {"w": P("model"), "unused": None}
    tx = distributed_adamw(3e-3, mesh=mesh, param_specs=specs)
    state = jda.TrainState.create({"w": jnp.ones((4, 8)), "unused": jnp.ones((0, 3))}, tx)

    def local(params, state, x):
        grads = jax.grad(lambda p: jnp.sum(p["w"]) * jnp.mean(x))(jda.local_params(params, tx))
        return tx.step(tx.accumulate(tx.init_grads(params), grads), state, params)

    specs = tx.data_specs((tx.param_specs(state.params), tx.state_specs()))
    step = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(*specs, P("data")),
        out_specs=specs,
        axis_names={"data"},
    )
    params, _ = jax.jit(step)(state.params, state.opt_state, jnp.ones(1))
    assert params["unused"].shape == (0, 3) and bool((params["w"] < 1).all())


def test_gather_params_differentiates_in_a_custom_loop():
    """Its transpose reduces over the data axes alone."""
    tx = make_tx(sharding_strategy="optim_grads_params")
    params, x = params_of(), batches(1)[0]
    specs, opt = tx.data_specs(tx.param_specs(params)), tx.bind(params)

    def local_gradient(params, x):
        shards = jda.local_params(params, opt)
        grads = jax.grad(lambda p: loss_fn(jda.gather_params(p, tx), x))(shards)
        return grads | {"w": grads["w"].value}

    gradient = jax.shard_map(
        local_gradient,
        mesh=tx.config.mesh,
        in_specs=(specs, P("data")),
        out_specs={"w": specs["w"], "b": P("data")},
        axis_names={"data"},
        check_vma=False,
    )
    got = jax.jit(gradient)(params, x)
    want = jax.tree.map(lambda *g: sum(g), *(jax.grad(loss_fn)(params, p) for p in np.split(x, 4)))
    # Sums of 2 x 512 products in float32, and of four devices: errors are far below this.
    scale = float(jnp.abs(want["w"]).max())
    np.testing.assert_allclose(got["w"], want["w"], atol=1100 * 2**-24 * scale)


def test_init_in_a_custom_loop():
    tx = make_tx()
    specs = tx.data_specs(tx.state_specs())
    init = jax.shard_map(
        tx.init,
        mesh=tx.config.mesh,
        in_specs=P(),
        out_specs=specs,
        axis_names={"data"},
        check_vma=False,
    )
    assert_trees_same_bits(jax.jit(init)(params_of()), tx.init(params_of()), "state")


def test_a_gradient_that_was_reduced_raises_in_a_custom_loop():
    """Types say so, where they are checked."""
    tx = make_tx()
    state = jda.TrainState.create(params_of(), tx)
    specs = tx.data_specs((tx.param_specs(params_of()), tx.state_specs()))
    step = jax.shard_map(
        lambda params, state, x: tx.step(jax.grad(loss_fn)(params, x), state, params),
        mesh=tx.config.mesh,
        in_specs=(*specs, P("data")),
        out_specs=specs,
        axis_names={"data"},
    )
    with pytest.raises(jda.MeshError, match=r"grads\['b'\]: already reduced over the mesh"):
        jax.jit(step)(state.params, state.opt_state, batches(1)[0])


def test_gradients_may_be_of_other_types_than_their_params():
    """On Explicit axes: the optimizer's region brings them to where their params are."""
    tx, found = make_tx(kind="explicit"), []
    specs = tx.data_specs((tx.param_specs(params_of()), tx.state_specs()))
    x = jda.shard_batch(batches(1)[0], tx)
    for spec in (None, P()):

        def local(params, state, x, spec=spec):
            grads = jax.grad(loss_fn)(params, x)
            if spec is not None:
                grads = jax.tree.map(lambda g: jax.sharding.reshard(g, spec), grads)
            return tx.step(grads, state, params)

        step = jax.shard_map(
            local,
            mesh=tx.config.mesh,
            in_specs=(*specs, P("data")),
            out_specs=specs,
            axis_names={"data"},
            check_vma=False,
        )
        state = jda.TrainState.create(params_of(), tx)
        found.append(jax.jit(step)(state.params, state.opt_state, x))
    assert_trees_same_bits(*found, "params and state")


def test_a_dimension_that_is_cut_twice_raises_in_a_custom_loop():
    tx = make_tx(sharding_strategy="optim_grads_params", param_specs={"w": P("model"), "b": None})
    state, opt = jda.TrainState.create(params_of(), tx), tx.bind(params_of())
    specs = tx.data_specs((tx.param_specs(params_of()), tx.state_specs()))
    step = jax.shard_map(
        lambda params, state: opt.step(jax.tree.map(jnp.ones_like, params), state, params),
        mesh=tx.config.mesh,
        in_specs=specs,
        out_specs=specs,
        axis_names={"data"},
        check_vma=False,
    )
    with pytest.raises(
        jda.PolicyError, match=r"params\['w'\]: one dimension is split over tensor axes"
    ):
        jax.jit(step)(state.params, state.opt_state)


# -- what else train_step promises


def test_a_scan_over_batches_takes_the_same_steps():
    tx = make_tx(sharding_strategy="optim_grads_params")
    want, _ = trained(tx)
    step, state = jda.train_step(loss_fn, tx), jda.TrainState.create(params_of(), tx)
    got, _ = jax.jit(lambda s, xs: lax.scan(step, s, xs))(state, jnp.stack(batches()))
    assert_trees_same_bits((got.params, got.opt_state), (want.params, want.opt_state), "state")
    for name, x in got.params.items():
        assert x.sharding.is_equivalent_to(want.params[name].sharding, x.ndim)


def test_chained_state_converts_to_optax_and_back():
    """A transformation before the optimizer; a state that comes from optax's, unsharded."""
    tx = jda.chain(optax.scale(0.5), make_tx(sharding_strategy="optim_grads"))
    state, _ = trained(tx)
    main, opt_state, extra = jda.to_optax_state(state, tx)
    again = jda.from_optax_state(main, opt_state, tx, extra)
    assert_trees_same_bits(again.opt_state[1][:4], state.opt_state[1][:4], "moments")
    step, x = jda.train_step(loss_fn, tx), batches(1)[0]
    assert_trees_same_bits(step(again, x)[0].params, step(state, x)[0].params, "params")


def test_a_state_without_shardings_and_other_params_go_on():
    """As a checkpoint gives it; and with params that were put into it."""
    tx = make_tx(
        sharding_strategy="optim_grads_params", param_specs={"w": P("model"), "b": P("model")}
    )
    state, _ = trained(tx)
    plain = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), state)
    other = jax.tree.map(jnp.copy, state).replace(params=jax.device_get(state.params), tx=tx)
    step, x = jda.train_step(loss_fn, tx), batches(1)[0]
    want = step(state, x)[0]
    for again in (plain, other):
        got = step(again, x)[0]
        assert_trees_same_bits((got.params, got.opt_state), (want.params, want.opt_state), "state")
        assert got.params["w"].sharding.is_equivalent_to(want.params["w"].sharding, 2)


@pytest.mark.parametrize("spec", [P("data", "model"), P(("data", "model"))])
@often(lambda spec: spec == P(("data", "model")))
def test_a_batch_may_be_sharded_over_the_model_axis_too(spec):
    """Whole numbers, a mean over powers of two: exact in every order."""
    tx, whole = make_tx(), jax.tree.map(jnp.round, params_of())
    x = np.random.default_rng(2).integers(-3, 4, (8, WIDTH)).astype(np.float32)
    found = []
    for batch_spec in (None, spec):
        state = jda.TrainState.create(whole, tx)
        found.append(jda.train_step(loss_fn, tx, batch_spec=batch_spec)(state, x))
    assert_trees_same_bits(found[1][0].params, found[0][0].params, str(spec))
    assert found[1][1]["loss"] == found[0][1]["loss"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@often(lambda strategy: strategy == "optim_grads_params")
def test_an_audit_lists_what_the_model_sends(strategy):
    tx = make_tx(sharding_strategy=strategy)
    state = jda.TrainState.shapes(params_of(), tx)
    found = jda.audit(jda.train_step(project_loss, tx), state, batches(1)[0])
    assert found.passed, found
    assert [row.note for row in found.rows if row.devices == 2] == ["the model's"]
    assert {row.devices for row in found.rows} == {2, 4}


def project_loss(params, x):
    """Sums over the model axis, in its forward pass."""
    hidden = lax.with_sharding_constraint(x @ params["w"] + params["b"][None], P(None, "model"))
    return jnp.mean(jnp.square(lax.with_sharding_constraint(hidden @ params["w"].T, P())))


def test_the_number_of_micro_batches_is_known_while_compiling():
    """So that no sum of weights is sent, as it is where the loss has weights."""

    def sums(**kwargs):
        tx = make_tx()
        state = jda.TrainState.shapes(params_of(), tx)
        step = jda.train_step(kwargs.pop("loss", loss_fn), tx, **kwargs)
        return step.lower(state, batches(1)[0]).as_text().count("stablehlo.all_reduce")

    weighted = lambda p, x: (loss_fn(p, x), x.shape[0])  # noqa: E731
    assert sums(accumulate_steps=2) == sums() < sums(loss=weighted, weighted=True)


def test_a_model_state_stays_where_it_is():
    """Whole on each device, although the model returns it sharded."""

    def loss(params, x, model_state):
        seen = lax.with_sharding_constraint(model_state + jnp.mean(params["b"]), P("model"))
        return loss_fn(params, x), seen

    tx = make_tx()
    state = jda.TrainState.create(params_of(), tx, model_state=jnp.zeros(8))
    step = jda.train_step(loss, tx)
    for x in batches():
        state, _ = step(state, x)
        assert state.model_state.sharding.is_fully_replicated
    assert step._jitted._cache_size() == 1


# -- Flax's metadata


class Dense2(nn.Module):
    """Two layers, with names of axes: of the mesh, or logical ones."""

    names: tuple[str | None, str | None] = (None, "model")
    boxed: object = nn.with_partitioning

    @nn.compact
    def __call__(self, x):
        init, (inner, outer) = nn.initializers.lecun_normal(), self.names
        x = nn.Dense(HIDDEN, kernel_init=self.boxed(init, (inner, outer)))(x)
        return nn.Dense(WIDTH, kernel_init=self.boxed(init, (outer, inner)))(jnp.square(x))


RULES = (("embed", None), ("mlp", "model"))
LOGICAL = Dense2(("embed", "mlp"), nn.with_logical_partitioning)


@functools.cache
def variables_of(module):
    return jax.jit(module.init)(jax.random.key(0), jnp.ones((1, WIDTH)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "specs_of"),
    [
        (Dense2(), nn.get_partition_spec),
        (Dense2(), lambda v: nn.get_sharding(v, mesh_of("4x2"))),
        (LOGICAL, lambda v: nn.logical_to_mesh(nn.get_partition_spec(v), RULES)),
        (
            LOGICAL,
            lambda v: nn.logical_to_mesh_sharding(nn.get_partition_spec(v), mesh_of("4x2"), RULES),
        ),
    ],
)
@often(lambda module, specs_of: specs_of != nn.get_partition_spec)
def test_specs_of_linen(module, specs_of):
    variables = variables_of(module)
    params = nn.meta.unbox(variables)["params"]
    tx = make_tx(param_specs=specs_of(variables)["params"])
    assert tx.param_specs(params)["Dense_1"]["kernel"] == P("model", None)
    loss = lambda p, x: jnp.mean(module.apply({"params": p}, x) ** 2)  # noqa: E731
    state = jda.TrainState.create(params, tx)
    assert state.params["Dense_0"]["kernel"].sharding.spec == P(None, "model")
    jda.train_step(loss, tx).lower(state, batches(1)[0])
    # Params in their boxes, as module.init returns them, keep them.
    boxed = jda.TrainState.create(variables["params"], tx)
    assert isinstance(boxed.params["Dense_0"]["kernel"], nn.Partitioned)


class Linear2(nnx.Module):
    def __init__(self, rngs):
        init = nnx.initializers.lecun_normal()
        kernel = lambda *names: nnx.with_partitioning(init, names)  # noqa: E731
        self.up = nnx.Linear(WIDTH, HIDDEN, kernel_init=kernel(None, "model"), rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, kernel_init=kernel("model", None), rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.square(self.up(x)))


@pytest.mark.slow
def test_specs_of_nnx():
    with jax.set_mesh(mesh_of("4x2", "auto")):
        graph, params = nnx.split(Linear2(nnx.Rngs(0)))
    tx = make_tx(param_specs=nnx.get_partition_spec(params))
    state, _ = trained(tx, lambda p, x: jnp.mean(nnx.merge(graph, p)(x) ** 2), params=params)
    assert state.params["up"]["kernel"][...].sharding.spec == P(None, "model")
    assert state.params["down"]["bias"][...].sharding.spec == P()


# -- what raises

MIXED = jax.make_mesh(
    (4, 2),
    ("data", "model"),
    axis_types=(AxisType.Explicit, AxisType.Auto),
    devices=jax.devices("cpu")[:8],  # also where JAX's own are GPUs
)


def by_size(params):
    return jax.tree.map(lambda x: P("model") if x.size > 300 else None, params)


ERRORS = [
    (
        lambda: make_tx(param_specs=None),
        jda.MeshError,
        r"mesh: axis 'model' has no purpose: .* say how params are sharded: param_specs=\{'w': "
        r"PartitionSpec\(None, 'model'\)",
    ),
    (
        lambda: trained(make_tx(), lambda p, x: loss_fn(p, x) + lax.psum(0.0, "model")),
        jda.MeshError,
        r"loss_fn: names axis 'model', over which XLA partitions the model: .*axis_names=\{'model'",
    ),
    (
        lambda: jda.train_step(loss_fn, distributed_adamw(1e-3, mesh=MIXED, param_specs=SPECS)),
        jda.MeshError,
        r"mesh: axes of different types.*AxisType.Auto,\) \* 2 to jax.make_mesh",
    ),
    (
        lambda: trained(
            make_tx(), lambda p, x: lax.pmean(loss_fn(p, x).astype(BF16), "data").astype(float)
        ),
        jda.DtypeError,
        r"loss_fn: psum of bfloat16 over data axes, which crashes XLA's CPU backend",
    ),
    (
        lambda: trained(
            make_tx(),
            lambda p, x: jnp.mean(
                lax.psum_scatter((x @ p["w"]).astype(BF16), "data", scatter_dimension=1, tiled=True)
            ).astype(jnp.float32),
        ),
        jda.DtypeError,
        r"loss_fn: reduce_scatter of bfloat16 over data axes",
    ),
    (
        lambda: trained(make_tx(param_specs={"w": P("data"), "b": None})),
        jda.MeshError,
        r"params\['w'\]: param_specs names axis 'data', which carries data, .* "
        r"got model axis 'model' beside it, .* If these are experts, .*: docs/experts.md",
    ),
    (
        lambda: trained(make_tx(param_specs={"w": P("embed", "mlp"), "b": None})),
        jda.MeshError,
        r"params\['w'\]: param_specs names axis 'embed': .*flax.linen.logical_to_mesh",
    ),
    (
        lambda: trained(make_tx(param_specs=by_size)),
        jda.MeshError,
        r"param_specs: a function whose result depends on the sizes of leaves",
    ),
    (
        lambda: trained(make_tx(param_specs={"w": P(P.UNCONSTRAINED, "model"), "b": None})),
        jda.MeshError,
        r"param_specs: leaves open over which axes",
    ),
]


@few(1)
@pytest.mark.parametrize(("call", "error", "message"), ERRORS)
def test_unsupported_model_axes_raise(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads"])
@often(lambda strategy: strategy == "optim_grads")
def test_sums_in_bfloat16_of_the_optimizer_and_over_the_model_axis_do_not_raise(strategy):
    """They are in regions that are manual over all axes, or XLA's own."""
    policy = jda.MixedPrecisionPolicy(grad_comm_dtype=BF16)

    def loss(params, x):
        total = jax.shard_map(
            lambda w, x: lax.psum(jnp.sum(x.astype(BF16) @ w), "model"),
            in_specs=(P(None, "model"), P()),
            out_specs=P(),
            axis_names={"model"},
            check_vma=False,
        )(params["w"], x)
        return total.astype(jnp.float32) + project_loss(params, x.astype(BF16))

    tx = make_tx(policy=policy, sharding_strategy=strategy)
    _, metrics = trained(tx, loss, params=params_of(BF16), accumulate_steps=2)
    assert np.isfinite(metrics["loss"])


@pytest.mark.slow
@pytest.mark.parametrize("op", ["psum", "pmax", "psum_scatter"])
def test_xla_still_ends_the_process_at_what_raises_here(op):
    """When this fails, remove the check in training/partitioned.py."""
    program = f"""
import jax, jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec as P
mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
f = lambda x: jax.lax.{op}(x, "data")
f = jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={{"data"}}, check_vma=False)
jax.jit(f)(jnp.ones((4, 4), jnp.bfloat16))
"""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True)
    assert done.returncode < 0, done.stderr


def test_named_shardings_stand_for_their_specs():
    mesh = mesh_of("4x2", "auto")
    given = {"w": NamedSharding(mesh, SPECS["w"]), "b": None}
    assert make_tx(param_specs=given).param_specs(params_of()) == {"w": SPECS["w"], "b": P()}
