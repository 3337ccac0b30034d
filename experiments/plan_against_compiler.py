"""The plan of bytes beside XLA's own analysis, for every strategy and policy on eight H200s.

    python experiments/plan_against_compiler.py --out experiments/results/plan_h200.json

Needs no GPU: JAX's CUDA plugin compiles for devices that are described in tests/h200.txtpb.
"""

import argparse
import itertools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from lm import report
from tqdm import tqdm

import jdistadam as jda
from jdistadam import bench

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
POLICIES = {
    "float32 wire": {},
    "bfloat16 wire": dict(grad_comm_dtype="bfloat16"),
    "bfloat16 wire, float32 sum": dict(grad_comm_dtype="bfloat16", grad_reduce_dtype="float32"),
    "bfloat16 gradients": dict(main_grads_dtype="bfloat16"),
    "remainder16": dict(main_params_dtype="remainder16", grad_comm_dtype="bfloat16"),
}
BATCH_BYTES = 4  # a number for each device
MESHES = {"8": (1, 8), "2 x 4": (2, 4)}


def h200s(shape):
    config = (pathlib.Path(__file__).parent.parent / "tests" / "h200.txtpb").read_text()
    topology = topologies.get_topology_desc(platform="cuda", target_config=config, topology="1x1x8")
    return Mesh(np.asarray(topology.devices).reshape(shape), ("replica", "data"))


def placed(mesh, specs, tree):
    def place(spec, part):
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), part
        )

    return jax.tree.map(place, specs, tree, is_leaf=lambda x: isinstance(x, P))


def compare(params, mesh, strategy, policy):
    """Returns planned and compiled bytes: of a train_step, and of its step on given gradients."""
    tx = jda.distributed_fused_adamw(
        1e-3,
        mesh=mesh,
        replica_axis="replica",
        sharding_strategy=strategy,
        policy=jda.MixedPrecisionPolicy(**policy),
        max_grad_norm=1.0,
    )
    specs = tx.param_specs(params), tx.state_specs()
    there = [
        placed(mesh, *pair)
        for pair in zip(specs, (params, jax.eval_shape(tx.init, params)), strict=True)
    ]
    whole, alone = whole_step(tx, *there), step_alone(tx, params, specs, *there)
    planned = jda.plan(params, tx)
    unread = 4  # grad_norm of the last step is no argument of the program
    return {
        "held_planned": planned.held_bytes,
        "held_compiled": whole.argument_size_in_bytes - BATCH_BYTES + unread,
        "in_place_compiled": whole.alias_size_in_bytes + unread,
        "buffers_planned": planned.buffer_bytes,
        "temporary_compiled": alone.temp_size_in_bytes,
        "sent": planned.bytes_sent,
    }


def whole_step(tx, params, state):
    def loss(params, batch):
        terms = [jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in jax.tree.leaves(params)]
        return sum(terms) * jnp.mean(batch)

    batch = jax.ShapeDtypeStruct((8,), jnp.float32)
    batch = placed(tx.config.mesh, tx.config.parallel.batch_spec, batch)
    step = jda.train_step(loss, tx)
    return step.lower(jda.TrainState(params, state), batch).compile().memory_analysis()


def step_alone(tx, shapes, specs, params, state):
    """Temporary memory without the model's."""
    spec, mesh = tx.config.parallel.batch_spec, tx.config.mesh
    grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct((8, *x.shape), x.dtype), shapes)

    def step(grads, state, params):
        return tx.step(jax.tree.map(lambda x: x[0], grads), state, params)

    sharded = jax.shard_map(
        step, mesh=mesh, in_specs=(spec, specs[1], specs[0]), out_specs=specs, check_vma=False
    )
    args = placed(mesh, spec, grads), state, params
    return jax.jit(sharded, donate_argnums=(1, 2)).lower(*args).compile().memory_analysis()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", choices=bench.TREES, default="gpt2s")
    parser.add_argument("--revision", help="revision of the code to record; default: git's")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/plan_h200.json"))
    args = parser.parse_args()
    params = {k: jax.ShapeDtypeStruct(s, jnp.bfloat16) for k, s in bench.TREES[args.tree].items()}
    rows = []
    for mesh, strategy, policy in tqdm([*itertools.product(MESHES, STRATEGIES, POLICIES)]):
        row = compare(params, h200s(MESHES[mesh]), strategy, POLICIES[policy])
        rows.append({"mesh": mesh, "strategy": strategy, "policy": policy} | row)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    report.write_run(args.out, args.revision, tree=args.tree, rows=rows)


if __name__ == "__main__":
    main()
