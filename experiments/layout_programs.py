"""How many kernels a training step moves around in memory, compiled for H200s without any.

    python experiments/layout_programs.py --out runs/layout_programs.json

ResNet-50, a transformer of Flax's attention and GPT-2 small, in bfloat16 with float32 parameters:
on one H200 with plain ``jax.jit``, and on eight with ``train_step`` and every strategy; each row-
major and with the formats that ``preferred_formats`` returns. Counted are copies and transposes in
the optimized program, also within fusions, of arrays as large as a parameter of two dimensions or
more; batches are such that no activation is as large. "gradient" is a program that returns the
gradient and has no optimizer: what it moves, the model needs. Programs that the record has already
are not compiled again.
"""

import argparse
import functools
import json
import math
import pathlib
import re
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from lm import gpt, report
from plan_against_compiler import h200s
from vision import resnet

import jdistadam as jda
from jdistadam.core.formats import leaf_orders, with_order

BATCH = 11  # a device: no size of a parameter divides by it
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
DTYPE = jnp.bfloat16


class Transformer(nn.Module):
    """Six layers of Flax's attention, which keeps kernels as (width, heads, width / heads)."""

    @nn.compact
    def __call__(self, x):
        for _ in range(6):
            h = nn.LayerNorm(dtype=DTYPE)(x)
            x = x + nn.MultiHeadDotProductAttention(num_heads=12, dtype=DTYPE)(h)
            h = nn.gelu(nn.Dense(3072, dtype=DTYPE)(nn.LayerNorm(dtype=DTYPE)(x)))
            x = x + nn.Dense(768, dtype=DTYPE)(h)
        return x


def resnet50():
    model = resnet.ResNet(resnet.PRESETS["resnet50"], DTYPE)
    params, stats = resnet.shapes_of(model)
    batch = {"image": ((224, 224, 3), jnp.float32), "label": ((), jnp.int32)}
    return params, stats, resnet.loss_of(model), batch


def transformer():
    model = Transformer()
    x = jax.ShapeDtypeStruct((1, 256, 768), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), x)["params"]

    def loss(params, batch, model_state):
        out = model.apply({"params": params}, batch["x"])
        return jnp.mean(jnp.square(out.astype(jnp.float32))), model_state

    return params, {}, loss, {"x": ((256, 768), jnp.float32)}


def gpt2():
    model = gpt.GPT(gpt.PRESETS["gpt2-small"], DTYPE)
    x = jax.ShapeDtypeStruct((1, 1024), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), x)["params"]

    def loss(params, batch, model_state):
        logits = model.apply({"params": params}, batch["x"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["x"])
        return jnp.mean(losses), model_state

    return params, {}, loss, {"x": ((1024,), jnp.int32)}


MODELS = {"resnet50": resnet50, "transformer": transformer, "gpt2-small": gpt2}


def placed(tree, mesh, *axes):
    place = NamedSharding(mesh, P(*axes))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree)


def batch_of(batch, mesh):
    rows = BATCH * mesh.size
    shapes = {k: jax.ShapeDtypeStruct((rows, *s), t) for k, (s, t) in batch.items()}
    return placed(shapes, mesh, "data")


def moved(text, params):
    """The number of copies and transposes of arrays as large as a parameter."""
    sizes = {x.size for x in jax.tree.leaves(params) if len(x.shape) > 1}
    found = re.findall(r"= \w+\[([\d,]+)\]\S* (copy|copy-start|transpose)\(", text)
    ops = [op for dims, op in found if math.prod(map(int, dims.split(","))) in sizes]
    return {"transposes": ops.count("transpose"), "copies": len(ops) - ops.count("transpose")}


def in_formats(tree, formats):
    """Shapes like params, laid out as ``formats`` says."""
    orders = leaf_orders(formats, tree) or (None,) * len(jax.tree.leaves(tree))
    leaves = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=with_order(x.sharding, order))
        for x, order in zip(jax.tree.leaves(tree), orders, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def plain(mesh, model, optimizer, formats):
    """A step under ``jax.jit``, donated."""
    params, stats, loss, batch = model
    params, stats = placed(params, mesh), placed(stats, mesh)
    if optimizer == "optax":
        tx = optax.adamw(1e-3)
    else:
        tx = jda.fused_adamw(1e-3, formats=formats)
    state = placed(jax.eval_shape(tx.init, params), mesh)
    params = in_formats(params, formats)
    moments = {name: in_formats(getattr(state[0], name), formats) for name in ("mu", "nu")}
    state = (state[0]._replace(**moments), *state[1:])

    def step(params, state, stats, batch):
        grads, stats = jax.grad(loss, has_aux=True)(params, batch, stats)
        if optimizer == "optax":
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, stats
        return *tx.step(grads, state, params), stats

    results = (*jda.formats_of((params, state)), None)
    jitted = jax.jit(step, donate_argnums=(0, 1, 2), out_shardings=results)
    return jitted.lower(params, state, stats, batch_of(batch, mesh)).compile()


def gradient(mesh, model, formats):
    """The gradient alone, laid out as the params."""
    params, stats, loss, batch = model
    params, stats = in_formats(placed(params, mesh), formats), placed(stats, mesh)
    jitted = jax.jit(
        lambda params, batch, stats: jax.grad(loss, has_aux=True)(params, batch, stats),
        out_shardings=(jda.formats_of(params), None),
    )
    return jitted.lower(params, batch_of(batch, mesh), stats).compile()


def sharded(mesh, model, strategy, formats):
    """``train_step`` on a mesh."""
    params, stats, loss, batch = model
    tx = jda.distributed_fused_adamw(1e-3, mesh=mesh, sharding_strategy=strategy, formats=formats)
    state = jda.TrainState.shapes(params, tx).replace(model_state=placed(stats, mesh))
    lowered = jda.train_step(loss, tx).lower(state, batch_of(batch, mesh), is_verified=True)
    return lowered.compile()


def programs(model):
    """Yields the name of every program, whether it has formats, and how to compile it."""
    devices = h200s((1, 8)).devices.reshape(-1)
    one, eight = (jax.sharding.Mesh(devices[:n], ("data",)) for n in (1, 8))
    formats = ask(one, model, num_shards=1)
    for given in (None, formats):
        yield "gradient", given, functools.partial(gradient, one, model, given)
    yield "optax", None, functools.partial(plain, one, model, "optax", None)
    yield "fused_adamw", None, functools.partial(plain, one, model, "ours", None)
    yield "fused_adamw", formats, functools.partial(plain, one, model, "ours", formats)
    formats = ask(one, model, num_shards=8)
    for strategy in STRATEGIES:
        for given in (None, formats):
            compile_it = functools.partial(sharded, eight, model, strategy, given)
            yield f"train_step, {strategy}", given, compile_it


def ask(mesh, model, num_shards):
    """The formats that the compiler prefers on one H200."""
    params, stats, loss, batch = model
    args = placed(params, mesh), batch_of(batch, mesh)
    return jda.preferred_formats(loss, *args, placed(stats, mesh), num_shards=num_shards)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--models", default=",".join(MODELS), help="some of them, by comma")
    parser.add_argument("--revision", help="revision of the code to record; default: git's")
    args = parser.parse_args()
    old = json.loads(args.out.read_text())["results"]["rows"] if args.out.exists() else []
    rows = list(old)
    done = {(row["model"], row["program"], row["formats"]) for row in rows}
    for name in args.models.split(","):
        model = MODELS[name]()
        for program, formats, compile_it in programs(model):
            has_formats = formats is not None
            orders = leaf_orders(formats, model[0])  # () if all are row-major
            if (name, program, has_formats) in done:
                continue
            if has_formats and not orders:  # the same program
                same = next(r for r in rows if (r["model"], r["program"]) == (name, program))
                rows.append(same | {"formats": True})
                continue
            began = time.monotonic()
            compiled = compile_it()
            row = {
                "model": name,
                "leaves": len(jax.tree.leaves(model[0])),
                "not row-major": sum(order is not None for order in orders),
                "program": program,
                "formats": has_formats,
                **moved(compiled.as_text(), model[0]),
                "temporary": compiled.memory_analysis().temp_size_in_bytes,
            }
            rows.append(row)
            print(row, f"{time.monotonic() - began:.0f} s", flush=True)
            report.write_run(args.out, args.revision, rows=rows)


if __name__ == "__main__":
    main()
