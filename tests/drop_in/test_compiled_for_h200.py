"""What XLA makes of one program's step, compiled for H200s without any."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from support.convolutions import SHAPES, loss
from support.h200 import captured, collectives, placed
from support.samples import few
from support.steps import by_step, by_update


@pytest.mark.parametrize("spec", [P("data"), P(None, "data")], ids=str)
def test_drop_in_gathers_nothing(h200s, spec):
    """Parameters that the user sharded are updated where they are, in place."""
    mesh = h200s(8)
    tx = jda.fused_adamw(1e-3)
    params = {
        "w": jax.ShapeDtypeStruct((1024, 1024), jnp.float32),
        "v": jax.ShapeDtypeStruct((64, 8), jnp.float32),
    }
    params = placed(mesh, params, {"w": spec, "v": P()})
    state = jax.eval_shape(tx.init, params)
    adam = state[0]._replace(mu=params, nu=params, count=placed(mesh, state[0].count, P()))

    def step(params, state, grads):
        return tx.step(grads, state, params)

    compiled = (
        jax.jit(step, donate_argnums=(0, 1)).lower(params, (adam, *state[1:]), params).compile()
    )
    assert list(collectives(compiled.as_text())) == []
    assert re.findall(r"f32\[[\d,]+\]\S* copy\(", compiled.as_text()) == []
    assert 'custom_call_target="jdistadam_adam"' in compiled.as_text()
    assert compiled.memory_analysis().alias_size_in_bytes == 3 * 4 * (1024 * 1024 // 8 + 64 * 8) + 4


@few(3)
@pytest.mark.parametrize("kept", ["float32", "remainder16", "codes"])
@pytest.mark.parametrize("old", ["carried", "constant", "sliced"])
def test_a_loop_that_stacks_new_parameters_updates_in_place(h200s, old, kept):
    """XLA must not have the kernel read or write a slice: the other one would be elsewhere."""
    options = {
        "float32": {},
        "remainder16": dict(main_params_dtype="remainder16"),
        "codes": dict(mu_dtype="block8", nu_dtype="block8", rounding="stochastic"),
    }[kept]
    tx = jda.fused_adamw(1e-3, **options)
    dtype = jnp.bfloat16 if kept == "remainder16" else jnp.float32
    params = {"w": jax.ShapeDtypeStruct((1024, 1024), dtype)}

    def steps(params, state, grads):
        def body(carry, slices):
            grads, params, state = slices if old == "sliced" else (slices, *carry)
            new = tx.step(grads, state, params)
            return new if old == "carried" else carry, new

        if old == "sliced":
            return jax.lax.scan(body, None, (grads, params, state))
        return jax.lax.scan(body, (params, state), grads)

    def four(tree):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((4, *x.shape), x.dtype), tree)

    grads, state = four(params), jax.eval_shape(tx.init, params)
    if old == "sliced":
        params, state = four(params), four(state)
    args = placed(h200s(1), (params, state, grads), P())
    text = jax.jit(steps).lower(*args).compile().as_text()
    assert 'custom_call_target="jdistadam' in text
    for computation in re.split(r"\n\n", text):
        if 'custom_call_target="jdistadam' in computation:
            slices = re.findall(r" (dynamic-(?:update-)?slice)\(", computation)
            assert slices in ([], ["dynamic-slice"]), computation  # of the gradients, which stay


def test_convolution_kernels_add_no_transpose_and_no_copy(h200s):
    """XLA lays a convolution's gradient out as it likes: the step must not move it around.

    A program with the optimizer has the transposes and copies of the one without, and no more.
    """
    mesh = h200s(1)
    params = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in SHAPES.items()}
    tx = jda.fused_adamw(1e-3)

    def moved(function, *args, **kwargs):
        """Bytes that copies and transposes of parameters' shapes move."""
        text = jax.jit(function, **kwargs).lower(*args).compile().as_text()
        sizes = {int(np.prod(s)) for s in SHAPES.values()}
        total = 0
        for dims in re.findall(r"= f32\[([\d,]+)\]\S* (?:copy|transpose)\(", text):
            size = int(np.prod([int(n) for n in dims.split(",")]))
            total += size if size in sizes else 0
        return total

    params = placed(mesh, params, P())
    state = placed(mesh, jax.eval_shape(tx.init, params), P())
    x = placed(mesh, jax.ShapeDtypeStruct((8, 64, 64, 3), jnp.float32), P())
    without = moved(lambda p, x: (p, jax.grad(loss)(p, x)), params, x, donate_argnums=0)

    def step(params, state, x):
        return tx.step(jax.grad(loss)(params, x), state, params)

    assert moved(step, params, state, x, donate_argnums=(0, 1)) <= without


@few(2)
@pytest.mark.parametrize("how", ["jit_step", "jit"])
@pytest.mark.parametrize("main", [None, jnp.float32, "remainder16"], ids=str)
def test_jit_step_has_a_step_of_its_own_captured_in_a_cuda_graph(h200s, tmp_path, main, how):
    """Without gradients in the same program XLA finds too little for a graph by itself."""
    mesh = h200s(1)
    tx = jda.fused_adamw(1e-3, main_params_dtype=main)
    dtype = jnp.bfloat16 if main else jnp.float32
    params = {"w": jax.ShapeDtypeStruct((64, 64), dtype)}
    args = placed(mesh, (params, jax.eval_shape(tx.init, params), params), P())
    options = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True}
    params, state, grads = args

    def step(params, state, grads):  # in the order of the results, by which JAX pairs donated ones
        return tx.step(grads, state, params)

    if how == "jit_step":
        lowered = jda.jit_step(tx, compiler_options=options).lower(grads, state, params)
    else:
        lowered = jax.jit(step, donate_argnums=(0, 1), compiler_options=options).lower(*args)
    lowered.compile()
    assert captured(tmp_path, "thunk_sequence") == [False]
    changed = "thunk_sequence_after_thunk_passes"  # which is written where there is a graph
    if how == "jit_step":
        assert captured(tmp_path, changed) == [True]
    else:
        assert not list(tmp_path.glob(f"*{changed}*"))


def test_integers_are_truncated_apart_from_their_updates(h200s):
    """In one fusion the GPU's compiler would round p - rate * x once: another integer."""
    mesh = h200s(1)
    tx = jda.fused_adamw(0.7, weight_decay=0.1)
    n = jax.ShapeDtypeStruct((4096,), jnp.int32)
    grads, state, params = placed(mesh, (n, jax.eval_shape(tx.init, n), n), (P(), P(), P()))
    text = jax.jit(tx.step).lower(grads, state, params).compile().as_text()
    computations = [re.findall(r"= \S+ ([a-z-]+)\(", part) for part in re.split(r"\n}\n", text)]
    assert ["add", "convert", "convert", "parameter", "parameter"] in map(sorted, computations)


@few(2)
@pytest.mark.parametrize(
    ("main", "stored"),
    [
        (None, "block8"),
        (jnp.float32, "block8"),
        ("remainder16", "block8"),
        ("remainder16", "block16"),
    ],
    ids=str,
)
def test_coded_moments_are_updated_in_place_in_a_cuda_graph(h200s, tmp_path, main, stored):
    """No copy, all of the state aliased, and a call of its own is captured."""
    mesh = h200s(1)
    tx = jda.fused_adamw(
        1e-3, main_params_dtype=main, mu_dtype=stored, nu_dtype=stored, rounding="stochastic"
    )
    params = {"w": jax.ShapeDtypeStruct((4096, 512), jnp.bfloat16), "b": jax.ShapeDtypeStruct((512,), jnp.bfloat16)}  # fmt: skip
    args = placed(mesh, (params, jax.eval_shape(tx.init, params), params), P())
    options = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True}

    params, state, grads = args
    compiled = jda.jit_step(tx, compiler_options=options).lower(grads, state, params).compile()
    text = compiled.as_text()
    assert 'custom_call_target="jdistadam_quantized"' in text
    assert re.findall(r"= (?:u8|bf16|f32|u16)\[[\d,]{2,}\]\S* copy\(", text) == []
    moved = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(args[:2]))
    assert compiled.memory_analysis().alias_size_in_bytes == moved
    assert all(captured(tmp_path, "thunk_sequence_after_thunk_passes"))


@few(1)
@pytest.mark.parametrize("chain", [jda.chain, optax.chain], ids=["ours", "of optax"])
def test_a_clip_in_our_chain_writes_no_gradient(h200s, chain):
    """The norm reads them, and the kernel. optax's chain writes clipped ones, and an update."""
    tx = chain(optax.clip_by_global_norm(1.0), jda.fused_adamw(1e-3, weight_decay=0.1))
    mesh = h200s(1)
    params = {k: jax.ShapeDtypeStruct((256, 1024), jnp.bfloat16) for k in "ab"}
    args = placed(mesh, (params, jax.eval_shape(tx.init, params), params), P())

    def step(params, state, grads):
        return (by_step if chain is jda.chain else by_update)(tx, grads, state, params)

    text = jax.jit(step, donate_argnums=(0, 1)).lower(*args).compile().as_text()
    entry = text[text.index("\nENTRY") :]
    made = re.findall(r"^ +\S+ = (.*?) (fusion|copy|custom-call|convert)\(", entry, re.M)
    written = [op for types, op in made if op != "custom-call" and "256,1024" in types]
    assert bool(written) == (chain is optax.chain), entry
