"""Norms of gradients, parameters and updates, which the kernels take on the way."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from support import exact_steps
from support.bits import assert_trees_same_bits
from support.exact_steps import PLACES, batches, everything, first_state, run
from support.exact_sums import HYPER, SHAPES
from support.model_axes import mesh_of
from support.samples import few, often

KINDS = ("grad", "param", "update")
BAD = {4: np.nan, 7: np.nan}  # skipped
ROUND = 2.0**-24
# A square is rounded, and passes through at most 7 sums of a run, 40 of a lane, 10 of lanes, 2 of
# leaves and 3 of devices. Of a root that is the half, with its own rounding and that by the clip.
SUMS = (1 + 7 + 40 + 10 + 2 + 3) / 2 + 3


def make_tx(place, policy="float32", norms="leaves", **kwargs):
    return exact_steps.make_tx(place, policy, norms=norms, **kwargs)


def norm(arrays):
    return np.sqrt(sum(np.sum(np.asarray(x, np.float64) ** 2) for x in arrays))


def assert_norms(metrics, groups, before, after, batch):
    """As in float64. An update is the change of exact parameters, of which the new one is rounded."""
    grads = {k: np.sum(x, 0, dtype=np.float64) / 64 for k, x in batch.items()}
    f64 = lambda tree: {k: np.asarray(x, np.float64) for k, x in tree.items()}  # noqa: E731
    old, new = f64(before), f64(after)
    values = dict(grad=grads, param=new, update={k: old[k] - new[k] for k in new})
    total = [key for keys in groups.values() for key in keys]
    for name, keys in [("", total), *((k, v) for k, v in groups.items() if k is not None)]:
        of_params = norm(new[k] for k in keys)
        for kind in KINDS:
            want = norm(values[kind][k] for k in keys)
            bound = SUMS * ROUND * want + (kind == "update") * ROUND * of_params
            got = metrics[f"{kind}_norm/{name}" if name else f"{kind}_norm"]
            assert got.dtype == np.float32 and got.shape == ()
            assert abs(got - want) <= bound, (kind, name, got, want)


def exact(state, tx):
    return jax.tree.map(np.array, jda.main_params(state.params, state.opt_state, tx))


def assert_steps(tx, given):
    """Takes steps; returns the last state and all metrics."""
    state, seen = first_state(tx), []
    before = exact(state, tx)
    for batch, (new, metrics) in zip(given, run(tx, state, given), strict=True):
        state, after = new, exact(new, tx)
        if seen and metrics["skipped"] > seen[-1]["skipped"]:
            for name in metrics:
                assert not name.startswith("update_norm") or metrics[name] == 0, name
                assert not name.startswith("param_norm") or metrics[name] == seen[-1][name], name
        else:
            assert_norms(metrics, LEAVES, before, after, batch)
        before = after
        seen.append(metrics)
    return state, seen


LEAVES = {f"params['{key}']": [key] for key, shape in SHAPES.items() if 0 not in shape}


@pytest.fixture(scope="module")
def without_norms():
    tx = make_tx("one device", norms=None)
    (*_, (state, _)) = run(tx, first_state(tx), batches(10, BAD))
    return everything(state, tx)


@few(1)
@pytest.mark.parametrize("place", PLACES)
@often(lambda place: place != "hybrid-optim")
def test_norms_follow_float64_and_change_no_bit_of_the_step(place, without_norms):
    tx = make_tx(place)
    state, metrics = assert_steps(tx, list(batches(10, BAD)))
    assert int(metrics[-1]["skipped"]) == 2
    assert_trees_same_bits(everything(state, tx), without_norms, place)


def test_norms_show_which_leaf_is_not_finite():
    tx = make_tx("one device", max_grad_norm=50.0)
    (batch,) = batches(1)
    batch["prime"][3, 5] = np.inf
    ((_, metrics),) = run(tx, first_state(tx), [batch])
    bad = {k for k, x in metrics.items() if k.startswith("grad_norm/") and not np.isfinite(x)}
    assert bad == {"grad_norm/params['prime']"} and int(metrics["skipped"]) == 1
    of_rows = norm([batch["rows"].sum(0) / 64])
    np.testing.assert_allclose(metrics["grad_norm/params['rows']"], of_rows, rtol=1e-5)


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@often(lambda strategy: strategy == "optim_grads_params")
def test_norms_over_a_model_axis_count_every_element_once(strategy):
    """Every element counts once, cut over the axis or not."""
    specs = {"w": P(None, "model"), "b": P("model"), "s": P(), "t": P()}
    shapes = {"w": (64, 512), "b": (66,), "s": (40,), "t": (48, 400)}
    tx = jda.distributed(
        jda.fused_adamw(**HYPER), mesh=mesh_of("4x2"), param_specs=specs, norms="leaves",
        sharding_strategy=strategy,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    params = {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}
    state = jda.TrainState.create(params, tx)
    step = jda.train_step(
        lambda p, x: sum(jnp.sum(p[k] * jnp.sum(v, 0)) for k, v in x.items()) / 16, tx
    )
    for i in range(10):
        rng, before = np.random.default_rng(i), exact(state, tx)
        batch = {k: rng.integers(-64, 65, (8, *s)).astype(np.float32) for k, s in shapes.items()}
        state, metrics = step(state, batch)  # the mean over four devices of sums / 16
        groups = {f"params['{k}']": [k] for k in shapes}
        assert_norms(jax.tree.map(np.asarray, metrics), groups, before, exact(state, tx), batch)
    assert jda.audit(step, state, batch).passed


@few(1)
@pytest.mark.parametrize("check_vma", [False, True])
def test_norms_work_in_custom_training_loops(check_vma, cpu_mesh):
    """Behind a chain with numbers in the state, on accumulated gradients."""
    adam = jda.inject_hyperparams(jda.fused_adamw)
    inner = jda.distributed(adam(**HYPER), mesh=cpu_mesh(4), norms="leaves", max_grad_norm=0.5)
    tx = jda.chain(optax.scale(0.5), inner)
    params = {"w": jnp.ones((64, 512)), "b": jnp.ones(3)}
    state = tx.init(params)

    def local(params, state, x):
        acc = tx.init_grads(params)
        for part in x[0]:
            acc = tx.accumulate(acc, jax.tree.map(lambda p, part=part: part * p, params))
        return tx.step_with_norms(acc, state, params)

    specs = P(), tx.state_specs()
    step = jax.jit(
        jax.shard_map(
            local,
            mesh=inner.config.mesh,
            in_specs=(*specs, P("data")),
            out_specs=(*specs, P()),
            check_vma=check_vma,
        )
    )
    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    x = jax.device_put(x, jax.NamedSharding(inner.config.mesh, P("data")))
    new, state, norms = step(params, state, x)
    of_params = {"w": norm([params["w"]]), "b": norm([params["b"]])}
    for key, size in of_params.items():
        at = f"_norm/params['{key}']"
        np.testing.assert_allclose(norms["grad" + at], 0.5 * 3.5 * size, rtol=1e-6)
        np.testing.assert_allclose(norms["param" + at], norm([new[key]]), rtol=1e-6)
        np.testing.assert_allclose(norms["update" + at], norm([new[key] - params[key]]), rtol=1e-4)
    np.testing.assert_allclose(norms["param_norm"], norm(new.values()), rtol=1e-6)


def test_unsupported_norms_raise():
    tx = make_tx("flat-optim", norms=lambda path: 5)
    with pytest.raises(jda.PolicyError, match=r"^norms: returned no name: got 5 for params\["):
        first_state(tx), jda.train_step(lambda p, x: 0.0, tx).lower(first_state(tx), jnp.ones(8))
    tx = make_tx("flat-optim", norms=lambda path: None)
    with pytest.raises(jda.TreeError, match=r"^norms: names no leaf: got None for params\["):
        jda.train_step(lambda p, x: 0.0, tx).lower(first_state(tx), jnp.ones(8))
    with pytest.raises(
        jda.PolicyError, match=r"^step_with_norms: this optimizer computes no norms"
    ):
        make_tx("one device", norms=None).step_with_norms({}, None, {})
