"""What a policy and the formats of moments print."""

import jax
import jax.numpy as jnp

import jdistadam as jda


def test_policy_prints_what_is_resolved():
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices("cpu")[:2])
    config = jda.distributed(jda.fused_adamw(1e-3, mu_dtype=jnp.bfloat16), mesh=mesh).config
    printed = f"{config.policy}\n{config.algorithm}".splitlines()
    lines = dict(line.split(None, 1) for line in printed)
    assert lines["main_params_dtype"] == "float32"
    assert lines["grad_comm_dtype"] == "float32"
    assert lines["mu_dtype"] == "bfloat16"
    assert lines["grad_reduce_dtype"] == "float32, by the collective library"
    assert "main_params_dtype   the optimizer's" in str(jda.MixedPrecisionPolicy())
