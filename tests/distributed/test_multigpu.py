"""ZeRO-1 over real GPUs and NCCL. Runs where there are at least two: pytest -m multigpu."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdistadam as jda
from support.bits import assert_same_bits, assert_trees_same_bits
from support.exact_sums import (
    HYPER,
    exact_batch,
    linear_loss,
    make_tx,
    random_params,
    without_empty,
)
from support.own_loop import make_own_step, own_state

pytestmark = pytest.mark.multigpu
STEPS = 10


def mesh_of(platform, n):
    devices = jax.devices(platform)
    if len(devices) < n:
        pytest.skip(f"needs {n} NVIDIA GPUs; jax sees {len(devices)}")
    return jax.make_mesh((n,), ("data",), devices=devices[:n])


def train(mesh, batches, dtype, comm, accumulate_steps=1, **kwargs):
    tx = make_tx(mesh, comm, **kwargs)
    state = jda.TrainState.create(random_params(dtype), tx)
    step = jda.train_step(linear_loss, tx, accumulate_steps=accumulate_steps)
    for batch in batches:
        state, _ = step(state, batch)
    return state, tx


@pytest.mark.parametrize("comm", [jnp.float32, jnp.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
@pytest.mark.parametrize("n", [2, 4, 8])
def test_gpus_give_the_bits_of_cpus(n, dtype, comm):
    """Sums of signs / 64 are exact in every order and dtype; b1 and b2 have exact powers.

    So gradients and coefficients are equal on both platforms, and all that is left are the
    kernels, the collectives' data movement and the layout: nothing may differ.
    """
    rng = np.random.default_rng(0)
    batches = [jax.tree.map(np.sign, exact_batch(rng)) for _ in range(STEPS)]
    exact = HYPER | dict(b1=0.5, b2=0.25)
    results = []
    for platform in ("cpu", "gpu"):
        state, tx = train(mesh_of(platform, n), batches, dtype, comm, **exact)
        results.append((state.params, *jda.to_optax_state(state, tx)[:2]))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        if a.dtype == np.int32:
            assert a == b == STEPS
        else:
            assert_same_bits(b, a)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_replicas_agree_and_runs_repeat(n):
    """Sums that are not exact, communicated in 16 bits, with clipping."""
    rng = np.random.default_rng(1)
    batches = [
        jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), exact_batch(rng))
        for _ in range(STEPS)
    ]
    mesh = mesh_of("gpu", n)
    states = [
        train(mesh, batches, jnp.bfloat16, jnp.bfloat16, max_grad_norm=0.5)[0] for _ in range(2)
    ]
    for a, b in zip(*map(jax.tree.leaves, states), strict=True):
        assert np.array_equal(a, b)
    for x in jax.tree.leaves(states[0].params):
        shards = [np.asarray(s.data) for s in x.addressable_shards]
        assert len(shards) == n
        for shard in shards[1:]:
            assert_same_bits(shard, shards[0])


@pytest.mark.parametrize("comm", [jnp.float32, jnp.bfloat16], ids=str)
@pytest.mark.parametrize(("n", "steps"), [(2, 4), (4, 3), (8, 3)])
def test_micro_batches_give_the_bits_of_one_batch(n, steps, comm):
    """Sums are exact, also communicated in 16 bits: cutting the batch must change nothing."""
    rng = np.random.default_rng(2)
    batches = [jax.tree.map(np.sign, exact_batch(rng)) for _ in range(STEPS)]
    states = [
        train(mesh_of("gpu", n), batches, jnp.bfloat16, comm, k, average_grads=False)[0]
        for k in (1, steps)
    ]
    for state in states:
        assert np.isfinite(state.opt_state.grad_norm)
    zero = {"grad_norm": jnp.zeros(())}
    one, many = ((s.params, s.opt_state._replace(**zero)) for s in states)
    assert_trees_same_bits(many, one)


@pytest.mark.parametrize("check_vma", [True, False])
def test_own_loop_is_train_step(check_vma):
    """In a custom training loop, with micro-batches, over NCCL.

    The norm is a float32 sum that XLA orders as it likes: n additions are off by n roundings.
    """
    mesh = mesh_of("gpu", 4 if len(jax.devices("gpu")) >= 4 else 2)
    tx = make_tx(mesh, jnp.bfloat16)
    rng = np.random.default_rng(3)
    start = without_empty(random_params(jnp.bfloat16))
    norm_error = sum(x.size for x in jax.tree.leaves(start)) * 2.0**-24
    state = jda.TrainState.create(start, tx)
    step = jda.train_step(linear_loss, tx, accumulate_steps=3)
    params, opt_state = own_state(tx, start, check_vma)
    own = make_own_step(tx, linear_loss, check_vma, 3)
    for _ in range(STEPS):
        batch = jda.shard_batch(jax.tree.map(np.sign, without_empty(exact_batch(rng))), tx)
        state, metrics = step(state, batch)
        params, opt_state, norm = own(params, opt_state, batch)
        np.testing.assert_allclose(norm, metrics["grad_norm"], rtol=norm_error)
    zero = {"grad_norm": jnp.zeros(())}
    want = state.params, state.opt_state._replace(**zero)
    assert_trees_same_bits((params, opt_state._replace(**zero)), want)
