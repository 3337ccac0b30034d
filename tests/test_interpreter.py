"""The schedule of random configurations, interpreted in numpy, has the bits of the reference."""

import dataclasses

import hypothesis
import jax.numpy as jnp
import pytest

from support.configurations import fitted
from support.differential import NotSupported
from support.interpreted import configurations, interpret, schedule_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def check(config):
    try:
        interpret(config)
    except NotSupported:
        hypothesis.reject()


settings = dict(deadline=None, suppress_health_check=list(hypothesis.HealthCheck))


@hypothesis.settings(max_examples=60, derandomize=True, **settings)
@hypothesis.given(configurations())
def test_a_schedule_has_the_bits_of_the_reference(config):
    check(config)


@hypothesis.settings(max_examples=15, derandomize=True, **settings)
@hypothesis.given(configurations(mesh="experts", communication="auto"))
def test_a_schedule_with_experts_has_the_bits_of_the_reference(config):
    check(config)


@pytest.mark.slow
@hypothesis.settings(max_examples=1000, **settings)
@hypothesis.given(configurations(mesh="experts", communication="auto"))
def test_many_schedules_with_experts_have_the_bits_of_the_reference(config):
    check(config)


@pytest.mark.slow
@hypothesis.settings(max_examples=4000, **settings)
@hypothesis.given(configurations())
def test_thousands_of_schedules_have_the_bits_of_the_reference(config):
    check(config)


# Faults that are planted in a schedule, of 2 x 3 devices with 3 micro-batches.

PLAIN = dict(
    dtypes="bfloat16", adam="adamw", schedule=True, mask="tree", groups="none", chain="none",
    main="float32", main_grads="float32", grad_comm="bfloat16", grad_reduce="float32",
    param_comm=None, mu="float32", nu="float32", rounding="nearest", float32_moments=False,
    micro=3, loss_scale="none", clip=None, average=True, data="any", skip=0, move="none",
    ema_decay=None, norm_guard=None, norms=None, weighted=False,
)  # fmt: skip
REPLICAS = dict(
    mesh="replicas last", axes="auto", specs="rows", strategy="optim_grads", outer="optim",
    reshard=True, bucket_bytes=20_000, stacked=False, communication="auto", state_memory="device",
    early_updates=None, gathered_in_model=False, rests_whole=False,
)  # fmt: skip
CONFIG = fitted(7, PLAIN, [REPLICAS, {}], {"matrix", "odd", "row", "scalar"})


def changed(phase, of_last=False, **values):
    """A phase whose first, or last, collective is another one."""
    i = len(phase) - 1 if of_last else 0
    return (*phase[:i], dataclasses.replace(phase[i], **values), *phase[i + 1 :])


def planted(**phases):
    """The schedule with other phases in its first bucket: functions of the entry."""

    def plant(schedule):
        first, *others = schedule.buckets
        first = dataclasses.replace(first, **{name: f(first) for name, f in phases.items()})
        return dataclasses.replace(schedule, buckets=(first, *others))

    return plant


def without_bucket(schedule):
    return dataclasses.replace(schedule, buckets=schedule.buckets[:-1])


def without_leaf(schedule):
    """The last leaf of the packed bucket is taken for padding."""
    *others, last = schedule.buckets
    bucket = last.bucket
    lost = schedule.layout.leaves[bucket.leaves[-1]].size
    less = dataclasses.replace(bucket, leaves=bucket.leaves[:-1], padding=bucket.padding + lost)
    return dataclasses.replace(schedule, buckets=(*others, dataclasses.replace(last, bucket=less)))


def one_place_for_two(schedule):
    *others, last = schedule.buckets
    bucket = dataclasses.replace(last.bucket, offset=others[-1].bucket.offset)
    return dataclasses.replace(
        schedule, buckets=(*others, dataclasses.replace(last, bucket=bucket))
    )


PLANTED = {
    "a sum in the communication dtype": planted(reduce=lambda x: changed(x.reduce, op="reduce-scatter")),
    "a gather in place of a sum": planted(reduce=lambda x: changed(x.reduce, op="all-gather")),
    "another dtype": planted(reduce=lambda x: changed(x.reduce, dtype=jnp.dtype("float8_e4m3fn"))),
    "no sum over replicas": planted(reduce_outer=lambda x: ()),
    "sums over replicas alone": planted(reduce=lambda x: ()),
    "a sum over the wrong axis": planted(reduce=lambda x: changed(x.reduce, axes=("replica",))),
    "parameters in another dtype": planted(gather=lambda x: changed(x.gather, dtype=jnp.dtype("float8_e4m3fn"))),
    "no gather": planted(gather=lambda x: ()),
    "gathers in the wrong order": planted(gather=lambda x: x.gather_outer, gather_outer=lambda x: x.gather),
    "a wrong divisor": planted(reduce=lambda x: changed(x.reduce, devices=1)),
    "a lost micro-batch": planted(reduce=lambda x: changed(x.reduce, times=2)),
    "one sum for all micro-batches": planted(reduce=lambda x: changed(x.reduce, when="step")),
    "a dropped bucket": without_bucket,
    "a dropped leaf": without_leaf,
    "one place for two shards": one_place_for_two,
}  # fmt: skip


@pytest.mark.parametrize("fault", PLANTED)
def test_a_fault_in_a_schedule_is_found(fault):
    schedule = schedule_of(CONFIG)
    assert len(schedule.buckets) == 2 and schedule.buckets[-1].bucket.is_packed
    with pytest.raises(AssertionError):
        interpret(CONFIG, PLANTED[fault](schedule))


def test_schedule_without_a_fault_passes():
    interpret(CONFIG, schedule_of(CONFIG))


# Faults in what is sent of experts, which are in the first bucket.

EXPERTS = dict(mesh="experts", outer="no_shard", strategy="optim_grads")
OF_EXPERTS = fitted(7, PLAIN, [REPLICAS | EXPERTS, {}], {"matrix", "odd", "row", "scalar"})


def summed_over_experts(entry):
    """One more sum, of what the loss has already added."""
    (first, *_), size = entry.reduce, entry.bucket.inner_size
    given = dict(op="all-reduce", axes=("expert",), devices=4, elements=size, when="step", times=1)
    return (dataclasses.replace(first, **given),)


PLANTED_IN_EXPERTS = {
    "a sum over their own axis": planted(reduce_outer=summed_over_experts),
    "a sum over their own axis in place of data": planted(reduce=summed_over_experts),
    "no sum over data": planted(reduce=lambda x: ()),
    "a gather over all devices": planted(gather=lambda x: changed(x.gather, axes=("data", "expert"), devices=8)),
}  # fmt: skip


@pytest.mark.parametrize("fault", PLANTED_IN_EXPERTS)
def test_a_fault_in_a_schedule_with_experts_is_found(fault):
    schedule = schedule_of(OF_EXPERTS)
    assert schedule.buckets[0].bucket.split == 4 and schedule.buckets[1].bucket.split == 1
    with pytest.raises(AssertionError):
        interpret(OF_EXPERTS, PLANTED_IN_EXPERTS[fault](schedule))


def test_a_schedule_with_experts_without_a_fault_passes():
    interpret(OF_EXPERTS)
