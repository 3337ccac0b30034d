"""Times one optimizer step on one GPU: all trees and variants, against optax, torch and a copy.

    python experiments/bench_kernel.py --out runs/bench_kernel.json

jdistadam/bench.py explains the figures; its short form is `python -m jdistadam bench`. Here the
profiler gives the device time, and calls of ours and of optax alternate for the host's time.
torch.optim.AdamW(fused=True) is timed if torch is installed, called and as a CUDA graph. Clock and
power of the GPU are recorded: at its power limit it slows down.
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
from lm import report
from lm.power import PowerLog

from jdistadam.tools import bench

OURS = (
    "float32",
    "bf16, float32 main",
    "bf16, remainder16",
    "bf16, stochastic, bf16 moments",
    "bf16, remainder16, 8-bit moments",
    "bf16, stochastic, 8-bit moments",
    "bf16, remainder16, 16-bit moments",
    "bf16, stochastic, 16-bit moments",
)
FLAT = "float32, flat, clipped"
UNLOOPED = {("many1000x4k", "optax.adamw")}  # XLA does not compile the loop in reasonable time


def device_seconds(program, args):
    """Time of all kernels of one run, from the profiler.

    Copies are left out. A copy in the step itself would show only in the wall time.
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


def torch_rows(tree, copy):
    """Yields torch's fused AdamW, called and replayed from a CUDA graph, and 8-bit AdamWs."""
    try:
        import torch
    except ImportError:
        print("torch is not installed: no rows for it")
        return
    shapes = bench.TREES[tree]
    params = [
        torch.nn.Parameter(torch.randn(shape, device="cuda") * 0.1) for shape in shapes.values()
    ]
    for p in params:
        p.grad = torch.randn_like(p) * 0.01
    hyper = bench.HYPER
    plain = dict(betas=(hyper["b1"], hyper["b2"]), eps=hyper["eps"])
    plain |= dict(weight_decay=hyper["weight_decay"])
    optimizer = torch.optim.AdamW(
        params, lr=torch.tensor(hyper["learning_rate"]), **plain, fused=True, capturable=True
    )
    for _ in range(3):
        optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    parameters = sum(p.numel() for p in params)

    def timed(name, step, nbytes):
        seconds = torch_seconds(step)
        share = nbytes * parameters / copy / seconds
        return bench.Measured(tree, len(shapes), parameters, name, seconds * 1e6, share)

    yield timed("torch fused", optimizer.step, 28)
    yield timed("torch fused, CUDA graph", graph.replay, 28)
    for name, nbytes, make in eight_bits(hyper["learning_rate"], plain):
        for p in params:  # as ours: parameters and gradients in bfloat16
            p.grad = None
            p.data = p.data.bfloat16()
            p.grad = torch.randn_like(p) * 0.01
        yield timed(name, make(params).step, nbytes)
    del optimizer, graph, params
    torch.cuda.empty_cache()


def eight_bits(learning_rate, plain):
    """Name, bytes per parameter and factory of other installed AdamWs with 8-bit moments."""
    nbytes = 2 + 4 + 4 + 2 * 2 * 4 / 256
    try:
        from bitsandbytes.optim import AdamW8bit

        yield "bitsandbytes AdamW8bit", nbytes, lambda p: AdamW8bit(p, lr=learning_rate, **plain)
    except ImportError:
        print("bitsandbytes is not installed: no row for it")
    try:
        from torchao.optim import AdamW8bit as Torchao

        def make(p):
            return Torchao(p, lr=learning_rate, bf16_stochastic_round=True, **plain)

        yield "torchao AdamW8bit", nbytes, make
    except ImportError:
        print("torchao is not installed: no row for it")


def torch_seconds(step):
    """Seconds per step of ten steps; the median of five runs."""
    import torch

    step()
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(10):
            step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 10 / 1e3)
    return statistics.median(times)


def variants_of(tree):
    flat = () if tree == "flat1B" else (FLAT,)
    return [*OURS, *flat, "optax.adamw"]


def measure_tree(tree, variants, copy, hosts):
    """Yields rows."""
    for variant in (v for v in variants if (tree, v) not in UNLOOPED):
        row = bench.measure(tree, variant, copy, device_seconds=device_seconds)
        yield row._replace(**hosts.get(variant, {}))
    yield from torch_rows(tree, copy)


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
    known = [*OURS, FLAT, "optax.adamw"]
    parser.add_argument("--variants", nargs="+", choices=known, help="these and torch alone")
    parser.add_argument("--revision", help="revision of the code to record; default: git's")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/bench_kernel.json"))
    args = parser.parse_args()
    copy = bench.copy_bandwidth(1 << 30)
    print(f"in-place copy: {copy / 1e9:.0f} GB/s", flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    rows, power, hosts = [], {}, {}
    found = dict(copy_gb_per_second=copy / 1e9, rows=rows, power=power, hosts=hosts)
    for tree in args.trees:
        with PowerLog() as log:
            variants = [v for v in variants_of(tree) if v in (args.variants or variants_of(tree))]
            called = [v for v in variants if v not in OURS[1:]]
            hosts[tree] = bench.measure_hosts(tree, called, repeats=40)
            print(hosts[tree], flush=True)
            for row in measure_tree(tree, variants, copy, hosts[tree]):
                rows.append(row._asdict())
                print(bench.format_rows([row]).splitlines()[1], flush=True)
                report.write_run(args.out, args.revision, **found)  # after each: nothing is lost
        power[tree] = log.summary()
        print(power[tree], flush=True)
        report.write_run(args.out, args.revision, **found)
    if args.variants:
        return
    report.write_run(args.out, args.revision, **found, sizes=measure_sizes(copy))
    report.plot_bandwidth(args.out, args.out.with_suffix(".png"))
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
