"""MixedPrecisionPolicy by itself: what it prints."""

import jax.numpy as jnp

import jdistadam as jda


def test_policy_prints_what_is_resolved():
    lines = dict(
        line.split(None, 1)
        for line in str(jda.MixedPrecisionPolicy(mu_dtype=jnp.bfloat16)).splitlines()
    )
    assert lines["grad_comm_dtype"] == "float32"
    assert lines["mu_dtype"] == "bfloat16"
    assert lines["grad_reduce_dtype"] == "float32, by the collective library"
