"""Training on unsharded arrays in numpy, with which differential.py compares configurations.

From the package it uses the reference of one leaf's step and of rounding, and the coefficients;
everything about devices is written here once more, as documented.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jdistadam.core import hyperparameters
from jdistadam.core.codecs import BLOCK_CODECS, codec_of, split_halves
from jdistadam.kernels import reference
from jdistadam.kernels.reference import adam_update, pairwise_sum
from support.norms import KINDS, groups_of, named

F32 = np.float32
CODES = {form.name: form for form in BLOCK_CODECS}
SEED = 2**40 + 77


class Batch(NamedTuple):
    """What a loss gets: its gradients, and the weights of micro-batches.

    ``grads``: a tree of arrays (devices, micro-batches, ...), like params.
    ``weights``: (devices, micro-batches); None: there are none.
    """

    grads: Any
    weights: Any = None

    @property
    def total_weight(self):
        """What a sum is divided by for its mean."""
        devices, micro = jax.tree.leaves(self.grads)[0].shape[:2]
        return float(devices * micro if self.weights is None else self.weights.sum())


@dataclasses.dataclass
class Elements:
    """Parameters and moments of elements that share hyperparameters, in any order.

    ``value`` is updated: float32 if there is more than parameters of ``dtype``.
    ``leaf`` and ``index``: each element's leaf, and its place there. ``measured``: of the last step,
    the gradients, new values before they are stored, and updates, of which norms are taken.
    """

    dtype: np.dtype
    keeps_main: bool
    group: tuple[str, bool]  # a label, and whether weight decay applies
    leaf: object
    index: np.ndarray
    value: np.ndarray
    mu: object = None
    nu: object = None
    ema: object = None
    measured: tuple = ()

    @property
    def is_trained(self):
        return self.group[0] != "ice"

    def start(self, config, is_coded):
        """Casts the parameters, and makes zero moments."""
        self.value = self.value if self.keeps_main else self.value.astype(self.dtype)
        for name, given in (("mu", config.mu), ("nu", config.nu)):
            zeros = np.zeros(self.value.shape, F32)
            if given not in CODES:
                zeros = zeros.astype(jnp.dtype(given))
            elif is_coded:
                zeros = CODES[given].encode(name, zeros, None, np)
            setattr(self, name, zeros)
        self.begin_average()
        return self

    def begin_average(self):
        self.ema = self.value.astype(F32)

    def rounded(self, config):
        """The parameters."""
        return param_of(config, self.value, self.dtype, self.keeps_main)

    def update(self, config, count, grad, is_skipped):
        """Takes a step; ``grad``: float32 gradient of the mean. A skipped one is only measured."""
        c = dict(zip(hyperparameters.NAMES, row_of(config, self.group, count), strict=True))
        m, v = (_widened(name, getattr(self, name)) for name in ("mu", "nu"))
        bits = reference.RandomBits(None, None, None)
        if config.rounding == "stochastic":
            index = reference.Index(
                np.uint32(self.index).ravel(), np.zeros(self.index.size, np.uint32)
            )
            leaf = np.uint32(np.broadcast_to(self.leaf, self.index.shape)).ravel()
            key = [SEED & 0xFFFFFFFF, SEED >> 32]
            bits = reference.random_bits(key, count, leaf, index, self.value.shape, np)
        with np.errstate(all="ignore"):
            p, flags = self.value.astype(F32), config.flags
            u, m, v = adam_update(c, g=grad, p=p, m=m, v=v, flags=flags, every_term=False, xp=np)
            self.measured = (grad, p, np.zeros_like(p)) if is_skipped else (grad, p - u, u)
            if is_skipped:
                return
            self.value = _stored(None, self.value, p - u, bits.param)
            self.mu = _stored("mu", self.mu, m, bits.mu)
            self.nu = _stored("nu", self.nu, v, bits.nu)
            if config.ema_decay is not None:
                self.ema = self.ema + F32(1 - config.ema_decay) * (
                    self.floats("main_params") - self.ema
                )

    def floats(self, name):
        """Main parameters, a moment or the average in float32, as optax would have them."""
        if name == "main_params":
            return self.value.astype(F32)
        return _widened(name, getattr(self, name))


def param_of(config, value, dtype, keeps_main):
    """The parameter of this dtype that represents a value."""
    if keeps_main and config.main == "remainder16":
        return split_halves(value, dtype, np)[0]
    return value.astype(dtype)


_PROGRAMS, _ROWS = {}, {}  # configurations share them: compiling takes longer than a step


def row_of(config, group, count):
    """The coefficients of a step as computed in a program."""
    label, decays = group
    hyper = config.hyper_of(label)
    b1_b2 = hyper.b1, hyper.b2
    key = (config.adam, config.schedule, *b1_b2, label, decays)
    if key not in _PROGRAMS:
        _PROGRAMS[key] = jax.jit(lambda n: hyperparameters.coefficient_row(hyper, n, decay=decays))
    if (key, count) not in _ROWS:
        _ROWS[key, count] = np.asarray(_PROGRAMS[key](jnp.int32(count)))
    return _ROWS[key, count]


def learning_rate_of(config, count):
    """The learning rate of a step, before groups scale it."""
    rate, key = config.hyper["learning_rate"], ("learning rate", config.schedule, count)
    if key not in _ROWS:
        _ROWS[key] = F32(jax.jit(rate)(jnp.int32(count)) if callable(rate) else rate)
    return _ROWS[key]


@dataclasses.dataclass
class Guard:
    """The mean of the norms of applied steps, and the number of steps of each kind.

    ``unrounded``: how far the mean is at most from one with fused multiply-adds. Each leaves out
    the rounding of a product, half a unit in its last place, and may round the sum the other way,
    by one unit; later steps only shrink such a difference.
    """

    mean: F32 = dataclasses.field(default_factory=F32)
    unrounded: float = 0.0
    steps: int = 0
    spikes: int = 0
    nonfinite: int = 0

    def exceeds(self, limits, norm):
        """Whether a step with this norm is skipped."""
        limit = F32(np.inf if limits.max_norm is None else limits.max_norm)
        if limits.max_ratio is not None and self.steps >= limits.warmup_steps:
            limit = min(limit, F32(limits.max_ratio) * self.mean)
        return not (np.isfinite(norm) and norm <= limit)

    def count(self, limits, norm, is_skipped):
        """Counts a step that was applied, or skipped for its norm alone."""
        if not is_skipped:
            self.steps += 1
            rate = F32(1) / F32(min(self.steps, limits.window))
            product = (norm - self.mean) * rate
            is_exact = float(product) == float(norm - self.mean) * float(rate)
            self.mean += product
            if not (is_exact and self.unrounded == 0):
                self.unrounded += float(np.spacing(abs(product))) / 2 + float(np.spacing(self.mean))
        elif np.isfinite(norm):
            self.spikes += 1
        else:
            self.nonfinite += 1


class Training:
    """The count, the loss scale, and the other scalars of a step."""

    def __init__(self, config):
        self.config = config
        self.count = 0
        self.begin()

    def begin(self):
        """Starts with a new loss scale and guard, as after a move from one device."""
        given = self.config.scale
        self.is_scaled = given is not None
        self.skipped, self.finite_steps = 0, 0
        self.scale = F32(1 if given is None else getattr(given, "init_scale", given))
        self.guard = Guard()

    def contributions(self, path, dtype, value, x, weights):
        """A leaf's gradients in its dtype, with weights, after the transformation of a chain."""
        factor = {
            "none": F32(1),
            "scale": F32(0.5),
            "schedule": F32(0.5 ** (self.count % 2)),
            "masked": F32(2 if "matrix" in path else 1),
            "params": F32(0.5 ** (np.signbit(value).sum() % 3)),
        }[self.config.chain]
        scale = self.scale if self.is_scaled else F32(1)
        x = (x * scale).astype(dtype).astype(F32)
        if weights is not None:
            by = weights.reshape(*weights.shape, *[1] * (x.ndim - 2))
            x = np.where(by == 0, F32(0), x * by)
        return x * factor

    def take_step(self, total_weight, sums, update):
        """Takes a step or skips it; returns its metrics.

        ``total_weight``: that of the terms in the sums. ``sums``: those of trained leaves.
        ``update(inv_scale, is_skipped)`` updates parameters and moments, unless it is skipped.
        """
        config, scale = self.config, self.scale if self.is_scaled else F32(1)
        with np.errstate(all="ignore"):
            squares = sum(np.sum(np.square(np.float64(x / scale))) for x in sums)
            is_infinite, is_empty = self.is_scaled and not np.isfinite(squares), total_weight == 0
            mean_scale = F32((0 if is_empty else 1 / total_weight) if config.average else 1)
            norm = F32(np.sqrt(F32(squares)) * mean_scale)
            limits = config.guard if self.is_guarded else None
            is_void = is_infinite or is_empty
            is_skipped = is_void or (limits is not None and self.guard.exceeds(limits, norm))
            clip = None if is_skipped or config.clip is None else F32(config.clip)
            is_clipped = clip is not None and not norm <= clip
            factor = mean_scale * (clip / norm) if is_clipped else mean_scale
            update(factor * (F32(1) / scale), is_skipped)
            norms = self._norms(norm / clip if is_clipped else F32(1))
        if limits is not None and not is_void:
            self.guard.count(limits, norm, is_skipped)
        rate = learning_rate_of(config, self.count)
        self.count += not is_skipped
        if self.is_scaled and not is_empty:
            self._next_scale(is_infinite)
        skipped = self.skipped + self.guard.spikes + self.guard.nonfinite
        metrics = dict(loss_scale=scale, grad_norm=norm, learning_rate=rate, skipped=skipped)
        return metrics | norms | ({} if limits is None else dict(skipped_spikes=self.guard.spikes))

    def _norms(self, ratio):
        """``ratio``: of the norms of gradients before and after clipping; they are those before."""
        if self.config.norms is None:
            return {}
        groups = groups_of(self.config, self.trained)
        roots = np.sqrt(self.sums_of_squares(list(groups.values())))
        roots[:, 0] *= ratio
        return named(groups, roots)

    def _next_scale(self, is_skipped):
        given = self.config.scale
        self.skipped += is_skipped
        if not hasattr(given, "growth_interval"):
            return
        self.finite_steps = 0 if is_skipped else self.finite_steps + 1
        if is_skipped:
            self.scale = max(self.scale * F32(given.backoff_factor), F32(given.min_scale))
        elif self.finite_steps == given.growth_interval:
            self.scale, self.finite_steps = self.scale * F32(given.growth_factor), 0


class Reference(Training):
    """Params, moments, count and loss scale of a configuration, on no device."""

    def __init__(self, config, params):
        super().__init__(config)
        flat, self.treedef = jax.tree_util.tree_flatten_with_path(params)
        self.paths = [jax.tree_util.keystr(path) for path, _ in flat]
        self.leaves = [self._leaf(i, self.paths[i], x) for i, (_, x) in enumerate(flat)]
        trained = [i for i, x in enumerate(self.leaves) if x.is_trained and x.value.size]
        self.trained = {i: "params" + self.paths[i] for i in trained}

    def begin(self):
        super().begin()
        for leaf in getattr(self, "leaves", ()):
            leaf.begin_average()

    def _leaf(self, number, path, x):
        config, dtype = self.config, self.config.dtype_of(path)
        group = config.label(path, x.shape), config.decays(path, x.shape)
        index = np.arange(x.size).reshape(x.shape)
        leaf = Elements(dtype, False, group, number, index, x)
        has_main = {"float32": True, "remainder16": dtype == ml_dtypes.bfloat16}
        leaf.keeps_main = leaf.is_trained and has_main.get(config.main, False)
        is_coded = x.size >= 4096 and not (config.float32_moments and "block" in path)
        return leaf.start(config, is_coded)

    def _tree(self, function):
        return jax.tree.unflatten(self.treedef, map(function, self.leaves))

    def params(self):
        """The params that the model uses: after a step, rounded to the dtype of communication."""

        def param(leaf):
            x, comm = leaf.rounded(self.config), self.config.param_comm
            is_sent = comm is not None and leaf.is_trained and self.count > 0
            return x.astype(jnp.dtype(comm)).astype(x.dtype) if is_sent else x

        return self._tree(param)

    def floats(self, name):
        """Main parameters or a moment in float32, as optax would have them."""
        return self._tree(lambda leaf: leaf.floats(name))

    def step(self, place, batch):
        """Takes a step on a ``Batch``. Returns metrics.

        With ``place`` None it is a step of ``fused_adamw``: no loss scale, no mean, no clip.
        """
        leaves, grads = self.leaves, jax.tree.leaves(batch.grads)
        self.is_scaled = place is not None and self.config.scale is not None
        self.is_guarded = place is not None and self.config.guard is not None
        sums = [
            sum_of(
                self.config,
                place,
                x.value,
                self.contributions(path, x.dtype, x.value, given, batch.weights),
            )
            for path, x, given in zip(self.paths, leaves, grads, strict=True)
        ]
        trained = [(x, total) for x, total in zip(leaves, sums, strict=True) if x.is_trained]

        def update(inv_scale, is_skipped):
            for leaf, total in trained:
                leaf.update(self.config, self.count, total * inv_scale, is_skipped)

        return self.take_step(batch.total_weight, [total for _, total in trained], update)

    def sums_of_squares(self, groups):
        """The exact sums for all trained leaves, then for each group: of gradients, ..."""

        def of(group):
            leaves = [np.float64(self.leaves[i].measured).reshape(len(KINDS), -1) for i in group]
            return np.square(np.concatenate(leaves, axis=1)).sum(axis=1)

        return np.stack([of(self.trained), *map(of, groups)])


def _widened(name, x):
    return codec_of(x).decode(name, x, np)


def _stored(name, old, x, random):
    """A float32 as stored: in codes, or in 16 or 32 bits."""
    return codec_of(old).encode(name, x, random, np)


def sum_of(config, place, value, x):
    """The sum over devices and micro-batches: its dtype, places and order.

    Contributions are rounded once, to the communication dtype. Sums over devices add adjacent
    pairs in float32, over the last axis first; sums over micro-batches are sequential.
    """
    if place is None:
        return x[0, 0]
    wide = jnp.dtype(config.main_grads)
    sent = wide if config.grad_comm is None else jnp.dtype(config.grad_comm)
    sizes, (shard_axes, replica_axes) = place.data_axes, place.summed_axes
    order = [1 + list(sizes).index(axis) for axis in (*shard_axes, *replica_axes)]
    x = np.moveaxis(x, 1, 0)
    x = x.reshape(len(x), *sizes.values(), *value.shape)
    x = x.transpose(0, *order, *range(1 + len(order), x.ndim))

    def summed(x, axes):
        for dim in reversed(range(len(axes))):
            x = pairwise_sum(np.moveaxis(x, dim, 0), np)
        return x

    def rounded(x, dtype):
        return x.astype(dtype).astype(F32)

    def accumulated(parts):
        total = np.zeros_like(parts[0])
        for part in parts:
            total = rounded(total + part, wide)
        return total

    with np.errstate(all="ignore"):
        if place.shards_grads:
            parts = [summed(rounded(part, sent), shard_axes) for part in x]
            is_sum = len(parts) > 1 or config.weighted
            total = accumulated(parts) if is_sum else parts[0]
        else:
            total = summed(rounded(accumulated(x), sent), shard_axes)
        return summed(total, replica_axes)
