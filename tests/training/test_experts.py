"""The two ways to train experts in docs/experts.md, against a loop over all experts in float64."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdistadam as jda
from support.bits import assert_trees_same_bits
from support.paths import ROOT

MODEL, *WAYS = re.findall(r"```python\n(.*?)```", (ROOT / "docs/experts.md").read_text(), re.S)
HYPER = dict(learning_rate=3e-3, b1=0.87, b2=0.9973, eps=1e-7, weight_decay=0.13)
MAX_NORM, DEVICES, STEPS, U = 0.03, 8, 6, 2.0**-24


@functools.cache
def model():
    """The names that the page defines before it chooses a way."""
    page: dict = {}
    exec(MODEL, page)
    return page


def of_page(way):
    """The names that the page defines before it trains, with a loss in float64."""

    def device_loss(params, tokens):
        return model()["device_loss"](*jax.tree.map(jnp.float64, (params, tokens)))

    adamw = jda.fused_adamw(**HYPER)
    page = model() | {"device_loss": device_loss, "adamw": adamw, "MAX_NORM": MAX_NORM}
    exec(way.partition("for _ in range(20):")[0], page)
    return page


class WithTrainStep:
    """One optimizer, whose model axis is that of the experts."""

    def __init__(self):
        self.page = of_page(WAYS[0])

    def step(self, tokens):
        """The loss of the step."""
        self.page["state"], metrics = self.page["step"](self.page["state"], tokens)
        return metrics["loss"]

    def states(self):
        """States and optimizers; each clips by the norm of its own parameters."""
        return [(self.page["state"], self.page["tx"])]


class WithTwoOptimizers:
    """One for the dense parameters, and one for the experts."""

    def __init__(self):
        self.page = of_page(WAYS[1])

    def step(self, tokens):
        *self.page["pairs"], loss = self.page["step"](*self.page["pairs"], tokens)
        return loss

    def states(self):
        both = self.page["dense_tx"], self.page["expert_tx"]
        return [(jda.TrainState(*x), tx) for x, tx in zip(self.page["pairs"], both, strict=True)]


def dense_loss(params, tokens):
    """The loss of one device's tokens, and how many places at experts were missing: no axis."""
    x = jnp.tanh(tokens @ params["embed"])
    probs = jax.nn.softmax(x @ params["router"])
    first, second = jnp.argsort(-probs)[:, :2].T

    def add(sums, expert):
        y, balance, missing = sums
        e, up, down = expert
        goes = jnp.stack([first == e, second == e])  # all first choices come before the second ones
        place = (jnp.cumsum(goes.reshape(-1)) - 1).reshape(goes.shape)
        is_there = jnp.any(goes & (place < model()["CAPACITY"]), 0)
        y += jnp.where(is_there, probs[:, e], 0)[:, None] * (jnp.tanh(x @ up) @ down)
        balance += jnp.mean(first == e) * jnp.mean(probs[:, e])
        return (y, balance, missing + jnp.sum(goes) - jnp.sum(is_there)), None

    count = model()["EXPERTS"]
    experts = jnp.arange(count), params["up"], params["down"]
    (y, balance, missing), _ = jax.lax.scan(add, (jnp.zeros_like(x), 0.0, 0), experts)
    return jnp.mean(jnp.square(x + y - tokens)) + 0.01 * count * balance, missing


@functools.cache
def of_devices():
    """Losses, missing places and gradients of each device, for all of the tokens by device."""
    loss = jax.value_and_grad(dense_loss, has_aux=True)
    return jax.jit(jax.vmap(loss, (None, 0)))


def read(states):
    """Main parameters, moments and norms as float64, for each optimizer by leaf."""
    found = []
    for state, tx in states:
        params, (adam, *_), _ = jda.to_optax_state(state, tx)
        assert_trees_same_bits(jda.full_params(state, tx), params)
        arrays = {"params": params, "mu": adam.mu, "nu": adam.nu}
        found.append((jax.tree.map(np.float64, arrays), float(state.opt_state.grad_norm)))
    return found


def check_step(old, new, grads, norm, count):
    """One step of one optimizer from gradients in float64.

    Each device's contribution is rounded to float32 once, and passes at most 7 additions; their
    mean is an exact product: 8 u times the mean of their absolute values. A norm is wrong by the
    norm of these errors, and by half of its own roundings (distributed/norms.py), 34 here: 1, 7,
    1, 10, 2 for pairs of buckets, 8 for devices, 2 for scales, 3 for square root and clip. A moment
    adds two products, each of at most 8 roundings: of coefficients, factors and sum. The update has
    the bounds of ``Bound`` in tests/interop/test_torch.py, here at our own moments. 1 % stands for
    terms of second order.
    """
    b1, b2, u = HYPER["b1"], HYPER["b2"], 1.01 * U
    mean = {k: x.mean(0) for k, x in grads.items()}
    error = {k: 8 * u * np.abs(x).mean(0) for k, x in grads.items()}
    exact, off = (np.sqrt(sum((x**2).sum() for x in tree.values())) for tree in (mean, error))
    assert abs(norm - exact) <= off + 17 * u * exact
    assert exact > 1.5 * MAX_NORM  # so that it clips
    c1, c2 = 1 - b1**count, 1 - b2**count
    of_c1, of_c2 = ((count + 8) * u * (1 - c) / c + 2 * u for c in (c1, c2))
    for k, grad in mean.items():
        clipped = MAX_NORM / norm * grad
        apart = MAX_NORM / norm * error[k]
        limits = {
            "mu": (1 - b1) * apart + 8 * u * (b1 * np.abs(old["mu"][k]) + np.abs(clipped)),
            "nu": (1 - b2) * (2 * np.abs(clipped) + apart) * apart
            + 12 * u * (b2 * old["nu"][k] + (1 - b2) * clipped**2),
        }
        wanted = {
            "mu": b1 * old["mu"][k] + (1 - b1) * clipped,
            "nu": b2 * old["nu"][k] + (1 - b2) * clipped**2,
        }
        update = new["mu"][k] / c1 / (np.sqrt(new["nu"][k] / c2) + HYPER["eps"])
        largest = np.maximum(np.abs(old["params"][k]), np.abs(new["params"][k]))
        limits["params"] = 6 * u * largest
        limits["params"] += HYPER["learning_rate"] * np.abs(update) * (of_c1 + of_c2 / 2 + 16 * u)
        decayed = update + HYPER["weight_decay"] * old["params"][k]
        wanted["params"] = old["params"][k] - HYPER["learning_rate"] * decayed
        for name, want in wanted.items():
            far = np.abs(new[name][k] - want)
            assert (far <= limits[name]).all(), (k, name, count, (far / limits[name]).max())
            assert np.abs(want).max() > 1e4 * limits[name].max()  # the bound says something


@pytest.mark.parametrize("make", [WithTrainStep, WithTwoOptimizers])
def test_experts_train_as_in_a_loop_over_all_of_them(make):
    """Six clipped, decayed steps, each from our own state; some tokens find their experts full."""
    way = make()
    rng, num_missing = np.random.default_rng(0), 0
    with jax.enable_x64(True):
        states = read(way.states())
        for count in range(1, STEPS + 1):
            tokens = np.float32(rng.normal(size=model()["tokens"].shape))
            before = {k: x for arrays, _ in states for k, x in arrays["params"].items()}
            parts = np.float64(tokens).reshape(DEVICES, -1, tokens.shape[1])
            (losses, missing), grads = jax.device_get(of_devices()(before, parts))
            got = way.step(tokens)
            assert abs(float(got) - losses.mean()) <= 8 * U * np.abs(losses).mean()
            for (old, _), (new, norm) in zip(states, after := read(way.states()), strict=True):
                check_step(old, new, {k: grads[k] for k in old["mu"]}, norm, count)
            states, num_missing = after, num_missing + missing.sum()
    assert 0 < num_missing < STEPS * 2 * len(tokens) / 2
