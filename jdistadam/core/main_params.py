"""Main parameters: the float32 values that 16-bit parameters lose bits of in a step.

A ``Codec`` says what an optimizer keeps of them beside the parameters: ``FLOAT32``, the value,
whose cast the parameter is; ``REMAINDER16``, the half of its bits that a bfloat16 parameter lacks;
or ``NOTHING``: the parameter itself is updated, and rounded to its dtype at every step.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jdistadam.core import trees
from jdistadam.core.codecs import FLOAT32, NOTHING, REMAINDER16, Codec
from jdistadam.core.dtypes import check_supported
from jdistadam.errors import DtypeError


class _Unset:
    """The default of ``main_params_dtype``, which differs from None."""

    def __repr__(self) -> str:
        return "unset"

    def __reduce__(self) -> str:
        return "UNSET"  # pickled by name, so that it stays the only one

    def __deepcopy__(self, memo: Any) -> _Unset:
        return self


UNSET = _Unset()
"""``main_params_dtype`` was left open: none on one device, float32 where state is sharded."""


def parse_main_params(main_params_dtype: Any) -> Codec:
    """Returns the codec that an argument ``main_params_dtype`` means, or raises PolicyError."""
    given = main_params_dtype
    if isinstance(given, str) and given == REMAINDER16.name:
        return REMAINDER16
    check_supported("main_params_dtype", given, (None, FLOAT32.name, REMAINDER16.name))
    return NOTHING if given is None else FLOAT32


def main_codec_of(main: Any) -> Codec:
    """Returns the codec of an array of main parameters; ``NOTHING`` for None."""
    if main is None:
        return NOTHING
    return REMAINDER16 if main.dtype == REMAINDER16.dtype else FLOAT32


def has_main_param(codec: Codec, param: Any) -> bool:
    """Whether a parameter has a main parameter where one program holds all of it.

    It does if its dtype, of 16 bits, loses bits of what the optimizer computes.
    """
    return codec.is_stored and getattr(param, "dtype", None) in (jnp.bfloat16, jnp.float16)


def new_main_param(codec: Codec, path: str, param: Any) -> Any:
    """Returns what to store beside a parameter whose value is still exact.

    Raises:
      DtypeError: A parameter of this dtype has no remainder.
    """
    if not codec.is_remainder:
        return jnp.asarray(param, jnp.float32)
    check_main_dtype(codec, path, param.dtype)
    return trees.placed_beside(param, jnp.zeros_like(param, codec.dtype))


def check_main_dtype(codec: Codec, path: str, dtype: Any) -> None:
    """Raises DtypeError where a parameter of this dtype cannot have such a main parameter."""
    if codec.is_remainder and dtype != jnp.bfloat16:
        raise DtypeError(
            f"{path}: has no remainder: got {dtype}, "
            "expected bfloat16, the upper half of a float32. Use main_params_dtype=jnp.float32."
        )
