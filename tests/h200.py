"""A small model, compiled for H200s on a machine without any, and what its HLO says."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jdistadam as jda

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


def compile_step(mesh, param_dtype, wire, accumulate_steps=1, **kwargs):
    policy = jda.MixedPrecisionPolicy(grad_comm_dtype=wire)
    tx = jda.distributed_fused_adamw(1e-3, mesh=mesh, policy=policy, max_grad_norm=1.0, **kwargs)
    params = params_of(param_dtype)
    state = jda.TrainState(params, jax.eval_shape(tx.init, params))
    state = placed(mesh, state, jda.TrainState(P(), tx.state_specs()))
    batch = placed(mesh, jax.ShapeDtypeStruct((64, WIDTH), param_dtype), P("data"))
    step = jda.train_step(loss_fn, tx, accumulate_steps=accumulate_steps)
    return tx, params, step.lower(state, batch).compile()


def collectives(text, *, with_devices=False):
    """Yields (op, [(dtype, elements) of each result]) of every collective in optimized HLO.

    Of an asynchronous pair the -start half counts, of its results those after the operands.
    With ``with_devices`` also how many devices take part in it.
    """
    pattern = r"= (\S.*?) (all-gather|all-reduce|reduce-scatter|all-to-all)(-start)?\("
    for line in text.splitlines():
        found = re.search(pattern, line)
        if not found:
            continue
        result = found[1]
        if found[3] and (found[2] != "all-reduce" or result.startswith("((")):
            # (operands, results), each perhaps a tuple; older all-reduces name results alone
            result = _second_half(result)
        arrays = re.findall(r"(bf16|f16|f32|f8e5m2|f8e4m3fn|s32|u32|pred)\[([\d,]*)\]", result)
        sizes = [(t, int(np.prod([int(n) for n in dims.split(",") if n]))) for t, dims in arrays]
        yield (found[2], sizes, _devices(line)) if with_devices else (found[2], sizes)


def _second_half(result):
    arrays = re.findall(r"[a-z]\w*\[[\d,]*\](?:\{[^}]*\})?", result)
    return ", ".join(arrays[len(arrays) // 2 :])


def _devices(line):
    """The size of a collective's groups, in whichever way XLA writes them."""
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]<=", line):
        return int(found[1])
    if found := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        return int(np.prod([int(sizes[axis]) for axis in re.findall(r"'(\w+)'", found[2])]))
    found = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    return len(found[1].split(","))


def by_op(text):
    total = {}
    for op, arrays in collectives(text):
        for dtype, elements in arrays:
            total[op, dtype] = total.get((op, dtype), 0) + elements
    return total
