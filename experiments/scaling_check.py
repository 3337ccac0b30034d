"""What jda.scaling predicts beside what was measured on 1, 2 and 4 H200s.

    python experiments/scaling_check.py --out experiments/results/scaling_check.json

Needs no GPU: it reads the recorded runs. Nothing is fitted but two things, each once:

- rows of bench_step: the model's time is that of the floor, and the bandwidths are those of a copy
  and of an all-gather, all measured in the same run;
- rows of train_lm: the rate of operations is that of one run on one GPU ("fitted"), bandwidths are
  those of bench_step on two GPUs.

It also writes the table by which docs/scaling.md extrapolates to 1024 GPUs.
"""

import argparse
import functools
import json
import pathlib
import shlex
import statistics
import sys

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from lm import gpt, markdown, report
from step_bench import model, rows
from step_bench.variants import make_tx

import jdistadam as jda
import train_lm
from jdistadam.tools import bench

RESULTS = pathlib.Path(__file__).parent / "results"
STEPS = (
    "bench_step_h200_x2",
    "bench_step_1_sequence_h200_x2",
    "bench_step_alone_h200_x2",
    "bench_step_scanned_options_h200_x2",
)
FITTED = "train_lm_h200"
TRAINED = (
    FITTED,
    "report_nonfinite_h200/without_1",
    "lm_axes_h200_x2/2x1_jdistadam",
    "train_lm_h200_x4",
    *(f"strategies_h200_x4/{name}_{n}" for name in rows.STRATEGIES[:3] for n in (1, 2)),
    "precision_h200_x4/float32_wire",
    "processes_h200_x4/one",
    "processes_h200_x4/four",
    "scan_h200_x4/optim_grads",
    "scan_h200_x4/optim_grads_params",
)
NO_MODEL = 1e-12  # seconds: a step alone
NETWORK = 50e9  # bytes a second per GPU: a port of 400 Gbit/s each
EXTRAPOLATED = {
    "optim": ("optim", {}, None),
    "optim, float32 sums": ("optim", {"float32sum"}, None),
    "optim, replicas of 8": ("optim", {}, 8),
    "optim_grads_params": ("optim_grads_params", {}, None),
    "optim_grads_params, replicas of 8": ("optim_grads_params", {}, 8),
}


def read(name):
    return json.loads((RESULTS / name).read_text())


def machine_of(run):
    """Of a run of bench_step: bandwidths measured in it."""
    rates = run["results"]["bytes_per_second"]
    return jda.Machine(rates["copy"], rates["all-gather"], network_bandwidth=NETWORK)


def record(name, devices, row, measured_ms, held_measured, **more):
    """One line of the results."""
    time = row.time
    return {
        "name": name,
        "devices": devices,
        "measured_ms": measured_ms,
        "predicted_ms": 1e3 * time.step,
        "least_ms": 1e3 * time.least,
        "most_ms": 1e3 * time.most,
        "relative_error": 1e3 * time.step / measured_ms - 1,
        "model_ms": 1e3 * time.model,
        "kernels_ms": {k: 1e3 * x for k, x in time.kernels.items()},
        "collectives_ms": {k: 1e3 * x for k, x in time.collectives.items()},
        "exposed_ms": 1e3 * time.exposed,
        "means": row.plan.communication.means,
        "held_planned": row.plan.held_bytes,
        "held_measured": held_measured,
        **more,
    }


def make_step_tx(row, mesh):
    stacked = model.is_stacked if not row.is_alone and row.workload.is_scanned else None
    return make_tx(mesh, row.variant, row.modifiers, stacked=stacked)


def bfloat16(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), tree)


def step_shapes(row, size):
    if row.is_alone:
        return {
            k: jax.ShapeDtypeStruct(v, jnp.bfloat16) for k, v in bench.TREES[row.group[5:]].items()
        }
    return bfloat16(model.shapes(model.SIZES[size], row.workload.is_scanned))


def check_steps(name):
    """The rows of ours in a run of bench_step."""
    run = read(f"{name}.json")
    found, n = run["results"], run["results"]["devices"]
    floors = {
        r["name"].split("/")[0]: r["ms"] for r in found["rows"] if r["name"].endswith("/floor")
    }
    for measured in found["rows"]:
        row = rows.parse(measured["name"])
        if row.variant not in rows.STRATEGIES or "ms" not in measured:
            continue
        (predicted,) = jda.scaling(
            step_shapes(row, found["size"]),
            functools.partial(make_step_tx, row),
            machine_of(run),
            model_seconds=NO_MODEL if row.is_alone else floors[row.group] / 1e3,
            recomputes=not row.is_alone and row.workload.recomputes,
            accumulate_steps=1 if row.is_alone else row.workload.accumulate_steps,
            devices=(n,),
        ).rows
        phases = measured.get("phases", {})
        sent = {k: phases[k] for k in phases if k in (*predicted.time.collectives, "peer copies")}
        # Arguments: what is held, and the batch or, of a step alone, the gradients.
        argument = measured["argument_bytes"]
        yield record(
            row.name, n, predicted, measured["ms"], None, run=name,
            exposed_measured_ms=sum(phase["exposed_ms"] for phase in sent.values()),
            argument_bytes=argument,
        )  # fmt: skip


def check_trained(names, flops=None):
    """Runs of train_lm; the first is that of which the rate of operations is taken."""
    machine = machine_of(read("bench_step_h200_x2.json"))
    for name in names:
        run = read(f"{name}/run.json")
        found = run["results"]
        argv = shlex.split(run["command"])[2:]
        args = train_lm.parse_args([x for x in argv])
        args.param_dtype = args.param_dtype or "bfloat16"
        config = config_of(args, found)
        tokens = found["tokens"] / args.steps / found["devices"]
        measured = found["tokens"] / args.steps / found["tokens_per_second"]
        predict = functools.partial(
            predict_trained, args, config, machine, found["devices"], tokens
        )
        if flops is None:
            kernels = predict(1.0).time.kernels
            flops = 6 * found["parameters"] * tokens / (measured - sum(kernels.values()))
        recomputes = 8 if args.scan else 6
        seconds = recomputes * found["parameters"] * tokens / flops
        yield record(
            name, found["devices"], predict(seconds), 1e3 * measured,
            found["state_bytes_per_device"], run=name, flops=flops, is_fitted=name == FITTED,
        )  # fmt: skip


def config_of(args, found):
    chosen = {k: getattr(args, k) for k in ("layers", "width", "batch") if getattr(args, k)}
    return gpt.GPTConfig(**(vars(gpt.PRESETS[found["preset"]]) | chosen))


def predict_trained(args, config, machine, devices, tokens, seconds):
    """One row; over XLA, since these runs are older than peer memory."""
    net = gpt.GPT(config, jnp.bfloat16, args.scan)
    example = jnp.zeros((1, config.length), jnp.int32)
    params = jax.eval_shape(net.init, jax.random.key(0), example)["params"]
    low, vector = train_lm.DTYPES[args.param_dtype], train_lm.DTYPES[args.vector_dtype]
    shapes = jax.tree.map(
        lambda x, is_matrix: jax.ShapeDtypeStruct(x.shape, low if is_matrix else vector),
        params, train_lm.matrices(params),
    )  # fmt: skip
    policy = jda.MixedPrecisionPolicy(
        main_grads_dtype=train_lm.DTYPES[args.main_grads_dtype],
        grad_comm_dtype=train_lm.DTYPES[args.grad_comm_dtype],
        grad_reduce_dtype=args.grad_reduce_dtype,
    )
    gathers = args.scan and args.strategy == "optim_grads_params"

    def make(mesh: Mesh):
        return jda.distributed_fused_adamw(
            1e-3, b2=args.b2, weight_decay=0.1, mesh=mesh, policy=policy, communication="xla",
            replica_axis="replica" if args.replicas > 1 else None,
            sharding_strategy=args.strategy, max_grad_norm=args.max_grad_norm,
            stacked=train_lm.is_stacked if gathers else None,
        )  # fmt: skip

    (row,) = jda.scaling(
        shapes, make, machine, tokens=tokens, model_seconds=seconds, recomputes=args.scan,
        accumulate_steps=args.accumulate_steps, devices=(devices,),
        devices_per_replica=devices // args.replicas if args.replicas > 1 else None,
    ).rows  # fmt: skip
    return row


def check_memory():
    """Bytes between steps that an allocator counted, without a model."""
    from plan_against_compiler import POLICIES, make_tx as make_alone

    run = read("plan_memory_h200_x4.json")["results"]
    tree = {k: jax.ShapeDtypeStruct(s, jnp.bfloat16) for k, s in bench.TREES[run["tree"]].items()}
    for row in run["rows"]:
        make = functools.partial(
            make_alone, strategy=row["strategy"], policy=POLICIES[row["policy"]]
        )
        (found,) = jda.scaling(
            tree, make, jda.Machine(1e12, 1e11), model_seconds=NO_MODEL, devices=(4,),
            devices_per_replica=4,
        ).rows  # fmt: skip
        yield {
            "name": f"{row['strategy']}, {row['policy']}",
            "held_planned": found.plan.held_bytes,
            "held_measured": row["held_measured"],
            "step_planned": found.plan.buffer_bytes,
            "step_measured": row["temporary_measured"],
        }


def extrapolate():
    """The 1.3e9 model of bench_step to 1024 GPUs, with what two of them measured."""
    run = read("bench_step_h200_x2.json")
    results = {r["name"]: r for r in run["results"]["rows"]}
    tokens = 8 * model.SIZES["gpt-1.3b"].length
    tables = {}
    for label, (strategy, modifiers, per_replica) in EXTRAPOLATED.items():
        is_scanned = strategy == "optim_grads_params"
        group = "scanned-8" if is_scanned else "unrolled-8"
        shapes = bfloat16(model.shapes(model.SIZES["gpt-1.3b"], is_scanned))

        def make(mesh, strategy=strategy, modifiers=modifiers, is_scanned=is_scanned):
            axis = "replica" if "replica" in mesh.axis_names else None
            stacked = model.is_stacked if is_scanned else None
            return make_tx(mesh, strategy, modifiers, stacked=stacked, replica_axis=axis)

        tables[label] = jda.scaling(
            shapes, make, machine_of(run), tokens=tokens, recomputes=True,
            model_seconds=results[f"{group}/floor"]["ms"] / 1e3, devices_per_replica=per_replica,
        )  # fmt: skip
    return tables


def table(found):
    """Measured beside predicted."""
    titles = ("row", "GPUs", "measured ms", "predicted ms", "from", "to", "error")
    cells = [
        (
            r["name"], f"{r['devices']}", f"{r['measured_ms']:.2f}", f"{r['predicted_ms']:.2f}",
            f"{r['least_ms']:.2f}", f"{r['most_ms']:.2f}",
            "fitted" if r.get("is_fitted") else f"{r['relative_error']:+.1%}",
        )
        for r in found
    ]  # fmt: skip
    return markdown.table(titles, cells)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--revision", help="revision of the code to record; default: git's")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/scaling_check.json"))
    args = parser.parse_args()
    steps = [row for name in STEPS for row in check_steps(name)]
    trained = list(check_trained(TRAINED))
    memory = list(check_memory())
    tables = extrapolate()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    report.write_run(
        args.out, args.revision, steps=steps, trained=trained, memory=memory,
        extrapolated={name: found.table() for name, found in tables.items()},
    )  # fmt: skip
    parts = [table(steps), table(trained)]
    for rows_ in (steps, trained):
        errors = [abs(r["relative_error"]) for r in rows_ if not r.get("is_fitted")]
        parts.append(
            f"{len(errors)} rows: median of the absolute error {statistics.median(errors):.1%}, "
            f"largest {max(errors):.1%}"
        )
    for name, found in tables.items():
        titles, *cells = found.table()
        parts.append(f"### {name}\n\n{markdown.table(titles, cells)}")
    text = "\n\n".join(parts) + "\n"
    args.out.with_suffix(".md").write_text(text)
    print(text)
    for row in memory:
        print(row)


if __name__ == "__main__":
    sys.exit(main())
