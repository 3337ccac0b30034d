"""The scale by itself: how it grows and shrinks."""

import jax
import jax.numpy as jnp
import numpy as np

import jdistadam as jda
from jdistadam.core.guards import new_loss_scale, next_loss_scale


def test_the_dynamic_scale_grows_and_shrinks():
    """Against the rules written out in plain Python."""
    config = jda.DynamicLossScale(
        init_scale=64.0, growth_interval=3, hysteresis=2, min_scale=16.0, growth_factor=4.0
    )
    found = np.random.default_rng(4).random(200) < 0.3
    state = new_loss_scale(config)
    update = jax.jit(lambda state, found: next_loss_scale(config, state, found))
    scale, good, left, skipped = 64.0, 0, 2, 0
    seen = set()
    for bad in found:
        state = update(state, bad)
        if bad:
            good, left, skipped = 0, max(left - 1, 0), skipped + 1
            if left == 0:
                scale = max(scale * 0.5, 16.0)
        else:
            good += 1
            if good == 3:
                scale, good, left = scale * (4.0 if scale < 2.0**62 else 1.0), 0, 2
        assert [float(x) for x in state] == [scale, good, left, skipped]
        seen.add(scale)
    assert len(seen) > 4


def test_the_scale_never_becomes_infinite():
    config = jda.DynamicLossScale(init_scale=2.0**63, growth_interval=1)
    state = next_loss_scale(config, new_loss_scale(config), jnp.bool_(False))
    assert float(state.loss_scale) == 2.0**63
