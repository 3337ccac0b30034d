"""Moments in codes follow their gradients as float32 ones do, over steps of unlike gradients.

Each row of the leaf is a block of codes with gradients of one of KINDS. What is compared is derived
in [Note: moments that follow], jdistadam/core/codecs.py.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdistadam as jda
from jdistadam.core.codecs import BLOCK8, BLOCK16, FLOAT32, growth
from support.samples import often

LONG, SHORT, STOP = 10_000, 1_500, 30
ROWS, REPEAT = 5, 251  # rows of a kind; noise comes again after so many steps
KINDS = ("noise", "some stop", "all stop", "spike", "rare", "unlike", "constant")
SHAPE = (len(KINDS), ROWS, 128)
STOPPED = np.zeros(SHAPE, bool)
STOPPED[KINDS.index("some stop"), :, 64:] = STOPPED[KINDS.index("all stop")] = True


def grads_at(t):
    """Of each kind: in "some stop" and "rare" the right half of a row differs from the left one."""
    keys = jax.random.split(jax.random.key(2))
    noise = jax.random.normal(keys[0], (REPEAT, ROWS, 128))[t % REPEAT]
    is_rare = jax.random.bernoulli(keys[1], 0.004, (LONG, ROWS, 1))[t]
    is_right = jnp.arange(128)[None] >= 64
    kinds = {
        "noise": noise,
        "some stop": jnp.where(is_right & (t >= STOP), 0, noise),
        "all stop": jnp.where(t >= STOP, 0, noise),
        "spike": jnp.where(t == STOP, 1000, 1) * noise,
        "rare": jnp.where(is_rare | jnp.broadcast_to(~is_right, noise.shape), noise, 0),
        "unlike": noise * 2.0 ** -jnp.linspace(0, 40, 128)[None],
        "constant": jnp.broadcast_to(1 + jnp.arange(128) / 128, (ROWS, 128)),
    }
    return jnp.stack([kinds[kind] for kind in KINDS])


class Seen(NamedTuple):
    """Of each element, over all steps."""

    largest: jax.Array  # update
    late: jax.Array  # sum of the updates' magnitudes in the second half
    mu_above: jax.Array  # the largest share of its bound
    nu_below: jax.Array  # the smallest share of its lower bound
    nu_above: jax.Array  # the largest share of its upper one

    def after(self, is_late, u, mu, nu, bounds):
        most_mu, least_nu, most_nu = bounds
        is_normal = least_nu > 1e-30  # of float32, down to where nu has lost no bits
        return Seen(
            jnp.maximum(self.largest, u),
            self.late + jnp.where(is_late, u, 0),
            jnp.maximum(self.mu_above, jnp.where(mu > 1e-30, mu / most_mu, 0)),
            jnp.minimum(self.nu_below, jnp.where(is_normal, nu / least_nu, 1)),
            jnp.maximum(self.nu_above, jnp.where(is_normal, nu / most_nu, 1)),
        )


def errors_of(formats):
    """h of the first and of the second moment."""
    return [0.0 if form is None else form.rounding_error for form in formats]


@functools.cache
def trained(platform, steps, b1, b2, mu=None, nu=None, rounding="nearest"):
    names = [None if form is None else form.name for form in (mu, nu)]
    moments = dict(mu_dtype=names[0], nu_dtype=names[1], rounding=rounding)
    tx = jda.fused_adamw(1.0, b1, b2, eps=1e-30, weight_decay=0.0, **moments)
    h_mu, h_nu = errors_of((mu, nu))
    floor = 0.0 if nu is None else 2.0 ** (1 - nu.code("nu").highest_exponent)
    zeros = jnp.zeros(SHAPE)

    def step(carry, t):
        state, (most_mu, least_nu, most_nu), seen = carry
        g = grads_at(t)
        updates, state = tx.update({"w": g}, state, {"w": zeros})
        adam = jda.decoded(state.inner if rounding == "stochastic" else state)[0]
        mu, nu = jnp.abs(adam.mu["w"]), adam.nu["w"]
        subnormal = floor * jnp.max(nu, axis=-1, keepdims=True)
        bounds = (
            (1 + h_mu) * (b1 * most_mu + (1 - b1) * jnp.abs(g)),
            (1 - h_nu) * (b2 * least_nu + (1 - b2) * g * g),
            jnp.maximum((1 + h_nu) * (b2 * most_nu + (1 - b2) * g * g), subnormal),
        )
        return (
            state,
            bounds,
            seen.after(t >= steps // 2, jnp.abs(updates["w"]), mu, nu, bounds),
        ), None

    first = Seen(zeros, zeros, zeros, zeros + 1, zeros)
    start = (tx.init({"w": zeros}), (zeros, zeros, zeros), first)
    (_, _, seen), _ = jax.jit(lambda start: jax.lax.scan(step, start, jnp.arange(steps)))(start)
    return jax.tree.map(np.asarray, seen)


def largest_update(steps, b1, b2, mu, nu):
    """The bound of the note, with the bias corrections of each step."""
    t, ratio = np.arange(1, steps + 1), growth(mu or FLOAT32, nu or FLOAT32) * b1**2 / b2
    squared = (1 - b1) ** 2 / (1 - b2) * (1 - ratio**t) / (1 - ratio)
    return np.max(np.sqrt(squared * (1 - b2**t)) / (1 - b1**t))


def assert_stays_where_gradients_stopped(seen, in_float32):
    """In the second half of the steps by less than the learning rate more than with float32 moments."""
    assert (seen.late - in_float32.late)[STOPPED].max() < 1


NEAREST = [
    (SHORT, 0.86, 0.894, BLOCK8, BLOCK8),
    (LONG, 0.9, 0.999, None, None),  # float32: the bounds themselves
    (LONG, 0.9, 0.999, BLOCK16, BLOCK16),
    (LONG, 0.9, 0.999, BLOCK16, None),
    (LONG, 0.9, 0.894, None, BLOCK8),
    (LONG, 0.9, 0.894, BLOCK16, BLOCK8),
    (LONG, 0.86, 0.894, BLOCK8, BLOCK8),
    (LONG, 0.86, 0.95, BLOCK8, BLOCK16),
    (LONG, 0.998, 0.999, BLOCK16, BLOCK16),
]


def name_of(x):
    return getattr(x, "name", str(x))


@pytest.mark.parametrize(("steps", "b1", "b2", "mu", "nu"), NEAREST, ids=name_of)
@often(lambda steps: steps == SHORT)
def test_moments_rounded_to_nearest_stay_within_bounds(platform, steps, b1, b2, mu, nu):
    """Float32 rounds about three times in each step that a mean remembers."""
    seen = trained(platform, steps, b1, b2, mu, nu)
    memory = max(1 / (1 - b * (1 + h)) for b, h in zip((b1, b2), errors_of((mu, nu)), strict=True))
    slack = 1 + 3 * 2**-24 * memory
    assert seen.largest.max() < slack * largest_update(steps, b1, b2, mu, nu)
    assert seen.mu_above.max() < slack and seen.nu_above.max() < slack
    assert seen.nu_below.min() > 1 / slack
    assert_stays_where_gradients_stopped(seen, trained(platform, steps, b1, b2))


STOCHASTIC = [
    (SHORT, 0.9, 0.999, BLOCK8, BLOCK8),
    (LONG, 0.9, 0.999, BLOCK8, BLOCK8),
    (LONG, 0.9, 0.95, BLOCK8, BLOCK8),
    (LONG, 0.9, 0.999, BLOCK16, BLOCK8),
    (LONG, 0.9, 0.9999, BLOCK16, BLOCK16),
]


@pytest.mark.parametrize(("steps", "b1", "b2", "mu", "nu"), STOCHASTIC, ids=name_of)
@often(lambda steps: steps == SHORT)
def test_moments_rounded_stochastically_follow_float32_in_the_mean(platform, steps, b1, b2, mu, nu):
    """The largest update of all is at most twice that from float32 moments.

    A step adds at most s |d| to the variance of what is stored: d is how far the step moves it, and
    s, the distance of its neighbours, at most x / 2^M. With d = (1 - b) (g^2 - x) the variance of nu
    is at most E[x |g^2 - x|] / 2^M / (1 + b), about x^2 / 2^(M + 1): a standard deviation of 1/4 in
    8 bits. A nu of a quarter is three of them away, and twice the update.
    """
    seen = trained(platform, steps, b1, b2, mu, nu, "stochastic")
    in_float32 = trained(platform, steps, b1, b2)
    assert seen.largest.max() < 2 * in_float32.largest.max()
    assert_stays_where_gradients_stopped(seen, in_float32)


@pytest.mark.parametrize("form", [BLOCK8, BLOCK16], ids=name_of)
def test_the_largest_rate_at_most_doubles_the_memory_of_a_mean(form):
    """It is 1 / (1 - b), and 1 / (1 - b (1 + h)) as rounded; not for the next number of decimals."""
    b, h = form.largest_decay, form.rounding_error
    assert 1 - b * (1 + h) >= (1 - b) / 2
    b += 0.00099
    assert 1 - b * (1 + h) < (1 - b) / 2
