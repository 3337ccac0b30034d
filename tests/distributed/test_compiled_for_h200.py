"""What XLA makes of our programs for eight H200s, compiled here without any.

The CPU backend cannot tell: it widens 16-bit collectives to float32.
"""

import collections
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from jdistadam.distributed import calls
from jdistadam.tools import hlo
from support.h200 import (
    WIDTH,
    by_op,
    captured,
    collectives,
    compile_step,
    loss_fn,
    params_of,
    placed,
)
from support.optimizers import distributed_adamw
from support.samples import few, often

GATHERED_ONCE = dict(sharding_strategy="optim_grads_params", reshard_after_forward=False)


@pytest.fixture(scope="module")
def bfloat16_step(h200s):
    """A step of bfloat16 params, with communication in bfloat16."""
    return compile_step(h200s(8), jnp.bfloat16, jnp.bfloat16)


@few(1)
@pytest.mark.parametrize("comm", [jnp.float32, jnp.bfloat16], ids=str)
@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.bfloat16], ids=str)
@often(lambda param_dtype, comm: comm == jnp.bfloat16)  # float32: see test_schedule.py
def test_the_policys_dtypes_are_communicated_and_nothing_else(
    h200s, bfloat16_step, param_dtype, comm
):
    """One reduce-scatter of all gradients, one all-gather of all parameters, two scalars."""
    is_shared = param_dtype == comm == jnp.bfloat16
    tx, params, compiled = bfloat16_step if is_shared else compile_step(h200s(8), param_dtype, comm)
    shard_elements = sum(b.shard_size for b in tx.config.layout(params).buckets)
    short = {jnp.float32: "f32", jnp.bfloat16: "bf16"}
    assert by_op(compiled.as_text()) == {
        ("reduce-scatter", short[comm]): shard_elements,
        ("all-gather", short[param_dtype]): 8 * shard_elements,
        ("all-reduce", "f32"): 2,  # the norm and the loss
    }


def test_matrix_products_multiply_by_no_vector(bfloat16_step):
    """Otherwise XLA multiplies activations by a scale once for each product that takes them."""
    instructions = list(hlo.instructions(bfloat16_step[2].as_text()))
    products = {computation for computation, line in instructions if " dot(" in line}
    assert len(products) >= 12  # of three layers: two forward, and four backward
    scaled = [x for computation, x in instructions if computation in products and "multiply(" in x]
    assert scaled == []


@pytest.mark.parametrize("comm", [jnp.float32, jnp.bfloat16], ids=str)
@often(lambda comm: comm == jnp.bfloat16)
def test_micro_batches_are_sent_once(h200s, comm):
    """Gradients add up in float32 in a loop without collectives; their sum is sent once."""
    tx, params, compiled = compile_step(h200s(8), jnp.bfloat16, comm, accumulate_steps=4)
    shard_elements = sum(b.shard_size for b in tx.config.layout(params).buckets)
    text = compiled.as_text()
    assert by_op(text) == {
        ("reduce-scatter", {jnp.float32: "f32", jnp.bfloat16: "bf16"}[comm]): shard_elements,
        ("all-gather", "bf16"): 8 * shard_elements,
        ("all-reduce", "f32"): by_op(text)["all-reduce", "f32"],
    }
    assert by_op(text)["all-reduce", "f32"] <= 4  # norm, loss and the weights, perhaps twice
    (loop,) = [line for line in text.splitlines() if re.search(r"= \(.*\) while\(", line)]
    carried = re.findall(r"(bf16|f32)\[([\d,]+)\]", loop.split(" while(")[0])
    matrices = [t for t, dims in carried if dims in ("512,2048", "2048,512")]
    assert matrices.count("f32") == 6  # one float32 sum a matrix
    body = re.search(r"body=%([\w.-]+)", loop)[1]
    inside = text.split(f"%{body} (")[1].split("\n}\n")[0]
    assert "while(" not in inside and list(collectives(inside)) == []


@few(1)
@pytest.mark.parametrize("accumulated", [False, True])
def test_own_norm_costs_nothing(h200s, accumulated):
    """tx.grad_norm before tx.step on the same gradients: they are sent once."""
    mesh = h200s(8)
    policy = jda.MixedPrecisionPolicy(grad_comm_dtype=jnp.bfloat16)
    tx = distributed_adamw(1e-3, mesh=mesh, policy=policy)
    params = params_of(jnp.bfloat16)
    for layer in params.values():  # two dtypes, so that the layout depends on them
        layer["scale"] = layer["scale"].update(dtype=jnp.float32)
    specs = (P(), tx.state_specs())

    def local_step(params, state, batch):
        grads = jax.grad(loss_fn)(jda.local_params(params, tx), batch)
        if accumulated:
            grads = tx.accumulate(tx.init_grads(params), grads)
        norm = tx.grad_norm(grads, state)
        return *tx.step(grads, state, params), norm

    own = jax.shard_map(
        local_step, mesh=mesh, in_specs=(*specs, P("data")), out_specs=(*specs, P())
    )
    state = placed(mesh, jax.eval_shape(tx.init, params), tx.state_specs())
    batch = placed(mesh, jax.ShapeDtypeStruct((64, WIDTH), jnp.bfloat16), P("data"))
    text = (
        jax.jit(own, donate_argnums=(0, 1))
        .lower(placed(mesh, params, P()), state, batch)
        .compile()
        .as_text()
    )
    assert text.count('custom_call_target="jdistadam_norm"') == 1
    shard_elements = sum(b.shard_size for b in tx.config.layout(params).buckets)
    assert by_op(text) == {
        ("reduce-scatter", "bf16"): shard_elements,
        ("all-gather", "bf16"): 8 * shard_elements - 3 * WIDTH,
        ("all-gather", "f32"): 3 * WIDTH,
        ("all-reduce", "f32"): 2 if accumulated else 1,  # the norm, and the weights
    }


@few(1)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
def test_one_device_copies_nothing(h200s, dtype):
    """Parameters in float32 are updated where they are; those in 16 bits come from their copy."""
    tx, params, compiled = compile_step(h200s(1), dtype, jnp.bfloat16)
    assert re.findall(r"(?:f32|bf16)\[[\d,]+\]\S* copy(?:-start)?\(", compiled.as_text()) == []
    layout = tx.config.layout(params)
    num_params = sum(x.size for x in jax.tree.leaves(params))
    assert layout.main_size == (0 if dtype == jnp.float32 else layout.flat_size)
    assert compiled.memory_analysis().alias_size_in_bytes == (
        jnp.dtype(dtype).itemsize * num_params
        + 4 * (layout.main_size + 2 * layout.flat_size)
        + 4
        + 16  # count, digest of the layout
    )


def test_early_updates_of_rematerialized_layers_copy_no_parameter(h200s, monkeypatch):
    monkeypatch.setattr(calls, "WINDOW", 4 * WIDTH**2)

    @jax.checkpoint
    def layer(weights, x):
        scaled = x * weights["scale"][None].astype(x.dtype)
        return x + jnp.tanh(scaled @ weights["up"]) @ weights["down"]

    def loss(params, x):
        for weights in params.values():
            x = layer(weights, x)
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    options = dict(loss=loss, rows=4096, early_updates=True, max_grad_norm=None)
    options |= dict(main_params_dtype="remainder16")  # which a kernel call updates in place
    text = compile_step(h200s(1), jnp.bfloat16, jnp.bfloat16, **options)[2].as_text()
    assert text.count('custom_call_target="jdistadam_adam"') > 6
    copies = re.findall(r"= (?:\()?(\w+)\[([\d,]+)\]\S* copy(?:-start)?\(", text)
    assert copies == []


def test_state_is_updated_in_place(bfloat16_step):
    """No copy of the flat arrays, nor of a parameter; all of the state is aliased to its result."""
    tx, params, compiled = bfloat16_step
    text = compiled.as_text()
    assert text.count('custom_call_target="jdistadam_adam"') == 1
    copies = re.findall(r"= (?:\()?(\w+)\[([\d,]+)\]\S* copy(?:-start)?\(", text)
    assert copies == []
    assert not re.search(r"dynamic-update-slice|dynamic-slice", text)
    flat_size = tx.config.layout(params).flat_size
    num_params = sum(x.size for x in jax.tree.leaves(params))
    memory = compiled.memory_analysis()
    # params, main_params, mu, nu, count and digest; grad_norm is an output alone
    assert memory.alias_size_in_bytes == 2 * num_params + 3 * 4 * flat_size + 4 + 16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "main"),
    [("bfloat16", "float32"), ("float32", "float32"), ("bfloat16", "remainder16")],
)
def test_parameters_gathered_once_are_gathered_beside_the_forward_pass(h200s, dtype, main):
    """One gather for each bucket, all before the update, some of them while products run."""
    policy = dict(main_params_dtype=main)
    tx, params, compiled = compile_step(
        h200s(8), dtype, jnp.bfloat16, policy, rows=1 << 16, **GATHERED_ONCE
    )
    text = compiled.as_text()
    program = text[text.index("\nENTRY ") :].splitlines()  # in the order in which it runs
    place = {
        op: [i for i, line in enumerate(program) if re.search(rf" {op}\(", line)]
        for op in ("all-gather", "all-gather-start", "all-gather-done")
    }
    update = min(i for i, line in enumerate(program) if '"jdistadam_adam"' in line)
    layout = tx.config.layout(params)
    begun = place["all-gather"] + place["all-gather-start"]
    sharded = sum(bucket.is_sharded_param for bucket in layout.buckets)
    assert (sharded, len(layout.buckets)) == (6, 7) and len(begun) == 7
    assert sum(i < update for i in begun) == sharded  # small leaves are gathered after it
    products = [i for i, line in enumerate(program) if re.search(r"gemm|cublas", line)]
    pairs = zip(place["all-gather-start"], place["all-gather-done"], strict=True)
    overlapped = [any(a < i < b for i in products) for a, b in pairs]
    assert sum(overlapped) >= 5  # all but those of the first layer, which nothing can hide
    short = {"bfloat16": "bf16", "float32": "f32"}[dtype]
    assert by_op(text) == {
        ("reduce-scatter", "bf16"): sum(b.shard_size for b in layout.buckets),
        ("all-gather", short): 8 * sum(b.shard_size for b in layout.buckets),
        ("all-reduce", "f32"): 2,
    }
    assert re.findall(r"= (?:\()?(\w+)\[([\d,]+)\]\S* copy(?:-start)?\(", text) == []
    held = jda.plan(params, tx).held
    aliased = sum(held[name] for name in ("params", "main_params", "mu", "nu")) + 4 + 16
    assert compiled.memory_analysis().alias_size_in_bytes == aliased  # with count and digest


@pytest.mark.slow
def test_parameters_gathered_once_travel_as_planned_over_both_axes(h200s):
    """In float8, from state that is sharded over replicas too; the audit counts dtypes and times."""
    mesh = h200s(2, 4, names=("replica", "data"))
    policy = dict(grad_reduce_dtype="float32", param_comm_dtype="float8_e4m3fn")
    tx = distributed_adamw(
        1e-3,
        mesh=mesh,
        replica_axis="replica",
        outer_sharding_strategy="optim",
        **GATHERED_ONCE,
        policy=jda.MixedPrecisionPolicy(**policy),
    )
    state = jda.TrainState.shapes(params_of(jnp.bfloat16), tx)
    batch = jax.ShapeDtypeStruct((64, WIDTH), jnp.bfloat16)
    batch = placed(mesh, batch, tx.config.parallel.batch_spec)
    found = jda.audit(jda.train_step(loss_fn, tx, accumulate_steps=2), state, batch)
    assert found.passed, found
    gathers = {(row.dtype, row.devices) for row in found.rows if row.op == "all-gather"}
    assert gathers == {("float8_e4m3fn", 2), ("float8_e4m3fn", 4)}


@few(1)
@pytest.mark.parametrize(
    "n, dtype, main", [(8, "bfloat16", "remainder16"), (1, "float32", "float32")]
)
def test_averages_and_guards_send_and_copy_nothing(h200s, n, dtype, main):
    """An average is one array of the state more, which is updated in place; a guard is 16 bytes."""
    guard = jda.NormGuard(max_ratio=3.0)
    (tx, params, plain), (_, _, both) = (
        compile_step(
            h200s(n), jnp.dtype(dtype), jnp.bfloat16, dict(main_params_dtype=main), **options
        )
        for options in ({}, dict(ema_decay=0.99, norm_guard=guard))
    )
    assert by_op(both.as_text()) == by_op(plain.as_text())
    assert not re.search(r"\[[\d,]+\]\S* copy(?:-start)?\(", both.as_text())
    before, after = plain.memory_analysis(), both.memory_analysis()
    flat_bytes = 4 * tx.config.layout(params).flat_size
    assert after.alias_size_in_bytes - before.alias_size_in_bytes == flat_bytes + 16
    # What is temporary besides are scalars, each at an address that is a multiple of 256 bytes.
    assert after.temp_size_in_bytes - before.temp_size_in_bytes < 16 * 256


def test_norms_add_one_reduction_and_read_nothing_twice(h200s):
    """The step is one call still; of packed leaves alone it leaves more than a number for 128."""
    policy = dict(main_params_dtype="remainder16")
    (tx, params, plain), (_, _, measured) = (
        compile_step(h200s(8), jnp.bfloat16, jnp.bfloat16, policy, norms=norms)
        for norms in (None, "leaves")
    )
    layout, leaves, text = (
        tx.config.layout(params),
        len(jax.tree.leaves(params)),
        measured.as_text(),
    )
    before, after = collections.Counter(by_op(plain.as_text())), collections.Counter(by_op(text))
    assert after - before == {("all-reduce", "f32"): 3 * leaves} and not before - after
    assert text.count('custom_call_target="jdistadam_adam_squares"') == 1
    assert 'custom_call_target="jdistadam_adam"' not in text
    sizes = [compiled.memory_analysis() for compiled in (plain, measured)]
    assert sizes[1].alias_size_in_bytes == sizes[0].alias_size_in_bytes
    packed = sum(b.shard_size for b in layout.buckets if b.is_packed)
    most = 12 * (packed + layout.flat_size / 128) + 256 * 8 * leaves
    assert sizes[1].temp_size_in_bytes - sizes[0].temp_size_in_bytes < most


def test_temporary_memory_is_gradients_and_activations(bfloat16_step):
    """With communication in 16 bits nothing of the size of float32 gradients is ever held."""
    _, params, compiled = bfloat16_step
    num_params = sum(x.size for x in jax.tree.leaves(params))
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * num_params * 1.5


def test_a_step_over_peers_holds_gradients_and_mailboxes(h200s):
    """Two bytes of each gradient, and seven eighths of them for the parts of the others."""
    policy = dict(grad_reduce_dtype="float32")
    kwargs = dict(policy=policy, communication="peer", max_grad_norm=None)
    _, params, compiled = compile_step(h200s(8), jnp.bfloat16, jnp.bfloat16, **kwargs)
    num_params = sum(x.size for x in jax.tree.leaves(params))
    small = 0.01 * num_params
    assert 0 <= compiled.memory_analysis().temp_size_in_bytes - 3.75 * num_params < small


def test_a_custom_loop_over_peers_keeps_params_where_they_are(h200s):
    """Nothing is copied."""
    policy = jda.MixedPrecisionPolicy(grad_reduce_dtype="float32")
    tx = distributed_adamw(1e-3, mesh=h200s(8), policy=policy, communication="peer")
    state = jda.TrainState.shapes(params_of(jnp.bfloat16), tx)
    step = jax.shard_map(
        lambda state, grads: tx.step(  # gradients that depend on params, which else are no operands
            jax.tree.map(lambda x, p: x[0] * p, grads, state.params), state.opt_state, state.params
        ),
        mesh=tx.config.mesh,
        in_specs=(jda.TrainState(tx.param_specs(state.params), tx.state_specs()), P("data")),
        out_specs=(tx.param_specs(state.params), tx.state_specs()),
        check_vma=False,
    )
    grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct((8, *x.shape), x.dtype), state.params)
    grads = placed(tx.config.mesh, grads, P("data"))
    compiled = jax.jit(step, donate_argnums=0).lower(state, grads).compile()
    moved = re.findall(r"= (\w+\[[\d,]+\])\S* (?:copy|select)\(", compiled.as_text())
    assert moved == ["f32[2,12]"]  # the coefficients, NaN for a state of another layout
    held = jda.plan(state.params, tx).held
    aliased = sum(held[name] for name in ("params", "main_params", "mu", "nu")) + 4  # count
    assert compiled.memory_analysis().alias_size_in_bytes >= aliased


def test_the_layout_is_compared_in_kernels_that_run_anyway(h200s):
    """A custom training loop compares the digest without a launch, beside coefficients and norm."""
    tx = distributed_adamw(1e-3, mesh=h200s(1), max_grad_norm=1.0)
    params = params_of(jnp.bfloat16)
    specs = tx.param_specs(params), tx.state_specs()
    step = jax.shard_map(
        lambda grads, params, state: tx.step(grads, state, params),
        mesh=tx.config.mesh, in_specs=(specs[0], *specs), out_specs=specs, check_vma=False,
    )  # fmt: skip
    state = placed(tx.config.mesh, jax.eval_shape(tx.init, params), specs[1])
    params = placed(tx.config.mesh, params, specs[0])
    text = jax.jit(step, donate_argnums=(1, 2)).lower(params, params, state).compile().as_text()
    entry = text[text.index("ENTRY") :]
    (digest,) = re.findall(r"%(\S+) = u8\[16\]\S* parameter", entry)
    names = {digest, *re.findall(rf"%(\S+) = \S+ bitcast\(%{re.escape(digest)}\)", entry)}
    operands = [re.findall(r"%([\w.]+)", x) for x in re.findall(r" fusion\(([^)]*)\)", entry)]
    readers = [x for x in operands if names & set(x)]
    assert len(readers) == 2 and all(len(x) > 1 for x in readers), readers


@few(1)
@pytest.mark.parametrize("n", [1, 2])
def test_kernel_takes_the_communication_dtype_also_on_one_device(h200s, n):
    """Over one device XLA drops the collective; the operand's dtype keeps the rounding alive."""
    _, _, compiled = compile_step(h200s(n), jnp.float32, jnp.bfloat16)
    (call,) = [
        line for line in compiled.as_text().splitlines() if 'target="jdistadam_adam"' in line
    ]
    layouts = call.split("operand_layout_constraints=")[1].split("_", 1)[0]  # up to the next key
    operands = re.findall(r"(bf16|f32|pred)\[", layouts)
    # coefficients, inv_scale, found_inf, then gradients, main params, mu and nu. Two devices: seven
    # buckets and a flat array of main params; one: each of nine leaves, updated where it is.
    grads, params = (7, 1) if n == 2 else (9, 9)
    assert operands == ["f32", "f32", "pred", *["bf16"] * grads, *["f32"] * params, "f32", "f32"]
    if n == 1:
        assert "reduce-precision" in compiled.as_text()


def test_one_device_widens_no_gradients_to_the_dtype_of_sums(h200s):
    """Nothing is summed, so the program is that of sums in the dtype of communication."""
    texts = []
    for dtype in (None, "float32"):
        policy = dict(grad_reduce_dtype=dtype)
        *_, compiled = compile_step(h200s(1), jnp.bfloat16, jnp.bfloat16, policy=policy)
        texts.append(re.sub(r"metadata={[^}]*}", "", compiled.as_text()))
    assert texts[0] == texts[1] and "jdistadam_sum" not in texts[0]


def test_combine_thresholds_are_ours_and_can_be_overridden(h200s):
    """The options reach XLA: with a limit of one byte every bucket is a collective of its own."""
    mesh = h200s(8)
    tx = distributed_adamw(1e-3, mesh=mesh)
    params = params_of(jnp.bfloat16)
    state = placed(
        mesh,
        jda.TrainState(params, jax.eval_shape(tx.init, params)),
        jda.TrainState(P(), tx.state_specs()),
    )
    batch = placed(mesh, jax.ShapeDtypeStruct((64, WIDTH), jnp.bfloat16), P("data"))
    counts = []
    for options in (None, {"xla_gpu_reduce_scatter_combine_threshold_bytes": 1}):
        text = (
            jda.train_step(loss_fn, tx, compiler_options=options)
            .lower(state, batch)
            .compile()
            .as_text()
        )
        counts.append(sum(op == "reduce-scatter" for op, _ in collectives(text)))
    assert counts == [1, len(tx.config.layout(params).buckets)]


def test_the_check_of_dtypes_can_fail(h200s):
    """A gradient that is summed before it is rounded shows as a float32 reduce-scatter."""
    mesh = h200s(8)

    def late(x):
        return jax.lax.psum_scatter(x, "data", tiled=True).astype(jnp.bfloat16)

    shape = placed(mesh, jax.ShapeDtypeStruct((1024,), jnp.float32), P())
    mapped = jax.shard_map(late, mesh=mesh, in_specs=P(), out_specs=P("data"), check_vma=False)
    assert by_op(jax.jit(mapped).lower(shape).compile().as_text()) == {
        ("reduce-scatter", "f32"): 128
    }


def compile_and_dump(mesh, folder, options=None, **kwargs):
    """Compiles a step of a model with several layers, clipped; writes what XLA runs to a folder."""
    tx = jda.distributed(jda.fused_adamw(1e-3), mesh=mesh, max_grad_norm=1.0, **kwargs)
    params = {f"w{i}": jax.ShapeDtypeStruct((64, 64), jnp.float32) for i in range(4)}
    batch = placed(mesh, jax.ShapeDtypeStruct((32, 64), jnp.float32), P("data"))

    def loss(params, x):
        for w in params.values():
            x = jnp.tanh(x @ w)
        return jnp.mean(jnp.square(x))

    options = {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True} | (options or {})
    step = jda.train_step(loss, tx, compiler_options=options)
    step.lower(jda.TrainState.shapes(params, tx), batch).compile()


def test_step_of_one_device_is_captured_in_a_cuda_graph(h200s, tmp_path):
    """Handlers say that they only enqueue kernels, so XLA puts them into command buffers.

    Gradients, norm, clip and step: all in one graph.
    """
    compile_and_dump(h200s(1), tmp_path)
    assert captured(tmp_path, "thunk_sequence") == [False] * 3  # norm (two calls) and step
    assert captured(tmp_path, "thunk_sequence_after_thunk_passes") == [True] * 3


@few(1)
@pytest.mark.parametrize("communication", ["xla", "peer"])
def test_step_of_8_devices_is_captured_between_its_collectives(h200s, tmp_path, communication):
    """The gradients, and our calls between two collectives, if graphs may have one operation.

    A call over peer memory waits for the other devices on the host, so it is in no graph.
    """
    policy = jda.MixedPrecisionPolicy(grad_reduce_dtype=jnp.float32)
    options = {"xla_gpu_graph_min_graph_size": 1}
    compile_and_dump(h200s(8), tmp_path, options, policy=policy, communication=communication)
    name = "thunk_sequence_after_thunk_passes"
    assert all(captured(tmp_path, name, "gemm"))
    assert all(captured(tmp_path, name)) == (communication == "xla")
