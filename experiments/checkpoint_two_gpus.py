"""Saves a state of GPT-2 XL's size on two devices, restores it on one and on two, and trains on.

    python experiments/checkpoint_two_gpus.py --out runs/checkpoint_two_gpus.json
    JAX_NUM_CPU_DEVICES=2 JAX_PLATFORMS=cpu python experiments/checkpoint_two_gpus.py \\
        --layers 2 --width 64 --out /tmp/x.json

Three states continue: the one saved under "optim"; the one restored on one device, with the batch
of both in two micro-batches; and the one restored on two under "optim_grads_params". After some
steps all three must have the same bits. Seconds of save and restore are compared with those of
plain files in the same folder, written and synchronised by several threads.
"""

import os
import pathlib
import shutil
import sys
import tempfile
import time
from concurrent import futures

import bench_checkpoint
import jax
import jax.numpy as jnp
import numpy as np
from lm import command_line, report

import jdistadam as jda


def parse_args():
    parser = command_line.make_parser(__doc__)
    add = parser.add_argument
    add("--layers", type=int, default=48)
    add("--width", type=int, default=1600)
    add("--steps", type=int, default=20, help="after the restore")
    add("--repeats", type=int, default=3, help="of saves and restores; the first compiles")
    add("--folder", help="where to write; default: that of temporary files")
    add("--out", type=pathlib.Path, required=True)
    return parser.parse_args()


def make_tx(num_devices, strategy):
    mesh = jax.make_mesh((num_devices,), ("data",), devices=jax.devices()[:num_devices])
    policy = jda.MixedPrecisionPolicy(grad_comm_dtype=jnp.float32, grad_reduce_dtype=jnp.float32)
    return jda.distributed(
        jda.fused_adamw(1e-3, weight_decay=0.1),
        mesh=mesh,
        sharding_strategy=strategy,
        policy=policy,
    )


def loss_fn(params, x):
    """Has gradients that differ by element, device and step, and are exact in every program.

    They are small integers over 1024: they have the same bits whether a compiler rounds them to
    bfloat16 or keeps them, and whether it adds two micro-batches in one fused operation.
    """

    def term(p):
        pattern = jax.lax.iota(jnp.int32, p.size).reshape(p.shape) % 7 - 3
        return jnp.sum(p.astype(jnp.float32) * pattern.astype(jnp.float32))

    return sum(term(p) for p in jax.tree.leaves(params)) * x.sum() / 1024


def train(state, tx, steps):
    accumulate = 2 // tx.config.mesh.size
    step = jda.train_step(loss_fn, tx, accumulate_steps=accumulate)
    for i in range(steps):
        state, _ = step(state, np.float32([i + 1, 2 * i - 3]))
    return state


def digest(state, tx):
    """A checksum of each leaf of params, main parameters and moments, by path.

    Summed on the devices: 32-bit words, each times an odd number that depends on its place.
    """
    leaves = jax.tree_util.tree_leaves_with_path(jda.to_optax_state(state, tx)[:2])
    return {jax.tree_util.keystr(path): int(_digest(x)) for path, x in leaves}


@jax.jit
def _digest(x):
    unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    words = jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32).reshape(-1)
    factors = (2 * jax.lax.iota(jnp.uint32, words.size) + 1) * jnp.uint32(2654435761)
    return jnp.sum(words * factors, dtype=jnp.uint32)


def check(got, want, what):
    """Ends the program with the leaves that differ."""
    differ = [name for name in want if got.get(name) != want[name]]
    if differ or got.keys() != want.keys():
        sys.exit(f"{what}: {len(differ)} of {len(want)} leaves, such as {differ[:3]}")


def timed(name, repeats, function):
    """Returns the seconds of each call, the first with compilation, and the last result."""
    seconds, result = [], None
    for i in range(repeats):
        del result
        start = time.perf_counter()
        result = jax.block_until_ready(function(i))
        seconds.append(round(time.perf_counter() - start, 3))
    print(name, seconds, flush=True)
    return seconds, result


def plain_files(folder, nbytes, repeats):
    """Seconds in which several threads write and synchronise up to 4 GiB, and read it."""
    data, size = np.random.default_rng(0).bytes(64 << 20), 64 << 20
    paths = [folder / f"{i}" for i in range(-(-min(nbytes, 4 << 30) // size))]

    def write(path):
        with open(path, "wb", buffering=0) as file:
            file.write(data)
            os.fsync(file.fileno())

    def read(path):
        with open(path, "rb", buffering=0) as file:
            file.readinto(bytearray(size))

    found = {"bytes": size * len(paths)}
    with futures.ThreadPoolExecutor(8) as pool:
        for name, function in (("write_seconds", write), ("read_seconds", read)):
            found[name], _ = timed(
                name, repeats, lambda i, f=function: list(pool.map(f, paths)) and None
            )
    return found


def measure(args, folder):
    shapes = bench_checkpoint.make_shapes(args.layers, args.width)
    shapes = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.float32), shapes, is_leaf=bench_checkpoint.is_shape
    )
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: 0.02 * rng.standard_normal(x.shape, np.float32), shapes)
    tx = make_tx(2, "optim")
    state = train(jda.TrainState.create(params, tx, param_dtypes=jnp.bfloat16), tx, 3)
    results = {"parameters": sum(x.size for x in jax.tree.leaves(params))}
    del params
    saved = digest(state, tx)
    results["save_seconds"], _ = timed(
        "save", args.repeats, lambda i: jda.save(folder / f"{i}", state, tx)
    )
    files = [x.stat().st_size for x in (folder / "0").rglob("*") if x.is_file()]
    results["file_bytes"] = sum(files)
    for i in range(1, args.repeats):
        shutil.rmtree(folder / f"{i}")
    state = train(state, tx, args.steps)
    want = digest(state, tx)
    state = None
    for n, strategy in ((1, "optim"), (2, "optim_grads_params")):
        tx = make_tx(n, strategy)
        template = jda.TrainState.shapes(shapes, tx, param_dtypes=jnp.bfloat16)
        name = f"restore on {n}, {strategy}"
        seconds, new = timed(name, args.repeats, lambda _: jda.restore(folder / "0", template, tx))  # noqa: B023
        check(digest(new, tx), saved, f"{name}: other bits than were saved")
        check(digest(train(new, tx, args.steps), tx), want, f"{name}: other bits after the steps")
        results[name] = {"seconds": seconds, "same_bits_after_steps": args.steps}
        del new
    shutil.rmtree(folder / "0")
    results["plain files"] = plain_files(folder, results["file_bytes"], args.repeats)
    return results


def main():
    args = parse_args()
    if len(jax.devices()) < 2 and jax.default_backend() == "cpu":
        sys.exit("needs two devices; on a CPU: JAX_NUM_CPU_DEVICES=2")
    folder = pathlib.Path(tempfile.mkdtemp(dir=args.folder, prefix="checkpoint_two_gpus_"))
    try:
        results = measure(args, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(results)
    report.write_run(args.out, args.revision, **results)


if __name__ == "__main__":
    main()
