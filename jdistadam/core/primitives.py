"""Our own JAX primitives: operations for which JAX has no rule, or must not have one.

[Note: primitives of our own]
``jax.custom_jvp`` and ``custom_vmap`` fail for second derivatives of a loop: when ``lax.scan``
looks for values that are equal in all iterations, it drops the rule of ``custom_jvp``, and JAX then
tries to differentiate the foreign call. JAX never drops the rules of a primitive. The computation
of a primitive is stored as a jaxpr in its parameters, because JAX searches these for
``custom_partitioning``, which needs the devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

Rule = Callable[..., Any]


def make_primitive(
    name: str,
    run: Rule,
    types: Rule,
    *,
    batched: Rule | None = None,
    jvp: Rule | None = None,
    lowering: Rule | None = None,
) -> Primitive:
    """Makes a primitive with several results.

    Args:
      name: Its name in jaxprs.
      run: Computes a list of results from operands and parameters.
      types: Computes the result types from operand types.
      batched: Its rule under ``jax.vmap``, which otherwise raises.
      jvp: Its rule for differentiation, likewise.
      lowering: How it is compiled; None: as ``run``.
    """
    made = Primitive(name)
    made.multiple_results = True
    made.def_impl(run)
    made.def_abstract_eval(types)
    mlir.register_lowering(made, lowering or mlir.lower_fun(run, multiple_results=True))
    if batched is not None:
        batching.primitive_batchers[made] = batched
    if jvp is not None:
        ad.primitive_jvps[made] = jvp
    return made


class CalledPrimitive:
    """A primitive that computes a function of trees, with its own rules."""

    def __init__(self, name: str, *, batched: Rule, jvp: Rule) -> None:
        """Takes the rules for ``jax.vmap`` and differentiation, with parameter ``call``."""
        self.primitive = make_primitive(
            name,
            lambda *leaves, call, **_: jaxpr_as_fun(call)(*leaves),
            lambda *leaves, call, **_: call.out_avals,
            batched=batched,
            jvp=jvp,
        )

    def __call__(self, function: Callable[..., Any], *args: Any, **params: Any) -> Any:
        """Returns ``function(*args)``; ``params`` are parameters for the rules."""
        call, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        results = self.primitive.bind(*jax.tree.leaves(args), call=call, **params)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)
