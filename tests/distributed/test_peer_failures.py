"""A step whose copies are under way fails; what is restored afterwards goes on as if nothing was."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdistadam as jda
from jdistadam.distributed import calls
from jdistadam.kernels import copies
from jdistadam.training import overlap
from support.bits import assert_trees_same_bits

PLATFORMS = [("cpu", 4), pytest.param("gpu", 2, marks=pytest.mark.multigpu)]
LAYERS, WIDTH, STEPS = 4, 64, 10


class Planted:
    """A call between each start of copies and its wait, of which one fails, on all devices.

    If one device went on, XLA's sum of the norm would wait there for the others: XLA for CPUs then
    ends the process after 40 s.
    """

    def __init__(self, monkeypatch, number):
        self.places, self.fails, self._all = 0, None, threading.Barrier(number)
        self.called = set()  # jax may trace a step once more than it runs
        start, wait = copies.start_together, copies.wait_together

        def started(eqns, values):
            targets, place = start(eqns, values), self.places
            self.places += 1
            # Of the first element, so that it runs after the start; its value is not defined yet.
            seen = jax.lax.convert_element_type(targets[0].ravel()[0], jnp.float32)
            made[id(eqns[0])] = jax.pure_callback(
                lambda _: self._called(place), jax.typeof(seen), seen
            )
            return targets

        def waited(eqns, types, targets, sources, after):
            return wait(eqns, types, targets, sources, [*after, made.pop(id(eqns[0]))])

        made = {}
        monkeypatch.setattr(copies, "start_together", started)
        monkeypatch.setattr(copies, "wait_together", waited)

    def _called(self, place):
        self.called.add(place)
        if self.fails == place:
            self._all.wait(timeout=60)
            time.sleep(0.1)  # until XLA's sums are done that do not need these copies
            raise RuntimeError(f"planted after start {place}")
        return np.float32(0)


def loss_fn(params, x):
    for i in range(LAYERS):
        x = jnp.tanh(x @ params[f"w{i}"].astype(x.dtype))
    return jnp.mean(jnp.square(x - 1))


@pytest.mark.parametrize(("platform", "number"), PLATFORMS)
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_a_step_that_fails_between_a_start_and_its_wait_harms_no_later_one(
    tmp_path, monkeypatch, short_wait, platform, number, every
):
    monkeypatch.setattr(overlap, "TOGETHER_BYTES", WIDTH)  # each weight starts alone
    monkeypatch.setattr(calls, "COPIED_BYTES", WIDTH)
    planted = Planted(monkeypatch, number)
    mesh = jax.make_mesh((number,), ("data",), devices=jax.devices(platform)[:number])
    tx = jda.distributed(
        jda.fused_adamw(3e-2, b1=0.8, weight_decay=0.1),
        mesh=mesh,
        sharding_strategy="optim_grads",
        policy=jda.MixedPrecisionPolicy(grad_reduce_dtype="float32"),
        communication="peer",
        bucket_bytes=1024,
    )
    rng = np.random.default_rng(0)
    params = {f"w{i}": rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) for i in range(LAYERS)}
    batches = rng.normal(size=(STEPS, 4 * number, WIDTH)).astype(np.float32)
    step = jda.train_step(loss_fn, tx)

    def trained(state):
        found = []
        for x in batches:
            state, metrics = jax.block_until_ready(step(state, x))
            found.append(metrics)
        return state, found

    def restored():
        return jda.restore(tmp_path, jda.TrainState.shapes(params, tx), tx)

    jda.save(tmp_path, jda.TrainState.create(params, tx), tx)
    want = trained(restored())
    assert len(planted.called) >= 2 * LAYERS, "exchanges and gathers"
    for place in sorted(planted.called)[::every]:
        planted.fails = place
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"planted after start {place}"):
            jax.block_until_ready(step(restored(), batches[0]))
        planted.fails = None
        assert_trees_same_bits(trained(restored()), want)
