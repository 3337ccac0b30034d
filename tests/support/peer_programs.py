"""Programs with steps over peer memory that must not hang; run by test_peer_programs.py.

Usage: peer_programs.py few|many NAME [NAME ...]
"""

import faulthandler
import os
import sys

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
faulthandler.dump_traceback_later(100, exit=True)  # if it hangs

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax import lax  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import jdistadam as jda  # noqa: E402

N = 8
MANY = sys.argv[1] == "many"  # steps
SHAPES = {"wide": (100, 800), "rows": (48, 400), "odd": (20_011,), "small": (7, 3), "scalar": ()}
SHAPES |= {f"layer{i}": (64, 256) for i in range(6 if MANY else 2)}


def params_of():
    rng = np.random.default_rng(0)
    return {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in SHAPES.items()}


def loss_fn(params, x):
    terms = [
        jnp.sum(v.astype(jnp.float32).ravel() * jnp.cos(jnp.arange(v.size) * x[0, 0]))
        for v in jax.tree.leaves(params)
    ]
    return sum(terms)


def make(means, axis_type=None, **kwargs):
    types = None if axis_type is None else (axis_type,)
    mesh = jax.make_mesh((N,), ("data",), axis_types=types)
    kwargs = dict(learning_rate=3e-3, b1=0.87, weight_decay=0.13) | kwargs
    policy = jda.MixedPrecisionPolicy(grad_comm_dtype="bfloat16", grad_reduce_dtype="float32")
    options = {name: kwargs.pop(name) for name in ("max_grad_norm", "loss_scale") if name in kwargs}
    options |= dict(mesh=mesh, policy=policy, communication=means)
    tx = jda.distributed(jda.fused_adamw(**kwargs), **options)
    return tx, jda.TrainState.create(params_of(), tx, param_dtypes="bfloat16")


def batches(count, seed=1):
    return np.random.default_rng(seed).normal(size=(count, N, 3)).astype(np.float32)


def assert_same(peer, xla):
    for a, b in zip(jax.tree.leaves(peer), jax.tree.leaves(xla), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), (a, b)


def same_by_both(run):
    assert_same(run("peer"), run("xla"))


def python_loop(means):
    """300 steps; every third has a NaN gradient.

    Waits for each step: on CPU two programs in flight may hang, also over XLA's collectives.
    """
    tx, state = make(means, max_grad_norm=1.0, loss_scale=jda.DynamicLossScale(8.0))
    step = jda.train_step(loss_fn, tx)
    for i, x in enumerate(batches(300)):
        x[i % N, 0] = np.nan if i % 3 == 2 else x[i % N, 0]
        state, metrics = jax.block_until_ready(step(state, x))
    assert int(metrics["skipped"]) == 100
    return state, metrics


def scan(means):
    tx, state = make(means, jax.sharding.AxisType.Auto)
    return jax.jit(lambda s, b: lax.scan(jda.train_step(loss_fn, tx), s, b))(
        state, batches(50 if MANY else 6)
    )


def donation(means):
    results = []
    for donate in (True, False):
        tx, state = make(means)
        step = jda.train_step(loss_fn, tx)
        step = step if donate else jax.jit(lambda s, x, step=step: step(s, x))
        for x in batches(10):
            state, metrics = jax.block_until_ready(step(state, x))
        results.append((state, metrics))
    assert_same(*results)
    return results


def two_steps(means):
    """Two optimizers in turns: each has its own programs and call sites."""
    (one, state), (two, other) = make(means), make(means, b1=0.5, max_grad_norm=0.3)
    steps = jda.train_step(loss_fn, one), jda.train_step(loss_fn, two)
    for x in batches(20 if MANY else 6):
        state, _ = jax.block_until_ready(steps[0](state, x))
        other, _ = jax.block_until_ready(steps[1](other, x))
    return state, other


def beside_a_sum(means):
    """Sums over the devices that are independent of the step."""
    tx, state = make(means)
    step = jda.train_step(loss_fn, tx)
    add = jax.shard_map(
        lambda y: lax.psum(y, "data"), mesh=tx.config.mesh, in_specs=P("data"), out_specs=P()
    )

    @jax.jit
    def both(state, x, y):
        state, metrics = step(state, x)
        return state, metrics, [add(y * k) for k in range(1, 5)]

    y = jda.shard_batch(np.arange(N * 100_000, dtype=np.float32).reshape(N, -1), tx)
    for x in batches(20 if MANY else 6):
        state, metrics, sums = jax.block_until_ready(both(state, x, y))
    return state, metrics, sums


def nan(means):
    """NaN and infinity on one device, without a loss scale: they reach params as over XLA."""
    tx, state = make(means)
    step = jda.train_step(loss_fn, tx)
    for i, x in enumerate(batches(4)):
        x[3, 0] = (1.0, np.nan, np.inf, 2.0)[i]
        state, metrics = jax.block_until_ready(step(state, x))
    assert np.isnan(np.asarray(state.params["wide"], np.float32)).any()
    return state, metrics


if __name__ == "__main__":
    for name in sys.argv[2:]:
        same_by_both(globals()[name])
    print("SUCCESS")
