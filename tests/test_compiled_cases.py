"""Compiled training steps have the bits of the interpreter and of the reference: a covering array.

Two values of any two choices are together in one of these programs, if they fit each other. Every
fourth is compiled as users have it, the others as quickly as XLA can.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jdistadam.distributed import accumulate, communication, model_axes, step, verdict
from jdistadam.kernels import multi_tensor
from support import covering
from support.fast_compilation import AS_FOR_USERS
from support.interpreted import compile_and_interpret
from support.samples import few, often

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.usefixtures("several_kernel_calls"),
]
ROWS = covering.rows()


@few(2)
@pytest.mark.parametrize("row", range(len(ROWS)))
@often(lambda row: row % 3 == 0)
def test_compiled_steps_have_the_bits_of_the_interpreter(row):
    options = AS_FOR_USERS if row % 4 == 0 else None
    if jax.__version_info__ < (0, 11) and ROWS[row]["mesh"] == "experts":
        if ROWS[row]["early_updates"]:
            pytest.skip("needs jax 0.11: in XLA of 0.10 for CPUs, sums of several groups may stop")
    compile_and_interpret(covering.configuration(ROWS[row]), compiler_options=options)


def test_every_pair_of_values_is_in_a_row():
    assert len(ROWS) <= 45
    missing = covering.possible() - set().union(*map(covering.pairs, ROWS))
    assert not missing, "run: PYTHONPATH=tests python -m support.covering"


# Faults that are planted where a program is made from a schedule.

CASE = covering.fitting(
    {name: values[0] for name, values in covering.TABLE.items()}
    | dict(mesh="8", strategy="optim_grads", micro=3, dtypes="float32", data="any")
    | dict(grad_reduce="float32", skip=4, bucket_bytes=32 << 20)
)


def wrong_pairs(monkeypatch):
    """Contributions of other devices are added first."""
    summed = multi_tensor.sum_contributions

    def rolled(parts):
        return summed([jnp.roll(part, 1, axis=0) for part in parts])

    monkeypatch.setattr(communication.multi_tensor, "sum_contributions", rolled)


def wrong_dtype(monkeypatch):
    """What is received is rounded once more."""
    sum_phase = communication._sum_phase
    monkeypatch.setattr(
        communication,
        "_sum_phase",
        lambda phase, x, dim: sum_phase(phase, x, dim).astype(jnp.bfloat16).astype(jnp.float32),
    )


def lost_micro_batch(monkeypatch):
    """Each sum over micro-batches begins anew."""
    accumulate_local = model_axes.accumulate_local

    def begun_anew(config, acc, *args, **kwargs):
        zero = dataclasses.replace(acc, sums=jax.tree.map(jnp.zeros_like, acc.sums))
        return accumulate_local(config, zero, *args, **kwargs)

    monkeypatch.setattr(model_axes, "accumulate_local", begun_anew)


def wrong_divisor(monkeypatch):
    monkeypatch.setattr(
        accumulate,
        "mean_factor",
        lambda config, weight: (jnp.float32(1 / config.parallel.num_devices), None),
    )


def old_parameters(monkeypatch):
    """A leaf keeps the parameters that it had."""
    leaves_of_buckets = step.leaves_of_buckets

    def without_last(*args):
        new = leaves_of_buckets(*args)
        return {i: x for i, x in new.items() if i != max(new)}

    monkeypatch.setattr(step, "leaves_of_buckets", without_last)


def clipped_twice(monkeypatch):
    scalars_of = verdict._scalars

    def twice(*args):
        scalars = scalars_of(*args)
        return scalars._replace(inv_scale=scalars.inv_scale * scalars.inv_scale)

    monkeypatch.setattr(verdict, "_scalars", twice)


PLANTED = (wrong_pairs, wrong_dtype, lost_micro_batch, wrong_divisor, old_parameters, clipped_twice)


@few(1)
@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_fault_is_found(monkeypatch, plant):
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=r"elements differ in bits|^grad_norm: got"):
        compile_and_interpret(covering.configuration(CASE))


@pytest.mark.slow
def test_the_weight_of_each_token_reaches_its_experts():
    """A shard's own weight would be that of another device: experts, gathered layer by layer."""
    gathered = dict(strategy="optim_grads_params", stacked=True, gathered_in_model=True)
    row = CASE | gathered | dict(mesh="experts", weighted=True, micro=1, data="exact", leaves="all")
    config = covering.configuration(covering.fitting(row))
    assert config.weighted and config.places[0].has_experts and config.places[0].stacked
    compile_and_interpret(config)


def test_step_without_a_fault_passes():
    compile_and_interpret(covering.configuration(CASE))
