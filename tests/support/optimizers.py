"""Distributed optimizers with the arguments of the algorithm and of ``jda.distributed`` mixed."""

import inspect

import jdistadam as jda


def _around(adam):
    own = list(inspect.signature(adam).parameters.values())
    options = list(inspect.signature(jda.distributed).parameters.values())[1:]
    names = {option.name for option in options}

    def made(*args, **given):
        chosen = {name: given.pop(name) for name in names & given.keys()}
        return jda.distributed(adam(*args, **given), **chosen)

    made.__name__ = f"distributed_{adam.__name__}"
    made.__signature__ = inspect.Signature(own + options)
    return made


distributed_adamw = _around(jda.fused_adamw)
distributed_adam = _around(jda.fused_adam)
