"""Strategies, float32 sums and loss scaling over real GPUs and NCCL: pytest -m multigpu.

On as many of the GPUs as are 2, 4 or 8.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdistadam as jda
from support.bits import assert_trees_same_bits
from support.given_gradients import make_tx, run
from support.placements import PLACEMENTS, STRATEGIES, make_mesh
from support.planned import as_sent, compile_row, sent
from support.reduced import reduced
from support.scanned import layers_of, make_params, scanned_products
from support.skipped_step import assert_skipped_step_changes_no_bit

pytestmark = pytest.mark.multigpu
EXACT = dict(b1=0.5, b2=0.25)  # with exact powers: the coefficients are those of the CPU


def count():
    """How many GPUs take part."""
    return max(n for n in (2, 4, 8) if n <= len(jax.devices("gpu")))


def shape_of(*, square):
    """One axis, or two of which the first is of replicas, on two GPUs of one."""
    replicas = 1 if count() == 2 else 2
    return (replicas, count() // replicas) if square else (count(),)


def here(placement, platform="gpu"):
    """A placement of eight devices, on those that there are: a mesh, and what its axes are for."""
    mesh, kwargs = PLACEMENTS[placement]
    shape = shape_of(square=mesh["shape"] != (8,))
    return dict(shape=shape, names=mesh["names"], platform=platform), kwargs


@functools.cache
def run_on_cpus(dtype, comm):
    policy = jda.MixedPrecisionPolicy(grad_comm_dtype=comm, grad_reduce_dtype=jnp.float32)
    mesh, kwargs = here("flat-optim", "cpu")
    return run(make_tx(mesh, policy, **kwargs, **EXACT), dtype, devices=count(), steps=10)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_gpus_give_the_bits_of_cpus_under_every_strategy(placement):
    """Ten steps on random gradients of many orders of magnitude, in two sizes of buckets."""
    mesh, kwargs = here(placement)
    narrow = PLACEMENTS[placement][1].get("sharding_strategy") != "optim"
    dtype, comm = ("bfloat16", "bfloat16") if narrow else ("float32", "float32")
    policy = jda.MixedPrecisionPolicy(grad_comm_dtype=comm, grad_reduce_dtype=jnp.float32)
    for bucket_bytes in (1, 1 << 25):
        tx = make_tx(mesh, policy, bucket_bytes=bucket_bytes, **kwargs, **EXACT)
        got = run(tx, dtype, devices=count(), steps=10)
        assert_trees_same_bits(got, run_on_cpus(dtype, comm), f"{placement}, {bucket_bytes=}")


@pytest.mark.parametrize(
    ("policy", "bad"), [("float32", np.inf), ("bfloat16", np.nan), ("remainder16", np.nan)]
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_skipped_step_changes_no_bit(strategy, policy, bad):
    mesh, _ = here("hybrid-optim")
    assert_skipped_step_changes_no_bit(mesh, strategy, policy, bad)


@pytest.mark.parametrize(
    ("comm", "summed", "bound"),
    [("bfloat16", "float32", 1.7e-3), ("float32", "float32", 1e-7), ("float32", None, 1e-7)],
)
def test_accuracy_of_the_mean(comm, summed, bound):
    """Relative L2 error of the mean of N(0, 1), against float64."""
    mesh, kwargs = here("tuple-optim")
    policy = jda.MixedPrecisionPolicy(grad_comm_dtype=comm, grad_reduce_dtype=summed)
    tx = make_tx(mesh, policy, **kwargs)
    x = np.random.default_rng(4).normal(size=(count(), 1 << 20)).astype(np.float32)
    got, _ = reduced(tx, jnp.zeros(1 << 20), x)
    exact = x.astype(np.float64).sum(0)
    assert np.linalg.norm(np.asarray(got) - exact) / np.linalg.norm(exact) <= bound


@pytest.mark.parametrize("policy", ["bf16 communication", "bf16 communication, float32 sum"])
@pytest.mark.parametrize("placement", ["flat", "hybrid"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_sent_is_what_is_planned(placement, strategy, policy):
    """In the program as it runs here: bfloat16 is communicated, and nothing besides."""
    shape = shape_of(square=placement != "flat")

    def make(*shape, names):
        return make_mesh(shape, names, "gpu")

    planned, text = compile_row(make, placement, strategy, policy, shape=shape)
    norm = () if strategy == "no_shard" else (shape[-1],)
    found, wanted = (
        {key: size for key, size in x.items() if key[2] > 1}  # what leaves a device
        for x in (sent(text), as_sent(planned, count(), *norm))
    )
    assert found == wanted
    grads = [c for c in planned if c.op != "all-gather"]
    assert grads[0].dtype == jnp.bfloat16


@pytest.mark.parametrize("kind", ["flat", "hybrid", "twice", "tuple"])
def test_layers_gathered_in_a_scan_give_the_bits_of_cpus(kind):
    """Ten steps on random gradients, reduced layer by layer in the scan's backward pass."""
    rng = np.random.default_rng(5)
    batches = [
        jax.tree.map(
            lambda x: rng.normal(size=(count(), *x.shape)).astype(np.float32), make_params()
        )
        for _ in range(10)
    ]
    policy = jda.MixedPrecisionPolicy(grad_comm_dtype="bfloat16", grad_reduce_dtype="float32")
    results = []
    for platform in ("gpu", "cpu"):
        mesh, kwargs = here(f"{kind}-optim_grads_params", platform)
        tx = make_tx(mesh, policy, mask=None, layers=layers_of, **kwargs, **EXACT)
        state = jda.TrainState.create(make_params(), tx)
        step = jda.train_step(scanned_products(functools.partial(jda.gather_params, tx=tx)), tx)
        for batch in batches:
            state, _ = step(state, batch)
        results.append((jda.full_params(state, tx), *jda.to_optax_state(state, tx)[:2]))
    assert_trees_same_bits(*results, kind)
