"""Models that XLA partitions over axes of the mesh, under the sharded optimizer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from jdistadam.distributed.shard import leaves_of
from support.bits import assert_trees_same_bits
from support.exact_sums import HYPER, decays, exact_batch, linear_loss, random_params
from support.model_axes import MESHES, TYPES, mesh_of
from support.optimizers import distributed_adamw
from support.placements import STRATEGIES
from support.samples import few, often

SPECS = {
    "rows": P("model"),  # cut along one dimension by both axes, where params are sharded
    "columns": P(None, "model"),
    "prime": None,
    "small": P(),
    "scalar": None,
    "empty": None,
}


def make_tx(mesh, **kwargs):
    given = dict(mesh=mesh, mask=decays) | HYPER | kwargs
    if "replica" in mesh.axis_names:
        given["replica_axis"] = "replica"
    if "model" in mesh.axis_names:
        given = dict(param_specs=SPECS) | given
    return distributed_adamw(**given)


def one_device():
    return jax.make_mesh((1,), ("data",), devices=jax.devices("cpu")[:1])


def run(tx, loss_fn, *, steps, create=None, seed=0, **kwargs):
    """Params, optax's state, model_state and metrics after some steps; of every step the metrics."""
    state = jda.TrainState.create(random_params(), tx, **(create or {}))
    step = jda.train_step(loss_fn, tx, **kwargs)
    rng = np.random.default_rng(seed)
    metrics = []
    for _ in range(steps):
        state, found = step(state, exact_batch(rng))
        metrics.append(jax.device_get(found))
    assert step._jitted._cache_size() == 1
    full = jda.full_params(state, tx)
    result = (*jda.to_optax_state(state, tx)[:2], full, state.model_state)
    return jax.device_get(result), metrics, state


@functools.cache
def ten_steps_alone():
    tx = make_tx(one_device(), average_grads=False)
    return run(tx, linear_loss, steps=10)[:2]


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mesh", MESHES)
@often(
    lambda mesh, strategy, kind, micro: (
        (mesh, strategy, kind, micro) == ("4x2", "optim_grads_params", "explicit", 3)
    )  # others in tests/test_compiled_cases.py
)
def test_ten_steps_equal_those_of_one_device(mesh, strategy, kind, micro):
    """Bit for bit: the gradients are sums of small integers, exact in every order."""
    tx = make_tx(mesh_of(mesh, kind), sharding_strategy=strategy, average_grads=False)
    got, metrics, state = run(tx, linear_loss, steps=10, accumulate_steps=micro)
    want, alone = ten_steps_alone()
    assert_trees_same_bits(got, want, mesh)
    for mine, theirs in zip(metrics, alone, strict=True):
        # Sums of 55,000 squares in float32, in any order: relative 55,000 ulp at most.
        np.testing.assert_allclose(mine["grad_norm"], theirs["grad_norm"], rtol=55_000 * 2**-24)
    placed = jax.tree.map(lambda x: x.sharding, state.params)
    expected = jax.tree.map(
        lambda s: jax.NamedSharding(tx.config.mesh, s), tx.param_specs(state.params)
    )
    for name, sharding in expected.items():
        assert placed[name].is_equivalent_to(sharding, state.params[name].ndim), name


GROUPS = {
    "body": {},
    "head": dict(lr_scale=0.25, weight_decay=0.5, b1=0.5),
    "ice": dict(frozen=True),
}
LABELS = {
    "rows": "body",
    "columns": "head",
    "prime": "ice",
    "small": "head",
    "scalar": "body",
    "empty": "body",
}


def loss_with_everything(params, batch, model_state, rng):
    """Weights, random numbers, a model state and something to report; all exact."""
    flips = jax.tree.map(lambda p: jax.random.bernoulli(rng, 0.5, p.shape), params)
    noise = sum(jax.tree.leaves(jax.tree.map(lambda p, flip: jnp.sum(p * flip), params, flips)))
    weight = jnp.sum(jnp.abs(batch["scalar"]))
    seen = model_state["seen"] + batch["scalar"].shape[0]
    mean = 0.5 * model_state["mean"] + 0.5 * jnp.mean(batch["small"], 0)
    loss = linear_loss(params, batch) + noise.astype(jnp.float32)
    return (loss, weight), {"seen": seen, "mean": mean}, {"first": batch["small"][:1, 0, 0]}


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mesh", ["4x2", "2x2x2"])
@often(lambda mesh, strategy, kind: (mesh, strategy, kind) == ("4x2", "optim_grads_params", "auto"))
def test_everything_at_once_equals_the_mesh_without_the_axis(mesh, strategy, kind):
    """bfloat16 params, micro-batches, weights, model state, rng, groups, a skipped step; in bits."""
    kwargs = dict(
        policy=jda.MixedPrecisionPolicy(grad_comm_dtype="bfloat16", grad_reduce_dtype="float32"),
        sharding_strategy=strategy,
        outer_sharding_strategy="optim" if mesh == "2x2x2" and strategy == "optim" else "no_shard",
        loss_scale=jda.DynamicLossScale(init_scale=2.0**7, growth_interval=2),
        param_labels=LABELS,
        groups=GROUPS,
    )
    given = MESHES[mesh]
    alone = jax.make_mesh(
        given["shape"][:-1],
        given["names"][:-1],
        devices=jax.devices("cpu")[: int(np.prod(given["shape"][:-1]))],
    )
    results = []
    for m in (mesh_of(mesh, kind), alone):
        tx = make_tx(m, **kwargs)
        state = jda.TrainState.create(
            random_params(),
            tx,
            param_dtypes=jnp.bfloat16,
            model_state={"seen": jnp.int32(0), "mean": jnp.zeros((7, 3))},
            rng=jax.random.key(3),
        )
        step = jda.train_step(
            loss_with_everything,
            tx,
            accumulate_steps=3,
            weighted=True,
            has_aux=True,
            report_nonfinite=True,
        )
        rng, metrics = np.random.default_rng(4), []
        for i in range(5):
            batch = exact_batch(rng)
            if i == 2:
                batch["rows"][3, 0, 0] = np.inf
            state, found = step(state, batch)
            del found["grad_norm"], found["loss"]  # their order of sums is the layout's, and XLA's
            metrics.append(jax.device_get(found))
        exported = (*jda.to_optax_state(state, tx)[:2], jda.full_params(state, tx))
        key = jax.random.key_data(state.rng)
        results.append(jax.device_get((exported, state.model_state, metrics, key)))
    assert metrics[-1]["skipped"] == 1 and metrics[2]["nonfinite"].any()
    assert_trees_same_bits(*results, mesh)


# A layer that is tensor-parallel: "up" cut by columns, "down" by rows, and one sum over the axis.
WIDTH, HIDDEN, BATCH = 64, 512, 32
LAYER_SPECS = {"up": P(None, "model"), "down": P("model"), "scale": None}


def layer_params():
    rng = np.random.default_rng(7)
    return {
        "up": np.float32(rng.normal(size=(WIDTH, HIDDEN)) / 8),
        "down": np.float32(rng.normal(size=(HIDDEN, WIDTH)) / 32),
        "scale": np.float32(rng.uniform(0.5, 1.5, size=WIDTH)),
    }


def layer_loss(kind):
    """What a user writes for jax.jit: with shardings in the types, or with constraints."""

    def product(x, w, spec):
        if kind == "explicit":
            return jnp.einsum("bi,io->bo", x, w, out_sharding=spec)
        return jax.lax.with_sharding_constraint(x @ w, spec)

    def loss_fn(params, x):
        hidden = jnp.square(product(x * params["scale"][None], params["up"], P(None, "model")))
        return jnp.mean(jnp.square(x + product(hidden, params["down"], P())))

    return loss_fn


def exact_layer(params, x):
    """The gradient in float64, and bounds of the error of one in float32, first order in u.

    With u = 2^-24 a sum of n products has an error of at most (n + 1) u times the sum of their
    absolute values, whatever the order; errors of operands pass through products and sums. 1 per
    cent stands for the terms of second order, 8 u for the mean over devices and micro-batches.
    """
    u = 1.01 * 2.0**-24
    x, up, down, scale = (np.float64(v) for v in (x, params["up"], params["down"], params["scale"]))
    scaled = x * scale
    a = scaled @ up
    err_a = (WIDTH + 2) * u * (np.abs(scaled) @ np.abs(up))
    h = a * a
    err_h = 2 * np.abs(a) * err_a + u * h
    y = x + h @ down
    err_y = err_h @ np.abs(down) + (HIDDEN + 2) * u * (np.abs(x) + h @ np.abs(down))
    dy = 2 * y / y.size
    err_dy = 2 * err_y / y.size + 8 * u * np.abs(dy)
    d_down = h.T @ dy
    err_down = h.T @ err_dy + err_h.T @ np.abs(dy) + (BATCH + 8) * u * (h.T @ np.abs(dy))
    dh = dy @ down.T
    err_dh = err_dy @ np.abs(down).T + (WIDTH + 1) * u * (np.abs(dy) @ np.abs(down).T)
    da = 2 * a * dh
    err_da = 2 * (np.abs(a) * err_dh + np.abs(dh) * err_a) + 3 * u * np.abs(da)
    d_up = scaled.T @ da
    err_up = np.abs(scaled).T @ err_da + (BATCH + 8) * u * (np.abs(scaled).T @ np.abs(da))
    d_scaled = da @ up.T
    err_scaled = err_da @ np.abs(up).T + (HIDDEN + 1) * u * (np.abs(da) @ np.abs(up).T)
    d_scale = (x * d_scaled).sum(0)
    err_scale = (np.abs(x) * (err_scaled + (BATCH + 8) * u * np.abs(d_scaled))).sum(0)
    grads = {"up": d_up, "down": d_down, "scale": d_scale}
    return grads, {"up": err_up, "down": err_down, "scale": err_scale}


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mesh", ["4x2", "2x4", "2x2x2"])
@often(
    lambda mesh, strategy, kind: (
        (mesh, strategy, kind) == ("4x2", "optim", "explicit")  # the next test is of "auto"
    )
)
def test_a_tensor_parallel_layer_has_the_gradients_of_one_device(mesh, strategy, kind):
    """Four steps with two micro-batches: each gradient, read off mu, against float64."""
    tx = make_tx(mesh_of(mesh, kind), sharding_strategy=strategy, param_specs=LAYER_SPECS)
    state = jda.TrainState.create(layer_params(), tx)
    step = jda.train_step(layer_loss(kind), tx, accumulate_steps=2)
    rng, b1, losses = np.random.default_rng(8), HYPER["b1"], []
    for _ in range(4):
        main, (adam, *_), _ = jda.to_optax_state(state, tx)
        x = np.float32(rng.normal(size=(BATCH, WIDTH)))
        state, metrics = step(state, x)
        losses.append(float(metrics["loss"]))
        _, (new, *_), _ = jda.to_optax_state(state, tx)
        grads, errors = exact_layer(main, x)
        for name, grad in grads.items():
            old = b1 * np.float64(adam.mu[name])
            want = old + (1 - b1) * grad
            # b1 and 1 - b1 are rounded, two products and their sum.
            bound = (1 - b1) * errors[name] + 4 * 2**-24 * (np.abs(old) + (1 - b1) * np.abs(grad))
            assert np.all(np.abs(new.mu[name] - want) <= bound), name
            assert np.abs(want).max() > 10 * bound.max(), name  # so that the bound says something
        norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
        off = np.sqrt(sum((e**2).sum() for e in errors.values()))
        # Besides the error of the gradient, that of a sum of squares in float32.
        assert abs(float(metrics["grad_norm"]) - norm) <= off + 70_000 * 2**-24 * norm
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("strategy", STRATEGIES)
@often(lambda strategy: strategy == "optim_grads_params")
def test_steps_are_those_of_optax_under_gspmd(strategy):
    """Three steps with clipping, each from the same state: jitted optax with sharded arrays."""
    mesh, max_norm = mesh_of("4x2", "auto"), 0.05
    tx = make_tx(mesh, sharding_strategy=strategy, param_specs=LAYER_SPECS, max_grad_norm=max_norm)
    theirs = optax.chain(optax.clip_by_global_norm(max_norm), optax.adamw(**HYPER, mask=decays))
    placed = {name: jax.NamedSharding(mesh, spec or P()) for name, spec in LAYER_SPECS.items()}
    rows = jax.NamedSharding(mesh, P("data"))

    @jax.jit
    def step_of_optax(params, adam, x):
        grads = jax.grad(gspmd_loss)(params, x)
        _, (_, state) = theirs.update(grads, (optax.EmptyState(), adam), params)
        return state[0].mu

    def gspmd_loss(params, x):
        hidden = jnp.square((x * params["scale"][None]) @ params["up"])
        return jnp.mean(jnp.square(x + hidden @ params["down"]))

    state = jda.TrainState.create(layer_params(), tx)
    step, rng, b1 = jda.train_step(layer_loss("auto"), tx), np.random.default_rng(9), HYPER["b1"]
    for _ in range(3):
        main, adam, _ = jda.to_optax_state(state, tx)
        x = np.float32(rng.normal(size=(BATCH, WIDTH)))
        mu = step_of_optax(jax.device_put(main, placed), adam, jax.device_put(x, rows))
        state, _ = step(state, x)
        _, (new, *_), _ = jda.to_optax_state(state, tx)
        grads, errors = exact_layer(main, x)
        norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
        off = np.sqrt(sum((e**2).sum() for e in errors.values())) / norm + 70_000 * 2**-24
        clip = max_norm / norm
        assert clip < 0.9  # it clips
        for name, grad in grads.items():
            # Each is off by the errors of its gradient and of its norm, and by four roundings.
            mine = clip * (errors[name] + off * np.abs(grad))
            roundings = 4 * 2**-24 * (np.abs(adam[0].mu[name]) + clip * np.abs(grad))
            assert np.all(np.abs(new.mu[name] - mu[name]) <= 2 * ((1 - b1) * mine + roundings)), (
                name
            )


def scanned_or_unrolled(tx, how, are_shards):
    """Sums of products with whole numbers; layers are gathered where they are used."""
    gather = functools.partial(jda.gather_params, tx=tx)
    product = lambda layer, x: sum(jnp.sum(p * x) for p in jax.tree.leaves(layer))  # noqa: E731

    def loss(params, batch):
        x = jnp.mean(batch)
        assert any(isinstance(leaf, jda.Shard) for leaf in leaves_of(params)) == are_shards
        if how == "unrolled":
            return sum(product(gather(params[k], after=x), x) for k in sorted(params))

        def body(total, layer):
            return total + product(gather(layer), x), None

        return jax.lax.scan(body, jnp.float32(0), params["layers"])[0]

    return loss


@few(1)
@pytest.mark.parametrize("micro", [1, 4])
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("mesh", ["4x2", "2x2x2"])
@pytest.mark.parametrize("how", ["scanned", "unrolled"])
@often(lambda how, mesh, kind, micro: (mesh, micro) == ("2x2x2", 4))
def test_layers_are_gathered_where_they_are_used(how, mesh, kind, micro):
    """Bit for bit as gathering first, over ten steps; one leaf is cut twice along one dimension."""
    rng = np.random.default_rng(0)
    specs = {"up": P(None, "model"), "down": P("model"), "scale": P()}
    shapes = {"up": (128, 256), "down": (256, 128), "scale": (128,)}
    layer = lambda: {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}  # noqa: E731
    if how == "scanned":
        stack = jax.tree.map(lambda *x: np.stack(x), *(layer() for _ in range(4)))
        params, chosen = (
            {"layers": stack},
            dict(layers=lambda path: "scan" if "layers" in path else None),
        )
        specs = {"layers": {k: P(None, *s) for k, s in specs.items()}}
    else:
        params = {f"block{i}": layer() for i in range(4)}
        chosen = dict(layers=lambda path: "block" if "block" in path else None)
        specs = dict.fromkeys(params, specs)
    batches = rng.integers(-9, 10, (10, 16, 8)).astype(np.float32) * 8
    ends = []
    for given in (chosen, {}):
        tx = make_tx(
            mesh_of(mesh, kind),
            mask=None,
            param_specs=specs,
            sharding_strategy="optim_grads_params",
            **given,
        )
        state = jda.TrainState.create(params, tx)
        held = jax.tree.leaves(state.params)[-1].addressable_shards[0].data.size
        assert held == jax.tree.leaves(params)[-1].size // (8 if mesh == "4x2" else 4)
        loss_fn = scanned_or_unrolled(tx, how, bool(given))
        step = jda.train_step(loss_fn, tx, accumulate_steps=micro)
        for batch in batches:
            state, metrics = step(state, batch)
        ends.append((jda.full_params(state, tx), jda.main_params(state.params, state.opt_state, tx), metrics["loss"]))  # fmt: skip
        loss, _ = jda.eval_step(loss_fn, tx)(state, batches[0])
        assert np.isfinite(loss)
    assert_trees_same_bits(*ends, how)
