"""A small model, compiled for H200s on a machine without any, and the contents of its HLO."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from jdistadam.tools import hlo
from support.dtypes import dtypes
from support.optimizers import distributed_adamw

WIDTH = 512
SIZES = {"bfloat16": 2, "float32": 4, "bf16": 2, "f32": 4, "f16": 2}


def params_of(dtype):
    shapes = {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH), "scale": (WIDTH,)}
    return {
        f"layer{i}": {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
        for i in range(3)
    }


def loss_fn(params, x):
    for layer in params.values():
        scaled = x * layer["scale"][None].astype(x.dtype)
        x = x + jnp.tanh(scaled @ layer["up"]) @ layer["down"]
    return jnp.mean(jnp.square(x.astype(jnp.float32)))


def placed(mesh, tree, specs):
    def place(spec, subtree):
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), subtree
        )

    return jax.tree.map(place, specs, tree, is_leaf=lambda x: isinstance(x, P))


def compile_step(
    mesh,
    param_dtype,
    comm,
    policy=None,
    *,
    loss=loss_fn,
    accumulate_steps=1,
    rows=64,
    options=None,
    **kwargs,
):
    kwargs = dict(max_grad_norm=1.0) | dtypes(grad_comm_dtype=comm, **(policy or {})) | kwargs
    tx = distributed_adamw(1e-3, mesh=mesh, **kwargs)
    params = params_of(param_dtype)
    state = jda.TrainState.shapes(params, tx)
    batch = placed(mesh, jax.ShapeDtypeStruct((rows, WIDTH), param_dtype), P("data"))
    step = jda.train_step(loss, tx, accumulate_steps=accumulate_steps, compiler_options=options)
    return tx, params, step.lower(state, batch).compile()


def collectives(text, *, with_devices=False):
    """Yields (op, [(dtype, elements) of each result]) of every collective, optionally devices."""
    for c in hlo.collectives_in(text):
        yield (c.op, c.arrays, c.devices) if with_devices else (c.op, c.arrays)


def by_op(text):
    total = {}
    for op, arrays in collectives(text):
        for dtype, elements in arrays:
            total[op, dtype] = total.get((op, dtype), 0) + elements
    return total


def is_product(line):
    """Whether an instruction is a matrix product."""
    return bool(re.match(r"\s+%?gemm_fusion\S* = |.*__cublas", line))


def products_beside(text):
    """For collectives in loop bodies: (op, matrix products between start and done)."""
    bodies = set(re.findall(r" while\(.*\bbody=%?([\w.\-]+)", text))
    found, running = [], {}
    for computation, line in hlo.instructions(text):
        if computation not in bodies:
            continue
        if start := re.search(r"%?([\w.\-]+) = .* (all-gather|reduce-scatter)-start\(", line):
            running[start[1]] = [start[2], 0]
        elif done := re.search(r" (?:all-gather|reduce-scatter)-done\(%?([\w.\-]+)\)", line):
            found.append(tuple(running.pop(done[1])))
        elif is_product(line):
            for collective in running.values():
                collective[1] += 1
    return found


def captured(folder, name, operation="kCustomCall"):
    """Whether each foreign call, or other operation, is indented, below a kCommandBuffer."""
    (dump,) = folder.glob(f"*.{name}.txt")
    found = [line.startswith("    ") for line in dump.read_text().splitlines() if operation in line]
    assert found
    return found


def compile_here(mesh, step, state, batch, options=None):
    """The text and the memory of a step of CPU devices, compiled for H200s in their place.

    Devices that exist only for the compiler have no kinds of memory in JAX: with a mesh of theirs
    no argument can be in that of the host.
    """
    from jax._src import compiler
    from jax._src.lib import xla_client

    jitted = getattr(step, "_jitted_as_called", step)  # of a train_step
    traced = jitted.trace(state, batch)
    module = traced.lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")
    devices = list(mesh.devices.flat)
    places = np.arange(len(devices)).reshape(1, -1)
    options = compiler.get_compile_options(
        1, len(devices), places, env_options_overrides=options or {}
    )
    compiled = devices[0].client.compile(module, xla_client.DeviceList(tuple(devices)), options)
    return compiled.hlo_modules()[0].to_string(), compiled.get_compiled_memory_stats()
