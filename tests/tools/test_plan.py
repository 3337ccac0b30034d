"""The plan of bytes against XLA's own analysis of programs compiled for eight H200s."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdistadam as jda
from jdistadam.checkpoint.parts import adam_of
from jdistadam.distributed import calls
from jdistadam.training import overlap
from jdistadam.training.savings import settings_for
from support.dtypes import dtypes
from support.h200 import WIDTH, loss_fn, params_of, placed
from support.optimizers import distributed_adamw
from support.planned import FLAT, PLACEMENTS, POLICIES, STRATEGIES
from support.samples import few, often

ROWS = [
    (where, strategy, policy)
    for where, strategy, policy in itertools.product(
        ("flat", "hybrid", "twice"),
        STRATEGIES,
        (
            "float32",
            "bf16 communication",
            "bf16 communication, float32 sum",
            "remainder",
            "fp8 params",
            "8 bits",
            "16 and 8 bits",
        ),
    )
    if strategy != "no_shard" or (where != "twice" and policy != "fp8 params")
]
SAMPLE = {
    ("flat", "no_shard", "float32"),
    ("flat", "optim", "remainder"),
    ("flat", "optim", "16 and 8 bits"),
    ("hybrid", "optim_grads", "fp8 params"),
    ("twice", "optim_grads_params", "bf16 communication, float32 sum"),
}
MARKED = [pytest.param(*row, marks=() if row in SAMPLE else pytest.mark.slow) for row in ROWS]


def prepare(h200s, where, strategy, policy):
    shape, names, kwargs = PLACEMENTS.get(where, FLAT)
    mesh = h200s(*shape, names=names)
    tx = distributed_adamw(
        1e-3, mesh=mesh, **dtypes(**POLICIES[policy]), max_grad_norm=1.0,
        sharding_strategy=strategy, loss_scale=jda.DynamicLossScale(), **kwargs,
    )  # fmt: skip
    params = params_of(jnp.bfloat16)
    tx = tx.bind(params)
    specs = tx.param_specs(params), tx.state_specs()
    state = placed(mesh, jax.eval_shape(tx.init, params), specs[1])
    return tx, params, placed(mesh, params, specs[0]), state, specs


@few(1)
@pytest.mark.parametrize(("where", "strategy", "policy"), MARKED)
def test_planned_bytes_between_steps_are_exact(h200s, where, strategy, policy):
    """Arguments, results and what of them is updated in place, of a whole train_step."""
    tx, params, params_there, state, _ = prepare(h200s, where, strategy, policy)
    batch = jax.ShapeDtypeStruct((64, WIDTH), jnp.bfloat16)
    batch = placed(tx.config.mesh, batch, tx.config.parallel.batch_spec)
    step = jda.train_step(loss_fn, tx)
    program = step.lower(jda.TrainState(params_there, state), batch).compile()
    analysis, planned = program.memory_analysis(), jda.plan(params, tx)
    passed = planned.held_bytes
    unread = 4  # grad_norm of the last step
    batch_bytes = 64 * WIDTH * 2 // 8
    assert analysis.argument_size_in_bytes == passed - unread + batch_bytes
    assert analysis.alias_size_in_bytes == passed - unread
    metrics, results = 5, len(jax.tree.leaves((params, state)))
    table = 8 * (results + metrics)  # XLA's table of pointers to them
    assert analysis.output_size_in_bytes == passed + 4 * metrics + table


@few(1)
@pytest.mark.parametrize(("where", "strategy", "policy"), MARKED)
def test_planned_buffers_are_an_upper_bound(h200s, where, strategy, policy):
    """Temporary bytes of the step alone, on given gradients: at most the listed ones plus 1 %."""
    tx, params, params_there, state, specs = prepare(h200s, where, strategy, policy)
    spec = tx.config.parallel.batch_spec
    grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct((8, *x.shape), x.dtype), params)

    def step(grads, state, params):
        return tx.step(jax.tree.map(lambda x: x[0], grads), state, params)

    sharded = jax.shard_map(
        step, mesh=tx.config.mesh, in_specs=(spec, specs[1], specs[0]), out_specs=specs, check_vma=False,
    )  # fmt: skip
    program = (
        jax.jit(sharded, donate_argnums=(1, 2))
        .lower(placed(tx.config.mesh, grads, spec), state, params_there)
        .compile()
    )
    planned = jda.plan(params, tx)
    assert program.memory_analysis().temp_size_in_bytes <= 1.01 * planned.buffer_bytes


BLOCK_BYTES = 2 * 2 * 512 * 2048  # of a block's parameters, and of their gradients
MODES = {
    "optim": {},
    "optim_grads": dict(sharding_strategy="optim_grads"),
    "once": dict(sharding_strategy="optim_grads_params", reshard_after_forward=False),
    "blocks": dict(sharding_strategy="optim_grads_params", layers=lambda path: "block"),
}
SHORT = {("optim", 1, None), ("optim", 1, 1.0), ("optim_grads", 3, None), ("blocks", 1, None)}


def planned_and_compiled(mesh, num_blocks, accumulate_steps, **options):
    """The plan of a step over peer memory, and the temporary bytes of its program."""
    policy = jda.MixedPrecisionPolicy(grad_comm_dtype="bfloat16", grad_reduce_dtype="float32")
    tx = distributed_adamw(1e-3, mesh=mesh, policy=policy, communication="peer", **options)
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)  # noqa: E731
    block = {"up": array(512, 2048), "down": array(2048, 512)}
    params = {f"b{i}": block for i in range(num_blocks)}

    @jax.checkpoint
    def layer(x, p):
        p = jda.gather_params(p, tx)
        return x + jax.nn.relu(x @ p["up"]) @ p["down"]

    def loss(params, x):
        for i in range(num_blocks):
            x = layer(x, params[f"b{i}"])
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    step = jda.train_step(loss, tx, accumulate_steps=accumulate_steps)
    batch = placed(mesh, array(8 * accumulate_steps, 512), jax.sharding.PartitionSpec("data"))
    compiled = step.lower(jda.TrainState.shapes(params, tx), batch).compile()
    planned = jda.plan(params, tx, accumulate_steps=accumulate_steps)
    return planned, compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("accumulate_steps", [1, 3])
@pytest.mark.parametrize("mode", list(MODES))
@often(lambda mode, accumulate_steps, clip: (mode, accumulate_steps, clip) in SHORT)
def test_mailboxes_grow_with_the_model_unless_the_backward_pass_adds_gradients(
    h200s, monkeypatch, mode, accumulate_steps, clip
):
    """Between models of 5 and 7 blocks; three groups are four and a half."""
    monkeypatch.setattr(overlap, "TOGETHER_BYTES", BLOCK_BYTES * 3 // 4)
    monkeypatch.setattr(overlap, "AHEAD_BYTES", 2 * BLOCK_BYTES)
    monkeypatch.setattr(calls, "COPIED_BYTES", BLOCK_BYTES)
    (small, before), (large, after) = (
        planned_and_compiled(h200s(4), n, accumulate_steps, max_grad_norm=clip, **MODES[mode])
        for n in (5, 7)
    )
    grown = large.buffers["mailboxes"] - small.buffers["mailboxes"]
    in_backward_pass = mode == "blocks" or (mode == "optim_grads" and accumulate_steps > 1)
    stay = mode in ("optim", "once") or (clip is None and not in_backward_pass)
    assert grown == (2 * BLOCK_BYTES * 3 // 4 if stay else 0)
    gradients = 0 if mode == "blocks" else 7 * BLOCK_BYTES
    activations = 7 * 2 * 2 * (512 + 2048)  # of two rows
    assert grown <= after - before
    assert after <= large.sums + large.buffer_bytes + gradients + activations


def test_sums_of_gradients_are_planned():
    """One whole sum, or shards of it, in main_grads_dtype."""
    mesh = jax.make_mesh((8,), ("data",), devices=jax.devices("cpu")[:8])
    params = {"w": jax.ShapeDtypeStruct((1024, 64), jnp.bfloat16)}
    sums = {}
    for strategy in STRATEGIES:
        tx = distributed_adamw(1e-3, mesh=mesh, sharding_strategy=strategy)
        assert jda.plan(params, tx).sums == 0
        sums[strategy] = jda.plan(params, tx, accumulate_steps=2).sums
    whole = 1024 * 64 * 4
    assert sums == dict(zip(STRATEGIES, (whole, whole, whole // 8, whole // 8), strict=True))


@few(1)
@pytest.mark.parametrize("made", ["alone", "hyperparameters", "chain"])
def test_held_bytes_are_those_of_the_state(made):
    mesh = jax.make_mesh((8,), ("data",), devices=jax.devices("cpu")[:8])
    adam = jda.fused_adamw if made == "alone" else jda.inject_hyperparams(jda.fused_adamw)
    tx = jda.distributed(adam(1e-3), mesh=mesh, max_grad_norm=1.0, loss_scale=1.0)
    if made == "chain":
        tx = jda.chain(optax.scale_by_schedule(lambda count: 0.5), tx)
    state = jda.TrainState.create({"w": jnp.zeros((1024, 8)), "b": jnp.zeros(3)}, tx)
    held = sum(x.addressable_data(0).nbytes for x in jax.tree.leaves(state))
    planned = jda.plan(state.params, tx)
    assert planned.held_bytes == held
    assert ("chain and hyperparameters" in planned.held) == (made != "alone")


@pytest.mark.parametrize("made", ["float32", "codes", "chain", "hyperparameters"])
def test_plan_of_one_program_has_the_bytes_of_its_state(made):
    adam = jda.inject_hyperparams(jda.fused_adamw) if made == "hyperparameters" else jda.fused_adamw
    codes = dict(mu_dtype="block8", nu_dtype="block8", main_params_dtype="remainder16", rounding="stochastic")  # fmt: skip
    tx = adam(1e-3, **(codes if made == "codes" else {}))
    tx = jda.chain(optax.scale_by_schedule(lambda count: 0.5), tx) if made == "chain" else tx
    params = {"w": jnp.zeros((128, 96), jnp.bfloat16), "b": jnp.zeros(7)}
    planned, state = jda.plan(params, tx), (params, tx.init(params))
    assert planned.held_bytes == sum(x.nbytes for x in jax.tree.leaves(state))
    assert planned.held["params"] == 2 * 128 * 96 + 4 * 7 and planned.bytes_sent == 0
    assert planned.held["mu"] == sum(x.nbytes for x in jax.tree.leaves(adam_of(state[1]).mu))
    assert "of the program around it" in str(planned)


def test_plan_of_one_program_takes_what_its_optimizer_takes():
    """Also numbers, and arrays whose dtype jax narrows."""
    tx = jda.fused_adamw(1e-3)
    planned = jda.plan({"scale": 1.0, "w": np.ones(3)}, tx)
    assert planned.held == {"params": 16, "scalars": 4, "mu": 16, "nu": 16}
    with pytest.raises(jda.DtypeError, match=r"params\['w'\]: not an array: got 'x'"):
        jda.plan({"w": "x"}, tx)
    with pytest.raises(jda.HyperparameterError, match="accumulate_steps: out of range: got 0"):
        jda.plan({"w": np.ones(3)}, tx, accumulate_steps=0)


def test_the_plan_prints_what_it_holds():
    mesh = jax.make_mesh((8,), ("data",), devices=jax.devices("cpu")[:8])
    tx = distributed_adamw(1e-3, mesh=mesh)
    params = {"w": np.zeros((1024, 1000), np.float32)}
    planned = jda.plan(params, tx)
    text = str(planned)
    assert f"{planned.held_bytes / 1e6:.2f} MB\n" in text and "reduce-scatter" in text
    assert planned.held["params"] == 4096_000 and planned.held["mu"] == 512_000
    assert planned.bytes_sent == 2 * 4096_000 * 7 // 8


def test_the_plan_prints_a_total_its_largest_part_and_how_to_lower_it():
    """1.3e9 parameters: their sum over micro-batches is 5.24 GB until it is sharded, and so on."""
    mesh = jax.make_mesh((8,), ("data",), devices=jax.devices("cpu")[:8])
    params = {"w": jax.ShapeDtypeStruct((1310720, 1000), jnp.bfloat16)}
    shards = dict(sharding_strategy="optim_grads", policy=jda.MixedPrecisionPolicy(grad_comm_dtype="bfloat16"))  # fmt: skip
    said = [
        (dict(), "accumulated gradients, 5.24 GB", 'sharding_strategy="optim_grads"'),
        (dict(sharding_strategy="optim_grads"), "gradients as sent, 5.24 GB", "grad_comm_dtype=jnp.bfloat16"),
        (shards, "params, 2.62 GB", 'sharding_strategy="optim_grads_params"'),
    ]  # fmt: skip
    for options, largest, settings in said:
        tx = distributed_adamw(1e-3, mesh=mesh, **options)
        planned = jda.plan(params, tx, accumulate_steps=2)
        lines = str(planned).splitlines()
        parts = {line[:24].strip(): line.split()[-2:] for line in lines if " in a step " in line}
        assert set(parts) == {"accumulated gradients", *planned.buffers}
        total = planned.held_bytes + planned.sums + sum(planned.buffers.values())
        assert ["total", "at", "most", f"{total / 1e9:.2f}", "GB"] in [x.split() for x in lines]
        assert f"largest: {largest}" in lines
        assert f"to lower it: {settings}; more in docs/out_of_memory.md" in lines
        assert any(line.startswith("not counted: activations") for line in lines)


def test_settings_of_a_plan_lower_what_they_are_named_for():
    """Each makes its part smaller, in a plan that names it; the one of the sums, above."""
    mesh = jax.make_mesh((8,), ("data",), devices=jax.devices("cpu")[:8])
    params = {"w": jax.ShapeDtypeStruct((4096, 1000), jnp.bfloat16)}
    summed = jda.MixedPrecisionPolicy(grad_reduce_dtype="float32")
    narrow = jda.MixedPrecisionPolicy(grad_comm_dtype="bfloat16")
    over = lambda **options: distributed_adamw(1e-3, mesh=mesh, **options)  # noqa: E731
    moments = dict(mu_dtype="block16", nu_dtype="block16")
    parts = {
        "main_params": [dict(sharding_strategy="optim"), dict(main_params_dtype="remainder16"), dict(state_memory="pinned_host")],
        "mu": [dict(sharding_strategy="optim"), moments, dict(state_memory="pinned_host")],
        "params": [dict(sharding_strategy="optim_grads_params")],
        "mailboxes": [dict(policy=dataclasses.replace(summed, grad_comm_dtype="bfloat16")), dict(communication="xla")],
        "received contributions": [dict(policy=narrow)],
        "gathered parameters": [dict(layers=lambda path: "block")],
    }  # fmt: skip
    given = {
        "mailboxes": dict(policy=summed, communication="peer"),
        "received contributions": dict(policy=dataclasses.replace(narrow, grad_reduce_dtype="float32")),
        "gathered parameters": dict(sharding_strategy="optim_grads_params"),
    }  # fmt: skip
    for part, changes in parts.items():
        options = given.get(part, dict(sharding_strategy="no_shard"))
        config = over(**options).config
        layout = config.layout(params)
        before = jda.plan(params, over(**options))
        assert len(settings_for(part, config, layout)) == len(changes)
        for change, setting in zip(changes, settings_for(part, config, layout), strict=True):
            planned, name = jda.plan(params, over(**options | change)), next(iter(change))
            assert name in setting or name == "policy"
            size = (before.held | before.buffers)[part]
            assert (planned.held | planned.buffers).get(part, 0) < size, (part, change)
