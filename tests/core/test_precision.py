"""MixedPrecisionPolicy by itself: what raises, and what it prints."""

import jax.numpy as jnp
import pytest

import jdistadam as jda


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (dict(grad_comm_dtype="int8"), r"grad_comm_dtype: not a dtype that can be used: got 'int8', expected float32, bf"),
        (dict(mu_dtype="nonsense"), r"mu_dtype: not a dtype that can be used: got 'nonsense'"),
        (dict(main_grads_dtype=jnp.bfloat16, grad_comm_dtype=jnp.float32), r"main_grads_dtype: gradients would lose bits in storage .*got bfloat16 with grad_comm_dtype float32"),
        (dict(main_grads_dtype=jnp.float16, grad_comm_dtype=jnp.bfloat16), r"got float16 with grad_comm_dtype bfloat16"),
        (dict(grad_reduce_dtype=jnp.bfloat16), r"grad_reduce_dtype: not supported in this version: got bfloat16, expected None or float32"),
        (dict(main_params_dtype=jnp.bfloat16), r"main_params_dtype: not supported in this version: got bfloat16"),
        (dict(grad_comm_dtype="float8_e5m2"), r"grad_comm_dtype: not a dtype that can be used: got 'float8_e5m2'"),
        (dict(param_comm_dtype="int8"), r"param_comm_dtype: not a dtype that can be used: got 'int8', expected .*float8_e4m3fn"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_policies(kwargs, message):
    with pytest.raises(jda.PolicyError, match=message):
        jda.MixedPrecisionPolicy(**kwargs)


def test_policy_prints_what_is_resolved():
    lines = dict(
        line.split(None, 1)
        for line in str(jda.MixedPrecisionPolicy(mu_dtype=jnp.bfloat16)).splitlines()
    )
    assert lines["grad_comm_dtype"] == "float32"
    assert lines["mu_dtype"] == "bfloat16"
    assert lines["grad_reduce_dtype"] == "float32, by the collective library"
