"""A model of stacked layers, gathered one at a time inside a scan."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jdistadam as jda

LAYERS, WIDTH = 6, 64


def layers_of(path):
    return "scan" if "layers" in path else None


def shapes(layers=LAYERS, width=WIDTH):
    return {
        "embed": (257, width),  # does not divide
        "layers": {
            "mlp": {"up": (layers, width, 4 * width), "down": (layers, 4 * width, width)},
            "scale": (layers, width),  # too small to be scattered
            "odd": (layers, 3001),  # large, and does not divide
        },
        "head": (width, 512),
    }


def make_params(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda s: jnp.asarray(rng.normal(size=s) / 8, dtype), shapes(), is_leaf=lambda s: type(s) is tuple
    )  # fmt: skip


def scanned_products(gather):
    """A loss whose gradient is the mean of the batch's rows, computed by layer in a scan."""

    def products(params, x):
        return sum(jax.tree.leaves(jax.tree.map(lambda p, x: jnp.vdot(p, x.mean(0)), params, x)))

    def loss(params, batch):
        @functools.partial(jax.checkpoint, policy=jda.remat_policy)
        def body(total, layer_and_rows):
            layer, rows = layer_and_rows
            return total + products(gather(layer), rows), None

        params, batch = dict(params), dict(batch)
        layers, rows = params.pop("layers"), batch.pop("layers")
        rows = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), rows)
        return jax.lax.scan(body, products(params, batch), (layers, rows))[0]

    return loss


def loss_of(gather, policy=None, checkpoint=jax.checkpoint):
    """A residual network; ``gather`` gets one layer's parameters inside the scan."""

    def loss(params, x):
        @functools.partial(checkpoint, policy=policy)
        def body(x, layer):
            layer = gather(layer)
            h = jnp.tanh((x * layer["scale"][None]) @ layer["mlp"]["up"])
            return x + h @ layer["mlp"]["down"] + jnp.mean(layer["odd"]), None

        x, _ = jax.lax.scan(body, x @ params["embed"], params["layers"])
        return jnp.mean(jnp.square((x @ params["head"]).astype(jnp.float32)))

    return loss
