"""Main parameters: what an optimizer keeps so that 16-bit parameters lose no bits of a step.

All knowledge of the three kinds is here: how the user names them, in which dtype each is stored,
which parameters have one, and how a parameter and what is stored beside it make a float32.

[Note: remainders]
A float32 is kept in two halves of 16 bits: the parameter, which is the bfloat16 nearest to it, and
the low half of its bits. Rounding is to nearest with ties away from zero. A cast rounds ties to
even, which has no such inverse: an even bfloat16 is then the nearest of 65,537 float32s, more than
16 bits can tell apart. A low half of 0x8000 or more says that the upper half was rounded up; read
as an int16 it is the negative number to add. cuda/dtype.h has the same two functions.
"""

from __future__ import annotations

import enum
from typing import Any

import jax.numpy as jnp

from jdistadam.core import trees
from jdistadam.core.codecs import FLOAT32, REMAINDER16, Codec
from jdistadam.core.dtypes import check_supported, store
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


class MainParams(enum.Enum):
    """What is kept of the float32 value of a parameter, beside the parameter itself.

    Attributes:
      NONE: Nothing. The parameter itself is updated, and rounded to its dtype at every step.
      FLOAT32: The float32 value. The parameter is that value, rounded by a cast.
      REMAINDER16: The low 16 bits of the float32 value, uint16, whose other half is a bfloat16
        parameter. See [Note: remainders].

    The value of each is its name in messages, in the identity of a layout and, for the last one, in
    the argument ``main_params_dtype``.
    """

    NONE = None
    FLOAT32 = "float32"
    REMAINDER16 = "remainder16"

    @classmethod
    def parse(cls, main_params_dtype: Any) -> MainParams:
        """Returns the kind that an argument ``main_params_dtype`` means, or raises PolicyError."""
        given = main_params_dtype
        if isinstance(given, str) and given == cls.REMAINDER16.value:
            return cls.REMAINDER16
        check_supported("main_params_dtype", given, tuple(kind.value for kind in cls))
        return cls.NONE if given is None else cls.FLOAT32

    @classmethod
    def of(cls, stored: Any) -> MainParams:
        """Returns the kind of which ``stored`` is an array; NONE for None."""
        if stored is None:
            return cls.NONE
        return cls.REMAINDER16 if stored.dtype == cls.REMAINDER16.stored_dtype else cls.FLOAT32

    @property
    def is_kept(self) -> bool:
        """Whether anything is kept."""
        return self is not MainParams.NONE

    @property
    def codec(self) -> Codec | None:
        """How what is kept is stored; None where nothing is."""
        return next((codec for codec in (FLOAT32, REMAINDER16) if codec.name == self.value), None)

    @property
    def stored_dtype(self) -> jnp.dtype | None:
        """The dtype of the arrays that are kept; None where there are none."""
        return None if self.codec is None else jnp.dtype(self.codec.dtype)

    def nbytes(self, size: int) -> int:
        """Returns the bytes of what is kept of ``size`` parameters."""
        return 0 if self.codec is None else self.codec.nbytes(size)

    def is_kept_for(self, param: Any) -> bool:
        """Whether a parameter has one where one program holds all of it.

        It does if its dtype, of 16 bits, loses bits of what the optimizer computes.
        """
        return self.is_kept and getattr(param, "dtype", None) in (jnp.bfloat16, jnp.float16)

    def check_dtype(self, path: str, dtype: Any) -> None:
        """Raises DtypeError where a parameter of this dtype cannot have one."""
        if self is MainParams.REMAINDER16 and dtype != jnp.bfloat16:
            raise DtypeError(
                f"{path}: has no remainder: got {dtype}, "
                "expected bfloat16, the upper half of a float32. Use main_params_dtype=jnp.float32."
            )

    def new(self, param: Any) -> Any:
        """Returns what to store beside a parameter whose value is still exact."""
        if self is MainParams.REMAINDER16:
            return trees.placed_beside(param, jnp.zeros_like(param, self.stored_dtype))
        return jnp.asarray(param, jnp.float32)

    def join(self, param: Any, stored: Any, xp: Any) -> Any:
        """Returns the exact value: float32; under NONE the parameter, in its own dtype.

        Args:
          param: The parameter.
          stored: What is kept beside it; None under NONE.
          xp: numpy, or jax.numpy.
        """
        if self is MainParams.REMAINDER16:
            return join(param, stored, xp)
        return stored if self is MainParams.FLOAT32 else param

    def split(self, value: Any, param_dtype: Any, xp: Any) -> tuple[Any, Any]:
        """Returns (parameter, what to store beside it) of a float32: the inverse of ``join``.

        Args:
          value: The exact value, float32.
          param_dtype: Dtype of the parameter.
          xp: numpy, or jax.numpy.
        """
        if self is MainParams.REMAINDER16:
            return split(value, param_dtype, xp)
        return value.astype(param_dtype), value if self.is_kept else None


def split(x: Any, bfloat16: Any, xp: Any) -> tuple[Any, Any]:
    """A float32 as the bfloat16 nearest to it and its low 16 bits. See [Note: remainders]."""
    bits = store(x, xp.float32, xp).view(xp.uint32)
    high = ((bits + xp.uint32(0x8000)) >> 16).astype(xp.uint16).view(bfloat16)
    return high, bits.astype(xp.uint16)


def join(high: Any, low: Any, xp: Any) -> Any:
    """The float32 whose halves are a bfloat16 and a uint16. See [Note: remainders]."""
    signed = low.view(xp.int16).astype(xp.int32).view(xp.uint32)
    return ((high.view(xp.uint16).astype(xp.uint32) << 16) + signed).view(xp.float32)
