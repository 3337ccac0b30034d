"""Gradients that a program only widens from 16 bits reach the kernel as they are: the same bits."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from jdistadam.core.codecs import BLOCK8
from jdistadam.core.hyperparameters import NAMES
from jdistadam.drop_in import step as drop_in_step
from jdistadam.kernels import native
from jdistadam.kernels import sharded_adam as module
from jdistadam.kernels.operands import Operands, Rounding, RoundingSpec, Scalars, Spec
from support.bits import assert_trees_same_bits
from support.h200 import placed
from support.samples import few
from support.steps import by_update

HALVES = {"bf16": jnp.bfloat16, "f16": jnp.float16}
D = 2048


def operands(text):
    """The types of the arrays that each call of a step is given, in HLO's words."""
    constraints = (
        r'"jdistadam_(?:adam|quantized).*operand_layout_constraints=\{((?:[^{}]|\{[^{}]*\})*)'
    )
    return [re.findall(r"\w+\[[\d,]*\]", x) for x in re.findall(constraints, text)]


def compiled(mesh, tx, loss, params, x, *, step=None):
    """The program of a training step that casts parameters to bfloat16, for H200s."""
    step = step or (lambda grads, state, params: tx.step(grads, state, params))

    def train(params, state, x):
        grads = jax.grad(lambda p: loss(jax.tree.map(lambda y: y.astype(jnp.bfloat16), p), x))
        return step(grads(params), state, params)

    state = jax.eval_shape(tx.init, params)
    args = placed(mesh, (params, state, x), (P(), P(), P()))
    return jax.jit(train, donate_argnums=(0, 1)).lower(*args).compile()


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def unrolled(p, x):
    """A matrix that is used twice, whose gradients are added, and one with a scale."""
    x = jnp.tanh(jnp.tanh(x @ p["twice"]) @ p["twice"])
    return jnp.sum((x * p["scale"][None] @ p["w"]).astype(jnp.float32))


UNROLLED = {"scale": array(D), "twice": array(D, D), "w": array(D, D)}


def scanned(p, x):
    def layer(x, w):
        return jnp.tanh(x @ w), None

    return jnp.sum(lax.scan(layer, x, p["layers"])[0].astype(jnp.float32))


SCANNED = {"layers": array(3, 128, 128)}
GROUPS = dict(param_labels={"layers": "a"}, groups={"a": dict(lr_scale=0.5)})
CODED = dict(mu_dtype="block8", nu_dtype="block8", rounding="stochastic")


def test_an_unrolled_model_has_no_wide_gradient(h200s):
    """The sum of a scale's gradient stays float32, in a call of its own."""
    x = array(64, D, dtype=jnp.bfloat16)
    tx = jda.fused_adamw(1e-3)
    text = compiled(h200s(1), tx, unrolled, UNROLLED, x).as_text()
    first, second = sorted(operands(text), key=len)
    matrix = f"f32[{D},{D}]"
    assert sorted(second[3:]) == sorted([f"bf16[{D},{D}]"] * 2 + [matrix] * 6)
    assert first[3:] == [f"f32[{D}]"] * 4
    assert not re.findall(rf"= f32\[{D},{D}\]\S* (?:convert|fusion)\(", text)
    updating = functools.partial(by_update, tx)
    text = compiled(h200s(1), tx, unrolled, UNROLLED, x, step=updating).as_text()
    assert any(f"bf16[{D},{D}]" in x for x in operands(text))  # an update's, too


@few(1)
@pytest.mark.parametrize("norms", [False, True])
def test_temporary_memory_is_optax_s(h200s, monkeypatch, norms):
    """Gradients are freed as they are used, in calls that are small beside all of them."""
    monkeypatch.setattr(drop_in_step, "_BYTES_A_CALL", 4 * D * D)

    def loss(p, x):  # whose gradients need no parameters
        xs = [jnp.sin((i + 1) * x) for i in range(len(p) + 1)]
        pairs = zip(xs, p.values(), xs[1:], strict=False)  # no products with equal operands
        return sum(jnp.sum(((x @ w) * y).astype(jnp.float32)) for x, w, y in pairs)

    params = {f"w{i}": array(D, D) for i in range(6)}
    x, ours, theirs = array(16, D, dtype=jnp.bfloat16), jda.fused_adamw(1e-3), optax.adamw(1e-3)
    step = {"step": ours.step_with_norms} if norms else {}
    one, other = (
        compiled(h200s(1), tx, loss, params, x, **how).memory_analysis().temp_size_in_bytes
        for tx, how in ((ours, step), (theirs, {"step": functools.partial(by_update, theirs)}))
    )
    assert one <= 1.01 * other + 2**20 * norms  # the sums of squares of runs


@few(1)
@pytest.mark.parametrize(
    "how",
    ["step", "norms", "groups", "coded", "chain", "injected", "if_finite", "decay_parts", "scan", "jit"],
)  # fmt: skip
def test_a_scanned_model_has_no_wide_gradient(h200s, how):
    step = None
    tx = jda.fused_adamw(1e-3, **{"groups": GROUPS, "coded": CODED}.get(how, {}))
    if how == "norms":
        step = lambda *args: tx.step_with_norms(*args)  # noqa: E731
    elif how == "chain":
        tx = jda.chain(optax.identity(), tx)
    elif how == "injected":
        tx = jda.inject_hyperparams(jda.fused_adamw)(learning_rate=1e-3)
    elif how == "if_finite":
        tx = jda.apply_if_finite(tx, 3)
    elif how == "decay_parts":
        tx = jda.chain(jda.scale_by_adam(), jda.scale_by_learning_rate(1e-3))
    elif how == "jit":
        step = jax.jit(lambda *args: tx.step(*args))  # whose gradients are arguments
    loss = scanned
    if how == "scan":  # steps in a loop, each with gradients of its own

        def step(grads, state, params):
            def one(carry, _):
                g = jax.grad(
                    lambda p: scanned(jax.tree.map(lambda y: y.astype(jnp.bfloat16), p), x1)
                )
                return tx.step(g(carry[0]), carry[1], carry[0]), None

            del grads
            x1 = jnp.ones((64, 128), jnp.bfloat16)
            return lax.scan(one, (params, state), None, length=2)[0]

    text = compiled(h200s(1), tx, loss, SCANNED, array(64, 128, dtype=jnp.bfloat16), step=step)
    (given,) = operands(text.as_text())
    wide = given.count("f32[3,128,128]"), given.count("bf16[3,128,128]")
    assert wide == {"jit": (4, 0), "coded": (1, 1)}.get(how, (3, 1))


@few(1)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("where", ["replicated", "state", "shard_map"])
def test_several_devices_pass_narrow_gradients_on(h200s, kind, where):
    mesh = h200s(2, axis_types=(kind,))
    tx = jda.fused_adamw(1e-3)
    x = array(64, 128, dtype=jnp.bfloat16)
    state = jax.eval_shape(tx.init, SCANNED)
    shardings = jda.state_shardings(state, SCANNED, mesh)

    def train(params, state, x):
        grads = jax.grad(lambda p: scanned(jax.tree.map(lambda y: y.astype(jnp.bfloat16), p), x))
        return tx.step(grads(params), state, params)

    if where == "shard_map":
        train = jax.shard_map(train, mesh=mesh, in_specs=(P(), P(), P()), out_specs=P(), check_vma=False)  # fmt: skip
    specs = jax.tree.map(lambda s: s.spec if where == "state" else P(), shardings)
    args = placed(mesh, (SCANNED, state, x), (P(), specs, P("data") if where == "state" else P()))
    text = jax.jit(train, donate_argnums=(0, 1)).lower(*args).compile().as_text()
    (given,) = operands(text)
    assert [x[:2] for x in given].count("bf") == 1, given


def widened(function):
    return lambda *args: function(*args).astype(jnp.float32)


SMALL, LARGE, LONG, TALL = (256, 256), (2048, 2048), (65536, 256), (4, 256, 256)
# name: function, shapes of its operands, HLO of the rounded result, whether the kernel may read it
MAKERS = {
    "product": (lambda x, y: x @ y, (LARGE, LARGE), "dot", True),
    "transposed": (lambda x, y: (x.T @ y).T.reshape(4096, 1024), (LARGE, LARGE), "dot", True),
    "product of a long sum": (lambda x, y: x.T @ y, (LONG, LONG), None, False),
    "sum": (lambda x, y: x + y, (SMALL, SMALL), "add", True),
    "loop": (lambda x, y: lax.scan(lambda c, z: (c, z @ y), x, x[None] * jnp.ones((3, 1, 1), x.dtype))[1], (SMALL, SMALL), "dynamic-update-slice", True),
    "loop that runs once": (lambda x, y: lax.scan(lambda c, z: (c, z.T @ y), y, x[None])[1], (LONG, LONG), None, False),
    "array that a loop only keeps": (lambda x, y: lax.fori_loop(0, 3, lambda i, c: (c[0], c[1] @ y), (x.astype(jnp.float32).astype(y.dtype), y))[0], (SMALL, SMALL), None, False),
    "scatter": (lambda x, y: x.at[jnp.array([3, 1, 3])].add(y[:3]), (SMALL, SMALL), "scatter", True),
    "barrier": (lambda x, y: lax.optimization_barrier(x @ y), (SMALL, SMALL), "fusion", True),
    "argument": (lambda x, y: x, (SMALL, SMALL), None, True),
    "quotient": (lambda x, y: x / y, (SMALL, SMALL), None, False),
    "maximum": (lambda x, y: jnp.maximum(x, y), (SMALL, SMALL), None, False),
    "sum of rows": (lambda x, y: jnp.sum(x * y, 0), (SMALL, SMALL), None, False),
}  # fmt: skip


@few(2)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", MAKERS)
def test_only_arrays_are_read_whose_rounding_xla_keeps(h200s, name, dtype):
    make, shapes, operation, is_narrow = MAKERS[name]
    mesh, tx = h200s(1), jda.fused_adamw(1e-3)
    args = placed(mesh, tuple(array(*x, dtype=HALVES[dtype]) for x in shapes), (P(), P()))
    wide = jax.eval_shape(widened(make), *args)
    if operation:
        text = jax.jit(widened(make)).lower(*args).compile().as_text()
        assert re.search(rf"= {dtype}\[[\d,]+\]\S* {operation}\(", text)

    def step(params, state, *args):
        return tx.step(widened(make)(*args), state, params)

    state = placed(mesh, jax.eval_shape(tx.init, wide), P())
    text = jax.jit(step).lower(placed(mesh, wide, P()), state, *args).compile().as_text()
    (given,) = operands(text)
    kinds = [x.split("[")[0] for x in given[3:]]
    assert kinds == [dtype if is_narrow else "f32", "f32", "f32", "f32"]


@few(2)
@pytest.mark.parametrize("how", ["plain", "transposed", "precision", "inner jit"])
def test_a_rounding_on_purpose_stays_as_it_is(h200s, how):
    """Where a program rounds float32 itself, XLA may drop that, and the kernel reads what it did."""
    mesh, tx, p = h200s(1), jda.fused_adamw(1e-3), array(2048, 2048)

    def rounded(x):
        x = lax.reduce_precision(x, 8, 7) if how == "precision" else x
        return x.astype(jnp.bfloat16).T if how == "transposed" else x.astype(jnp.bfloat16)

    def step(params, state, x):
        run = lambda g, *args: tx.step(g.astype(jnp.float32), *args)  # noqa: E731
        return (jax.jit(run) if how == "inner jit" else run)(rounded(x), state, params)

    args = placed(mesh, (p, jax.eval_shape(tx.init, p), p), P())
    (given,) = operands(jax.jit(step).lower(*args).compile().as_text())
    assert given[3:] == ["f32[2048,2048]"] * 4


@pytest.mark.parametrize("capability", ["8.6", None])
def test_sums_of_other_gpus_stay_wide(h200s, monkeypatch, capability):
    """XLA adds in float32 for a GPU that cannot add halves, and where it is not known which it is."""
    mesh, tx, p = h200s(1), jda.fused_adamw(1e-3), array(256, 256)
    devices = [type("Gpu", (), {"compute_capability": capability})()] if capability else []
    monkeypatch.setattr(module.compat, "devices_of_lowering", lambda ctx: (devices, 1))

    def step(params, state, x):
        return tx.step((x + x * x).astype(jnp.float32), state, params)

    x = array(256, 256, dtype=jnp.bfloat16)
    args = placed(mesh, (p, jax.eval_shape(tx.init, p), x), (P(), P(), P()))
    (given,) = operands(jax.jit(step).lower(*args).compile().as_text())
    assert given[3:] == ["f32[256,256]"] * 4


@pytest.mark.parametrize("platforms", [("cuda",), ("cpu", "cuda"), ("cpu",)], ids=str)
def test_programs_exported_for_gpus_alone_read_narrow_gradients(platforms):
    """XLA for CPUs could drop the rounding of a narrow one."""
    status = native.status("cuda")
    if not status.available:
        pytest.skip(f"needs the CUDA module: {status.detail}")
    tx, x = jda.fused_adamw(1e-3), array(16, D, dtype=jnp.bfloat16)

    def train(params, state, x):
        loss = lambda p: jnp.sum((x @ p.astype(jnp.bfloat16)).astype(jnp.float32))  # noqa: E731
        return tx.step(jax.grad(loss)(params), state, params)

    checks = jda.export_checks()
    exporting = jax.export.export(jax.jit(train), platforms=platforms, disabled_checks=checks)
    params = array(D, D)
    text = exporting(params, jax.eval_shape(tx.init, params), x).mlir_module()
    calls = re.findall(r"custom_call @jdistadam_adam\(.*? : \((.*?)\) ->", text)
    given = [re.findall(rf"tensor<{D}x{D}x(\w+)>", call) for call in calls]
    assert given == [["bf16" if platforms == ("cuda",) else "f32", "f32", "f32", "f32"]]


@few(1)
@pytest.mark.parametrize("kind", ["step", "step_and_cast", "coded", "squares"])
def test_calls_by_dtype_have_the_bits_of_one(kind):
    """Leaves of both dtypes in any order; random bits and sums of squares, too."""
    rng = np.random.default_rng(0)
    sizes = [300, 1024, 5, 128, 640]
    halves = [0, 2, 3]
    leaves = [jnp.asarray(rng.normal(size=(4, n)), jnp.float32) for n in sizes]
    narrow = [x.astype(jnp.bfloat16) if i in halves else x for i, x in enumerate(leaves)]
    wide = tuple(x.astype(jnp.float32) for x in narrow)
    moments = [tuple(jnp.abs(x) for x in leaves)] * 2
    rounding, static = None, None
    if kind == "coded":
        named = zip(("mu", "nu"), moments, strict=True)
        moments = [tuple(BLOCK8.encode(name, x, None, jnp) for x in m) for name, m in named]
        rounding = Rounding(jnp.arange(2, dtype=jnp.uint32), jnp.int32(3))
        static = RoundingSpec(True, (7, 3, 9, 1, 4))
    out = jnp.bfloat16 if kind == "step_and_cast" else None
    mode = kind if out else "step"
    spec = Spec(mode, (0, 1, 1, 0, 1), out_dtype=out, rounding=static)
    rows = jnp.asarray(rng.uniform(0.1, 0.9, size=(2, len(NAMES))), jnp.float32)
    scalars, with_squares = Scalars.plain(rows), kind == "squares"

    @functools.partial(jax.jit, static_argnums=0)
    def run(is_narrow, grads):
        given = Operands(grads, tuple(leaves), *moments)
        args = scalars, given, rounding, tuple(leaves)
        if not is_narrow:
            return module.sharded_adam(spec, *args, with_squares=with_squares)
        flat, treedef = jax.tree.flatten(args)
        return module._calls_by_dtype(spec, treedef, with_squares, *flat)

    one, several = run(False, wide), run(True, tuple(narrow))
    assert_trees_same_bits(jax.tree.leaves(one), several)


def block(x, p):
    return x + jnp.tanh(x @ p["up"] * p["scale"][None]) @ p["down"]


def tower(p, x, *, is_scanned):
    if is_scanned:
        x, _ = lax.scan(lambda x, layer: (block(x, layer), None), x, p)
    else:
        for i in range(len(p["scale"])):
            x = block(x, {k: p[k][i] for k in p})
    return jnp.mean(jnp.square(x.astype(jnp.float32)))


@pytest.mark.gpu
@pytest.mark.parametrize("is_scanned", [True, False])
@pytest.mark.parametrize("how", ["step", "norms", "coded"])
def test_training_has_the_bits_of_wide_gradients(how, is_scanned):
    """Twelve steps: a barrier around float32 gradients keeps their casts from the kernel."""
    decayed = dict(b1=0.8, b2=0.95, eps=1e-6, weight_decay=0.1)
    tx = jda.fused_adamw(1e-3, **decayed, **(CODED | {"seed": 3} if how == "coded" else {}))
    step = tx.step_with_norms if how == "norms" else tx.step
    if is_scanned:
        loss = functools.partial(tower, is_scanned=True)
    else:  # one array for each layer, as a model without a scan has

        def loss(p, x):
            return tower({k: [layer[k] for layer in p] for k in p[0]}, x, is_scanned=False)

    rng, layers = np.random.default_rng(5), 3
    scale = {"up": D**-0.5, "scale": 1.0, "down": D**-0.5}
    dims = {"up": (D, D), "scale": (D,), "down": (D, D)}
    made = {k: rng.normal(size=(layers, *dims[k])).astype(np.float32) * scale[k] for k in dims}
    params = made if is_scanned else [{k: made[k][i] for k in made} for i in range(layers)]
    batches = jnp.asarray(rng.normal(size=(12, 64, D)), jnp.bfloat16)

    def run(is_narrow):
        def train(params, state, x):
            half = lambda p: jax.tree.map(lambda y: y.astype(jnp.bfloat16), p)  # noqa: E731
            grads = jax.grad(lambda p: loss(half(p), x))(params)
            grads = grads if is_narrow else lax.optimization_barrier(grads)
            return step(grads, state, params)

        gpu = jax.devices("gpu")[0]
        args = jax.device_put((params, tx.init(params), batches[0]), gpu)
        # Products take the same kernel in both programs.
        options = {"xla_gpu_autotune_level": 0, "xla_gpu_deterministic_ops": True}
        program = jax.jit(train).lower(*args).compile(compiler_options=options)
        given, result = [x for call in operands(program.as_text()) for x in call], args
        for x in batches:
            result = program(*result[:2], jax.device_put(x, gpu))
        return any(x.startswith("bf16") for x in given), result

    (is_read, one), (is_read_wide, other) = run(True), run(False)
    assert is_read and not is_read_wide
    assert_trees_same_bits(one, other)
