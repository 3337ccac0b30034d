"""The memory of a step with whole and with sharded parameters, and which gathers overlap products.

    python experiments/gathered_once.py --out experiments/results/gathered_once/h200/default.json

A GPT in bfloat16 with float32 main parameters, compiled for eight H200s that need not exist:
"optim", and "optim_grads_params" with reshard_after_forward=False, which gathers once. With 8
sequences blocks are rematerialized in the backward pass. A gather counts as overlapped if other
instructions run between its start and its end.
"""

import pathlib

import jax
from jax.sharding import Mesh
from lm import command_line, report
from plan_against_compiler import h200s
from step_bench import model, variants

from jdistadam.tools import hlo

SIZE = model.Size(layers=6, width=1024, heads=16, vocabulary=8192, length=256)
TWO_AT_A_TIME = {"xla_gpu_experimental_parallel_collective_overlap_limit": 2}
SHARDED = "optim_grads_params"
ROWS = [  # workload, strategy, compiler options
    (workload, strategy, options)
    for workload in ("unrolled-2", "unrolled-8", "unrolled-8x4")
    for strategy, options in (("optim", {}), (SHARDED, {}), (SHARDED, TWO_AT_A_TIME))
]


def compile_row(mesh, workload, strategy, options):
    checkpoint = "none" if workload == "unrolled-2" else "blocks"
    setting = variants.Setting(SIZE, model.Workload.parse(workload, checkpoint), mesh, "xla")
    modifiers = {"gathered_once"} if strategy == SHARDED else set()
    program = variants.Ours(setting, strategy, modifiers, options).lower().compile()
    memory = program.memory_analysis()
    gathers = [c for c in hlo.collectives_in(program.as_text()) if c.op == "all-gather"]
    return {
        "workload": workload,
        "strategy": strategy,
        "options": options,
        "parameters": sum(x.size for x in jax.tree.leaves(setting.shapes)),
        "arguments": memory.argument_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "peak": memory.peak_memory_in_bytes,
        "gathers": len(gathers),
        "beside": sum(c.is_async for c in gathers),
    }


def main():
    parser = command_line.make_parser(__doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args()
    mesh = Mesh(h200s((1, 8)).devices.reshape(-1), ("data",))
    rows = []
    for row in ROWS:
        rows.append(compile_row(mesh, *row))
        print({k: v for k, v in rows[-1].items() if k != "parameters"}, flush=True)
    report.write_run(args.out, args.revision, rows=rows)


if __name__ == "__main__":
    main()
