"""Gradients of 16 bits that a program only widens to float32: which ones, and where they are made.

``jax.grad`` of a loss that casts float32 parameters ends with casts of its gradients to float32.
XLA cannot fuse a cast with the kernel, so each gradient would be written again, twice as large. The
kernel widens gradients itself, and reads the narrow array instead: the same value in every bit.

[Note: roundings that XLA keeps]
XLA for GPUs drops a rounding to 16 bits that is widened again ([Note: casts that XLA deletes]); the
kernel then steps with the wider gradient. It would step with the rounded one if the narrow array
were its operand. A narrow array is taken only if XLA keeps its rounding in either case:

- ``dot_general``: a matrix product has its results rounded. The exception are products with few
  results and a long sum: XLA splits the sum, adds the parts in float32 and drops the rounding. On
  the 132 processors of an H200 it splits none with 2^22 results or more.
- ``while``: the loop's arrays have 16 bits, unless it runs once, where XLA removes the loop.
- ``scatter``, ``optimization_barrier`` and arguments of the program: arrays in memory.
- ``add``: GPUs from compute capability 9.0 add numbers of 16 bits. For others XLA widens them.

Everything else is read in float32 as before, such as the sums of a bias's gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.mlir import ir

_MOVES = ("stablehlo.reshape", "stablehlo.transpose", "sdy.sharding_constraint")
_IN_MEMORY = ("stablehlo.scatter", "stablehlo.optimization_barrier")
_CONSTANT = "stablehlo.constant"
_UNSPLIT = 1 << 22
"""Results on one device from which on XLA splits no matrix product."""
_ADDS_HALVES = (9, 0)
"""The compute capability from which on a GPU adds numbers of 16 bits."""


def narrow_source(value: Any, devices: Sequence[Any], num_shards: int) -> Any:
    """Returns the 16-bit value that a float32 value is exactly, or None if there is none.

    It may insert operations that move elements of the narrow value.

    Args:
      value: A value of MLIR.
      devices: The program's devices; none if unknown.
      num_shards: Into how many shards the compiler may cut an array.

    Returns:
      A value of the same shape: [Note: roundings that XLA keeps].
    """
    op = _maker(value)
    if op is None:
        return None
    if op.name in _MOVES:
        source = narrow_source(op.operands[0], devices, num_shards)
        return source and _moved(op, source)
    if op.name != "stablehlo.convert" or narrow_dtype(op.operands[0]) is None:
        return None
    source = op.operands[0]
    return source if _is_rounded(source, devices, num_shards) else None


def narrow_dtype(value: Any) -> Any:
    """Returns the dtype of a value of bfloat16 or float16; None for others."""
    kind = ir.RankedTensorType(value.type).element_type
    names = {ir.BF16Type: jnp.bfloat16, ir.F16Type: jnp.float16}
    return next((jnp.dtype(x) for of_mlir, x in names.items() if isinstance(kind, of_mlir)), None)


def _is_rounded(value: Any, devices: Sequence[Any], num_shards: int) -> bool:
    """Whether XLA surely rounds a 16-bit value: [Note: roundings that XLA keeps]."""
    op = _maker(value)
    if op is None:
        return _is_argument(value)
    if op.name in _MOVES:
        return _is_rounded(op.operands[0], devices, num_shards)
    if op.name == "stablehlo.dot_general":
        return math.prod(ir.RankedTensorType(value.type).shape) // num_shards >= _UNSPLIT
    if op.name == "stablehlo.add":
        capabilities = [getattr(x, "compute_capability", "0.0") for x in devices]
        return bool(capabilities) and all(
            tuple(map(int, x.split("."))) >= _ADDS_HALVES for x in capabilities
        )
    if op.name == "stablehlo.while":
        return not _leaves_memory(op, value)
    return op.name in _IN_MEMORY


def _maker(value: Any) -> Any:
    """The operation that makes a value; None for the argument of a function or loop."""
    owner = value.owner
    return None if isinstance(owner, ir.Block) else getattr(owner, "operation", owner)


def _is_argument(value: Any) -> bool:
    """Whether a value is an argument of the whole program."""
    function = getattr(value.owner.owner, "operation", value.owner.owner)
    is_function = function.name == "func.func"
    return is_function and ir.StringAttr(function.attributes["sym_name"]).value == "main"


def _leaves_memory(loop: Any, value: Any) -> bool:
    """Whether XLA may remove the loop or this array from it: one that runs once, or a constant."""
    condition, body = (region.blocks[0] for region in loop.regions)
    numbers = [x.operation for x in condition.operations if x.operation.name == _CONSTANT]
    limits = [x.attributes["value"] for x in numbers]
    i = next(i for i, x in enumerate(loop.results) if x == value)
    returned = body.operations[len(body.operations) - 1].operation.operands[i]
    return returned == body.arguments[i] or any(_first_int(x) < 2 for x in limits)


def _first_int(attribute: Any) -> int:
    """The value of a constant; large for one that is no integer."""
    is_int = isinstance(attribute, ir.DenseIntElementsAttr)
    return int(attribute[0]) if is_int else _UNSPLIT


def _moved(op: Any, source: Any) -> Any:
    """Moves the elements of ``source`` as an operation moves those of a wider array."""
    shape = ir.RankedTensorType(op.results[0].type).shape
    kind = ir.RankedTensorType.get(shape, ir.RankedTensorType(source.type).element_type)
    attributes = {name: op.attributes[name] for name in op.attributes}
    with ir.InsertionPoint(op), op.location:
        return ir.Operation.create(op.name, [kind], [source], attributes).results[0]
