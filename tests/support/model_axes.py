"""Meshes with an axis over which a model is partitioned, in addition to data axes."""

import math

import jax
from jax.sharding import AxisType

MESHES = {
    "4x2": dict(shape=(4, 2), names=("data", "model")),
    "2x4": dict(shape=(2, 4), names=("data", "model")),
    "2x2x2": dict(shape=(2, 2, 2), names=("replica", "data", "model")),
    "model first": dict(shape=(2, 4), names=("model", "data")),
    "1x2": dict(shape=(1, 2), names=("data", "model")),
    "8x1": dict(shape=(8, 1), names=("data", "model")),
}
TYPES = {"explicit": AxisType.Explicit, "auto": AxisType.Auto}


def mesh_of(name, kind="explicit"):
    shape, names = MESHES[name]["shape"], MESHES[name]["names"]
    devices = jax.devices("cpu")[: math.prod(shape)]
    return jax.make_mesh(shape, names, axis_types=(TYPES[kind],) * len(names), devices=devices)
