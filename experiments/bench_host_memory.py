"""Times a step alone on one GPU with its state in device memory and in host memory.

    python experiments/bench_host_memory.py --out runs/bench_host_memory.json

Parameters and gradients are bfloat16 leaves of 4096 x 4096. Each row runs in a process of its own,
so peaks of memory start at zero. Rows of one storage and size must have the same checksum: of
some parameters, and of the whole state of the small model.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import time
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from lm import command_line, report

import jdistadam as jda
from jdistadam.distributed import calls, host_memory

STORAGE = {
    "float32": dict(main_params_dtype=jnp.float32),
    "remainder16+block8": dict(
        main_params_dtype="remainder16", mu_dtype="block8", nu_dtype="block8", rounding="stochastic"
    ),
}
SMALL, LARGE = 16, 78  # leaves: 268e6 and 1.31e9 parameters
ROWS = [
    dict(storage=storage, memory=memory, leaves=leaves)
    for leaves in (SMALL, LARGE)
    for storage in STORAGE
    for memory in ("device", "pinned_host")
]
# A single window, and fewer or more bytes of windows on the device.
ROWS += [
    dict(storage="float32", memory="pinned_host", leaves=SMALL, window=1 << 40),
    dict(storage="remainder16+block8", memory="pinned_host", leaves=SMALL, buffer_bytes=1),
    dict(storage="remainder16+block8", memory="pinned_host", leaves=SMALL, buffer_bytes=2 << 30),
]


def draw(first, leaves, width):
    """Random leaves."""

    @jax.jit
    def one(i):
        return (jax.random.normal(jax.random.key(i), (width, width)) * 0.02).astype(jnp.bfloat16)

    return {f"w{i:03d}": one(first + i) for i in range(leaves)}


def checksum(arrays):
    total = 0
    for x in arrays:
        total = zlib.crc32(np.ascontiguousarray(np.asarray(x)).view(np.uint8), total)
    return f"{total:08x}"


def measure(row, width, steps):
    """Takes steps and returns what a row records."""
    calls.WINDOW = row.get("window", calls.WINDOW)
    mesh = jax.make_mesh((1,), ("data",))
    algorithm = jda.fused_adamw(1e-3, weight_decay=0.1, **STORAGE[row["storage"]])
    host_memory.WINDOWS_BYTES = row.get("buffer_bytes", host_memory.WINDOWS_BYTES)
    tx = jda.distributed(algorithm, mesh=mesh, state_memory=row["memory"], communication="xla")
    params, grads = draw(0, row["leaves"], width), draw(1000, row["leaves"], width)
    shardings = tx.param_shardings(params)
    params, grads = jax.device_put(params, shardings), jax.device_put(grads, shardings)
    state = tx.init(params)
    specs = (tx.param_specs(params), tx.state_specs())

    def local(grads, params, state):
        return tx.step(grads, state, params)

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(specs[0], *specs), out_specs=specs, check_vma=False
    )
    step = jax.jit(mapped, donate_argnums=(1, 2))
    times = []
    for _ in range(1 + steps):
        begun = time.perf_counter()
        params, state = jax.block_until_ready(step(grads, params, state))
        times.append(1e3 * (time.perf_counter() - begun))
    flat = jax.tree.leaves((state.main_params, state.mu, state.nu))
    assert {x.sharding.memory_kind for x in flat} <= {row["memory"], "unpinned_host"}, flat
    checked = jax.tree.leaves(params)[:: max(1, row["leaves"] // 4)]
    stats = jax.devices()[0].memory_stats() or {}
    return row | {
        "parameters": row["leaves"] * width**2,
        "ms": statistics.median(times[1:]),
        "rounds_ms": times[1:],
        "state_bytes": sum(x.nbytes for x in flat),
        "peak_bytes": stats.get("peak_bytes_in_use"),
        "held_bytes": stats.get("bytes_in_use"),
        "checksum": checksum(checked + (flat if row["leaves"] <= SMALL else [])),
    }


def in_process(row, width, steps):
    """``measure`` in a process of its own."""
    command = [sys.executable, __file__, "--width", str(width), "--steps", str(steps)]
    done = subprocess.run(
        [*command, "--row", json.dumps(row)], capture_output=True, text=True, timeout=120
    )
    if done.returncode:
        return row | {"failed": done.stderr[-1000:]}
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = command_line.make_parser(__doc__)
    add = parser.add_argument
    add("--out", type=pathlib.Path, default=pathlib.Path("runs/bench_host_memory.json"))
    add("--width", type=int, default=4096, help="of the leaves")
    add("--steps", type=int, default=5)
    add("--row", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        print(json.dumps(measure(args.row, args.width, args.steps)))
        return 0
    found = []
    for row in ROWS:
        found.append(in_process(row, args.width, args.steps))
        print(json.dumps(found[-1]), flush=True)
        report.write_run(args.out, args.revision, rows=found)
    sums = {}
    for row in found:
        sums.setdefault((row["storage"], row["leaves"]), set()).add(row.get("checksum"))
    differ = [key for key, values in sums.items() if len(values) > 1 or None in values]
    if differ:
        print("bits differ, or a row failed:", differ)
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main())
