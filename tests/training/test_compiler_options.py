"""Options for GPUs that this XLA does not have are left out, and show in the step."""

import jax
import pytest

from jdistadam.training import train_step


@pytest.mark.parametrize(
    ("name", "value", "known"),
    [
        ("xla_gpu_all_gather_combine_threshold_bytes", 1, True),
        ("xla_gpu_no_such_option", True, False),
        ("xla_gpu_enable_while_loop_unrolling", "WHILE_LOOP_UNROLLING_DOUBLE_BUFFER", True),
        ("xla_gpu_enable_while_loop_unrolling", "NO_SUCH_VALUE", False),
    ],
)
def test_unknown_names_and_values_are_noticed(name, value, known):
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices("cpu")[:2])
    assert train_step._is_known(name, value, mesh) is known
