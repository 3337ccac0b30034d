"""Trains as one of several processes, by test_processes.py; the first writes the final state.

On TOTAL CPU devices or GPUs, all processes together. ``support`` must be on the PYTHONPATH.

Usage: one_of_many_processes.py cpu|gpu TOTAL INDEX COUNT PORT STRATEGY OUT
"""

import os
import sys

platform = sys.argv[1]
total, index, count, port, strategy, out = (*map(int, sys.argv[2:6]), *sys.argv[6:])
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={total // count}"
)

import jax  # noqa: E402
import numpy as np  # noqa: E402

if count > 1:
    # Each process has one GPU, or its share of the CPU devices.
    mine = [index] if platform == "gpu" else None
    jax.distributed.initialize(f"127.0.0.1:{port}", count, index, local_device_ids=mine)

import jdistadam as jda  # noqa: E402
from jdistadam.core.trees import words_of  # noqa: E402
from support.given_gradients import SHAPES, make_tx, random_params  # noqa: E402

STEPS = 4
NAMES = ("rows", "prime", "scalar")  # cut, does not divide, packed


def loss_fn(params, batch, model_state, rng):
    noise = 1 + jax.random.normal(rng, ()) / 8
    terms = jax.tree.map(lambda p, x: jax.numpy.vdot(p.astype("float32"), x.mean(0)), params, batch)
    loss = noise * sum(jax.tree.leaves(terms))
    # Integers, whose mean over the devices is exact in any order.
    last = jax.numpy.round(batch["rows"].sum() + jax.numpy.zeros(3))
    return loss, model_state | {"last": last, "steps": model_state["steps"] + 1}


def evaluate(tx, state, batch):
    """Each device's results from its params and its part, and its rows.

    With integers: XLA for GPUs compiles another order of the loss's sum in another process.
    """

    def loss_and_aux(params, batch, **kwargs):
        loss, model_state = loss_fn(params, batch, **kwargs)
        wholes = jax.tree.map(jax.numpy.round, (params, batch))
        found = sum(x.astype("float32").sum() for x in jax.tree.leaves(wholes))
        return loss, model_state, {"found": found, "rows": batch["rows"]}

    loss, aux = jda.eval_step(loss_and_aux, tx, has_aux=True)(state, batch)
    mine = [
        shard.data
        for shard in sorted(aux["rows"].addressable_shards, key=lambda x: x.index[0].start)
    ]
    assert np.array_equal(np.concatenate(mine), batch["rows"]) and np.isfinite(loss)
    return aux


def everywhere(tree, tx):
    whole = jax.sharding.NamedSharding(tx.config.mesh, jax.sharding.PartitionSpec())
    return jax.jit(lambda tree: tree, out_shardings=whole)(tree)


def without_keys(tree):
    return jax.tree.map(words_of, tree)


def main():
    assert jax.process_count() == count and jax.device_count() == total
    assert jax.local_device_count() == total // count
    policy = jda.MixedPrecisionPolicy(grad_comm_dtype="bfloat16", grad_reduce_dtype="float32")
    replicas = 1 if total == 2 else 2
    tx = make_tx(
        dict(shape=(replicas, total // replicas), names=("replica", "data"), platform=platform), policy,
        replica_axis="replica", sharding_strategy=strategy, loss_scale=jda.DynamicLossScale(),
    )  # fmt: skip
    model_state = {"last": np.zeros(3, np.float32), "steps": np.int32(0), "key": jax.random.key(1)}
    state = jda.TrainState.create(
        {name: random_params()[name] for name in NAMES},
        tx,
        param_dtypes="bfloat16",
        model_state=model_state,
        rng=jax.random.key(2),
    )
    step = jda.train_step(loss_fn, tx, accumulate_steps=2)
    rng, shapes = np.random.default_rng(0), {name: SHAPES[name] for name in NAMES}
    rows = slice(16 // count * index, 16 // count * (index + 1))
    for _ in range(STEPS):
        # Sums of multiples of 1 / 16 are exact in any order.
        batch = {k: np.round(16 * rng.normal(size=(16, *s))) / 16 for k, s in shapes.items()}
        batch = {k: x.astype(np.float32) for k, x in batch.items()}
        state, metrics = step(state, {k: x[rows] for k, x in batch.items()})
        assert int(metrics["skipped"]) == 0 and np.isfinite(metrics["loss"])
    evaluated = everywhere(evaluate(tx, state, {k: x[rows] for k, x in batch.items()}), tx)
    params = jda.full_params(state, tx)
    main_params, opt_state, extra_state = jda.to_optax_state(state, tx)
    again = jda.from_optax_state(main_params, opt_state, tx, extra_state, param_dtypes="bfloat16")
    for a, b in zip(*map(jax.tree.leaves, map(without_keys, (again, state))), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
        for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True):
            assert np.array_equal(x.data, y.data)
    assert int(state.step) == int(extra_state.step) == STEPS
    exported = without_keys((evaluated, params, main_params, opt_state, extra_state))
    leaves = [np.asarray(x) for x in jax.tree.leaves(exported)]
    if index == 0:
        bits = {2: np.uint16, 4: np.uint32}
        np.savez(out, *(x.view(bits[x.dtype.itemsize]) for x in leaves))


main()
