"""State with moments in blocks of codes or stochastic rounding."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jdistadam.core import trees
from jdistadam.core.codecs import HALVES, BlockCodes, Codec, is_codes, moment_leaves
from jdistadam.core.storage import MOMENTS, Storage
from jdistadam.core.trees import OptState, Params
from jdistadam.errors import DtypeError, TreeError
from jdistadam.kernels import partition, sharded_codes


class RoundingState(NamedTuple):
    """The state of an optimizer that rounds stochastically.

    Attributes:
      key: Shape (2,), uint32: the seed. It determines the random bits together with the count, so
        it never changes.
      inner: The state without the key.

    References:
      Philox 4x32 with 7 rounds: Salmon et al., `Parallel Random Numbers: As Easy as 1, 2, 3
      <https://doi.org/10.1145/2063384.2063405>`_, 2011.
    """

    key: Any
    inner: Any


def new_state(storage: Storage, params: Params, updated: Params, state: OptState) -> OptState:
    """Encodes the zero moments of optax's new state as ``storage`` requires.

    ``updated``: the params, or the arrays that are stepped in their place.
    """
    named = trees.named_leaves(params, "")
    storage.check_paths({path: np.size(x) for path, x in named})

    stored = map(jax.tree.leaves, (updated, state[0].mu, state[0].nu))
    for (path, param), *others in zip(named, *stored, strict=True):
        is_coded = storage.is_coding and storage.is_coded(path, param)
        is_rounded = storage.is_stochastic and any(jnp.result_type(x) in HALVES for x in others)
        if is_coded or (is_rounded and np.size(param)):
            partition.check_leaf(f"params{path}", param, is_coded=is_coded)

    def coded(moment: str) -> Any:
        tree, codec = getattr(state[0], moment), storage.codec_of(moment)
        if not codec.is_coded:
            return tree
        leaves = [
            _zeros(param, codec) if storage.is_coded(path, param) else zeros
            for (path, param), zeros in zip(named, jax.tree.leaves(tree), strict=True)
        ]
        return trees.codes_outside(jax.tree.unflatten(jax.tree.structure(params), leaves))

    return (state[0]._replace(**{moment: coded(moment) for moment in MOMENTS}), *state[1:])


def _zeros(param: Any, codec: Codec) -> BlockCodes:
    codes = trees.placed_like(param, jnp.zeros_like(param, dtype=codec.dtype))
    scales = jnp.zeros(codec.num_scales(param.size), jnp.float32)
    sharding = getattr(param, "sharding", None)
    if isinstance(param, jax.core.Tracer) or not isinstance(sharding, NamedSharding):
        return BlockCodes(codes, scales)
    first = P(*sharding.spec[:1])  # a part along it has a part of the blocks
    return BlockCodes(codes, jax.device_put(scales, NamedSharding(sharding.mesh, first)))


def split_key(storage: Storage, state: OptState) -> tuple[Any, OptState]:
    """Returns the key or None, and the state without it."""
    if storage.is_stochastic != isinstance(state, RoundingState):
        expected = "RoundingState" if storage.is_stochastic else "a state without RoundingState"
        raise TreeError(
            f"opt_state: does not fit rounding: got {type(state).__name__}, expected {expected}. "
            "Make it with init(params) of this optimizer."
        )
    return (state.key, state.inner) if storage.is_stochastic else (None, state)


def check_coded(storage: Storage, params: Params, moments: Any, *, name: str, codec: Codec) -> None:
    """Raises DtypeError unless this optimizer's coded leaves, and only these, use its codec."""
    named = trees.named_leaves(params, "")
    for (path, param), moment in zip(named, moment_leaves(moments), strict=True):
        expected = codec if codec.is_coded and storage.is_coded(path, param) else None
        if is_codes(moment) != (expected is not None):
            raise DtypeError(
                f"{name}{path}: is not stored as this optimizer stores it: "
                f"got {'codes' if is_codes(moment) else moment.dtype}, "
                f"expected {'an array' if expected is None else expected.name}. "
                "Make the state with init(params) of this optimizer."
            )
        if expected is not None:
            _check_codes(name + path, param, moment, expected)


def _check_codes(path: str, param: Any, moment: BlockCodes, codec: Codec) -> None:
    scales = (codec.num_scales(param.size),)
    got = [(x.shape, x.dtype.name) for x in moment]
    if got != [(param.shape, codec.dtype.name), (scales, "float32")]:
        raise DtypeError(
            f"{path}: does not fit its parameter: got {got}, "
            f"expected codes of shape {param.shape}, {codec.dtype}, and {scales[0]} scales, "
            "float32. Make the state with init(params) of this optimizer."
        )


def decoded(opt_state: OptState) -> OptState:
    """Returns a state with all coded moments as float32, and without the key of random bits.

    The result has the form of the state of ``optax.adamw``. Decoding is exact.

    Args:
      opt_state: The state of ``fused_adamw`` or ``fused_adam``, or a tree that contains one.

    Returns:
      A tree like ``opt_state``, with float32 arrays in place of codes.

    Raises:
      TreeError: The state is a distributed optimizer's, which ``to_optax_state`` decodes.

    Example:
      >>> import jax.numpy as jnp
      >>> import jdistadam as jda
      >>> tx = jda.fused_adamw(1e-2, b2=0.95, mu_dtype="block16", nu_dtype="block16")
      >>> params = {"w": jnp.ones((64, 64))}
      >>> _, state = tx.step({"w": jnp.full((64, 64), 0.5)}, tx.init(params), params)
      >>> state[0].mu["w"].codes.dtype, jda.decoded(state)[0].mu["w"].dtype
      (dtype('uint16'), dtype('float32'))
    """

    def is_part(x: Any) -> bool:
        return isinstance(x, RoundingState) or (hasattr(x, "mu") and hasattr(x, "nu"))

    def part(x: Any) -> Any:
        if isinstance(x, RoundingState):
            return decoded(x.inner)
        if not is_part(x):
            return x
        if hasattr(x, "layout_digest"):
            raise TreeError(
                "opt_state: the state of a distributed optimizer: "
                f"got {type(x).__name__}, expected a state of fused_adamw or fused_adam. "
                "Call to_optax_state(state, tx), which decodes moments."
            )
        return x._replace(mu=_decoded("mu", x.mu), nu=_decoded("nu", x.nu))

    return jax.tree.map(part, opt_state, is_leaf=is_part)


def _decoded(name: str, tree: Any) -> Any:
    def one(x: Any) -> Any:
        return sharded_codes.decoded(name, *x) if is_codes(x) else x

    return jax.tree.map(one, trees.codes_inside(tree), is_leaf=is_codes)
