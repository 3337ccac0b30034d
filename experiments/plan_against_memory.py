"""The plan of bytes against the memory use of GPUs, for every strategy and policy.

    python experiments/plan_against_memory.py --out runs/plan_memory.json

Each row is its own process, because the allocator's peak cannot be reset: it makes state and
gradients in place, so that only the step can set the peak, and takes three steps.
"""

import concurrent.futures
import itertools
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
from lm import command_line, report
from plan_against_compiler import POLICIES, STRATEGIES, make_tx, step_alone
from tqdm import tqdm

import jdistadam as jda
from jdistadam.tools import bench

# Several rows share the GPUs. From a preallocated pool the allocator returns pieces of the
# requested size; a growing pool returns larger ones, and counts them.
POOL = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.06"}
STEPS = 3


def allocate(shape):
    """Ones, made in their final place."""
    return jax.jit(lambda: jnp.ones(shape.shape, shape.dtype), out_shardings=shape.sharding)()


def measure(tree, strategy, policy):
    """One row: bytes on the first GPU before a step and at its peak, and the planned ones."""
    mesh = jax.make_mesh((1, len(jax.devices())), ("replica", "data"))
    tx = make_tx(mesh, strategy, POLICIES[policy])
    params = {k: jax.ShapeDtypeStruct(s, jnp.bfloat16) for k, s in bench.TREES[tree].items()}
    step, *shapes = step_alone(tx, jda.TrainState.shapes(params, tx))
    device = jax.local_devices()[0]
    before = device.memory_stats()["bytes_in_use"]
    params, state, grads = jax.block_until_ready(jax.tree.map(allocate, shapes))
    arguments = device.memory_stats()["bytes_in_use"] - before
    for _ in range(STEPS):
        params, state = step(params, state, grads)
    jax.block_until_ready(params)
    planned = jda.plan(shapes[0], tx)
    grads_bytes = report.bytes_on_first_device(grads)
    return {
        "strategy": strategy,
        "policy": policy,
        "held_planned": planned.held_bytes,
        "held_measured": arguments - grads_bytes,
        "arrays": len(jax.tree.leaves((params, state, grads))),  # each is rounded up to 256 bytes
        "gradients": grads_bytes,
        "buffers_planned": planned.buffer_bytes,
        "temporary_measured": report.peak_bytes(device) - before - arguments,
    }


def measure_in_a_process(tree, strategy, policy):
    command = [sys.executable, __file__, "--tree", tree, "--row", strategy, policy]
    done = subprocess.run(command, env=os.environ | POOL, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{strategy}, {policy}: {done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = command_line.make_parser(__doc__)
    parser.add_argument("--tree", choices=bench.TREES, default="gpt2s")
    parser.add_argument("--row", nargs=2, metavar=("STRATEGY", "POLICY"), help="print one row")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--jobs", type=int, default=4, help="rows at a time, at most 12")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/plan_memory.json"))
    args = parser.parse_args()
    if args.row:
        print(json.dumps(measure(args.tree, *args.row)))
        return
    cases = [*itertools.product(STRATEGIES, args.policies)]
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        futures = [pool.submit(measure_in_a_process, args.tree, *case) for case in cases]
        rows = [future.result() for future in tqdm(futures)]
    report.write_run(args.out, args.revision, tree=args.tree, rows=rows)
    for row in rows:
        print(
            f"{row['strategy']:<18} {row['policy']:<26} held {row['held_planned']:>13,} "
            f"{row['held_measured']:>13,} temporary at most {row['buffers_planned']:>13,} "
            f"{row['temporary_measured']:>13,}"
        )


if __name__ == "__main__":
    main()
