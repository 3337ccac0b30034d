"""The plan of bytes against XLA's own analysis, for every strategy and policy on eight H200s.

    python experiments/plan_against_compiler.py --out runs/plan.json

Needs no GPU: JAX's CUDA plugin compiles for devices described in tests/support/h200.txtpb.
"""

import itertools
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from lm import command_line, report
from tqdm import tqdm

import jdistadam as jda
from jdistadam.tools import bench

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
POLICIES = {
    "float32 communication": {},
    "bfloat16 communication": dict(grad_comm_dtype="bfloat16"),
    "bfloat16 communication, float32 sum": dict(
        grad_comm_dtype="bfloat16", grad_reduce_dtype="float32"
    ),
    "bfloat16 gradients": dict(main_grads_dtype="bfloat16"),
    "remainder16": dict(main_params_dtype="remainder16", grad_comm_dtype="bfloat16"),
}
BATCH_BYTES = 4  # a number per device
MESHES = {"8": (1, 8), "2 x 4": (2, 4)}


def h200s(shape):
    config = (pathlib.Path(__file__).parent.parent / "tests" / "support" / "h200.txtpb").read_text()
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=config, topology=f"1x1x{math.prod(shape)}"
    )
    return Mesh(np.asarray(topology.devices).reshape(shape), ("replica", "data"))


def make_tx(mesh, strategy, policy):
    return jda.distributed(
        jda.fused_adamw(1e-3),
        mesh=mesh,
        replica_axis="replica",
        sharding_strategy=strategy,
        policy=jda.MixedPrecisionPolicy(**policy),
        max_grad_norm=1.0,
    )


def compare(params, mesh, strategy, policy):
    """Returns planned and compiled bytes of a train_step, and of its step on given gradients."""
    tx = make_tx(mesh, strategy, policy)
    state = jda.TrainState.shapes(params, tx)
    whole = whole_step(tx, state)
    step, *shapes = step_alone(tx, state)
    alone = step.lower(*shapes).compile().memory_analysis()
    planned = jda.plan(params, tx)
    # Not arguments of the program: grad_norm of the last step, and the layout's identity.
    unread = 4
    return {
        "held_planned": planned.held_bytes,
        "held_compiled": whole.argument_size_in_bytes - BATCH_BYTES + unread,
        "in_place_compiled": whole.alias_size_in_bytes + unread,
        "buffers_planned": planned.buffer_bytes,
        "temporary_compiled": alone.temp_size_in_bytes,
        "sent": planned.bytes_sent,
    }


def spread(tx, shape, dtype):
    """An array with one row on every device."""
    sharding = NamedSharding(tx.config.mesh, tx.config.parallel.batch_spec)
    return jax.ShapeDtypeStruct((sharding.num_devices, *shape), dtype, sharding=sharding)


def whole_step(tx, state):
    def loss(params, batch):
        terms = [jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in jax.tree.leaves(params)]
        return sum(terms) * jnp.mean(batch)

    step = jda.train_step(loss, tx)
    lowered = step.lower(state, spread(tx, (), jnp.float32))
    return lowered.compile().memory_analysis()


def step_alone(tx, state, compiler_options=None):
    """A jitted step on given gradients, without a model: params, state, gradients -> the first two.

    Also returns the shapes of these three, for which it was made.
    """
    tx = tx.bind(state.params)
    spec, specs = tx.config.parallel.batch_spec, (tx.param_specs(state.params), tx.state_specs())
    whole = jax.tree.map(lambda x: (x.shape, x.dtype), state.params)
    grads = jax.tree.map(lambda x: spread(tx, *x), whole, is_leaf=lambda x: type(x) is tuple)

    def step(params, state, grads):
        return tx.step(jax.tree.map(lambda x: x[0], grads), state, params)

    sharded = jax.shard_map(
        step,
        mesh=tx.config.mesh,
        in_specs=(*specs, spec),
        out_specs=specs,
        check_vma=False,
    )
    step = jax.jit(sharded, donate_argnums=(0, 1), compiler_options=compiler_options)
    return step, state.params, state.opt_state, grads


def main():
    parser = command_line.make_parser(__doc__)
    parser.add_argument("--tree", choices=bench.TREES, default="gpt2s")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/plan_h200.json"))
    args = parser.parse_args()
    params = {k: jax.ShapeDtypeStruct(s, jnp.bfloat16) for k, s in bench.TREES[args.tree].items()}
    rows = []
    for mesh, strategy, policy in tqdm([*itertools.product(MESHES, STRATEGIES, POLICIES)]):
        row = compare(params, h200s(MESHES[mesh]), strategy, POLICIES[policy])
        rows.append({"mesh": mesh, "strategy": strategy, "policy": policy} | row)
    report.write_run(args.out, args.revision, tree=args.tree, rows=rows)


if __name__ == "__main__":
    main()
