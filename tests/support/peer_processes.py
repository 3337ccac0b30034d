"""One of several processes that train together over copies, by test_peer_processes.py.

On DEVICES CPU devices or GPUs, all COUNT processes together. It continues from the newest
checkpoint, and the first process writes the final parameters. Usage:

    peer_processes.py cpu|gpu INDEX COUNT DEVICES PORT FOLDER STEPS COMMUNICATION STRATEGY
"""

import os
import sys

platform, index, count, devices, port = sys.argv[1], *map(int, sys.argv[2:6])
folder, steps, communication, strategy = sys.argv[6], int(sys.argv[7]), *sys.argv[8:]
of_each = devices // count
# XLA for GPUs picks its matrix products by time: processes could get products of other bits.
flags = f" --xla_force_host_platform_device_count={of_each} --xla_gpu_autotune_level=0"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + flags

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

if count > 1:
    mine = list(range(index * of_each, (index + 1) * of_each)) if platform == "gpu" else None
    jax.distributed.initialize(
        f"127.0.0.1:{port}",
        count,
        index,
        local_device_ids=mine,
        heartbeat_timeout_seconds=20,  # ends a process that waits for another one to save
        shutdown_timeout_seconds=20,
    )

import jdistadam as jda  # noqa: E402
from jdistadam.kernels import processes  # noqa: E402

processes.GRACE_SECONDS = 5
ROWS = 48  # divides by 2, 4, 6 and 8 devices
SHAPES = {"up": (32, 64), "down": (64, 32), "bias": (7,)}


def loss_fn(params, batch):
    params = jda.gather_params(params, tx)
    hidden = jnp.tanh(batch @ params["up"].astype(jnp.float32))
    return jnp.mean(jnp.square(hidden @ params["down"] - 1)) + params["bias"].sum()


def batch_of(i):
    rows = ROWS // count
    batch = np.random.default_rng(i).normal(size=(ROWS, 32)).astype(np.float32)
    return jda.shard_batch(batch[rows * index : rows * (index + 1)], tx)


axes = {"data": devices}
if strategy == "replicas":  # over which XLA sums
    axes = {"replica": 2, "data": devices // 2}
mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), devices=jax.devices(platform)[:devices])
tx = jda.distributed(
    jda.fused_adamw(1e-2, b1=0.8, b2=0.99, weight_decay=0.1),
    mesh=mesh,
    policy=jda.MixedPrecisionPolicy(grad_comm_dtype="bfloat16", grad_reduce_dtype="float32"),
    sharding_strategy="optim" if strategy == "replicas" else strategy,
    shard_axis="data",
    replica_axis="replica" if strategy == "replicas" else None,
    communication=communication,
)
print("over", tx.config.transport, flush=True)
rng = np.random.default_rng(0)
params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
step = jda.train_step(loss_fn, tx)
first, state = 0, jda.TrainState.create(params, tx)
if saved := jda.checkpoint_steps(folder):
    first = saved[-1]
    state = jda.restore(folder, jda.TrainState.shapes(params, tx), tx, step=first)
    print("restored", first, flush=True)
if index > 0:  # processes may have traced other programs, too
    step.lower(state, jda.shard_batch(np.zeros((2 * ROWS // count, 32), np.float32), tx))
with jda.Checkpointer(folder, tx, every=4, keep=2) as checkpointer:
    for i in range(first + 1, steps + 1):
        state, metrics = jax.block_until_ready(step(state, batch_of(i)))
        print("step", i, flush=True)
        checkpointer.after_step(i, state)
everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
whole = jax.jit(lambda tree: tree, out_shardings=everywhere)(state.params)
if index == 0:
    np.savez(f"{folder}.npz", **{k: np.asarray(x.addressable_data(0)) for k, x in whole.items()})
