"""What a step takes and returns: the static side of a call, its scalars, and its arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdistadam.core.codecs import is_codes
from jdistadam.kernels import native
from jdistadam.kernels.reference import LeafPartition


class Scalars(NamedTuple):
    """The scalar operands of a step, on the device. Changing them never recompiles."""

    coefficients: Any  # shape (*members, groups, len(coefficients.NAMES)), float32
    inv_scale: Any  # shape (), float32: the factor of every gradient
    found_inf: Any  # shape (), bool: whether to change nothing

    @classmethod
    def plain(cls, rows: jax.Array) -> Scalars:
        """Coefficients only: unscaled gradients, no skip."""
        return cls(rows, jnp.ones((), jnp.float32), jnp.zeros((), jnp.bool_))

    @property
    def member_dims(self) -> int:
        """The number of leading dimensions of members of the coefficients, and of every leaf."""
        return int(self.coefficients.ndim) - 2


class LeafPositions(NamedTuple):
    """The positions of local leaves in whole leaves, if they differ between devices."""

    shards: Any  # shape (leaves, 2), int32: the number of its shard, and of that in the outer cut
    blocks: Any  # shape (rows, 2), uint32: a block's leaf, and its index there

    @classmethod
    def of_shards(cls, shards: Any) -> LeafPositions:
        """For leaves that were cut at most once; ``shards`` has shape (leaves,), int32."""
        shards = jnp.stack([jnp.asarray(shards, jnp.int32), jnp.zeros(len(shards), jnp.int32)], 1)
        return cls(shards, jnp.zeros((1, 2), jnp.uint32))


class Rounding(NamedTuple):
    """What random bits depend on, on the device: [Note: random bits] in cuda/rounding.h."""

    key: Any  # shape (2,), uint32: the seed
    count: Any  # shape (), int32: steps taken before this one
    positions: LeafPositions | None = None  # None: ``sharded_adam`` finds them


@dataclasses.dataclass(frozen=True)
class RoundingSpec:
    """The static side of a call with coded moments or stochastic rounding; hashable.

    Attributes:
      is_stochastic: Whether mu and nu of 8 or 16 bits are rounded stochastically, and in mode
        "step" the parameters of 16 bits. If not, to nearest.
      ids: For each leaf its number in the tree of params.
      cuts: For each leaf how it was cut. (): into consecutive shards of equal size.
      tables: For each leaf that packs several, each padded to whole blocks, its first row of
        ``LeafPositions.blocks``; -1 for other leaves. (): no leaf packs several.
    """

    is_stochastic: bool
    ids: tuple[int, ...]
    cuts: tuple[LeafPartition, ...] = ()
    tables: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Spec:
    """The static side of a call; hashable.

    Attributes:
      mode: "step": new params. "step_and_cast": new params, and a copy of them in ``out_dtype``.
        "update": optax's updates in ``out_dtype``; params are only read.
        "step_split": new params, whose bfloat16 half is in params and whose remainder is in out,
        both updated in place; [Note: remainders].
      groups: For each leaf, its row of the coefficients.
      flags: The enabled flags of the formula: names in ``hyperparameters.FLAGS``.
      out_dtype: Dtype of the extra output; None in modes "step" and "step_split".
      flat: Operand kinds that are one flat array instead of one array per leaf. In a new flat out,
        gaps between the leaves are undefined; the fallback cannot make one.
      sizes: Elements of each leaf, given if any kind is flat.
      offsets: The start of each leaf in the flat arrays, in elements.
      mu_offsets: The same in a flat first moment. (): as ``offsets``.
      nu_offsets: The same in a flat second moment. (): as ``offsets``.
      rounding: For coded moments or stochastic rounding; None: floats, rounded to nearest.
    """

    mode: str
    groups: tuple[int, ...]
    flags: frozenset[str] = frozenset()
    out_dtype: Any = None
    flat: frozenset[str] = frozenset()
    sizes: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    mu_offsets: tuple[int, ...] = ()
    nu_offsets: tuple[int, ...] = ()
    rounding: RoundingSpec | None = None

    def offsets_of(self, kind: str) -> tuple[int, ...]:
        """The start of each leaf in a flat array of a kind."""
        return {"mu": self.mu_offsets, "nu": self.nu_offsets}.get(kind) or self.offsets

    def of(self, leaves: Sequence[int]) -> Spec:
        """A call for some of the leaves; nothing is flat, and none was cut."""
        rounding = self.rounding
        if rounding is not None:
            rounding = dataclasses.replace(rounding, ids=tuple(rounding.ids[i] for i in leaves))
        groups = tuple(self.groups[i] for i in leaves)
        return dataclasses.replace(self, groups=groups, rounding=rounding)


class Operands(NamedTuple):
    """Leaves by kind: a sequence of arrays, or of a single flat array."""

    grads: Sequence[Any]
    params: Sequence[Any]
    mu: Sequence[Any]
    nu: Sequence[Any]
    out: Sequence[Any] = ()  # the remainders, uint16, in mode "step_split"

    def of(self, leaves: Sequence[int]) -> Operands:
        """The arrays of some of the leaves."""
        return Operands(*(tuple(kind[i] for i in leaves) if kind else () for kind in self))

    def unfused(self) -> Operands:
        """native.unfused for arrays updated in place; gradients may be read from slices."""
        return native.unfused(self._replace(grads=()))._replace(grads=self.grads)


class Results(NamedTuple):
    """The new values, like Operands; ``out`` is empty in mode "step", params in "update"."""

    params: Sequence[Any]
    mu: Sequence[Any]
    nu: Sequence[Any]
    out: Sequence[Any]
    squares: Any = None  # shape (segments, 3), float32: the requested sums; None: none

    def mapped(self, function: Callable[..., Any], *others: Any) -> Results:
        """The results of a function of each kind of new arrays; squares stay."""
        params, mu, nu, out = map(function, self[:-1], *others)
        return Results(params, mu, nu, out, self.squares)


def codes_of(moments: Sequence[Any]) -> tuple[Any, ...]:
    """Returns moments as arrays: coded ones as their codes."""
    return tuple(x.codes if is_codes(x) else x for x in moments)
