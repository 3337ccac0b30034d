"""The audit passes what was planned and says what was not, in programs for H200s and CPUs."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdistadam as jda
from jdistadam.tools.audit import Audit, AuditRow, _mark_widened
from support.exact_sums import linear_loss
from support.given_gradients import SHAPES, make_tx, random_params
from support.h200 import WIDTH, loss_fn, params_of, placed
from support.optimizers import distributed_adamw
from support.placements import FLAT, STRATEGIES
from support.samples import few, often

SUMMED = dict(grad_comm_dtype="bfloat16", grad_reduce_dtype="float32")


def prepared(h200s, loss=loss_fn, *, policy=SUMMED, accumulate_steps=1, **kwargs):
    """A step for 2 x 4 H200s, and the shapes of its state and batch."""
    mesh = h200s(2, 4, names=("replica", "data"))
    tx = distributed_adamw(
        1e-3, mesh=mesh, replica_axis="replica", max_grad_norm=1.0, loss_scale=8.0,
        policy=jda.MixedPrecisionPolicy(**policy), **kwargs,
    )  # fmt: skip
    params = params_of(jnp.bfloat16)
    state = jda.TrainState.shapes(params, tx)
    batch = jax.ShapeDtypeStruct((64, WIDTH), jnp.bfloat16)
    batch = placed(mesh, batch, tx.config.parallel.batch_spec)
    step = jda.train_step(
        loss, tx, accumulate_steps=accumulate_steps, report_nonfinite=accumulate_steps > 1
    )
    return step, state, batch


@pytest.mark.parametrize(
    ("strategy", "accumulate_steps"), [*zip(STRATEGIES, (1, 2, 4, 2), strict=True)]
)
@often(lambda strategy: strategy == "optim_grads")
def test_what_is_planned_passes_and_less_does_not(h200s, strategy, accumulate_steps):
    kwargs = dict(sharding_strategy=strategy, accumulate_steps=accumulate_steps)
    step, state, batch = prepared(h200s, **kwargs)
    program = step.lower(state, batch).compile()
    step.lower = lambda *args, **kwargs: types.SimpleNamespace(compile=lambda: program)
    found = jda.audit(step, state, batch)
    assert found.passed, str(found)
    assert len(found.rows) >= 3 and all(row.planned for row in found.rows)
    assert found.scalars >= 1 and "as planned" in str(found)
    gathers = [row for row in found.rows if row.op == "all-gather"]
    assert gathers and all(row.asynchronous == row.found for row in gathers)
    if strategy == "optim_grads":  # sends every micro-batch: the same program has twice as much
        fewer, _, _ = prepared(h200s, **kwargs | dict(accumulate_steps=accumulate_steps // 2))
        fewer.lower = step.lower
        failed = [row for row in jda.audit(fewer, state, batch).rows if not row.passed]
        assert failed and all(row.found == 2 * row.planned for row in failed)


def test_audit_finds_another_dtype(h200s):
    """The program of a step in float32 against the plan of one that communicates bfloat16."""
    wide, state, batch = prepared(h200s, policy=dict())
    planned, _, _ = prepared(h200s, policy=dict(grad_comm_dtype="bfloat16"))
    planned.lower = wide.lower
    found = jda.audit(planned, state, batch)
    assert not found.passed and not found.only_widened
    failed = {(row.op, row.dtype): row for row in found.rows if not row.passed}
    assert failed["reduce-scatter", "bfloat16"].found == 0
    assert failed["reduce-scatter", "float32"].planned == 0
    assert "MISSING" in str(found) and "NOT PLANNED" in str(found) and "NOT as" in str(found)


@pytest.mark.slow  # on CPU devices always
def test_a_collective_of_the_model_is_found(h200s):
    """A loss that sums something large over the devices by itself."""

    def loss(params, x):
        everyone = jax.lax.all_gather(x, ("replica", "data"))
        return loss_fn(params, x) + jnp.mean(jnp.square(everyone.astype(jnp.float32)))

    found = jda.audit(*prepared(h200s, loss))
    (extra,) = [row for row in found.rows if not row.passed]
    assert (extra.op, extra.dtype, extra.devices) == ("all-gather", "bfloat16", 8)
    assert extra.found == 64 * WIDTH and extra.planned == 0


def audit_on_cpu(
    policy, *, dtype="float32", planned_steps=1, accumulate_steps=1, loss=None, **kwargs
):
    """An audit on eight CPU devices, of a program against the plan of perhaps fewer micro-batches."""
    tx = make_tx(FLAT, jda.MixedPrecisionPolicy(**policy), **kwargs)
    params = jax.tree.map(lambda x: x.astype(dtype), random_params())
    batch = {k: np.zeros((8 * accumulate_steps, *s), dtype) for k, s in SHAPES.items()}
    state, batch = jda.TrainState.create(params, tx), jda.shard_batch(batch, tx)
    step = jda.train_step(loss or linear_loss, tx, accumulate_steps=accumulate_steps)
    if planned_steps == accumulate_steps:
        return jda.audit(step, state, batch)
    planned = jda.train_step(linear_loss, tx, accumulate_steps=planned_steps)
    planned.lower = step.lower
    return jda.audit(planned, state, batch)


@few(1)
@pytest.mark.parametrize(
    ("comm", "passed"), [("float32", True), ("float16", True), ("bfloat16", False)]
)
def test_audit_on_cpu_devices_reports_widened_bfloat16(comm, passed):
    """float32 and float16 are sent as they are there, bfloat16 does not, which the audit says."""
    found = audit_on_cpu(dict(grad_comm_dtype=comm))
    assert (found.passed, found.only_widened) == (passed, not passed)
    rows = {(row.op, row.dtype): row for row in found.rows}
    assert rows["all-gather", "float32"].passed
    scattered = rows["reduce-scatter", comm]
    assert scattered.planned > 0 and scattered.passed == passed
    if passed:
        assert str(found).count("as planned;") == 1 and "CPU" not in str(found)
    else:
        wide = rows["reduce-scatter", "float32"]
        assert scattered.found == 0 == wide.planned and wide.found == scattered.planned
        assert scattered.widened and wide.widened and str(found).count("  WIDENED\n") == 2
        assert "widens bfloat16 to float32; only an audit for GPUs can check that\n" in str(found)
        assert "NOT CHECKED in dtypes" in str(found) and "NOT as planned" not in str(found)


@pytest.mark.parametrize(
    ("strategy", "policy"),
    [
        ("no_shard", dict()),
        ("no_shard", SUMMED),
        ("optim", SUMMED),
        ("optim", dict(grad_comm_dtype="bfloat16", param_comm_dtype="float8_e4m3fn")),
        ("optim_grads", dict(param_comm_dtype="float8_e5m2")),
        ("optim_grads_params", dict()),
    ],
)
@often(lambda strategy, policy: strategy == "optim" and policy != SUMMED)
def test_cpu_devices_only_widen_what_is_planned(strategy, policy):
    """Every operation of a bfloat16 model; the loss may be summed along with the gradients."""
    found = audit_on_cpu(policy, dtype="bfloat16", sharding_strategy=strategy)
    assert found.passed or found.only_widened, str(found)
    widened = {row.dtype for row in found.rows if row.widened and row.planned > row.found}
    if strategy != "no_shard":
        assert policy.get("param_comm_dtype", "bfloat16") in widened
    assert found.only_widened == bool(widened) and found.scalars >= 1


@pytest.mark.parametrize("comm", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_more_micro_batches_are_found_on_cpu_devices_too(comm):
    policy = dict(grad_comm_dtype=comm)
    kwargs = dict(sharding_strategy="optim_grads", planned_steps=2)
    assert audit_on_cpu(policy, accumulate_steps=2, **kwargs).only_widened == (comm == "bfloat16")
    found = audit_on_cpu(policy, accumulate_steps=4, **kwargs)
    assert not found.passed and not found.only_widened and "NOT as planned" in str(found)


def test_a_collective_of_the_model_is_found_on_cpu_devices_too():
    def loss(params, batch):
        everyone = jax.lax.all_gather(batch["columns"], "data")
        return linear_loss(params, batch) + jnp.mean(jnp.square(everyone))

    found = audit_on_cpu(dict(grad_comm_dtype="bfloat16"), loss=loss)
    assert not found.passed and not found.only_widened and "NOT as planned" in str(found)
    assert {r.op: r.note for r in found.rows} == {
        "all-gather": "NOT PLANNED",
        "reduce-scatter": "WIDENED",
    }


@pytest.mark.parametrize(
    ("rows", "widened"),
    [
        # dtype: (planned, optional, found)
        (dict(bfloat16=(10, 0, 0), float32=(0, 0, 10)), {"bfloat16", "float32"}),
        (dict(bfloat16=(10, 0, 0), float32=(5, 0, 15)), {"bfloat16", "float32"}),
        (dict(bfloat16=(10, 2, 0), float32=(0, 0, 8)), {"bfloat16", "float32"}),
        (dict(bfloat16=(10, 10, 0), float32=(5, 0, 5)), set()),  # left out, as it may be
        (dict(bfloat16=(10, 2, 0), float32=(0, 0, 7)), set()),
        (dict(bfloat16=(10, 0, 0), float32=(0, 0, 11)), set()),
        (dict(bfloat16=(10, 0, 0), float32=(0, 0, 9)), set()),
        (dict(bfloat16=(10, 0, 0)), set()),
        (dict(bfloat16=(10, 0, 5), float32=(0, 0, 5)), set()),  # XLA widens all or nothing
        (dict(bfloat16=(0, 0, 10), float32=(10, 0, 0)), set()),  # narrower than planned
        (dict(float16=(10, 0, 0), float32=(0, 0, 10)), set()),  # the CPU backend has float16
        (dict(bfloat16=(10, 0, 0), float16=(0, 0, 10)), set()),
        (dict(float8_e5m2=(10, 0, 0), float32=(0, 0, 10)), set()),
        (dict(float8_e5m2=(10, 0, 0), float16=(0, 0, 10)), {"float8_e5m2", "float16"}),
        (dict(float8_e4m3fn=(10, 0, 0), float16=(3, 0, 13)), {"float8_e4m3fn", "float16"}),
        (dict(float32=(0, 0, 10)), set()),
    ],
)  # fmt: skip
def test_nothing_but_the_known_widening_is_excused(rows, widened):
    rows = [AuditRow("all-gather", dtype, 8, *numbers, 0) for dtype, numbers in rows.items()]
    marked = _mark_widened(rows)
    assert {row.dtype for row in marked if row.widened} == widened
    result = Audit(tuple(marked), 0, 8, None)
    assert result.only_widened == bool(widened) and not (result.passed and widened)


@pytest.mark.parametrize("change", [dict(op="all-to-all"), dict(devices=4)])
def test_a_widening_keeps_its_operation_and_devices(change):
    planned = AuditRow("all-gather", "bfloat16", 8, 10, 0, 0, 0)
    found = AuditRow("all-gather", "float32", 8, 0, 0, 10, 0)
    assert all(row.widened for row in _mark_widened([planned, found]))
    assert not any(
        row.widened for row in _mark_widened([planned, dataclasses.replace(found, **change)])
    )


def test_small_leaves_are_planned_like_scalars(cpu_mesh):
    """Their all-reduces cannot be told from those of norms."""
    tx = distributed_adamw(1e-3, mesh=cpu_mesh(8), sharding_strategy="no_shard")
    state = jda.TrainState.create({"w": jnp.ones(4)}, tx)
    step = jda.train_step(lambda params, batch: jnp.sum(batch @ params["w"]), tx)
    found = jda.audit(step, state, jda.shard_batch(np.ones((8, 4), np.float32), tx))
    assert found.passed and not found.rows and found.scalars >= 1
    assert "\nas planned; besides" in str(found)


@pytest.mark.parametrize("keeps", [False, True])
def test_what_averages_the_model_state_is_planned(cpu_mesh, keeps):
    """Floats in float32, integers and words of keys; small leaves are scalars, however many.

    Floats that the loss keeps are not sent.
    """
    tx = distributed_adamw(1e-3, mesh=cpu_mesh(8))
    model_state = {
        "mean": jnp.zeros(32),
        "narrow": jnp.zeros((3, 7), jnp.bfloat16),
        "seen": jnp.zeros(12, jnp.int32),
        "keys": jax.random.split(jax.random.key(0), 16),
        "scales": [jnp.zeros(())] * 20,
    }

    def loss(params, batch, *, model_state):
        names = ("mean",) if keeps else ("mean", "narrow", "scales")
        new = {x: jax.tree.map(lambda y: y + batch[0, 0], model_state[x]) for x in names}
        return jnp.sum(batch @ params["w"]), model_state | jax.tree.map(jnp.float32, new)

    state = jda.TrainState.create({"w": jnp.ones((32, 8))}, tx, model_state=model_state)
    step = jda.train_step(loss, tx)
    found = jda.audit(step, state, jda.shard_batch(np.ones((8, 32), np.float32), tx))
    assert found.passed, str(found)
    reduced = {row.dtype: row.planned for row in found.rows if row.op == "all-reduce"}
    assert reduced == {"float32": 32 + 3 * 7, "int32": 12, "uint32": 16 * 2}
    sent = {row.dtype: row.found for row in found.rows if row.op == "all-reduce"}
    assert sent == reduced | {"float32": 32 + (0 if keeps else 3 * 7)}


def test_parameters_gathered_once_for_all_micro_batches_are_missing(cpu_mesh):
    """Without ``jax.checkpoint`` and ``after``, XLA gathers a block before the loop."""
    tx = distributed_adamw(
        1e-3,
        mesh=cpu_mesh(4),
        sharding_strategy="optim_grads_params",
        layers=lambda path: "block",
    )
    step = jda.train_step(
        lambda params, x: jnp.sum(jnp.tanh(x @ jda.gather_params(params, tx)["w"])),
        tx,
        accumulate_steps=2,
    )
    state = jda.TrainState.create({"w": jnp.ones((128, 128))}, tx)
    found = jda.audit(step, state, jda.shard_batch(np.ones((8, 128), np.float32), tx))
    (gathers,) = [row for row in found.rows if row.op == "all-gather"]
    assert gathers.note == "MISSING" and gathers.found == 128 * 128, str(found)


@pytest.mark.parametrize("of", [jda.TrainState.create, jda.TrainState.shapes])
def test_a_state_on_another_mesh_raises_as_in_a_step(cpu_mesh, of):
    tx, other = (distributed_adamw(1e-3, mesh=cpu_mesh(n)) for n in (8, 4))
    step = jda.train_step(lambda params, batch: jnp.sum(batch @ params["w"]), tx)
    state, batch = of({"w": jnp.ones(400)}, other), np.ones((8, 400), np.float32)
    for look in (step.lower, step.order, lambda *args: jda.audit(step, *args)):
        with pytest.raises(jda.MeshError, match=r"another mesh.* on \{'\w+': 4\}, expected .* 8\}"):
            look(state, batch)


def test_shapes_of_a_batch_need_no_shardings(cpu_mesh):
    tx = distributed_adamw(1e-3, mesh=cpu_mesh(8))
    step = jda.train_step(lambda params, batch: jnp.sum(batch["x"] @ params["w"]), tx)
    state = jda.TrainState.shapes({"w": jnp.ones(400)}, tx)
    batch = {"x": jax.ShapeDtypeStruct((8, 400), jnp.float32)}
    assert jda.audit(step, state, batch).passed
    assert step.order(state, batch) == "" and step.lower(state, batch).compile()


def test_one_device_has_nothing_to_check(cpu_mesh):
    tx = distributed_adamw(1e-3, mesh=cpu_mesh(1))
    state = jda.TrainState.create({"w": jnp.ones(400)}, tx)
    step = jda.train_step(lambda params, batch: jnp.sum(batch @ params["w"]), tx)
    found = jda.audit(step, state, jda.shard_batch(np.ones((8, 400), np.float32), tx))
    assert found.passed and not found.only_widened
    assert str(found) == "one device: nothing is sent, so there is nothing to check"
