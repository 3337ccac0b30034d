"""A decoder-only transformer in plain functions, and the part of it that a step trains.

No biases, root mean square norms, learned positions, tied embedding, two-dimensional attention
kernels. Every weight is random: a GPU multiplies matrices with equal rows faster than those of a
real model, by up to a tenth, because it uses less power.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np

HEADS_AXIS = 2


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of a model."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    length: int  # tokens of a sequence


SIZES = {
    "gpt-1.3b": Size(layers=24, width=2048, heads=16, vocabulary=50304, length=1024),
    "gpt-6.7b": Size(layers=32, width=4096, heads=32, vocabulary=50304, length=1024),
    "gpt2-small": Size(layers=12, width=768, heads=12, vocabulary=50304, length=1024),
    "tiny": Size(layers=2, width=64, heads=4, vocabulary=256, length=32),
}


@dataclasses.dataclass(frozen=True)
class Workload:
    """How the model is written and how much data a step takes, such as "scanned-8x4"."""

    is_scanned: bool
    sequences: int  # of a micro-batch of one device
    accumulate_steps: int = 1

    @classmethod
    def parse(cls, name):
        """A workload from its name, or None if it has another form."""
        found = re.fullmatch(r"(unrolled|scanned)-(\d+)(?:x(\d+))?", name)
        return found and cls(found[1] == "scanned", int(found[2]), int(found[3] or 1))

    @property
    def recomputes(self):
        """Whether the backward pass rematerializes each block: if activations are large."""
        return self.sequences >= 8


def shapes(size, is_scanned):
    """Shapes of the float32 parameters."""
    d = size.width
    block = {"ln1": (d,), "qkv": (d, 3 * d), "out": (d, d), "ln2": (d,)}
    block |= {"up": (d, 4 * d), "down": (4 * d, d)}
    tree = {"embed": (size.vocabulary, d), "positions": (size.length, d), "norm": (d,)}
    if is_scanned:
        tree["layers"] = {name: (size.layers, *shape) for name, shape in block.items()}
    else:
        tree |= {f"block{i:02d}": dict(block) for i in range(size.layers)}
    leaf = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    return jax.tree.map(leaf, tree, is_leaf=lambda x: isinstance(x, tuple))


def cut_after(blocks=None):
    """A function from the path of a leaf: whether the model uses it after so many blocks."""
    if blocks is None:
        return None
    first = ("embed", "positions", *(f"block{i:02d}" for i in range(blocks)))
    return lambda path: not any(name in path for name in first)


def layers_of(path):
    """Whether a leaf has a first dimension of layers, or is of a block of an unrolled model."""
    return "scan" if "layers" in path else "block" if "block" in path else None


def draw(tree, sharding, scale=0.02):
    """Random values for these shapes: normal, and ones for the scales of the norms.

    ``sharding``: one for all leaves, or a tree of them. It does not change the values.
    """
    keys = jax.random.split(jax.random.key(0), len(jax.tree.leaves(tree)))
    keys = iter(keys)
    if isinstance(sharding, jax.sharding.Sharding):
        sharding = jax.tree.map(lambda _: sharding, tree)

    def leaf(path, x, of_leaf):
        key, is_scale = next(keys), path[-1].key in ("ln1", "ln2", "norm")
        return _leaf(key, x.shape, is_scale, scale, of_leaf)

    return jax.tree_util.tree_map_with_path(leaf, tree, sharding)


def _leaf(key, shape, is_scale, scale, sharding):
    return _drawing(shape, is_scale, scale, sharding)(key)


@functools.cache  # one program per shape
def _drawing(shape, is_scale, scale, sharding):
    def make(key):
        return jnp.ones(shape) if is_scale else scale * jax.random.normal(key, shape)

    return jax.jit(make, out_shardings=sharding)


def tokens(size, workload, devices):
    """Random tokens: (devices, micro-batches, sequences, length + 1)."""
    shape = (devices, workload.accumulate_steps, workload.sequences, size.length + 1)
    return np.random.default_rng(0).integers(0, size.vocabulary, shape, dtype=np.int32)


def make_loss(size, workload, attention, gather=None, remat_policy=None, place=lambda x: x):
    """Returns ``loss(params, tokens)``, the mean cross-entropy of the next token in nats.

    Args:
      size: The model's.
      workload: Whether it scans, and whether it rematerializes blocks.
      attention: Implementation of ``jax.nn.dot_product_attention``.
      gather: Makes unsharded parameters of a layer from the scan's, or from a block's and from the
        values that must be known ``after``.
      remat_policy: What a block that is not rematerialized may keep; None: everything.
      place: Tells XLA how an activation is sharded, if that is not known.
    """
    apply = functools.partial(_block, heads=size.heads, attention=attention)

    def body(x, layer, **kwargs):
        return place(apply(x, layer if gather is None else gather(layer, **kwargs))), None

    # A loop keeps the passes apart itself; without the barriers XLA can move collectives.
    checkpoint = functools.partial(jax.checkpoint, prevent_cse=not workload.is_scanned)
    if workload.recomputes:
        body = checkpoint(body)
    elif remat_policy is not None:
        body = checkpoint(body, policy=remat_policy)

    def loss(params, tokens):
        with jax.named_scope("model"):
            x = place(params["embed"][tokens[:, :-1]] + params["positions"][None])
            if workload.is_scanned:
                x, _ = jax.lax.scan(body, x, params["layers"])
            else:
                before = x
                for i in range(size.layers):
                    kwargs = {} if gather is None else {"after": before}
                    (x, _), before = body(x, params[f"block{i:02d}"], **kwargs), x
            logits = (_norm(x, params["norm"]) @ params["embed"].T).astype(jnp.float32)
            chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
            return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)

    return loss


def _norm(x, scale):
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-5)
    return wide.astype(x.dtype) * scale[None, None]


def _block(x, w, heads, attention):
    batch, length, width = x.shape
    qkv = (_norm(x, w["ln1"]) @ w["qkv"]).reshape(batch, length, 3 * heads, width // heads)
    q, k, v = jnp.split(qkv, 3, axis=HEADS_AXIS)
    h = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=attention)
    x = x + h.reshape(batch, length, width) @ w["out"]
    return x + jax.nn.gelu(_norm(x, w["ln2"]) @ w["up"]) @ w["down"]
