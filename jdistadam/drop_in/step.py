"""One Adam step over a tree: checks it, then makes one kernel call for each mix of dtypes."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdistadam.core import trees
from jdistadam.core.hyperparameters import Hyperparameters
from jdistadam.drop_in import optax_fallback
from jdistadam.drop_in.main_params import MAIN_DTYPES, MainParamsState, main_leaves, split_state
from jdistadam.errors import DtypeError, TreeError
from jdistadam.kernels import reference, sharded_adam
from jdistadam.kernels.adam import Operands, Scalars, Spec, graph_nodes
from jdistadam.kernels.coefficients import coefficient_rows

_LEAVES_A_CALL = 256
"""XLA's time to compile a foreign call grows faster than its operands: a step of 1000 leaves takes
half as long in calls of 256, and runs as fast."""


class TreeLeaf(NamedTuple):
    """One leaf of each tree."""

    grad: Any
    param: Any
    main: Any  # None: the parameter itself is updated; uint16: the remainder beside it
    mu: Any
    nu: Any


# Always inside jit, also for eager calls: the compiler contracts the expressions of the
# coefficients, so that an eager call would otherwise use different bits. One function for all
# optimizers: inject_hyperparams makes a new one at each eager call.
@functools.partial(jax.jit, static_argnames=("mode", "known", "groups", "nu_dtype", "main_kind"))
def tree_step(
    grads: Any,
    state: Any,
    params: Any,
    operands: dict[str, Any],
    *,
    mode: str,
    known: tuple[tuple[str, Any], ...],
    groups: tuple[int, ...],
    nu_dtype: Any,
    main_kind: str | None,
) -> tuple[Any, Any]:
    """Steps every leaf and advances the counts of the state.

    Args:
      grads: Gradients; the structure and shapes of params.
      state: What ``init`` of the optimizer returned, or an earlier step.
      params: Parameters. None where nothing in the formula reads them.
      operands: The hyperparameters that are arrays.
      mode: "step": returns new params. "update": returns optax's updates.
      known: The other hyperparameters, as items.
      groups: For each leaf, 0 if decay applies to it, else 1.
      nu_dtype: Dtype of the second moment.
      main_kind: "float32" or "remainder16" if state is a MainParamsState, else None.

    Returns:
      (new params or updates, new state).
    """
    hyper = Hyperparameters(**dict(known), **operands)
    name = "opt_state" if main_kind is None else "opt_state.inner"
    main_params, inner = split_state(state, main_kind is not None)
    adam_state = _adam_state(inner, name)
    like: Any = params
    if params is None:
        params = like = grads  # the kernel wants an operand, and does not look at it
    _check_trees(grads, adam_state, like, nu_dtype, name)

    treedef: Any = jax.tree.structure(like)
    mains: list[Any] = [None] * len(groups)
    if main_kind is not None:
        mains = main_leaves(treedef, main_params, like, MAIN_DTYPES[main_kind])
    columns = [jax.tree.leaves(x) for x in (grads, params, adam_state.mu, adam_state.nu)]
    leaves = [TreeLeaf(*x) for x in zip(*columns[:2], mains, *columns[2:], strict=True)]
    count = adam_state.count
    new = step_leaves(mode, hyper, count, leaves, groups)

    def tree(values: Sequence[Any]) -> Any:
        return jax.tree.unflatten(treedef, values)

    new_adam = optax.ScaleByAdamState(
        optax.safe_increment(count), tree([x.mu for x in new]), tree([x.nu for x in new])
    )
    new_state: Any = (new_adam, *(advance_schedules(part) for part in inner[1:]))
    if main_kind is not None:
        masked = [optax.MaskedNode() if x.main is None else x.main for x in new]
        new_state = MainParamsState(tree(masked), new_state)
    return tree([x.param for x in new]), new_state


def step_leaves(
    mode: str,
    hyper: Hyperparameters,
    count: jax.Array,
    leaves: Sequence[TreeLeaf],
    groups: Sequence[int],
) -> list[TreeLeaf]:
    """One kernel call for each mix of dtypes: usually one.

    Returns:
      The new leaves. In mode "update", ``param`` is the update.
    """
    new = list(leaves)
    calls: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        if not leaf.grad.size:  # keeps all it has
            new[i] = leaf if mode == "step" else leaf._replace(param=_no_update(leaf))
        else:
            dtypes = tuple(None if x is None else jnp.dtype(x.dtype) for x in leaf)
            calls.setdefault(dtypes, []).append(i)
    rows = coefficient_rows(hyper, count, (True, False))
    if not all(map(_is_left_to_optax, calls)):  # a step without a foreign call stays without one
        rows = graph_nodes(rows)
    scalars = Scalars.plain(rows)
    for dtypes, indices in _chunks(calls):
        mine = [leaves[i] for i in indices]
        mine_groups = tuple(groups[i] for i in indices)
        if _is_left_to_optax(dtypes):
            results = _call_optax(mode, hyper, count, mine, mine_groups)
        else:
            results = _call(mode, scalars, mine, mine_groups, hyper.nesterov)
        for i, leaf in zip(indices, results, strict=True):
            new[i] = leaf
    return new


def _is_left_to_optax(dtypes: Iterable[Any]) -> bool:
    return not set(dtypes).isdisjoint(optax_fallback.DTYPES)


def _chunks(calls: dict[Any, list[int]]) -> Iterator[tuple[Any, list[int]]]:
    """Cuts calls of many leaves into several."""
    for dtypes, indices in calls.items():
        for start in range(0, len(indices), _LEAVES_A_CALL):
            yield dtypes, indices[start : start + _LEAVES_A_CALL]


def _no_update(leaf: TreeLeaf) -> Any:
    return jnp.zeros_like(leaf.grad, dtype=jnp.float32 if leaf.main is not None else None)


def _call(
    mode: str,
    scalars: Scalars,
    leaves: Sequence[TreeLeaf],
    groups: tuple[int, ...],
    nesterov: bool,
) -> list[TreeLeaf]:
    """Steps leaves of equal dtypes in one kernel call."""
    grads, params, mains, mu, nu = zip(*leaves, strict=True)
    new_mains: Sequence[Any]
    out: Sequence[Any]
    if mains[0] is None:
        out_dtype = grads[0].dtype if mode == "update" else None
        spec = Spec(mode, groups, nesterov, out_dtype)
        results = sharded_adam.adam(spec, scalars, Operands(grads, params, mu, nu))
        new_mains, out = mains, results.params or results.out
    elif mains[0].dtype == jnp.uint16:
        spec = Spec("step_split", groups, nesterov)
        results = sharded_adam.adam(spec, scalars, Operands(grads, params, mu, nu, mains))
        new_mains, out = results.out, results.params
    else:
        spec = Spec("step_and_cast", groups, nesterov, params[0].dtype)
        results = sharded_adam.adam(spec, scalars, Operands(grads, mains, mu, nu), params)
        new_mains, out = results.params, results.out
    if mains[0] is not None and mode == "update":
        out = [_difference(*pair) for pair in zip(out, params, strict=True)]
    columns = (grads, out, new_mains, results.mu, results.nu)
    return [TreeLeaf(*new) for new in zip(*columns, strict=True)]


def _call_optax(
    mode: str,
    hyper: Hyperparameters,
    count: jax.Array,
    leaves: Sequence[TreeLeaf],
    groups: tuple[int, ...],
) -> list[TreeLeaf]:
    """Leaves that the kernel does not know, with main parameters or without."""
    has_main = leaves[0].main is not None
    is_split = has_main and leaves[0].main.dtype == jnp.uint16

    def updated(x: TreeLeaf) -> Any:
        if is_split:
            return reference.join(x.param, x.main, jnp)
        return x.main if has_main else x.param

    theirs = [
        optax_fallback.OptaxLeaf(x.grad, updated(x), x.mu, x.nu, group == 0)
        for x, group in zip(leaves, groups, strict=True)
    ]
    results = optax_fallback.step("step" if has_main else mode, hyper, count, theirs)
    new = []
    for leaf, (out, mu, nu) in zip(leaves, results, strict=True):
        main = out if has_main else None
        if is_split:
            rounded, main = reference.split(out, leaf.param.dtype, jnp)
        elif has_main:
            rounded = out.astype(leaf.param.dtype)
        if has_main:
            out = rounded if mode == "step" else _difference(rounded, leaf.param)
        new.append(TreeLeaf(leaf.grad, out, main, mu, nu))
    return new


def _difference(new: jax.Array, old: jax.Array) -> jax.Array:
    """In float32, so that old + difference lands exactly on new."""
    return new.astype(jnp.float32) - old.astype(jnp.float32)


def _check_trees(
    grads: Any, adam_state: optax.ScaleByAdamState, params: Any, nu_dtype: Any, name: str
) -> None:
    allowed = (*trees.STORAGE_DTYPES, *optax_fallback.DTYPES)
    trees.check_dtypes(params, name="params", allowed=allowed)
    trees.check_same_shapes(grads, params, name="grads", like_name="params")
    trees.check_dtypes(grads, name="grads", allowed=allowed, action="Cast the gradients.")
    for path, grad, param in zip(
        trees.paths(grads, "grads"), jax.tree.leaves(grads), jax.tree.leaves(params), strict=True
    ):
        if jnp.iscomplexobj(grad) and not jnp.iscomplexobj(param):
            raise DtypeError(
                path,
                "complex, and its parameter is not: the imaginary part would be lost",
                got=grad.dtype,
                expected=f"a real dtype, as that of the parameter, {param.dtype}",
                action="Take jnp.real, or make the loss real.",
            )
    for part in ("mu", "nu"):
        tree, part_name = getattr(adam_state, part), f"{name}[0].{part}"
        trees.check_same_shapes(tree, params, name=part_name, like_name="params")
        trees.check_dtypes(tree, name=part_name, allowed=allowed, action=f"Cast {part}.")
    ours = jax.tree.map(
        lambda x: jnp.zeros((), nu_dtype) if x.dtype in optax_fallback.DTYPES else x, adam_state.nu
    )
    action = f"Cast nu to {nu_dtype}, or set nu_dtype."
    trees.check_dtypes(ours, name=f"{name}[0].nu", allowed=(nu_dtype,), action=action)


def _adam_state(state: Any, name: str) -> optax.ScaleByAdamState:
    if not (isinstance(state, tuple) and state and isinstance(state[0], optax.ScaleByAdamState)):
        raise TreeError(
            name,
            "not a state of this optimizer",
            got=type(state).__name__,
            expected="the state that init(params) returned",
            action="Pass opt_state as init, update or step returned it.",
        )
    return state[0]


def advance_schedules(state: Any) -> Any:
    """Increments the count of every schedule in a part of optax's state."""
    if isinstance(state, optax.MaskedState):
        return state._replace(inner_state=advance_schedules(state.inner_state))
    if "count" in getattr(state, "_fields", ()):
        return state._replace(count=optax.safe_increment(state.count))
    return state
