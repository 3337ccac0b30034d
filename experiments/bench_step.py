"""Times whole training steps of a GPT on N GPUs: ours, annotations, and the floor without any.

    python experiments/bench_step.py --rows 'unrolled-8/*' --out runs/bench_step.json
    python experiments/bench_step.py --rows layers --size gpt2-small    # all ways to gather layers
    python experiments/bench_step.py --rows zero1 --tokens 1024,8192    # beside best annotations

A row is WORKLOAD/VARIANT+MODIFIERS; --list prints the known ones and the names of sets, and any
other name that can be parsed is allowed. "unrolled-8x4": unrolled layers, 8 sequences per
micro-batch and device, 4 micro-batches. "scanned-1": a scan over layers. "unrolled" and "scanned":
as many sequences as --tokens says. "step-gpt2xl": only the optimizer step, on a tree of `jdistadam
bench`. --checkpoint says what the backward pass computes again, in all rows.

Each workload has a floor: forward and backward pass with each device's own gradients. All rows of a
workload start with the same random weights and tokens, are compared with optax on the floor's
gradients (step_bench/check.py), and are then timed in turn. If their states do not fit into memory
together, each turn makes its own. Times are medians of the rounds; ratios to the floor and gains
beside annotations are within one round. A profiler trace gives a picture of a step on all GPUs of
the first process, next to --out, and phases (step_bench/trace.py), compared with those predicted
from bytes and bandwidths (step_bench/budget.py). The utilization is that of step_bench/flops.py.

Annotations with "best_flags" try up to eight sets of compiler flags (step_bench/rows.py) for a
moment each. The fastest is the row; the record has all. A row that runs out of memory is left out.
"""

import dataclasses
import gc
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from lm import command_line, power, processes, report
from plan_against_compiler import h200s
from step_bench import budget, chart, flops, model, rows, tables
from step_bench.group import Group, memory_limit, message, peak_bytes

MOST_TORCH_SECONDS = 300


def names(text):
    return text.split(",")


def numbers(text):
    return [int(x) for x in text.split(",")]


def arguments():
    parser = command_line.make_parser(__doc__)
    add = parser.add_argument
    add("--rows", default="unrolled-8/*", help="names or patterns of rows, by commas")
    add("--list", action="store_true", help="print the known rows")
    add("--size", choices=model.SIZES, help="default: gpt-1.3b on GPUs, else tiny")
    add("--length", type=int, help="tokens of a sequence; default: that of the size")
    add("--tokens", type=numbers, default=[], help="per GPU and step, by commas, such as 1024,8192")
    add("--checkpoint", choices=model.CHECKPOINTS, default="none", help="what is computed again")
    add("--flags", type=names, help="what rows with best_flags try, by commas, such as none,early")
    add("--devices", type=int, default=0, help="0: all")
    add("--processes", type=int, help="start so many here, each with one GPU or some CPU devices")
    add("--distributed", nargs="?", const="auto", help="be one of several processes")
    add("--rounds", type=int, default=5)
    add("--trace-steps", type=int, default=3, help="steps that are traced; 0: no trace")
    add("--no-check", action="store_true", help="time without comparing results first")
    add("--jobs", type=int, default=4, help="programs that are compiled at a time")
    add("--cache", help="folder that keeps compiled programs for the next run")
    add("--seconds", type=float, default=float("inf"), help="then begin no rows, rounds or traces")
    add("--torch", nargs="?", const="", help="time torch's FSDP2 too, first; names of variants")
    add("--compile-only", type=int, metavar="N", help="compile for N H200s, of which none need be")
    add("--out", type=pathlib.Path, default=pathlib.Path("runs/bench_step.json"))
    return parser.parse_args()


def make_mesh(args):
    """(mesh, whether it is of GPUs, implementation of attention)."""
    if args.compile_only:
        devices = h200s((1, args.compile_only)).devices.reshape(-1)
        return Mesh(devices, ("data",)), True, "xla"  # without cuDNN
    devices = np.asarray(jax.devices()[: args.devices or None])
    on_gpu = devices[0].platform == "gpu"
    mesh = Mesh(devices, ("data",), axis_types=(AxisType.Auto,))
    return mesh, on_gpu, "cudnn" if on_gpu else "xla"


def run_torch(args):
    """Rows of torch, from their own process, before JAX takes the memory of the GPUs."""
    name, size = make_size(args, on_gpu=True)
    workloads = [group for group in select(args, size) if not group.startswith("step-")]
    script = pathlib.Path(__file__).parent / "step_bench" / "torch_fsdp2.py"
    command = [sys.executable, str(script), "--size", name]
    command += ["--devices", str(args.devices), "--rounds", str(args.rounds), *workloads]
    command += ["--checkpoint", args.checkpoint]
    command += ["--length", str(args.length)] if args.length else []
    command += ["--variants", args.torch] if args.torch else []
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "torch.json"
        process = subprocess.Popen([*command, "--out", str(out)], start_new_session=True)
        try:
            process.wait(min(args.seconds, MOST_TORCH_SECONDS))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # it, and its process for each GPU
            process.wait()
        if process.returncode:
            print(f"torch: exit code {process.returncode}")
        return tables.read(out) if out.exists() else []


def select(args, size):
    """Rows by workload."""
    return rows.select(
        args.rows, tokens=args.tokens, length=size.length, checkpoint=args.checkpoint
    )


def make_size(args, on_gpu):
    """The name of the model, and its sizes."""
    name = args.size or ("gpt-1.3b" if on_gpu else "tiny")
    size = model.SIZES[name]
    return name, dataclasses.replace(size, length=args.length or size.length)


class Run:
    """The results so far, written after every workload: nothing is lost."""

    def __init__(self, args, mesh, name, size):
        self.args, self.mesh, self.begun = args, mesh, time.perf_counter()
        self.found = {
            "size": name,
            "length": size.length,
            "checkpoint": args.checkpoint,
            "devices": mesh.size,
            "processes": jax.process_count(),
            "before": power.snapshot(),
            "rounds": args.rounds,
            "jobs": args.jobs,
            "flops": flops.describe(size, mesh.devices.flat[0].device_kind),
            "bytes_per_second": {},
            "rows": [],
            "gains": [],
            "left_out": [],
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)

    def add(self, records, gains=()):
        """Adds rows, and writes all of them."""
        for record in records:
            tokens = record.get("tokens_per_second")
            share = flops.utilization(tokens, self.found["flops"], self.mesh.size)
            self.found["rows"].append(record | {"model_flops_utilization": share})
        self.found["gains"] += gains
        if processes.is_first():
            self.found["after"] = power.snapshot()
            self.found["peak_bytes"] = None if self.args.compile_only else peak_bytes(self.mesh)
            self.found["seconds"] = time.perf_counter() - self.begun
            report.write_run(self.args.out, self.args.revision, **self.found)

    @property
    def is_late(self):
        return processes.of_first(time.perf_counter() - self.begun) > self.args.seconds

    def measure_bandwidths(self, on_gpu):
        """Measures what predictions need."""
        self.found["bytes_per_second"] = rates = budget.bandwidths(self.mesh, is_small=not on_gpu)
        print({op: f"{rate / 1e9:.0f} GB/s" for op, rate in rates.items()}, flush=True)

    def take(self, group):
        """Compiles, checks and times a workload; if it fails, the next ones follow."""
        args, rates = self.args, self.found["bytes_per_second"]
        try:
            group.compile(args.jobs)
            if not args.compile_only:
                limit = memory_limit(self.mesh)
                group.drop_too_large(limit)
                group.make_data()
                if not args.no_check:
                    group.make_references()
                group.measure(args.rounds, args.trace_steps, 0.92 * limit, lambda: self.is_late)
        except Exception as error:
            for name in [*group.variants]:
                group.drop(name, message(error))
        for row in group.rows if rates else ():
            if row.variant != rows.FLOOR:
                predicted = budget.predict(row, group.setting, rates)
                group.records[row.name]["predicted_ms"] = predicted
        self.add(group.records.values(), () if args.compile_only else group.gains())
        for name, of_gpus in group.timelines.items() if processes.is_first() else ():
            image = args.out.with_suffix(f".{name.replace('/', '_')}.png")
            chart.draw_timeline(of_gpus, name, image)


def join_processes(args):
    processes.join(args.distributed, args.devices)
    if not processes.is_first():
        sys.stdout = open(os.devnull, "w")


def summarize(run):
    """Prints tables and draws a picture; returns whether all rows passed."""
    found = run.found["rows"]
    if processes.is_first():
        print(tables.text(run.found))
        chart.draw(found, run.args.out.with_suffix(".png"))
    wrong = [r["name"] for r in found if not r.get("check", {"passed": True})["passed"]]
    if wrong:
        print("results differ from the reference:", ", ".join(wrong))
    failed = [r["name"] for r in found if "failed" in r]
    if failed:
        print("failed:", ", ".join(failed))
    return not (wrong or failed)


def main():
    args = arguments()
    if args.list:
        print("\n".join((*rows.KNOWN, *rows.SETS)))
        return 0
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    if args.processes and not args.distributed:
        return processes.launch(args.processes, sys.argv)
    if args.distributed:
        join_processes(args)
    if args.torch is not None:  # before JAX takes the memory of the GPUs
        torch_rows = run_torch(args)
    mesh, on_gpu, attention = make_mesh(args)
    name, size = make_size(args, on_gpu)
    groups = select(args, size)
    run = Run(args, mesh, name, size)
    if args.torch is not None:
        run.add(torch_rows)
    if args.cache:
        jax.config.update("jax_compilation_cache_dir", args.cache)
    if args.trace_steps and not args.compile_only:
        run.measure_bandwidths(on_gpu)
    for label, chosen in groups.items():
        if run.is_late:
            run.found["left_out"] += [row.name for row in chosen]
            continue
        print(f"{label}: {len(chosen)} rows", flush=True)
        run.take(Group(chosen, size, mesh, on_gpu, attention, args.flags))
        gc.collect()  # programs and states of this workload
    run.add([])
    return int(not summarize(run))


if __name__ == "__main__":
    sys.exit(main())
