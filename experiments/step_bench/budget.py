"""The cost of a step apart from the model: bytes over bandwidths measured in the same run."""

import functools
import statistics
import time

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jdistadam.tools import bench
from step_bench.kernel_bytes import kernel_bytes
from step_bench.rows import STRATEGIES
from step_bench.variants import make_tx

COLLECTIVES = ("reduce-scatter", "all-gather", "all-to-all", "all-reduce")


def bandwidths(mesh, is_small):
    """Bytes per second: "copy" reads plus writes of one GPU, each collective sends of one GPU."""
    found = {"copy": bench.copy_bandwidth(1 << (16 if is_small else 28), (10, 60))}
    if mesh.size > 1:
        elements = mesh.size << (14 if is_small else 27)
        found |= {op: _bandwidth(mesh, op, elements) for op in COLLECTIVES}
    return found


def _bandwidth(mesh, op, elements):
    """Bandwidth of one collective of bfloat16 elements per direction: all-reduce sends twice."""
    run = {
        "reduce-scatter": lambda x: jax.lax.psum_scatter(x, "data", tiled=True),
        "all-gather": lambda x: jax.lax.all_gather(x, "data", tiled=True),
        "all-to-all": lambda x: jax.lax.all_to_all(x.reshape(mesh.size, -1), "data", 0, 0),
        "all-reduce": lambda x: jax.lax.psum(x, "data"),
    }[op]
    sharding = NamedSharding(mesh, P("data"))
    total = elements if op == "all-gather" else elements * mesh.size
    ones = functools.partial(jnp.ones, total, jnp.bfloat16)
    x = jax.jit(ones, out_shardings=sharding)()
    mapped = jax.shard_map(run, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    program = jax.jit(mapped).lower(x).compile()
    jax.block_until_ready(program(x))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(5):
            result = program(x)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / 5)
    sent = 2 * elements * (mesh.size - 1) / mesh.size * (2 if op == "all-reduce" else 1)
    return sent / statistics.median(times)


def predict(row, setting, rates):
    """Milliseconds of each phase apart from the model, if nothing overlaps it.

    Args:
      row: The row.
      setting: Its mesh and the shapes of its parameters, which a step has in bfloat16.
      rates: The result of ``bandwidths``.
    """
    config = make_row_tx(row, setting.mesh).config
    micro = 1 if row.is_alone else row.workload.accumulate_steps
    schedule = config.schedule(bfloat16_shapes(setting.shapes), accumulate_steps=micro)
    phases = {}
    for c in schedule.collectives:
        if c.bytes_sent:
            phase = "peer copies" if c.transport == "peer" else c.op
            seconds = c.bytes_sent / rates.get(phase, rates["all-gather"])
            phases[phase] = phases.get(phase, 0.0) + seconds
    gathers_in_passes = row.variant == "annotated_fsdp" and "gathered_once" not in row.modifiers
    if gathers_in_passes and "all-gather" in phases:
        phases["all-gather"] *= micro * (2 if _gathers_again(row) else 1)  # ours: once per step
    sizes = kernel_bytes(config, schedule)
    if row.variant not in STRATEGIES and "clip" not in row.modifiers:
        sizes.pop("norm", None)  # ours make a metric of it
    phases |= {name: size / rates["copy"] for name, size in sizes.items()}
    return {name: 1e3 * seconds for name, seconds in phases.items()}


# Our sharding that matches annotations: they reduce every micro-batch.
_LIKE_OURS = {"annotated_zero1": "optim_grads", "annotated_fsdp": "optim_grads_params"}


def make_row_tx(row, mesh):
    """The optimizer of a row, or ours that is most like its annotations."""
    is_ours = row.variant in STRATEGIES
    is_scanned = is_ours and not row.is_alone and row.workload.is_scanned
    strategy = _LIKE_OURS.get(row.variant, row.variant)
    # "early" is a compiler option of annotations, and updates ours early.
    modifiers = row.modifiers if is_ours else row.modifiers & {"clip"}
    return make_tx(mesh, strategy, modifiers, is_scanned=is_scanned)


def _gathers_again(row):
    return not row.is_alone and (row.workload.is_scanned or row.workload.checkpoint != "none")


def bfloat16_shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), tree)
