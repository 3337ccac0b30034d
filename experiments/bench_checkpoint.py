"""Times saving and restoring a state against a conversion by hand, and measures memory.

    python experiments/bench_checkpoint.py --out runs/bench_checkpoint.json

A state with float32 main parameters, mu and nu on virtual CPU devices. By hand means
``to_optax_state`` and ``numpy.savez``, and back ``numpy.load`` and ``from_optax_state``: all in one
process, on one host. Each runs several times in the same process; the first run compiles. The speed
of the folder alone is measured before.
"""

import ctypes
import gc
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent import futures

from lm import command_line

DEVICES = 8


def parse_args():
    parser = command_line.make_parser(__doc__)
    add = parser.add_argument
    add("--layers", type=int, default=8, help="of a GPT; so there are 67.7 million parameters")
    add("--width", type=int, default=768)
    add("--repeats", type=int, default=4)
    add("--folder", default="/dev/shm", help="where to write; the default is memory")
    add("--out", type=pathlib.Path, required=True)
    add(
        "--part",
        choices=("disk", "by hand", "checkpoint"),
        help="run one part and print it as JSON",
    )
    return parser.parse_args()


def make_shapes(layers, width):
    """The leaves of a GPT-2 with a vocabulary of 13,312: packed biases, scattered matrices."""
    shapes = {"wte": (13312, width), "wpe": (1024, width), "ln_f": {"b": (width,), "g": (width,)}}
    for i in range(layers):
        shapes[f"h{i:02}"] = {
            "ln_1": {"b": (width,), "g": (width,)},
            "attn": {"w": (width, 3 * width), "b": (3 * width,)},
            "proj": {"w": (width, width), "b": (width,)},
            "ln_2": {"b": (width,), "g": (width,)},
            "up": {"w": (width, 4 * width), "b": (4 * width,)},
            "down": {"w": (4 * width, width), "b": (width,)},
        }
    return shapes


def resident_bytes(field):
    """A field of this process's memory: VmRSS now, VmHWM the maximum since its reset."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


class Measured:
    """Runs a function several times; records seconds, and memory above the initial amount."""

    def __init__(self):
        self.results = {}

    def __call__(self, name, function, repeats):
        seconds, beside, result = [], [], None
        for i in range(repeats):
            del result
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)  # or memory freed earlier would hide new memory
            before = resident_bytes("VmRSS")
            pathlib.Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
            start = time.perf_counter()
            result = function(i)
            seconds.append(round(time.perf_counter() - start, 3))
            beside.append(resident_bytes("VmHWM") - before)
        self.results[name] = {
            "first_seconds": seconds[0],
            "seconds": seconds[1:],
            "median_seconds": sorted(seconds[1:])[(len(seconds) - 1) // 2],
            "peak_bytes_beside": min(beside[1:]),
        }
        return result


def run_part(args):
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jdistadam as jda

    jax.config.update("jax_num_cpu_devices", DEVICES)
    mesh = jax.make_mesh((DEVICES,), ("data",))
    policy = jda.MixedPrecisionPolicy()
    tx = jda.distributed(
        jda.fused_adamw(1e-3),
        mesh=mesh,
        policy=policy,
        sharding_strategy="optim",
    )
    rng = np.random.default_rng(0)
    make = lambda shape: 0.02 * rng.standard_normal(shape, np.float32)  # noqa: E731
    tree = jax.tree.map(make, make_shapes(args.layers, args.width), is_leaf=is_shape)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    create = lambda: jda.TrainState.create(tree, tx, param_dtypes=jnp.bfloat16)  # noqa: E731
    noise = lambda x: x if x.ndim == 0 or x.dtype != jnp.float32 else x + 1e-3 * jnp.arange(  # noqa: E731
        x.size, dtype=jnp.float32).reshape(x.shape)  # fmt: skip
    state = create()
    filled = jax.jit(lambda s: s._replace(mu=noise(s.mu), nu=noise(s.nu)), donate_argnums=0)
    state = jda.TrainState(state.params, filled(state.opt_state))
    folder = pathlib.Path(tempfile.mkdtemp(dir=args.folder, prefix="bench_checkpoint_"))
    measured = Measured()
    try:
        if args.part == "checkpoint":
            with_checkpoint(jda, folder, state, shapes, tx, args, measured)
        else:
            by_hand(jda, np, folder, state, tx, args, measured)
    finally:
        shutil.rmtree(folder)
    results = measured.results | {
        "parameters": sum(x.size for x in jax.tree.leaves(tree)),
        "state_bytes": sum(x.nbytes for x in jax.tree.leaves(state.opt_state)),
    }
    print(json.dumps(results))


def is_shape(x):
    return isinstance(x, tuple)


def with_checkpoint(jda, folder, state, shapes, tx, args, measured):
    import jax
    import jax.numpy as jnp

    def out(i):
        jda.save(folder / f"{i}", state, tx)
        if i:  # or the next one gets new pages from the machine's host, which takes longer
            shutil.rmtree(folder / f"{i}")

    measured("save", out, args.repeats)
    files = (x for x in (folder / "0").rglob("*") if x.is_file())
    measured.results["file_bytes"] = sum(x.stat().st_size for x in files)
    with jda.Checkpointer(folder / "many", tx, keep=1) as checkpointer:

        def blocked(i):
            checkpointer.wait()
            start = time.perf_counter()
            checkpointer.save(state, step=i)
            waits.append(round(time.perf_counter() - start, 3))
            checkpointer.wait()

        waits = []
        measured("save in the background, until written", blocked, args.repeats)
    measured.results["seconds_that_save_in_the_background_blocks"] = waits[1:]
    shutil.rmtree(folder / "many")
    template = jda.TrainState.shapes(shapes, tx, param_dtypes=jnp.bfloat16)
    load = lambda i: jax.block_until_ready(jda.restore(folder / "0", template, tx))  # noqa: E731
    got = measured("restore", load, args.repeats)
    both = [jax.tree.leaves(jda.to_optax_state(x, tx)[:2]) for x in (got, state)]
    assert all((x == y).all() for x, y in zip(*both, strict=True))


def by_hand(jda, np, folder, state, tx, args, measured):
    import jax
    import jax.numpy as jnp

    def out(i):
        leaves = jax.tree.leaves(jda.to_optax_state(state, tx)[:2])
        np.savez(folder / f"{i}.npz", *leaves)
        if i:
            (folder / f"{i}.npz").unlink()

    measured("save", out, args.repeats)
    structure = jax.tree.structure(jda.to_optax_state(state, tx)[:2])

    def back(i):
        with np.load(folder / "0.npz") as file:
            main, opt_state = structure.unflatten(file[f"arr_{k}"] for k in range(len(file.files)))
        return jax.block_until_ready(
            jda.from_optax_state(main, opt_state, tx, param_dtypes=jnp.bfloat16)
        )

    measured("restore", back, args.repeats)


def disk(args):
    """The speed of the folder alone: files by two threads, to the disk and back."""
    import numpy as np

    folder = pathlib.Path(tempfile.mkdtemp(dir=args.folder, prefix="bench_checkpoint_"))
    data = memoryview(np.random.default_rng(0).bytes(64 << 20))
    paths = [folder / f"{i}" for i in range(16)]

    def write(path):
        file = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.write(file, data)
        os.fsync(file)
        os.close(file)

    def read(path):
        with open(path, "rb", buffering=0) as file:
            file.readinto(bytearray(len(data)))

    results = {"bytes": len(data) * len(paths)}
    with futures.ThreadPoolExecutor(2) as pool:
        for name, function in (("write_seconds", write), ("read_seconds", read)):
            results[name] = []
            for _ in range(args.repeats):
                if function is write:
                    shutil.rmtree(folder)
                    folder.mkdir()
                start = time.perf_counter()
                list(pool.map(function, paths))
                results[name].append(round(time.perf_counter() - start, 3))
    shutil.rmtree(folder)
    print(json.dumps(results))


def main():
    args = parse_args()
    if args.part == "disk":
        disk(args)
        return
    if args.part:
        run_part(args)
        return
    results = {}
    for part in ("disk", "by hand", "checkpoint"):  # each in its own process, for its memory
        command = [sys.executable, *sys.argv, "--part", part]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ)
        if done.returncode:
            sys.exit(f"{part}: failed")
        results[part] = json.loads(done.stdout.splitlines()[-1])
        print(part, json.dumps(results[part], indent=1))
    from lm import report

    report.write_run(args.out, args.revision, folder=args.folder, **results)


if __name__ == "__main__":
    main()
