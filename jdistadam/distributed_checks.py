"""What ``distributed_fused_adamw`` and its step refuse, and how they say so."""

from __future__ import annotations

import difflib
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jdistadam import collectives, trees
from jdistadam.config import MixedPrecisionPolicy
from jdistadam.errors import (
    DtypeError,
    HyperparameterError,
    MeshError,
    PolicyError,
    ShapeError,
    describe,
)
from jdistadam.layout import Layout


def check_arguments(policy: Any, max_grad_norm: Any, bucket_bytes: Any) -> None:
    """Raises PolicyError or HyperparameterError unless types and ranges are right."""
    if not isinstance(policy, MixedPrecisionPolicy):
        raise PolicyError(
            describe(
                "policy",
                "not a policy",
                got=repr(policy),
                expected="jdistadam.MixedPrecisionPolicy",
                action="Pass policy=jdistadam.MixedPrecisionPolicy(...).",
            )
        )
    numbers = {"bucket_bytes": bucket_bytes} | (
        {} if max_grad_norm is None else {"max_grad_norm": max_grad_norm}
    )
    for name, value in numbers.items():
        if not (isinstance(value, int | float | np.number) and 0 < value < math.inf):
            raise HyperparameterError(
                describe(
                    name,
                    "out of range",
                    got=repr(value),
                    expected="a finite number > 0",
                    action=f"Change {name}.",
                )
            )


def check_mesh(mesh: Any, shard_axis: str) -> None:
    """Raises MeshError unless ``shard_axis`` is the one axis of a mesh."""
    if not isinstance(mesh, Mesh):
        raise MeshError(
            describe(
                "mesh",
                "not a mesh",
                got=type(mesh).__name__,
                expected="jax.sharding.Mesh",
                action='Make one with jax.make_mesh((jax.device_count(),), ("data",)).',
            )
        )
    if shard_axis not in mesh.shape:
        close = difflib.get_close_matches(str(shard_axis), mesh.axis_names, 1, 0.0)
        raise MeshError(
            describe(
                f"shard_axis {shard_axis!r}",
                "not an axis of the mesh",
                got=f"axes {mesh.axis_names}",
                expected="one of them",
                action=f"Pass shard_axis={close[0]!r}?",
            )
        )
    if mesh.size != mesh.shape[shard_axis]:
        raise MeshError(
            describe(
                "mesh",
                "more than one axis is not supported in this version",
                got=dict(mesh.shape),
                expected=f"only axis {shard_axis!r}",
                action="Use a one-dimensional mesh.",
            )
        )


def refuse_empty_leaves(mesh: Mesh, params: Any) -> None:
    """Raises where XLA would end the process: see collectives.shard_map, which train_step uses."""
    if not collectives.crashes_on_empty_arrays(mesh):
        return
    for path, x in zip(trees.paths(params, "params"), jax.tree.leaves(params), strict=True):
        if not np.size(x):
            raise ShapeError(
                describe(
                    path,
                    "zero-size arguments of jax.shard_map crash jax 0.11 on several CPU devices",
                    got=np.shape(x),
                    expected="at least one element",
                    action="Use train_step, or leave such arrays out of the params.",
                )
            )


def check_inside(axis: str, function: str) -> None:
    """Raises MeshError unless called inside of a shard_map over the axis."""
    if not collectives.is_bound(axis):
        raise MeshError(
            describe(
                function,
                "called outside of jax.shard_map",
                got="no manual axis",
                expected=f"axis {axis!r}",
                action="Use train_step, or call it inside jax.shard_map over the mesh.",
            )
        )


def check_grads(axis: str, grads: Any, like: Any, varying: Any, *, like_name: str) -> None:
    """Raises unless gradients fit the tree ``like`` and are this device's own.

    Args:
      axis: The mesh axis over which they will be summed.
      grads: The gradients.
      like: Tree of arrays.
      varying: Something that differs between devices, as far as types say so.
      like_name: How to call ``like`` in messages.
    """
    trees.check_same_shapes(grads, like, name="grads", like_name=like_name)
    trees.check_dtypes(grads, name="grads", action="Cast the gradients.")
    if axis not in (collectives.varying_axes(varying) or ()):
        return  # shard_map runs with check_vma=False: types say nothing about reductions
    for path, grad in zip(trees.paths(grads, "grads"), jax.tree.leaves(grads), strict=True):
        if axis not in (collectives.varying_axes(grad) or ()):
            raise MeshError(
                describe(
                    path,
                    "already reduced over the mesh",
                    got=f"the same on all of axis {axis!r}",
                    expected="this device's own gradient",
                    action="Differentiate with respect to local_params(params, tx).",
                )
            )


def check_scalar(name: str, value: Any) -> None:
    """Raises ShapeError or DtypeError unless ``value`` is one real number, an array or not."""
    dtype = getattr(value, "dtype", np.result_type(type(value)) if np.isscalar(value) else None)
    real = (np.floating, np.integer, np.bool_)
    if dtype is None or not any(jax.numpy.issubdtype(dtype, kind) for kind in real):
        raise DtypeError(
            describe(
                name,
                "not a real number",
                got=type(value).__name__ if dtype is None else dtype,
                expected="a floating-point scalar",
                action=f"Return or pass {name} as one number.",
            )
        )
    if np.shape(value) != ():
        raise ShapeError(
            describe(
                name,
                "not a scalar",
                got=np.shape(value),
                expected=(),
                action="Take the mean, or the sum, first.",
            )
        )


def check_state(policy: MixedPrecisionPolicy, layout: Layout, state: Any) -> None:
    """Raises unless the flat arrays of a state have the layout's sizes and the policy's dtypes."""
    sizes = {"main_params": layout.main_size, "mu": layout.flat_size, "nu": layout.flat_size}
    for name, size in sizes.items():
        flat: Any = getattr(state, name, "no such field")
        expected = None if name == "main_params" and size == 0 else (size,)
        got = None if flat is None else getattr(flat, "shape", type(state).__name__)
        if got != expected:
            raise ShapeError(
                describe(
                    f"opt_state.{name}",
                    "not the state of these params on this mesh",
                    got=got,
                    expected=f"{expected} on each device",
                    action="Make the state with init(params) of this optimizer.",
                )
            )
        dtype = getattr(policy, f"{name}_dtype")
        if flat is not None and flat.dtype != dtype:
            raise DtypeError(
                describe(
                    f"opt_state.{name}",
                    "dtype differs from the policy",
                    got=flat.dtype,
                    expected=dtype,
                    action=f"Cast it, or set {name}_dtype in the policy.",
                )
            )
