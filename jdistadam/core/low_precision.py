"""Moments of 8 bits and rounding at random: what was asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jdistadam.core import trees
from jdistadam.core.arguments import shown
from jdistadam.core.moments import BLOCK8, SMALLEST_CODED
from jdistadam.errors import PolicyError, TreeError

ROUNDINGS = ("nearest", "stochastic")


@dataclasses.dataclass(frozen=True)
class LowPrecision:
    """What an optimizer was asked for.

    Attributes:
      mu_is_coded: Whether mu is stored in 8 bits.
      nu_is_coded: Whether nu is.
      is_random: Whether to round at random.
      seed: The seed of that.
      float32_moments: Which leaves keep float32 moments, beside the small ones: a function of the
        path, as in "['block']['w']". None: none.
    """

    mu_is_coded: bool = False
    nu_is_coded: bool = False
    is_random: bool = False
    seed: int = 0
    float32_moments: Callable[[str], bool] | None = None

    def is_coded(self, path: str, param: Any) -> bool:
        """Whether a leaf has moments of 8 bits, where any leaf does."""
        is_float = getattr(param, "dtype", None) in trees.STORAGE_DTYPES
        return is_float and self.codes_leaf(path, np.size(param))

    def codes_leaf(self, path: str, size: int) -> bool:
        """Whether a leaf of floats with so many elements has moments of 8 bits."""
        if size < SMALLEST_CODED:
            return False
        return self.float32_moments is None or not self.float32_moments(path)

    def check_paths(self, paths: Sequence[str]) -> None:
        """Raises TreeError where ``float32_moments`` selects no leaf."""
        keep = self.float32_moments
        if keep is None or not paths or any(map(keep, paths)):
            return
        raise TreeError(
            "float32_moments",
            "selects no leaf",
            got=f"False for {paths[0]} and {len(paths) - 1} more",
            expected="True for the leaves that keep float32 moments",
            action="Look for a part of their paths, or leave float32_moments out.",
        )

    @property
    def is_any(self) -> bool:
        """Whether anything differs from floats that are rounded to nearest."""
        return self.mu_is_coded or self.nu_is_coded or self.is_random

    @property
    def key(self) -> Any:
        """The seed as it is in a state: shape (2,), uint32."""
        return jnp.asarray([self.seed & 0xFFFFFFFF, self.seed >> 32], jnp.uint32)


def parse(
    *,
    mu_dtype: Any,
    nu_dtype: Any,
    rounding: Any,
    seed: Any,
    float32_moments: Any,
    formats: Any = None,
    b2: Any = None,
) -> LowPrecision:
    """Checks arguments of an optimizer; raises PolicyError where they do not fit each other.

    ``b2``: None where it is not known yet.
    """
    mu, nu = is_block8_name(mu_dtype), is_block8_name(nu_dtype)
    if rounding not in ROUNDINGS:
        raise PolicyError(
            "rounding",
            "unknown",
            got=shown(rounding),
            expected=" or ".join(map(repr, ROUNDINGS)),
            action='Use "nearest" unless moments or parameters have 16 bits or less.',
        )
    seed = 0 if seed is None else seed  # a number that optax.inject_hyperparams leaves alone
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**64:
        raise PolicyError(
            "seed",
            "not a seed",
            got=shown(seed),
            expected="an integer from 0 to 2**64 - 1",
            action="Pass seed=0 or another number; for optax.inject_hyperparams in static_args.",
        )
    if formats is not None and (mu or nu or rounding == "stochastic"):
        raise PolicyError(
            "formats",
            'not supported beside "block8" moments or stochastic rounding',
            got=shown(formats),
            expected="None: blocks and random bits follow the row-major order",
            action="Leave formats out.",
        )
    if float32_moments is not None and not (callable(float32_moments) and (mu or nu)):
        raise PolicyError(
            "float32_moments",
            "has no effect" if callable(float32_moments) else "not a function of a path",
            got=shown(float32_moments),
            expected='a function of a path, beside mu_dtype or nu_dtype "block8"',
            action="Leave it out.",
        )
    if (
        nu
        and rounding == "nearest"
        and b2 is not None
        and not (isinstance(b2, int | float | np.number) and b2 <= 0.95)
    ):
        raise PolicyError(
            "nu_dtype",
            "a second moment in 8 bits, rounded to nearest, cannot decay at this b2",
            got=f'"block8" with rounding="nearest" and b2={shown(b2)}',
            expected='rounding="stochastic", or b2 <= 0.95',
            action='Set rounding="stochastic".',
        )
    return LowPrecision(mu, nu, rounding == "stochastic", int(seed), float32_moments)


def is_block8_name(dtype: Any) -> bool:
    """Whether this is the name of moments of 8 bits."""
    return isinstance(dtype, str) and dtype == BLOCK8


def without_block8(dtype: Any) -> Any:
    """Returns the dtype of moments that are not coded: float32 in place of "block8"."""
    return jnp.float32 if is_block8_name(dtype) else dtype
