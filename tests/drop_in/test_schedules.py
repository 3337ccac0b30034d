"""Schedules look at their own count in optax's state, which may not be the one of Adam."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdistadam as jda
from support.bits import assert_trees_same_bits

RATE, DECAY = optax.linear_schedule(0.5, 0.0, 100), optax.linear_schedule(0.3, 0.1, 50)
MASK = {"w": True, "b": False}


@pytest.mark.slow
@pytest.mark.parametrize("is_kept", [False, True], ids=["params", "main"])
@pytest.mark.parametrize(
    "options",
    [{}, dict(weight_decay=DECAY), dict(weight_decay=DECAY, mask=MASK)],
    ids=["rate", "decay", "masked"],
)
def test_a_schedule_that_was_restarted_starts_again(options, is_kept):
    """The moments and their bias correction stay: as optax, within the roundings of its formula."""
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(5, 3)), "b": rng.normal(size=3)}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    kept = dict(main_params_dtype=jnp.float32) if is_kept else {}
    ours, theirs = jda.fused_adamw(RATE, **options, **kept), optax.adamw(RATE, **options)
    _, state = theirs.update(params, theirs.init(params), params)
    for _ in range(9):
        _, state = theirs.update(params, state, params)

    def from_now(schedule):
        return lambda count: schedule(count - 10)

    moved = {"weight_decay": from_now(DECAY)} if "weight_decay" in options else {}
    shifted = jda.fused_adamw(from_now(RATE), **options | moved, **kept)
    restarted = (state[0], *jax.tree.map(jnp.zeros_like, state[1:]))
    results = []
    for tx, start in ((theirs, restarted), (ours, restarted), (shifted, state)):
        if is_kept and tx is not theirs:
            start = tx.init(params)._replace(inner=start)
        updates = []
        for _ in range(3):
            update, start = tx.update(params, start, params)
            updates.append(update)
        results.append((updates, start))
    assert_trees_same_bits(results[1][0], results[2][0])
    for got, want in zip(*(jax.tree.leaves(x) for x, _ in results[:2]), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
    counts = jax.tree.leaves((results[1][1].inner if is_kept else results[1][1])[1:])
    assert [int(x) for x in counts] == [3] * len(counts)
