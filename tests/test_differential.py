"""Random configurations that cross all features, against the reference: support/differential.py."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jdistadam.checkpoint import restored
from jdistadam.core import algorithm
from jdistadam.distributed import accumulate
from jdistadam.training import local_gradients
from support.configurations import CONFIG, PLACE, draw, features
from support.differential import NotSupported, run
from support.samples import few, often

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
    pytest.mark.usefixtures("several_kernel_calls"),
]

SAMPLE = (41, 96, 185, 272, 277)
"""Moves: every value of the choices that they depend on is in one of these configurations; and in 41
layers that a scan stacks, summed over a mesh with a model axis under "optim_grads"."""


@few(1)
@pytest.mark.parametrize("seed", range(300))
@often(lambda seed: seed in SAMPLE)
def test_a_random_configuration_has_the_bits_of_the_reference(seed):
    try:
        run(draw(seed))
    except NotSupported:
        assert seed not in SAMPLE
    finally:
        if seed not in SAMPLE:  # what others compiled is kept beside a few
            jax.clear_caches()


def test_sample_has_every_value_of_every_option():
    names = ("move", "strategy", "outer", "stacked", "main", "mu", "nu", "rounding", "dtypes")
    names += ("ema_decay", "norm_guard", "norms", "weighted")
    names += ("state_memory", "early_updates", "gathered_in_model", "rests_whole")
    tables = PLACE | CONFIG
    every = {f"{name}={value}" for name in names for value in tables[name]} - {"move=none"}
    assert every <= set().union(*(features(draw(seed)) for seed in SAMPLE))


def wrong_divisor(monkeypatch):
    def mean_factor(config, weight):
        return jnp.float32(1 / config.parallel.num_devices), None

    monkeypatch.setattr(accumulate, "mean_factor", mean_factor)


def dropped_micro_batch(monkeypatch):
    split = local_gradients._split

    def without_last(batch, steps):
        return jax.tree.map(lambda x: x.at[-1].set(0), split(batch, steps))

    monkeypatch.setattr(local_gradients, "_split", without_last)


def mask_without_effect(monkeypatch):
    decay_groups = algorithm.decay_groups
    monkeypatch.setattr(algorithm, "decay_groups", lambda mask, params: decay_groups(None, params))


def rounded_main_params(monkeypatch):
    stored = restored._stored

    def rounded(kind, x):
        return stored(kind, x.astype(jnp.bfloat16).astype(x.dtype))

    monkeypatch.setattr(restored, "_stored", rounded)


PLANTED = (wrong_divisor, dropped_micro_batch, mask_without_effect, rounded_main_params)


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTED)
@often(lambda plant: plant is rounded_main_params)
def test_a_planted_fault_is_found(monkeypatch, plant):
    config = dataclasses.replace(draw(50), adam="adamw", mask="tree")  # 2 micro-batches, saved
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=r"^seed 50, "):  # in a loss, a norm or any bits
        run(config)
