"""Compares predictions of predict/scaling.py with measurements on 1, 2 and 4 H200s.

    python experiments/scaling_check.py --out experiments/results/scaling_check/h200/default.json

Needs no GPU: it reads the recorded runs, and fills in the tables of predict/README.md. Constants do
not come from the rows that they predict:

- rows of bench_step: the model's time is that of the floor, bandwidths are those of a copy and of
  an all-gather, all measured in the same run; a step alone has no model. Rows over peer memory are
  left out: they were measured when a kernel read the gradients of all GPUs;
- rows of train_lm: the rate of operations is that of one run of the same model, which is marked
  "fitted", and bandwidths are those of bench_step on two GPUs.
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
import plan_against_compiler
import train_lm
from jax.sharding import Mesh
from lm import gpt, markdown, report
from predict.machine import Machine
from predict.scaling import scaling
from step_bench import budget, model, rows
from step_bench.variants import make_tx

import jdistadam as jda
from jdistadam.tools import bench

RESULTS = pathlib.Path(__file__).resolve().parent / "results"
RECORDED = RESULTS / "scaling_check/h200/default.json"
DOCS = RESULTS.parent / "predict" / "README.md"
STEPS = (
    "bench_step/h200_x2/default",
    "bench_step/h200_x2/4_micro_batches_apart",
    "bench_step/h200_x2/alone",
)
# For each model the run that gives the rate, and those that it predicts.
SMALL = (
    "train_lm/h200/jdistadam",
    "train_lm/h200/report_nonfinite/without_1",
    "train_lm/h200_x2/axes/2x1_jdistadam",
    "train_lm/h200_x4/jdistadam",
    *(f"train_lm/h200_x4/strategies/{name}_{n}" for name in rows.STRATEGIES[:3] for n in (1, 2)),
    "precision/h200_x4/default/float32_communication",
    "train_lm/h200_x4/processes/one",
    "train_lm/h200_x4/processes/four",
)
SCANNED = ("train_lm/h200_x4/scan/optim_grads", "train_lm/h200_x4/scan/optim_grads_params")
NO_MODEL = 1e-12  # seconds: a step alone
NETWORK = 50e9  # bytes per second per GPU: a port of 400 Gbit/s each
EXTRAPOLATED = {
    "optim": ("optim", set(), None),
    "optim, float32 sums": ("optim", {"float32sum"}, None),
    "optim, replicas of 8": ("optim", set(), 8),
    "optim_grads_params": ("optim_grads_params", set(), None),
    "optim_grads_params, replicas of 8": ("optim_grads_params", set(), 8),
}


def read(name):
    return json.loads((RESULTS / name).read_text())


def machine_of(run):
    """The bandwidths that a run of bench_step measured."""
    rates = run["results"]["bytes_per_second"]
    return Machine(rates["copy"], rates["all-gather"], network_bandwidth=NETWORK)


def record(name, devices, row, measured_ms, **more):
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
        "means": row.plan.communication.transport,
        "held_planned": row.plan.held_bytes,
        **more,
    }


def tree_shapes(name):
    return {k: jax.ShapeDtypeStruct(v, jnp.bfloat16) for k, v in bench.TREES[name].items()}


def step_shapes(row, size):
    if row.is_alone:
        return {
            k: jax.ShapeDtypeStruct(v, jnp.bfloat16) for k, v in bench.TREES[row.group[5:]].items()
        }
    return budget.bfloat16_shapes(model.shapes(model.SIZES[size], row.workload.is_scanned))


def check_steps(name):
    """Our rows in a run of bench_step."""
    run = read(f"{name}.json")
    found, n = run["results"], run["results"]["devices"]
    by_name = {row["name"]: row for row in found["rows"]}
    for measured in found["rows"]:
        row = rows.parse(measured["name"])
        if row.variant not in rows.STRATEGIES or "ms" not in measured:
            continue
        floor = 0.0 if row.is_alone else by_name[f"{row.group}/floor"]["ms"]
        workload = row.workload
        (predicted,) = scaling(
            step_shapes(row, found["size"]),
            functools.partial(budget.make_row_tx, row),
            machine_of(run),
            model_seconds=floor / 1e3 or NO_MODEL,
            recomputes=not row.is_alone and workload.recomputes,
            accumulate_steps=1 if row.is_alone else workload.accumulate_steps,
            in_train_step=not row.is_alone,
            devices=(n,),
        ).rows
        if predicted.plan.communication.transport == "peer":
            continue
        yield record(
            row.name,
            n,
            predicted,
            measured["ms"],
            run=name,
            above_model_measured_ms=measured["ms"] - floor,
            above_model_predicted_ms=1e3 * (predicted.time.step - predicted.time.model),
            phases=measured.get("phases"),
            argument_bytes=measured["argument_bytes"],  # state, and a batch or gradients
        )


def check_trained(names):
    """Runs of train_lm; the first one gives the rate of operations."""
    machine, flops = machine_of(read("bench_step/h200_x2/default.json")), None
    for name in names:
        run = read(f"{name}/run.json")
        found = run["results"]
        args = train_lm.parse_args(shlex.split(run["command"])[2:])
        args.param_dtype = args.param_dtype or "bfloat16"
        tokens = found["tokens"] / args.steps
        measured = tokens / found["tokens_per_second"]
        operations = (8 if args.scan else 6) * found["parameters"] * tokens / found["devices"]
        predict = functools.partial(predict_trained, args, found, machine)
        if flops is None:
            time = predict(measured).time
            flops = operations / (2 * measured - time.step)
        yield record(
            name,
            found["devices"],
            predict(operations / flops),
            1e3 * measured,
            held_measured=found["state_bytes_per_device"],
            flops=flops,
            is_fitted=name == names[0],
        )


def config_of(args, found):
    chosen = {k: getattr(args, k) for k in ("layers", "width", "batch") if getattr(args, k)}
    return gpt.GPTConfig(**(vars(gpt.PRESETS[found["preset"]]) | chosen))


def predict_trained(args, found, machine, seconds):
    """One row; over XLA, because these runs are older than peer memory."""
    config, devices = config_of(args, found), found["devices"]
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
        return jda.distributed(
            jda.fused_adamw(1e-3, b2=args.b2, weight_decay=0.1),
            mesh=mesh,
            policy=policy,
            communication="xla",
            replica_axis="replica" if args.replicas > 1 else None,
            sharding_strategy=args.strategy,
            max_grad_norm=args.max_grad_norm,
            layers=train_lm.layers_of if gathers else None,
        )  # fmt: skip

    (row,) = scaling(
        shapes, make, machine, model_seconds=seconds, recomputes=args.scan,
        accumulate_steps=args.accumulate_steps, devices=(devices,),
        devices_per_replica=devices // args.replicas if args.replicas > 1 else None,
    ).rows  # fmt: skip
    return row


def check_memory():
    """Bytes between steps that an allocator counted, without a model."""
    run = read("plan_against_memory/h200_x4/default.json")["results"]
    tree = tree_shapes(run["tree"])
    for row in run["rows"]:
        policy = row["policy"].replace("wire", "communication")  # its former name
        make = functools.partial(
            plan_against_compiler.make_tx,
            strategy=row["strategy"],
            policy=plan_against_compiler.POLICIES[policy],
        )
        (found,) = scaling(
            tree, make, Machine(1e12, 1e11), model_seconds=NO_MODEL, devices=(4,),
            devices_per_replica=4,
        ).rows  # fmt: skip
        yield {
            "name": f"{row['strategy']}, {policy}",
            "held_planned": found.plan.held_bytes,
            "held_measured": row["held_measured"],
            "step_planned": found.plan.buffer_bytes,
            "step_measured": row["temporary_measured"],
        }


def extrapolate():
    """The 1.3e9 model of bench_step on up to 1024 GPUs, from measurements on two."""
    run = read("bench_step/h200_x2/default.json")
    results = {r["name"]: r for r in run["results"]["rows"]}
    tokens = 8 * model.SIZES["gpt-1.3b"].length
    tables = {}
    for label, (strategy, modifiers, per_replica) in EXTRAPOLATED.items():
        is_scanned = strategy == "optim_grads_params"
        group = "scanned-8" if is_scanned else "unrolled-8"
        shapes = budget.bfloat16_shapes(model.shapes(model.SIZES["gpt-1.3b"], is_scanned))

        def make(mesh, strategy=strategy, modifiers=modifiers, is_scanned=is_scanned):
            axis = "replica" if "replica" in mesh.axis_names else None
            return make_tx(mesh, strategy, modifiers, is_scanned=is_scanned, replica_axis=axis)

        tables[label] = scaling(
            shapes, make, machine_of(run), tokens=tokens, recomputes=True,
            model_seconds=results[f"{group}/floor"]["ms"] / 1e3, devices_per_replica=per_replica,
        )  # fmt: skip
    return tables


def errors(found):
    """The sentence below a table."""
    sizes = [abs(r["relative_error"]) for r in found if not r.get("is_fitted")]
    return (
        f"\n\nOf {len(sizes)} predictions the median of the absolute error is "
        f"{statistics.median(sizes):.1%}, the largest {max(sizes):.1%}."
    )


def steps_table(found):
    """Rows of bench_step."""
    titles = (
        "row", "GPUs", "measured ms", "predicted ms", "from - to", "error",
        "above the model: measured ms", "predicted ms",
    )  # fmt: skip
    lines = (
        (
            r["name"],
            *_common(r),
            f"{r['above_model_measured_ms']:.2f}",
            f"{r['above_model_predicted_ms']:.2f}",
        )
        for r in found
    )
    return markdown.table(titles, lines) + errors(found)


def _common(r):
    return (
        f"{r['devices']}",
        f"{r['measured_ms']:.2f}",
        f"{r['predicted_ms']:.2f}",
        f"{r['least_ms']:.2f} - {r['most_ms']:.2f}",
        "fitted" if r.get("is_fitted") else f"{r['relative_error']:+.1%}",
    )


def trained_table(found):
    """Runs of train_lm."""
    titles = (
        "run", "GPUs", "measured ms", "predicted ms", "from - to", "error", "held MB", "planned MB",
    )  # fmt: skip
    lines = (
        (
            r["name"],
            *_common(r),
            f"{r['held_measured'] / 1e6:.2f}",
            f"{r['held_planned'] / 1e6:.2f}",
        )
        for r in found
    )
    return markdown.table(titles, lines) + errors(found)


def memory_table(found):
    """Bytes that an allocator counted."""
    titles = ("row", "held MB", "planned MB", "in a step MB", "at most MB")
    names = ("held_measured", "held_planned", "step_measured", "step_planned")
    lines = ((r["name"], *(f"{r[name] / 1e6:.2f}" for name in names)) for r in found)
    return markdown.table(titles, lines)


def extrapolated_table(found):
    """One table per strategy, without values that are the same in all rows."""
    parts = []
    for name, (titles, *lines) in found.items():
        kept = [i for i, title in enumerate(titles) if title not in ("tokens/s", "model")]
        cells = [[line[i] for i in kept] for line in lines]
        head = markdown.table([titles[i] for i in kept], cells)
        parts.append(f"{name}: model {lines[0][titles.index('model')]} ms\n\n{head}")
    return "\n\n".join(parts)


def tables_of(results):
    """The parts of predict/README.md from the recorded results, by marker name."""
    makers = {
        "steps": steps_table,
        "trained": trained_table,
        "memory": memory_table,
        "extrapolated": extrapolated_table,
    }
    return {name: functools.partial(make, results[name]) for name, make in makers.items()}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--revision", help="revision of the code to record; default: git's")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/scaling_check.json"))
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    report.write_run(
        args.out,
        args.revision,
        steps=[row for name in STEPS for row in check_steps(name)],
        trained=[row for names in (SMALL, SCANNED) for row in check_trained(names)],
        memory=list(check_memory()),
        extrapolated={name: found.table() for name, found in extrapolate().items()},
    )
    tables = tables_of(json.loads(args.out.read_text())["results"])
    text = "\n\n".join(make() for make in tables.values()) + "\n"
    args.out.with_suffix(".md").write_text(text)
    print(text)
    if args.out.resolve() == RECORDED:
        DOCS.write_text(markdown.fill(DOCS.read_text(), tables, DOCS.name))


if __name__ == "__main__":
    sys.exit(main())
