"""The two ways to take a step: ``step``, and optax's ``update`` and ``apply_updates``."""

import optax


def by_step(tx, grads, state, params):
    return tx.step(grads, state, params)


def by_update(tx, grads, state, params):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


WAYS = {"step": by_step, "update": by_update}
