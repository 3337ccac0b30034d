"""What a scanned GPT of 1.3e9 parameters needs and sends on eight H200s, compiled without any.

    python experiments/scanned_memory.py --out experiments/results/scanned_memory/h200/default.json
    python experiments/scanned_memory.py --unrolled --out runs/unrolled.json

The same model with unsharded parameters, and with layers gathered in the scan under several
policies of rematerialisation, of which one keeps what it gathered: the audit must say so. Unrolled,
with all activations recomputed: gathered first, block by block, and that without ``after``.
"""

import argparse
import functools
import pathlib

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from lm import gpt, report
from plan_against_compiler import h200s

import jdistadam as jda

EVERYTHING = jax.checkpoint_policies.everything_saveable
NOTHING = jax.checkpoint_policies.nothing_saveable
ROWS = {
    "unsharded parameters, all recomputed": ("optim_grads", NOTHING),
    "gathered twice, all recomputed": ("optim_grads_params", NOTHING),
    "gathered twice, remat_policy": ("optim_grads_params", jda.remat_policy),
    "gathered once, nothing recomputed": ("optim_grads_params", EVERYTHING),
}
UNROLLED = {  # how blocks are gathered; None: before the forward pass
    "unrolled, gathered first": None,
    "unrolled, block by block": jda.gather_params,
    "unrolled, block by block, not after anything": lambda layer, tx, after: jda.gather_params(
        layer, tx
    ),
}


def compile_step(config, strategy, policy, scans=True, gather=jda.gather_params):
    """Audits one program."""
    mesh = h200s((1, 8))
    gathers = strategy == "optim_grads_params" and gather is not None
    tx = jda.distributed(
        jda.fused_adamw(1e-4),
        mesh=mesh,
        replica_axis="replica",
        sharding_strategy=strategy,
        policy=jda.MixedPrecisionPolicy(grad_comm_dtype="bfloat16"),
        max_grad_norm=1.0,
        stacked=(lambda path: "layers" in path) if gathers and scans else None,
        gathered_in_model=(lambda path: "block_" in path) if gathers and not scans else None,
    )
    model = gpt.GPT(config, jnp.bfloat16, scans=scans, remat_policy=policy)
    tokens = jnp.zeros((1, config.length), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
    if gathers:
        model = model.clone(gather=functools.partial(gather, tx=tx))
    elif not scans:
        model = model.clone(gather=lambda layer, after: layer)
    batch = jax.ShapeDtypeStruct(
        (config.batch, config.length + 1),
        jnp.int32,
        sharding=NamedSharding(mesh, tx.config.parallel.batch_spec),
    )
    state = jda.TrainState.shapes(params, tx, param_dtypes=jnp.bfloat16)
    return jda.audit(jda.train_step(gpt.loss_fn(model), tx), state, batch), params


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=gpt.PRESETS, default="gpt-1.3b")
    parser.add_argument("--unrolled", action="store_true", help="without a scan, and one with")
    parser.add_argument("--revision", help="revision of the code to record; default: git's")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/scanned_h200.json"))
    args = parser.parse_args()
    config, rows = gpt.PRESETS[args.preset], []
    programs = {name: (*row, True) for name, row in ROWS.items()}
    if args.unrolled:
        scanned = "gathered twice, all recomputed"
        programs = {"scanned, layer by layer": programs[scanned]}
        for name, gather in UNROLLED.items():
            programs[name] = ("optim_grads_params", NOTHING, False, gather)
    for name, program in programs.items():
        audit, params = compile_step(config, *program)
        memory = audit.program.memory_analysis()
        print(f"{name}\n{audit}\n")
        gathers = [row for row in audit.rows if row.op == "all-gather"]
        rows.append(
            {
                "name": name,
                "strategy": program[0],
                "passed": audit.passed,
                "gathered_planned": sum(row.planned for row in gathers),
                "gathered_found": sum(row.found for row in gathers),
                "asynchronous": sum(row.asynchronous for row in audit.rows),
                "sent": sum(row.found for row in audit.rows),
                "arguments": memory.argument_size_in_bytes,
                "temporary": memory.temp_size_in_bytes,
            }
        )
    parameters = sum(x.size for x in jax.tree.leaves(params))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    report.write_run(args.out, args.revision, preset=args.preset, parameters=parameters, rows=rows)


if __name__ == "__main__":
    main()
