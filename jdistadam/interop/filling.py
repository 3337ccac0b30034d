"""A new optax-shaped state, filled with the moments and the step count of another one."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import numpy as np
import optax

from jdistadam.core import boxes, trees
from jdistadam.core.codecs import codec_of, is_codes
from jdistadam.drop_in.low_precision import RoundingState
from jdistadam.drop_in.main_params import MainParamsState
from jdistadam.errors import TreeError
from jdistadam.interop.our_trees import AdamTrees


def filled(opt_state: Any, ours: AdamTrees, step: int) -> Any:
    """Returns a new state with moments and every step count in the place of its own.

    Args:
      opt_state: The state that the optimizer makes for the parameters: that of one Adam, perhaps in
        a chain or with injected hyperparameters.
      ours: The moments.
      step: The number of steps taken.

    Raises:
      TreeError: There is not one Adam in it, for all parameters.
    """
    mu = boxes.codes_inside(adam_of(opt_state).mu)
    shapes = jax.tree.map(lambda x: np.broadcast_to(0, x.shape), mu, is_leaf=is_codes)
    trees.check_same_shapes(ours.mu, shapes, name="mu", like_name="opt_state.mu")
    left: list[str] = []
    new = _filled(opt_state, ours, np.asarray(step, np.int32), "opt_state", left)
    if left:
        warnings.warn(
            f"{left[0]}: begins anew, since the other optimizer's state says nothing of it "
            f"({len(left)} such arrays).",
            stacklevel=3,
        )
    return new


def adam_of(opt_state: Any) -> optax.ScaleByAdamState:
    """Returns the state of Adam inside of what may be the state of a chain.

    Raises:
      TreeError: There is not one in it.
    """
    found = [x for x in jax.tree.leaves(opt_state, is_leaf=_is_adam) if _is_adam(x)]
    if len(found) != 1:
        raise TreeError(
            "opt_state",
            "not the state of one Adam",
            got=f"{type(opt_state).__name__} with {len(found)} of them",
            expected="1",
            action="Use one optimizer, with param_labels and groups where leaves differ.",
        )
    return found[0]


def is_injected(opt_state: Any) -> bool:
    """Whether the hyperparameters are in the state, so that the optimizer's own are not used."""
    is_one = lambda x: isinstance(x, optax.InjectStatefulHyperparamsState)  # noqa: E731
    return any(map(is_one, jax.tree.leaves(opt_state, is_leaf=is_one)))


def _is_adam(x: Any) -> bool:
    return isinstance(x, optax.ScaleByAdamState)


def _stored(name: str, moments: Any, like: Any) -> Any:
    """Moments as a state stores them: in its dtypes, or in codes, rounded to nearest."""

    def one(old: Any, x: np.ndarray) -> Any:
        if is_codes(old):
            return codec_of(old).encode(name, x.astype(np.float32, copy=False), None, np)
        return x.astype(old.dtype, copy=False)

    like = boxes.codes_inside(like)
    return boxes.codes_outside(jax.tree.map(one, like, moments, is_leaf=is_codes))


def _filled(part: Any, ours: AdamTrees, count: np.ndarray, where: str, left: list[str]) -> Any:
    """The same for a part of a state; notes the paths of arrays that it left as they are."""
    if _is_adam(part):
        mu = _stored("mu", ours.mu, part.mu)
        return part._replace(count=count, mu=mu, nu=_stored("nu", ours.nu, part.nu))
    if isinstance(part, MainParamsState):
        return part._replace(inner=_filled(part.inner, ours, count, f"{where}.inner", left))
    if hasattr(part, "_fields"):
        # In every state of optax, count is the number of steps; hyperparams are the user's numbers.
        kept = {"count": count} if "count" in part._fields else {}
        kept |= {"key": part.key} if isinstance(part, RoundingState) else {}
        kept |= {"hyperparams": part.hyperparams} if "hyperparams" in part._fields else {}
        new = {
            key: kept[key] if key in kept else _filled(x, ours, count, f"{where}.{key}", left)
            for key, x in part._asdict().items()
        }
        return part._replace(**new)
    if isinstance(part, tuple | list):
        items = enumerate(part)
        return type(part)(_filled(x, ours, count, f"{where}[{i}]", left) for i, x in items)
    if isinstance(part, dict):
        return {k: _filled(x, ours, count, f"{where}[{k!r}]", left) for k, x in part.items()}
    left.extend(trees.paths(part, where))
    return part
