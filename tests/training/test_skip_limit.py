"""A storm of non-finite gradients ends a run, and the host does not wait to notice it."""

import jax.numpy as jnp
import numpy as np
import pytest

import jdistadam as jda
from support.optimizers import distributed_adamw
from support.samples import few


class Count:
    """What ``train_step`` reports, and whether somebody looked at it."""

    def __init__(self, value):
        self.value, self.was_read = value, False

    def __int__(self):
        self.was_read = True
        return self.value

    __float__ = __int__


def metrics(skipped, loss=0.5):
    return {"loss": loss, "skipped": skipped, "loss_scale": 1.0}


def test_metrics_are_read_late_and_once():
    limit, counts = jda.SkipLimit(3, lag=2), [Count(0) for _ in range(6)]
    losses = [Count(0.5) for _ in range(6)]
    for i, (count, loss) in enumerate(zip(counts, losses, strict=True)):
        limit(metrics(count, loss))
        for read in (counts, losses):
            assert [x.was_read for x in read] == [j <= i - 2 for j in range(6)]


@pytest.mark.parametrize(("most", "lag"), [(1, 1), (3, 2), (5, 4)])
def test_skip_limit_raises_in_the_promised_call(most, lag):
    """Ten good steps, a skip, one more good step, and then skips alone."""
    limit, totals = jda.SkipLimit(most, lag=lag), [7] * 10 + [8, 8]
    before = len(totals)
    for total in totals:
        limit(metrics(total))
    for i in range(1, most + lag + 1):
        limit(metrics(8 + i))
    assert before + i == before + most + lag
    with pytest.raises(jda.NonfiniteError, match=rf"got {most + 1} steps.*most {most}\. Rest"):
        limit(metrics(9 + i))


def test_a_run_that_goes_on_from_skipped_steps_begins_anew():
    limit = jda.SkipLimit(1, lag=1)
    for total in (40, 40, 40, 41, 41):
        limit(metrics(total))
    assert limit.in_a_row == 1


def test_skip_limit_counts_nonfinite_losses_of_applied_steps():
    """Seven losses, of which the finite one begins anew; skips among them are told apart."""
    limit, nan = jda.SkipLimit(2, lag=1), float("nan")
    for loss in (nan, nan, 0.5, nan, float("inf"), nan):
        limit(metrics(0, loss))
    with pytest.raises(
        jda.NonfiniteError,
        match="^loss: non-finite in too many steps in a row: got 3 steps, of which 0 were skipped,.*"
        r"With loss_scale=1\.0 such",
    ):
        limit(metrics(0, 0.5))
    limit = jda.SkipLimit(1, lag=1)
    limit(metrics(0, nan))
    limit(metrics(1, nan))
    with pytest.raises(
        jda.NonfiniteError,
        match=r"^gradients or loss: .* 2 steps, of which 1 were skipped, the",
    ):
        limit(metrics(1, nan))


@few(1)
@pytest.mark.parametrize("loss_scale", [None, 1.0])
def test_skip_limit_raises_for_nan_batches(cpu_mesh, loss_scale):
    tx = distributed_adamw(1e-2, mesh=cpu_mesh(2), loss_scale=loss_scale)
    state = jda.TrainState.create({"w": jnp.ones(3)}, tx)
    step = jda.train_step(lambda params, x: jnp.sum(x @ params["w"]), tx)
    limit, what = jda.SkipLimit(2, lag=1), "loss" if loss_scale is None else "gradients"
    with pytest.raises(jda.NonfiniteError, match=f"^{what}: .* got 3 steps"):
        for _ in range(4):
            state, reported = step(state, np.full((2, 3), np.nan, np.float32))
            limit(reported)


def test_skip_limit_ends_a_run_that_skips_every_step(cpu_mesh):
    tx = distributed_adamw(
        1e-2, mesh=cpu_mesh(2), loss_scale=jda.DynamicLossScale(2.0**15), weight_decay=0.1
    )
    state = jda.TrainState.create({"w": jnp.ones(3)}, tx)
    step = jda.train_step(lambda params, x: jnp.sum(x @ params["w"]), tx)
    limit, taken = jda.SkipLimit(5, lag=2), 0
    with pytest.raises(jda.NonfiniteError, match="got 6 steps"):
        for i in range(100):
            bad = np.nan if i >= 10 else 1.0
            state, reported = step(state, np.full((2, 3), bad, np.float32))
            taken += 1
            limit(reported)
    assert taken == 10 + 5 + 2 + 1
    assert int(state.step) == 10  # the parameters are those of the last good step


def test_wrong_arguments_raise():
    for kwargs in (dict(most_in_a_row=0), dict(most_in_a_row=3, lag=0), dict(most_in_a_row=2.5)):
        with pytest.raises(jda.HyperparameterError):
            jda.SkipLimit(**kwargs)
    with pytest.raises(
        jda.TreeError, match="metrics: not the metrics of train_step: got the entries loss"
    ):
        jda.SkipLimit(3)({"loss": 1.0})
