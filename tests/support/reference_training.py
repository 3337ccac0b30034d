"""Training on unsharded arrays in numpy, with which differential.py compares configurations.

From the package it uses the reference of one leaf's step and of rounding, and the coefficients;
everything about devices is written here once more, as documented.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jdistadam.core import hyperparameters
from jdistadam.core.codecs import BLOCK_CODECS, codec_of, split_halves
from jdistadam.kernels import reference
from jdistadam.kernels.reference import adam_update, pairwise_sum

F32 = np.float32
CODES = {form.name: form for form in BLOCK_CODECS}
SEED = 2**40 + 77


@dataclasses.dataclass
class Elements:
    """Parameters and moments of elements that share hyperparameters, in any order.

    ``value`` is updated: float32 if there is more than parameters of ``dtype``.
    ``leaf`` and ``index``: each element's leaf, and its place there.
    """

    dtype: np.dtype
    keeps_main: bool
    group: tuple[str, bool]  # a label, and whether weight decay applies
    leaf: object
    index: np.ndarray
    value: np.ndarray
    mu: object = None
    nu: object = None

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
        return self

    def rounded(self, config):
        """The parameters."""
        return param_of(config, self.value, self.dtype, self.keeps_main)

    def update(self, config, count, grad):
        """Takes a step; ``grad``: float32 gradient of the mean."""
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
            self.value = _stored(None, self.value, p - u, bits.param)
            self.mu = _stored("mu", self.mu, m, bits.mu)
            self.nu = _stored("nu", self.nu, v, bits.nu)

    def floats(self, name):
        """Main parameters or a moment in float32, as optax would have them."""
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


class Training:
    """The count, the loss scale, and the other scalars of a step."""

    def __init__(self, config):
        self.config = config
        self.count = 0
        self.forget_scale()

    def forget_scale(self):
        """Starts with a new loss scale, as after a move from an optimizer without one."""
        given = self.config.scale
        self.is_scaled = given is not None
        self.skipped, self.finite_steps = 0, 0
        self.scale = F32(1 if given is None else getattr(given, "init_scale", given))

    def contributions(self, path, dtype, value, x):
        """A leaf's gradients in its dtype, after the transformation of a chain."""
        factor = {
            "none": F32(1),
            "scale": F32(0.5),
            "schedule": F32(0.5 ** (self.count % 2)),
            "masked": F32(2 if "matrix" in path else 1),
            "params": F32(0.5 ** (np.signbit(value).sum() % 3)),
        }[self.config.chain]
        scale = self.scale if self.is_scaled else F32(1)
        return (x * scale).astype(dtype).astype(F32) * factor

    def take_step(self, contributions, sums, update):
        """Takes a step or skips it; returns its metrics.

        ``contributions``: the number of terms in the sums. ``sums``: those of trained leaves.
        ``update(inv_scale)`` updates parameters and moments.
        """
        scale = self.scale if self.is_scaled else F32(1)
        with np.errstate(all="ignore"):
            squares = sum(np.sum(np.square(np.float64(x / scale))) for x in sums)
            inv_scale, norm = self._inv_scale(contributions, F32(squares))
            inv_scale = inv_scale * (F32(1) / scale)
        is_skipped = self.is_scaled and not np.isfinite(squares)
        rate = learning_rate_of(self.config, self.count)
        if not is_skipped:
            update(inv_scale)
            self.count += 1
        if self.is_scaled:
            self._next_scale(is_skipped)
        return dict(loss_scale=scale, grad_norm=norm, learning_rate=rate, skipped=self.skipped)

    def _inv_scale(self, contributions, squares):
        """The factor of sums without the loss scale; and the norm of the mean."""
        clip = self.config.clip
        mean_scale = F32(1 / contributions if self.config.average else 1)
        norm = np.sqrt(squares) * mean_scale
        is_clipped = clip is not None and not norm <= F32(clip)
        return mean_scale * (F32(clip) / norm) if is_clipped else mean_scale, norm

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
        """Takes a step; ``batch``: gradients (devices, micro-batches, ...). Returns metrics.

        With ``place`` None it is a step of ``fused_adamw``: no loss scale, no mean, no clip.
        """
        leaves, batch = self.leaves, jax.tree.leaves(batch)
        self.is_scaled = place is not None and self.config.scale is not None
        sums = [
            sum_of(self.config, place, x.value, self.contributions(path, x.dtype, x.value, given))
            for path, x, given in zip(self.paths, leaves, batch, strict=True)
        ]
        trained = [(x, total) for x, total in zip(leaves, sums, strict=True) if x.is_trained]

        def update(inv_scale):
            for leaf, total in trained:
                leaf.update(self.config, self.count, total * inv_scale)

        contributions = math.prod(batch[0].shape[:2])
        return self.take_step(contributions, [total for _, total in trained], update)


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
            total = accumulated(parts) if len(parts) > 1 else parts[0]
        else:
            total = summed(rounded(accumulated(x), sent), shard_axes)
        return summed(total, replica_axes)
