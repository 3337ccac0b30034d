"""Asks the compiler in which order it wants the parameters of a loss in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.layout import Format, Layout

from jdistadam.core import trees
from jdistadam.core.types import Params


def preferred_formats(
    loss_fn: Callable[..., Any], params: Params, *args: Any, num_shards: int = 1, **kwargs: Any
) -> Any:
    """Returns the Format of every parameter in which XLA reads it without moving it.

    Compiles the gradient of the loss with ``Layout.AUTO`` for the parameters; nothing runs. GPUs
    since Hopper want a convolution's kernel (height, width, in, out) as (out, height, width, in) in
    memory, and compute its gradient so. Products of matrices read and write any order: where XLA
    would choose one for the parameter and another one for its gradient, it is the parameter's. But
    what is cut into shards is cut along the slowest dimension that divides, and moved where that is
    not the first: so it is the gradient's order if that alone begins with one that divides.

    Args:
      loss_fn: ``loss_fn(params, *args, **kwargs)``; the first thing that it returns is the loss, as
        for ``train_step``, so ``(loss, model_state)`` and the like do as well.
      params: Tree of arrays, or of shapes. With shardings, it is compiled for their devices.
      *args: A batch, and what else the loss takes; arrays or shapes.
      num_shards: Number of devices that share the state of a distributed optimizer.
      **kwargs: The same by name, such as ``model_state`` and ``rng``.

    Returns:
      A tree like params, for ``formats`` of an optimizer and for ``jax.device_put``. Tiles are left
      out: a Format is an order of dimensions, and the sharding of the parameter.

    Raises:
      DtypeError: A parameter is no array.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> params = {"w": jnp.ones((2, 3))}
      >>> formats = preferred_formats(lambda p, x: jnp.sum(x @ p["w"]), params, jnp.ones((4, 2)))
      >>> formats["w"].layout.major_to_minor
      (0, 1)
    """
    trees.check_numbers(params, name="params")

    def scalar(params: Params, *args: Any, **kwargs: Any) -> Any:
        loss = loss_fn(params, *args, **kwargs)
        while isinstance(loss, tuple):
            loss = loss[0]
        return loss

    def gradient(params: Params, args: Any, kwargs: Any) -> Any:
        return jax.value_and_grad(scalar)(params, *args, **kwargs)

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    auto = jax.tree.map(lambda x: Format(Layout.AUTO, getattr(x, "sharding", None)), params)
    program = jax.jit(
        gradient,
        in_shardings=(auto, None, None),
        out_shardings=(None, auto),
        keep_unused=True,  # what is not an argument has no layout
    )
    compiled = program.lower(shapes, args, kwargs).compile()

    def choose(x: Any, param: Any, grad: Any) -> Format:
        """One Format for both, without tiles."""
        order, other = (f.layout.major_to_minor for f in (param, grad))
        if order != other and x.shape[order[0]] % num_shards:
            order = order if x.shape[other[0]] % num_shards else other
        return Format(Layout(order), param.sharding)

    return jax.tree.map(choose, params, compiled.input_formats[0][0], compiled.output_formats[1])
