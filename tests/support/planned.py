"""Compiled rows of strategies and policies: what their programs send, and the plan."""

import jax
import jax.numpy as jnp

import jdistadam as jda
from jdistadam.tools import hlo
from support.dtypes import dtypes
from support.h200 import WIDTH, collectives, loss_fn, params_of, placed
from support.optimizers import distributed_adamw

POLICIES = {
    "float32": dict(),
    "bf16 communication": dict(grad_comm_dtype="bfloat16"),
    "bf16 communication, float32 sum": dict(
        grad_comm_dtype="bfloat16", grad_reduce_dtype="float32"
    ),
    "float32 sum": dict(grad_reduce_dtype="float32"),
    "bf16 grads": dict(main_grads_dtype="bfloat16"),
    "f16 communication": dict(grad_comm_dtype="float16"),
    "remainder": dict(main_params_dtype="remainder16", grad_comm_dtype="bfloat16"),
    "8 bits": dict(
        main_params_dtype="remainder16",
        mu_dtype="block8",
        nu_dtype="block8",
        rounding="stochastic",
        grad_comm_dtype="bfloat16",
    ),
    "16 and 8 bits": dict(
        main_params_dtype="remainder16",
        mu_dtype="block16",
        nu_dtype="block8",
        rounding="stochastic",
        grad_comm_dtype="bfloat16",
    ),
    "fp8 params": dict(param_comm_dtype="float8_e4m3fn", grad_comm_dtype="bfloat16"),
    "e5m2 params": dict(param_comm_dtype="float8_e5m2"),
    "f16 params": dict(param_comm_dtype="float16"),
}
FLAT = (8,), ("data",), {}
PLACEMENTS = {
    "hybrid": ((2, 4), ("replica", "data"), dict(replica_axis="replica")),
    "twice": (
        (2, 4),
        ("replica", "data"),
        dict(replica_axis="replica", outer_sharding_strategy="optim"),
    ),
    "tuple": ((2, 4), ("node", "data"), dict(shard_axis=("node", "data"))),
}
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


def compile_row(
    make_mesh, placement, strategy, policy, *, shape=None, accumulate_steps=1, dtype=jnp.bfloat16
):
    eight, names, kwargs = PLACEMENTS.get(placement, FLAT)
    mesh = make_mesh(*(shape or eight), names=names)
    tx = distributed_adamw(
        1e-3,
        mesh=mesh,
        **dtypes(**POLICIES[policy]),
        max_grad_norm=1.0,
        sharding_strategy=strategy,
        communication="xla",  # peer memory has no collectives to compare
        **kwargs,
    )
    params = params_of(dtype)
    state = jda.TrainState.shapes(params, tx)
    batch = jax.ShapeDtypeStruct((64, WIDTH), dtype)
    batch = placed(mesh, batch, tx.config.parallel.batch_spec)
    step = jda.train_step(loss_fn, tx, accumulate_steps=accumulate_steps)
    schedule = tx.config.schedule_of(params, accumulate_steps=accumulate_steps)
    return schedule.collectives, step.lower(state, batch).compile().as_text()


def sent(text):
    """Elements that devices receive, by operation, dtype and number of devices."""
    arrays = {}
    for op, results, devices in collectives(text, with_devices=True):
        for dtype, elements in results:
            key = op, hlo.DTYPES[dtype], devices
            arrays[key] = arrays.get(key, 0) + elements
    return arrays


def as_sent(planned, *scalars):
    """The same for a plan, with float32 scalars that are summed over this many devices."""
    arrays = {}
    for c in planned:
        key = c.op, c.dtype.name, c.devices
        arrays[key] = arrays.get(key, 0) + c.result_elements
    for devices in scalars:
        key = "all-reduce", "float32", devices
        arrays[key] = arrays.get(key, 0) + 1
    return arrays
