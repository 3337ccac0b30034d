"""One Adam step over a tree: checks it, then makes one kernel call per mix of dtypes.

Leaves of dtypes that the kernel does not support are updated as optax does.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import add_decayed_weights as optax_add_decayed_weights  # also if a user replaces it
from optax import scale_by_adam as optax_scale_by_adam
from optax import scale_by_learning_rate as optax_scale_by_learning_rate

from jdistadam.compat import inlined_jit
from jdistadam.core import trees
from jdistadam.core.codecs import HALVES, Codec, codec_of, moment_leaves
from jdistadam.core.collectives import varying_axes
from jdistadam.core.hyperparameters import (
    Hyperparameters,
    at_count,
    coefficient_rows,
    value_of,
)
from jdistadam.core.storage import Storage, main_codec_of
from jdistadam.core.trees import Grads, OptState, Params
from jdistadam.drop_in.low_precision import RoundingState
from jdistadam.drop_in.state import (
    MainParamsState,
    check_trees,
    is_integer,
    main_leaves,
    nan_if_changed,
    optax_takes,
    parts_of_state,
)
from jdistadam.errors import DtypeError, PolicyError
from jdistadam.kernels import reference
from jdistadam.kernels.call import Arrays, KernelCall, run_sharded
from jdistadam.kernels.operands import Rounding, RoundingSpec, Scalars, Spec

_LEAVES_A_CALL = 256
"""The time in which XLA compiles a foreign call grows faster than its number of operands: a step of
1000 leaves takes half as long in calls of 256, and runs as fast."""
_BYTES_A_CALL = 256 << 20
"""Of first moments, before they are cut: XLA frees the gradients of a call while others wait for
theirs, and gathers new parameters beside other calls."""


class TreeLeaf(NamedTuple):
    """One leaf of each tree."""

    grad: Any
    param: Any
    main: Any  # what Codec stores with the parameter, or None
    mu: Any
    nu: Any


class TreeResult(NamedTuple):
    """The result of a step.

    Attributes:
      out: New params, or updates.
      state: The new state.
      squares: With norms, the sums of squares of gradients, new params and updates.
    """

    out: Any
    state: OptState
    squares: Any

    @property
    def norms(self) -> dict[str, jax.Array] | None:
        """The square roots by name, if there are squares."""
        if self.squares is None:
            return None
        pairs = zip(reference.KINDS, jnp.sqrt(self.squares), strict=True)
        return {f"{kind}_norm": x for kind, x in pairs}


# Always inside jit, even for eager calls: [Note: coefficients in optax's own expressions]. One
# function for all optimizers: inject_hyperparams makes a new one for each eager call. Inlined in a
# larger program, where the kernel call sees what makes its gradients (kernels/narrow.py).
@functools.partial(
    inlined_jit, static_argnames=("mode", "known", "rows", "main_kind", "storage", "norms")
)
def tree_step(
    grads: Grads,
    state: OptState,
    params: Params,
    numbers: tuple[dict[str, Any], ...],
    schedules: tuple[dict[str, Any], ...],
    is_skipped: Any,
    grad_factor: Any,
    *,
    mode: str,
    known: tuple[tuple[tuple[str, Any], ...], ...],
    rows: tuple[int | None, ...],
    main_kind: Codec,
    storage: Storage,
    norms: bool,
) -> TreeResult:
    """Steps every leaf and advances the counts of the state.

    Args:
      grads: Gradients; the structure and shapes of params.
      state: The result of the optimizer's ``init`` or of an earlier step.
      params: Parameters. None if nothing in the formula reads them.
      numbers: The learning rate, weight decay and array hyperparameters of each group.
      schedules: The schedules of each group, as ``schedules_now`` returns them.
      is_skipped: In mode "step", whether to change nothing; None: to step.
      grad_factor: What gradients are multiplied by, float32; None: by nothing.
      mode: "step": returns new params. "update": returns optax's updates.
      known: The other hyperparameters, as items.
      rows: The coefficient row of each leaf: twice the number of its group, plus one if decay does
        not apply. None for a frozen leaf, which the trees lack.
      main_kind: How main parameters are stored. If they are, state is a MainParamsState.
      storage: How moments are stored and rounded. Stochastically: state is a RoundingState.
      norms: In mode "step", whether to sum squares.
    """
    trees.check_memory(grads=grads, opt_state=state, params=params)
    now: list[dict[str, Any]] = [
        {k: functools.partial(_fixed, x) for k, x in group.items()} for group in schedules
    ]
    hypers = [
        Hyperparameters(**dict(x), **y, **z) for x, y, z in zip(known, numbers, now, strict=True)
    ]
    name, key, main_params, inner = parts_of_state(state, main_kind, storage)
    adam_state = inner[0]
    if storage.is_coding:  # [Note: boxes]
        mu, nu = map(trees.codes_inside, (adam_state.mu, adam_state.nu))
        adam_state = adam_state._replace(mu=mu, nu=nu)
    check_trees(grads, adam_state, params, state_name=name, storage=storage)
    if params is None:
        params = grads  # the kernel needs an operand, but does not read it
    mains = main_leaves(main_kind, main_params, params)
    param_leaves = jax.tree.leaves(params)
    grad_leaves = nan_if_changed(jax.tree.leaves(grads), param_leaves, mains)
    moments = map(moment_leaves, (adam_state.mu, adam_state.nu))
    columns = zip(grad_leaves, param_leaves, mains, *moments, strict=True)
    leaves = [TreeLeaf(*x) for x in columns]
    if storage.is_any:
        _check_quantized(trees.paths(params, "params"), leaves, storage.is_stochastic, mode)
    count = adam_state.count
    rows_by_leaf = {i: row for i, row in enumerate(rows) if row is not None}
    new, squares = _step_leaves(
        leaves,
        rows_by_leaf,
        mode=mode,
        hypers=hypers,
        count=count,
        key=key,
        is_skipped=is_skipped,
        norms=norms,
        grad_factor=grad_factor,
    )
    steps = [count, *inner[1:]]
    next_steps = trees.keep_if(is_skipped, steps, _next_steps(steps))
    out, new_state = _new_trees(params, new, next_steps, main_kind=main_kind)
    state = new_state if key is None else RoundingState(key, new_state)
    return TreeResult(out, state, squares)


def _next_steps(steps: list[Any]) -> list[Any]:
    """Adam's count and those of schedules, a step later."""
    count, *others = steps
    return [optax.safe_increment(count), *map(advance_schedules, others)]


def _fixed(schedule: Any, count: Any) -> Any:
    """The value of a schedule, which has its own count."""
    del count
    return value_of(schedule)


def _check_quantized(
    paths: Sequence[str], leaves: Sequence[TreeLeaf], is_stochastic: bool, mode: str
) -> None:
    """Raises if a leaf cannot be stepped with codes or stochastic rounding."""
    for path, leaf in zip(paths, leaves, strict=True):
        is_half = leaf.main is None and leaf.param.dtype in HALVES
        if is_stochastic and mode == "update" and is_half:
            raise PolicyError(
                f"{path}: an update cannot round the parameter that it is added to: "
                f'got {leaf.param.dtype} without main parameters, rounding="stochastic", '
                "expected tx.step, which rounds parameters stochastically, or main parameters. "
                "Call "
                "tx.step in place of tx.update and optax.apply_updates, or set main_params_dtype."
            )
        dtypes = TreeLeaf(*map(_dtype, leaf))
        is_quantized = _is_quantized(dtypes, mode=mode, is_stochastic=is_stochastic)
        if is_quantized and _is_left_to_optax(dtypes):
            raise DtypeError(
                f"{path}: quantized or stochastically rounded moments cannot be updated by "
                "optax's formula: "
                f"got gradients of {leaf.grad.dtype} for a parameter of {leaf.param.dtype}, "
                "expected float32, bfloat16 or float16. Cast the gradients."
            )


def _new_trees(
    like: Params,
    new: Sequence[TreeLeaf],
    steps: Sequence[Any],
    *,
    main_kind: Codec,
) -> tuple[Any, OptState]:
    """Puts new leaves into trees like ``like``; returns new params or updates, and the state."""
    treedef: Any = jax.tree.structure(like)

    def tree(values: Sequence[Any]) -> Any:
        return jax.tree.unflatten(treedef, values)

    moments = [tree([x.mu for x in new]), tree([x.nu for x in new])]
    new_adam = optax.ScaleByAdamState(steps[0], *map(trees.codes_outside, moments))
    new_state: Any = (new_adam, *steps[1:])
    if main_kind.is_stored:
        masked = [optax.MaskedNode() if x.main is None else x.main for x in new]
        new_state = MainParamsState(tree(masked), new_state)
    return tree([x.param for x in new]), new_state


def _step_leaves(
    leaves: Sequence[TreeLeaf],
    rows_by_leaf: dict[int, int],
    *,
    mode: str,
    hypers: Sequence[Hyperparameters],
    count: jax.Array,
    key: Any,
    is_skipped: Any,
    norms: bool,
    grad_factor: Any,
) -> tuple[list[TreeLeaf], Any]:
    """One kernel call per mix of dtypes and of axes of a ``jax.shard_map``, usually one.

    With a key it rounds stochastically.

    ``rows_by_leaf``: the coefficient rows, two for each of ``hypers``, by the leaf's number in a
    tree with frozen leaves. Random bits depend on that number.

    Returns:
      The new leaves, and their squares or None. In mode "update", ``param`` is the update.
    """
    new, squares = list(leaves), list[Any]()
    ids, rows = list(rows_by_leaf), list(rows_by_leaf.values())
    calls: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        dtypes = TreeLeaf(*map(_dtype, leaf))
        if _is_left_to_optax(dtypes):
            calls.setdefault((dtypes, rows[i] // 2, None), []).append(i)
        elif leaf.grad.size:
            # All results of a call vary over the same axes of a shard_map.
            calls.setdefault((dtypes, None, varying_axes(leaf)), []).append(i)
        else:  # the leaf stays as it is
            new[i] = leaf if mode == "step" else leaf._replace(param=_no_update(leaf))
    scalars = Scalars.plain(coefficient_rows(hypers, count))
    if grad_factor is not None:
        scalars = scalars._replace(inv_scale=grad_factor)
    if is_skipped is not None:
        scalars = scalars._replace(found_inf=is_skipped)
    for (dtypes, group, _), indices in _chunks(calls, leaves):
        call_leaves = [leaves[i] for i in indices]
        call_rows = tuple(rows[i] for i in indices)
        if group is not None:
            hyper, decays = hypers[group], [row % 2 == 0 for row in call_rows]
            if grad_factor is not None:
                grads = [(x.grad * grad_factor).astype(x.grad.dtype) for x in call_leaves]
                call_leaves = [x._replace(grad=g) for x, g in zip(call_leaves, grads, strict=True)]
            # The derivative of a skipped step must be finite to be multiplied by zero.
            ones = jax.tree.map(jnp.ones_like, call_leaves)
            given = trees.keep_if(is_skipped, ones, call_leaves)
            results = _call_optax(given, decays, mode=mode, hyper=hyper, count=count)
            results = trees.keep_if(is_skipped, call_leaves, results)
            of_leaves = _squares(call_leaves, results) if norms else None
        else:
            spec, rounding = Spec(mode, call_rows, hypers[0].flags), None
            if _is_quantized(dtypes, mode=mode, is_stochastic=key is not None):
                rounding = Rounding(jnp.zeros(2, jnp.uint32) if key is None else key, count)
                static = RoundingSpec(key is not None, tuple(ids[i] for i in indices))
                spec = dataclasses.replace(spec, rounding=static)
            results, of_leaves = _call(spec, scalars, call_leaves, rounding, norms)
        squares += [of_leaves] if norms else []
        for i, leaf in zip(indices, results, strict=True):
            new[i] = leaf
    if not norms:
        return new, None
    none = jnp.zeros((1, len(reference.KINDS)), jnp.float32)
    return new, reference.pairwise_sum(jnp.concatenate(squares) if squares else none, jnp)


def _squares(old: Sequence[TreeLeaf], new: Sequence[TreeLeaf]) -> jax.Array:
    """The sums of squares of leaves that optax steps, shape (leaves, 3)."""
    kind = main_codec_of(old[0].main)
    exact = [[kind.join(x.param, x.main, jnp) for x in leaves] for leaves in (old, new)]
    rows = [
        (jnp.asarray(leaf.grad), after, difference(after, before))
        for leaf, before, after in zip(old, *exact, strict=True)
    ]
    return jnp.stack(
        [
            jnp.stack([jnp.sum(jnp.square(jnp.abs(widened(x))).astype(jnp.float32)) for x in row])
            for row in rows
        ]
    )


def _dtype(x: Any) -> Any:
    """The dtype or format of an array, by which calls are separated; None for None."""
    return x if x is None else codec_of(x) if hasattr(x, "codes") else jnp.dtype(x.dtype)


def _is_quantized(dtypes: TreeLeaf, *, mode: str, is_stochastic: bool) -> bool:
    """Whether any array of these leaves is stored in codes or rounded stochastically."""
    stored = [dtypes.mu, dtypes.nu]
    if mode == "step" and dtypes.main is None:
        stored.append(dtypes.param)
    is_coded = any(isinstance(x, Codec) for x in stored)
    return is_coded or (is_stochastic and any(x in HALVES for x in stored))


def _is_left_to_optax(dtypes: TreeLeaf) -> bool:
    """Whether optax instead of the kernel steps leaves of these dtypes.

    A uint16 remainder does not count as such an integer: it belongs to a bfloat16 parameter.
    """
    stored = (dtypes.grad, dtypes.param, dtypes.mu, dtypes.nu)
    return any(optax_takes(x) for x in stored if not isinstance(x, Codec))


def _chunks(
    calls: dict[Any, list[int]], leaves: Sequence[TreeLeaf]
) -> Iterator[tuple[Any, list[int]]]:
    """Splits calls of many leaves, or of large ones, into several."""
    for key, indices in calls.items():
        moments = (getattr(leaves[i].mu, "codes", leaves[i].mu) for i in indices)
        nbytes = (x.size * x.dtype.itemsize for x in moments)
        runs = trees.runs_within(indices, nbytes, _BYTES_A_CALL, most_items=_LEAVES_A_CALL)
        yield from ((key, run) for run in runs)


def _no_update(leaf: TreeLeaf) -> Any:
    return jnp.zeros_like(leaf.grad, dtype=jnp.float32 if leaf.main is not None else None)


def _call(
    spec: Spec,
    scalars: Scalars,
    leaves: Sequence[TreeLeaf],
    rounding: Rounding | None,
    norms: bool,
) -> tuple[list[TreeLeaf], Any]:
    """Steps leaves of equal dtypes in one kernel call; ``spec`` assumes no main parameters."""
    arrays = Arrays(*zip(*leaves, strict=True))
    kept, params = main_codec_of(arrays.main[0]), arrays.params
    call = KernelCall.of(kept, spec, scalars, arrays, params[0].dtype, rounding)
    stepped = run_sharded(call, params, with_squares=norms)
    new = stepped.params
    if kept.is_stored and spec.mode == "update":
        new = [difference(*pair) for pair in zip(new, params, strict=True)]
    mains = stepped.main_params or arrays.main
    columns = (arrays.grads, new, mains, stepped.mu, stepped.nu)
    return [TreeLeaf(*leaf) for leaf in zip(*columns, strict=True)], stepped.squares


def _call_optax(
    leaves: Sequence[TreeLeaf],
    decays: Sequence[bool],
    *,
    mode: str,
    hyper: Hyperparameters,
    count: jax.Array,
) -> list[TreeLeaf]:
    """Steps leaves that the kernel does not support, with main parameters or without."""
    kind = main_codec_of(leaves[0].main)
    exact = [leaf._replace(param=kind.join(leaf.param, leaf.main, jnp)) for leaf in leaves]
    results = _optax_step("step" if kind.is_stored else mode, hyper, count, exact, decays)
    new_leaves = []
    for leaf, (new, mu, nu) in zip(leaves, results, strict=True):
        main = None
        if kind.is_stored:
            new, main = kind.split(new, leaf.param.dtype, jnp)
            new = new if mode == "step" else difference(new, leaf.param)
        new_leaves.append(TreeLeaf(grad=leaf.grad, param=new, main=main, mu=mu, nu=nu))
    return new_leaves


def _optax_step(
    mode: str,
    hyper: Hyperparameters,
    count: jax.Array,
    leaves: Sequence[TreeLeaf],
    decays: Sequence[bool],
) -> list[tuple[Any, Any, Any]]:
    """Returns optax's (new parameter or update, mu, nu) of leaves without main parameters."""
    grads, params, _, mu, nu = (list(column) for column in zip(*leaves, strict=True))
    rate = hyper.learning_rate
    tx = optax.chain(
        optax_add_decayed_weights(hyper.l2, decays),
        optax_scale_by_adam(hyper.b1, hyper.b2, hyper.eps, hyper.eps_root, nesterov=hyper.nesterov),
        _with_decay(at_count(hyper.weight_decay, count), decays, hyper.cautious_weight_decay),
        optax_scale_by_learning_rate(rate),
    )
    empty = optax.EmptyState()
    count_of_adam = count
    if not hyper.bias_correction:
        # optax has no such switch; after this many steps 1 - b^t is 1, for b up to 1 - 1e-7
        count_of_adam = jnp.asarray(jnp.iinfo(jnp.int32).max - 1, jnp.int32)
    masked = optax.MaskedState(empty)
    of_rate = optax.ScaleByScheduleState(count) if callable(rate) else empty
    state = (masked, optax.ScaleByAdamState(count_of_adam, mu, nu), masked, of_rate)
    updates, (_, adam, _, _) = tx.update(grads, state, params)
    out = updates if mode == "update" else _apply(params, updates)
    # scale_by_adam was not given mu_dtype: the state has it. Only in a new state is the mu of
    # integers an integer: optax adds fractions to it, and so do the following steps.
    new_mu = [
        new.astype(new.dtype if is_integer(old) else old.dtype)
        for new, old in zip(adam.mu, mu, strict=True)
    ]
    return list(zip(out, new_mu, adam.nu, strict=True))


def _with_decay(
    weight_decay: Any, decays: Sequence[bool], is_cautious: bool
) -> optax.GradientTransformation:
    """``optax.add_decayed_weights``; if cautious, only for updates with the parameter's sign."""
    if not is_cautious:
        return optax_add_decayed_weights(weight_decay, decays)

    def add(u: Any, p: Any) -> Any:
        points_apart = jnp.real(u * jnp.conj(p)) < 0
        return jnp.where(points_apart, u, u + weight_decay * p)

    decay = optax.stateless(lambda updates, params: jax.tree.map(add, updates, params))
    return optax.masked(decay, decays)


def _apply(params: Sequence[Any], updates: Sequence[Any]) -> Any:
    """``optax.apply_updates``, which truncates p + u if p is an integer.

    The compiler would compute p - rate * x with one rounding instead of two. If p + u is near an
    integer, the truncated result would differ from that of ``update`` followed by
    ``apply_updates``. The compiler must not see both together. (XLA of jax 0.10 does on CPU.)
    """
    separate = [
        jax.lax.optimization_barrier(u) if is_integer(p) else u
        for p, u in zip(params, updates, strict=True)
    ]
    return optax.apply_updates(params, separate)


def difference(new: Any, old: Any) -> Any:
    """The update, from operands that are not rounded: float32, or the dtype of wider ones.

    For params of 16 bits, old + difference is exactly new.
    """
    if jnp.issubdtype(new.dtype, jnp.integer):  # without overflow of unsigned numbers
        is_up, up, down = new >= old, new - old, old - new
        return jnp.where(is_up, up.astype(jnp.float32), -down.astype(jnp.float32))
    return widened(new) - widened(old)


def widened(x: Any) -> Any:
    """An array in float32, or in its own dtype if that is wider."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def advance_schedules(state: OptState) -> OptState:
    """Increments the count of every schedule in a part of optax's state."""
    if isinstance(state, optax.MaskedState):
        return state._replace(inner_state=advance_schedules(state.inner_state))
    if "count" in getattr(state, "_fields", ()):
        return state._replace(count=optax.safe_increment(state.count))
    return state
