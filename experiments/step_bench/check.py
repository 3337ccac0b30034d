"""Compares a variant's step with optax.adamw on the floor's own gradients.

The reference takes the local gradients of the floor (only forward and backward pass), averages them
over the devices in float32, and passes them to optax.adamw on float32 parameters. Compared are each
leaf's movement in CHECKED_STEPS steps, without its decay, as a relative L2 distance; and the
losses.

The bound. With eps far above the gradients an update is nearly linear in the gradient, so the
distance is that of two gradients of one function, computed in bfloat16 by two programs. Between the
parameters and a gradient there are about 20 tensors per layer that are rounded to bfloat16 (forward
and backward), and N roundings in a sum over N devices. One rounding is uniform within half a unit
in the last place, of at most 2^-7 relative: 2^-7 / sqrt(12) root mean square. Independent roundings
add as squares, also those of two programs, and three standard deviations are allowed:

    3 * sqrt(2 * (20 * layers + N)) * 2^-7 / sqrt(12)

A gradient that is not reduced, or summed instead of averaged, is off by 0.7 to N - 1.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from step_bench.variants import (
    CHECKED_LEARNING_RATE,
    CHECKED_STEPS,
    HYPER,
    AnnotatedUpdate,
)

SAMPLED = 1 << 16  # compared elements of a leaf
ROUNDING = 2**-7 / math.sqrt(12)


def tolerance(layers, num_devices):
    """Largest relative distance between the updates of two programs, and of losses in nats.

    Logits are of the size of 1 and are rounded as often; a loss is a mean of their errors.
    """
    return 3 * math.sqrt(2 * (20 * layers + num_devices)) * ROUNDING


def sample(tree):
    """Some elements of every leaf, by path, in float64."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): _some(x) for path, x in leaves}


def _some(x):
    step = max(1, x.size // SAMPLED) | 1  # odd: it meets every device's part, and every column
    if isinstance(x, np.ndarray):
        return np.asarray(x.reshape(-1)[::step], np.float64)
    # On a mesh everywhere, so that a process has it; jax 0.11 returns arrays of one device without.
    mesh = getattr(x.sharding, "mesh", None)
    everywhere = mesh and NamedSharding(mesh, PartitionSpec())
    return np.asarray(_strided(x.size, step, everywhere)(x), np.float64)


@functools.cache
def _strided(size, step, sharding):
    return jax.jit(lambda x: x.reshape(-1)[::step], out_shardings=sharding)


class Reference:
    """The parameters after the checked steps, with clipping or without.

    Args:
      setting: The group's.
      loss_and_grads: Takes (bfloat16 params, batch); results have a leading dimension of devices.
      batch: Its second argument.
      clips: Whether gradients are clipped.
    """

    def __init__(self, setting, loss_and_grads, batch, clips):
        update = AnnotatedUpdate(setting.shapes, setting.mesh, False, clips)

        @functools.partial(jax.jit, donate_argnums=0)
        def step(state, grads):
            mean = jax.tree.map(lambda g: jnp.mean(g.astype(jnp.float32), axis=0), grads)
            return update(mean, *state[1:])

        start = setting.draw()
        self.start = sample(start)
        state = update.start(start)
        del start
        self.losses = []
        for _ in range(CHECKED_STEPS):
            loss, grads = loss_and_grads(state[0], batch)
            self.losses.append(None if loss is None else float(jnp.mean(loss)))
            state = step(state, grads)
            del grads
        self.end = sample(state[1])

    def distances(self, end):
        """Relative distance of every leaf's update, by path; ``end``: a result of ``sample``."""
        found = {}
        decay = CHECKED_STEPS * CHECKED_LEARNING_RATE * HYPER["weight_decay"]
        for path, start in self.start.items():
            by_gradient = self.end[path] - start + decay * start
            error = np.linalg.norm(end[path] - self.end[path])
            found[path] = error / np.linalg.norm(by_gradient)
        return found


def compare(reference, end, losses, bound):
    """A record of a variant's distance from the reference, and whether it is small enough."""
    distances = reference.distances(end)
    worst = max(distances, key=lambda path: np.nan_to_num(distances[path], nan=np.inf))
    pairs = [(a, b) for a, b in zip(losses, reference.losses, strict=True) if b is not None]
    apart = float(np.max([0.0, *(abs(float(a) - b) for a, b in pairs)]))  # NaN stays NaN
    return {
        "worst_leaf": worst,
        "distance": float(distances[worst]),
        "losses_apart": apart,
        "bound": bound,
        "passed": bool(distances[worst] <= bound and apart <= bound),
    }
