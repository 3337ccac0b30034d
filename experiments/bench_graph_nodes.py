"""What a call of a step costs the host, with ``graph_nodes`` and without, on one GPU.

    python experiments/bench_graph_nodes.py --out experiments/results/bench_graph_nodes/h100.json

XLA makes a CUDA graph of five operations or more; a jitted ``fused_adamw`` step has three, and two
that do nothing make it a graph. Compared are steps of ``jit_step`` as they are, without the two,
and without them where XLA is told to make graphs of any size. A call is timed until it returns, the
device being idle; and 30 calls in a row, per call, until all have ended. Variants run in turns.
"""

import argparse
import pathlib
import statistics
import time

import jax
from lm import report

import jdistadam as jda
from jdistadam.drop_in import step
from jdistadam.tools import bench

ANY_SIZE = {"xla_gpu_graph_min_graph_size": 1}
VARIANTS = {  # whether there are the two operations, and XLA's options
    "as it is": (True, {}),
    "without": (False, {}),
    "without, graphs of any size": (False, ANY_SIZE),
}
IN_A_ROW = 30


class Program:
    """A jitted step of params and a state that all programs of a tree pass on to each other."""

    def __init__(self, has_nodes, options, held):
        graph_nodes = step.transformed_adam.graph_nodes
        if not has_nodes:
            step.transformed_adam.graph_nodes = lambda rows: rows
        try:
            jax.clear_caches()  # the step of all optimizers is one jitted function
            tx = jda.fused_adamw(1e-3, weight_decay=0.1)
            params, state, grads = held
            step_fn = jda.jit_step(tx, compiler_options=options or None)
            self.run = step_fn.lower(grads, state, params).compile()
        finally:
            step.transformed_adam.graph_nodes = graph_nodes
        self.held = held
        self.hosts, self.walls = [], []

    def call(self):
        params, state, grads = self.held
        self.held[:2] = self.run(params, state, grads, {})

    def time(self):
        jax.block_until_ready(self.held)
        began = time.perf_counter()
        self.call()
        self.hosts.append(time.perf_counter() - began)
        jax.block_until_ready(self.held)
        began = time.perf_counter()
        for _ in range(IN_A_ROW):
            self.call()
        jax.block_until_ready(self.held)
        self.walls.append((time.perf_counter() - began) / IN_A_ROW)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--trees", nargs="+", default=["gpt2s", "gpt2xl"], choices=bench.TREES)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--revision", help="revision of the code to record; default: git's")
    args = parser.parse_args()
    rows = []
    for tree in args.trees:
        tx = jda.fused_adamw(1e-3, weight_decay=0.1)
        params, _, grads = bench.fresh_arrays(tree, "float32", None)
        held = [params, jax.jit(tx.init)(params), grads]
        programs = {name: Program(*given, held) for name, given in VARIANTS.items()}
        del params, grads
        for turn in range(args.rounds + 2):
            for program in list(programs.values())[:: -1 if turn % 2 else 1]:
                program.time()
        for name, program in programs.items():
            rows.append(
                {
                    "tree": tree,
                    "variant": name,
                    "host_microseconds": 1e6 * statistics.median(program.hosts[2:]),
                    "wall_microseconds": 1e6 * statistics.median(program.walls[2:]),
                }
            )
            print(rows[-1], flush=True)
    report.write_run(args.out, args.revision, rows=rows, rounds=args.rounds)


if __name__ == "__main__":
    main()
