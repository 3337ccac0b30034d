"""Random programs over copies between CPU devices, by test_peer_programs.py.

Many equal arrays, helpers that are traced once and called several times, loops, training and
evaluation, several optimizers and meshes, several programs in flight. Each step's values are those of
numpy, or those of XLA's collectives. Usage:

    random_copies.py INDEX COUNT PORT SEED STEPS
"""

import faulthandler
import os
import sys

index, count, port, seed, steps = map(int, sys.argv[1:6])
N = 4  # devices
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={N // count}"
)
faulthandler.dump_traceback_later(60 + steps, exit=True)  # if it hangs

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax import lax  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

if count > 1:
    jax.distributed.initialize(f"127.0.0.1:{port}", count, index, shutdown_timeout_seconds=20)

import jdistadam as jda  # noqa: E402
from jdistadam.kernels import copies, native, processes  # noqa: E402

jda.set_wait_limit(30)
assert native.status("cpu").available
if count > 1 and (why := processes.join("cpu").why_not):
    print(why, flush=True)
    os._exit(0)
CALLS, ROWS = 12, 3
PARAMS = {f"w{i}": np.full((16, 16), 0.1 * (i + 1), np.float32) for i in range(4)}
first = processes.OF_PROCESSES if count > 1 else 0
mesh = jax.make_mesh((N,), ("d",))
groups = (tuple(first + device.id for device in mesh.devices.flat),)
rows = NamedSharding(mesh, P("d"))
rng = np.random.default_rng(seed)  # equal in all processes


def gather(x):
    return copies.gather(x, dim=0, groups=groups, to="varying")


def exchange(x):
    return copies.exchange(x, dim=0, groups=groups)


def late(x, k):
    """``(k + 1) x``, after work of a device: XLA for CPUs then calls in any order."""
    n = 150 + 37 * ((5 * k) % 7)
    work = jnp.full((n, n), x[0, 0])
    return lax.optimization_barrier((x * (k + 1), work @ work @ work))[0]


def equal_arrays(x):
    """Starts that do not depend on each other."""
    return [gather(late(x, k)) for k in range(CALLS)]


def a_helper(x):
    """One trace, several calls."""
    helper = gather if count > 1 else jax.jit(gather)
    return [helper(late(x, k)) for k in range(CALLS)]


def checkpointed(x):
    """In one process, too, one trace with several calls."""
    block = jax.checkpoint(gather)
    others = [jax.checkpoint(lambda x: gather(x)) for _ in range(CALLS)]
    return [(others[k] if count > 1 else block)(late(x, k)) for k in range(CALLS)]


def in_a_loop(x):
    _, found = lax.scan(lambda c, k: (c, gather(x * k)), 0.0, jnp.arange(1.0, CALLS + 1))
    return list(found)


def exchanged(x):
    """What each device gets of the others, in their order; its own part stays."""
    whole = jnp.tile(x, (N, 1))
    me = lax.axis_index("d")
    for k in range(CALLS):
        others = exchange(whole * (k + 1))
        mine = x[None] * (k + 1)
        at = jnp.arange(N)
        found = jnp.concatenate([others, mine])[jnp.where(at < me, at, at - 1).at[me].set(N - 1)]
        yield found.reshape(N * ROWS, -1)


SHAPES = {
    "equal": equal_arrays,
    "helper": a_helper,
    "checkpoint": checkpointed,
    "loop": in_a_loop,
    "exchange": lambda x: list(exchanged(x)),
}


def compiled(name, columns):
    def local(x):
        return jnp.stack(SHAPES[name](x))[None]

    mapped = jax.shard_map(local, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False)
    return jax.jit(mapped), columns


def placed(x):
    return jax.make_array_from_callback(x.shape, rows, lambda i: x[i])


def check(out, x, name):
    for shard in out.addressable_shards:
        want = np.stack([x * np.float32(k + 1) for k in range(CALLS)])
        got = np.asarray(shard.data)[0]
        assert got.tobytes() == want.tobytes(), (name, np.abs(got - want).max())


class Training:
    """An optimizer over copies, and its twin over XLA's collectives."""

    def __init__(self, rate):
        def loss_fn(params, x):
            for w in params.values():
                x = jnp.tanh(x @ w)
            return jnp.mean(x**2)

        def made(communication):
            tx = jda.distributed(
                jda.fused_adamw(rate, weight_decay=0.1),
                mesh=mesh,
                shard_axis="d",
                policy=jda.MixedPrecisionPolicy(grad_reduce_dtype="float32"),
                communication=communication,
                bucket_bytes=256,
            )
            state = jda.TrainState.create(PARAMS, tx)
            return state, jda.train_step(loss_fn, tx), jda.eval_step(loss_fn, tx)

        self.twins = [made("peer"), made("xla")]

    def step(self, batch):
        losses = []
        for i, (state, step, evaluate) in enumerate(self.twins):
            state, metrics = step(state, batch)
            if not in_flight:
                jax.block_until_ready(state)
            loss, _ = evaluate(state, batch)
            self.twins[i] = (state, step, evaluate)
            losses.append([float(x) for x in (metrics["loss"], metrics["grad_norm"], loss)])
        assert losses[0] == losses[1], losses


programs = {(name, n): compiled(name, n) for name in SHAPES for n in (8, 8000)}
optimizers = [Training(1e-2), Training(3e-3)]
in_flight = jax.__version_info__ >= (0, 12)  # before, programs with collectives of XLA may hang
order = list(programs.values())
for program, n in reversed(order) if index % 2 else order:  # traced in another order
    program.lower(jax.ShapeDtypeStruct((N * ROWS, n), np.float32, sharding=rows))
for step in range(steps):
    started = []
    for _ in range(rng.integers(1, 4)):
        key = list(programs)[rng.integers(len(programs))]
        program, n = programs[key]
        x = rng.normal(size=(N * ROWS, n)).astype(np.float32)
        started.append((program(placed(x)), x, key))
    for out, x, key in started:
        check(out, x, key)
    if step % 4 == 0:
        batch = rng.normal(size=(8, 16)).astype(np.float32)
        local = batch[8 // count * index : 8 // count * (index + 1)]
        training = optimizers[rng.integers(len(optimizers))]
        training.step(jda.shard_batch(local, training.twins[0][1].tx))
print("SUCCESS", flush=True)
if count > 1:
    os._exit(0)
