"""Training on unsharded arrays in numpy: what differential.py compares every configuration with.

Of the package it uses the reference of one leaf's step and of rounding, and the coefficients; all
that is about devices is written here once more, as the documentation says it.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jdistadam.core.main_params import split
from jdistadam.core.moments import FORMATS, is_codes
from jdistadam.kernels import coefficients, rounding
from jdistadam.kernels.reference import adam_update, pairwise_sum, store

F32 = np.float32
CODES = {form.name: form for form in FORMATS}
SEED = 2**40 + 77


@dataclasses.dataclass
class LeafState:
    """One parameter: ``value`` is what is updated, float32 where its dtype is not all there is."""

    path: str
    number: int
    dtype: np.dtype
    keeps_main: bool
    group: tuple[str, bool]  # its label, and whether weight decay applies
    value: np.ndarray
    mu: object = None
    nu: object = None

    @property
    def is_trained(self):
        return self.group[0] != "ice"


class Reference:
    """Params, moments, count and loss scale of a configuration, on no device."""

    def __init__(self, config, params):
        self.config = config
        flat, self.treedef = jax.tree_util.tree_flatten_with_path(params)
        self.leaves = [
            self._leaf(i, jax.tree_util.keystr(path), x) for i, (path, x) in enumerate(flat)
        ]
        self.groups = sorted({leaf.group for leaf in self.leaves if leaf.is_trained})
        hypers = [config.hyper_of(label) for label, _ in self.groups]
        self.coefficients = jax.jit(
            lambda count: [
                coefficients.coefficient_row(hyper, count, decay=decays)
                for hyper, (_, decays) in zip(hypers, self.groups, strict=True)
            ]
        )
        self.count = 0
        self.forget_scale()

    def forget_scale(self):
        """Begins with a new loss scale, as after a move from an optimizer without one."""
        given = self.config.scale
        self.skipped, self.finite_steps = 0, 0
        self.scale = F32(1 if given is None else getattr(given, "init_scale", given))

    def _leaf(self, number, path, x):
        config, dtype = self.config, self.config.dtype_of(path)
        group = config.label(path, x.shape), config.decays(path, x.shape)
        leaf = LeafState(path, number, dtype, False, group, x)
        has_main = {"float32": True, "remainder16": dtype == ml_dtypes.bfloat16}
        leaf.keeps_main = leaf.is_trained and has_main.get(config.main, False)
        leaf.value = x if leaf.keeps_main else x.astype(dtype)
        is_coded = x.size >= 4096 and not (config.float32_moments and "block" in path)
        for name, given in (("mu", config.mu), ("nu", config.nu)):
            zeros = np.zeros(x.shape, F32)
            if given not in CODES:
                zeros = zeros.astype(jnp.dtype(given))
            elif is_coded:
                zeros = rounding.encode(name, CODES[given], zeros, None, np)
            setattr(leaf, name, zeros)
        return leaf

    def _tree(self, function):
        return jax.tree.unflatten(self.treedef, map(function, self.leaves))

    def params(self):
        """As the model sees them: after a step, rounded to the dtype in which they are sent."""

        def param(leaf):
            x, comm = self._rounded(leaf), self.config.param_comm
            is_sent = comm is not None and leaf.is_trained and self.count > 0
            return x.astype(jnp.dtype(comm)).astype(x.dtype) if is_sent else x

        return self._tree(param)

    def _rounded(self, leaf):
        if leaf.keeps_main and self.config.main == "remainder16":
            return split(leaf.value, leaf.dtype, np)[0]
        return leaf.value.astype(leaf.dtype)

    def floats(self, name):
        """Main parameters or a moment, in float32: as optax would hold them."""
        if name == "main_params":
            return self._tree(lambda leaf: leaf.value.astype(F32))
        return self._tree(lambda leaf: _widened(name, getattr(leaf, name)))

    def step(self, place, batch):
        """Takes a step; ``batch``: gradients (devices, micro-batches, ...). Returns metrics.

        With ``place`` None it is a step of ``fused_adamw``: no loss scale, no mean, no clip.
        """
        scale = F32(1) if place is None else self.scale
        pairs = list(zip(self.leaves, jax.tree.leaves(batch), strict=True))
        sums = [
            sum_of(self.config, place, leaf, self._contributions(leaf, x, scale))
            for leaf, x in pairs
        ]
        trained = [x for leaf, x in zip(self.leaves, sums, strict=True) if leaf.is_trained]
        with np.errstate(all="ignore"):
            squares = sum(np.sum(np.square(np.float64(x / scale))) for x in trained)
            inv_scale, norm = self._inv_scale(math.prod(pairs[0][1].shape[:2]), F32(squares))
            inv_scale = inv_scale * (F32(1) / scale)
        is_skipped = self.config.scale is not None and not np.isfinite(squares)
        metrics = dict(loss_scale=scale, grad_norm=norm, learning_rate=self._learning_rate())
        if not is_skipped:
            rows = jax.device_get(self.coefficients(jnp.int32(self.count)))
            for leaf, total in zip(self.leaves, sums, strict=True):
                if leaf.is_trained:
                    self._update(leaf, rows[self.groups.index(leaf.group)], total * inv_scale)
            self.count += 1
        if place is not None:
            self._next_scale(is_skipped)
        return metrics | dict(skipped=self.skipped)

    def _contributions(self, leaf, x, scale):
        """Gradients in the dtype of their parameter, behind the transformation of a chain."""
        return (x * scale).astype(leaf.dtype).astype(F32) * self._chain_factor(leaf)

    def _inv_scale(self, contributions, squares):
        """What sums are multiplied by, without the loss scale; and the norm of the mean."""
        clip = self.config.clip
        mean_scale = F32(1 / contributions if self.config.average else 1)
        norm = np.sqrt(squares) * mean_scale
        is_clipped = clip is not None and not norm <= F32(clip)
        return mean_scale * (F32(clip) / norm) if is_clipped else mean_scale, norm

    def _learning_rate(self):
        rate = self.config.hyper["learning_rate"]
        return F32(jax.jit(rate)(jnp.int32(self.count)) if callable(rate) else rate)

    def _chain_factor(self, leaf):
        """What the transformation before the optimizer multiplies this gradient by."""
        return {
            "none": F32(1),
            "scale": F32(0.5),
            "schedule": F32(0.5 ** (self.count % 2)),
            "masked": F32(2 if "matrix" in leaf.path else 1),
            "params": F32(0.5 ** (np.signbit(leaf.value).sum() % 3)),
        }[self.config.chain]

    def _update(self, leaf, row, grad):
        c = dict(zip(coefficients.NAMES, row, strict=True))
        nesterov, size = self.config.adam == "nesterov", leaf.value.size
        m, v = (_widened(name, getattr(leaf, name)) for name in ("mu", "nu"))
        bits = rounding.RandomBits(None, None, None)
        if self.config.rounding == "stochastic":
            index = rounding.indices(size, rounding.Cuts.into_runs(size), (0, 0), np)
            key = [SEED & 0xFFFFFFFF, SEED >> 32]
            bits = rounding.random_bits(key, self.count, leaf.number, index, leaf.value.shape, np)
        with np.errstate(all="ignore"):
            p = leaf.value.astype(F32)
            u, m, v = adam_update(
                c, g=grad, p=p, m=m, v=v, nesterov=nesterov, every_term=False, xp=np
            )
            leaf.value = _stored(None, leaf.value, p - u, bits.param)
            leaf.mu = _stored("mu", leaf.mu, m, bits.mu)
            leaf.nu = _stored("nu", leaf.nu, v, bits.nu)

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


def _widened(name, x):
    return rounding.decode(name, x, np) if is_codes(x) else x.astype(F32)


def _stored(name, old, x, random):
    """A float32 as it is kept: in codes, or in 16 or 32 bits."""
    if is_codes(old):
        return rounding.encode(name, old.format, x, random, np)
    if random is None or old.dtype == F32:
        return store(x, old.dtype, np)
    return rounding.round_at_random(x, old.dtype, random, np)


def sum_of(config, place, leaf, x):
    """The sum over devices and micro-batches: of which dtype, where, and in which order.

    Contributions are rounded once, to the dtype in which they are sent. Sums over devices are of
    adjacent pairs, in float32, over the last axis first; over micro-batches one after the other.
    """
    if place is None:
        return x[0, 0]
    wide = jnp.dtype(config.main_grads)
    sent = wide if config.grad_comm is None else jnp.dtype(config.grad_comm)
    sizes, (shard_axes, replica_axes) = place.data_axes, place.summed_axes
    order = [1 + list(sizes).index(axis) for axis in (*shard_axes, *replica_axes)]
    x = np.moveaxis(x, 1, 0)
    x = x.reshape(len(x), *sizes.values(), *leaf.value.shape)
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
