"""How much faster steps are with vectors of the parameters behind a barrier, as in ``train_step``.

    python experiments/vectors_behind_barrier.py --tokens 32768 --out runs/vectors.json

If the scale of a norm is an argument of a program, XLA for GPUs multiplies by it within each matrix
product that takes the result. Rows are those of bench_step.py, each compiled twice: as it is, and
with vectors as arguments. All are timed in turn, and every turn makes its state; "percent" is how
much longer the second takes, round by round. Two more steps are traced.
"""

import contextlib
import os
import pathlib

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from lm import command_line, power, report
from step_bench import model, rows, tables, variants
from step_bench.group import Group

from jdistadam.training import local_gradients

ROWS = "unrolled/annotated_zero1+first_dim+clip,unrolled/optim+float32sum+clip"
BEHIND, ARGUMENTS = "behind_barrier", "as_arguments"
SECONDS, TRACED_STEPS = 0.7, 2
BARRIERS = variants.no_arguments, local_gradients._no_argument


def arguments():
    parser = command_line.make_parser(__doc__)
    parser.add_argument("--rows", default=ROWS, help="names of rows of bench_step.py, by commas")
    parser.add_argument("--tokens", type=int, required=True, help="per GPU and step")
    parser.add_argument("--size", choices=model.SIZES, default="gpt-1.3b")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    return parser.parse_args()


def use(way):
    """Compiles what follows with vectors behind a barrier, or as arguments."""
    itself = lambda x: x  # noqa: E731
    ways = {BEHIND: BARRIERS, ARGUMENTS: (itself, itself)}
    variants.no_arguments, local_gradients._no_argument = ways[way]


def make_groups(args, mesh, on_gpu):
    """Compiled rows, for each way."""
    size, groups = model.SIZES[args.size], {}
    (chosen,) = rows.select(args.rows, tokens=[args.tokens], length=size.length).values()
    for way in (BEHIND, ARGUMENTS):
        use(way)
        groups[way] = Group(chosen, size, mesh, on_gpu, "cudnn" if on_gpu else "xla")
        groups[way].compile(os.cpu_count())
        groups[way].make_data()
        groups[way].keeps_states = False
    return groups


def turn(groups, name, way, steps):
    use(way)
    return groups[way].turn(name, steps)


def measure(groups, rounds):
    """ms of each row in each way, round by round."""
    keys = [(name, way) for name in groups[BEHIND].variants for way in groups]
    steps = {key: groups[key[1]].steps_in(SECONDS, turn(groups, *key, 1)) for key in keys}
    found = {name: {way: [] for way in groups} for name, _ in keys}
    for i in range(rounds + 1):  # the first one warms up
        for name, way in keys[:: (-1) ** i]:
            ms = 1e3 * turn(groups, name, way, steps[name, way])
            found[name][way] += [ms] if i else []
    return found


def traced(group, name):
    """Phases of a step on each GPU."""
    group.trace(name, TRACED_STEPS)
    record = group.records[name]
    return [record["phases"], *record["phases_of_other_gpus"]]


def main():
    args = arguments()
    mesh = Mesh(np.asarray(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
    on_gpu = mesh.devices.flat[0].platform == "gpu"
    groups = make_groups(args, mesh, on_gpu)
    with power.PowerLog() if on_gpu else contextlib.nullcontext() as log:
        times = measure(groups, args.rounds)
    found = []
    for name, ways in times.items():
        behind, as_arguments = ({"rounds_ms": ways[way]} for way in (BEHIND, ARGUMENTS))
        row = {"name": name, **tables.gain(as_arguments, behind)}
        for way, group in groups.items():
            use(way)
            row[way] = {"rounds_ms": ways[way]}
            row[way] |= {"phases_of_gpus": traced(group, name)} if on_gpu else {}
        found.append(row)
        print(f"{name:60} {row['percent']:+.2f} %", flush=True)
    report.write_run(
        args.out, args.revision, tokens=args.tokens, size=args.size, devices=mesh.size,
        power=log and log.summary(), rows=found,
    )  # fmt: skip


if __name__ == "__main__":
    main()
