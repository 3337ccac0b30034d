"""Two decoder-only transformers in plain functions: one like GPT-2, one like Llama.

Both have no biases, root mean square norms and two-dimensional attention kernels. The GPT has
learned positions, a perceptron with GELU and a tied embedding. The Llama has rotary positions,
fewer heads of keys and values than of queries, SwiGLU, and an output matrix of its own.

Every weight is random: a GPU multiplies matrices with equal rows faster than those of a real model,
by up to a tenth, because it uses less power.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np

HEADS_AXIS = 2
ROTARY_BASE = 10_000.0


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of a model; with ``kv_heads`` it is like Llama, else like GPT-2."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    length: int  # tokens of a sequence
    kv_heads: int | None = None
    hidden: int | None = None  # units of the perceptron; None: 4 * width

    @property
    def is_llama(self):
        return self.kv_heads is not None

    @property
    def head_width(self):
        return self.width // self.heads


SIZES = {
    "gpt-1.3b": Size(layers=24, width=2048, heads=16, vocabulary=50304, length=1024),
    "gpt-6.7b": Size(layers=32, width=4096, heads=32, vocabulary=50304, length=1024),
    "gpt2-small": Size(layers=12, width=768, heads=12, vocabulary=50304, length=1024),
    "llama-1.3b": Size(24, 2048, 16, 32000, 2048, kv_heads=8, hidden=5632),
    "llama-7b": Size(32, 4096, 32, 32000, 2048, kv_heads=8, hidden=14336),
    "tiny": Size(layers=2, width=64, heads=4, vocabulary=256, length=32),
    "tiny-llama": Size(2, 64, 4, 256, 32, kv_heads=2, hidden=128),
}

CHECKPOINTS = ("none", "dots", "blocks")
"""What the backward pass computes again in each block: nothing; all but matrix products and
attention; everything."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """How the model is written and how much data a step takes, such as "scanned-8x4"."""

    is_scanned: bool
    sequences: int  # of a micro-batch of one device
    accumulate_steps: int = 1
    checkpoint: str = "none"  # of CHECKPOINTS

    @classmethod
    def parse(cls, name, checkpoint="none"):
        """A workload from its name, or None if it has another form."""
        found = re.fullmatch(r"(unrolled|scanned)-(\d+)(?:x(\d+))?", name)
        if not found:
            return None
        return cls(found[1] == "scanned", int(found[2]), int(found[3] or 1), checkpoint)


def shapes(size, is_scanned):
    """Shapes of the float32 parameters."""
    d, hidden = size.width, size.hidden or 4 * size.width
    block = {"ln1": (d,), "out": (d, d), "ln2": (d,), "down": (hidden, d)}
    tree = {"embed": (size.vocabulary, d), "norm": (d,)}
    if size.is_llama:
        block["qkv"] = (d, (size.heads + 2 * size.kv_heads) * size.head_width)
        block["up"] = (d, 2 * hidden)
        tree["output"] = (d, size.vocabulary)
    else:
        block |= {"qkv": (d, 3 * d), "up": (d, hidden)}
        tree["positions"] = (size.length, d)
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


def saves_products(primitive, *_, **params):
    """A policy of ``jax.checkpoint``: keeps matrix products and the results of attention."""
    if primitive.name == "dot_general":
        return not any(params["dimension_numbers"][1])  # others are inside of attention
    return primitive.name.startswith("dot_product_attention")


def _checkpointed(body, workload, remat_policy):
    """A block that keeps what the workload says and, of that, what ``remat_policy`` allows."""
    # A loop keeps the passes apart itself; without the barriers XLA can move collectives.
    checkpoint = functools.partial(jax.checkpoint, prevent_cse=not workload.is_scanned)
    if workload.checkpoint == "blocks":
        return checkpoint(body)
    if workload.checkpoint == "none":
        return body if remat_policy is None else checkpoint(body, policy=remat_policy)
    if remat_policy is None:
        return checkpoint(body, policy=saves_products)

    def policy(*args, **params):
        return saves_products(*args, **params) and remat_policy(*args, **params)

    return checkpoint(body, policy=policy)


def make_loss(size, workload, attention, gather=None, remat_policy=None, place=lambda x: x):
    """Returns ``loss(params, tokens)``, the mean cross-entropy of the next token in nats.

    Args:
      size: The model's.
      workload: Whether it scans, and what the backward pass computes again.
      attention: Implementation of ``jax.nn.dot_product_attention``.
      gather: Makes unsharded parameters of a layer from the scan's, or from a block's and from the
        values that must be known ``after``.
      remat_policy: What a block may keep for the backward pass; None: everything.
      place: Tells XLA how an activation is sharded, if that is not known: inside of blocks, too,
        or XLA sends activations where they are smaller than weights.
    """
    apply = functools.partial(_block, size=size, attention=attention, place=place)

    def body(x, layer, **kwargs):
        return place(apply(x, layer if gather is None else gather(layer, **kwargs))), None

    body = _checkpointed(body, workload, remat_policy)

    def loss(params, tokens):
        with jax.named_scope("model"):
            x = params["embed"][tokens[:, :-1]]
            x = x if size.is_llama else x + params["positions"][None]
            # With 32 sequences or more, XLA would transpose activations before it adds gradients of
            # a scale over two dimensions.
            x = place(x.reshape(-1, size.width))
            if workload.is_scanned:
                x, _ = jax.lax.scan(body, x, params["layers"])
            else:
                before = x
                for i in range(size.layers):
                    kwargs = {} if gather is None else {"after": before}
                    (x, _), before = body(x, params[f"block{i:02d}"], **kwargs), x
            output = params["output"] if size.is_llama else params["embed"].T
            logits = (_norm(x, params["norm"]) @ output).astype(jnp.float32)
            # Not a gather: its gradient would be a scatter into an array of all logits.
            is_next = jax.nn.one_hot(tokens[:, 1:].ravel(), size.vocabulary)
            chosen = jnp.sum(logits * is_next, axis=-1)
            return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)

    return loss


def _norm(x, scale):
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-5)
    return wide.astype(x.dtype) * scale[None]


def _rotated(x):
    """Rotary positions: the two halves of each head, (batch, length, heads, head width)."""
    half = x.shape[-1] // 2
    speeds = ROTARY_BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * speeds[None]
    cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _block(x, w, size, attention, place):
    qkv = place(_norm(x, w["ln1"]) @ w["qkv"])
    qkv = qkv.reshape(-1, size.length, qkv.shape[-1] // size.head_width, size.head_width)
    kv_heads = size.kv_heads or size.heads
    q, k, v = jnp.split(qkv, (size.heads, size.heads + kv_heads), axis=HEADS_AXIS)
    if size.is_llama:
        q, k = _rotated(q), _rotated(k)
    h = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=attention)
    x = x + place(place(h.reshape(x.shape)) @ w["out"])
    h = place(_norm(x, w["ln2"]) @ w["up"])
    if size.is_llama:
        gate, h = jnp.split(h, 2, axis=-1)
        h = place(jax.nn.silu(gate) * h)
    else:
        h = place(jax.nn.gelu(h))
    return x + place(h @ w["down"])
