"""Bytes that kernels read and write, against sums done by hand."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support.dtypes import dtypes
from support.optimizers import distributed_adamw
from support.paths import ROOT

sys.path.insert(0, str(ROOT / "experiments"))
from step_bench.kernel_bytes import kernel_bytes

MIB = 1 << 20
BF16 = {"grad_comm_dtype": jnp.bfloat16}
SUMS = BF16 | {"grad_reduce_dtype": jnp.float32}


def config_of(devices, policy, **kwargs):
    mesh = jax.sharding.Mesh(np.arange(devices), ("data",))
    return distributed_adamw(1e-3, mesh=mesh, **dtypes(**policy), **kwargs).config


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
    config = config_of(4, policy, sharding_strategy=strategy)
    shapes = {"w": jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)}
    schedule = config.schedule(shapes, accumulate_steps=micro)
    found = kernel_bytes(config, schedule, accumulate_steps=micro)
    assert {name: size / (MIB / 4) for name, size in found.items()} == expected


def test_float32_parameters_of_one_device_are_updated_themselves():
    config = config_of(1, {})
    schedule = config.schedule({"w": jax.ShapeDtypeStruct((1000,), jnp.float32)})
    assert kernel_bytes(config, schedule) == {"norm": 4000, "update": 28_000}
