"""Times creating, saving, restoring and converting states of many leaves.

    python experiments/bench_leaves.py --out runs/bench_leaves.json

Most leaves are small, as those of many layers. Each row runs in a process of its own, so that the
first time includes all compilation, and *peak_mb* is its own. "distributed" is a state on virtual
CPU devices, which is also exported to optax's form and imported again, "plain" one of
``fused_adamw`` on one device. "orbax" saves and restores parameters and moments of the plain state
with orbax alone, without our names, checksums and batches.
"""

import json
import pathlib
import resource
import shutil
import subprocess
import sys
import tempfile
import time

from lm import command_line

ROWS = ("distributed", "plain", "orbax")
SHAPES = ((64,), (64, 64), (96,), (64, 32))
LARGE = (512, 256)  # one leaf in a hundred


def parse_args():
    parser = command_line.make_parser(__doc__)
    add = parser.add_argument
    add("--devices", type=int, default=8)
    add("--leaves", type=int, nargs="+", default=[500, 2000, 10_000])
    add("--rows", nargs="+", choices=ROWS, default=ROWS)
    add("--repeats", type=int, default=2, help="the first of them compiles")
    add("--limit", type=int, default=600, help="seconds after which a row is given up")
    add("--folder", default="/dev/shm", help="where to write; the default is memory")
    add("--out", type=pathlib.Path, required=True)
    add("--part", choices=ROWS, help="run one row and print its results as lines of JSON")
    return parser.parse_args()


def run_part(args):
    import jax
    import numpy as np

    import jdistadam as jda

    jax.config.update("jax_num_cpu_devices", args.devices)
    (count,) = args.leaves
    shapes = [SHAPES[i % len(SHAPES)] if i % 100 else LARGE for i in range(count)]
    params = {f"layer_{i:05}": np.full(shape, i, np.float32) for i, shape in enumerate(shapes)}
    tx = jda.fused_adamw(1e-3)
    if args.part == "distributed":
        tx = jda.distributed(tx, mesh=jax.make_mesh((args.devices,), ("data",)))
        create = lambda: jda.TrainState.create(params, tx)  # noqa: E731
    else:
        place = jax.local_devices()[0]

        def create():
            on_device = jax.device_put(params, place)
            return {"params": on_device, "opt_state": tx.init(on_device)}

    for i in range(args.repeats):
        one_round(args.part, create, pathlib.Path(args.folder) / f"{i}", tx)


def one_round(part, create, folder, tx):
    """Prints the seconds of each action as soon as they are known."""
    import jax

    import jdistadam as jda

    state = timed("create", create)
    if part == "orbax":
        import orbax.checkpoint as ocp

        adam = state["opt_state"][0]
        tree = {"params": state["params"], "mu": adam.mu, "nu": adam.nu}
        with ocp.PyTreeCheckpointer() as checkpointer:
            timed("save", lambda: checkpointer.save(folder, tree))
            restored = timed("restore", lambda: checkpointer.restore(folder, item=tree))
        state = tree
    else:
        tx = tx if part == "distributed" else None
        timed("save", lambda: jda.save(folder, state, tx))
        template = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
        )
        restored = timed("restore", lambda: jda.restore(folder, template, tx))
    assert_same(restored, state)
    if part == "distributed":
        exported = timed("export", lambda: jda.to_optax_state(state, tx))
        assert_same(
            timed("import", lambda: jda.from_optax_state(*exported[:2], tx, exported[2])), state
        )
    shutil.rmtree(folder)
    print(json.dumps({"peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10}))


def assert_same(got, want):
    import jax

    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    assert all(x.dtype == y.dtype and bool((x == y).all()) for x, y in pairs)


def timed(name, function):
    import jax

    starts = time.perf_counter(), time.process_time()
    result = jax.block_until_ready(function())
    ends = time.perf_counter(), time.process_time()
    wall, cpu = (round(end - start, 2) for end, start in zip(ends, starts, strict=True))
    print(json.dumps({f"{name}_seconds": wall, f"{name}_cpu_seconds": cpu}), flush=True)
    return result


def main():
    args = parse_args()
    if args.part:
        run_part(args)
        return
    rows = []
    for part in args.rows:
        for count in args.leaves:
            rows.append(row_of(args, part, count))
            print(rows[-1])
    from lm import report

    report.write_run(args.out, args.revision, rows=rows)


def row_of(args, part, count):
    """Runs a row in its own process; after the limit it has the actions that were finished."""
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="bench_leaves_") as folder:
        given = {"devices": args.devices, "repeats": args.repeats, "folder": folder, "out": "none"}
        options = [x for name, value in given.items() for x in (f"--{name}", f"{value}")]
        command = [sys.executable, __file__, "--part", part, "--leaves", f"{count}", *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
            try:
                text, _ = run.communicate(timeout=args.limit)
            except subprocess.TimeoutExpired:
                run.kill()
                text, _ = run.communicate()
            else:
                if run.returncode:
                    sys.exit(f"{part}, {count} leaves: failed")
    row = {"part": part, "leaves": count}
    for line in map(json.loads, text.splitlines()):
        for name, seconds in line.items():
            row.setdefault(name, []).append(seconds)
    return row


if __name__ == "__main__":
    main()
