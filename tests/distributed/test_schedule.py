"""Compiled for eight H200s, every strategy and policy sends exactly what the plan says."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdistadam as jda
from jdistadam.training.planned import format_collectives
from support.h200 import collectives
from support.optimizers import distributed_adamw
from support.planned import PLACEMENTS, POLICIES, STRATEGIES, as_sent, compile_row, sent
from support.samples import few, often

ROWS = [
    ("flat", strategy, policy)
    for strategy in STRATEGIES
    for policy in POLICIES
    if not (strategy == "no_shard" and "params" in policy)
] + [
    (placement, strategy, policy)
    for placement in PLACEMENTS
    for strategy in STRATEGIES
    for policy in ("bf16 communication", "bf16 communication, float32 sum")
    if not (placement == "twice" and strategy == "no_shard")
]


SAMPLE = {
    ("flat", "optim", "float32 sum"),
    ("flat", "optim_grads", "fp8 params"),
    ("hybrid", "no_shard", "bf16 communication"),
    ("hybrid", "optim_grads_params", "bf16 communication, float32 sum"),
    ("twice", "optim", "bf16 communication"),
    ("twice", "optim_grads", "bf16 communication, float32 sum"),
    ("tuple", "optim", "bf16 communication, float32 sum"),
}


@few(1)
@pytest.mark.parametrize(("placement", "strategy", "policy"), ROWS)
@often(lambda placement, strategy, policy: (placement, strategy, policy) in SAMPLE)
def test_what_is_sent_is_what_is_planned(h200s, placement, strategy, policy):
    """Operation, dtype, number of devices and of elements; besides only the loss and the norm."""
    planned, text = compile_row(h200s, placement, strategy, policy)
    norm = () if strategy == "no_shard" else (4 if placement == "hybrid" else 8,)
    assert sent(text) == as_sent(planned, 8, *norm), "\n" + format_collectives(planned)


@few(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
@often(lambda strategy: strategy in ("optim", "optim_grads_params"))  # after, and in the loop
def test_micro_batches_reduce_as_the_strategy_says(h200s, strategy):
    """Inside the loop under optim_grads and optim_grads_params, after it under the others."""
    planned, text = compile_row(h200s, "flat", strategy, "bf16 communication", accumulate_steps=4)
    arrays = sent(text)
    scalars = arrays.pop(("all-reduce", "float32", 8))
    assert arrays == as_sent(planned)
    assert scalars <= 4  # loss, norm, and the weights, perhaps twice
    reduces = "all-reduce" if strategy == "no_shard" else "reduce-scatter"
    times = {c.times for c in planned if c.op == reduces}
    assert times == ({4} if strategy in ("optim_grads", "optim_grads_params") else {1})
    (loop,) = re.findall(r" while\(.*body=%?([\w.\-]+)", text)
    body = text[text.index(f"%{loop} (") :]
    body = body[: body.index("\n}\n")]
    inside = [op for op, results, _ in collectives(body, with_devices=True) if results[0][1] > 2]
    assert (reduces in inside) == (times == {4})
    assert "all-gather" not in inside


def test_the_plan_counts_bytes():
    """By hand: 2 x 3 devices, a leaf that is scattered and a packed one of 7 padded to 12."""
    mesh = jax.make_mesh((2, 3), ("replica", "data"), devices=jax.devices("cpu")[:6])
    policy = jda.MixedPrecisionPolicy(grad_comm_dtype="bfloat16", grad_reduce_dtype="float32")
    tx = distributed_adamw(
        1e-3, mesh=mesh, replica_axis="replica", outer_sharding_strategy="optim", policy=policy,
        sharding_strategy="optim_grads",
    )  # fmt: skip
    params = {"w": jnp.zeros((6, 4096), jnp.bfloat16), "b": jnp.zeros(7, jnp.bfloat16)}
    planned = tx.config.schedule(params, accumulate_steps=5).collectives
    got = {(c.op, c.dtype.name, c.axes, c.times, c.leaves): c.bytes_sent for c in planned}
    w, b = ("params['w']",), ("params['b']",)
    assert got == {
        ("all-to-all", "bfloat16", ("data",), 5, w): 24576 * 2 * 5 * 2 // 3,
        ("all-to-all", "float32", ("replica",), 1, w): 24576 // 3 * 4 // 2,
        ("all-gather", "bfloat16", ("replica",), 1, w): 24576 // 3 * 2 // 2,
        ("all-gather", "bfloat16", ("data",), 1, w): 24576 * 2 * 2 // 3,
        ("all-to-all", "bfloat16", ("data",), 5, b): 12 * 2 * 5 * 2 // 3,
        ("all-to-all", "float32", ("replica",), 1, b): 4 * 4 // 2,
        ("all-gather", "bfloat16", ("replica",), 1, b): 4 * 2 // 2,
        ("all-gather", "bfloat16", ("data",), 1, b): 12 * 2 * 2 // 3,
    }
    table = format_collectives(planned).splitlines()
    assert table[0].split()[:3] == ["collective", "dtype", "over"] and len(table) == 5
    assert np.isclose(float(table[1].split()[-2]), (24576 + 12) * 2 * 5 * 2 / 3 / 1e6, atol=0.005)
