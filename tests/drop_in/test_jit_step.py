"""jda.jit_step: a step of its own, in place."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from support.bits import assert_trees_same_bits
from support.h200 import placed
from support.optimizers import distributed_adamw
from support.samples import few

KINDS = {
    "float32": (jnp.float32, None),
    "bfloat16": (jnp.bfloat16, None),
    "float32 main": (jnp.bfloat16, "float32"),
    "remainder16": (jnp.bfloat16, "remainder16"),
}


def made(kind):
    dtype, main = KINDS[kind]
    shapes = {"w": (256, 512), "v": (512, 256), "b": (512,), "s": ()}
    params = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    hyper = dict(b1=0.87, b2=0.9973, eps=1e-7, weight_decay=0.13)
    return jda.fused_adamw(3e-3, main_params_dtype=main, **hyper), params


def copies(lowered):
    """Sizes of the arrays that a program copies, without scalars."""
    found = re.findall(r"= \w+\[([\d,]+)\]\S* copy(?:-start)?\(", lowered.compile().as_text())
    return [dims for dims in found if dims]


@few(1)
@pytest.mark.parametrize("kind", KINDS)
def test_jit_step_copies_nothing(h200s, kind):
    """Whereas jax.jit(tx.step, donate_argnums=(1, 2)) copies every leaf several times."""
    tx, params = made(kind)
    mesh = h200s(1)
    grads = params = placed(mesh, params, P())
    state = placed(mesh, jax.eval_shape(tx.init, params), P())
    lowered = jda.jit_step(tx).lower(grads, state, params)
    assert copies(lowered) == []
    num_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((params, state)))
    assert lowered.compile().memory_analysis().alias_size_in_bytes == num_bytes
    if kind == "float32":
        natural = jax.jit(tx.step, donate_argnums=(1, 2)).lower(grads, state, params)
        assert len(copies(natural)) >= 2 * 3


@few(1)
@pytest.mark.parametrize("kind", KINDS)
def test_jit_step_gives_the_bits_of_step(kind):
    tx, shapes = made(kind)
    rng = np.random.default_rng(0)
    make = lambda: jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), shapes)  # noqa: E731
    params = make()
    state, step = tx.init(params), jda.jit_step(tx)
    want = jax.tree.map(jnp.copy, (params, state))
    for _ in range(10):
        grads = make()
        old = params
        params, state = step(grads, state, params)
        assert old["w"].is_deleted() and not grads["w"].is_deleted()
        want = tx.step(grads, want[1], want[0])
    assert_trees_same_bits((params, state), want)


def test_jit_step_passes_extra_arguments_to_a_chain():
    seen = []
    spy = optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(),
        lambda updates, state, params=None, **extra: (seen.append(extra), (updates, state))[1],
    )
    tx = jda.chain(spy, jda.fused_adamw(1e-2))
    params = {"w": jnp.ones(3)}
    params, _ = jda.jit_step(tx)({"w": jnp.ones(3)}, tx.init(params), params, value=1.0)
    assert list(seen[0]) == ["value"] and float(params["w"][0]) < 1


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (lambda: optax.adamw(1e-3), "got an optimizer or a chain of optax, .* jda.chain for opt"),
        (lambda: optax.chain(jda.fused_adamw(1e-3)), "got an optimizer or a chain of optax"),
        (lambda: distributed_adamw(1e-3, mesh=jax.make_mesh((1,), ("data",))), "Use jda.train_st"),
        (lambda: jda.fused_adamw, r"got function, .* Pass what fused_adamw\(\.\.\.\) returns\.$"),
    ],
    ids=["optax", "optax.chain", "distributed", "a function"],
)
def test_jit_step_raises_for_optimizers_without_step(make, advice):
    with pytest.raises(
        jda.PolicyError, match=f"jit_step: cannot be used with this optimizer.*{advice}"
    ):
        jda.jit_step(make())
