"""Many leaves: programs are no larger, and no more, than for fewer leaves of the same shapes."""

import collections
import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdistadam as jda
from jdistadam.checkpoint import checksum
from jdistadam.distributed import bucket_leaves, global_arrays
from support.bits import assert_trees_same_bits
from support.lookalike import BATCH, POLICIES, loss_fn, make_tx
from support.samples import often

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

SHAPES = ((3,), (4, 5), (1,), (256, 128))


def params_of(count, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    shapes = {f"{i:02}": SHAPES[i % len(SHAPES)] for i in range(count)}
    return {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in shapes.items()}


@pytest.fixture
def few_in_a_program(monkeypatch):
    """Makes programs take few leaves, as if the tests had thousands; call it."""

    def patch():
        for module, name, most in (
            (bucket_leaves, "_MOST_LEAVES", 4),
            (bucket_leaves, "_MANY", 8),
            (global_arrays, "_MOST_COPIES", 8),
            (checksum, "_MOST_BLOCKS", 4),
        ):
            monkeypatch.setattr(module, name, most)

    return patch


@contextlib.contextmanager
def dumped(folder):
    """Writes every program that is compiled to a file."""
    jax.config.update("jax_dump_ir_to", str(folder))
    try:
        yield
    finally:
        jax.config.update("jax_dump_ir_to", None)


def lines_of_programs(count, folder):
    """Creates, saves and restores a state; returns how many new programs have each number of lines."""
    tx, params = make_tx(4), params_of(count)
    with dumped(folder / "programs"):
        state = jda.TrainState.create(params, tx)
        jda.save(folder, state, tx)
        restored = jda.restore(folder, jda.TrainState.shapes(params, tx), tx)
    assert_trees_same_bits(restored, state)
    return collections.Counter(x.read_text().count("\n") for x in (folder / "programs").iterdir())


def test_programs_do_not_grow_with_the_number_of_leaves(few_in_a_program, tmp_path):
    few_in_a_program()
    few, many = (lines_of_programs(n, tmp_path / f"{n}") for n in (32, 64))
    assert many <= few  # those for 64 leaves that are not shared with 32


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["float32", "remainder16", "8 bits"])
@often(lambda policy: policy == "8 bits")
def test_programs_of_few_leaves_give_the_same_bits(policy, few_in_a_program, tmp_path):
    dtype, given = POLICIES[policy]
    params, tx = params_of(22, dtype), make_tx(4, policy=given)
    states = []
    for folder in (tmp_path / "many", tmp_path / "few"):
        state = jda.TrainState.create(params, tx)
        state, _ = jda.train_step(loss_fn, tx)(state, BATCH)
        jda.save(folder, state, tx)
        states.append(state)
        few_in_a_program()
    shapes = jda.TrainState.shapes(params, tx)
    states += [jda.restore(tmp_path / name, shapes, tx) for name in ("many", "few")]
    for state in states[1:]:
        assert_trees_same_bits(state, states[0])
