"""A small convolutional net with kernels in the layout that GPUs prefer."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout

OHWI = (3, 0, 1, 2)
SHAPES = {
    "stem": (7, 7, 3, 64),
    "conv": (3, 3, 64, 64),
    "down": (3, 3, 64, 128),
    "head": (128, 10),
    "bias": (10,),
}
ORDERS = {name: OHWI if len(shape) == 4 else None for name, shape in SHAPES.items()}


def loss(params, x):
    for name, stride in (("stem", 2), ("conv", 1), ("down", 2)):
        x = jax.nn.relu(
            jax.lax.conv_general_dilated(
                x, params[name].astype(x.dtype), (stride, stride), "SAME",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )
        )  # fmt: skip
    logits = x.mean((1, 2)) @ params["head"].astype(x.dtype) + params["bias"][None]
    return jnp.mean(jnp.square(logits.astype(jnp.float32)))


def numbers(shapes, seed, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return {k: jnp.asarray(rng.normal(size=s), dtype) for k, s in shapes.items()}


def in_order(tree, orders):
    """The arrays of a tree, in the layouts that ``orders`` has for the leaves with these names."""

    def put(path, x):
        order = next((orders[k.key] for k in path if getattr(k, "key", None) in orders), None)
        if order is None or len(order) != x.ndim:
            return x
        return jax.device_put(x, Format(Layout(order), x.sharding))

    return jax.tree_util.tree_map_with_path(put, tree)


def orders_in(tree):
    return jax.tree.map(lambda x: x.format.layout.major_to_minor, tree)
