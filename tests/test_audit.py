"""The audit passes what was planned and says what was not, in programs compiled for H200s."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200 import WIDTH, loss_fn, params_of, placed
from test_strategies import FLAT, SHAPES, STRATEGIES, linear_loss, make_tx, random_params

import jdistadam as jda

SUMMED = dict(grad_comm_dtype="bfloat16", grad_reduce_dtype="float32")


def prepared(h200s, loss=loss_fn, *, policy=SUMMED, accumulate_steps=1, **kwargs):
    """A step for 2 x 4 H200s, and the shapes of its state and batch."""
    mesh = h200s(2, 4, names=("replica", "data"))
    tx = jda.distributed_fused_adamw(
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
def test_what_is_planned_passes(h200s, strategy, accumulate_steps):
    found = jda.audit(
        *prepared(h200s, sharding_strategy=strategy, accumulate_steps=accumulate_steps)
    )
    assert found.passed, str(found)
    assert len(found.rows) >= 3 and all(row.planned for row in found.rows)
    assert found.scalars >= 1 and "as planned" in str(found)
    gathers = [row for row in found.rows if row.op == "all-gather"]
    assert gathers and all(row.asynchronous == row.found for row in gathers)


def test_another_dtype_is_found(h200s):
    """The program of a float32 wire against the plan of a bfloat16 one."""
    wide, state, batch = prepared(h200s, policy=dict())
    planned, _, _ = prepared(h200s, policy=dict(grad_comm_dtype="bfloat16"))
    planned.lower = wide.lower
    found = jda.audit(planned, state, batch)
    assert not found.passed
    failed = {(row.op, row.dtype): row for row in found.rows if not row.passed}
    assert failed["reduce-scatter", "bfloat16"].found == 0
    assert failed["reduce-scatter", "float32"].planned == 0
    assert "MISSING" in str(found) and "NOT PLANNED" in str(found) and "NOT as" in str(found)


def test_a_collective_of_the_model_is_found(h200s):
    """A loss that sums something large over the devices by itself."""

    def loss(params, x):
        everyone = jax.lax.all_gather(x, ("replica", "data"))
        return loss_fn(params, x) + jnp.mean(jnp.square(everyone.astype(jnp.float32)))

    found = jda.audit(*prepared(h200s, loss))
    (extra,) = [row for row in found.rows if not row.passed]
    assert (extra.op, extra.dtype, extra.devices) == ("all-gather", "bfloat16", 8)
    assert extra.found == 64 * WIDTH and extra.planned == 0


def test_more_micro_batches_than_planned_are_found(h200s):
    step, state, batch = prepared(h200s, sharding_strategy="optim_grads", accumulate_steps=4)
    fewer, _, _ = prepared(h200s, sharding_strategy="optim_grads", accumulate_steps=2)
    fewer.lower = step.lower
    failed = [row for row in jda.audit(fewer, state, batch).rows if not row.passed]
    assert failed and all(row.found == 2 * row.planned for row in failed)


def test_an_audit_on_cpu_devices():
    """float32 travels as it is there, and 16 bits do not, which the audit says."""
    batch = {k: np.zeros((8, *s), np.float32) for k, s in SHAPES.items()}
    verdicts = {}
    for wire in ("float32", "bfloat16"):
        tx = make_tx(FLAT, jda.MixedPrecisionPolicy(grad_comm_dtype=wire))
        state = jda.TrainState.create(random_params(), tx)
        step = jda.train_step(linear_loss, tx)
        verdicts[wire] = jda.audit(step, state, jda.shard_batch(batch, tx)).passed
    assert verdicts == {"float32": True, "bfloat16": False}
