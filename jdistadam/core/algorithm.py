"""What an optimizer computes and how it stores its state, independent of placement."""

from __future__ import annotations

import dataclasses
from typing import Any

import optax

from jdistadam.core.codecs import FLOAT32, NOTHING, Codec
from jdistadam.core.groups import Groups
from jdistadam.core.hyperparameters import Hyperparameters
from jdistadam.core.storage import UNSET, Storage, parse, parse_main_params
from jdistadam.errors import PolicyError


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """The arguments of ``fused_adamw`` or ``fused_adam``, checked.

    Attributes:
      hyper: Hyperparameters before groups change them.
      groups: The hyperparameters of each group and the group of each leaf.
      like_optax: The optax optimizer that has the same state.
      storage: How moments are stored and rounded.
      main_params_dtype: How main parameters are stored, as given, or ``UNSET``.
      reads_params: Whether an update needs the params.
    """

    hyper: Hyperparameters
    groups: Groups
    like_optax: optax.GradientTransformation
    storage: Storage
    main_params_dtype: Any
    reads_params: bool

    @property
    def main_params(self) -> Codec:
        """How main parameters are stored; ``NOTHING`` if unset."""
        is_open = self.main_params_dtype is UNSET
        return NOTHING if is_open else parse_main_params(self.main_params_dtype)

    @property
    def numbers(self) -> tuple[dict[str, Any], ...]:
        """Hyperparameters that are arrays: first of all leaves, then of each group."""
        return tuple(hyper.known_and_operands()[1] for hyper in (self.hyper, *self.groups.used))

    def with_numbers(self, numbers: tuple[dict[str, Any], ...]) -> Algorithm:
        """Returns a copy with other arrays in place of ``numbers``."""
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

    def resolved_main_params(self, given: Any) -> Codec:
        """Returns how sharded state stores main parameters; float32 by default.

        Args:
          given: The main_params_dtype of the policy.

        Raises:
          PolicyError: The optimizer and the policy contradict each other.
        """
        kinds = [parse_main_params(x) for x in (self.main_params_dtype, given) if x is not UNSET]
        if len(set(kinds)) > 1:
            raise PolicyError(
                "MixedPrecisionPolicy.main_params_dtype: "
                f"contradicts the optimizer's main_params_dtype: got {kinds[1].argument}, "
                f"expected {kinds[0].argument}. Set it in only one of the two places."
            )
        return kinds[0] if kinds else FLOAT32

    def __str__(self) -> str:
        """Returns the formats of the moments, in lines like those of a policy."""
        storage = self.storage
        rows: dict[str, Any] = {
            "mu_dtype": storage.codec_of("mu").name,
            "nu_dtype": storage.nu.name,
            "rounding": "stochastic" if storage.is_stochastic else "nearest",
        }
        if storage.is_stochastic:
            rows["seed"] = storage.seed
        if storage.float32_moments is not None:
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
    """Checks that storage formats fit the decay rates of every group.

    Raises:
      PolicyError: They do not.
    """
    for used in groups.used:
        storage = parse(
            mu_dtype=mu_dtype,
            nu_dtype=nu_dtype,
            rounding=rounding,
            seed=seed,
            float32_moments=float32_moments,
            b1=used.b1,
            b2=used.b2,
        )
    if main_params_dtype is not UNSET:
        parse_main_params(main_params_dtype)
    return Algorithm(
        hyper=hyper,
        groups=groups,
        like_optax=like_optax,
        storage=storage,
        main_params_dtype=main_params_dtype,
        reads_params=reads_params,
    )
