"""What a step must cost beside the model: bytes over bandwidths measured in the same run."""

import functools
import statistics
import time

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jdistadam.tools import bench
from step_bench.rows import STRATEGIES

COLLECTIVES = ("reduce-scatter", "all-gather", "all-to-all", "all-reduce")


def bandwidths(mesh, is_small):
    """Bytes per second: "copy" reads plus writes of one GPU, each collective sends of one GPU."""
    found = {"copy": bench.copy_bandwidth(1 << (16 if is_small else 28), (10, 60))}
    if mesh.size > 1:
        elements = mesh.size << (14 if is_small else 27)
        found |= {op: _bandwidth(mesh, op, elements) for op in COLLECTIVES}
    return found


def _bandwidth(mesh, op, elements):
    """Of one collective of bfloat16 elements, in each direction: all-reduce sends twice."""
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


def predict(row, parameters, num_devices, rates):
    """Milliseconds of each phase beside the model, were nothing else to run beside it.

    Gradients and parameters are sent in bfloat16. An update reads a gradient, the main parameter
    and two moments, and writes these three and a bfloat16 parameter: 28 bytes, 26 with remainders;
    the norm reads the gradients.
    """
    if _is_over_peers(row, num_devices):
        return _predict_over_peers(row, parameters, num_devices, rates)
    share = parameters / num_devices
    updated = parameters if row.variant == "no_shard" else share
    sends = _sends(row, 2 * parameters * (num_devices - 1) / num_devices)
    phases = {op: nbytes / rates[op] for op, nbytes in sends.items() if nbytes}
    nbytes = 26 if "remainder16" in row.modifiers else 28
    if "float32sum" in row.modifiers:
        nbytes += 2  # float32 gradients
        phases["sum"] = (2 * num_devices + 4) * share / rates["copy"]
    phases["update"] = nbytes * updated / rates["copy"]
    if row.variant in STRATEGIES or "clip" in row.modifiers:
        phases["norm"] = (4 if "float32sum" in row.modifiers else 2) * updated / rates["copy"]
    return {name: 1e3 * seconds for name, seconds in phases.items()}


def _is_over_peers(row, num_devices):
    """As communication="auto" decides."""
    return (
        row.variant == "optim"
        and {"float32sum"} <= row.modifiers <= {"float32sum", "clip"}
        and num_devices in (2, 4, 8)
    )


def _predict_over_peers(row, parameters, num_devices, rates):
    """One kernel is bound by memory or by the links, which an all-gather shows the speed of.

    It reads a gradient of every device and the state, and writes the state and the parameter of
    every device; over the links go gradients and parameters of all other devices. With clipping a
    first kernel writes float32 sums, which the second reads.
    """
    share = parameters / num_devices
    whole = 2 * parameters * (num_devices - 1) / num_devices  # over a link in one direction
    copy, link = rates["copy"], rates["all-gather"]
    gradients, state, written = 2 * num_devices * share, 24 * share, 2 * num_devices * share
    sums = 4 * share
    if "clip" in row.modifiers:
        kernels = [(gradients + sums, whole), (sums + state + written, whole)]
    else:
        kernels = [(gradients + state + written, 2 * whole)]
    return {"peer step": 1e3 * sum(max(here / copy, sent / link) for here, sent in kernels)}


def _sends(row, whole):
    """Bytes that a device sends in each direction; ``whole``: a reduction or a gather of all."""
    workload, strategy = row.workload, row.variant
    micro = 1 if row.is_alone else workload.accumulate_steps
    twice = not row.is_alone and (workload.is_scanned or workload.recomputes)
    if not whole:
        return {}
    reduce = "all-to-all" if "float32sum" in row.modifiers else "reduce-scatter"
    if strategy == "no_shard":  # sums that are float32 are sent on as such
        is_native = reduce == "reduce-scatter"
        return {"all-reduce": 2 * whole} if is_native else {reduce: whole, "all-gather": 2 * whole}
    reductions = 1 if strategy == "optim" else micro
    gathers = 1
    if strategy == "annotated_fsdp":
        gathers = micro * (2 if twice else 1)
    elif strategy == "optim_grads_params" and not row.is_alone and workload.is_scanned:
        gathers = 2 * micro  # a layer at a time, forward and backward
    return {reduce: reductions * whole, "all-gather": gathers * whole}
