"""Times one optimizer step on one GPU: every tree and way to step, against optax, torch and a copy.

    python experiments/bench_kernel.py --out experiments/results/bench_kernel.json

jdistadam/bench.py says what the figures mean; its short form is `python -m jdistadam bench`. Here
the profiler gives the time of the device alone, and torch.optim.AdamW(fused=True) is timed where
torch is installed, called and as a CUDA graph.
"""

import argparse
import collections
import glob
import os
import pathlib
import statistics
import tempfile

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")  # torch needs memory too

import jax
import jax.numpy as jnp
import numpy as np
from lm import report

from jdistadam import bench

OURS = ("float32", "bf16, float32 main", "bf16, remainder16")
FLAT = "float32, flat, clipped"
SKIPPED = {("many1000x4k", "optax.adamw")}  # XLA does not compile the loop in reasonable time


def device_seconds(program, args):
    """Time of all kernels of one run, from the profiler.

    Copies are left out: those of the loop's operands are made once for all its steps. A copy in the
    step itself would show in the wall time alone.
    """
    args = jax.block_until_ready(program(*args))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(program(*args))
        (trace,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        kernels = collections.Counter()
        for plane in jax.profiler.ProfileData.from_file(trace).planes:
            for line in plane.lines if "GPU" in plane.name else ():
                if "Stream" in line.name:
                    for event in line.events:
                        kernels[event.name] += event.duration_ns
    copies = ("memcpy", "Memcpy")
    return sum(ns for name, ns in kernels.items() if not name.startswith(copies)) / 1e9


def check(tree):
    """Correct first: one step of ours and of optax, equal to a few units in the last place."""
    shapes = bench.TREES[tree]
    params, grads = (
        bench.make_tree(shapes, 0.1, jnp.float32),
        bench.make_tree(shapes, 0.01, jnp.float32),
    )
    results = []
    for variant in ("float32", "optax.adamw"):
        init, step = bench.VARIANTS[variant].make()
        results.append(jax.jit(step)(grads, init(params), params)[0])
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def torch_rows(tree, copy):
    """torch's fused AdamW: called, and replayed from a CUDA graph. One row each."""
    try:
        import torch
    except ImportError:
        print("torch is not installed: no rows for it")
        return []
    shapes = bench.TREES[tree]
    params = [
        torch.nn.Parameter(torch.randn(shape, device="cuda") * 0.1) for shape in shapes.values()
    ]
    for p in params:
        p.grad = torch.randn_like(p) * 0.01
    hyper = bench.HYPER
    optimizer = torch.optim.AdamW(
        params,
        lr=torch.tensor(hyper["learning_rate"]),
        betas=(hyper["b1"], hyper["b2"]),
        eps=hyper["eps"],
        weight_decay=hyper["weight_decay"],
        fused=True,
        capturable=True,
    )
    for _ in range(3):
        optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    parameters = sum(p.numel() for p in params)
    rows = []
    for name, step in (("torch fused", optimizer.step), ("torch fused, CUDA graph", graph.replay)):
        times = []
        for _ in range(5):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(10):
                step()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 10 / 1e3)
        seconds = statistics.median(times)
        share = 28 * parameters / copy / seconds
        rows.append(bench.Measured(tree, len(shapes), parameters, name, seconds * 1e6, share))
    del optimizer, graph, params
    torch.cuda.empty_cache()
    return rows


def measure_tree(tree, copy):
    if (tree, "optax.adamw") not in SKIPPED and tree != "flat1B":
        check(tree)
    flat = () if tree == "flat1B" else (FLAT,)
    rows = []
    for variant in (*OURS, *flat, "optax.adamw"):
        if (tree, variant) not in SKIPPED:
            rows.append(bench.measure(tree, variant, copy, device_seconds=device_seconds))
            print(bench.format_rows(rows[-1:]).splitlines()[1], flush=True)
    rows += torch_rows(tree, copy)
    print("\n".join(bench.format_rows(rows[-2:]).splitlines()[1:]), flush=True)
    return rows


def measure_sizes(copy):
    """Shares of the copy for one leaf of 2^12 ... 2^30 elements: device time of float32 steps."""
    points = []
    for exponent in range(12, 31, 3):
        name = f"2^{exponent}"
        bench.TREES[name] = {"w": (1 << exponent,)}
        row = bench.measure(name, "float32", copy, device_seconds=device_seconds)
        nbytes = 28 << exponent
        speeds = {
            "wall": nbytes / row.wall_microseconds / 1e3,
            "device": nbytes / row.device_microseconds / 1e3,
        }
        points.append({"elements": 1 << exponent} | speeds)
    return points


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trees", nargs="+", choices=bench.TREES, default=list(bench.TREES))
    parser.add_argument("--copy-elements", type=int, default=1 << 30)
    parser.add_argument("--revision", help="revision of the code to record; default: git's")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/bench_kernel.json"))
    args = parser.parse_args()
    copy = bench.copy_bandwidth(args.copy_elements)
    print(f"in-place copy: {copy / 1e9:.0f} GB/s")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    rows, sizes = [], measure_sizes(copy)
    for tree in args.trees:
        rows += [row._asdict() for row in measure_tree(tree, copy)]
        report.write_run(
            args.out, args.revision, copy_gb_per_second=copy / 1e9, rows=rows, sizes=sizes
        )
    report.plot_bandwidth(args.out, args.out.with_suffix(".png"))
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
