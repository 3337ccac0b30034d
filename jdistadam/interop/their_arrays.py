"""Arrays and containers of other frameworks, read without importing them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jdistadam.errors import DtypeError, TreeError


def as_numpy(where: str, x: Any) -> np.ndarray:
    """Returns a numpy array of what may be a torch tensor; of bfloat16 through ml_dtypes.

    Args:
      where: How to call it in messages.
      x: A numpy or jax array, a number, or a torch tensor on any device. A tensor in CPU memory
        and the array share it.

    Raises:
      TreeError: It is the shard of a distributed tensor.
      DtypeError: It is no array of numbers.
    """
    if hasattr(x, "full_tensor"):
        raise TreeError(
            where,
            "a distributed tensor, of which this process holds a shard",
            got=type(x).__name__,
            expected="the whole tensor",
            action="Gather it first; of a distributed checkpoint make a file with "
            "torch.distributed.checkpoint.format_utils.dcp_to_torch_save.",
        )
    if hasattr(x, "detach"):
        x = x.detach().cpu()
        if str(x.dtype) == "torch.bfloat16":  # which torch gives numpy in no other way
            return np.asarray(x.float().numpy().astype(ml_dtypes.bfloat16))
        x = x.numpy()
    array = np.asarray(x)
    if array.dtype.kind not in "biuf" and array.dtype != ml_dtypes.bfloat16:
        raise DtypeError(
            where,
            "not an array of numbers",
            got=type(x).__name__ if array.dtype == object else array.dtype,
            expected="a numpy array or a torch tensor",
            action="Pass the state dictionary as the other framework made it.",
        )
    return array


def number(where: str, x: Any) -> float:
    """Returns the one number in an array or tensor, or ``x`` itself."""
    array = as_numpy(where, x)
    if array.size != 1:
        raise TreeError(
            where,
            "not one number",
            got=f"shape {array.shape}",
            expected="a number",
            action="Pass the state dictionary as the other framework made it.",
        )
    return float(array.reshape(()))


def mapping(where: str, x: Any, action: str = "") -> Mapping[Any, Any]:
    """Returns ``x``, or raises TreeError where it is no dictionary."""
    if isinstance(x, Mapping):
        return x
    raise TreeError(
        where,
        "not a dictionary",
        got=type(x).__name__,
        expected="a dict",
        action=action or "Pass the state dictionary as the other framework made it.",
    )


def sequence(where: str, x: Any) -> list[Any]:
    """Returns a list of what may have become a dictionary by position in a file."""
    if isinstance(x, Mapping):
        try:
            return [x[str(i)] if str(i) in x else x[i] for i in range(len(x))]
        except KeyError as error:
            raise TreeError(
                where,
                "a position is missing",
                got=sorted(map(str, x)),
                expected=f"{len(x)} positions from 0",
                action=f"Add {error}.",
            ) from None
    if isinstance(x, list | tuple):
        return list(x)
    raise TreeError(
        where,
        "not a list",
        got=type(x).__name__,
        expected="a list",
        action="Pass the state dictionary as the other framework made it.",
    )


def field(x: Any, name: str, default: Any = None) -> Any:
    """Returns a field of an object, or an entry of the dictionary that it became."""
    return x.get(name, default) if isinstance(x, Mapping) else getattr(x, name, default)
