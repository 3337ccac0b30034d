"""A decoder-only transformer in Flax: pre-norm blocks, learned positions, tied embedding."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from lm.corpus import VOCABULARY_SIZE


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """Sizes of a model and of its training batch."""

    layers: int
    width: int
    heads: int
    length: int  # context, in bytes
    batch: int  # sequences per step, over all devices


PRESETS = {
    "tiny": GPTConfig(layers=3, width=128, heads=4, length=128, batch=32),
    "gpt2-small": GPTConfig(layers=12, width=768, heads=12, length=1024, batch=32),
    "gpt-1.3b": GPTConfig(layers=26, width=2048, heads=16, length=1024, batch=32),
}


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a layer norm and a residual.

    With ``axis``, heads and hidden units are split over this axis of the mesh of jax.set_mesh; with
    ``batch_axis``, sequences over that one, if XLA would not know where to place them.
    """

    config: GPTConfig
    dtype: Any
    axis: str | None = None
    batch_axis: str | None = None

    @nn.compact
    def __call__(self, x):
        c, axis = self.config, self.axis
        scale_down = nn.initializers.normal(0.02 / (2 * c.layers) ** 0.5)
        normal = nn.initializers.normal(0.02)

        h = nn.LayerNorm(dtype=self.dtype)(x)
        qkv = nn.DenseGeneral(
            (3, c.heads, c.width // c.heads), kernel_init=normal, name="qkv", dtype=self.dtype
        )(h)
        q, k, v = (qkv[..., i, :, :] for i in range(3))
        h = self.place(jax.nn.dot_product_attention(q, k, v, is_causal=True), axis, None)
        x = x + nn.DenseGeneral(
            c.width, axis=(-2, -1), kernel_init=scale_down, name="out", dtype=self.dtype
        )(h)
        x = self.place(x, None)

        h = nn.LayerNorm(dtype=self.dtype)(x)
        h = nn.gelu(nn.Dense(4 * c.width, kernel_init=normal, name="up", dtype=self.dtype)(h))
        h = self.place(h, axis)
        x = x + nn.Dense(c.width, kernel_init=scale_down, name="down", dtype=self.dtype)(h)
        return self.place(x, None)

    def place(self, x, *names):
        """Tells XLA over which axis the last dimensions of an activation are split."""
        if self.axis is None and self.batch_axis is None:
            return x
        batch = (P.UNCONSTRAINED,) * (x.ndim - len(names))  # stays as it is
        if self.batch_axis is not None:
            batch = (self.batch_axis, *(None for _ in batch[1:]))
        return jax.lax.with_sharding_constraint(x, P(*batch, *names))


def partition_specs(params, axis):
    """Returns over which axis each parameter is split for a ``Block`` with this axis."""
    split = {
        ("qkv", "kernel"): P(None, None, axis),  # (width, 3, heads, width / heads)
        ("qkv", "bias"): P(None, axis),
        ("out", "kernel"): P(axis),
        ("up", "kernel"): P(None, axis),
        ("up", "bias"): P(axis),
        ("down", "kernel"): P(axis),
    }

    def spec(path, x):
        names = tuple(key.key for key in path)
        found = split.get(names[-2:], P())
        return P(None, *found) if "layers" in names else found

    return jax.tree_util.tree_map_with_path(spec, params)


class GPT(nn.Module):
    """Maps tokens (batch, length) to logits (batch, length, vocabulary), float32 or wider.

    With ``scans``, the parameters of all blocks are stacked under "layers", and a scan applies the
    blocks in sequence, each to its part after ``gather``. Otherwise ``gather`` takes the parameters
    of one block, and the values that must be known ``after``.
    """

    config: GPTConfig
    dtype: Any = jnp.float32
    scans: bool = False
    gather: Any = None  # None: the parameters are whole
    remat_policy: Any = None
    axis: str | None = None  # of the mesh, over which blocks are split
    batch_axis: str | None = None  # and sequences, if XLA has to place them

    @nn.compact
    def __call__(self, tokens):
        c = self.config
        normal = nn.initializers.normal(0.02)
        table = self.param("bytes", normal, (VOCABULARY_SIZE, c.width)).astype(self.dtype)
        positions = self.param("positions", normal, (c.length, c.width)).astype(self.dtype)
        # The gradient of a lookup adds thousands of rows into each in sequence.
        x = jax.nn.one_hot(tokens, VOCABULARY_SIZE, dtype=self.dtype) @ table
        x = self.block().place(x + positions[: tokens.shape[1]], None)
        if self.scans:
            x = self.scan(x)
        elif self.gather is not None and not self.is_initializing():
            x = self.gathered_blocks(x)
        else:
            for i in range(c.layers):
                x = self.block(name=f"block_{i}")(x)
        x = nn.LayerNorm(dtype=self.dtype, name="norm")(x)
        return (x @ table.T).astype(jnp.promote_types(self.dtype, jnp.float32))

    def block(self, name=None):
        """A block: one of this module's parts with a name, otherwise one with given parameters."""
        parent = {"name": name} if name else {"parent": None}
        return Block(self.config, self.dtype, self.axis, self.batch_axis, **parent)

    def scan(self, x):
        """Applies all blocks, whose parameters are stacked."""
        block = self.block()

        def init(key):
            keys = jax.random.split(key, self.config.layers)
            return jax.vmap(lambda key: block.init(key, x[:1])["params"])(keys)

        # A scan keeps the passes apart; checkpoint's barriers would keep XLA from overlapping the
        # gather of the next layer with this one.
        @functools.partial(jax.checkpoint, policy=self.remat_policy, prevent_cse=False)
        def body(x, layer):
            layer = layer if self.gather is None else self.gather(layer)
            return block.apply({"params": layer}, x), None

        return jax.lax.scan(body, x, self.layers(init))[0]

    def gathered_blocks(self, x):
        """Applies the blocks in sequence, each to its gathered parameters."""
        block = self.block()

        @functools.partial(jax.checkpoint, policy=self.remat_policy)
        def body(layer, x, before):
            return block.apply({"params": self.gather(layer, after=before)}, x)

        before = x
        for i in range(self.config.layers):
            x, before = body(self.get_variable("params", f"block_{i}"), x, before), x
        return x

    def layers(self, init):
        """Returns the stacked parameters; shards must bypass Flax's check of shapes."""
        if self.is_initializing():
            return self.param("layers", init)
        return self.get_variable("params", "layers")


def loss_fn(model: GPT):
    """Returns ``loss(params, tokens)``: mean cross-entropy of the next byte, in nats."""

    def loss(params, tokens):
        logits = model.apply({"params": params}, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return loss
