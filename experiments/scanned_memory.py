"""The memory and communication of a GPT per device on eight H200s, compiled without any.

    python experiments/scanned_memory.py --out experiments/results/scanned_memory/h200/default.json
    python experiments/scanned_memory.py --rows unrolled --out runs/unrolled.json
    python experiments/scanned_memory.py --rows model_axes --out runs/model_axes.json

"scanned": unsharded parameters, and layers gathered in the scan under several policies of
rematerialization; one keeps gathered layers, and the audit must say so. "unrolled": gathered first,
block by block, and by annotations, as a user of JAX writes FSDP: optax.adamw on float32 parameters
and moments, bfloat16 parameters, all of them sharded by NamedSharding, sequences over the same
axis, also with annotations of the model's activations. "model_axes": on 4 x 2 devices, heads and
hidden units split over pairs.
"""

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from lm import command_line, gpt, report
from plan_against_compiler import h200s
from step_bench.rows import merging
from step_bench.variants import AnnotatedUpdate

import jdistadam as jda
from jdistadam.tools import hlo

EVERYTHING = jax.checkpoint_policies.everything_saveable
NOTHING = jax.checkpoint_policies.nothing_saveable


@dataclasses.dataclass(frozen=True)
class Row:
    """A program; ``gather`` is called with a layer, or is None: all before the forward pass."""

    strategy: str = "optim_grads_params"
    policy: Callable[..., bool] = NOTHING
    scans: bool = False
    gather: Any = jda.gather_params
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


def layers_of(path):
    """What the model gathers itself: layers of the scan, or blocks."""
    return "scan" if "layers" in path else "block" if "block_" in path else None


def at_any_time(layer, tx, after):
    return jda.gather_params(layer, tx)


SCANNED = Row(scans=True)
KEEPING = Row(policy=EVERYTHING)
GATHERING_AGAIN = Row(policy=jda.remat_policy)
WHOLE = Row("optim_grads")
ROWS = {
    "scanned": {
        "unsharded parameters, all recomputed": Row("optim_grads", scans=True),
        "gathered twice, all recomputed": SCANNED,
        "gathered twice, remat_policy": Row(policy=jda.remat_policy, scans=True),
        "gathered once, nothing recomputed": Row(policy=EVERYTHING, scans=True),
    },
    "unrolled": {
        "scanned, layer by layer": SCANNED,
        "unrolled, gathered first": Row(gather=None),
        "unrolled, block by block": Row(),
        "unrolled, block by block, not after anything": Row(gather=at_any_time),
        "unrolled, block by block, remat_policy": GATHERING_AGAIN,
        "unrolled, block by block, nothing recomputed": KEEPING,
        "unrolled, unsharded parameters": WHOLE,
        "unrolled, annotations": Row("annotations"),
        "unrolled, annotations, collectives not combined": Row("annotations", options=merging(1)),
        "scanned, annotations": Row("annotations", scans=True),
    },
    "model_axes": {
        "unrolled, unsharded parameters": WHOLE,
        "scanned, layer by layer": SCANNED,
        "unrolled, gathered first": Row(gather=None),
        "unrolled, block by block": Row(),
        "unrolled, block by block, remat_policy": GATHERING_AGAIN,
        "unrolled, block by block, nothing recomputed": KEEPING,
    },
}


def make_mesh(shape):
    names = ("data", "model")[: len(shape)]
    devices = h200s((1, 8)).devices.reshape(shape)
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


def compile_row(config, mesh, row):
    """Returns (compiled program, whether the audit passed or None, parameters)."""
    has_model_axis = "model" in mesh.axis_names
    model = gpt.GPT(config, jnp.bfloat16, scans=row.scans, remat_policy=row.policy)
    tokens = jnp.zeros((1, config.length), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
    parameters = sum(x.size for x in jax.tree.leaves(params))
    model = model.clone(axis="model" if has_model_axis else None)
    batch = jax.ShapeDtypeStruct(
        (config.batch, config.length + 1), jnp.int32, sharding=NamedSharding(mesh, P("data"))
    )
    if row.strategy == "annotations":
        return annotated(model, mesh, params, batch, row), None, parameters
    gathers = row.strategy == "optim_grads_params" and row.gather is not None
    tx = jda.distributed(
        jda.fused_adamw(1e-4),
        mesh=mesh,
        sharding_strategy=row.strategy,
        policy=jda.MixedPrecisionPolicy(grad_comm_dtype="bfloat16"),
        max_grad_norm=1.0,
        layers=layers_of if gathers else None,
        param_specs=gpt.partition_specs(params, "model") if has_model_axis else None,
    )
    gather = functools.partial(row.gather, tx=tx) if gathers else given
    state = jda.TrainState.shapes(params, tx, param_dtypes=jnp.bfloat16)
    step = jda.train_step(gpt.loss_fn(model.clone(gather=gather)), tx)
    # Constraints name axes of this mesh; the step makes those of the data manual.
    with jax.set_mesh(mesh) if has_model_axis else contextlib.nullcontext():
        audit = jda.audit(step, state, batch)
    print(audit)
    return audit.program, audit.passed, parameters


def given(layer, after=None):
    """A layer that needs no gathering: it is recomputed like others."""
    return layer


def annotated(model, mesh, params, batch, row):
    """The program of FSDP by annotations."""
    update = AnnotatedUpdate(params, mesh, is_fsdp=True, clips=True)
    loss = gpt.loss_fn(model.clone(gather=given, batch_axis="data"))

    def step(train_state, tokens):
        params, main, state = train_state
        value, grads = jax.value_and_grad(loss)(params, tokens)
        return update(grads, main, state), value

    jitted = jax.jit(step, donate_argnums=0, compiler_options=row.options)
    with jax.set_mesh(mesh):
        lowered = jitted.lower(update.shapes, batch)
    return lowered.compile()


def collectives(program, mesh):
    """The collectives of a step by operation and axis: instructions, async ones, elements."""
    found = {}
    for c in hlo.collectives_in(program.as_text()):
        axes = axes_of(c, mesh)
        if axes:
            row = found.setdefault((c.op, axes), dict(instructions=0, asynchronous=0, elements=0))
            row["instructions"] += c.times
            row["asynchronous"] += c.times * c.is_async
            row["elements"] += c.times * sum(elements for _, elements in c.arrays)
    return [{"op": op, "axes": axes} | row for (op, axes), row in sorted(found.items())]


def axes_of(c, mesh):
    """The axes along which the devices of a collective's groups differ."""
    places = [np.unravel_index(group, mesh.devices.shape) for group in c.groups]
    differ = (any(np.ptp(place[i]) for place in places) for i in range(mesh.devices.ndim))
    return " and ".join(name for name, d in zip(mesh.axis_names, differ, strict=True) if d)


def main():
    parser = command_line.make_parser(__doc__)
    parser.add_argument("--preset", choices=gpt.PRESETS, default="gpt-1.3b")
    parser.add_argument("--rows", choices=ROWS, default="scanned")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/scanned_h200.json"))
    args = parser.parse_args()
    config, rows = gpt.PRESETS[args.preset], []
    mesh = make_mesh((4, 2) if args.rows == "model_axes" else (8,))
    for name, row in ROWS[args.rows].items():
        print(name)
        program, passed, parameters = compile_row(config, mesh, row)
        memory = program.memory_analysis()
        rows.append(
            {
                "name": name,
                "strategy": row.strategy,
                "passed": passed,
                "collectives": collectives(program, mesh),
                "arguments": memory.argument_size_in_bytes,
                "temporary": memory.temp_size_in_bytes,
            }
        )
        print(rows[-1], "\n", flush=True)
    found = dict(preset=args.preset, mesh=dict(mesh.shape), layers=config.layers)
    report.write_run(args.out, args.revision, **found, parameters=parameters, rows=rows)


if __name__ == "__main__":
    main()
