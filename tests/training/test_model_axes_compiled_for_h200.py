"""What XLA makes of a partitioned model's step for eight H200s as 4 x 2, compiled without any."""

import collections
import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from jdistadam.tools import hlo
from support.h200 import WIDTH, params_of, placed
from support.optimizers import distributed_adamw
from support.placements import STRATEGIES
from support.samples import few, often

LAYER = {"up": P(None, "model"), "down": P("model"), "scale": P()}
TYPES = {"explicit": AxisType.Explicit, "auto": AxisType.Auto}


def loss_fn(params, x):
    for layer in params.values():
        scaled = x * layer["scale"][None]
        hidden = jnp.tanh(product(scaled, layer["up"], P(None, "model")))
        x = x + product(hidden, layer["down"], P())
    return jnp.mean(jnp.square(x.astype(jnp.float32)))


def product(x, w, spec):
    if jax.sharding.get_abstract_mesh().explicit_axes:
        return jnp.einsum("bi,io->bo", x, w, out_sharding=spec)
    return jax.lax.with_sharding_constraint(x @ w, spec)


def two_layers():
    return dict(list(params_of(jnp.bfloat16).items())[:2])


def compiled_step(mesh, strategy, micro):
    params = two_layers()
    tx = distributed_adamw(
        1e-3,
        mesh=mesh,
        policy=jda.MixedPrecisionPolicy(grad_comm_dtype="bfloat16"),
        max_grad_norm=1.0,
        sharding_strategy=strategy,
        param_specs=dict.fromkeys(params, LAYER),
    )
    state = jda.TrainState.shapes(params, tx)
    batch = placed(mesh, jax.ShapeDtypeStruct((64 * micro, WIDTH), jnp.bfloat16), P("data"))
    return tx, state, jda.audit(jda.train_step(loss_fn, tx, accumulate_steps=micro), state, batch)


def along_model(text):
    """Operation, dtype and elements of each collective along the model axis alone, and how often.

    Without scalars, such as the norm where each shard is on all devices along the other axis.
    """
    found = collections.Counter()
    for c in hlo.collectives_in(text):
        if c.groups and all(max(group) - min(group) == 1 for group in c.groups):  # 4 x 2
            for dtype, elements in c.arrays:
                if elements > 1:
                    found[c.op, dtype, elements] += c.times
    return found


def of_gradient_alone(mesh):
    """Those of the model's own forward and backward pass, for one micro-batch."""
    specs = dict.fromkeys(two_layers(), LAYER)
    gradient = jax.shard_map(
        lambda params, x: jax.tree.map(lambda g: g[None], jax.grad(loss_fn)(params, x)),
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P("data"),
        axis_names={"data"},
        check_vma=False,
    )
    params = placed(mesh, two_layers(), specs)
    batch = placed(mesh, jax.ShapeDtypeStruct((64, WIDTH), jnp.bfloat16), P("data"))
    return along_model(jax.jit(gradient).lower(params, batch).compile().as_text())


def shapes_of_sums(tx, state):
    """What a device accumulates gradients in."""
    layout = tx.layout(state.params)
    if tx.config.parallel.shards_grads:
        return [bucket.inner_shape for bucket in layout.buckets]
    return [leaf.shape for leaf in layout.leaves]


@few(1)
@pytest.mark.parametrize("micro", [1, 4])
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("strategy", STRATEGIES)
@often(
    lambda strategy, kind, micro: (
        (strategy, kind, micro) in {("optim", "auto", 4), ("optim_grads_params", "explicit", 1)}
    )
)
def test_collectives_are_the_planned_ones_and_those_of_the_model(h200s, strategy, kind, micro):
    mesh = h200s(4, 2, names=("data", "model"), axis_types=(TYPES[kind],) * 2)
    tx, state, audit = compiled_step(mesh, strategy, micro)
    assert audit.passed, audit
    text = audit.program.as_text()
    alone = of_gradient_alone(mesh)
    assert alone  # the sums of the partitioned products
    assert along_model(text) == collections.Counter({k: n * micro for k, n in alone.items()})

    # All of the state is updated where it is; what is not aliased is the norm, an output alone.
    held = state.opt_state._replace(grad_norm=None), state.params
    sizes = [
        math.prod(x.sharding.shard_shape(x.shape)) * jnp.dtype(x.dtype).itemsize
        for x in jax.tree.leaves(held)
    ]
    assert audit.program.memory_analysis().alias_size_in_bytes == sum(sizes)
    assert text.count('custom_call_target="jdistadam_adam"') == 1
    copied = re.findall(r"= (?:\()?(\w+\[[\d,]+\])\S* copy(?:-start)?\(", text)
    sums = {f"f32[{','.join(map(str, shape))}]" for shape in shapes_of_sums(tx, state)}
    assert set(copied) <= (sums if micro > 1 else set())  # zeros, before the loop


@few(1)
@pytest.mark.parametrize("kind", TYPES)
def test_blocks_are_gathered_over_the_data_axes_alone(h200s, kind):
    """Twice, with jax.checkpoint; over the model axis goes what the model itself sends."""
    mesh = h200s(4, 2, names=("data", "model"), axis_types=(TYPES[kind],) * 2)
    params = two_layers()
    tx = jda.distributed(
        jda.fused_adamw(1e-3),
        mesh=mesh,
        policy=jda.MixedPrecisionPolicy(grad_comm_dtype="bfloat16"),
        sharding_strategy="optim_grads_params",
        param_specs=dict.fromkeys(params, LAYER),
        layers=lambda path: "block" if "layer" in path else None,
    )

    @functools.partial(jax.checkpoint, policy=jda.remat_policy)
    def block(layer, x):
        layer = jda.gather_params(layer, tx, after=x)
        hidden = jnp.tanh(product(x * layer["scale"][None], layer["up"], P(None, "model")))
        return x + product(hidden, layer["down"], P())

    def loss(params, x):
        for layer in params.values():
            x = block(layer, x)
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    state = jda.TrainState.shapes(params, tx)
    batch = placed(mesh, jax.ShapeDtypeStruct((64, WIDTH), jnp.bfloat16), P("data"))
    audit = jda.audit(jda.train_step(loss, tx), state, batch)
    assert audit.passed, audit
    (gathers,) = [row for row in audit.rows if row.op == "all-gather" and not row.of_model]
    local = 2 * 2 * WIDTH * 4 * WIDTH // 2  # elements of both layers on a device of the model axis
    assert gathers.found == 2 * local + 2 * WIDTH  # and the packed scales
    ops = {op for op, _, _ in along_model(audit.program.as_text())}
    assert ops == {op for op, _, _ in of_gradient_alone(mesh)}
