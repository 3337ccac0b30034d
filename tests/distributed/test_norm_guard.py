"""Steps that are skipped since their gradient norm is above the limits of a ``NormGuard``."""

import jax
import numpy as np
import optax
import pytest

import jdistadam as jda
from support import exact_steps
from support.bits import assert_trees_same_bits
from support.exact_steps import GROUPS, LABELS, PLACES, batches, everything, first_state, run
from support.samples import few

GUARD = jda.NormGuard(max_ratio=3.0, window=4, warmup_steps=3)
# Norms of whole numbers are all about as large: of 12 steps one is a spike that comes too early,
# two are non-finite and three are spikes.
FACTORS = {1: 4.0, 4: np.nan, 5: 64.0, 6: 16.0, 8: np.nan, 10: 256.0}
SPIKES, NONFINITE = {5, 6, 10}, {4, 8}


def make_tx(place, policy="float32", norm_guard=GUARD, **kwargs):
    return exact_steps.make_tx(place, policy, norm_guard=norm_guard, **kwargs)


def last(*args):
    """The state and the metrics after steps, and all metrics."""
    found = list(run(*args))
    return found[-1][0], [metrics for _, metrics in found]


def expected(norms, guard):
    """The same rule in float64: which steps are skipped, and the mean of the others."""
    spikes, nonfinite, mean, steps = set(), set(), 0.0, 0
    for i, norm in enumerate(np.asarray(norms, np.float64)):
        limit = np.inf if guard.max_norm is None else guard.max_norm
        if guard.max_ratio is not None and steps >= guard.warmup_steps:
            limit = min(limit, guard.max_ratio * mean)
        if not np.isfinite(norm):
            nonfinite.add(i)
        elif norm > limit:
            spikes.add(i)
        else:
            steps += 1
            mean += (norm - mean) / min(steps, guard.window)
    return spikes, nonfinite, mean


def counted(metrics, name):
    """The steps at which a count grew."""
    counts = [0, *(int(x[name]) for x in metrics)]
    return {i for i in range(len(metrics)) if counts[i + 1] > counts[i]}


def assert_guarded(state, metrics):
    """As the rule says, in float64: the mean is a sum of at most ten terms, each rounded thrice."""
    spikes, nonfinite, mean = expected([x["grad_norm"] for x in metrics], GUARD)
    assert counted(metrics, "skipped_spikes") == spikes
    assert counted(metrics, "skipped") == spikes | nonfinite
    found = state.opt_state.guard
    assert int(found.spikes) == len(spikes)
    assert int(found.steps) == int(state.step) == len(metrics) - len(spikes | nonfinite)
    np.testing.assert_allclose(found.mean, mean, rtol=30 * 2.0**-24)
    return spikes, nonfinite


@pytest.fixture(scope="module")
def on_one_device():
    """Guarded steps; and those of an optimizer without a guard, on the applied batches alone."""
    tx = make_tx("one device")
    state, metrics = last(tx, first_state(tx), batches(12, FACTORS))
    assert assert_guarded(state, metrics) == (SPIKES, NONFINITE)
    plain = make_tx("one device", norm_guard=None)
    applied = (x for i, x in enumerate(batches(12, FACTORS)) if i not in SPIKES | NONFINITE)
    want = everything(last(plain, first_state(plain), applied)[0], plain)
    assert_trees_same_bits(everything(state, tx)[:2], want[:2])
    return everything(state, tx)


@few(1)
@pytest.mark.parametrize("place", PLACES)
def test_guard_follows_float64_and_keeps_the_bits_of_applied_steps(place, on_one_device):
    tx = make_tx(place, loss_scale=None if "optim_grads_params" in place else 1.0)
    state, metrics = last(tx, first_state(tx), batches(12, FACTORS))
    assert assert_guarded(state, metrics) == (SPIKES, NONFINITE)
    assert_trees_same_bits(everything(state, tx)[:2], on_one_device[:2], place)
    for x in jax.tree.leaves(state.opt_state.guard):
        assert len({np.asarray(s.data).tobytes() for s in x.addressable_shards}) == 1
    found = state.opt_state.guard
    assert int(found.nonfinite) == (len(NONFINITE) if tx.config.loss_scale is None else 0)
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    assert sum(jda.plan(state.params, tx).held.values()) == held


def test_a_spike_changes_no_bit_and_does_not_lower_the_scale():
    """Moments in codes, micro-batches, groups, and the average beside; then a non-finite step."""
    tx = make_tx(
        "twice-optim_grads", "8 bits", loss_scale=jda.DynamicLossScale(init_scale=8.0),
        norm_guard=jda.NormGuard(max_norm=1e4), ema_decay=0.9, param_labels=LABELS, groups=GROUPS,
    )  # fmt: skip
    (state, _), *_ = [last(tx, first_state(tx, "8 bits"), batches(2), 3)]
    kept = lambda state: jax.tree.map(  # noqa: E731
        np.asarray, (state.params, state.opt_state._replace(grad_norm=0, scaling=0, guard=0))
    )
    before, scale = kept(state), float(state.opt_state.scaling.loss_scale)
    state, (metrics,) = last(tx, state, batches(1, {0: 1024.0}), 3)
    assert 1e4 < float(metrics["grad_norm"]) < np.inf
    assert_trees_same_bits(kept(state), before)
    assert int(metrics["skipped"]) == int(metrics["skipped_spikes"]) == 1
    assert float(state.opt_state.scaling.loss_scale) == scale
    state, (metrics,) = last(tx, state, batches(1, {0: np.nan}), 3)
    assert_trees_same_bits(kept(state), before)
    assert int(metrics["skipped"]) == 2 and int(metrics["skipped_spikes"]) == 1
    assert float(state.opt_state.scaling.loss_scale) == scale / 2
    state, (metrics,) = last(tx, state, batches(1), 3)
    assert int(metrics["skipped"]) == 2 and int(state.step) == 3


def test_guard_works_with_chains_injection_and_clipping():
    """The norm is that before clipping, of what the chain hands on."""
    guard = jda.NormGuard(max_norm=600.0)
    adam = jda.inject_hyperparams(jda.fused_adamw)
    inner = make_tx("hybrid-optim", norm_guard=guard, adam=adam, max_grad_norm=1.0)
    schedule = optax.scale_by_schedule(lambda count: 0.25 + 0 * count)
    tx = jda.chain(schedule, inner)
    state, metrics = last(tx, first_state(tx), batches(6, {2: 4.0}))
    norms = [float(x["grad_norm"]) for x in metrics]
    assert expected(norms, guard)[0] == counted(metrics, "skipped_spikes") == {2}
    assert int(state.step) == int(state.opt_state[0].count) == 5
    assert all(1 < norm < 600 for i, norm in enumerate(norms) if i != 2)


@pytest.mark.slow
def test_guard_survives_a_restart_on_another_mesh(tmp_path):
    """Bit for bit with the average, and after more steps what never stopped has."""
    both = dict(ema_decay=0.8)
    old, new = make_tx("one device", **both), make_tx("tuple-optim_grads_params", **both)
    state, _ = last(old, first_state(old), batches(7, FACTORS))
    jda.save(tmp_path, state, old)
    shapes = jda.TrainState.shapes(jax.eval_shape(lambda: state.params), new)
    restored = jda.restore(tmp_path, shapes, new)
    assert int(restored.opt_state.guard.spikes) == 2
    assert_trees_same_bits(everything(restored, new), everything(state, old))
    again = jda.from_optax_state(*everything(state, old)[:2], new, everything(state, old)[2])
    assert_trees_same_bits(everything(again, new), everything(state, old))
    more = [last(tx, x, batches(4, {2: 64.0}, seed=9)) for tx, x in ((old, state), (new, restored))]
    parts = [everything(x, tx) for tx, (x, _) in zip((old, new), more, strict=True)]
    assert_trees_same_bits(parts[1][:2], parts[0][:2])
    assert_trees_same_bits(parts[1][2].ema, parts[0][2].ema)
    for _, metrics in more:
        assert [int(x["skipped_spikes"]) for x in metrics] == [2, 2, 3, 3]
    # Without a guard it is dropped, and where there was none it begins anew.
    plain = make_tx("flat-optim", norm_guard=None, **both)
    jda.save(tmp_path / "plain", jda.restore(tmp_path, shapes_of(state, plain), plain), plain)
    begun = jda.restore(tmp_path / "plain", shapes, new).opt_state.guard
    assert [float(x) for x in begun] == [0, 0, 0, 0]


def shapes_of(state, tx):
    return jda.TrainState.shapes(jax.eval_shape(lambda: state.params), tx)


def test_a_lasting_change_of_level_is_skipped_until_the_limit_raises():
    """As documented: the mean does not follow. ``SkipLimit`` tells the two kinds apart."""
    tx = make_tx("one device")
    factors = dict.fromkeys(range(5, 20), 8.0) | {6: np.nan}
    limit, seen = jda.SkipLimit(4, lag=1), []
    said = (
        r"^gradient norm: above the limits of norm_guard in too many steps in a row: got 5 steps, "
        r"of which 4 were skipped for it and 1 were non-finite, expected at most 4\."
    )
    with pytest.raises(jda.NonfiniteError, match=said):
        for _, metrics in run(tx, first_state(tx), batches(20, factors)):
            seen.append(metrics)
            limit(metrics)
    assert len(seen) == 11  # 5 to 9 were skipped, read one step later


def test_state_without_norm_guard_holds_no_guard():
    tx = make_tx("hybrid-optim", norm_guard=None)
    state, (metrics,) = last(tx, first_state(tx), batches(1))
    assert state.opt_state.guard is None and "skipped_spikes" not in metrics
    assert not make_tx("hybrid-optim", norm_guard=None, loss_scale=None).config.takes_norm_first
