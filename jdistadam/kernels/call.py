"""One call of an Adam kernel, as both optimizers make it.

A ``KernelCall`` holds all that a call depends on. ``run`` makes it on one device: with the kernel
for floats, with that for codes and random rounding, or with the one that adds parts of gradients.
``run_sharded`` makes it for arrays with any sharding. Both return what is new by its meaning;
the kernels name arrays by their purpose, which depends on how main parameters are kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from jdistadam.core.codecs import FLOAT32, Codec
from jdistadam.kernels import native
from jdistadam.kernels.adam import adam
from jdistadam.kernels.operands import Operands, Results, Rounding, Scalars, Spec
from jdistadam.kernels.parts import Adding, step_parts
from jdistadam.kernels.reference import SquaresRequest
from jdistadam.kernels.sharded_adam import sharded_adam


class Arrays(NamedTuple):
    """The arrays of a step: of each kind one for each leaf, or a single flat one.

    Attributes:
      grads: Gradients: ``Parts``, if the kernel adds them.
      params: Parameters; not used if main parameters are kept in float32.
      main: What is kept of main parameters; not used if nothing is.
      mu: First moments.
      nu: Second moments.
    """

    grads: Sequence[Any]
    params: Sequence[Any]
    main: Sequence[Any]
    mu: Sequence[Any]
    nu: Sequence[Any]


class Stepped(NamedTuple):
    """What a call returns.

    Attributes:
      params: New parameters of each leaf, or in mode "update" its update, unless main parameters
        are kept.
      main_params: What is kept of main parameters, like the array that the call took; else empty.
      mu: First moments, likewise.
      nu: Second moments, likewise.
      squares: The requested sums of squares, or None.
      tiles: The tiles of the norm of each gradient that the kernel added, None for sums; empty
        from other kernels.
    """

    params: Sequence[Any]
    main_params: Sequence[Any]
    mu: Sequence[Any]
    nu: Sequence[Any]
    squares: Any
    tiles: Sequence[Any]


class KernelCall(NamedTuple):
    """One call of an Adam kernel.

    Attributes:
      kept: How main parameters are kept.
      spec: What is static.
      scalars: The scalar operands.
      operands: The arrays.
      rounding: What random bits depend on, if ``spec.rounding`` is given.
      squares: Which sums of squares it takes; None: none.
      adding: How the kernel that can add ``Parts`` does so; it then runs for sums, too. None:
        another kernel runs.
    """

    kept: Codec
    spec: Spec
    scalars: Scalars
    operands: Operands
    rounding: Rounding | None
    squares: SquaresRequest | None
    adding: Adding | None

    @classmethod
    def of(
        cls,
        kept: Codec,
        spec: Spec,
        scalars: Scalars,
        arrays: Arrays,
        param_dtype: Any,
        rounding: Rounding | None = None,
        squares: SquaresRequest | None = None,
        adding: Adding | None = None,
    ) -> KernelCall:
        """Makes a call; ``kept`` says where main parameters belong.

        Args:
          kept: How main parameters are kept.
          spec: What is static without main parameters, in mode "step" or "update". If any kind of
            array is flat, main parameters are.
          scalars: The scalar operands.
          arrays: The arrays.
          param_dtype: The dtype of new parameters.
          rounding: What random bits depend on, if ``spec.rounding`` is given.
          squares: Which sums of squares to take.
          adding: How gradients that are ``Parts`` are added.
        """
        operands = Operands(arrays.grads, arrays.params, arrays.mu, arrays.nu)
        if kept.is_stored:
            is_split = kept.is_remainder
            mode, name = ("step_split", "out") if is_split else ("step_and_cast", "params")
            operands = operands._replace(**{name: arrays.main})
            spec = dataclasses.replace(
                spec,
                mode=mode,
                out_dtype=None if is_split else param_dtype,
                flat=spec.flat and spec.flat | {name},
            )
        elif spec.mode == "update":
            spec = dataclasses.replace(spec, out_dtype=arrays.grads[0].dtype)
        return cls(kept, spec, scalars, operands, rounding, squares, adding)


def run(call: KernelCall) -> Stepped:
    """Makes a call on this device, for local arrays; donated ones are updated in place."""
    if call.adding is not None:
        results, tiles = step_parts(call.spec, call.scalars, call.operands, call.adding)
        return _stepped(call, results)._replace(tiles=tiles)
    results = adam(call.spec, call.scalars, call.operands.unfused(), call.rounding, call.squares)
    new = native.unfused(results._replace(squares=None))
    return _stepped(call, new._replace(squares=results.squares))


def run_sharded(call: KernelCall, params: Sequence[Any], *, with_squares: bool) -> Stepped:
    """Makes a call under ``jax.jit``, for one array of each leaf with any sharding.

    Args:
      call: The call.
      params: The parameters, whose sharding new ones take.
      with_squares: Whether to sum the squares of each leaf.
    """
    args = call.spec, call.scalars, call.operands, call.rounding, params
    return _stepped(call, sharded_adam(*args, with_squares=with_squares))


def _stepped(call: KernelCall, results: Results) -> Stepped:
    params, main = results.params or results.out, results.out
    if call.kept == FLOAT32:
        params, main = results.out, results.params
    main = main if call.kept.is_stored else ()
    return Stepped(params, main, results.mu, results.nu, results.squares, ())
