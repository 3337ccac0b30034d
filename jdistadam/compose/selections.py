"""``optax.masked``, ``partition`` and ``named_chain`` with the fused step.

The optimizer of each selection of leaves gets these leaves, and what happens to their updates
afterwards: one kernel call for each, as large as its leaves.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import masked as optax_masked  # also if a user replaces them
from optax import partition as optax_partition

from jdistadam.compose.chain import chain
from jdistadam.compose.wrappers import check_state_of
from jdistadam.core import trees
from jdistadam.core.algorithm import for_each_leaf, is_function
from jdistadam.core.trees import Grads, OptState, Params
from jdistadam.distributed.transformation import DistributedTransformation
from jdistadam.drop_in.effects import Effect, How, effect_of
from jdistadam.drop_in.parts import Part
from jdistadam.drop_in.step import difference, widened
from jdistadam.drop_in.transformation import (
    NO_OPTIMIZER,
    FullResult,
    FullStep,
    FusedTransformation,
    has_full_step,
    made_of,
    takes_all,
    with_state,
)
from jdistadam.errors import PolicyError, TreeError


def masked(inner: optax.GradientTransformation, mask: Any) -> optax.GradientTransformationExtraArgs:
    """``optax.masked`` with a ``step``, if ``inner`` has one.

    As in optax, the updates of other leaves are their gradients: give those to another
    transformation, or use ``partition``. Around ``optax.scale`` and others that multiply by a
    number, and around ``jda.add_decayed_weights``, it is a part that ``jda.chain`` fuses.

    Args:
      inner: A transformation.
      mask: A tree of bools that is a prefix of params, or a function of params that returns one.

    Returns:
      A ``FusedTransformation`` with optax's state, or optax's transformation.

    Raises:
      PolicyError: ``inner`` is distributed.

    Example:
      >>> import jax.numpy as jnp, jdistadam as jda
      >>> tx = jda.chain(
      ...     jda.scale_by_adam(),
      ...     jda.masked(jda.add_decayed_weights(0.1), {"w": True, "b": False}),
      ...     jda.masked(optax.scale(0.5), {"w": False, "b": True}),
      ...     optax.scale_by_learning_rate(1e-2),
      ... )
      >>> params = {"w": jnp.ones(3), "b": jnp.ones(3)}
      >>> params, state = tx.step(params, tx.init(params), params)
      >>> {name: round(float(x[0]), 4) for name, x in params.items()}
      {'b': 0.995, 'w': 0.989}
    """
    theirs = optax_masked(inner, mask)
    effect = effect_of(inner)
    if effect is not None and effect.mask is None:
        return Part.of(theirs, effect._replace(mask=mask))

    def state_of(states: dict[Any, Any]) -> optax.MaskedState:
        return optax.MaskedState(states[True])

    def states_of(state: Any) -> dict[Any, Any]:
        check_state_of("masked", optax.MaskedState, state)
        return {True: state.inner_state}

    tx = _Selections("mask", {True: inner}, mask, theirs.init, state_of, states_of)
    return tx.transformation() or theirs


def partition(
    transforms: Mapping[Hashable, optax.GradientTransformation], param_labels: Any
) -> FusedTransformation:
    """``optax.partition`` (``multi_transform``) with a ``step``: one optimizer for each label.

    The ``step`` of optimizers that have one is fused. Leaves of ``optax.set_to_zero`` are not
    touched; those of other transformations get their updates added. To train all leaves with one
    kernel call, use ``param_labels`` and ``groups`` of ``fused_adamw``. Each label may have its own
    ``jda.MultiSteps`` or ``jda.apply_if_finite``; then no factors may follow in a ``jda.chain``.

    Args:
      transforms: The transformation of each label.
      param_labels: A tree of labels that is a prefix of params, or a function of params that
        returns one.

    Returns:
      A ``FusedTransformation`` with optax's state.

    Raises:
      PolicyError: A transformation is distributed.

    Example:
      >>> import jax.numpy as jnp, jdistadam as jda
      >>> tx = jda.partition(
      ...     {"trained": jda.fused_adamw(1e-2), "frozen": optax.set_to_zero()},
      ...     {"head": "trained", "body": "frozen"},
      ... )
      >>> params = {"head": jnp.ones(3), "body": jnp.ones(3)}
      >>> params, state = tx.step(params, tx.init(params), params)
      >>> {name: round(float(x[0]), 4) for name, x in params.items()}
      {'body': 1.0, 'head': 0.99}
    """
    theirs = optax_partition(transforms, param_labels)

    def state_of(states: dict[Any, Any]) -> optax.PartitionState:
        return optax.PartitionState({k: optax.MaskedState(x) for k, x in states.items()})

    def states_of(state: Any) -> dict[Any, Any]:
        check_state_of("partition", optax.PartitionState, state)
        return {k: x.inner_state for k, x in state.inner_states.items()}

    txs = dict(transforms)
    tx = _Selections("param_labels", txs, param_labels, theirs.init, state_of, states_of)
    if fused := tx.transformation():
        return fused
    plain = with_state(chain(theirs), lambda x: x[0], lambda x: (x,))
    plain._of_another = tx.why_not_fused or plain._of_another
    return plain


def named_chain(*args: tuple[str, optax.GradientTransformation]) -> FusedTransformation:
    """``optax.named_chain`` with the ``step`` of ``jda.chain``.

    Args:
      *args: Pairs of a name and a transformation.

    Returns:
      A ``FusedTransformation``, whose state is a dictionary by name.

    Raises:
      ValueError: Two names are equal.
      PolicyError: An optimizer is distributed, or as for ``chain``.

    Example:
      >>> import jax.numpy as jnp, jdistadam as jda
      >>> clip = optax.clip_by_global_norm(1.0)
      >>> tx = jda.named_chain(("clip", clip), ("adamw", jda.fused_adamw(1e-2)))
      >>> params = {"w": jnp.ones(3)}
      >>> params, state = tx.step({"w": jnp.full(3, 100.0)}, tx.init(params), params)
      >>> list(state), round(float(params["w"][0]), 4)
      (['clip', 'adamw'], 0.99)
    """
    optax.named_chain(*args)  # checks the names
    txs = dict(args)
    _check_not_distributed("named_chain", txs)

    def by_name(states: Any) -> Any:
        return collections.OrderedDict(zip(txs, states, strict=True))

    def in_order(state: Any) -> tuple[OptState, ...]:
        if not isinstance(state, Mapping) or state.keys() != txs.keys():
            got = list(state) if isinstance(state, Mapping) else type(state).__name__
            raise TreeError(
                f"opt_state: not a state of this named_chain: got {got}, expected {list(txs)}. "
                "Make it with init(params) of this optimizer."
            )
        return tuple(state[name] for name in txs)

    return with_state(chain(*txs.values()), by_name, in_order)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)  # by identity, like functions
class _Selections:
    """The optimizers of some leaves each, by label. Leaves of other labels get their gradients."""

    argument: str
    txs: dict[Any, optax.GradientTransformation]
    labels: Any  # a tree, or a function of one
    init: Callable[[Params], OptState]
    state_of: Callable[[dict[Any, Any]], OptState]  # of the states of all optimizers
    states_of: Callable[[Any], dict[Any, Any]]

    def transformation(self) -> FusedTransformation | None:
        """The functions as an optimizer; None if none has a fused step."""
        _check_not_distributed("masked" if self.argument == "mask" else "partition", self.txs)
        fused: list[Any] = [tx for tx in self.txs.values() if has_full_step(tx)]
        if not fused:
            return None
        tx = made_of(self.init, self.full_step)
        tx.merges = all(map(takes_all, fused))
        tx.is_direction = all(x.is_direction for x in fused)
        tx._of_another = self.why_not_fused
        return tx

    @property
    def why_not_fused(self) -> str:
        """Why one of our optimizers has no fused step; "" if all have one."""
        txs = [tx for tx in self.txs.values() if isinstance(tx, FusedTransformation)]
        whys = (tx.why_not_fused for tx in txs)
        return next((why for why in whys if why not in ("", NO_OPTIMIZER)), "")

    def full_step(
        self, grads: Grads, state: Any, params: Params, extra: Any, how: How
    ) -> FullResult:
        """Takes the step of each optimizer with its leaves."""
        if how.mode == "step":
            trees.check_given(params)
            trees.check_same_shapes(grads, params, name="grads", like_name="params")
        label_tree = self.labels(grads) if is_function(self.labels) else self.labels
        kind: Any = dict(kind=object, what="label", expected="a label")
        labels = for_each_leaf(label_tree, grads, self.argument, **kind)
        states, made = self.states_of(state), dict[Any, FullResult]()
        for label in dict.fromkeys((*self.txs, *labels)):
            step = _step_of(self.txs.get(label, optax.identity()))
            own = [_selected(label_tree, label, tree) for tree in (grads, params)]
            its_state = states[label] if label in self.txs else optax.EmptyState()
            its_how = how.of([x == label for x in labels])
            made[label] = step(own[0], its_state, own[1], extra, its_how)
        leaves = {label: iter(jax.tree.leaves(result.params)) for label, result in made.items()}
        treedef: Any = jax.tree.structure(grads)
        whole = treedef.unflatten([next(leaves[label]) for label in labels])
        new_state = self.state_of({label: made[label].state for label in self.txs})
        norms = [result.norms for result in made.values() if result.norms]
        return FullResult(whole, new_state, _joined(norms) if how.norms else None)


def _selected(label_tree: Any, label: Any, tree: Any) -> Any:
    """A tree without the leaves of other labels, as ``optax.masked`` makes it."""
    if tree is None:
        return None
    return jax.tree.map(lambda x, y: y if x == label else optax.MaskedNode(), label_tree, tree)


def _step_of(tx: Any) -> FullStep:
    """The step of any transformation."""
    if takes_all(tx):
        return tx.full_step

    def full_step(grads: Grads, state: Any, params: Params, extra: Any, how: How) -> FullResult:
        if has_full_step(tx) and how.mode == "step":
            return tx.full_step(grads, state, params, extra, how)
        is_zero = effect_of(tx) == Effect("zero", 0.0) and how.mode == "step"
        if is_zero and all(effect.kind != "decay" for effect in how.effects):
            return FullResult(params, state, None)
        grads = how.scaled(grads)
        updates, new = optax.with_extra_args_support(tx).update(grads, state, params, **extra)
        out = how.applied(updates, params)
        new = trees.keep_if(how.is_skipped, state, new)
        if not how.norms:
            return FullResult(out, new, None)
        kinds = ("grad", grads), ("param", out), ("update", jax.tree.map(difference, out, params))
        wide = {kind: jax.tree.map(widened, x) for kind, x in kinds}
        norms = {f"{kind}_norm": jnp.float32(optax.tree.norm(x)) for kind, x in wide.items()}
        return FullResult(out, new, norms)

    return full_step


def _joined(norms: Sequence[dict[str, jax.Array]]) -> dict[str, jax.Array]:
    """The norms of all leaves from those of selections."""
    if len(norms) == 1:
        return norms[0]
    return {k: jnp.sqrt(sum(jnp.square(x[k]) for x in norms)) for k in norms[0]}


def _check_not_distributed(function: str, txs: Mapping[Any, Any]) -> None:
    """Raises PolicyError for a distributed optimizer, which steps all leaves together."""
    for label, tx in txs.items():
        if isinstance(tx, DistributedTransformation):
            raise PolicyError(
                f"{function}[{label!r}]: a distributed optimizer steps all leaves in one program: "
                f"got {type(tx).__name__}, expected an optimizer of one device. To freeze leaves "
                "or train them otherwise, pass param_labels and groups to the fused_adamw that is "
                "distributed; in place of named_chain, use jda.chain."
            )
