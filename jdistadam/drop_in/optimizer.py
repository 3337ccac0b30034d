"""``fused_adam`` and ``fused_adamw``: optax's optimizers with the fused kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import adam as optax_adam  # bound here: a user may replace those of optax by ours
from optax import adamw as optax_adamw

from jdistadam.core import arguments, trees
from jdistadam.core.algorithm import Algorithm, make_algorithm, make_groups
from jdistadam.core.hyperparameters import Hyperparameters, ScalarOrSchedule
from jdistadam.core.storage import MOMENT_NAMES, UNSET, named_codec
from jdistadam.core.trees import Grads, OptState, Params
from jdistadam.drop_in.effects import How, with_effects
from jdistadam.drop_in.state import OPTAX_DTYPES, new_state, optax_takes, schedules_now
from jdistadam.drop_in.step import tree_step
from jdistadam.drop_in.transformation import (
    FullResult,
    FusedTransformation,
    made_of,
    with_frozen,
    without_frozen,
)

_OF_TORCH = {
    "lr": "Write learning_rate in place of lr.",
    "betas": "Write b1 and b2 in place of betas.",
    "amsgrad": "Leave out amsgrad: this optimizer has no such variant.",
    "maximize": "Leave out maximize, and negate the loss.",
}
"""What to write in place of torch's arguments."""


@arguments.hinted(**_OF_TORCH)
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
    main_params_dtype: Any = UNSET,
    bias_correction: bool = True,
    cautious_weight_decay: bool = False,
    rounding: str = "nearest",
    seed: int | None = None,
    float32_moments: Callable[[str], bool] | None = None,
    param_labels: Any = None,
    groups: Mapping[str, Mapping[str, Any]] | None = None,
) -> FusedTransformation:
    r"""AdamW in one fused kernel: a drop-in for ``optax.adamw`` with optax's state.

    With :math:`c_1 = 1 - b_1^t`, :math:`c_2 = 1 - b_2^t`, all in float32 registers:

    .. math::

      m &\leftarrow (1 - b_1) g + b_1 m \\
      v &\leftarrow (1 - b_2) g^2 + b_2 v \\
      p &\leftarrow p - \alpha \left( \frac{m / c_1}{\sqrt{v / c_2 + \bar\varepsilon} + \varepsilon}
         + \lambda p \right)

    Shardings are kept. Each leaf is updated in the sharding of its moments, which are never sent.
    New params and moments keep the sharding of the old ones. Updates have the sharding of the
    params, whatever the sharding of the gradients. With optax in a plain ``jax.jit``, the sharding
    of the results depends on all operands. From replicated params and sharded moments, for example,
    optax returns sharded params, and ``fused_adamw`` gathers them.

    ``jax.vmap`` of a step works, for ensembles and for sweeps over array hyperparameters. One
    kernel call updates all members, and each result is bitwise equal to a separate call's. A step
    can be differentiated to any order, in forward and reverse mode, with respect to gradients,
    state, params and hyperparameters. The kernel computes the values; derivatives use the formula
    in jax.numpy. If ``eps_root`` is zero, the root has no derivative where the second moment is
    zero. There it counts as zero if the first moment is zero too; optax returns NaN for the
    derivative by such a gradient. Main parameters of "remainder16" have no derivative.

    Outside ``jax.jit``, schedules are called in every step, and may depend on more than the count.

    Args:
      learning_rate: :math:`\alpha`, or a schedule of the step count.
      b1: :math:`b_1`, decay rate of the first moment, in [0, 1).
      b2: :math:`b_2`, decay rate of the second moment, in [0, 1).
      eps: :math:`\varepsilon`, added outside the square root.
      eps_root: :math:`\bar\varepsilon`, added inside the square root.
      mu_dtype: Dtype in which :math:`m` is stored. None: the dtype of the updated array. "block8"
        and "block16": 8 and 16 bits, with one float32 scale per 128 elements (``BlockCodes``). With
        rounding to nearest, "block8" needs b1 <= 0.894 and "block16" needs b1 <= 0.999. float16
        gives a warning, and so does bfloat16 with b1 above 0.992. With stochastic rounding,
        "block8" needs the nu_dtype "block8", and "block16" needs "block8" or "block16".
      weight_decay: :math:`\lambda`, decoupled from the gradient, or a schedule of the step count.
      mask: Tree of bools with the structure of the params, or a function from params to it: which
        leaves decay. None: all.
      nesterov: Whether to use Nesterov momentum, as optax does.
      nu_dtype: Dtype in which :math:`v` is stored: float32 (the default), or bfloat16 for b2 up to
        0.992. optax stores :math:`v` in the parameter's dtype, but a bfloat16 :math:`v` cannot
        decay with a larger b2. "block8" and "block16": as for :math:`m`, with the same limits for
        b2 under rounding to nearest. No nonzero value is rounded to zero.
      main_params_dtype: Unset: none on one device, float32 under ``distributed``. float32: 16-bit
        parameters get a float32 copy in ``MainParamsState``. The optimizer updates the copy, and
        the parameters are its rounded values. Updates of such leaves are float32, and
        ``optax.apply_updates`` gives exactly the rounded value, unless a parameter shrinks by 2^16
        or more in one step. Wrappers that expect updates of the gradients' dtype, such as
        ``optax.apply_if_finite``, then need float32 gradients. Wrappers may skip steps or leaves,
        but must not change updates or parameters, because the main parameters would not follow.
        ``optax.lookahead``, ``schedule_free`` and ``mechanize``, and ``optax.ema`` and
        ``reduce_on_plateau`` after the optimizer, need main_params_dtype=None. ``jda.chain`` raises
        if another transformation follows; ``optax.chain`` cannot detect it. To change parameters
        from outside, make a new state.
        "remainder16": bfloat16 parameters get 16 more bits instead of 32. A parameter is the
        bfloat16 nearest to its float32 main parameter (ties away from zero). ``MainParamsState``
        has the main parameter's low 16 bits; ``main_params`` returns the exact value of both
        together. None: the parameters themselves are updated.
      bias_correction: Whether to divide by :math:`c_1` and :math:`c_2`. If not, both are 1.
      cautious_weight_decay: Whether to leave out :math:`\lambda p` where its sign is opposite to
        the rest of the update. On GPUs this uses kernels that are not specialised for dtypes.
      rounding: "nearest", or "stochastic": up or down at random, with the exact value as the mean.
        It applies to moments of 16 and 8 bits and, in ``step``, to 16-bit parameters without main
        parameters. The random bits depend only on the seed, the step count, and the numbers of leaf
        and element, so a run repeats bit for bit, on CPU and GPU.
      seed: The seed of "stochastic", from 0 to 2^64 - 1, which becomes part of the state
        (``RoundingState``). None: 0. Several optimizers in one ``optax.multi_transform`` need
        different seeds.
      float32_moments: A function of a leaf's path, such as "['block']['w']". Leaves for which it is
        true have float32 moments instead of codes. If there are none, ``init`` raises TreeError.
        None: only leaves of less than 4096 elements have float32 moments.
      param_labels: A tree of labels, a prefix of params or a function of them.
      groups: For every label a dict of changes to the arguments above: ``learning_rate``, or
        ``lr_scale``, which multiplies it; ``weight_decay``; ``b1`` and ``b2``. The first three may
        be schedules. With ``frozen=True``, params stay unchanged, have no state and are not sent;
        optax's state has ``optax.MaskedNode`` in their place. Groups cost no further kernel launch.

    Returns:
      A ``FusedTransformation``: ``init`` and ``update`` as in optax, and ``step``. Parameters,
      gradients and :math:`m` may be float32, bfloat16 or float16; updates have the gradients'
      dtype. Leaves of other dtypes (float64, complex numbers, integers) are updated by optax's own
      formula. For integers, updates are fractions, new values and :math:`v` are truncated, and
      :math:`m` becomes floating-point in the first step.

    Raises:
      HyperparameterError: A number is out of range.
      PolicyError: A dtype cannot be used.
      TreeError, ShapeError, DtypeError: On use, if gradients, state and params do not match.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> tx = fused_adamw(1e-2)
      >>> params = {"w": jnp.ones((2, 3))}
      >>> state = tx.init(params)
      >>> params, state = jax.jit(tx.step)({"w": jnp.full((2, 3), 0.5)}, state, params)
      >>> round(float(params["w"][0, 0]), 6)
      0.989999

      Three learning rates at once, and the derivative of a step with respect to one of them:

      >>> def stepped(learning_rate, params, grads):
      ...     tx = fused_adamw(learning_rate, weight_decay=0.0)
      ...     return tx.step(grads, tx.init(params), params)[0]
      >>> rates = jnp.array([0.25, 0.5, 0.75])
      >>> print(jax.vmap(stepped, in_axes=(0, None, None))(rates, 1.0, 0.5).round(2))
      [0.75 0.5  0.25]
      >>> print(jax.grad(stepped)(0.1, 1.0, 0.5).round(4))
      -1.0

    References:
      Loshchilov and Hutter, `Decoupled Weight Decay Regularization
      <https://arxiv.org/abs/1711.05101>`_, 2019. Chen et al., `Cautious Weight Decay
      <https://arxiv.org/abs/2510.12402>`_, 2025.
    """
    both = dict(learning_rate=learning_rate, b1=b1, b2=b2, eps_root=eps_root, eps=eps)
    both |= dict(weight_decay=weight_decay, nesterov=nesterov)
    hyper = Hyperparameters(
        **both, bias_correction=bias_correction, cautious_weight_decay=cautious_weight_decay
    )
    everywhere = None if mask is None else _everywhere
    like_optax = optax_adamw(**both, mu_dtype=_mu_dtype(mu_dtype), mask=everywhere)
    algorithm = make_algorithm(
        make_groups(hyper, mask, param_labels, groups),
        hyper,
        like_optax,
        mu_dtype=mu_dtype,
        nu_dtype=nu_dtype,
        rounding=rounding,
        seed=seed,
        float32_moments=float32_moments,
        main_params_dtype=main_params_dtype,
        reads_params=True,
    )
    return _fused(algorithm)


@arguments.hinted(
    **_OF_TORCH,
    weight_decay="For the weight_decay of torch's Adam write l2; for AdamW's use fused_adamw.",
)
def fused_adam(
    learning_rate: ScalarOrSchedule,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    eps_root: Any = 0.0,
    mu_dtype: Any = None,
    *,
    nesterov: bool = False,
    l2: Any = None,
    nu_dtype: Any = None,
    main_params_dtype: Any = UNSET,
    bias_correction: bool = True,
    rounding: str = "nearest",
    seed: int | None = None,
    float32_moments: Callable[[str], bool] | None = None,
    param_labels: Any = None,
    groups: Mapping[str, Mapping[str, Any]] | None = None,
) -> FusedTransformation:
    r"""Adam in one fused kernel: a drop-in for ``optax.adam`` with optax's state.

    The formula of ``fused_adamw`` with :math:`\lambda = 0` and the gradient

    .. math::

      g \leftarrow g + \ell p

    with :math:`\ell` = ``l2`` (L2 regularisation, as in the original paper).

    Args:
      learning_rate: As in ``fused_adamw``, and so are the next four arguments.
      b1: Decay rate of the first moment.
      b2: Decay rate of the second moment.
      eps: Added outside the square root.
      eps_root: Added inside the square root.
      mu_dtype: Dtype in which the first moment is stored.
      nesterov: Whether to use Nesterov momentum.
      l2: :math:`\ell`, >= 0. None: 0, and ``inject_hyperparams`` makes no number of it.
      nu_dtype: Dtype in which the second moment is stored, as in ``fused_adamw``.
      main_params_dtype: As in ``fused_adamw``, and so are the next four arguments.
      bias_correction: Whether to divide by :math:`c_1` and :math:`c_2`.
      rounding: "nearest" or "stochastic".
      seed: The seed of "stochastic".
      float32_moments: Which leaves have float32 moments instead of codes.
      param_labels: Labels of the params, as in ``fused_adamw``.
      groups: Changes for each label; ``weight_decay`` in a group is decoupled.

    Returns:
      A ``FusedTransformation``. ``update`` needs params only for l2 or main parameters.

    Raises:
      HyperparameterError: A number is out of range.
      PolicyError: A dtype cannot be used.
      TreeError, ShapeError, DtypeError: On use, if gradients, state and params do not match.

    Example:
      >>> import jax.numpy as jnp
      >>> tx = fused_adam(1e-2, b1=0.0)
      >>> params = {"w": jnp.zeros(3)}
      >>> updates, _ = tx.update({"w": jnp.array([2.0, -3.0, 5.0])}, tx.init(params))
      >>> print(updates["w"].round(4))
      [-0.01  0.01 -0.01]

    References:
      Kingma and Ba, `Adam <https://arxiv.org/abs/1412.6980>`_, 2015.
    """
    both = dict(learning_rate=learning_rate, b1=b1, b2=b2, eps_root=eps_root, eps=eps)
    l2 = 0.0 if l2 is None else l2
    hyper = Hyperparameters(**both, nesterov=nesterov, l2=l2, bias_correction=bias_correction)
    like_optax = optax_adam(**both, mu_dtype=_mu_dtype(mu_dtype), nesterov=nesterov)
    made = make_groups(hyper, None, param_labels, groups)
    decays = [l2, *(group.weight_decay for group in made.used)]
    algorithm = make_algorithm(
        made,
        hyper,
        like_optax,
        mu_dtype=mu_dtype,
        nu_dtype=nu_dtype,
        rounding=rounding,
        seed=seed,
        float32_moments=float32_moments,
        main_params_dtype=main_params_dtype,
        reads_params=any(isinstance(x, jax.Array) or x != 0 for x in decays),
    )
    return _fused(algorithm)


def _everywhere(params: Params) -> Any:
    """A mask that selects all leaves, for making a state, which does not depend on it."""
    return jax.tree.map(lambda _: True, params)


def _with_gradients(params: Params, grads: Grads, state: OptState, is_needed: bool) -> Params:
    """The params that an update reads, as in optax: all of a module may be given.

    Leaves without a gradient, such as functions, need no update, unless they have moments. If
    nothing reads the params, they may be in other containers than the gradients.
    """
    given: Any = jax.tree.structure(grads)
    if given == jax.tree.structure(params):
        return params
    if not is_needed:
        return None
    adam: Any = next(iter(trees.parts_of(state, optax.ScaleByAdamState)), None)

    def read(grad: Any, param: Any, mu: Any) -> Any:
        return None if grad is None and not jax.tree.leaves(mu) else param

    try:
        return jax.tree.map(read, grads, params, adam.mu, is_leaf=lambda x: x is None)
    except (ValueError, TypeError, AttributeError):  # the step says what differs
        return params


def _no_update(param: Any, grad: Any) -> Any:
    """Zeros with the parameter's placement and, like all updates, the gradient's dtype."""
    dtype = getattr(grad, "dtype", jnp.result_type(grad))
    return jnp.zeros_like(param, dtype=None if dtype == jax.dtypes.float0 else dtype)


def _is_optax_leaf(x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    return optax_takes(jnp.result_type(x) if dtype is None else dtype)


def _with_constants(
    known: Sequence[tuple[tuple[str, Any], ...]], numbers: Sequence[dict[str, Any]]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The same with numbers of Python as constants of the program.

    If they are operands, XLA of jax 0.10 rounds optax's formula otherwise on CPUs. The kernels give
    the same bits in both cases.
    """
    constants = [{k: v for k, v in x.items() if isinstance(v, float)} for x in numbers]
    pairs = list(zip(known, numbers, constants, strict=True))
    return (
        tuple((*items, *fixed.items()) for items, _, fixed in pairs),
        tuple({k: v for k, v in x.items() if k not in fixed} for _, x, fixed in pairs),
    )


def _fused(algorithm: Algorithm) -> FusedTransformation:
    """The functions of an algorithm in one program."""
    groups, main_kind = algorithm.groups, algorithm.main_params
    known, numbers, schedules = zip(*(hyper.split() for hyper in groups.used), strict=True)
    kept_as: dict[str, Any] = dict(main_kind=main_kind, storage=algorithm.storage)
    needs_params = algorithm.reads_params or main_kind.is_stored

    def init(params: Params) -> OptState:
        trees.check_numbers(params, name="params")
        trees.check_memory(params=params)
        # Labels and a mask that do not match should raise before the first step.
        stepped = without_frozen(groups.row_of_leaves(params), params)
        return new_state(algorithm, stepped)

    def full_step(
        grads: Grads, state: OptState, params: Params, extra_args: Any, how: How
    ) -> FullResult:
        del extra_args  # like optax's own optimizers, which take none
        mode, reads_params = how.mode, needs_params or any(x.kind == "decay" for x in how.effects)
        if reads_params or mode == "step":
            trees.check_given(params)
        if mode == "update" and params is not None:
            params = _with_gradients(params, grads, state, reads_params)
        whole = grads if params is None else params
        rows = groups.row_of_leaves(whole)
        kept = whole
        if None in rows:
            trees.check_same_shapes(grads, whole, name="grads", like_name="params")
            kept = params if mode == "step" else jax.tree.map(_no_update, whole, grads)
            grads = without_frozen(rows, grads)
            params = None if params is None else without_frozen(rows, params)
        try:
            of_step = schedules_now(schedules, state, **kept_as)
            given = with_effects(how.effects, rows, known, numbers, of_step)
            rows_of_step, fixed, operands, now = given
            if any(map(_is_optax_leaf, jax.tree.leaves((grads, params)))):
                fixed, operands = _with_constants(fixed, operands)
            static = dict(mode=mode, known=fixed, rows=rows_of_step, norms=how.norms, **kept_as)
            operands = grads, state, params, operands, now, how.is_skipped, how.grad_factor
            new = tree_step(*operands, **static)
        except TypeError:  # jit names a wrong leaf by its position in the call
            for name, tree in (("grads", grads), ("opt_state", state), ("params", params)):
                trees.check_numbers(tree, name=name)
            raise
        out = how.stilled(with_frozen(rows, new.out, kept), whole)
        return FullResult(out, new.state, new.norms)

    tx = made_of(init, full_step)
    tx.algorithm = algorithm
    return tx


def _mu_dtype(given: Any) -> Any:
    """The dtype of optax's first moments."""
    value = given if named_codec(given) is None else jnp.float32
    is_array = isinstance(value, jax.Array | np.ndarray)  # their == is no bool
    if value is None or (not is_array and value in OPTAX_DTYPES):
        return value
    return arguments.float_dtype("mu_dtype", value, also=MOMENT_NAMES)
