"""The scanned models of docs/flax.md train as unscanned ones do with optax on one device."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.flatten_util import ravel_pytree

import jdistadam as jda
from support.paths import ROOT
from support.samples import few

PAGE = (ROOT / "docs/flax.md").read_text()
# None of these is a default. float32 represents them exactly, so a float64 run uses the same values.
HYPER = dict(learning_rate=2**-9, b1=0.875, b2=1 - 2**-8, eps=2**-8, weight_decay=0.125)
STEPS, DEVICES, LAYERS, WIDTH = 4, 2, 4, 128
BATCHES = np.random.default_rng(0).normal(size=(STEPS, 16, WIDTH)).astype(np.float32)
ONES = np.ones((16 // DEVICES, WIDTH), np.float32)


def from_page(start, end, **names):
    """Runs the page from the line that begins with ``start`` to that with ``end``."""
    names |= dict(functools=functools, jax=jax, jda=jda, jnp=jnp, nn=nn, nnx=nnx)
    exec(re.search(rf"^{start}.*?(?=^{end})", PAGE, re.M | re.S)[0], names)
    return names


class Dropout(nn.Module):
    """The dropout of a layer: Flax makes its key of names, and of how often it was called."""

    @nn.compact
    def __call__(self, x):
        return x, nn.Dropout(0.1, deterministic=False)(ONES)


class DropoutOfLayers(nn.Module):
    @nn.compact
    def __call__(self):
        scan = nn.scan(Dropout, split_rngs={"dropout": True}, length=LAYERS)
        return scan(name="blocks")(None)[1]


def of_linen(tx):
    """The loss; shapes of its state; what dropout keeps in a layer; params and statistics as lists."""
    model = from_page("from collections.abc", "tx = ")["Scanned"]
    net = model(functools.partial(jda.gather_params, tx=tx))
    loss_fn = from_page(r"def loss_fn[^\n]*rng\):\n    outputs", "state", net=net)["loss_fn"]
    key, x = jax.random.key(0), BATCHES[0]
    with pytest.raises(jda.MeshError, match=r"gather_params: called outside of jax\.shard_map"):
        jax.eval_shape(net.init, key, x)
    stats = dict(jax.eval_shape(model().init, key, x))

    def lists(params, stats):
        layers = [params["blocks"][name] for name in ("Dense_0", "BatchNorm_0", "Dense_1")]
        return [*layers, params["Dense_0"]], stats["batch_stats"]["blocks"]["BatchNorm_0"]

    def dropout(key):
        return DropoutOfLayers().apply({}, rngs={"dropout": key})

    return loss_fn, (stats.pop("params"), stats), dropout, lists


def of_nnx(tx):
    page = from_page("class Layer", "state = ", tx=tx)

    def lists(params, stats):
        params, stats = map(nnx.to_pure_dict, (nnx.State(params), stats))
        layers = [params["blocks"][name] for name in ("up", "norm", "down")]
        return [*layers, params["head"]], stats["norm"]

    def dropout(key):
        layer = lambda key: nnx.Dropout(0.1)(ONES, rngs=nnx.Rngs(key))  # noqa: E731
        return jax.vmap(layer)(jax.random.split(key, LAYERS))

    return page["loss_fn"], (page["params"], page["stats"]), dropout, lists


def loss_of_device(params, stats, x, is_kept):
    """The model without Flax, a layer after the other; ``is_kept``: by dropout, of each layer."""
    *layers, head = params
    new = []
    for i in range(LAYERS):
        up, norm, down = jax.tree.map(lambda a, i=i: a[i], layers)
        y = x @ up["kernel"] + up["bias"]
        mean, var = y.mean(0), y.var(0)
        new.append({"mean": mean, "var": var})
        y = (y - mean) / jnp.sqrt(var + 1e-5) * norm["scale"] + norm["bias"]
        y = jnp.where(is_kept[i], jax.nn.relu(y) / 0.9, 0)
        x = x + y @ down["kernel"] + down["bias"]
    new = jax.tree.map(lambda *a: jnp.stack(a), *new)
    new = jax.tree.map(lambda a, b: 0.99 * a + 0.01 * b, stats, new)
    return jnp.mean(jnp.square(x @ head["kernel"] + head["bias"] - 1.0)), new


def train_optax(params, stats, is_kept):
    """Takes the mean of the devices' losses and statistics, on one device in float64."""
    params, tree_of = ravel_pytree(jax.tree.map(jnp.float64, params))
    stats, adamw, losses = jax.tree.map(jnp.float64, stats), optax.adamw(**HYPER), []

    def loss_fn(params, *arguments):
        of_devices = jax.vmap(loss_of_device, (None, None, 0, 0))
        return jax.tree.map(lambda a: a.mean(0), of_devices(tree_of(params), *arguments))

    @jax.jit
    def step(params, opt_state, *arguments):
        (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, *arguments)
        updates, opt_state = adamw.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, stats, loss

    opt_state = adamw.init(params)
    for x, kept in zip(np.float64(BATCHES), is_kept, strict=True):
        x = x.reshape(DEVICES, *ONES.shape)
        params, opt_state, stats, loss = step(params, opt_state, stats, x, kept)
        losses.append(loss)
    return losses, tree_of(params), stats


@few(1)
@pytest.mark.parametrize("case", [of_linen, of_nnx])
def test_scanned_layers_with_dropout_and_batch_norm_train_as_optax(case):
    """ZeRO-3 in float32: losses, params and running statistics are those of optax in float64.

    Up to half an ulp per step, as much as optax in float32 may differ in tests/test_parity.py.
    """
    mesh = jax.sharding.Mesh(jax.devices("cpu")[:DEVICES], ("data",))
    tx = jda.distributed(
        jda.fused_adamw(**HYPER),
        mesh=mesh,
        sharding_strategy="optim_grads_params",
        layers=lambda path: "scan" if "blocks" in path else None,
    )
    loss_fn, shapes, dropout, lists = case(tx)
    rng, key = np.random.default_rng(1), jax.random.key(5)
    params, stats = jax.tree.map(lambda x: jnp.float32(rng.normal(size=x.shape) / 16), shapes)
    state = jda.TrainState.create(params, tx, model_state=stats, rng=key)
    step, losses, is_kept = jda.train_step(loss_fn, tx), [], []

    @jax.jit
    def next_key_and_kept(key):
        key, of_step = jax.random.split(key)
        of_device = lambda i: dropout(jax.random.fold_in(of_step, i)) != 0  # noqa: E731
        return key, jax.vmap(of_device)(jnp.arange(DEVICES))

    for batch in BATCHES:
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
        key, kept = next_key_and_kept(key)
        is_kept.append(kept)
    assert not np.array_equal(is_kept[0][0, 0], is_kept[0][0, 1])  # of two layers
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        exact = train_optax(*lists(params, stats), is_kept)
    ours = losses, *lists(jda.full_params(state, tx), state.model_state)
    for a, b in zip(ours, exact, strict=True):
        a, b = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(t)]) for t in (a, b))
        assert np.linalg.norm(a - b) <= STEPS * 2**-24 * np.linalg.norm(b)
