"""The mixed-precision policy: dtypes of storage, communication and sums over devices."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from jdistadam.core.arguments import FLOATS, check_supported, float_dtype
from jdistadam.core.codecs import FLOAT32, Codec
from jdistadam.core.storage import UNSET, parse_main_params
from jdistadam.errors import PolicyError

FLOAT8 = ("float8_e5m2", "float8_e4m3fn")


@dataclasses.dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes in which parameters and gradients are stored, communicated and summed.

    The dtypes of moments are arguments of ``fused_adamw``.

    Attributes:
      main_params_dtype: How the optimizer stores the exact parameters, sharded. ``fused_adamw`` has
        the same argument. Set at most one of the two; the default is float32. float32: main
        parameters, wherever the parameters have another dtype or another sharding. "remainder16": a
        bfloat16 parameter is the bfloat16 nearest to its main parameter, with ties away from zero
        (a cast rounds ties to even). Only the low 16 bits of the main parameter are stored; both
        together are its value. float32 parameters then have none, and float16 parameters raise.
        None: no main parameters; parameters are rounded to their dtype at every step.
      main_grads_dtype: Dtype in which gradients are stored and accumulated over micro-batches.
      grad_comm_dtype: The communication dtype of gradients: contributions are rounded to it once,
        then sent. float32, bfloat16 or float16. None: ``main_grads_dtype``. Bytes sent per device
        and reduction: (N - 1) / N * parameters * itemsize.
      grad_reduce_dtype: Dtype in which contributions are summed across devices. None: the
        collective library sums in the communication dtype; with 16 bits it also rounds partial
        sums. float32: an all-to-all sends contributions in the communication dtype. They are added
        in float32 as a tree of adjacent pairs, one mesh axis after another, the innermost first.
        The result always has the same bits. Sums stay float32 until the kernel, even if they are
        sent again. Without effect on one device, which has nothing to sum.
      param_comm_dtype: The communication dtype of parameters: float32, bfloat16, float16,
        float8_e5m2 or float8_e4m3fn, at most as wide as the parameters. None: the dtype of the
        parameters. float8 has no scale factors here: the largest e4m3fn number is 448, and e5m2 has
        two bits of mantissa.

    Raises:
      PolicyError: A dtype is unknown, or the combination is contradictory.

    Example:
      >>> import jax.numpy as jnp
      >>> print(MixedPrecisionPolicy(grad_comm_dtype=jnp.bfloat16, grad_reduce_dtype=jnp.float32))
      main_params_dtype   the optimizer's
      main_grads_dtype    float32
      grad_comm_dtype     bfloat16
      grad_reduce_dtype   float32
      param_comm_dtype    params' own

    References:
      Megatron-LM, ``MixedPrecisionPolicy`` of Megatron-FSDP.
    """

    main_params_dtype: Any = UNSET
    main_grads_dtype: Any = jnp.float32
    grad_comm_dtype: Any = None
    grad_reduce_dtype: Any = None
    param_comm_dtype: Any = None

    def __post_init__(self) -> None:
        """Converts every field to a numpy dtype and checks the combination."""
        if self.main_params_dtype is not UNSET:
            main = parse_main_params(self.main_params_dtype)
            as_given = main.dtype if main == FLOAT32 else main.argument
            object.__setattr__(self, "main_params_dtype", as_given)
        for name in (field.name for field in dataclasses.fields(self)[1:]):
            value = getattr(self, name)
            if value is not None or name == "main_grads_dtype":
                known = FLOATS + (FLOAT8 if name == "param_comm_dtype" else ())
                dtype = float_dtype(f"MixedPrecisionPolicy.{name}", value, known)
                object.__setattr__(self, name, dtype)
        name = "MixedPrecisionPolicy.grad_reduce_dtype"
        check_supported(name, self.grad_reduce_dtype, (None, "float32"))
        if jnp.promote_types(self.main_grads_dtype, self.comm_dtype) != self.main_grads_dtype:
            raise PolicyError(
                "MixedPrecisionPolicy.main_grads_dtype: gradients would be stored in fewer bits "
                f"than they are communicated in: got {self.main_grads_dtype} with grad_comm_dtype "
                f"{self.comm_dtype}, expected a main_grads_dtype that holds all of "
                "grad_comm_dtype. Set main_grads_dtype=jnp.float32, or the same dtype for both."
            )

    @property
    def main_params(self) -> Codec:
        """How main parameters are stored; float32 if unset."""
        is_unset = self.main_params_dtype is UNSET
        return FLOAT32 if is_unset else parse_main_params(self.main_params_dtype)

    @property
    def comm_dtype(self) -> jnp.dtype:
        """The communication dtype of gradients."""
        return self.main_grads_dtype if self.grad_comm_dtype is None else self.grad_comm_dtype

    @property
    def reduced_dtype(self) -> jnp.dtype:
        """The dtype of a sum over devices."""
        return self.comm_dtype if self.grad_reduce_dtype is None else self.grad_reduce_dtype

    def __str__(self) -> str:
        """Returns the resolved policy as a table."""
        resolved = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        resolved["grad_comm_dtype"] = self.comm_dtype
        if self.main_params_dtype is UNSET:
            resolved["main_params_dtype"] = "the optimizer's"
        notes = {
            "main_params_dtype": "none",
            "grad_reduce_dtype": f"{self.comm_dtype}, by the collective library",
            "param_comm_dtype": "params' own",
        }
        lines = [
            f"{name:<18}  {notes.get(name) if value is None else value}"
            for name, value in resolved.items()
        ]
        return "\n".join(lines)


def sent_dtype(policy: MixedPrecisionPolicy, dtype: Any) -> Any:
    """Returns the communication dtype of parameters of this dtype."""
    return dtype if policy.param_comm_dtype is None else policy.param_comm_dtype


def is_sent_as_is(policy: MixedPrecisionPolicy, dtype: Any) -> bool:
    """Returns whether parameters of this dtype are sent without being rounded."""
    return bool(sent_dtype(policy, dtype) == dtype)


def policy_of(value: Any) -> MixedPrecisionPolicy:
    """Returns a policy, the default for None; raises PolicyError for anything else."""
    if value is None:
        return MixedPrecisionPolicy()
    if not isinstance(value, MixedPrecisionPolicy):
        raise PolicyError(
            f"policy: not a policy: got {value!r}, expected jdistadam.MixedPrecisionPolicy. "
            "Pass policy=jdistadam.MixedPrecisionPolicy(...)."
        )
    return value
