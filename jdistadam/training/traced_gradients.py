"""Gradients from the traced derivative of a loss: sums in its loops, and their order.

Gradients of stacked layers may be summed over devices inside the loop that makes them.

[Note: sums of layers] The backward pass of a scan over layers is a scan, and the gradients of all
layers arrive when it ends: a sum of the whole stack over devices has nothing to overlap. So the
gradient of the loss is traced first. The scan whose stacked result is such a gradient then runs
with the sum at the end of each iteration, and returns this device's part. Each element is summed
as in the sum of the stack. XLA overlaps most sums with the rest of the iteration. (A custom
derivative of a layer's parameters cannot do this: it must return a whole gradient.) Therefore
"optim_grads" takes less memory than "optim" if layers are scanned: it never holds the unsharded
gradients of all layers.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core

from jdistadam.core.trees import Params
from jdistadam.distributed import communication
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.schedule import BucketSchedule, Schedule
from jdistadam.distributed.shard import Shard


def sums_in_loops(config: DistributedConfig) -> bool:
    """Whether gradients of stacked layers are summed in the loops that make them.

    Not under "optim": there a step of 1.31e9 parameters on two H200s took 1.142 times its forward
    and backward pass instead of 1.102. "optim_grads" saves the memory of whole gradients this way.
    """
    parallel = config.parallel
    is_over_xla = parallel.num_devices > 1 and not config.communication.is_peer
    if config.stacked is None or not is_over_xla or parallel.gathers_layers:  # gathers sum them
        return False
    return parallel.sums_layers_in_loops


def sums_of_layers(schedule: Schedule) -> dict[int, BucketSchedule]:
    """Returns the schedules of leaves that a step sums layer by layer, by leaf index."""
    return {
        entry.bucket.leaf: entry
        for entry in schedule.buckets
        if any(c.when == "layer" for c in entry.reduce)
    }


def differentiated(
    differentiate: Callable[[Params], tuple[Any, Params]],
    params: Params,
    sums: Mapping[int, BucketSchedule],
    *,
    with_order: bool = False,
) -> tuple[tuple[Any, Params], tuple[int, ...]]:
    """Returns ``differentiate(params)``, but sums layers if a scan stacks their gradients.

    Args:
      differentiate: Returns something and gradients of the params.
      params: The params.
      sums: The schedules of leaves whose layers are summed, by leaf index.
      with_order: Whether to find the order of the gradients.

    Returns:
      The same, with a summed ``Shard`` for each such gradient that a scan returned; and the indices
      of the leaves in the order in which their gradients are known, () without ``with_order``.
    """
    if not sums and not with_order:
        return differentiate(params), ()
    traced, shapes = jax.make_jaxpr(differentiate, return_shape=True)(params)
    shapes, treedef = jax.tree.flatten(shapes)
    first = len(shapes) - len(jax.tree.leaves(params))
    wanted = {first + leaf: total for leaf, total in sums.items()}
    results = jax.tree.unflatten(treedef, _with_sums(traced, jax.tree.leaves(params), wanted))
    ranks = _ranks(traced.jaxpr)[first:]
    return results, tuple(sorted(range(len(ranks)), key=ranks.__getitem__)) if with_order else ()


def _ranks(jaxpr: Any) -> list[tuple[int, ...]]:
    """For each result of a jaxpr, the equation that makes it, and those within nested ones."""
    found: dict[Any, tuple[int, ...]] = {}
    wanted = {v for v in jaxpr.outvars if not isinstance(v, core.Literal)}
    for i, eqn in enumerate(jaxpr.eqns):
        if wanted.isdisjoint(eqn.outvars):
            continue
        inner: list[tuple[int, ...]] = [()] * len(eqn.outvars)
        if eqn.primitive.name in ("jit", "remat2"):
            nested = eqn.params["jaxpr"]
            inner = _ranks(getattr(nested, "jaxpr", nested))
        found |= {v: (i, *rank) for v, rank in zip(eqn.outvars, inner, strict=True)}
    return [() if isinstance(v, core.Literal) else found.get(v, ()) for v in jaxpr.outvars]


def _with_sums(traced: Any, args: list[Any], sums: Mapping[int, BucketSchedule]) -> list[Any]:
    """Evaluates a jaxpr, and sums some of its results in the loops that make them."""
    jaxpr = traced.jaxpr
    used = [v for eqn in jaxpr.eqns for v in eqn.invars] + list(jaxpr.outvars)
    uses = collections.Counter(v for v in used if not isinstance(v, core.Literal))
    total = {v: sums[i] for i, v in enumerate(jaxpr.outvars) if i in sums and uses[v] == 1}

    def summed(eqn: Any, values: list[Any]) -> list[Any] | None:
        wanted = {k: total[v] for k, v in enumerate(eqn.outvars) if v in total}
        if wanted and eqn.primitive.name == "scan":
            return _scan(eqn, values, wanted)
        if wanted and eqn.primitive.name == "jit":
            return _with_sums(eqn.params["jaxpr"], values, wanted)
        return None

    return evaluate(traced, args, summed)


def evaluate(
    traced: Any, args: Sequence[Any], otherwise: Callable[[Any, list[Any]], list[Any] | None]
) -> list[Any]:
    """Evaluates a jaxpr; equations for which ``otherwise`` returns results have these."""
    jaxpr = traced.jaxpr
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*traced.consts, *args], strict=True))
    for eqn in jaxpr.eqns:
        values = values_of(eqn.invars, known)
        results = otherwise(eqn, values)
        if results is None:
            results = evaluate_one(jaxpr, eqn, values)
        known.update(zip(eqn.outvars, results, strict=True))
    return values_of(jaxpr.outvars, known)


def values_of(atoms: Iterable[Any], known: Mapping[Any, Any]) -> list[Any]:
    """The values of variables and literals of a jaxpr."""
    return [v.val if isinstance(v, core.Literal) else known[v] for v in atoms]


def evaluate_one(jaxpr: Any, eqn: Any, values: list[Any]) -> list[Any]:
    """Evaluates one equation like JAX, with its context and its name."""
    arguments = {
        v: x for v, x in zip(eqn.invars, values, strict=True) if not isinstance(v, core.Literal)
    }
    one = jaxpr.replace(constvars=[], invars=list(arguments), outvars=list(eqn.outvars), eqns=[eqn])
    return jax.core.eval_jaxpr(one, [], *arguments.values())


def _scan(eqn: Any, values: list[Any], entries: Mapping[int, BucketSchedule]) -> list[Any]:
    """Runs a scan that sums its stacked results with these numbers.

    Scanned inputs and stacked results have one more dimension outside than inside.
    """
    body = eqn.params["jaxpr"]
    run = core.jaxpr_as_fun(body)
    num_carried = sum(
        v.aval.ndim == inner.ndim for v, inner in zip(eqn.outvars, body.out_avals, strict=True)
    )
    num_fixed = sum(v.aval.ndim == x.ndim for v, x in zip(eqn.invars, body.in_avals, strict=True))
    constants, carried = values[: num_fixed - num_carried], values[num_fixed - num_carried :]
    carried, scanned = carried[:num_carried], carried[num_carried:]

    def turn(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        results = run(*constants, *carry, *xs)
        for k, entry in entries.items():
            dim = entry.bucket.cut_dim - 1
            results[k] = communication.sum_gradients([entry.reduce], results[k], dim)
        return results[:num_carried], results[num_carried:]

    options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    with jax.named_scope(str(eqn.source_info.name_stack)):
        carried, stacked = jax.lax.scan(turn, carried, scanned, **options)
    results = [*carried, *stacked]
    for k, entry in entries.items():
        results[k] = Shard.of_bucket(entry.bucket, results[k])
    return results
