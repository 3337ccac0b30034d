"""Predicted times against sums done by hand, and against what must hold of any of them."""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdistadam as jda
from jdistadam.errors import HyperparameterError, MeshError
from support.dtypes import dtypes
from support.paths import ROOT

sys.path.insert(0, str(ROOT / "experiments"))
from predict.kernel_bytes import kernel_bytes
from predict.machine import Machine, members_per_node
from predict.scaling import scaling
from predict.step_time import predict_step

from support.optimizers import distributed_adamw

# 1 byte a nanosecond here, a link that sends 1/10 of it, a network 1/40; what starts costs nothing.
ROUND = Machine(1e9, 1e8, 2.5e7, devices_per_node=4, latency=0, link_hop=0, network_hop=0)
MIB = 1 << 20
BF16 = {"grad_comm_dtype": jnp.bfloat16}
SUMS = BF16 | {"grad_reduce_dtype": jnp.float32}


def numbers(*shape):
    names = ("replica", "data")[-len(shape) :]
    return jax.sharding.Mesh(np.arange(np.prod(shape)).reshape(shape), names)


def make(mesh, policy=BF16, **kwargs):
    replica_axis = "replica" if "replica" in mesh.axis_names else None
    return distributed_adamw(
        1e-3,
        mesh=mesh,
        **dtypes(**policy),
        replica_axis=replica_axis,
        **kwargs,
    )


def shapes(*leaves):
    return {f"w{i}": jax.ShapeDtypeStruct(x, jnp.bfloat16) for i, x in enumerate(leaves)}


def scheduled(config, tree, accumulate_steps=1):
    return config.schedule(tree, accumulate_steps=accumulate_steps)


def predict(tx, tree, model, machine=ROUND, accumulate_steps=1, recomputes=False):
    found = scheduled(tx.config, tree, accumulate_steps)
    return predict_step(
        tx.config, found, machine, model, accumulate_steps=accumulate_steps, recomputes=recomputes
    )


@pytest.mark.parametrize(
    ("policy", "strategy", "micro", "expected"),
    [
        # Per parameter of a shard: gradient 2; state 24 or, of 16 bits, 12; parameter 2 or 2 + 2.
        (BF16, "optim", 1, {"norm": 2, "update": 28}),
        (BF16 | {"main_params_dtype": "remainder16"}, "optim", 1, {"norm": 2, "update": 26}),
        (BF16 | {"main_params_dtype": None}, "optim", 1, {"norm": 2, "update": 22}),
        ({}, "optim", 1, {"norm": 4, "update": 30}),
        # Four contributions of 2 bytes, a sum of 4.
        (SUMS, "optim", 1, {"sum": 12, "norm": 4, "update": 30}),
        # Three times: gradient 2 and sum 4 + 4 of the four shards that "optim" does not cut.
        (BF16, "optim", 3, {"accumulate": 120, "norm": 2, "update": 28}),
        (BF16, "optim_grads", 3, {"accumulate": 30, "norm": 2, "update": 28}),
        (BF16 | {"mu_dtype": jnp.bfloat16}, "no_shard", 1, {"norm": 8, "update": 96}),
        # Moments 2 * (1 + 4 / 128) + 2 * (2 + 4 / 128) in place of 16.
        (
            BF16
            | {"main_params_dtype": "remainder16", "mu_dtype": "block16", "nu_dtype": "block8"}
            | {"rounding": "stochastic"},
            "optim",
            1,
            {"norm": 2, "update": 10 + 6.125},
        ),
    ],
)
def test_bytes_of_kernels_per_parameter_of_a_shard(policy, strategy, micro, expected):
    config = make(numbers(4), policy, sharding_strategy=strategy).config
    found = kernel_bytes(
        config, scheduled(config, shapes((1024, 1024)), micro), accumulate_steps=micro
    )
    assert {name: size / (MIB / 4) for name, size in found.items()} == expected


def test_float32_parameters_of_one_device_are_updated_themselves():
    config = make(numbers(1), {}).config
    found = kernel_bytes(
        config, scheduled(config, {"w": jax.ShapeDtypeStruct((1000,), jnp.float32)})
    )
    assert found == {"norm": 4000, "update": 28_000}


def test_an_optimizer_step_alone_is_its_bytes_over_bandwidths():
    """Two leaves of 1 Mi parameters on two devices: a device sends half of 4 MiB, twice."""
    time = predict(make(numbers(2)), shapes((1024, 1024), (1024, 1024)), model=0.0)
    assert time.kernels == {"norm": 2 * MIB / 1e9, "update": 28 * MIB / 1e9}
    assert time.collectives == {"reduce-scatter": 2 * MIB / 1e8, "all-gather": 2 * MIB / 1e8}
    assert time.step == time.least == time.most == 30 * MIB / 1e9 + 4 * MIB / 1e8


def test_the_backward_pass_hides_all_reductions_but_the_last_message():
    """Three leaves of 256 MiB are three messages of results of 128 MiB, merged into two."""
    sent = 3 * 128 * MIB / 1e8
    tree = shapes(*[(128 * MIB,)] * 3)
    slow = predict(make(numbers(2)), tree, model=30.0)  # 20 s of backward pass
    np.testing.assert_allclose(slow.exposed, sent + sent / 2, rtol=1e-12)
    np.testing.assert_allclose(
        (slow.exposed_least, slow.exposed_most), (sent, 2 * sent), rtol=1e-12
    )
    fast = predict(make(numbers(2)), tree, model=0.3)  # 0.2 s of backward pass, of 4.03
    np.testing.assert_allclose(fast.exposed, 2 * sent - 0.2, rtol=1e-12)
    again = predict(make(numbers(2)), tree, model=0.4, recomputes=True)
    np.testing.assert_allclose(again.exposed, 2 * sent - 0.3, rtol=1e-12)


def test_packed_leaves_are_reduced_at_the_end():
    tree, leaf = shapes(*[(128 * MIB,)] * 4, (100,)), 128 * MIB / 1e8
    time = predict(make(numbers(2)), tree, model=300.0)
    packed = 100 / 1e8  # half of 200 bytes
    np.testing.assert_allclose(time.exposed, 2 * leaf + 4 * leaf + 2 * packed, rtol=1e-12)


def test_sums_over_micro_batches_are_reduced_beside_the_last_unless_each_is():
    tree, micro, leaf = shapes(*[(128 * MIB,)] * 4), 3, 128 * MIB / 1e8
    once = predict(make(numbers(2)), tree, model=300.0, accumulate_steps=micro)
    # Two leaves are a message: the last one is exposed, and so are the gathers of all.
    np.testing.assert_allclose(once.exposed, 2 * leaf + 4 * leaf, rtol=1e-12)
    # The backward pass of a micro-batch takes two thirds of its time, here as long as one leaf.
    short = predict(make(numbers(2)), tree, model=1.5 * micro * leaf, accumulate_steps=micro)
    np.testing.assert_allclose(short.exposed, 3 * leaf + 4 * leaf, rtol=1e-12)
    each = make(numbers(2), sharding_strategy="optim_grads")
    each = predict(each, tree, model=300.0, accumulate_steps=micro)
    # One message in each micro-batch is exposed; all are gathered once.
    np.testing.assert_allclose(each.exposed, micro * 2 * leaf + 4 * leaf, rtol=1e-12)


def test_whole_leaves_are_gathered_beside_the_forward_pass_but_before_several_micro_batches():
    tree, leaf = shapes(*[(128 * MIB,)] * 4), 128 * MIB / 1e8
    tx = make(numbers(2), sharding_strategy="optim_grads_params")
    # Of four leaves one each is a message of a gather, and two are one of a reduction.
    np.testing.assert_allclose(predict(tx, tree, model=300.0).exposed, 3 * leaf, rtol=1e-12)
    twice = predict(tx, tree, model=300.0, accumulate_steps=2)
    np.testing.assert_allclose(twice.exposed, 4 * leaf + 2 * 2 * leaf, rtol=1e-12)


def test_layers_are_gathered_and_reduced_beside_others():
    """Ten layers of 2 Mi parameters: 2 MiB sent for each, three times; one of each is exposed."""
    tree = {"layers": jax.ShapeDtypeStruct((10, 2048, 1024), jnp.bfloat16)}
    tx = make(numbers(2), sharding_strategy="optim_grads_params", layers=lambda path: "scan")
    time = predict(tx, tree, model=30.0)
    one = 2 * MIB / 1e8
    found = {"reduce-scatter": 10 * one, "all-gather": 20 * one}
    assert {k: round(v, 12) for k, v in time.collectives.items()} == {
        k: round(v, 12) for k, v in found.items()
    }
    np.testing.assert_allclose(time.exposed, 3 * one, rtol=1e-12)
    # Sums over two replicas follow at the end, of all layers' shards of 20 MiB: there and back.
    hybrid = make(numbers(2, 2), sharding_strategy="optim_grads_params", layers=lambda path: "scan")
    time = predict(hybrid, tree, model=30.0)
    np.testing.assert_allclose(time.exposed, 3 * one + 20 * MIB / 1e8, rtol=1e-12)


def test_stacked_leaves_that_devices_hold_whole_are_reduced_at_the_end():
    """And gathered there."""
    tree, whole = shapes(*[(2, 64 * MIB)] * 4), 4 * 128 * MIB / 1e8
    for strategy in ("optim_grads", "optim"):
        tx = make(numbers(2), sharding_strategy=strategy, layers=lambda path: "scan")
        time = predict(tx, tree, model=300.0)
        np.testing.assert_allclose(time.exposed, whole + whole, rtol=1e-12)


PEERS = {  # what 1 Mi parameters on four devices, each with a shard of 1/4 Mi, read and write
    None: {"update": 2 + 6 + 0.5},  # contributions, state, new parameters, in MiB
    1.0: {"sum": 2 + 1, "update": 1 + 6 + 0.5},
}


def over_peers(tree, clips=None, **kwargs):
    tx = make(numbers(4), SUMS, max_grad_norm=clips)
    (row,) = scaling(tree, lambda mesh: tx, ROUND, devices=(4,), **kwargs).rows
    assert {c.transport for c in row.plan.collectives} == {"peer"}
    return row.time


@pytest.mark.parametrize("clips", [None, 1.0])
def test_copies_over_peer_memory_run_beside_the_backward_pass_and_updates(clips):
    time = over_peers(shapes((1024, 1024)), clips, model_seconds=9.0)
    assert {k: round(v * 1e9 / MIB, 9) for k, v in time.kernels.items()} == PEERS[clips]
    sent = 1.5 * MIB / 1e8
    assert time.collectives == {"all-to-all": sent, "all-gather": sent}
    # Each is one message: the exchange comes after the only gradient, the gather after its update.
    np.testing.assert_allclose(time.exposed, 2 * sent, rtol=1e-12)
    np.testing.assert_allclose(time.exposed_least, sent - PEERS[clips]["update"] * MIB / 1e9)


def test_over_peer_memory_all_but_one_message_is_hidden():
    """Eight leaves of 128 MiB; updates are slower than gathers, so that all but one are hidden."""
    tree, one = shapes(*[(64 * MIB,)] * 8), 96 * MIB / 1e9
    fast = functools.partial(over_peers, tree, model_seconds=300.0)
    time = fast()
    updates = time.kernels["update"]
    np.testing.assert_allclose(updates, 8 * 34 * 16 * MIB / 1e9, rtol=1e-12)
    np.testing.assert_allclose(time.exposed, 10 * one + max(80 * one - updates, 10 * one))
    apart = fast(in_train_step=False)  # where nothing moves copies beside other work
    np.testing.assert_allclose(apart.exposed, 160 * one, rtol=1e-12)
    assert apart.kernels == time.kernels and apart.collectives == time.collectives


def test_over_peer_memory_micro_batches_are_exchanged_once():
    time = over_peers(shapes((1024, 1024)), model_seconds=9.0, accumulate_steps=2)
    assert set(time.kernels) == {"accumulate", "update"}
    np.testing.assert_allclose(time.collectives["all-to-all"], 1.5 * MIB / 1e8)


def test_over_peer_memory_shards_are_gathered_beside_the_forward_pass_and_whole_leaves_after():
    tree, one = shapes(*[(64 * MIB,)] * 8), 10 * 96 * MIB / 1e9
    policy = jda.MixedPrecisionPolicy(**SUMS)
    for rests_cut, gathers in ((None, one), (lambda path: False, None)):
        tx = distributed_adamw(
            1e-3,
            mesh=numbers(4),
            policy=policy,
            sharding_strategy="optim_grads_params",
            reshard_after_forward=False,
            reshard_after_backward=rests_cut,
        )
        (row,) = scaling(
            tree, lambda mesh, tx=tx: tx, ROUND, devices=(4,), model_seconds=300.0
        ).rows
        time = row.time
        expected = gathers or max(8 * one - time.kernels["update"], one)
        np.testing.assert_allclose(time.exposed, one + expected, rtol=1e-12)


def test_peer_memory_is_for_a_node_and_for_who_did_not_say_xla():
    tree = shapes((1024, 1024))
    found = scaling(
        tree, functools.partial(make, policy=SUMS), ROUND, model_seconds=1, devices=(1, 2, 4, 8)
    )
    assert [row.plan.communication.transport for row in found.rows] == [
        "xla",
        "peer",
        "peer",
        "xla",
    ]
    over_xla = functools.partial(make, policy=SUMS, communication="xla")
    found = scaling(tree, over_xla, ROUND, model_seconds=1, devices=(4,))
    assert found.rows[0].plan.communication.transport == "xla"


@pytest.mark.parametrize(
    ("op", "devices", "per_node", "expected"),
    [
        ("all-gather", 1, 1, 0.0),
        ("all-gather", 4, 4, 1.0 + 0.1 + 3 * 0.01),  # three hops
        ("all-gather", 8, 4, 1.0 + 0.1 + 6 * 0.01 + 0.02),  # 4 networks of 1/4: as fast as a link
        ("all-gather", 4, 2, 2.0 + 0.1 + 2 * 0.01 + 0.02),
        ("all-reduce", 8, 1, 4.0 + 0.1 + 2 * 7 * 0.02),  # and there and back
        ("all-to-all", 4, 4, 1.0 + 0.1 + 0.01),
        ("all-to-all", 8, 4, 4 * 4 / 7 + 0.1 + 0.02),  # 4 of 7 parts over the network
    ],
)
def test_time_of_a_collective_follows_the_formula(op, devices, per_node, expected):
    machine = dataclasses.replace(ROUND, latency=0.1, link_hop=0.01, network_hop=0.02)
    found = machine.seconds(op, 1e8, devices=devices, per_node=per_node)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    if devices > 1:
        three = machine.seconds(op, 1e8, devices=devices, per_node=per_node, messages=3)
        alone = machine.seconds(op, 0, devices=devices, per_node=per_node)
        np.testing.assert_allclose(three - found, 2 * alone, rtol=1e-9)


def test_members_per_node_counts_devices_of_a_group():
    parallel = make(numbers(6, 4)).config.parallel
    groups = [("data",), ("replica",), ("replica", "data")]
    for per_node, expected in [(8, [4, 2, 8]), (4, [4, 1, 4]), (2, [2, 1, 2]), (16, [4, 2, 8])]:
        assert [members_per_node(parallel, axes, per_node) for axes in groups] == expected


STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("policy", [BF16, SUMS], ids=["bfloat16", "sums"])
@pytest.mark.parametrize("per_replica", [None, 4])
def test_predictions_agree_with_the_plan_and_faster_hardware_is_faster(
    strategy, policy, per_replica
):
    tree = shapes((4096, 512), (512, 4096), (100,))
    predict_all = functools.partial(
        scaling, tree, functools.partial(make, policy=policy, sharding_strategy=strategy),
        model_seconds=0.02, accumulate_steps=2, devices=(1, 2, 4, 8, 64), devices_per_replica=per_replica,
    )  # fmt: skip
    machine = Machine(1e12, 1e11, 2e10, devices_per_node=4)
    slow = predict_all(machine).rows
    for row in slow:
        time = row.time
        assert time.model <= time.least <= time.step <= time.most
        assert time.exposed_most <= time.communication * (1 + 1e-12)
        assert row.efficiency == time.model / time.step <= 1
        shape = (row.devices,)
        if per_replica:
            shape = (max(1, row.devices // 4), min(row.devices, 4))
        tx = make(numbers(*shape), policy, sharding_strategy=strategy)
        planned = jda.plan(tree, tx, accumulate_steps=2)
        assert row.plan.held == planned.held and row.plan.sums == planned.sums
        if row.plan.communication.transport == "xla":
            assert row.plan.collectives == planned.collectives
    held = [row.plan.held_bytes for row in slow]
    assert held == sorted(held, reverse=True) or strategy == "no_shard"
    assert slow[0].time.communication == 0 < slow[1].time.communication
    for name in ("memory_bandwidth", "link_bandwidth", "network_bandwidth"):
        faster = predict_all(
            dataclasses.replace(machine, **{name: 2 * getattr(machine, name)})
        ).rows
        assert all(
            a.time.step <= b.time.step * (1 + 1e-12) for a, b in zip(faster, slow, strict=True)
        )
        assert any(a.time.step < b.time.step for a, b in zip(faster, slow, strict=True)), name


def test_model_time_is_operations_over_flops():
    tree = shapes((1000, 1000))
    rows = [
        scaling(tree, make, ROUND, tokens=500, flops=1e12, recomputes=x, devices=(2,)).rows[0]
        for x in (False, True)
    ]
    np.testing.assert_allclose([x.time.model for x in rows], [3e-3, 4e-3], rtol=1e-12)
    assert rows[0].tokens_per_second == 2 * 500 / rows[0].time.step


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"model_seconds": None}, HyperparameterError, "flops: .*got tokens=None.*Pass model_seconds"),
        ({"flops": 1e12, "tokens": 1}, HyperparameterError, "got tokens=1, flops=1000000000000.0, model_seconds=1.0"),
        ({"model_seconds": None, "flops": 1e12}, HyperparameterError, "expected tokens and flops"),
        ({"model_seconds": -1.0}, HyperparameterError, "model_seconds: out of range: got -1.0"),
        ({"tokens": float("nan")}, HyperparameterError, "tokens: .*got nan, expected a finite"),
        ({"devices": (0,)}, HyperparameterError, "devices: out of range: got 0"),
        ({"accumulate_steps": 0}, HyperparameterError, "accumulate_steps: out of range: got 0"),
        ({"devices_per_replica": 3}, MeshError, "got 3 for 8 devices, expected a divisor"),
        ({"devices_per_replica": 0}, HyperparameterError, "devices_per_replica: .*got 0"),
        ({"devices": (16,), "machine": Machine(1e9, 1e8)}, HyperparameterError,
         "network_bandwidth: .*got None for 16 devices.*Pass network_bandwidth"),
        ({"make_tx": lambda mesh: make(numbers(3))}, MeshError, "got a mesh of {'data': 3}, expected"),
    ],
)  # fmt: skip
def test_wrong_arguments_raise(changed, error, message):
    given = dict(make_tx=make, machine=ROUND, model_seconds=1.0, devices=(8,)) | changed
    with pytest.raises(error, match=message):
        scaling(shapes((512, 64)), **given)


@pytest.mark.parametrize(
    ("name", "value"),
    [("memory_bandwidth", 0), ("link_bandwidth", "fast"), ("network_bandwidth", -1.0), ("latency", -1),
     ("link_hop", float("inf")), ("network_hop", None), ("devices_per_node", 2.0)],
)  # fmt: skip
def test_wrong_speeds_raise(name, value):
    with pytest.raises(HyperparameterError, match=f"{name}: out of range: got .*Change {name}"):
        dataclasses.replace(ROUND, **{name: value})
