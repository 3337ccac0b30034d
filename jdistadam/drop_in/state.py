"""The state of a drop-in optimizer: making and checking it, and the trees of a step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdistadam.core import collectives, trees
from jdistadam.core.algorithm import Algorithm
from jdistadam.core.codecs import FLOAT32, REMAINDER16, Codec, is_codes
from jdistadam.core.hyperparameters import schedule_now
from jdistadam.core.storage import MOMENTS, Storage, check_main_dtype, has_main_param, main_codec_of
from jdistadam.core.trees import Grads, OptState, Params
from jdistadam.drop_in import low_precision
from jdistadam.drop_in.low_precision import check_coded
from jdistadam.errors import DtypeError, TreeError
from jdistadam.kernels.sharded_adam import reshard_as

OPTAX_DTYPES = tuple(jnp.dtype(name) for name in ("float64", "complex64", "complex128"))
"""Dtypes that are left to optax wherever they occur."""

INTEGERS = tuple(jnp.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64))
"""Parameter dtypes that are left to optax with their gradients and moments."""

_FLOATS = (*trees.STORAGE_DTYPES, *OPTAX_DTYPES)


def is_integer(x: Any) -> bool:
    """Whether an array has one of the dtypes in ``INTEGERS``."""
    return x.dtype in INTEGERS


def optax_takes(dtype: jnp.dtype) -> bool:
    """Whether optax steps a leaf whose parameter, gradient or moments have this dtype."""
    return dtype in OPTAX_DTYPES or dtype in INTEGERS


class MainParamsState(NamedTuple):
    """The state of an optimizer that keeps main parameters.

    Attributes:
      main_params: The float32 parameters that the optimizer updates; for "remainder16" only their
        low 16 bits, uint16. Leaves that do not have 16 bits are ``optax.MaskedNode()``, because
        there the params themselves are updated.
      inner: The state that optax would have for float32 params.
    """

    main_params: Any
    inner: Any


def new_main_params(kind: Codec, params: Params) -> Any:
    """Returns the main parameters of a new state, equal to the params."""

    def new(path: str, param: Any) -> Any:
        if not has_main_param(kind, param):
            return optax.MaskedNode()
        if not kind.is_remainder:
            return jnp.asarray(param, jnp.float32)
        check_main_dtype(kind, path, param.dtype)
        return trees.placed_like(param, jnp.zeros_like(param, kind.dtype))

    leaves = itertools.starmap(new, trees.named_leaves(params, "params"))
    return jax.tree.unflatten(jax.tree.structure(params), leaves)


def _split_state(state: OptState, kind: Codec) -> tuple[Any, Any]:
    """Returns the main parameters or None, and optax's own state."""
    if kind.is_stored != isinstance(state, MainParamsState):
        expected = "MainParamsState" if kind.is_stored else "optax's own state"
        raise TreeError(
            f"opt_state: does not fit main_params_dtype: got {type(state).__name__}, "
            f"expected {expected}. Make it with init(params) of this optimizer."
        )
    return (state.main_params, state.inner) if kind.is_stored else (None, state)


def main_leaves(kind: Codec, main_params: Any, params: Params) -> list[Any]:
    """Returns the main parameter of each leaf of params, or None if it has none."""
    treedef: Any = jax.tree.structure(params)
    if not kind.is_stored:
        return [None] * treedef.num_leaves
    try:
        mains = treedef.flatten_up_to(main_params)
    except (ValueError, TypeError):
        raise _differs(main_params, params) from None
    named = trees.named_leaves(params, "opt_state.main_params")
    for (name, param), main in zip(named, mains, strict=True):
        _check_main(name, kind, main, param)
    return [None if isinstance(main, optax.MaskedNode) else main for main in mains]


def _differs(main_params: Any, params: Params) -> TreeError:
    where, expected, got = trees.first_difference(params, main_params, is_prefix=True)
    return TreeError(
        f"opt_state.main_params{where}: tree structure differs from params: got {got}, "
        f"expected {expected}. Make the state with init(params) of this optimizer."
    )


def _check_main(name: str, kind: Codec, main: Any, param: Any) -> None:
    """Raises DtypeError unless a main parameter matches its parameter."""
    got = (np.shape(main), getattr(main, "dtype", None))
    is_kept = has_main_param(kind, param)
    fits = is_kept or kind != REMAINDER16  # without it the parameter is half of a number
    if fits and got == (np.shape(param), kind.dtype):
        return
    if is_kept or not isinstance(main, optax.MaskedNode):
        got_text = got if hasattr(main, "dtype") else type(main).__name__
        expected = (
            (np.shape(param), kind.dtype.name)
            if fits
            else f"none beside {getattr(param, 'dtype', type(param).__name__)}"
        )
        raise DtypeError(
            f"{name}: does not fit its parameter: got {got_text}, expected {expected}. "
            "Make the state with init(params) of this optimizer."
        )


COMPARED = 4
"""How many leaves ``nan_if_changed`` compares: the smallest, to cost no bandwidth."""


def nan_if_changed(
    grads: Sequence[Any], params: Sequence[Any], mains: Sequence[Any]
) -> Sequence[Any]:
    """Returns the gradients, but NaN where a param is not its rounded float32 main parameter.

    They differ if a transformation after ``update``, such as ``optax.scale``, changed the updates
    but not the main parameters. A remainder matches every parameter.
    """
    compared = [
        i
        for i, (param, main) in enumerate(zip(params, mains, strict=True))
        if main_codec_of(main) == FLOAT32 and param.dtype != main.dtype and param.size
    ]
    new = list(grads)
    for i in sorted(compared, key=lambda i: params[i].size)[:COMPARED]:
        dtype, place = params[i].dtype, jax.typeof(grads[i]).sharding
        param, main = (reshard_as(x, place).astype(jnp.float32) for x in (params[i], mains[i]))
        param = collectives.round_to(param, dtype)  # [Note: casts that XLA deletes]
        new[i] = jnp.where(collectives.follows(param, main), grads[i], jnp.nan)
    return new


def main_params_of(params: Params, opt_state: OptState) -> Any:
    """Returns the exact parameters that ``fused_adamw`` updates; see ``main_params``.

    Under ``optax.masked`` or ``optax.partition`` a state has main parameters of only some leaves.
    """
    if not (found := trees.parts_of(opt_state, MainParamsState)):
        return params
    exact, found = trees.unboxed((params, found))  # nnx.Optimizer puts arrays into others
    for state in found:
        exact = _joined(exact, state)
    return jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(exact))


def _joined(params: Params, state: MainParamsState) -> Params:
    """Replaces params by the main parameters of one state."""
    kinds = {main_codec_of(x) for x in jax.tree.leaves(state.main_params)}
    kind = REMAINDER16 if REMAINDER16 in kinds else FLOAT32
    # A leaf that the optimizer steps has a moment; a MaskedNode may stand for many other leaves.
    moments = jax.tree.leaves(state.inner[0].mu, is_leaf=_is_moment)
    treedef: Any = jax.tree.structure(state.inner[0].mu, is_leaf=_is_moment)
    try:
        parts = treedef.flatten_up_to(params)
    except (ValueError, TypeError):
        raise _differs(state.main_params, params) from None
    is_stepped = [not isinstance(x, optax.MaskedNode) for x in moments]
    pairs = list(zip(parts, is_stepped, strict=True))
    own = treedef.unflatten(x if stepped else optax.MaskedNode() for x, stepped in pairs)
    mains = iter(main_leaves(kind, state.main_params, own))
    return treedef.unflatten(_exact(x, next(mains)) if stepped else x for x, stepped in pairs)


def _is_moment(x: Any) -> bool:
    return is_codes(x) or isinstance(x, optax.MaskedNode)


def _exact(param: Any, main: Any) -> Any:
    return main_codec_of(main).join(param, main, jnp)


def new_state(algorithm: Algorithm, params: Params) -> OptState:
    """The state before the first step; optax's part is for the main parameters if there are any."""
    storage, main_kind = algorithm.storage, algorithm.main_params

    def widened(x: Any) -> Any:
        return jnp.asarray(x, jnp.float32) if has_main_param(main_kind, x) else x

    updated = jax.tree.map(widened, params)
    state = _with_nu(algorithm.like_optax.init(updated), storage.float_dtype("nu"), params)
    if storage.is_stochastic:
        stored = map(jnp.result_type, jax.tree.leaves((updated, state[0].mu, state[0].nu)))
        storage.check_rounded([x for x in stored if jnp.issubdtype(x, jnp.floating)])
    state = low_precision.new_state(storage, params, updated, state)
    if main_kind.is_stored:
        state = MainParamsState(new_main_params(main_kind, params), state)
    return low_precision.RoundingState(storage.key, state) if storage.is_stochastic else state


def _with_nu(state: Any, nu_dtype: Any, params: Params) -> Any:
    """Gives optax's state a second moment in ``nu_dtype``, except for leaves that optax steps.

    Both moments are placed like params if they are made inside a program.
    """

    def zeros(x: Any) -> Any:
        return x if optax_takes(x.dtype) else jnp.zeros_like(x, dtype=nu_dtype)

    moments = state[0].mu, jax.tree.map(zeros, state[0].nu)
    mu, nu = (jax.tree.map(trees.placed_like, params, x) for x in moments)
    return (state[0]._replace(mu=mu, nu=nu), *state[1:])


def check_trees(
    grads: Grads,
    adam_state: optax.ScaleByAdamState,
    params: Params,
    *,
    state_name: str,
    storage: Storage,
) -> None:
    """Raises unless gradients and moments match the params in structure, shape and dtype."""
    mu_name, nu_name = (f"{state_name}[0].{moment}" for moment in MOMENTS)
    if params is not None:
        trees.check_dtypes(params, name="params", allowed=(*_FLOATS, *INTEGERS))
    like = grads if params is None else params
    mu, nu = (_as_arrays(x) for x in (adam_state.mu, adam_state.nu))
    for name, tree in (("grads", grads), (mu_name, mu), (nu_name, nu)):
        trees.check_same_shapes(tree, like, name=name, like_name="params")
    for moment, name in zip(MOMENTS, (mu_name, nu_name), strict=True):
        codec = storage.codec_of(moment)
        check_coded(storage, like, getattr(adam_state, moment), name=name, codec=codec)
    # optax's nu has the params' dtypes: without params, nu shows which are integers
    dtype_like = nu if params is None else params
    _check_dtypes(grads, dtype_like, name="grads", action="Cast the gradients.")
    named = trees.named_leaves(grads, "grads")
    for (path, grad), param in zip(named, jax.tree.leaves(like), strict=True):
        if jnp.iscomplexobj(grad) and not jnp.iscomplexobj(param):
            raise DtypeError(
                f"{path}: complex, but its parameter is not, so the imaginary part would be lost: "
                f"got {grad.dtype}, expected a real dtype, like that of the parameter, "
                f"{param.dtype}. Take jnp.real, or make the loss real."
            )
    _check_dtypes(mu, dtype_like, name=mu_name, action="Cast mu.")
    _check_dtypes(nu, dtype_like, name=nu_name, action="Cast nu.")
    nu_of_kernel = jax.tree.map(lambda x: None if optax_takes(x.dtype) else x, nu)
    nu_dtype = storage.float_dtype("nu")
    action = f"Cast nu to {nu_dtype}, or set nu_dtype."
    trees.check_dtypes(nu_of_kernel, name=nu_name, allowed=(nu_dtype,), action=action)


def _as_arrays(moments: Any) -> Any:
    """Moments with float32 arrays in place of codes."""

    def meant(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, jnp.float32) if is_codes(x) else x

    return jax.tree.map(meant, moments, is_leaf=is_codes)


def _check_dtypes(tree: Any, dtype_like: Any, *, name: str, action: str) -> None:
    """Raises DtypeError for unsupported dtypes, and for integers that pair with a float."""

    def of(integers: bool) -> Any:
        """The leaves that pair with integers, or the others."""
        return jax.tree.map(lambda x, y: x if is_integer(y) == integers else None, tree, dtype_like)

    trees.check_dtypes(of(False), name=name, allowed=_FLOATS, action=action)
    both = (*_FLOATS, *INTEGERS)
    trees.check_dtypes(of(True), name=name, allowed=both, action=action)


def _check_adam_state(state: OptState, name: str) -> None:
    """Raises TreeError unless it begins with the first part of optax's state."""
    if not (isinstance(state, tuple) and state and isinstance(state[0], optax.ScaleByAdamState)):
        raise TreeError(
            f"{name}: not a state of this optimizer: got {type(state).__name__}, expected the "
            "state that init(params) returned. Pass opt_state as init, update or step returned it."
        )


def parts_of_state(
    state: OptState, main_kind: Codec, storage: Storage
) -> tuple[str, Any, Any, Any]:
    """Returns the name of optax's state, the key, the main parameters, and optax's state."""
    name = "opt_state" + ".inner" * (main_kind.is_stored + storage.is_stochastic)
    key, state = low_precision.split_key(storage, state)
    main_params, inner = _split_state(state, main_kind)
    _check_adam_state(inner, name)
    return name, key, main_params, inner


def schedules_now(
    schedules: Sequence[dict[str, Any]], state: OptState, *, main_kind: Codec, storage: Storage
) -> tuple[dict[str, Any], ...]:
    """Returns each group's schedules in this step; call it outside ``tree_step``.

    A schedule has its own count, which optax's state has in addition to Adam's. They differ if a
    schedule was restarted and the moments were kept. The schedule of a single group has no count in
    that state, and uses Adam's.
    """
    if not any(schedules):
        return tuple({} for _ in schedules)
    adam, *others = parts_of_state(state, main_kind, storage)[3]
    own = {"learning_rate": others[-1:], "weight_decay": others[:-1][:1]}  # optax.adam has no decay

    def count_of(name: str) -> Any:
        states = [getattr(x, "inner_state", x) for x in own[name]]
        return next((x.count for x in states if "count" in getattr(x, "_fields", ())), adam.count)

    return tuple({k: schedule_now(k, x, count_of(k)) for k, x in of.items()} for of in schedules)
