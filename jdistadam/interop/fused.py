"""Parameters and optax's state for ``fused_adamw`` from other frameworks, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdistadam.core import trees
from jdistadam.core.codecs import NOTHING
from jdistadam.core.main_params import main_codec_of
from jdistadam.core.types import OptState, Params
from jdistadam.distributed.transformation import DistributedTransformation
from jdistadam.drop_in.frozen import with_frozen, without_frozen
from jdistadam.drop_in.low_precision import decoded
from jdistadam.drop_in.main_params import MainParamsState
from jdistadam.drop_in.transformation import FusedTransformation
from jdistadam.errors import TreeError
from jdistadam.interop import hyperparameters, name_map
from jdistadam.interop.filling import adam_of, filled
from jdistadam.interop.hyperparameters import Numbers
from jdistadam.interop.name_map import Rename, Transpose
from jdistadam.interop.named_state import Group, NamedState, check_named_state
from jdistadam.interop.our_trees import AdamTrees, check_kept, to_leaves, to_trees
from jdistadam.training.host_arrays import fetch
from jdistadam.training.optax_state import main_params


def to_fused(
    theirs: NamedState,
    tx: FusedTransformation,
    like: Params,
    *,
    rename: Rename = None,
    transpose: Transpose = None,
    differences: str = "raise",
) -> tuple[Params, OptState]:
    """Makes the parameters and the state with which ``fused_adamw`` goes on from another framework.

    Args:
      theirs: What ``from_torch`` or another reader returned.
      tx: ``fused_adamw`` or ``fused_adam``, also with ``inject_hyperparams``, or a ``jda.chain``
        with one, with the same hyperparameters. What they are is only seen of the optimizer itself;
        otherwise a warning says what to compare.
      like: Tree of arrays or shapes, with the structure, shapes and dtypes of our parameters.
      rename: As in ``to_train_state``.
      transpose: As in ``to_train_state``.
      differences: As in ``to_train_state``.

    Returns:
      Parameters, in the dtypes of ``like``, and the state that ``tx.init`` makes for them with the
      moments and the step count of ``theirs``; both are numpy arrays, for ``jax.device_put`` to
      place. Moments have the dtypes in which ``tx`` stores them.

    Raises:
      TreeError, ShapeError, DtypeError: A leaf is missing, unexpected or of another shape, or would
        lose bits.
      HyperparameterError: The other optimizer had other hyperparameters.

    Example:
      >>> import jdistadam as jda
      >>> settings = dict(lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, params=[0])
      >>> ones = np.ones(3, np.float32)
      >>> state_dict = {
      ...     "state": {0: dict(step=5, exp_avg=ones, exp_avg_sq=ones)},
      ...     "param_groups": [settings],
      ... }
      >>> theirs = jda.interop.from_torch(state_dict, {"w": ones}, ["w"])
      >>> tx = jda.fused_adamw(**theirs.arguments())
      >>> params, opt_state = jda.interop.to_fused(theirs, tx, {"w": jnp.zeros(3)})
      >>> int(opt_state[0].count), opt_state[0].mu["w"].tolist()
      (5, [1.0, 1.0, 1.0])
    """
    check_named_state(theirs)
    numbers = _numbers(tx, like, theirs.step)
    names = list(name_map.their_name_by_path(theirs.leaves, rename, like).values())
    hyperparameters.compare(theirs, numbers, like, names, differences)
    trees.check_dtypes(like, name="like", action="Pass our parameters, or their shapes.")
    opt_state = _host(tx.init(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)))
    is_frozen = _is_frozen(opt_state, like)
    ours = to_trees(theirs, like, rename, transpose, is_frozen)
    rows = [None if frozen else 0 for frozen in is_frozen]
    ours = ours._replace(mu=without_frozen(rows, ours.mu), nu=without_frozen(rows, ours.nu))
    kinds = [x for x in jax.tree.leaves(opt_state, is_leaf=_keeps_main) if _keeps_main(x)]
    check_kept(ours.params, like, keeps_main=bool(kinds))
    params = jax.tree.map(lambda x, y: x.astype(y.dtype, copy=False), ours.params, like)
    if kinds:
        params, mains = _split(ours.params, like, kinds[0])
        opt_state = jax.tree.map(
            lambda x: x._replace(main_params=mains) if _keeps_main(x) else x,
            opt_state,
            is_leaf=_keeps_main,
        )
    return params, filled(opt_state, ours, theirs.step)


def from_fused(
    params: Params,
    opt_state: OptState,
    tx: FusedTransformation,
    names: Sequence[str],
    *,
    rename: Rename = None,
    transpose: Transpose = None,
    groups: Sequence[Group] | None = None,
) -> NamedState:
    """Returns what ``fused_adamw`` holds by the names of another framework: the inverse.

    Args:
      params: The parameters.
      opt_state: The state that belongs to them.
      tx: The optimizer.
      names: The other framework's names, in the order in which its optimizer gets its parameters.
      rename: As in ``to_train_state``.
      transpose: As in ``to_train_state``.
      groups: As in ``from_train_state``. Where the hyperparameters of ``tx`` cannot be seen, one
        group without settings, which ``to_torch`` takes by keyword.

    Raises:
      TreeError, ShapeError: The names do not fit.
      HyperparameterError: Adam of torch's layout has no such hyperparameter.

    Example:
      >>> import jdistadam as jda
      >>> tx, params = jda.fused_adamw(1e-3, b2=0.99), {"w": jnp.ones(3)}
      >>> theirs = from_fused(params, tx.init(params), tx, ["w"])
      >>> theirs.groups[0].settings["betas"]
      (0.9, 0.99)
    """
    adam = adam_of(decoded(opt_state))
    step = int(adam.count)
    is_frozen = _is_frozen(opt_state, params)
    rows = [None if frozen else 0 for frozen in is_frozen]
    mu, nu = (with_frozen(rows, moment, params) for moment in (adam.mu, adam.nu))
    ours = AdamTrees(*map(_host, (main_params(params, opt_state), mu, nu)))
    leaves = to_leaves(ours, names, rename, transpose, is_frozen)
    if groups is None:
        order = list(name_map.their_name_by_path(names, rename, params).values())
        groups = hyperparameters.groups_of(_numbers(tx, params, step), order, list(leaves))
    return NamedState(step, leaves, tuple(groups))


def _numbers(tx: FusedTransformation, like: Params, step: int) -> list[Numbers | None] | None:
    """The hyperparameters of each leaf; None where they cannot be seen."""
    if not isinstance(tx, FusedTransformation) or isinstance(tx, DistributedTransformation):
        raise TreeError(
            "tx",
            "not a fused optimizer",
            got=type(tx).__name__,
            expected="what fused_adamw, fused_adam or jda.chain returned",
            action="For a distributed one use to_train_state and from_train_state.",
        )
    if tx.algorithm is None:
        return None
    return hyperparameters.numbers_of_leaves(tx.algorithm.groups, like, step)


def _is_frozen(opt_state: OptState, like: Params) -> list[bool]:
    """For each leaf of params, whether it has no moments."""
    treedef: Any = jax.tree.structure(like)
    moments = treedef.flatten_up_to(adam_of(decoded(opt_state)).mu)
    return [isinstance(x, optax.MaskedNode) for x in moments]


def _keeps_main(x: Any) -> bool:
    return isinstance(x, MainParamsState)


def _host(tree: Any) -> Any:
    return jax.tree.map(fetch, tree)


def _split(exact: Any, like: Params, state: MainParamsState) -> tuple[Any, Any]:
    """Parameters and what is kept beside them, from exact ones."""
    treedef: Any = jax.tree.structure(like)
    pairs = []
    kept = treedef.flatten_up_to(state.main_params)
    for x, y, old in zip(jax.tree.leaves(exact), jax.tree.leaves(like), kept, strict=True):
        is_kept = isinstance(old, np.ndarray)  # else there is a MaskedNode in its place
        kind = main_codec_of(old) if is_kept else NOTHING
        param, main = kind.split(x, y.dtype, np)
        pairs.append((param, main if is_kept else old))
    params, mains = zip(*pairs, strict=True)
    return treedef.unflatten(list(params)), treedef.unflatten(list(mains))
