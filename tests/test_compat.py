"""Defects of jax that the package works around, still there and only there, and temporary ways."""

import re
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from jdistadam import compat
from jdistadam.core.collectives import make_primitive
from jdistadam.kernels.narrow import narrow_source
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


@pytest.mark.parametrize("jit", [compat.inlined_jit, jax.jit], ids=["inlined", "not"])
def test_a_lowering_rule_sees_what_makes_its_operands_twice(jit):
    """Also where two operations are equal. Not inlined, an inner function hides it from the rule."""
    seen, identity = [], lambda x: [x]

    def rule(ctx, x):
        devices, num_parts = compat.devices_of_lowering(ctx)
        seen.append(narrow_source(x, devices, num_parts) is not None)
        return [x]

    primitive = make_primitive("seen_operands", identity, identity)
    compat.lower_by_operands(primitive, rule)
    inner = jit(lambda x: primitive.bind(x)[0])

    def program(x):
        wide = x.astype(jnp.float32)
        return inner(wide) + inner(wide)

    x = jax.ShapeDtypeStruct((8,), jnp.bfloat16)
    jax.jit(program).trace(x).lower(lowering_platforms=("cuda",))
    assert seen == [True, True] if jit is compat.inlined_jit else not any(seen)


def test_a_lowering_rule_knows_the_devices_and_the_parts(cpu_mesh):
    """JAX tells it the devices where a program has a custom_partitioning, as every step."""
    found, identity = [], lambda x: [x]

    def rule(ctx, x):
        found.append(compat.devices_of_lowering(ctx))
        return [x]

    primitive = make_primitive("seen_devices", identity, identity)
    mlir.register_lowering(primitive, rule)
    partitioned = custom_partitioning(lambda x: x)
    partitioned.def_partition(lambda *args: None, sharding_rule="i -> i")
    mesh = cpu_mesh(4)
    run = lambda x: partitioned(primitive.bind(x)[0])  # noqa: E731
    cut = jax.device_put(jnp.ones(4), jax.sharding.NamedSharding(mesh, P("data")))
    jax.jit(run).lower(jnp.ones(4))
    jax.jit(run).lower(cut)
    jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P("data"), out_specs=P("data"))).lower(cut)
    devices = tuple(mesh.devices.flat)
    assert found == [(devices[:1], 1), (devices, 4), (devices, 1)]
