"""Conversion of other frameworks' states to ours, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdistadam.core import trees
from jdistadam.core.arguments import warn_caller
from jdistadam.core.codecs import codec_of, is_codes
from jdistadam.core.storage import main_codec_of
from jdistadam.core.trees import OptState, Params
from jdistadam.distributed.global_arrays import fetch
from jdistadam.distributed.transformation import DistributedTransformation, check_distributed
from jdistadam.drop_in.low_precision import decoded
from jdistadam.drop_in.state import MainParamsState
from jdistadam.drop_in.transformation import FusedTransformation, without_frozen
from jdistadam.errors import DtypeError, TreeError
from jdistadam.interop import named_state
from jdistadam.interop.named_state import Group, NamedState, OfLeaves, Place, Rename, Transpose
from jdistadam.training.optax_state import main_params, to_optax_state, with_optax_state
from jdistadam.training.train_state import TrainState

_LIKE = "Pass our parameters, or their shapes."


def to_train_state(
    theirs: NamedState,
    tx: DistributedTransformation,
    like: Params,
    *,
    rename: Rename = None,
    transpose: Transpose = None,
    differences: str = "raise",
) -> TrainState:
    """Makes the train state with which a distributed optimizer continues from another framework.

    Moments and main parameters are copied exactly, except for moments that the policy of ``tx``
    stores in a narrower dtype. Loss scale, model_state and rng start anew.

    Args:
      theirs: The result of ``from_torch`` or another reader.
      tx: A distributed optimizer, with the same hyperparameters.
      like: Tree of arrays or shapes, with the structure, shapes and dtypes of our parameters.
      rename: A function or a dictionary from their names to the paths of our leaves, such as
        ``Dense_0/kernel``, or to None to skip a parameter. None: ``a.b`` becomes ``a/b``.
      transpose: A function of such a path and the number of dimensions, such as ``flax_kernels``,
        or a dictionary of axes by path: our leaf is ``np.transpose(theirs, axes)``.
      differences: If hyperparameters differ, "raise", or "warn" and use those of ``tx``.

    Returns:
      A train state on the mesh of ``tx``.

    Raises:
      TreeError, ShapeError, DtypeError: A leaf is missing, unexpected, or would lose bits.
      HyperparameterError: The other optimizer had other hyperparameters.

    Example:
      >>> import jdistadam as jda
      >>> ones = np.ones((2, 3), np.float32)
      >>> theirs = NamedState(5, {"fc.weight": jda.interop.NamedLeaf(ones, mu=ones, nu=ones)}, ())
      >>> tx = jda.distributed(jda.fused_adamw(1e-3), mesh=jax.make_mesh((1,), ("data",)))
      >>> like = {"fc": {"kernel": jax.ShapeDtypeStruct((3, 2), jnp.float32)}}
      >>> mapping = dict(rename={"fc.weight": "fc/kernel"}, transpose=jda.interop.flax_kernels)
      >>> state = to_train_state(theirs, tx, like, **mapping)
      >>> int(state.step), state.params["fc"]["kernel"].shape
      (5, (3, 2))
    """
    check_distributed(tx)
    named_state.check_named_state(theirs)
    trees.check_dtypes(like, name="like", action=_LIKE)
    numbers = named_state.numbers_of_leaves(tx.config.algorithm.groups, like, theirs.step)
    ours = named_state.places(theirs.leaves, like, rename, transpose)
    named_state.compare(theirs, numbers, ours, differences)
    params, mu, nu = named_state.to_trees(theirs, ours, like, numbers)
    if not tx.config.policy.main_params.is_stored:
        _check_exact(params, ours, like)
    dtypes = jax.tree.map(lambda x: x.dtype, like)
    state = TrainState.create(params, tx, param_dtypes=dtypes)
    _, opt_state, _ = to_optax_state(state, tx)
    return with_optax_state(state, tx, _filled(opt_state, theirs.step, mu, nu, iter(())))


def from_train_state(
    state: TrainState,
    tx: DistributedTransformation,
    names: Sequence[str],
    *,
    rename: Rename = None,
    transpose: Transpose = None,
    groups: Sequence[Group] | None = None,
) -> NamedState:
    """Returns the Adam state in a train state of ``tx``, by the names of another framework.

    The inverse of ``to_train_state`` with the same rename and transpose. ``names`` are in the order
    in which the other optimizer gets its parameters. ``groups`` are its groups, as in
    ``NamedState.groups``. None: one for each set of hyperparameters of ``tx``, with the values of
    the next step. If hyperparameters are hidden, as by ``inject_hyperparams``, there is one group
    without settings, which ``to_torch`` takes by keyword.

    Returns:
      The state as numpy arrays by the names of the other framework.

    Raises:
      LayoutError: The layout of the state is not that of ``tx``, or its params were changed.
      TreeError, ShapeError: The names do not match.
      HyperparameterError: Adam in torch's layout has no such hyperparameter.

    Example:
      >>> import jdistadam as jda
      >>> tx = jda.distributed(jda.fused_adamw(1e-3), mesh=jax.make_mesh((1,), ("data",)))
      >>> theirs = from_train_state(TrainState.create({"w": jnp.ones(3)}, tx), tx, ["w"])
      >>> jda.interop.to_torch(theirs).optimizer["state"][0]["exp_avg"].tolist()
      [0.0, 0.0, 0.0]
    """
    main, opt_state, _ = to_optax_state(state, tx)
    adam = _adam_of(opt_state)
    numbers = named_state.numbers_of_leaves(tx.config.algorithm.groups, main, int(adam.count))
    mu, nu = (without_frozen(numbers, moment) for moment in (adam.mu, adam.nu))
    ours = named_state.places(names, main, rename, transpose)
    leaves = named_state.to_leaves(ours, names, main, mu, nu)
    if groups is None:  # hyperparameters in the state replace those of tx
        injected = trees.parts_of(opt_state, optax.InjectStatefulHyperparamsState)
        groups = named_state.groups_of(None if injected else numbers, ours, leaves)
    return NamedState(int(adam.count), leaves, tuple(groups))


def to_fused(
    theirs: NamedState,
    tx: FusedTransformation,
    like: Params,
    *,
    rename: Rename = None,
    transpose: Transpose = None,
    differences: str = "raise",
) -> tuple[Params, OptState]:
    """Makes the parameters and state with which ``fused_adamw`` continues from another framework.

    ``tx`` is ``fused_adamw`` or ``fused_adam``, also in ``inject_hyperparams`` or a ``jda.chain``.
    These two hide the hyperparameters, and a warning says what to compare. The other arguments and
    exceptions are as in ``to_train_state``.

    Returns:
      Parameters, in the dtypes of ``like``, and the state that ``tx.init`` makes for them, with the
      moments and the step count of ``theirs``: numpy arrays, for ``jax.device_put`` to place.

    Example:
      >>> import jdistadam as jda
      >>> ones = np.ones(3, np.float32)
      >>> theirs = NamedState(5, {"w": jda.interop.NamedLeaf(ones, mu=ones, nu=ones)}, ())
      >>> params, opt_state = to_fused(theirs, jda.fused_adamw(1e-3), {"w": jnp.zeros(3)})
      >>> int(opt_state[0].count), opt_state[0].mu["w"].tolist()
      (5, [1.0, 1.0, 1.0])
    """
    named_state.check_named_state(theirs)
    trees.check_dtypes(like, name="like", action=_LIKE)
    numbers = _numbers(tx, like, theirs.step)
    ours = named_state.places(theirs.leaves, like, rename, transpose)
    named_state.compare(theirs, numbers, ours, differences)
    opt_state = tx.init(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like))
    opt_state = jax.tree.map(fetch, opt_state)
    treedef: Any = jax.tree.structure(like)
    moments = treedef.flatten_up_to(trees.codes_inside(_adam_of(opt_state).mu))
    rows = [None if isinstance(x, optax.MaskedNode) else 0 for x in moments]
    exact, mu, nu = named_state.to_trees(theirs, ours, like, rows)
    if not (kept := trees.parts_of(opt_state, MainParamsState)):
        _check_exact(exact, ours, like)
    olds = treedef.flatten_up_to(kept[0].main_params) if kept else [None] * len(rows)
    codecs = [main_codec_of(x if hasattr(x, "dtype") else None) for x in olds]
    leaves = zip(codecs, *map(jax.tree.leaves, (exact, like)), strict=True)
    split = [codec.split(x, y.dtype, np) for codec, x, y in leaves]
    mains = iter([main for _, main in split if main is not None])
    params = treedef.unflatten([param for param, _ in split])
    return params, _filled(opt_state, theirs.step, mu, nu, mains)


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
    """Returns the state of ``fused_adamw`` by another framework's names: ``to_fused`` inverted.

    ``opt_state`` is the state of ``tx`` for ``params``. The other arguments and exceptions are as
    in ``from_train_state``; the hyperparameters of a chain are hidden too.

    Returns:
      The state as numpy arrays by the names of the other framework.

    Example:
      >>> import jdistadam as jda
      >>> tx, params = jda.fused_adamw(1e-3, b2=0.99), {"w": jnp.ones(3)}
      >>> from_fused(params, tx.init(params), tx, ["w"]).groups[0].settings["betas"]
      (0.9, 0.99)
    """
    adam = _adam_of(decoded(opt_state))
    arrays = jax.tree.map(fetch, (main_params(params, opt_state), adam.mu, adam.nu))
    ours = named_state.places(names, params, rename, transpose)
    leaves = named_state.to_leaves(ours, names, *arrays)
    if groups is None:
        groups = named_state.groups_of(_numbers(tx, params, int(adam.count)), ours, leaves)
    return NamedState(int(adam.count), leaves, tuple(groups))


def _numbers(tx: FusedTransformation, like: Params, step: int) -> OfLeaves:
    """The hyperparameters of each leaf; None if they are hidden."""
    if not isinstance(tx, FusedTransformation) or isinstance(tx, DistributedTransformation):
        raise TreeError(
            f"tx: not a fused optimizer: got {type(tx).__name__}, "
            "expected what fused_adamw, fused_adam or jda.chain returned. "
            "For a distributed one use to_train_state and from_train_state."
        )
    if tx.algorithm is None or tx.is_direction or not tx.is_as_made:
        return None
    return named_state.numbers_of_leaves(tx.algorithm.groups, like, step)


def _adam_of(opt_state: Any) -> optax.ScaleByAdamState:
    """The state of the only Adam in a state that may be a chain's."""
    found = trees.parts_of(opt_state, optax.ScaleByAdamState)
    if len(found) != 1:
        raise TreeError(
            "opt_state: not the state of one Adam: "
            f"got {type(opt_state).__name__} with {len(found)} of them, expected 1. "
            "Use one optimizer, with param_labels and groups where leaves differ."
        )
    return found[0]


def _check_exact(exact: Any, ours: list[Place], like: Any) -> None:
    """Raises DtypeError if float32 parameters lose bits in the dtypes of ``like``."""
    for place, x, y in zip(ours, jax.tree.leaves(exact), jax.tree.leaves(like), strict=True):
        if x.dtype != y.dtype and (x.astype(y.dtype).astype(x.dtype) != x).any():
            raise DtypeError(
                f"{place.where}: would be rounded, and the optimizer keeps no main parameters: "
                f"got float32 parameters, expected what {y.dtype} holds exactly. "
                "Use main_params_dtype=jnp.float32, or read the model's own parameters."
            )


def _filled(opt_state: Any, step: int, mu: Any, nu: Any, mains: Iterator[Any]) -> Any:
    """A new state with another one's step count, moments and, in the order of leaves, ``mains``."""
    count, left = np.asarray(step, np.int32), []
    is_adam = lambda x: isinstance(x, optax.ScaleByAdamState)  # noqa: E731

    def filled(path: Any, x: Any) -> Any:
        fields = [getattr(key, "name", "") for key in path]
        if is_adam(x):
            return x._replace(count=count, mu=_stored("mu", mu, x.mu), nu=_stored("nu", nu, x.nu))
        if fields[-1:] == ["count"]:  # the number of steps in every optax state
            return count
        if "main_params" in fields:
            return next(mains, x)
        if not {"hyperparams", "key"}.intersection(fields):  # the user's numbers and random key
            left.append("opt_state" + jax.tree_util.keystr(path))
        return x

    new = jax.tree_util.tree_map_with_path(filled, opt_state, is_leaf=is_adam)
    if left:
        warn_caller(
            f"{left[0]}: begins anew, since the other optimizer's state says nothing of it "
            f"({len(left)} such arrays)."
        )
    return new


def _stored(name: str, moments: Any, like: Any) -> Any:
    """Moments as a state stores them: in its dtypes, or in codes rounded to nearest."""

    def one(old: Any, x: np.ndarray) -> Any:
        if isinstance(old, optax.MaskedNode):
            return old
        if is_codes(old):
            return codec_of(old).encode(name, x.astype(np.float32, copy=False), None, np)
        return x.astype(old.dtype, copy=False)

    is_leaf = lambda x: is_codes(x) or isinstance(x, optax.MaskedNode)  # noqa: E731
    stored = jax.tree.map(one, trees.codes_inside(like), moments, is_leaf=is_leaf)
    return trees.codes_outside(stored)
