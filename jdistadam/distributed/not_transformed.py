"""A distributed step has neither members nor a derivative: vmap and grad of it raise."""

from __future__ import annotations

from typing import Any

import jax

from jdistadam.core.primitives import make_primitive
from jdistadam.errors import PolicyError


def check_not_transformed(function: str, tree: Any) -> None:
    """Raises PolicyError where ``jax.vmap`` or a derivative runs over an array of ``tree``.

    Inside of a jit nothing tells such an array from another one, but the rule of a primitive is
    called; nobody uses the results, so that the compiled program has nothing of it.
    """
    _passed_p.bind(*jax.tree.leaves(tree), function=function)


def _batched(leaves: Any, dims: Any, *, function: str) -> Any:
    sizes = {x.shape[dim] for x, dim in zip(leaves, dims, strict=True) if dim is not None}
    raise PolicyError(
        f"{function}: a distributed optimizer cannot run under jax.vmap: got vmap over "
        f"{', '.join(map(str, sizes))}, expected one model, on all devices of the mesh. "
        "Step ensembles and sweeps with jax.vmap(fused_adamw(...).step)."
    )


def _jvp(leaves: Any, tangents: Any, *, function: str) -> Any:
    del tangents
    raise PolicyError(
        f"{function}: a distributed optimizer cannot be differentiated: got a derivative by "
        f"some of {len(leaves)} arrays, expected a use of its values alone. Differentiate "
        "fused_adamw(...).step, or put jax.lax.stop_gradient around what this one takes."
    )


_passed_p = make_primitive(
    "jdistadam_passed",
    lambda *leaves, function: list(leaves),
    lambda *leaves, function: list(leaves),
    batched=_batched,
    jvp=_jvp,
)
