"""The defect of jax 0.11 that the package works around: still there, and only there."""

import re
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from jdistadam import compat
from support.exact_sums import make_tx
from support.paths import environment

IS_DEFECTIVE = jax.__version_info__[:2] == (0, 11)
TWO_DEVICES = """
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from support.optimizers import distributed_adamw
mesh = jax.make_mesh((2,), ("data",))
"""


def run_on_two_devices(program):
    """In a process of its own, which may crash."""
    flags = "--xla_force_host_platform_device_count=2"
    return subprocess.run(
        [sys.executable, "-P", "-c", TWO_DEVICES + program], capture_output=True, text=True, timeout=120,
        env=environment(JAX_PLATFORMS="cpu", XLA_FLAGS=flags),
    )  # fmt: skip


def test_the_program_of_the_docstring_crashes_on_jax_0_11_alone():
    """Where this fails on a new jax 0.11.x, its crash was mended: compat.py says what to remove."""
    (program,) = re.findall(r"::\n\n((?:    .*\n)+)", compat.__doc__)
    program = textwrap.dedent(program)
    assert "zeros((0, 3))" in program
    done = run_on_two_devices(program + "print('got here')\n")
    if IS_DEFECTIVE:
        assert done.returncode < 0, (done.returncode, done.stdout, done.stderr)
    else:
        assert (done.returncode, done.stdout) == (0, "got here\n"), done.stderr
    with_something = run_on_two_devices(program.replace("(0, 3)", "(1, 3)"))
    assert with_something.returncode == 0, with_something.stderr


def test_train_step_takes_zero_size_leaves_on_every_jax():
    """In a process of its own: without the workaround this one would end, too."""
    done = run_on_two_devices("""
import jdistadam as jda
tx = distributed_adamw(0.5, mesh=mesh)
state = jda.TrainState.create({"w": jnp.ones(3), "empty": jnp.zeros((0, 3))}, tx)
step = jda.train_step(lambda p, x: jnp.sum(p["w"]) * jnp.mean(x) + jnp.sum(p["empty"]), tx)
state, _ = step(state, jnp.ones((2, 1)))
print(bool((state.params["w"] < 1).all()), state.params["empty"].shape)
""")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True (0, 3)\n"


@pytest.mark.skipif(not IS_DEFECTIVE, reason="needs jax 0.11, where XLA would crash")
def test_zero_size_leaf_in_an_own_shard_map_raises_instead_of_crashing(cpu_mesh):
    mesh = cpu_mesh(2)
    tx = make_tx(mesh, mask=None)
    state = jda.TrainState.create({"w": jnp.ones(3), "e": jnp.zeros((0, 4))}, tx)
    specs = (P(), tx.state_specs())
    own = jax.shard_map(
        lambda p, s: tx.step(p, s, p), mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False
    )
    with pytest.raises(
        jda.ShapeError,
        match=r"params\['e'\]: zero-size arguments .*got \(0, 4\), expected at least one",
    ):
        jax.jit(own)(state.params, state.opt_state)
