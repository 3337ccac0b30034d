"""Times whole training steps of a GPT on N GPUs: ours, annotations, and the floor without any.

    python experiments/bench_step.py --rows 'unrolled-8/*' --out runs/bench_step.json
    python experiments/bench_step.py --rows layers --size gpt2-small    # all ways to gather layers

A row is WORKLOAD/VARIANT+MODIFIERS; --list prints the known ones, and any other name that can be
parsed is allowed. "unrolled-8x4": unrolled layers, 8 sequences per micro-batch and device, 4
micro-batches; from 8 sequences on, blocks are rematerialized in the backward pass. "scanned-1": a
scan over layers. "step-gpt2xl": only the optimizer step, on a tree of `jdistadam bench`.

Each workload has a floor: forward and backward pass with each device's own gradients. All rows of a
workload start with the same random weights and tokens, are compared with optax on the floor's
gradients (step_bench/check.py), and are then timed in turn, as many together as fit into memory.
Times are medians of the rounds; ratios to the floor are within one round. A profiler trace gives
phases (step_bench/trace.py), compared with those predicted from bytes and bandwidths
(step_bench/budget.py).
"""

import os
import pathlib
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from lm import command_line, power, processes, report
from plan_against_compiler import h200s
from step_bench import budget, chart, model, rows, tables
from step_bench.group import Group, memory_limit, peak_bytes


def arguments():
    parser = command_line.make_parser(__doc__)
    add = parser.add_argument
    add("--rows", default="unrolled-8/*", help="names or patterns of rows, by commas")
    add("--list", action="store_true", help="print the known rows")
    add("--size", choices=model.SIZES, help="default: gpt-1.3b on GPUs, else tiny")
    add("--devices", type=int, default=0, help="0: all")
    add("--processes", type=int, help="start so many here, each with one GPU or some CPU devices")
    add("--distributed", nargs="?", const="auto", help="be one of several processes")
    add("--rounds", type=int, default=5)
    add("--trace-steps", type=int, default=3, help="steps that are traced; 0: no trace")
    add("--no-check", action="store_true", help="time without comparing results first")
    add("--jobs", type=int, default=4, help="programs that are compiled at a time")
    add("--cache", help="folder that keeps compiled programs for the next run")
    add("--seconds", type=float, default=float("inf"), help="begin no batch of rows after so many")
    add("--torch", nargs="?", const="", help="time torch's FSDP2 too, first; names of variants")
    add("--attention", choices=("cudnn", "xla"), help="default: cudnn on GPUs that are there")
    add("--compile-only", type=int, metavar="N", help="compile for N H200s, of which none need be")
    add("--out", type=pathlib.Path, default=pathlib.Path("runs/bench_step.json"))
    return parser.parse_args()


def make_mesh(args):
    """(mesh, whether it is of GPUs, implementation of attention)."""
    if args.compile_only:
        devices = h200s((1, args.compile_only)).devices.reshape(-1)
        return Mesh(devices, ("data",)), True, args.attention or "xla"  # without cuDNN
    devices = np.asarray(jax.devices()[: args.devices or None])
    on_gpu = devices[0].platform == "gpu"
    mesh = Mesh(devices, ("data",), axis_types=(AxisType.Auto,))
    return mesh, on_gpu, args.attention or ("cudnn" if on_gpu else "xla")


def run_torch(args, groups):
    """Rows of torch, from their own process, before JAX takes the memory of the GPUs."""
    workloads = [group for group in groups if not group.startswith("step-")]
    script = pathlib.Path(__file__).parent / "step_bench" / "torch_fsdp2.py"
    command = [sys.executable, str(script), "--size", args.size or "gpt-1.3b"]
    command += ["--devices", str(args.devices), "--rounds", str(args.rounds), *workloads]
    command += ["--variants", args.torch] if args.torch else []
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "torch.json"
        done = subprocess.run([*command, "--out", str(out)])
        if done.returncode:
            print(f"torch: exit code {done.returncode}, no rows")
            return []
        return tables.read(out)


class Run:
    """The results so far, written after every batch of rows: nothing is lost."""

    def __init__(self, args, mesh, size):
        self.args, self.mesh, self.begun = args, mesh, time.perf_counter()
        self.found = {
            "size": size,
            "devices": mesh.size,
            "processes": jax.process_count(),
            "before": power.snapshot(),
            "rounds": args.rounds,
            "jobs": args.jobs,
            "bytes_per_second": {},
            "rows": [],
            "left_out": [],
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)

    def write(self):
        if not processes.is_first():
            return
        self.found["after"] = power.snapshot()
        self.found["peak_bytes"] = None if self.args.compile_only else peak_bytes(self.mesh)
        self.found["seconds"] = time.perf_counter() - self.begun
        report.write_run(self.args.out, self.args.revision, **self.found)

    @property
    def is_late(self):
        return processes.of_first(time.perf_counter() - self.begun) > self.args.seconds

    def take(self, group):
        """Checks and times a compiled group, a batch at a time."""
        args, data = self.args, group.data()
        references = {} if args.no_check else group.references(data)
        for names in group.batches(0.92 * memory_limit(self.mesh)):
            if self.is_late:
                self.found["left_out"] += names
                continue
            group.measure(names, data, references, args.rounds, args.trace_steps)
            self.found["rows"] += [dict(group.records[name]) for name in names]
            self.write()
        failed = (name for name, record in group.records.items() if "failed" in record)
        written = {row["name"] for row in self.found["rows"]}
        self.found["rows"] += [group.records[name] for name in failed if name not in written]


def predict(group, rates):
    for row in group.rows:
        record = group.records[row.name]
        if row.variant != rows.FLOOR:
            record["predicted_ms"] = budget.predict(row, group.setting, rates)


def main():
    args = arguments()
    if args.list:
        print("\n".join(rows.KNOWN))
        return 0
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    if args.processes and not args.distributed:
        return processes.launch(args.processes, sys.argv)
    if args.distributed:
        processes.join(args.distributed, args.devices)
        if not processes.is_first():
            sys.stdout = open(os.devnull, "w")
    groups = rows.select(args.rows)
    torch_rows = run_torch(args, groups) if args.torch is not None else []
    mesh, on_gpu, attention = make_mesh(args)
    name = args.size or ("gpt-1.3b" if on_gpu else "tiny")
    run = Run(args, mesh, name)
    run.found["rows"] += torch_rows
    if args.cache:
        jax.config.update("jax_compilation_cache_dir", args.cache)
    if not args.compile_only:
        rates = budget.bandwidths(mesh, is_small=not on_gpu)
        run.found["bytes_per_second"] = rates
        print({op: f"{rate / 1e9:.0f} GB/s" for op, rate in rates.items()}, flush=True)
    for label, chosen in groups.items():
        if run.is_late:
            run.found["left_out"] += [row.name for row in chosen]
            continue
        print(f"{label}: {len(chosen)} rows", flush=True)
        group = Group(chosen, model.SIZES[name], mesh, on_gpu, attention)
        group.compile(args.jobs)
        if args.compile_only:
            run.found["rows"] += list(group.records.values())
            continue
        predict(group, rates)
        run.take(group)
    run.write()
    if processes.is_first():
        print(tables.text(run.found))
        chart.draw(run.found["rows"], args.out.with_suffix(".png"))
    wrong = [r["name"] for r in run.found["rows"] if not r.get("check", {"passed": True})["passed"]]
    if wrong:
        print("results differ from the reference:", ", ".join(wrong))
    failed = [r["name"] for r in run.found["rows"] if "failed" in r]
    if failed:
        print("failed:", ", ".join(failed))
    return int(bool(wrong or failed))


if __name__ == "__main__":
    sys.exit(main())
