"""Random schedules, each interpreted beside the reference."""

import jax
import numpy as np
from hypothesis import strategies as st

from support.bits import assert_same_bits
from support.configurations import CONFIG, MESHES, PLACE, SHAPES, fitted
from support.differential import make_batch, make_params, make_tx, may_raise
from support.interpreter import Interpreter
from support.reference_training import Reference

STEPS = 3


@st.composite
def configurations(draw):
    """A configuration that stays in one place."""
    pick = lambda table: {name: draw(st.sampled_from(x)) for name, x in table.items()}  # noqa: E731
    config = pick(CONFIG) | dict(move="none")
    names = {"matrix", *draw(st.sets(st.sampled_from(sorted(SHAPES))))}
    place = pick(PLACE) | dict(at_rest="full")
    return fitted(draw(st.integers(0, 999)), config, [place, {}], names)


def schedule_of(config):
    """What a training step sends.

    Raises:
      NotSupported: The package does not support this.
    """
    (place,), params = config.places, make_params(config)

    def shape(path, x):
        return jax.ShapeDtypeStruct(x.shape, config.dtype_of(jax.tree_util.keystr(path)))

    with may_raise():
        optimizer = make_tx(config, place).config
        whole = optimizer.tensor_local(jax.tree_util.tree_map_with_path(shape, params))
        return optimizer.schedule(whole, accumulate_steps=config.micro)


def interpreter_of(config, schedule=None):
    """The interpreter of a configuration's schedule, or of another one."""
    (place,) = config.places
    mesh = MESHES[place.mesh]
    sizes = dict(zip(mesh["names"], mesh["shape"], strict=True))
    schedule = schedule_of(config) if schedule is None else schedule
    return Interpreter(config, sizes, tuple(place.data_axes), schedule, make_params(config))


def interpret(config, schedule=None):
    """Steps a schedule beside the reference. Raises AssertionError where a bit differs."""
    (place,), params = config.places, make_params(config)
    interpreter, reference = interpreter_of(config, schedule), Reference(config, params)
    for i in range(STEPS):
        batch = make_batch(config, place, i, params)
        got, want = interpreter.step(batch), reference.step(place, batch)
        for name in want:
            assert_same_bits(np.asarray(got[name]), np.asarray(want[name]), name)
        interpreter.assert_equal(reference)
