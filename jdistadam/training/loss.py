"""A user's loss: how it is called, what its results mean, and what happens if they are non-finite.

``count_nonfinite`` says which parameters had non-finite gradients, and ``SkipLimit`` ends a run.
"""

from __future__ import annotations

import collections
import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdistadam.core import collectives, jaxprs, trees
from jdistadam.core.arguments import check_count, check_flag
from jdistadam.core.trees import Grads, Params
from jdistadam.distributed.accumulate import weighted
from jdistadam.distributed.checks import check_inside
from jdistadam.distributed.shard import is_shard, leaves_of
from jdistadam.distributed.transformation import DistributedTransformation, check_distributed
from jdistadam.errors import (
    DtypeError,
    MeshError,
    NonfiniteError,
    PolicyError,
    ShapeError,
    TreeError,
)


class LossOutput(NamedTuple):
    """The named results of a loss function."""

    loss: jax.Array  # shape (), float32
    weight: Any  # shape (), float32; None: 1
    model_state: Any  # the new one; None if there is none
    aux: Any  # None without has_aux

    @property
    def weighted_loss(self) -> jax.Array:
        """The term of the sum over micro-batches and devices."""
        return self.loss if self.weight is None else weighted(self.loss, self.weight)


@dataclasses.dataclass(frozen=True)
class LossFunction:
    """A user's loss function, and how to read its results."""

    function: Callable[..., Any]
    has_aux: bool
    weighted: bool

    def __post_init__(self) -> None:
        """Checks the types of the arguments of ``train_step`` or ``eval_step``."""
        check_flag("has_aux", self.has_aux)
        check_flag("weighted", self.weighted)
        if not callable(self.function):
            raise TreeError(
                f"loss_fn: not a function: got {type(self.function).__name__}, expected "
                "loss_fn(params, batch). Call train_step(loss_fn, tx) or eval_step(loss_fn, tx)."
            )

    @property
    def arguments(self) -> dict[str, Any]:
        """How its results are read, by name."""
        return {"has_aux": self.has_aux, "weighted": self.weighted}

    def __call__(self, params: Params, batch: Any, model_state: Any, rng: Any) -> LossOutput:
        """Calls it with the enabled keywords."""
        optional = {"model_state": model_state, "rng": rng}
        keywords = {name: value for name, value in optional.items() if value is not None}
        self._check_signature(params, batch, keywords)
        try:
            out = self.function(params, batch, **keywords)
        except (ValueError, AssertionError, TypeError) as error:
            text = str(error)  # "arguments": a constraint of the wrong rank, which JAX explains
            if "with_sharding_constraint" not in text or "constraint arguments" in text:
                raise
            raise _constrained(params, error) from error
        names = ["(loss, weight)" if self.weighted else "loss"]
        names += ["model_state"] if model_state is not None else []
        names += ["aux"] if self.has_aux else []
        if len(names) == 1:
            out = (out,)
        if not isinstance(out, tuple) or len(out) != len(names):
            raise self._unexpected(
                f"{len(out)} values" if isinstance(out, tuple) else type(out).__name__, names
            )
        value = dict(zip(names, out, strict=True))
        loss, weight = self._loss_and_weight(out[0], names)
        new = value.get("model_state")
        if model_state is not None:
            _check_model_state(new, model_state)
            new = new if weight is None else _without_padding(weight, model_state, new)
        return LossOutput(loss, weight, new, _arrays(value.get("aux")))

    def _loss_and_weight(self, value: Any, names: list[str]) -> tuple[jax.Array, Any]:
        if isinstance(value, tuple) != self.weighted or (self.weighted and len(value) != 2):
            got = f"{len(value)} values" if isinstance(value, tuple) else "the loss alone"
            raise self._unexpected(got, names)
        loss, weight = value if self.weighted else (value, None)
        trees.check_scalar("loss_fn's loss", loss)
        loss = jnp.asarray(loss)
        if not jnp.issubdtype(loss.dtype, jnp.floating):
            raise DtypeError(
                f"loss_fn's loss: cannot be differentiated: got {loss.dtype}, "
                "expected a floating-point scalar. Compute the loss in floating point."
            )
        if self.weighted:
            trees.check_scalar("loss_fn's weight", weight)
            weight = jnp.asarray(weight).astype(jnp.float32)
        return loss.astype(jnp.float32), weight

    def _unexpected(self, got: str, names: list[str]) -> TreeError:
        expected = names[0] if len(names) == 1 else f"a tuple ({', '.join(names)})"
        return TreeError(
            f"loss_fn: returned something other than expected: got {got}, expected {expected}. "
            "A second value to report needs has_aux=True; a weight of this micro-batch needs "
            "weighted=True; a model_state must be given to TrainState.create."
        )

    def _check_signature(self, params: Params, batch: Any, keywords: dict[str, Any]) -> None:
        """Raises TreeError if the function does not take these arguments."""
        try:
            signature = inspect.signature(self.function)
        except (ValueError, TypeError):  # builtins have no signature
            return
        try:
            signature.bind(params, batch, **keywords)
        except TypeError as error:
            called = ", ".join(["params", "batch", *(f"{name}={name}" for name in keywords)])
            raise TreeError(
                f"loss_fn: cannot be called with what the state holds: {error}: got "
                f"loss_fn{signature}, expected a function that can be called as loss_fn({called}). "
                "Accept these arguments, or change model_state and rng of the state."
            ) from None


def _constrained(params: Params, error: Exception) -> PolicyError:
    """The error for a constraint over an axis that ``train_step`` distributes itself."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=trees.is_box)
    boxed = [jax.tree_util.keystr(path) for path, x in leaves if trees.is_box(x)]
    where = f"params{boxed[0]}, or an activation" if boxed else "an activation"
    return PolicyError(
        f"loss_fn: {where}: constrained over an axis of the data, which train_step distributes "
        f"itself, so that each device sees only its own rows: got {str(error).partition('. ')[0]}, "
        "expected constraints over the axes of a model alone. Leave the axis out of the "
        "constraint, or out of the rules of logical axes (nn.logical_axis_rules), pass params "
        "without such names (flax.linen.meta.unbox, nnx.to_pure_dict), or keep the annotations "
        "and shard the state instead: docs/drop_in.md."
    )


def _without_padding(weight: jax.Array, old: Any, new: Any) -> Any:
    """A model state whose floats a micro-batch of weight zero, which may make NaNs, leaves alone.

    Counters and random keys go on, so that they stay equal on all devices.
    """

    def one(a: Any, b: Any) -> Any:
        is_float = jnp.issubdtype(a.dtype, jnp.inexact)  # of the state: the loss may set an integer
        return trees.keep_if(weight == 0, a, b) if is_float and a is not b else b

    return jax.tree.map(one, old, new)


def _check_model_state(new: Any, old: Any) -> None:
    """Raises unless a new model state fits the old one and loses no part of its values there.

    A float is rounded to its old width; a fraction or an imaginary part would be lost.
    """
    name = "loss_fn's model_state"
    trees.check_same_shapes(new, old, name=name, like_name="the state's model_state")
    trees.check_arrays(new, name=name)
    for (path, x), like in zip(trees.named_leaves(new, name), jax.tree.leaves(old), strict=True):
        if _kind(x) > _kind(like) or (_kind(x) == _KEY) != (_kind(like) == _KEY):
            raise DtypeError(
                f"{path}: would lose a part of its values: "
                f"got {jnp.result_type(x) if _kind(x) < _KEY else x.dtype}, "
                f"expected {like.dtype}, as in the state. "
                "Cast it in loss_fn, or begin with this dtype in TrainState.create."
            )


_KINDS = (np.bool_, np.integer, np.floating, np.complexfloating, jax.dtypes.prng_key)
_KEY = len(_KINDS) - 1


def _kind(x: Any) -> int:
    """The rank of a dtype's kind of numbers; each kind contains those before it."""
    dtype = getattr(x, "dtype", None) or np.result_type(type(x))
    return next(i for i, kind in enumerate(_KINDS) if jnp.issubdtype(dtype, kind))


def _arrays(aux: Any) -> Any:
    """Raises DtypeError if a value to report is no array."""
    for path, x in trees.named_leaves(aux, "loss_fn's aux"):
        if not trees.is_number(x):
            raise DtypeError(
                f"{path}: cannot leave a jitted program: got {x!r}, expected an array or a number. "
                "Return it from outside of loss_fn."
            )
    return aux


def refuse_summed_loss(
    loss_fn: Callable[[Any], Any], params: Params, axes: tuple[str, ...]
) -> None:
    """Raises PolicyError if a loss is a plain sum over devices, as from ``psum``.

    The loss of a step is already averaged over devices. A ``pmean``, or a sum divided by a sum,
    does not change it or its gradient. A plain sum makes both too large by the number of devices.
    The function is traced once more for this check.

    Args:
      loss_fn: A function of params that returns a tree with the loss as first leaf.
      params: The params.
      axes: The mesh axes that carry data.
    """
    jaxpr = jax.make_jaxpr(loss_fn)(params)
    summed = [axis for axis in jaxprs.summed_over(jaxpr.jaxpr, 0) if axis in axes]
    if summed:
        raise PolicyError(
            "loss_fn's loss: already summed over the devices, so its gradient would count each "
            f"device again: got a psum over axis {summed[0]!r}, expected the loss of this device's "
            "part of the batch. Return the local loss, which train_step averages over devices; "
            "for a mean over tokens return (loss, weight) with weighted=True."
        )


def refuse_lone_parts(
    loss_fn: Callable[[Any], Any], params: Params, split: Mapping[str, tuple[str, ...]]
) -> None:
    """Raises MeshError if a loss sends nothing along axes over which a leaf differs.

    Each device then trains a part of the model alone, as with specs that were written for FSDP.

    Args:
      loss_fn: A function of params.
      params: The params.
      split: Axes of data along which leaves differ, by path; none for most.
    """
    if not any(split.values()):
        return
    named = jaxprs.named_axes(jax.make_jaxpr(loss_fn)(params).jaxpr)
    for path, axes in split.items():
        if lone := [axis for axis in axes if axis not in named]:
            raise MeshError(
                f"{path}: differs along axis {lone[0]!r}, over which loss_fn sends nothing: got "
                "only this device's part of it, expected a collective such as an all-to-all, "
                "as for experts. If all devices need this parameter, leave the axis out of "
                "param_specs, and sharding over data axes to sharding_strategy: docs/experts.md."
            )


def leaves_not_finite(grads: Grads) -> jax.Array:
    """Whether each leaf has a non-finite value on this device; shape (leaves,), bool."""

    def one(x: Any) -> jax.Array:
        if is_shard(x) and x.probe is not None:  # before the sum over devices
            return jnp.any(x.probe > 0)
        return ~jnp.all(jnp.isfinite(x.value if is_shard(x) else x))

    of_leaves = list(map(one, leaves_of(grads)))
    return jnp.stack(of_leaves) if of_leaves else jnp.zeros((0,), jnp.bool_)


def count_nonfinite(grads: Grads, tx: DistributedTransformation) -> jax.Array:
    """Counts, for each leaf, the devices whose own gradient is non-finite; inside shard_map.

    Costs one more read of the gradients and one all-reduce of four bytes per leaf. ``train_step``
    counts in this way with ``report_nonfinite=True``.

    Args:
      grads: Tree of local gradients, before the reduction. One that ``gather_params`` summed counts
        once for all devices of the sum, because it does not tell which of them it was.
      tx: A distributed optimizer.

    Returns:
      Shape (leaves,), int32, the same on all devices; see ``nonfinite_paths``.
    """
    check_distributed(tx)
    check_inside(tx.config.parallel, "count_nonfinite", over_data_only=True)
    trees.check_arrays(grads, name="grads")
    axes, not_finite = tx.config.parallel.shard_axes, leaves_not_finite(grads)
    is_sum = np.asarray([is_shard(x) for x in leaves_of(grads)], np.bool_)
    if is_sum.any():
        anywhere = collectives.all_reduce_max(not_finite.astype(jnp.int32), axes) > 0
        not_finite = jnp.where(is_sum, anywhere & (collectives.axis_index(axes) == 0), not_finite)
    return sum_over_devices(not_finite, tx)


def sum_over_devices(not_finite: jax.Array, tx: DistributedTransformation) -> jax.Array:
    """Counts devices; each device with a shard of the same tensor-parallel leaf counts.

    If XLA partitions the model, their shards are one gradient and count once.
    """
    parallel = tx.config.parallel
    everyone = parallel.data_axes + parallel.tensor_axes
    left_to_xla = collectives.unbound(parallel.tensor_axes)
    everyone = tuple(axis for axis in everyone if axis not in left_to_xla)
    count = collectives.to_varying(not_finite.astype(jnp.int32), everyone)
    return collectives.all_reduce(count, everyone)


def nonfinite_paths(counts: Any, params: Params) -> dict[str, int]:
    """Names the parameters with a non-finite gradient on any device.

    Args:
      counts: The result of ``count_nonfinite``, or ``metrics["nonfinite"]``.
      params: The params, or a tree of their shapes.

    Returns:
      The number of devices by path, for parameters with any.

    Raises:
      ShapeError, DtypeError: ``counts`` is something else, or is traced.

    Example:
      >>> nonfinite_paths(np.array([0, 2]), {"b": jnp.ones(3), "w": jnp.ones((2, 3))})
      {"params['w']": 2}
    """
    paths = trees.paths(params, "params")
    array = counts if hasattr(counts, "dtype") else np.asarray(counts, object)
    if array.shape != (len(paths),):
        raise ShapeError(
            "counts: not one number for each leaf of params: "
            f"got {array.shape or type(counts).__name__}, expected {(len(paths),)}. "
            'Pass metrics["nonfinite"] of train_step(..., report_nonfinite=True).'
        )
    can_be_read = not isinstance(counts, jax.core.Tracer)
    if not can_be_read or not all(map(trees.is_number, np.asarray(array).tolist())):
        got = type(counts).__name__ if array.dtype == object else array.dtype
        raise DtypeError(
            f"counts: not numbers that can be read: got {got}, expected an array of whole numbers, "
            'outside of jit. Return metrics["nonfinite"] from the program, and pass it then.'
        )
    pairs = zip(paths, np.asarray(array).tolist(), strict=True)
    return {path: count for path, count in pairs if count}


class SkipLimit:
    r"""Raises after too many steps in a row that were skipped or had a non-finite loss.

    Steps that a ``loss_scale`` skips for non-finite gradients count, and so do steps that a
    ``norm_guard`` skips. A dynamic loss scale that halves at every skip reaches 1 after some 15
    skips in a row. A run that keeps skipping does not recover, and costs as much as one that
    learns. Without a ``loss_scale`` no step is skipped; non-finite gradients reach the parameters,
    and all later losses are NaN. Call the limit after each step::

        limit = jda.SkipLimit(50)
        for batch in batches:
            state, metrics = step(state, batch)
            limit(metrics)

    It reads a step's metrics after ``lag`` more steps were started, so that the device never waits
    for the host. If all steps after call :math:`i` are lost, call :math:`i + n + 1 + \mathrm{lag}`
    raises, with :math:`n` = ``most_in_a_row``.

    Args:
      most_in_a_row: How many steps in a row may be lost.
      lag: How many further calls pass before the metrics of a step are read. If the device is
        further behind, the call waits for it.

    Raises:
      HyperparameterError: An argument is not a positive integer.
      TreeError: On use, if metrics are not those of ``train_step``.
      NonfiniteError: On use, if more steps in a row were lost.

    Example:
      >>> limit = SkipLimit(2, lag=1)
      >>> for skipped in (0, 1, 1, 2, 3):  # what train_step counts: never three in a row
      ...     limit({"loss": 0.5, "skipped": skipped, "loss_scale": 8.0})
      >>> limit.in_a_row
      1
    """

    def __init__(self, most_in_a_row: int, *, lag: int = 4) -> None:
        check_count("most_in_a_row", most_in_a_row)
        check_count("lag", lag)
        self.most_in_a_row, self.lag = most_in_a_row, lag
        self.in_a_row = 0
        """Consecutive lost steps, up to the last step whose metrics were read."""
        self._skipped_of_these = 0
        self._waiting: collections.deque[Mapping[str, Any]] = collections.deque()
        self._skipped: int | None = None  # in all, so far
        self._spikes = 0  # those skipped by a norm_guard
        self._spikes_of_these = 0

    def __call__(self, metrics: Mapping[str, Any]) -> None:
        """Takes the metrics that ``train_step`` returned for one step."""
        if not set(_READ) <= set(metrics):
            raise TreeError(
                "metrics: not the metrics of train_step: got the entries "
                f"{', '.join(metrics) or 'of nothing'}, expected {', '.join(_READ)} among them. "
                "Pass the metrics that the step returned, as they are."
            )
        read = (*_READ, "skipped_spikes")
        self._waiting.append({name: metrics[name] for name in read if name in metrics})
        if len(self._waiting) <= self.lag:
            return
        oldest = self._waiting.popleft()
        skipped = int(oldest["skipped"])
        is_finite = math.isfinite(float(oldest["loss"]))
        if self._skipped is None:  # a run from a checkpoint starts with a count above zero
            self._skipped = skipped if is_finite else 0
        is_skip = skipped > self._skipped
        spikes = int(oldest.get("skipped_spikes", 0))
        is_spike = is_skip and spikes > self._spikes
        self._skipped, self._spikes = skipped, spikes
        if is_skip or not is_finite:
            self.in_a_row += 1
            self._skipped_of_these += is_skip
            self._spikes_of_these += is_spike
        else:
            self.in_a_row = self._skipped_of_these = self._spikes_of_these = 0
        if self.in_a_row > self.most_in_a_row:
            raise self._error(float(oldest["loss_scale"]))

    def _error(self, loss_scale: float) -> NonfiniteError:
        """Says which it was: skipped steps or losses."""
        num_skipped = self._skipped_of_these
        if self._spikes_of_these:
            return NonfiniteError(
                "gradient norm: above the limits of norm_guard in too many steps in a row: got "
                f"{self.in_a_row} steps, of which {self._spikes_of_these} were skipped for it and "
                f"{self.in_a_row - self._spikes_of_these} were non-finite, "
                f"expected at most {self.most_in_a_row}. Look at metrics['grad_norm']: the mean "
                "does not follow a lasting change of its level. Restore a checkpoint from before, "
                "or pass a NormGuard with a larger max_ratio, or with max_norm alone."
            )
        num_taken = self.in_a_row - num_skipped
        what = "gradients" if not num_taken else "gradients or loss" if num_skipped else "loss"
        scale = f", the loss scale at {loss_scale:g}" if num_skipped else ""
        skips = "" if num_skipped else " With loss_scale=1.0 such steps are skipped."
        return NonfiniteError(
            f"{what}: non-finite in too many steps in a row: "
            f"got {self.in_a_row} steps, of which {num_skipped} were skipped{scale}, "
            f"expected at most {self.most_in_a_row}. Restore a checkpoint from before, and look "
            f"for the cause with train_step(..., report_nonfinite=True) and nonfinite_paths.{skips}"
        )


_READ = ("loss", "skipped", "loss_scale")
