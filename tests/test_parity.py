"""The same 30 training steps with optax.adamw and with jdistadam, in each way to use it.

Of all tests, read this one first. To run it alone: ``pytest tests/test_parity.py``.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jdistadam as jda
from support.bits import assert_trees_same_bits
from support.samples import few

# None of these is a default. float32 represents them exactly, so a float64 run uses the same values.
HYPER = dict(learning_rate=2**-6, b1=0.875, b2=1 - 2**-8, eps=2**-8, weight_decay=0.125)
CLIP = 0.25  # the first steps are clipped, the last ones are not
LINEN = nn.Sequential([nn.Dense(32), nn.tanh, nn.Dense(8)])

rng = np.random.default_rng(0)
X, TEACHER = rng.normal(size=(30, 64, 16)).astype(np.float32), rng.normal(size=(16, 8)) / 4
BATCHES = list(zip(X, np.tanh(X @ TEACHER).astype(np.float32), strict=True))


def first_params():
    return LINEN.init(jax.random.key(0), X[0])["params"]


def placed(arrays, dtype, sharding):
    return jax.tree.map(lambda x: jax.device_put(x.astype(dtype), sharding), arrays)


def loss_fn(params, batch):
    return jnp.mean(jnp.square(LINEN.apply({"params": params}, batch[0]) - batch[1]))


def train_linen(adamw, dtype=np.float32, sharding=None):
    """Trains in Flax's TrainState; returns the losses, the parameters and the optimizer's state."""
    tx = optax.chain(optax.clip_by_global_norm(CLIP), adamw(**HYPER))
    params, batches = placed((first_params(), BATCHES), dtype, sharding)
    state, losses = TrainState.create(apply_fn=LINEN.apply, params=params, tx=tx), []

    @jax.jit
    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    for batch in batches:
        state, loss = step(state, batch)
        losses.append(loss)
    return losses, state.params, state.opt_state


def train_nnx(adamw, dtype=np.float32, sharding=None):
    """The same in nnx.Optimizer."""
    tx = optax.chain(optax.clip_by_global_norm(CLIP), adamw(**HYPER))
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(16, 32, rngs=rngs), nnx.tanh, nnx.Linear(32, 8, rngs=rngs))
    params, batches = placed((nnx.state(model), BATCHES), dtype, sharding)
    nnx.update(model, params)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, y):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean(jnp.square(model(x) - y)))(model)
        optimizer.update(model, grads)
        return loss

    losses = [step(model, optimizer, *batch) for batch in batches]
    return losses, *nnx.as_pure((nnx.state(model), optimizer.opt_state))


def train_distributed(strategy, **options):
    """The same with jda.train_step, over 8 devices."""
    mesh = Mesh(jax.devices("cpu"), ("data",))
    tx = jda.distributed(jda.fused_adamw(**HYPER), mesh=mesh, sharding_strategy=strategy, **options)
    state, step, losses = jda.TrainState.create(first_params(), tx), jda.train_step(loss_fn, tx), []
    for batch in BATCHES:
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    return losses, *jda.to_optax_state(state, tx)[:2]


@functools.cache
def train_optax(train):
    """optax.adamw on one device, in float32 and in float64."""
    with jax.enable_x64(True):
        float64 = train(optax.adamw, np.float64)
    return train(optax.adamw), float64


def assert_trains_as_optax(train, losses, params, _):
    """The loss falls, and the parameters are as exact as those of optax.

    All runs compute the same formula but round in different places. The float64 run measures the
    error of each: that of optax must be at most half an ulp per step, and ours at most 1.5 times
    that of optax. (With an eps near zero, Adam would amplify rounding errors of small gradients.)
    """
    assert losses[-1] < losses[0] / 8
    (_, theirs, _), (_, exact, _) = train_optax(train)
    ours, theirs, exact = (
        np.concatenate([np.ravel(x).astype(np.float64) for x in jax.tree.leaves(params)])
        for params in (params, theirs, exact)
    )
    error = np.linalg.norm(theirs - exact)
    assert error <= len(BATCHES) * 2**-24 * np.linalg.norm(exact)
    assert np.linalg.norm(ours - exact) <= 1.5 * error


@few(1)
@pytest.mark.parametrize("train", [train_linen, train_nnx])
def test_fused_adamw_in_flax_trains_as_optax(train):
    assert_trains_as_optax(train, *train(jda.fused_adamw))


@few(1)
@pytest.mark.parametrize("train", [train_linen, train_nnx])
def test_fused_adamw_sharded_over_8_devices_trains_as_optax_on_one(train):
    """XLA chooses the order in which it sums gradients over devices, so the bits may differ."""
    sharding = NamedSharding(Mesh(jax.devices("cpu"), ("data",)), PartitionSpec("data"))
    losses, *state = train(jda.fused_adamw, sharding=sharding)
    arrays = [x for x in jax.tree.leaves(state) if x.ndim]  # all but the step count
    assert all(x.addressable_shards[0].data.size == x.size / 8 for x in arrays)
    assert_trains_as_optax(train, losses, *state)


STRATEGIES = pytest.mark.parametrize(
    "strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"]
)


@few(1)
@STRATEGIES
def test_every_strategy_trains_as_optax_on_one_device(strategy):
    assert_trains_as_optax(train_linen, *train_distributed(strategy, max_grad_norm=CLIP))


@functools.cache
def train_in_parts():
    """fused_adamw on one device: it adds the gradients of 8 parts of a batch in pairs, as 8 devices do."""
    tx, grad = jda.fused_adamw(**HYPER), jax.jit(jax.grad(loss_fn))
    params, state = first_params(), tx.init(first_params())
    for x, y in BATCHES:
        sums = [grad(params, part) for part in zip(np.split(x, 8), np.split(y, 8), strict=True)]
        while len(sums) > 1:
            pairs = zip(sums[::2], sums[1::2], strict=True)
            sums = [jax.tree.map(jnp.add, *pair) for pair in pairs]
        params, state = tx.step(jax.tree.map(lambda x: x / 8, sums[0]), state, params)
    return params, state


@few(1)
@STRATEGIES
def test_every_strategy_has_the_bits_of_one_device(strategy):
    policy = jda.MixedPrecisionPolicy(grad_reduce_dtype=jnp.float32)
    _, *got = train_distributed(strategy, policy=policy)
    assert_trees_same_bits(tuple(got), train_in_parts())
