"""The drop-in: optax's AdamW with the fused kernel, for one program and any sharding."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdistadam import partitioning, trees
from jdistadam.coefficients import coefficient_rows
from jdistadam.config import Hyperparameters, ScalarOrSchedule, float_dtype
from jdistadam.errors import DtypeError, PolicyError, TreeError, describe
from jdistadam.kernel import Operands, Results, Scalars, Spec


class StepFn(Protocol):
    """``(grads, opt_state, params) -> (params, opt_state)``."""

    def __call__(self, grads: Any, state: Any, params: Any, **extra_args: Any) -> tuple[Any, Any]:
        """Takes one step."""


class FusedTransformation(optax.GradientTransformationExtraArgs):
    """An ``optax.GradientTransformationExtraArgs`` (init, update) that also has ``step``.

    ``step(grads, opt_state, params)`` returns the new parameters straight from the kernel. It
    moves 28 bytes a float32 parameter, ``update`` followed by ``optax.apply_updates`` 40.

    To have it work in place, donate params and state, and take them in the order in which they
    are returned, since ``jax.jit`` pairs donated buffers with results of equal shape in order::

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def train_step(params, opt_state, batch):
            grads = jax.grad(loss)(params, batch)
            return tx.step(grads, opt_state, params)
    """

    step: StepFn

    def __new__(cls, init: Any, update: Any, step: StepFn) -> FusedTransformation:
        """Makes the pair that optax unpacks, and hangs ``step`` beside it."""
        self = super().__new__(cls, init, update)
        self.step = step
        return self

    def __deepcopy__(self, memo: Any) -> FusedTransformation:
        """Returns itself: there is nothing in it that changes."""
        return self


def fused_adamw(
    learning_rate: ScalarOrSchedule,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    eps_root: Any = 0.0,
    mu_dtype: Any = None,
    weight_decay: ScalarOrSchedule = 1e-4,
    mask: Any | Callable[[Any], Any] | None = None,
    *,
    nesterov: bool = False,
    nu_dtype: Any = None,
    main_params_dtype: Any = None,
) -> FusedTransformation:
    r"""AdamW in one fused kernel: a drop-in for ``optax.adamw`` with optax's state.

    With :math:`c_1 = 1 - b_1^t`, :math:`c_2 = 1 - b_2^t`, all in float32 registers:

    .. math::

      m &\leftarrow (1 - b_1) g + b_1 m \\
      v &\leftarrow (1 - b_2) g^2 + b_2 v \\
      p &\leftarrow p - \alpha \left( \frac{m / c_1}{\sqrt{v / c_2 + \bar\varepsilon} + \varepsilon}
         + \lambda p \right)

    Arrays that are sharded stay so: nothing is gathered.

    Args:
      learning_rate: :math:`\alpha`, or a schedule of the step count.
      b1: :math:`b_1`, decay rate of the first moment, in [0, 1).
      b2: :math:`b_2`, decay rate of the second moment, in [0, 1).
      eps: :math:`\varepsilon`, added outside the square root.
      eps_root: :math:`\bar\varepsilon`, added inside the square root.
      mu_dtype: Dtype in which :math:`m` is stored. None: the parameter's.
      weight_decay: :math:`\lambda`, decoupled from the gradient, or a schedule of the step count.
      mask: Tree of bools with the structure of the params, or a function from params to it: where
        weight decay applies. None: everywhere.
      nesterov: Whether to use Nesterov momentum, as optax does.
      nu_dtype: Dtype in which :math:`v` is stored. Only float32 (also the default) works in this
        version. optax stores it in the parameter's dtype, where a bfloat16 :math:`v` cannot decay.
      main_params_dtype: Not supported in this version; leave at None.

    Returns:
      A ``FusedTransformation``: ``init``, ``update`` as in optax, and ``step``. Parameters,
      gradients and :math:`m` may be float32, bfloat16 or float16; updates have the gradients'
      dtype.

    Raises:
      HyperparameterError: A number is out of range.
      TreeError, ShapeError, DtypeError: On use, where gradients, state and params do not fit.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> tx = fused_adamw(1e-2)
      >>> params = {"w": jnp.ones((2, 3))}
      >>> state = tx.init(params)
      >>> params, state = jax.jit(tx.step)({"w": jnp.full((2, 3), 0.5)}, state, params)
      >>> round(float(params["w"][0, 0]), 6)
      0.989999

    References:
      Loshchilov and Hutter, `Decoupled Weight Decay Regularization
      <https://arxiv.org/abs/1711.05101>`_, 2019.
    """
    hyper = Hyperparameters(learning_rate, b1, b2, eps, eps_root, weight_decay, nesterov)
    if mu_dtype is not None:
        mu_dtype = float_dtype("mu_dtype", mu_dtype)
    _check_only("nu_dtype", nu_dtype, None, "float32")
    _check_only("main_params_dtype", main_params_dtype, None)
    like_optax = optax.adamw(
        learning_rate, b1, b2, eps, eps_root, mu_dtype, weight_decay, mask, nesterov=nesterov
    )
    known, operands = hyper.split()

    def init(params: Any) -> optax.OptState:
        decay_groups(mask, params)  # a mask that does not fit should not wait for the first step
        state = like_optax.init(params)
        nu = jax.tree.map(lambda x: jnp.zeros_like(x, dtype=jnp.float32), state[0].nu)
        return (state[0]._replace(nu=nu), *state[1:])

    def run(mode: str, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        if params is None:
            raise ValueError(optax._src.base.NO_PARAMS_MSG)  # optax has no public name for it
        groups = decay_groups(mask, params)
        return _run(grads, state, params, operands, mode=mode, known=known, groups=groups)

    def update(grads: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        del extra_args  # as optax's adamw, which takes none
        return run("update", grads, state, params)

    def step(grads: Any, state: Any, params: Any, **extra_args: Any) -> tuple[Any, Any]:
        del extra_args
        return run("step", grads, state, params)

    return FusedTransformation(init, update, step)


def _check_only(name: str, value: Any, *supported: str | None) -> None:
    try:
        got = None if value is None else jnp.dtype(value).name
    except TypeError:
        got = repr(value)
    if got not in supported:
        raise PolicyError(
            describe(
                name,
                "not supported in this version",
                got=got,
                expected=" or ".join(map(str, supported)),
                action=f"Leave {name} at None.",
            )
        )


# Always inside jit, also for eager calls: the compiler contracts the expressions of the
# coefficients, so that an eager call would otherwise use different bits. One function for all
# optimizers: optax.inject_hyperparams makes a new one at each eager call.
@functools.partial(jax.jit, static_argnames=("mode", "known", "groups"))
def _run(
    grads: Any,
    state: Any,
    params: Any,
    operands: dict[str, Any],
    *,
    mode: str,
    known: tuple[tuple[str, Any], ...],
    groups: tuple[int, ...],
) -> tuple[Any, Any]:
    """Checks the trees, steps every leaf, and advances the counts of the state."""
    hyper = Hyperparameters(**dict(known), **operands)
    adam_state = _adam_state(state)
    _check_trees(grads, adam_state, params)
    rows = coefficient_rows(hyper, adam_state.count, (True, False))
    leaves = Operands(*(jax.tree.leaves(x) for x in (grads, params, adam_state.mu, adam_state.nu)))
    results = _step_by_dtype(mode, Scalars.plain(rows), leaves, groups, hyper.nesterov)

    unflatten = functools.partial(jax.tree.unflatten, jax.tree.structure(params))
    new_adam = optax.ScaleByAdamState(
        optax.safe_increment(adam_state.count), unflatten(results.mu), unflatten(results.nu)
    )
    new_params = unflatten(results.out if mode == "update" else results.params)
    return new_params, (new_adam, *(advance_schedules(part) for part in state[1:]))


def _check_trees(grads: Any, adam_state: optax.ScaleByAdamState, params: Any) -> None:
    trees.check_dtypes(params, name="params")
    trees.check_same_shapes(grads, params, name="grads", like_name="params")
    trees.check_dtypes(grads, name="grads", action="Cast the gradients.")
    for name in ("mu", "nu"):
        tree = getattr(adam_state, name)
        trees.check_same_shapes(tree, params, name=f"opt_state[0].{name}", like_name="params")
    trees.check_dtypes(adam_state.mu, name="opt_state[0].mu", action="Cast mu.")
    trees.check_dtypes(
        adam_state.nu,
        name="opt_state[0].nu",
        allowed=(jnp.float32,),
        action="Cast nu to float32: in 16 bits it cannot decay for b2 above 0.99.",
    )


def _adam_state(state: Any) -> optax.ScaleByAdamState:
    if not (isinstance(state, tuple) and state and isinstance(state[0], optax.ScaleByAdamState)):
        raise TreeError(
            describe(
                "opt_state",
                "not a state of this optimizer",
                got=type(state).__name__,
                expected="the state that init(params) returned",
                action="Pass opt_state as init, update or step returned it.",
            )
        )
    return state[0]


def decay_groups(mask: Any, params: Any) -> tuple[int, ...]:
    """Returns, for each leaf, 0 if weight decay applies to it and 1 if it is masked out."""
    num_leaves = len(jax.tree.leaves(params))
    if mask is None:
        return (0,) * num_leaves
    mask = mask(params) if callable(mask) else mask
    try:  # as in optax, a mask may be a prefix of the params
        full = jax.tree.map(lambda keep, tree: jax.tree.map(lambda _: keep, tree), mask, params)
    except (ValueError, TypeError):
        raise TreeError(
            describe(
                "mask",
                "structure differs from params",
                got=jax.tree.structure(mask),
                expected=jax.tree.structure(params),
                action="Give each leaf of params, or each subtree, True or False.",
            )
        ) from None
    groups = []
    for path, keep in zip(trees.paths(full, "mask"), jax.tree.leaves(full), strict=True):
        if not isinstance(keep, bool | np.bool_):
            raise DtypeError(
                describe(
                    path,
                    "not a bool",
                    got=repr(keep),
                    expected="True or False",
                    action="Fix the mask.",
                )
            )
        groups.append(0 if keep else 1)
    return tuple(groups)


def advance_schedules(state: Any) -> Any:
    """Increments the count of every schedule in a part of optax's state."""
    if isinstance(state, optax.MaskedState):
        return state._replace(inner_state=advance_schedules(state.inner_state))
    if "count" in getattr(state, "_fields", ()):
        return state._replace(count=optax.safe_increment(state.count))
    return state


def _step_by_dtype(
    mode: str, scalars: Scalars, leaves: Operands, groups: Sequence[int], nesterov: bool
) -> Results:
    """One kernel call for each combination of dtypes: usually one."""
    # What leaves without elements keep; all others are replaced below.
    new = [list(arrays) for arrays in (leaves.params, leaves.mu, leaves.nu, leaves.grads)]
    calls: dict[Any, list[int]] = {}
    for i, leaf in enumerate(zip(*leaves, strict=True)):
        if leaf[0].size:
            calls.setdefault(tuple(x.dtype for x in leaf), []).append(i)
    for dtypes, indices in calls.items():
        spec = Spec(
            mode,
            groups=tuple(groups[i] for i in indices),
            nesterov=nesterov,
            out_dtype=dtypes[0] if mode == "update" else None,
        )
        operands = Operands(*(tuple(arrays[i] for i in indices) for arrays in leaves))
        results = partitioning.adam(spec, scalars, operands)
        for column, arrays in zip(new, results, strict=True):
            for i, x in zip(indices, arrays, strict=False):
                column[i] = x
    return Results(*(tuple(column) for column in new))
