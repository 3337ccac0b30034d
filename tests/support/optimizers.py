"""Distributed optimizers with the arguments of the algorithm and of ``jda.distributed`` mixed."""

import inspect

import jdistadam as jda

_OPTIONS = set(list(inspect.signature(jda.distributed).parameters)[1:])


def _made(adam, args, given):
    options = {name: given.pop(name) for name in _OPTIONS & given.keys()}
    return jda.distributed(adam(*args, **given), **options)


def distributed_adamw(*args, **given):
    """``jda.distributed`` around ``jda.fused_adamw``."""
    return _made(jda.fused_adamw, args, given)


def distributed_adam(*args, **given):
    """``jda.distributed`` around ``jda.fused_adam``."""
    return _made(jda.fused_adam, args, given)
