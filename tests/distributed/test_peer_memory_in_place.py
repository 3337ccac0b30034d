"""Steps over peer memory that update parameters where they are, as in a loop of the user's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdistadam as jda
from support.bits import assert_trees_same_bits
from support.exact_sums import HYPER, decays, random_params, without_empty
from support.own_loop import make_own_step, own_state
from support.samples import often

BF16 = jnp.bfloat16
ON_BOTH = pytest.mark.parametrize(
    "platform", ["cpu", pytest.param("gpu", marks=pytest.mark.multigpu)]
)
SETTINGS = {
    "plain": {},
    "clipped": dict(max_grad_norm=1.0),
    "scaled": dict(loss_scale=jda.DynamicLossScale(8.0)),
}


def mesh_of(platform):
    """Four devices, or two."""
    devices = jax.devices(platform)
    n = max(n for n in (2, 4) if n <= len(devices))
    return jax.make_mesh((n,), ("data",), devices=devices[:n])


def make_tx(mesh, means, **kwargs):
    policy = jda.MixedPrecisionPolicy(grad_comm_dtype=BF16, grad_reduce_dtype="float32")
    return jda.distributed_fused_adamw(
        **HYPER, mesh=mesh, policy=policy, mask=decays, communication=means, **kwargs
    )


def loss_fn(params, x):
    """Gradients that differ between elements, devices and steps, and are rounded."""
    terms = [
        jnp.sum(v.astype(jnp.float32).ravel() * jnp.cos(jnp.arange(v.size) * x[0, 0]))
        for v in jax.tree.leaves(params)
    ]
    return sum(terms)


def compiled(tx, params, state, batch):
    """A step of the user's own, which donates params and state, and whether it is in place."""
    lowered = make_own_step(tx, loss_fn, check_vma=False).lower(params, state, batch)
    return lowered.compile(), "in_place = true" in lowered.as_text()


@ON_BOTH
@pytest.mark.parametrize("setting", list(SETTINGS))
@often(lambda platform, setting: platform == "gpu" or setting == "scaled")
def test_bits_of_float32_sums_over_xla(platform, setting):
    """Six steps in bfloat16; with a loss scale one of them has a NaN on one device."""
    mesh, results = mesh_of(platform), []
    batches = np.random.default_rng(0).normal(size=(6, 2 * mesh.size, 3)).astype(np.float32)
    if setting == "scaled":
        batches[3, 2, 0] = np.nan
    for means in ("xla", "peer"):
        tx, step, norms = make_tx(mesh, means, **SETTINGS[setting]), None, []
        params, state = own_state(tx, without_empty(random_params(BF16)), check_vma=False)
        for batch in jda.shard_batch(list(batches), tx):
            if step is None:
                step, is_in_place = compiled(tx, params, state, batch)
            params, state, norm = step(params, state, batch)
            norms.append(norm)
        assert is_in_place == (means == "peer")
        results.append((params, state, norms))
    assert_trees_same_bits(results[1], results[0])
    assert int(state.count) == (5 if setting == "scaled" else 6)
    assert setting == "scaled" or min(norms) > 1


@ON_BOTH
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@often(lambda platform, dtype: platform == "gpu" or dtype == "bfloat16")
def test_a_state_of_another_layout_keeps_everything(platform, dtype):
    """Large leaves, packed ones and the state stay; with the right state all parameters change."""
    tx, rng = make_tx(mesh_of(platform), "peer"), np.random.default_rng(0)
    shapes = {"a": (64, 512), "b": (512, 64), "small": (3,), "tiny": (5,)}
    others = shapes | {"a": (512, 64), "b": (64, 512), "small": (5,), "tiny": (3,)}
    params, other = (
        {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in tree.items()}
        for tree in (shapes, others)
    )
    batch = jda.shard_batch(rng.normal(size=(2 * tx.config.mesh.size, 3)).astype(np.float32), tx)
    params, right = own_state(tx, params, check_vma=False)
    _, wrong = own_state(tx, other, check_vma=False)
    step, is_in_place = compiled(tx, params, right, batch)
    assert is_in_place
    for state, is_kept in ((wrong, True), (right, False)):
        before = jax.device_get((params, state))
        after = step(*jax.tree.map(jnp.copy, (params, state)), batch)
        assert np.isnan(after[1].grad_norm) == is_kept
        if is_kept:
            assert_trees_same_bits(after[0], before[0])
            for name in ("main_params", "mu", "nu", "count"):
                assert_trees_same_bits(getattr(after[1], name), getattr(before[1], name))
        else:
            for name in shapes:
                assert (np.asarray(after[0][name]) != np.asarray(before[0][name])).any(), name
