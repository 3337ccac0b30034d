"""The mixed-precision policy: what is stored, communicated and summed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jdistadam.core.dtypes import FLOATS, check_supported, float_dtype
from jdistadam.core.low_precision import (
    MOMENT_NAMES,
    LowPrecision,
    named_format,
    parse,
    without_codes,
)
from jdistadam.core.main_params import MainParams
from jdistadam.core.moments import BLOCK16, largest_decay
from jdistadam.errors import PolicyError

_FLOAT8 = ("float8_e5m2", "float8_e4m3fn")
_SUPPORTED: dict[str, tuple[str | None, ...]] = {
    "grad_reduce_dtype": (None, "float32"),
}


@dataclasses.dataclass(frozen=True)
class MixedPrecisionPolicy:
    """What is stored, communicated and summed, each in its own dtype.

    Attributes:
      main_params_dtype: What the optimizer keeps, sharded, and updates: float32 main
        parameters wherever they differ from the parameters in dtype or in sharding;
        "remainder16": beside bfloat16 parameters the low 16 bits, so that both together are a
        float32, to which the parameter is the nearest bfloat16 with ties away from zero, where a
        cast rounds ties to even (other parameters are updated themselves); None: nothing,
        parameters are updated themselves and rounded to their own dtype at every step.
      main_grads_dtype: Dtype in which gradients are stored and accumulated over micro-batches.
      grad_comm_dtype: The communication dtype of gradients: contributions are rounded to it once,
        then sent. float32, bfloat16 or float16. None: ``main_grads_dtype``. Bytes sent per device
        and reduction: (N - 1) / N * parameters * itemsize.
      grad_reduce_dtype: Dtype in which contributions are summed across devices. None: the
        collective library sums, in the communication dtype; one of 16 bits then also rounds partial
        sums. float32: contributions are sent in the communication dtype as an all-to-all and added
        in float32, adjacent pairs first, an odd one carried, axis by axis from the inner one:
        always the same bits. Sums stay float32 on their way into the kernel, also where they are
        sent on.
      param_comm_dtype: The communication dtype of parameters: float32, bfloat16, float16,
        float8_e5m2 or float8_e4m3fn, at most as wide as the parameters. None: that of the
        parameters. float8 has no scale factors here: e4m3fn ends at 448, e5m2 keeps two bits of
        mantissa.
      mu_dtype: Dtype in which the first moment is stored. float32, bfloat16, float16, "block8" or
        "block16": 8 or 16 bits with a scale for 128 elements, as in ``fused_adamw``; leaves with
        fewer than 4096 elements in float32.
      nu_dtype: Dtype in which the second moment is stored. float32, bfloat16, "block8", "block16".
        Rounded to nearest these need b2 <= 0.992, 0.894 and 0.999, and a first moment in "block8"
        or "block16" the same of b1. At random such a first moment needs nu_dtype "block8", or
        "block16" beside "block16".
      rounding: "nearest", or "stochastic": moments of 8 or 16 bits, and parameters of 16 bits
        without main parameters, are rounded at random. Random bits depend on seed, step count, leaf
        and place in the whole leaf, and not on the mesh.
      seed: The seed of these bits, from 0 to 2^64 - 1. Another one for each run, the same in all
        processes. None: 0.
      float32_moments: A function of a leaf's path, as in "['block']['w']": whether its moments are
        float32 beside coded ones. Where it is true for no leaf ``init`` raises TreeError. None:
        none but those of small leaves.

    Raises:
      PolicyError: A dtype is unknown, or the combination is contradictory.

    Example:
      >>> import jax.numpy as jnp
      >>> print(MixedPrecisionPolicy(grad_comm_dtype=jnp.bfloat16, grad_reduce_dtype=jnp.float32))
      main_params_dtype   float32
      main_grads_dtype    float32
      grad_comm_dtype     bfloat16
      grad_reduce_dtype   float32
      param_comm_dtype    params' own
      mu_dtype            float32
      nu_dtype            float32
      rounding            nearest

    References:
      Megatron-LM, ``MixedPrecisionPolicy`` of Megatron-FSDP.
    """

    main_params_dtype: Any = jnp.float32
    main_grads_dtype: Any = jnp.float32
    grad_comm_dtype: Any = None
    grad_reduce_dtype: Any = None
    param_comm_dtype: Any = None
    mu_dtype: Any = jnp.float32
    nu_dtype: Any = jnp.float32
    rounding: str = "nearest"
    seed: int | None = None
    float32_moments: Callable[[str], bool] | None = None

    def __post_init__(self) -> None:
        """Normalises every field to a numpy dtype and checks that they fit each other."""
        main = MainParams.parse(self.main_params_dtype)
        as_given = main.stored_dtype if main is MainParams.FLOAT32 else main.value
        object.__setattr__(self, "main_params_dtype", as_given)
        self.low_precision()
        for name in (field.name for field in dataclasses.fields(self)[1:]):
            value = getattr(self, name)
            if not name.endswith("_dtype") or named_format(value) is not None:
                continue
            if value is None and name.startswith(("main_", "mu", "nu")):
                value = jnp.float32
            if value is not None:
                known = FLOATS + (_FLOAT8 if name == "param_comm_dtype" else ())
                also = MOMENT_NAMES if name in ("mu_dtype", "nu_dtype") else ()
                dtype = float_dtype(f"MixedPrecisionPolicy.{name}", value, known, also)
                object.__setattr__(self, name, dtype)
        for name, supported in _SUPPORTED.items():
            check_supported(f"MixedPrecisionPolicy.{name}", getattr(self, name), supported)
        if jnp.promote_types(self.main_grads_dtype, self.wire_dtype) != self.main_grads_dtype:
            raise PolicyError(
                "MixedPrecisionPolicy.main_grads_dtype",
                "gradients would lose bits in storage that are then communicated",
                got=f"{self.main_grads_dtype} with grad_comm_dtype {self.wire_dtype}",
                expected="a main_grads_dtype that holds all of grad_comm_dtype",
                action="Set main_grads_dtype=jnp.float32, or the same dtype for both.",
            )

    @property
    def main_params(self) -> MainParams:
        """What is kept of the parameters' float32 values, as ``main_params_dtype`` says."""
        return MainParams.parse(self.main_params_dtype)

    @property
    def wire_dtype(self) -> jnp.dtype:
        """The communication dtype of gradients."""
        return self.main_grads_dtype if self.grad_comm_dtype is None else self.grad_comm_dtype

    @property
    def reduced_dtype(self) -> jnp.dtype:
        """The dtype of a sum over devices."""
        return self.wire_dtype if self.grad_reduce_dtype is None else self.grad_reduce_dtype

    def low_precision(self, b1: Any = None, b2: Any = None) -> LowPrecision:
        """Returns what is asked for of low precision; raises PolicyError where it cannot work.

        Args:
          b1: Decay rate of the first moment. None: not known yet.
          b2: That of the second moment.
        """
        return parse(
            mu_dtype=self.mu_dtype,
            nu_dtype=self.nu_dtype,
            rounding=self.rounding,
            seed=self.seed,
            float32_moments=self.float32_moments,
            b1=b1,
            b2=b2,
            prefix="MixedPrecisionPolicy.",
        )

    @property
    def mu_float_dtype(self) -> jnp.dtype:
        """The dtype of first moments that are stored as floats."""
        return jnp.dtype(without_codes(self.mu_dtype))

    @property
    def nu_float_dtype(self) -> jnp.dtype:
        """The dtype of second moments that are."""
        return jnp.dtype(without_codes(self.nu_dtype))

    def __str__(self) -> str:
        """Returns the resolved policy as a table."""
        resolved = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        resolved["grad_comm_dtype"] = self.wire_dtype
        if self.rounding == "nearest":
            del resolved["seed"]
        else:
            resolved["seed"] = self.low_precision().seed
        if self.float32_moments is None:
            del resolved["float32_moments"]
        else:
            resolved["float32_moments"] = "by path"
        notes = {
            "main_params_dtype": "none",
            "grad_reduce_dtype": f"{self.wire_dtype}, by the collective library",
            "param_comm_dtype": "params' own",
        }
        lines = [
            f"{name:<18}  {notes.get(name) if value is None else value}"
            for name, value in resolved.items()
        ]
        return "\n".join(lines)


def check_nu_dtype(name: str, value: Any, b2: Any, *, is_random: bool) -> jnp.dtype:
    """Returns the dtype of the second moment, or raises PolicyError where it cannot work.

    ``largest_decay`` says which b2 bfloat16 takes, rounded to nearest. float16 has no number
    between 0 and 6e-8, the square of 2.4e-4: smaller gradients would count as zero.
    """
    given = jnp.float32 if value is None else without_codes(value)
    dtype = float_dtype(name, given, also=MOMENT_NAMES)
    if dtype.name == "float16":
        raise PolicyError(
            name,
            "a second moment in float16 loses squares below 6e-8",
            got=dtype.name,
            expected=", ".join(("float32", "bfloat16", *MOMENT_NAMES)),
            action=f"Leave {name.rsplit('.')[-1]} at float32.",
        )
    is_known = isinstance(b2, int | float | np.number)
    largest = largest_decay(jnp.finfo(dtype).nmant)
    if dtype.name == "bfloat16" and not is_random and is_known and b2 > largest:
        raise PolicyError(
            name,
            "a second moment in bfloat16, rounded to nearest, cannot decay at this b2",
            got=f"{dtype} with b2={b2}",
            expected=f'b2 <= {largest}, "block16" with b2 <= '
            f"{largest_decay(BLOCK16.mantissa)}, or float32",
            action=f'Leave {name.rsplit(".")[-1]} at float32, or set rounding="stochastic".',
        )
    return dtype
