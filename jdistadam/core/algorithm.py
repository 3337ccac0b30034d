"""What an optimizer computes and in which formats it stores it, wherever its state lives."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import optax

from jdistadam.core.groups import Groups
from jdistadam.core.hyperparameters import Hyperparameters
from jdistadam.core.low_precision import LowPrecision, check_nu_dtype, parse, without_codes
from jdistadam.core.main_params import UNSET, MainParams
from jdistadam.errors import PolicyError


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """The arguments of ``fused_adamw`` or ``fused_adam``, checked.

    Attributes:
      hyper: Hyperparameters, before what groups change.
      groups: The hyperparameters of each group, and which leaf belongs to which.
      like_optax: optax's optimizer, whose state this one has.
      low: Which moments are coded, and how to round.
      mu_dtype: The dtype of the first moment where it is not coded. None: that of what is updated.
      nu_dtype: That of the second moment.
      main_params_dtype: What is kept of main parameters, as given, or ``UNSET``.
      reads_params: Whether an update cannot be computed without the params.
    """

    hyper: Hyperparameters
    groups: Groups
    like_optax: optax.GradientTransformation
    low: LowPrecision
    mu_dtype: Any
    nu_dtype: jnp.dtype
    main_params_dtype: Any
    reads_params: bool

    @property
    def main_params(self) -> MainParams:
        """What is kept of main parameters; nothing where that was left open."""
        is_open = self.main_params_dtype is UNSET
        return MainParams.NONE if is_open else MainParams.parse(self.main_params_dtype)

    def float_dtype(self, moment: str) -> jnp.dtype:
        """Returns the dtype of the moment "mu" or "nu" in a flat state, where it is not coded."""
        given = self.mu_dtype if moment == "mu" else self.nu_dtype
        return jnp.dtype(jnp.float32 if given is None else given)

    @property
    def numbers(self) -> tuple[dict[str, Any], ...]:
        """Hyperparameters that are arrays: first those of all leaves, then those of each group."""
        return tuple(hyper.known_and_operands()[1] for hyper in (self.hyper, *self.groups.used))

    def with_numbers(self, numbers: tuple[dict[str, Any], ...]) -> Algorithm:
        """Returns this with other arrays in the place of ``numbers``."""
        if not any(numbers):
            return self
        replaced = iter(numbers)
        hyper = dataclasses.replace(self.hyper, **next(replaced))
        groups = {
            label: old and dataclasses.replace(old, **next(replaced))
            for label, old in self.groups.hypers.items()
        }
        return dataclasses.replace(
            self, hyper=hyper, groups=dataclasses.replace(self.groups, hypers=groups)
        )

    def resolved_main_params(self, given: Any) -> MainParams:
        """Returns what is kept of them where state is sharded; float32 where nothing says.

        Args:
          given: The main_params_dtype of the policy.

        Raises:
          PolicyError: The two contradict each other.
        """
        kinds = [MainParams.parse(x) for x in (self.main_params_dtype, given) if x is not UNSET]
        if len(set(kinds)) > 1:
            raise PolicyError(
                "MixedPrecisionPolicy.main_params_dtype",
                "contradicts the optimizer's main_params_dtype",
                got=kinds[1].value,
                expected=str(kinds[0].value),
                action="Give it in one of the two places.",
            )
        return kinds[0] if kinds else MainParams.FLOAT32

    def __str__(self) -> str:
        """Returns in which formats moments are stored, in lines like those of a policy."""
        low = self.low
        rows: dict[str, Any] = {
            "mu_dtype": low.mu.name if low.mu else self.float_dtype("mu"),
            "nu_dtype": low.nu.name if low.nu else self.nu_dtype,
            "rounding": "stochastic" if low.is_random else "nearest",
        }
        if low.is_random:
            rows["seed"] = low.seed
        if low.float32_moments is not None:
            rows["float32_moments"] = "by path"
        return "\n".join(f"{name:<18}  {value}" for name, value in rows.items())


def make_algorithm(
    groups: Groups,
    hyper: Hyperparameters,
    like_optax: optax.GradientTransformation,
    *,
    mu_dtype: Any,
    nu_dtype: Any,
    rounding: Any,
    seed: Any,
    float32_moments: Any,
    main_params_dtype: Any,
    reads_params: bool,
) -> Algorithm:
    """Checks that formats and the decay rates of every group fit each other.

    Raises:
      PolicyError: They do not.
    """
    for used in groups.used:
        low = parse(
            mu_dtype=mu_dtype,
            nu_dtype=nu_dtype,
            rounding=rounding,
            seed=seed,
            float32_moments=float32_moments,
            b1=used.b1,
            b2=used.b2,
        )
        nu = check_nu_dtype(nu_dtype, used.b2, is_random=low.is_random)
    if main_params_dtype is not UNSET:
        MainParams.parse(main_params_dtype)
    return Algorithm(
        hyper=hyper,
        groups=groups,
        like_optax=like_optax,
        low=low,
        mu_dtype=None if mu_dtype is None else without_codes(mu_dtype),
        nu_dtype=nu,
        main_params_dtype=main_params_dtype,
        reads_params=reads_params,
    )
