"""Train states of distributed optimizers from states of other frameworks, and back."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from jdistadam.core.types import Params
from jdistadam.distributed.transformation import DistributedTransformation, check_distributed
from jdistadam.interop import hyperparameters, name_map
from jdistadam.interop.filling import adam_of, filled, is_injected
from jdistadam.interop.hyperparameters import Numbers
from jdistadam.interop.name_map import Rename, Transpose
from jdistadam.interop.named_state import Group, NamedState, check_named_state
from jdistadam.interop.our_trees import AdamTrees, check_kept, to_leaves, to_trees
from jdistadam.training.optax_state import from_optax_state, to_optax_state
from jdistadam.training.train_state import TrainState


def to_train_state(
    theirs: NamedState,
    tx: DistributedTransformation,
    like: Params,
    *,
    rename: Rename = None,
    transpose: Transpose = None,
    differences: str = "raise",
) -> TrainState:
    """Makes the train state with which a distributed optimizer goes on from another framework.

    Moments and main parameters are copied exactly, but for moments that the policy of ``tx``
    stores in a narrower dtype. ``tx`` begins with its own loss scale, and there is no model_state
    and no rng: add them with ``TrainState.replace``.

    Args:
      theirs: What ``from_torch`` or another reader returned.
      tx: A distributed optimizer, with the same hyperparameters.
      like: Tree of arrays or shapes, with the structure, shapes and dtypes of our parameters.
      rename: A function or a dictionary from the other framework's names to the paths of our
        leaves, such as ``Dense_0/kernel``; None for what has no place in ours. If it is None
        itself, ``a.b`` becomes ``a/b``.
      transpose: A function of such a path and the number of dimensions, or a dictionary by path, of
        axes: our leaf is ``np.transpose(theirs, axes)``, and so are its moments. For Flax's layers
        ``jda.interop.flax_kernels``. None: nothing is transposed.
      differences: What to do where hyperparameters differ: "raise", or "warn" and go on with those
        of ``tx``.

    Raises:
      TreeError, ShapeError, DtypeError: A leaf is missing, unexpected or of another shape, or would
        lose bits.
      HyperparameterError: The other optimizer had other hyperparameters.

    Example:
      >>> import jax.numpy as jnp, numpy as np, jdistadam as jda
      >>> settings = dict(lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, params=[0])
      >>> ones = np.ones((2, 3), np.float32)
      >>> state_dict = {
      ...     "state": {0: dict(step=5, exp_avg=ones, exp_avg_sq=ones)},
      ...     "param_groups": [settings],
      ... }
      >>> theirs = jda.interop.from_torch(state_dict, {"fc.weight": ones}, ["fc.weight"])
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> tx = jda.distributed(jda.fused_adamw(**theirs.arguments()), mesh=mesh)
      >>> like = {"fc": {"kernel": jax.ShapeDtypeStruct((3, 2), jnp.float32)}}
      >>> state = jda.interop.to_train_state(
      ...     theirs, tx, like, rename={"fc.weight": "fc/kernel"},
      ...     transpose=jda.interop.flax_kernels,
      ... )
      >>> int(state.step), state.params["fc"]["kernel"].shape
      (5, (3, 2))
    """
    check_distributed(tx)
    check_named_state(theirs)
    numbers = _numbers(tx, like, theirs.step)
    names = list(name_map.their_name_by_path(theirs.leaves, rename, like).values())
    hyperparameters.compare(theirs, numbers, like, names, differences)
    ours = to_trees(theirs, like, rename, transpose, [x is None for x in numbers])
    check_kept(ours.params, like, keeps_main=tx.config.policy.main_params.is_stored)
    dtypes = jax.tree.map(lambda x: x.dtype, like)
    new = TrainState.create(ours.params, tx, param_dtypes=dtypes)
    _, opt_state, _ = to_optax_state(new, tx)
    del new  # before another one is made
    opt_state = filled(opt_state, ours, theirs.step)
    return from_optax_state(ours.params, opt_state, tx, param_dtypes=dtypes)


def from_train_state(
    state: TrainState,
    tx: DistributedTransformation,
    names: Sequence[str],
    *,
    rename: Rename = None,
    transpose: Transpose = None,
    groups: Sequence[Group] | None = None,
) -> NamedState:
    """Returns what a train state holds of Adam by the names of another framework.

    The inverse of ``to_train_state`` with the same rename and transpose. Loss scale, model_state
    and rng are not a part of it.

    Args:
      state: A train state made with ``tx``.
      tx: The distributed optimizer.
      names: The other framework's names, in the order in which its optimizer gets its parameters.
      rename: As in ``to_train_state``.
      transpose: As in ``to_train_state``.
      groups: The groups of the other optimizer, as ``NamedState.groups``. None: one for each set of
        hyperparameters of ``tx``, with the learning rate of the next step; of
        ``inject_hyperparams`` one without settings, which ``to_torch`` takes by keyword.

    Raises:
      LayoutError: The state is of another layout than that of ``tx``.
      TreeError, ShapeError: The names do not fit.
      HyperparameterError: Adam of torch's layout has no such hyperparameter.

    Example:
      >>> import jax.numpy as jnp, jdistadam as jda
      >>> tx = jda.distributed(jda.fused_adamw(1e-3), mesh=jax.make_mesh((1,), ("data",)))
      >>> state = TrainState.create({"w": jnp.ones(3)}, tx)
      >>> theirs = from_train_state(state, tx, ["w"])
      >>> jda.interop.to_torch(theirs).optimizer["state"][0]["exp_avg"].tolist()
      [0.0, 0.0, 0.0]
    """
    main_params, opt_state, _ = to_optax_state(state, tx)
    adam = adam_of(opt_state)
    step = int(adam.count)
    numbers = _numbers(tx, state.params, step)
    is_frozen = [x is None for x in numbers]
    ours = AdamTrees(main_params, adam.mu, adam.nu)
    leaves = to_leaves(ours, names, rename, transpose, is_frozen)
    if groups is None:
        order = list(name_map.their_name_by_path(names, rename, state.params).values())
        known = None if is_injected(opt_state) else numbers
        groups = hyperparameters.groups_of(known, order, list(leaves))
    return NamedState(step, leaves, tuple(groups))


def _numbers(tx: DistributedTransformation, like: Params, step: int) -> list[Numbers | None]:
    """The hyperparameters of each leaf; None for frozen ones."""
    return hyperparameters.numbers_of_leaves(tx.config.algorithm.groups, like, step)
