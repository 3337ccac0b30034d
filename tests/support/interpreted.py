"""Interpreted schedules, compared with the reference and with compiled training steps."""

import jax
import numpy as np
from hypothesis import strategies as st

from jdistadam.checkpoint.parts import adam_of
from support.bits import assert_same_bits
from support.configurations import CONFIG, MESHES, PLACE, SHAPES, each_leaf, fitted
from support.differential import (
    OnMesh,
    compare_guards,
    make_batch,
    make_params,
    make_tx,
    may_raise,
)
from support.interpreter import Interpreter
from support.norms import assert_near
from support.reference_training import Reference

STEPS = 3


@st.composite
def configurations(draw, **given):
    """A configuration that stays in one place, of which some values are given."""
    pick = lambda table: {name: draw(st.sampled_from(x)) for name, x in table.items()}  # noqa: E731
    config = pick(CONFIG) | dict(move="none")
    names = {"matrix", *draw(st.sets(st.sampled_from(sorted(SHAPES))))}
    place = pick(PLACE) | given
    return fitted(draw(st.integers(0, 999)), config, [place, {}], names)


def schedule_of(config):
    """The schedule of a training step.

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
    axes = tuple(place.data_axes), place.state_axes
    return Interpreter(config, sizes, *axes, schedule, make_params(config))


def interpret(config, schedule=None):
    """Compares steps of a schedule with the reference; raises AssertionError if a bit differs."""
    (place,), params = config.places, make_params(config)
    interpreter, reference = interpreter_of(config, schedule), Reference(config, params)
    for i in range(STEPS):
        batch = make_batch(config, place, i, params)
        got, want = interpreter.step(batch), reference.step(place, batch)
        for name, x in want.items():
            if "_norm" in name and name != "grad_norm":
                assert_near(got[name], x, name)
            else:
                assert_same_bits(np.asarray(got[name]), np.asarray(x), name)
        interpreter.assert_equal(reference)


def compile_and_interpret(config, **kwargs):
    """Steps a compiled program, the interpreter and the reference; all must have the same bits.

    Every device has the interpreter's parameters and flat state, norms have its bits, metrics are
    those of the reference, and the loss gets its params. ``kwargs``: for ``train_step``.
    """
    (place,), params = config.places, make_params(config)
    dtypes = each_leaf(lambda path, _: config.dtype_of(path), params)
    interpreter, reference = interpreter_of(config), Reference(config, params)
    compiled = OnMesh(config, place, params, dtypes, **kwargs)
    compiled.create(params)
    _assert_same_on_every_device(compiled, interpreter)
    for i in range(STEPS):
        batch = make_batch(config, place, i, params)
        metrics, want = compiled.step(batch, reference), interpreter.step(batch)
        for name in metrics.keys() & want.keys() - {"grad_norm"}:
            if "_norm" in name:
                assert_same_bits(metrics[name], want[name], name)
        _assert_same_on_every_device(compiled, interpreter)
    interpreter.assert_equal(reference)


def _assert_same_on_every_device(compiled, interpreter):
    state = adam_of(compiled.state.opt_state)
    devices = compiled.mesh.devices
    for i, x in enumerate(jax.tree.leaves(compiled.state.params)):
        _assert_same_shards(x, interpreter.held[i], devices, interpreter.leaves[i].path)
    for name in interpreter.config.arrays:
        arrays = jax.tree.leaves(getattr(state, name))
        for x, want in zip(arrays, interpreter.flat(name), strict=True):
            _assert_same_shards(x, want, devices, name)
    assert int(state.count) == interpreter.count
    compare_guards(state.guard, interpreter)


def _assert_same_shards(x, want, devices, name):
    for shard in x.addressable_shards:
        (place,) = np.argwhere(devices == shard.device)
        assert_same_bits(shard.data, want[tuple(place)], f"{name} on {shard.device}")
