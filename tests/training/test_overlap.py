"""Copies run beside the model: the order of starts, products, waits and updates, by [Note: overlap]."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jdistadam as jda
from jdistadam.distributed import calls
from jdistadam.kernels import copies, parts
from jdistadam.training import overlap
from support.bits import assert_trees_same_bits
from support.samples import few, often

N, LAYERS, WIDTH = 4, 4, 256
SUMS = jda.MixedPrecisionPolicy(grad_comm_dtype="bfloat16", grad_reduce_dtype="float32")
ONCE = dict(sharding_strategy="optim_grads_params", reshard_after_forward=False)
GRADIENTS = dict(sharding_strategy="optim_grads")
BLOCKS = dict(
    sharding_strategy="optim_grads_params", layers=lambda path: None if "embed" in path else "block"
)
WHOLE = ONCE | dict(reshard_after_backward=lambda path: not ("embed" in path or "b0" in path))
SCAN = dict(
    sharding_strategy="optim_grads_params", layers=lambda path: "scan" if "layers" in path else None
)
BLOCK_BYTES = 8 * WIDTH * WIDTH * 2  # of a block's parameters


def shapes(num_scanned=0):
    """Of a model with blocks, or with a stack of layers."""
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)  # noqa: E731
    block = {"up": array(WIDTH, 4 * WIDTH), "down": array(4 * WIDTH, WIDTH)}
    block |= {"scale": array(WIDTH)}
    blocks = {f"b{i}": block for i in range(LAYERS)}
    if num_scanned:
        blocks = {"layers": {k: array(num_scanned, *v.shape) for k, v in block.items()}}
    return {"embed": array(2048, WIDTH), **blocks}


def block(x, p):
    return x + jax.nn.relu((x * p["scale"][None, None]) @ p["up"]) @ p["down"]


def loss_of(wrapped, tx=None, after=False, is_linear=False, **options):
    """A tied embedding, and blocks that may be wrapped, for example in ``jax.checkpoint``.

    ``after``: whether blocks are gathered after the input of the one before. ``is_linear``: the sum
    of logits in place of entropies. ``options``: of the scan, if there is a stack of layers.
    """

    def gather(p, before):
        return p if tx is None else jda.gather_params(p, tx, after=before if after else None)

    def loss(params, tokens):
        x = params["embed"][tokens[:, :-1]]
        call, before = wrapped(lambda x, p, *before: block(x, gather(p, before))), x
        if "layers" in params:
            x = jax.lax.scan(lambda x, p: (call(x, p), None), x, params["layers"], **options)[0]
        for i in range(LAYERS if "layers" not in params else 0):
            x, before = call(x, params[f"b{i}"], *[before] * after), x
        logits = (x @ params["embed"].T).astype(jnp.float32)
        picked = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
        if is_linear:
            return jnp.sum(picked)
        return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)

    return loss


def make(mesh, means="peer", wrapped=lambda f: f, accumulate_steps=1, scan=None, **options):
    of_loss = {k: options.pop(k) for k in ("after", "is_linear") if k in options}
    tx = jda.distributed(
        jda.fused_adamw(1e-3, weight_decay=0.1),
        mesh=mesh,
        policy=SUMS,
        communication=means,
        **options,
    )
    loss = loss_of(wrapped, tx, **of_loss, **scan or {})
    return tx, jda.train_step(loss, tx, accumulate_steps=accumulate_steps)


@pytest.fixture
def small_groups(monkeypatch):
    """A block's parameters travel together, as large ones do."""
    monkeypatch.setattr(overlap, "TOGETHER_BYTES", BLOCK_BYTES * (N - 1) // N)
    monkeypatch.setattr(overlap, "AHEAD_BYTES", 2 * BLOCK_BYTES)
    monkeypatch.setattr(calls, "COPIED_BYTES", BLOCK_BYTES)


def computations_of(text, start="\nENTRY"):
    """The computations of a program that begin like ``start`` and copy."""
    found = [(start + x).split("\n}")[0] for x in text.split(start)[1:]]
    return [body for body in found if copies.WAIT in body]


def events_of(text, start="\nENTRY"):
    """What a program does, in order: "exchange", "gather", "wait", "product", "sum", "step".

    Or the first computation that begins like ``start`` and copies.
    """
    found = []
    for line in computations_of(text, start)[0].splitlines():
        target = re.search(r'custom_call_target="(\w+)"', line)
        if target and target[1] == copies.START:
            found.append("gather" if "gathers = true" in line else "exchange")
        elif target and target[1] == copies.WAIT:
            found.append("wait")
        elif target and target[1] in (parts.SUM, parts.STEP):
            found.append("step" if target[1] == parts.STEP else "sum")
        elif re.match(r"\s+(ROOT )?%?gemm_fusion", line) or "cublas" in (target or [""])[0]:
            found.append("product")
    return found


def products_beside(computation, gathers=True):
    """For each gather or exchange, as it starts: how many products run between start and wait."""
    count, started, found, tuples = 0, {}, {}, {}
    for line in re.sub(r"/\*index=\d+\*/", "", computation).splitlines():
        name = re.search(r"(%?[\w.-]+) = ", line)
        operands = re.search(r" ([\w-]+)\((%?[\w.-]+(?:, %?[\w.-]+)*)\)", line)
        op, of = (operands[1], operands[2].split(", ")) if name and operands else (None, [])
        if op == "tuple":
            tuples[name[1]] = of
        elif op == "get-tuple-element":
            i = int(re.search(r"index=(\d+)", line)[1])
            source = tuples[of[0]][i] if of[0] in tuples else of[0]
            if source in started:
                started[name[1]] = started[source]
        elif copies.START in line and ("gathers = true" in line) == gathers:
            started[name[1]] = len(found)
            found[len(found)] = -count
        elif copies.WAIT in line and of[0] in started:
            found[started[of[0]]] += count
        count += bool(re.match(r"\s+(ROOT )?%?gemm_fusion", line) or "cublas" in line)
    return list(found.values())


def compiled(mesh, num_scanned=0, dtype=jnp.bfloat16, **options):
    tx, step = make(mesh, **options)
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), shapes(num_scanned))
    state = jda.TrainState.shapes(params, tx)
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    count = 2 * N * options.get("accumulate_steps", 1)
    tokens = jax.ShapeDtypeStruct((count, 129), jnp.int32, sharding=rows)
    return step.lower(state, tokens).compile()


def moved(text):
    """Arrays that the program copies or transposes, but for scalars and coefficients."""
    made = re.findall(r"= \w+\[([\d,]+)\]\S* (?:copy|transpose)\(", text)
    return [dims for dims in made if np.prod([int(n) for n in dims.split(",")]) > 64]


@few(1)
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("wrapped", [lambda f: f, jax.checkpoint], ids=["plain", "checkpoint"])
def test_gradients_are_sent_during_the_backward_pass(h200s, small_groups, wrapped, clip):
    text = compiled(h200s(N), wrapped=wrapped, max_grad_norm=clip).as_text()
    events = events_of(text)
    last = len(events) - 1 - events[::-1].index("product")
    sent = [i for i, event in enumerate(events) if event == "exchange"]
    # Those of the last block to finish, and of the embedding, are known at the end.
    assert len(sent) >= LAYERS and sum(i < last for i in sent) >= LAYERS - 1
    # Without a norm the kernels of updates add them.
    assert events.index("wait") > last and ("sum" in events) == (clip is not None)
    assert all("product" in events[a:b] for a, b in itertools.pairwise(sent[:-1]))
    assert not moved(text)


@few(1)
@pytest.mark.parametrize("clip", [None, 1.0])
def test_parameters_are_gathered_right_after_their_update(h200s, small_groups, clip):
    events = events_of(compiled(h200s(N), max_grad_norm=clip).as_text())
    steps = [i for i, event in enumerate(events) if event == "step"]
    assert len(steps) > LAYERS
    for a, b in zip(steps, [*steps[1:], len(events)], strict=True):
        assert events[a:b].count("gather") == 1
        assert "wait" not in events[a : a + events[a:b].index("gather")]


@few(1)
@pytest.mark.parametrize(("options", "gathers"), [(ONCE, LAYERS + 1), (WHOLE, LAYERS - 1)])
def test_gathers_start_before_the_loss_and_are_waited_for_during_it(
    h200s, small_groups, options, gathers
):
    events = events_of(compiled(h200s(N), **options).as_text())
    first, last = events.index("product"), len(events) - 1 - events[::-1].index("product")
    before, during = events[:first], events[first:last]
    started = before.index("wait") if "wait" in before else first
    assert before[:started].count("gather") == before.count("gather") >= gathers - 1
    assert during.count("wait") >= LAYERS - 2  # one for each block
    assert during.count("gather") == 0
    # Whole ones are gathered after their updates, and others are updated meanwhile.
    at_the_end = [event for event in events[last:] if event in ("step", "gather")]
    if options is WHOLE:
        assert "step" in at_the_end[at_the_end.index("gather") :]
    else:
        assert at_the_end.count("gather") <= 1  # of small leaves


@few(1)
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("wrapper", ["checkpoint", "policy"])
def test_blocks_are_gathered_shortly_before_their_use(h200s, small_groups, wrapper, after):
    """In both passes two blocks ahead, and gradients are added when the next are on their way."""
    program = compiled(h200s(N), wrapped=WRAPPERS[wrapper], after=after, **BLOCKS)
    events = events_of(program.as_text())
    last = len(events) - 1 - events[::-1].index("product")
    first = events.index("product")
    assert events[:first].count("gather") <= 4  # of two blocks, and of the embedding
    passes = events[first:last]
    assert passes.count("gather") >= 2 * LAYERS - 4
    # All but the first ones, and new parameters, travel beside products, and not for long.
    beside = products_beside(computations_of(program.as_text())[0])
    assert len(beside) >= 2 * LAYERS and all(1 <= n <= 16 for n in beside[2:-1])
    sent = [i for i, event in enumerate(events) if event == "exchange"]
    sums = [i for i, event in enumerate(events) if event == "sum"]
    assert len(sent) >= LAYERS and sum(i < last for i in sums) >= 2 * (LAYERS - 2)
    assert sent[0] < sent[1] < sums[0] < sent[2]
    assert not moved(program.as_text())
    assert not re.search(r"wrapped_convert\S* = f32", program.as_text())


def test_gradients_of_micro_batches_are_sent_during_the_backward_pass(h200s, small_groups):
    """The loop over micro-batches has the same order within."""
    text = compiled(h200s(N), accumulate_steps=3, **GRADIENTS).as_text()
    events = events_of(text, start="\n%region")
    sent = [i for i, event in enumerate(events) if event == "exchange"]
    sums = [i for i, event in enumerate(events) if event == "sum"]
    last = len(events) - 1 - events[::-1].index("product")
    assert sum(i < last for i in sent) >= LAYERS - 1 and sum(i < last for i in sums) >= LAYERS - 2


@few(1)
@pytest.mark.parametrize("accumulate_steps", [1, 2])
@pytest.mark.parametrize("wrapper", ["checkpoint", "policy"])
def test_layers_of_a_scan_travel_beside_others(h200s, small_groups, wrapper, accumulate_steps):
    """Gathers beside the layer before, exchanges beside the next; no parameter is moved."""
    options = dict(accumulate_steps=accumulate_steps, num_scanned=6, **SCAN)
    text = compiled(h200s(N), wrapped=WRAPPERS[wrapper], **options).as_text()
    starts = ("\n%region", "\n%closed_call", "\n%wide", "\n%body", "\n%_body")
    loops = [x for start in starts for x in computations_of(text, start)]
    loops = [x for x in loops if " while(" not in x]  # one over micro-batches has others within
    forward, backward = sorted(loops, key=lambda x: "gathers = false" in x)
    exchanges = products_beside(backward, gathers=False)
    for beside in (products_beside(forward), products_beside(backward), exchanges):
        assert beside and all(n >= 2 for n in beside)
    assert not {dims for loop in loops for dims in moved(loop) if "1024" in dims.split(",")}


@few(1)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("wrapper", ["plain", "checkpoint"])
@pytest.mark.parametrize("num_scanned", [1, 2, 5])
@often(
    lambda num_scanned, wrapper, dtype: (
        (num_scanned, wrapper) == ((5, "checkpoint") if dtype is jnp.float32 else (2, "plain"))
    )
)
def test_no_copy_is_fused_with_a_slice_of_a_stack(h200s, num_scanned, wrapper, dtype):
    """A start and its wait would have different addresses. Stacks of shards are not widened."""
    options = dict(wrapped=WRAPPERS[wrapper], num_scanned=num_scanned, dtype=dtype, **SCAN)
    text = compiled(h200s(N), **options).as_text()
    fused = "".join(re.findall(r"\n%dynamic-slice-fusion.*?\n}", text, re.DOTALL))
    assert text.count(copies.START) >= 3 and copies.START not in fused and copies.WAIT not in fused


def numbers(mesh, means, wrapped, num_scanned=0, accumulate_steps=1, **options):
    tx, step = make(mesh, means, wrapped, accumulate_steps, **options)
    keys = jax.random.split(jax.random.key(0), 64)
    leaves, treedef = jax.tree.flatten(shapes(num_scanned))
    drawn = [  # in float32: XLA for CPUs merges products of bfloat16, and then rounds elsewhere
        0.05 * jax.random.normal(key, x.shape) for key, x in zip(keys, leaves, strict=False)
    ]
    state = jda.TrainState.create(treedef.unflatten(drawn), tx)
    for i in range(3):
        tokens = jax.random.randint(
            jax.random.key(i), (2 * mesh.size * accumulate_steps, 17), 0, 2048
        )
        state, metrics = jax.block_until_ready(step(state, jda.shard_batch(tokens, tx)))
    return state, metrics


def scanned(function):
    """A scan of one step, as a user's block may have."""
    return lambda x, *args: jax.lax.scan(
        lambda y, _: (function(y, *args), None), x, None, length=1
    )[0]


WRAPPERS = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "policy": functools.partial(jax.checkpoint, policy=jda.remat_policy),
    "scan of checkpoint": lambda f: scanned(jax.checkpoint(f)),
}


LOOPS = [  # lengths, and options of the scan
    (1, {}),
    (2, {}),
    (3, dict(reverse=True)),
    (6, dict(unroll=2)),
    (7, dict(unroll=3)),
]
OFTEN_SCANNED = {(1, "checkpoint", 1), (2, "policy", 3), (3, "plain", 1), (6, "checkpoint", 3)}
OFTEN_SCANNED |= {(7, "policy", 1)}


@few(1)
@pytest.mark.parametrize(("num_scanned", "scan"), LOOPS)
@pytest.mark.parametrize("wrapper", ["plain", "checkpoint", "policy"])
@pytest.mark.parametrize("accumulate_steps", [1, 3])
@often(
    lambda num_scanned, scan, wrapper, accumulate_steps: (
        (num_scanned, wrapper, accumulate_steps) in OFTEN_SCANNED
    )
)
def test_layers_of_a_scan_get_the_same_bits(cpu_mesh, num_scanned, scan, wrapper, accumulate_steps):
    options = dict(num_scanned=num_scanned, scan=scan, accumulate_steps=accumulate_steps)
    got, want = (
        numbers(cpu_mesh(N), means, WRAPPERS[wrapper], max_grad_norm=0.5, **options, **SCAN)
        for means in ("peer", "xla")
    )
    assert_trees_same_bits(got, want)


def step_on_integers(mesh, means, wrapped, num_scanned, accumulate_steps, seed, **options):
    """One step in which all products and sums are exact, so their order is any: small integers.

    A layer at most doubles the largest number, so float32 and TF32 hold all of them.
    """

    tx, step = make(mesh, means, wrapped, accumulate_steps, is_linear=True, **options)
    keys = jax.random.split(jax.random.key(seed), 4)
    permuted = lambda key: jax.random.permutation(key, jnp.eye(WIDTH), axis=1)  # noqa: E731
    up = jax.vmap(permuted)(jax.random.split(keys[0], num_scanned))
    down = jax.vmap(permuted)(jax.random.split(keys[1], num_scanned))
    nothing = jnp.zeros((num_scanned, WIDTH, 3 * WIDTH))
    layers = {
        "up": jnp.concatenate([up, nothing], 2),
        "down": jnp.concatenate([down, nothing.swapaxes(1, 2)], 1),
        "scale": jnp.ones((num_scanned, WIDTH)),
    }
    embed = jax.random.randint(keys[2], (2048, WIDTH), -1, 2).astype(jnp.float32)
    state = jda.TrainState.create({"embed": embed, "layers": layers}, tx)
    rows = 2 * mesh.size * accumulate_steps
    tokens = jax.random.randint(keys[3], (rows, 17), 0, 2048)
    return jax.block_until_ready(step(state, jda.shard_batch(tokens, tx)))


@pytest.mark.multigpu
@pytest.mark.parametrize(("num_scanned", "scan"), LOOPS)
@pytest.mark.parametrize(("wrapper", "accumulate_steps"), [("plain", 1), ("policy", 3)])
def test_layers_of_a_scan_get_the_same_bits_on_gpus(num_scanned, scan, wrapper, accumulate_steps):
    gpus = jax.devices("gpu")
    mesh = jax.make_mesh((len(gpus),), ("data",), devices=gpus)
    for seed in range(3):
        got, want = (
            step_on_integers(
                mesh,
                means,
                WRAPPERS[wrapper],
                num_scanned,
                accumulate_steps,
                seed,
                scan=scan,
                **SCAN,
            )
            for means in ("peer", "xla")
        )
        assert_trees_same_bits(got, want)


@few(1)
@pytest.mark.parametrize("accumulate_steps", [1, 3])
def test_layers_of_a_scan_are_copied_as_planned(cpu_mesh, accumulate_steps):
    wrapped = WRAPPERS["policy"]
    tx, step = make(cpu_mesh(N), wrapped=wrapped, accumulate_steps=accumulate_steps, **SCAN)
    tokens = np.zeros((2 * N * accumulate_steps, 17), np.int32)
    found = jda.audit(step, jda.TrainState.shapes(shapes(5), tx), tokens)
    assert found.passed, found


STRATEGIES = {"optim": {}, "once": ONCE, "whole": WHOLE, "gradients": GRADIENTS, "blocks": BLOCKS}
OFTEN = {("optim", "plain"), ("once", "scan of checkpoint"), ("whole", "checkpoint")}
OFTEN |= {("whole", "jit"), ("blocks", "checkpoint"), ("gradients", "plain")}
OFTEN |= {("after", "policy")}


@few(1)
@pytest.mark.parametrize("strategy", [*STRATEGIES, "after"])
@pytest.mark.parametrize("wrapper", list(WRAPPERS))
@often(lambda strategy, wrapper: (strategy, wrapper) in OFTEN)
def test_the_order_changes_no_bits(cpu_mesh, small_groups, wrapper, strategy):
    options = BLOCKS | dict(after=True) if strategy == "after" else STRATEGIES[strategy]
    got, want = (
        numbers(cpu_mesh(N), means, WRAPPERS[wrapper], max_grad_norm=0.5, **options)
        for means in ("peer", "xla")
    )
    assert_trees_same_bits(got, want)


@few(1)
@pytest.mark.parametrize("wrapper", list(WRAPPERS))
def test_every_array_is_copied_once(cpu_mesh, wrapper):
    """Recomputation and differentiation neither repeat nor lose copies."""
    tx, step = make(cpu_mesh(N), wrapped=WRAPPERS[wrapper], **ONCE)
    found = jda.audit(step, jda.TrainState.shapes(shapes(), tx), np.zeros((2 * N, 17), np.int32))
    assert {row.op for row in found.rows} == {"copied all-gather", "copied all-to-all"}
    assert all(row.passed or row.widened for row in found.rows), found


@few(1)
@pytest.mark.parametrize("options", [ONCE, WHOLE], ids=["once", "whole"])
def test_an_evaluation_gathers_during_the_forward_pass(h200s, cpu_mesh, small_groups, options):
    def evaluation(mesh, means):
        tx, _ = make(mesh, means, **options)
        return tx, jda.eval_step(loss_of(lambda f: f, tx), tx)

    mesh = h200s(N)
    tx, evaluate = evaluation(mesh, "peer")
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    tokens = jax.ShapeDtypeStruct((2 * N, 129), jnp.int32, sharding=rows)
    state = jda.TrainState.shapes(shapes(), tx)
    program = jax.jit(lambda state, tokens: evaluate(state, tokens))
    events = events_of(program.lower(state, tokens).compile().as_text())
    assert "gather" not in events[events.index("product") :]
    assert events[events.index("product") :].count("wait") >= LAYERS - 2
    losses = []
    for means in ("xla", "peer"):
        tx, evaluate = evaluation(cpu_mesh(N), means)
        zeros = jax.tree.map(lambda x: jnp.full(x.shape, 0.01, x.dtype), shapes())
        tokens = jda.shard_batch(np.arange(2 * N * 9, dtype=np.int32).reshape(2 * N, 9), tx)
        losses.append(evaluate(jda.TrainState.create(zeros, tx), tokens)[0])
    assert_trees_same_bits(*losses)


def test_effects_on_gathered_parameters_and_after_the_last_product_happen(cpu_mesh):
    seen = []

    def loss(params, tokens):
        jax.debug.callback(lambda x: seen.append("parameters"), params["b1"]["up"].sum())
        found = loss_of(lambda f: f)(params, tokens)
        jax.debug.callback(lambda x: seen.append("loss"), found)
        return found

    tx, _ = make(cpu_mesh(N), **ONCE)
    zeros = jax.tree.map(lambda x: jnp.full(x.shape, 0.01, x.dtype), shapes())
    state = jda.TrainState.create(zeros, tx)
    tokens = jda.shard_batch(np.arange(2 * N * 9, dtype=np.int32).reshape(2 * N, 9), tx)
    for run in (jda.eval_step(loss, tx), jda.train_step(loss, tx)):
        seen.clear()
        jax.block_until_ready(run(state, tokens))
        jax.effects_barrier()
        assert sorted(seen) == ["loss"] * N + ["parameters"] * N


def arrays_of(text, target):
    """The number of arrays that calls of a target return."""
    found = re.findall(rf"= (\S.*?) custom-call\(.*custom_call_target=\"{target}\"", text)
    return sum(len(re.findall(r"\w+\[[\d,]*\]", result)) for result in found)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", list(STRATEGIES))
@pytest.mark.parametrize("small", [False, True])
@often(lambda strategy, small: small == (strategy == "whole") and strategy in ("optim", "whole"))
def test_parameters_that_the_loss_ignores_are_safe(cpu_mesh, h200s, monkeypatch, small, strategy):
    """What has started is waited for, entirely: otherwise it would lose its memory meanwhile."""
    options = STRATEGIES[strategy]
    if small:
        monkeypatch.setattr(overlap, "TOGETHER_BYTES", BLOCK_BYTES * (N - 1) // N)

    def loss(tx, params, tokens):
        passed = jax.jit(lambda x, unused: x)(params["b0"], params["b2"])  # XLA alone sees this
        gathered = jax.tree.leaves(jda.gather_params(params["b2"], tx))
        total = sum(x.sum() for x in gathered).astype(jnp.float32)
        nothing = jnp.where(jnp.zeros((), jnp.bool_), total, 0)  # and XLA sees that
        params = params | {"b1": params["b3"], "b2": passed}
        return nothing + loss_of(lambda f: f, tx)(params, tokens)

    def made(mesh, means):
        tx = jda.distributed(
            jda.fused_adamw(1e-3), mesh=mesh, policy=SUMS, communication=means, **options
        )
        of_tx = functools.partial(loss, tx)
        return tx, jda.train_step(of_tx, tx), jda.eval_step(of_tx, tx)

    results = []
    for means in ("peer", "xla"):
        tx, step, evaluate = made(cpu_mesh(N), means)
        filled = jax.tree.map(lambda x: jnp.full(x.shape, 0.01, x.dtype), shapes())
        state = jda.TrainState.create(filled, tx)
        tokens = jda.shard_batch(np.arange(2 * N * 9, dtype=np.int32).reshape(2 * N, 9), tx)
        before = evaluate(state, tokens)[0]
        state, metrics = step(state, tokens)
        results.append((before, state, metrics))
    assert_trees_same_bits(*results)
    mesh = h200s(N)
    tx, step, evaluate = made(mesh, "peer")
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    tokens = jax.ShapeDtypeStruct((2 * N, 129), jnp.int32, sharding=rows)
    state = jda.TrainState.shapes(shapes(), tx)
    for program in (step, jax.jit(lambda state, tokens: evaluate(state, tokens))):
        text = program.lower(state, tokens).compile().as_text()
        assert arrays_of(text, copies.START) == arrays_of(text, copies.WAIT)


def test_long_chains_and_odd_results_of_anchors_are_evaluated(cpu_mesh):
    """A chain that is longer than Python's stack, a key as a carry, and a product for an effect."""

    def loss(params, x):
        keys = jax.lax.scan(
            lambda carry, _: ((jax.random.split(carry[0])[0], carry[1] @ params["w"]), None),
            (jax.random.key(0), x),
            length=2,
        )[0]
        y = keys[1] @ params["v"]
        jax.lax.cond(
            y[0, 0] > 1e30, lambda: jax.debug.print("{}", (y @ params["v"])[0, 0]), lambda: None
        )
        for _ in range(1200):
            y = y + 1e-3
        return jnp.mean(jnp.tanh(y))

    results = []
    for means in ("peer", "xla"):
        tx = jda.distributed(
            jda.fused_adamw(1e-3), mesh=cpu_mesh(N), policy=SUMS, communication=means, **ONCE
        )
        params = {name: jnp.full((128, 128), 0.01) for name in ("w", "v")}
        state = jda.TrainState.create(params, tx)
        x = jda.shard_batch(np.ones((2 * N, 128), np.float32), tx)
        results.append((jda.eval_step(loss, tx)(state, x)[0], jda.train_step(loss, tx)(state, x)))
    assert_trees_same_bits(*results)


@few(1)
@pytest.mark.parametrize("transform", ["grad", "vmap", "jit"])
@pytest.mark.parametrize("is_jitted", [False, True])
def test_an_evaluation_can_be_differentiated_and_vectorized(small_groups, transform, is_jitted):
    """By the batch, and by what the loss closes over."""
    mesh = jax.make_mesh((N,), ("data",), (AxisType.Auto,), devices=jax.devices("cpu")[:N])
    x = jnp.arange(2 * N * WIDTH, dtype=jnp.float32).reshape(2 * N, WIDTH) / 1000
    args = (jnp.float32(2), x)
    if transform == "vmap":
        args = jax.tree.map(lambda leaf: jnp.stack([leaf, 3 * leaf]), args)

    def result_over(means, is_jitted):
        tx, _ = make(mesh, means, **ONCE)
        params = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.01), shapes())
        state = jda.TrainState.create(params, tx)

        def loss(scale, x):
            squares = lambda p, x, i: jnp.square(x @ p[f"b{i}"]["up"] * scale)  # noqa: E731
            of = lambda p, x: sum(squares(p, x, i).mean() for i in range(LAYERS))  # noqa: E731
            return jda.eval_step(of, tx)(state, x)[0]

        options = dict(argnums=(0, 1)) if transform == "grad" else {}
        function = getattr(jax, transform)(loss, **options)
        return (jax.jit(function) if is_jitted else function)(*args)

    got = result_over("peer", is_jitted)
    want = result_over("xla", False)  # jit(vmap) of a product after an all-gather is NaN on CPUs
    assert all(np.asarray(leaf).all() for leaf in jax.tree.leaves(want)[:1])
    assert_trees_same_bits(got, want)


def test_copies_refuse_to_run_one_by_one(cpu_mesh):
    tx, step = make(cpu_mesh(N), **ONCE)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes())
    state = jda.TrainState.create(zeros, tx)
    tokens = jda.shard_batch(np.zeros((2 * N, 17), np.int32), tx)
    with (
        jax.disable_jit(),
        pytest.raises(jda.PolicyError, match=r"^communication: copies over peer"),
    ):
        step(state, tokens)


@pytest.mark.parametrize("options", [{}, ONCE, BLOCKS], ids=["optim", "once", "blocks"])
@often(lambda options: options is ONCE)
def test_the_compiled_program_keeps_the_printed_order(h200s, small_groups, options):
    """Of starts and sums, and of waits and sums; a start may move before a wait it does not need."""
    mesh = h200s(N)
    tx, step = make(mesh, **options)
    state = jda.TrainState.shapes(shapes(), tx)
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    tokens = jax.ShapeDtypeStruct((2 * N, 129), jnp.int32, sharding=rows)
    lines = step.order(state, tokens).splitlines()
    printed = [line.removeprefix("start ").split(" ")[0] for line in lines]
    compiled_to = events_of(step.lower(state, tokens).compile().as_text())
    for kinds in (("gather", "exchange", "sum"), ("wait", "sum")):
        orders = [[x for x in found if x in kinds] for found in (printed, compiled_to)]
        assert orders[0] == orders[1] and len(orders[0]) > LAYERS
    assert any("embed" in line for line in lines) and "backward" in "".join(lines)
