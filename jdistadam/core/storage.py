"""How moments and main parameters are stored and rounded, as requested."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jdistadam.core import trees
from jdistadam.core.arguments import (
    check_effects,
    check_supported,
    float_dtype,
    is_real,
    shown,
    warn_caller,
)
from jdistadam.core.codecs import (
    BFLOAT16,
    BLOCK_CODECS,
    FLOAT16,
    FLOAT32,
    HALVES,
    NOTHING,
    REMAINDER16,
    SMALLEST_CODED,
    Codec,
    float_codec,
    growth,
)
from jdistadam.errors import DtypeError, PolicyError, TreeError

# Main parameters: the float32 values of 16-bit parameters that lose bits in a step.
#
# A ``Codec`` says what an optimizer keeps in addition to the parameters: ``FLOAT32``, the value
# whose cast the parameter is; ``REMAINDER16``, the half of its bits that a bfloat16 parameter
# lacks; or ``NOTHING``: the parameter itself is updated, and rounded to its dtype at every step.


class _Unset:
    """The default of ``main_params_dtype``, which differs from None."""

    def __repr__(self) -> str:
        return "unset"

    def __reduce__(self) -> str:
        return "UNSET"  # pickled by name, so it stays a singleton

    def __deepcopy__(self, memo: Any) -> _Unset:
        return self


UNSET = _Unset()
"""``main_params_dtype`` is unset: none on one device, float32 if state is sharded."""


def parse_main_params(main_params_dtype: Any) -> Codec:
    """Returns the codec of an argument ``main_params_dtype``, or raises PolicyError."""
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
    """Whether a parameter has a main parameter in a program that holds all of it.

    It does if its dtype has 16 bits and loses bits of the result.
    """
    return codec.is_stored and getattr(param, "dtype", None) in HALVES


def check_main_dtype(codec: Codec, path: str, dtype: Any) -> None:
    """Raises DtypeError if a parameter of this dtype cannot have such a main parameter."""
    if codec.is_remainder and dtype != jnp.bfloat16:
        raise DtypeError(
            f"{path}: has no remainder: got {dtype}, "
            "expected bfloat16, the upper half of a float32. Use main_params_dtype=jnp.float32."
        )


ROUNDINGS = ("nearest", "stochastic")
MOMENT_NAMES = tuple(f'"{known.name}"' for known in BLOCK_CODECS)
"""What mu_dtype and nu_dtype may be, apart from dtypes."""

NAMES = " or ".join(MOMENT_NAMES)

MOMENTS = ("mu", "nu")
"""Adam's moments: the names of their fields, of sections of a checkpoint, and of dtypes."""


@dataclasses.dataclass(frozen=True)
class Storage:
    """The storage requested from an optimizer.

    Attributes:
      mu: How first moments are stored. If ``mu_dtype`` is unset, they are float32 if state is
        sharded; on one device they have the dtype of the updated array.
      nu: How second moments are stored.
      is_stochastic: Whether to round stochastically.
      seed: The seed of stochastic rounding.
      float32_moments: Which leaves have float32 moments, apart from small ones: a function of the
        path, such as "['block']['w']". None: no others.
    """

    mu: Codec = FLOAT32
    nu: Codec = FLOAT32
    is_stochastic: bool = False
    seed: int = 0
    float32_moments: Callable[[str], bool] | None = None

    def is_coded(self, path: str, param: Any) -> bool:
        """Whether a leaf has coded moments, if any leaf does."""
        is_float = getattr(param, "dtype", None) in trees.STORAGE_DTYPES
        return is_float and self.codes_leaf(path, np.size(param))

    def codes_leaf(self, path: str, size: int) -> bool:
        """Whether a leaf of floats with ``size`` elements has coded moments."""
        if size < SMALLEST_CODED:
            return False
        return self.float32_moments is None or not self.float32_moments(path)

    def check_paths(self, sizes: Mapping[str, int]) -> None:
        """Raises TreeError if ``float32_moments`` selects no leaf that would be coded.

        ``sizes``: the number of elements of each leaf by path.
        """
        keep, paths = self.float32_moments, [k for k, n in sizes.items() if n >= SMALLEST_CODED]
        if keep is None or not paths or any(map(keep, paths)):
            return
        raise TreeError(
            f"float32_moments: selects no leaf of {SMALLEST_CODED} elements or more: got False for "
            f"{paths[0]} and {len(paths) - 1} more, expected True for the leaves that keep float32 "
            "moments. Test for a part of their paths, or leave float32_moments out."
        )

    def check_rounded(self, dtypes: Sequence[Any]) -> None:
        """Raises PolicyError if stochastic rounding affects none of the stored ``dtypes``."""
        names = sorted({jnp.dtype(dtype).name for dtype in dtypes})
        is_exact = not self.is_coding and all(jnp.dtype(x).itemsize != 2 for x in dtypes)
        check_effects(
            (
                self.is_stochastic and is_exact and bool(names),
                f'rounding: has no effect: got "stochastic" for {" and ".join(names)}, '
                "expected moments of 8 or 16 bits, or parameters of 16 bits without main "
                'parameters. Leave rounding at "nearest".',
            )
        )

    def codec_of(self, moment: str) -> Codec:
        """Returns how the moment "mu" or "nu" is stored, if that is decided here."""
        return {"mu": self.mu, "nu": self.nu}[moment]

    def float_dtype(self, moment: str) -> jnp.dtype:
        """Returns the dtype of the moment "mu" or "nu" of leaves without codes."""
        codec = self.codec_of(moment)
        return jnp.dtype(jnp.float32 if codec.is_coded else codec.dtype)

    @property
    def is_coding(self) -> bool:
        """Whether any moment is stored in codes."""
        return any(self.codec_of(moment).is_coded for moment in MOMENTS)

    @property
    def is_any(self) -> bool:
        """Whether storage differs from floats rounded to nearest."""
        return self.is_coding or self.is_stochastic

    @property
    def key(self) -> Any:
        """The seed as part of the state: shape (2,), uint32."""
        return jnp.asarray([self.seed & 0xFFFFFFFF, self.seed >> 32], jnp.uint32)


def parse(
    *,
    mu_dtype: Any,
    nu_dtype: Any,
    rounding: Any,
    seed: Any,
    float32_moments: Any,
    b1: Any,
    b2: Any,
) -> Storage:
    """Checks storage arguments of an optimizer; raises PolicyError if they contradict."""
    if rounding not in ROUNDINGS:
        raise PolicyError(
            f"rounding: unknown: got {shown(rounding)}, "
            f"expected {' or '.join(map(repr, ROUNDINGS))}. "
            'Use "nearest" unless moments or parameters have 16 bits or less.'
        )
    is_stochastic = rounding == "stochastic"
    mu = FLOAT32 if mu_dtype is None else named_codec(mu_dtype) or float_codec(mu_dtype)
    nu = _nu_codec(nu_dtype)
    _check_seed(seed)
    storage = Storage(mu, nu, is_stochastic, int(seed or 0), float32_moments)
    is_function = callable(float32_moments)
    check_effects(
        (
            seed is not None and not is_stochastic,
            f'seed: has no effect: got {seed} with rounding="nearest", '
            'expected None, or rounding="stochastic". Leave it out.',
        ),
        (
            float32_moments is not None and not (is_function and storage.is_coding),
            f"float32_moments: {'has no effect' if is_function else 'not a function of a path'}: "
            f"got {shown(float32_moments)}, expected a function of a path, together with mu_dtype "
            f"or nu_dtype {NAMES}. "
            "Leave it out; for optax.inject_hyperparams name it in static_args.",
        ),
    )
    if is_stochastic and mu.is_coded and not (nu.is_coded and nu.bits <= mu.bits):
        _raise_unlike(mu, nu_dtype)
    if not is_stochastic:
        _check_decays(storage, b1, b2)
        if not mu.is_coded:
            _warn_of_decay(mu, b1)
    return storage


def _check_seed(seed: Any) -> None:
    if seed is None:
        return
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**64:
        raise PolicyError(
            f"seed: not a seed: got {shown(seed)}, expected an integer from 0 to 2**64 - 1. "
            "Pass seed=0 or another number; for optax.inject_hyperparams in static_args."
        )


def _raise_unlike(mu: Codec, nu_dtype: Any) -> None:
    """Raises if a second moment may be much smaller than the value to which mu is rounded up.

    A unit of mu's codes is 2^-17 or 2^-40 of its block's largest element. Stochastic rounding
    sometimes rounds a smaller first moment up to it. The root of a nu of the same format or a
    coarser one is at least 2^-16.5 or 2^-36, which bounds the update. A finer nu has no such bound:
    [Note: blocks].
    """
    fitting = [f'"{x.name}"' for x in BLOCK_CODECS if x.bits <= mu.bits]
    raise PolicyError(
        "mu_dtype: a stochastically rounded first moment in codes needs a second moment that is "
        f'not in a finer format: got "{mu.name}" with nu_dtype={shown(nu_dtype)} and '
        'rounding="stochastic", '
        f"expected nu_dtype {' or '.join(fitting)}: otherwise steps are unbounded if the gradients "
        f'of a block differ much. Set nu_dtype="{mu.name}", or leave mu_dtype at float32.'
    )


def _check_decays(storage: Storage, b1: Any, b2: Any) -> None:
    """Raises if moments of few bits, rounded to nearest, would not follow their gradients.

    A first moment in bfloat16 has only a warning, because optax has it too.
    """
    mu, nu = storage.mu, storage.nu
    if nu.is_coded or (nu == BFLOAT16 and is_real(b2)):
        _check_decay("nu_dtype", "second", nu, "b2", b2)
    if mu.is_coded:
        _check_decay("mu_dtype", "first", mu, "b1", b1)
    squared, is_known = growth(mu, nu), is_real(b1) and is_real(b2)
    if not storage.is_coding or not is_known or squared * b1**2 < b2:
        return
    raise PolicyError(
        f"{'mu_dtype' if mu.is_coded else 'nu_dtype'}: rounded to nearest, "
        'a first moment may outlast the second one at these rates: got rounding="nearest" '
        f'with b1={shown(b1)} and b2={shown(b2)}, expected rounding="stochastic", '
        f'or {squared:.4f} b1^2 < b2. Set rounding="stochastic", or lower b1.'
    )


def _check_decay(name: str, which: str, codec: Codec, decay: str, b: Any) -> None:
    largest, is_known = codec.largest_decay, is_real(b)
    if is_known and b <= largest:
        return
    at = f"this {decay}" if is_known else f"every {decay}, and its value is not known here"
    also = "" if is_known else ', or keep numbers: inject_hyperparams(static_args=("b1", "b2"))'
    raise PolicyError(
        f"{name}: a {which} moment in {codec.bits} bits, rounded to nearest, cannot follow "
        f'the gradients at {at}: got "{codec.name}" with rounding="nearest" and '
        f"{decay}={shown(b)}, "
        f'expected rounding="stochastic", or a number {decay} <= {largest}. '
        f'Set rounding="stochastic", or leave {name} at float32{also}.'
    )


def _warn_of_decay(mu: Codec, b1: Any) -> None:
    """Warns if a 16-bit first moment, rounded to nearest, does not follow its gradients."""
    if mu.bits != 16:
        return
    is_float16, largest = mu == FLOAT16, mu.largest_decay
    if not is_float16 and not (is_real(b1) and b1 > largest):
        return
    where = "below 6e-5" if is_float16 else f"with b1 above {largest}"
    warn_caller(
        f"mu_dtype: a first moment in {mu.name}, rounded to nearest, does not decay as it should "
        f"{where}, as with optax, and moves parameters that have no gradients: set "
        'rounding="stochastic", or leave it at float32.'
    )


def _nu_codec(value: Any) -> Codec:
    """Returns how the second moment is stored, or raises PolicyError if that cannot work.

    float16 has no number between 0 and 6e-8, the square of 2.4e-4: smaller gradients would count
    as zero.
    """
    if (codec := named_codec(value)) is not None:
        return codec
    given = jnp.float32 if value is None else value
    codec = float_codec(float_dtype("nu_dtype", given, also=MOMENT_NAMES))
    if codec == FLOAT16:
        raise PolicyError(
            f"nu_dtype: a second moment in float16 loses squares below 6e-8: got {codec.name}, "
            f"expected {', '.join(('float32', 'bfloat16', *MOMENT_NAMES))}. "
            "Leave nu_dtype at float32."
        )
    return codec


def named_codec(dtype: Any) -> Codec | None:
    """Returns the codec with this name; None for other dtypes."""
    is_name = isinstance(dtype, str)  # comparing a jnp.dtype with some strings raises
    return next((known for known in BLOCK_CODECS if is_name and known.name == dtype), None)
