"""Traced programs of JAX: the file that knows names and parameters of JAX's operations.

``compose/linearity.py`` has a list of its own, to which an unknown operation is not linear.

A step is traced, and evaluated in another order. If JAX renames an operation, results stay the
same, but nothing is found any more: copies do not overlap the model, or a gradient that counts
every device is not detected. ``warn_of_unknown`` therefore traces a small program of each kind,
once for a process, and warns of what it does not find.
"""

from __future__ import annotations

import concurrent.futures
import functools
import operator
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core, source_info_util
from jax.interpreters import partial_eval
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from jdistadam.core import collectives

PRODUCTS = frozenset(("dot_general", "conv_general_dilated"))
"""Operations that take long: what copies and updates overlap."""

GATHERS = frozenset(("all_gather", "all_gather_invariant"))

MOVES = frozenset(
    "pvary pcast reduce_precision optimization_barrier name convert_element_type "
    "bitcast_convert_type reshape squeeze expand_dims transpose broadcast_in_dim slice split "
    "concatenate stack unstack pad rev copy custom_vjp_call jit".split()
)
"""Operations that only move or convert, or contain others."""

ELEMENTWISE = frozenset(
    "abs acos acosh add add_any asin asinh atan atan2 atanh cbrt ceil clamp cos cosh div erf "
    "erf_inv erfc exp exp2 expm1 floor integer_pow log log1p log2 logistic max min mul neg "
    "one_minus_square polynomial pow rem round rsqrt select_n sign sin sinh sqrt square sub tan "
    "tanh".split()
)
"""Operations on each element alone, which XLA computes where their results are used. Those with
boolean results, as of dropout, are not among them: they take a byte, and random bits four."""

_NESTED = {"jit": "jaxpr", "remat2": "jaxpr", "custom_vjp_call": "call_jaxpr"}  # and its jaxpr
_BARRIER, _LOOP, _REMAT = "optimization_barrier", "scan", "remat2"
_SUMS = ("psum", "pmax", "pmin", "reduce_scatter")  # beginnings of names
_PASSED_ON = frozenset("convert_element_type reshape squeeze broadcast_in_dim copy".split())
_OF_AXES = "NamedAxisEffect"


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Returns those of some atoms that are no literals."""
    return [v for v in atoms if not isinstance(v, core.Literal)]


def kept(results: Iterable[Any]) -> list[Any]:
    """Returns the results of an equation that anything may need."""
    return [v for v in results if not isinstance(v, core.DropVar)]


def results_of(jaxpr: Any) -> list[Any]:
    """Returns the variables that are the results of a jaxpr; None for a literal."""
    return [None if isinstance(v, core.Literal) else v for v in jaxpr.outvars]


def num_bytes(atom: Any) -> int:
    """The bytes of a variable."""
    size: int = atom.aval.size * atom.aval.dtype.itemsize
    return size


def passed_on(eqn: Any) -> tuple[Any, ...] | None:
    """For a barrier, its operand for each result that is kept, None for a literal; else None."""
    if not is_barrier(eqn):
        return None
    pairs = zip(eqn.invars, eqn.outvars, strict=True)
    used = [old for old, new in pairs if not isinstance(new, core.DropVar)]
    return tuple(None if isinstance(v, core.Literal) else v for v in used)


def name_of(eqn: Any) -> str:
    """The name of an equation; a custom call has its target's."""
    name: str = eqn.params.get("target_name", eqn.primitive.name)
    return name


def scope_of(eqn: Any) -> list[str]:
    """The scopes in which an equation was traced, without our own, and of which pass it is."""
    scope = str(eqn.source_info.name_stack)
    if "transpose(" in scope:
        of_pass = ["backward"]
    else:
        of_pass = ["forward"] if "jvp(" in scope else []
    inner = re.sub(r"(transpose|jvp|rematted_computation|checkpoint|vmap)\(?|\)", "", scope)
    names = [x for x in inner.partition("jdistadam/")[0].split("/") if x]
    return ["/".join(names), *of_pass] if names else of_pass


def contains(eqn: Any, names: Collection[str]) -> bool:
    """Whether an equation, or one inside of it, has one of these names."""
    inner = core.jaxprs_in_params(eqn.params)
    return name_of(eqn) in names or any(contains(e, names) for j in inner for e in j.eqns)


def hidden_in(jaxpr: Any) -> Iterator[Any]:
    """Yields what the text of a jaxpr does not tell apart: inner constants, and callbacks."""
    for eqn in jaxpr.eqns:
        for name, value in eqn.params.items():
            if name == "callback":
                yield value
            for x in value if isinstance(value, tuple | list) else (value,):
                if isinstance(x, core.ClosedJaxpr):
                    yield from x.consts
                    yield from hidden_in(x.jaxpr)
                elif isinstance(x, core.Jaxpr):
                    yield from hidden_in(x)


def has_effects(eqn: Any) -> bool:
    """Whether an equation does more than make results; to know an axis of a mesh is no effect."""
    return any(type(effect).__name__ != _OF_AXES for effect in eqn.effects)


def has_ordered_effects(eqn: Any) -> bool:
    """Whether an equation has effects that keep their order, as an ordered callback has."""
    return any("Ordered" in type(effect).__name__ for effect in eqn.effects)


def named_axes(jaxpr: Any) -> frozenset[str]:
    """The mesh axes that a program names, as collectives do."""
    return frozenset(x.name for x in jaxpr.effects if type(x).__name__ == _OF_AXES)


def is_barrier(eqn: Any) -> bool:
    """Whether it returns its operands when all of them are there."""
    return bool(eqn.primitive.name == _BARRIER)


def is_loop(eqn: Any) -> bool:
    """Whether it is a ``jax.lax.scan``."""
    return bool(eqn.primitive.name == _LOOP)


def widened(eqn: Any) -> tuple[Any, Any] | None:
    """The operand and the result of a cast to a wider dtype; None: it is something else."""
    if eqn.primitive is not jax.lax.convert_element_type_p or not variables(eqn.invars):
        return None
    (source,), (result,) = eqn.invars, eqn.outvars
    return (source, result) if source.aval.dtype.itemsize < result.aval.dtype.itemsize else None


def transposes(eqn: Any) -> bool:
    """Whether a product is over other dimensions than the last of its first operand."""
    if eqn.primitive.name != "dot_general":
        return False
    ((contracted, _), _), ndim = eqn.params["dimension_numbers"], eqn.invars[0].aval.ndim
    return tuple(contracted) != (ndim - 1,)


def sums_bfloat16(eqn: Any) -> bool:
    """Whether it adds, or compares, bfloat16 over axes of a mesh."""
    is_sum = eqn.primitive.name.startswith(_SUMS)
    return is_sum and any(v.aval.dtype == jnp.bfloat16 for v in eqn.invars)


def manual_inside(jaxpr: Any, manual: frozenset[str]) -> Iterator[tuple[Any, frozenset[str]]]:
    """Yields equations, also nested ones, each with the axes that are manual where it is."""
    for eqn in jaxpr.eqns:
        yield eqn, manual
        inside = manual | frozenset(eqn.params.get("newly_manual_axes", ()))
        for inner in core.jaxprs_in_params(eqn.params):
            yield from manual_inside(inner, inside)


def summed_over(jaxpr: Any, result: int) -> tuple[str, ...]:
    """The axes of the psum that gives a program's result; empty if another operation gives it."""
    var = jaxpr.outvars[result]
    made_by = {} if isinstance(var, core.Literal) else {v: e for e in jaxpr.eqns for v in e.outvars}
    while not isinstance(var, core.Literal) and var in made_by:
        eqn = made_by[var]
        name = eqn.primitive.name
        if name.startswith("psum") and not name.startswith("psum_scatter"):
            return tuple(eqn.params["axes"])
        inner = next((x for k, x in eqn.params.items() if k in _NESTED.values()), None)
        if name not in _PASSED_ON and inner is None:
            return ()
        if inner is not None:
            inner = inner.jaxpr if isinstance(inner, core.ClosedJaxpr) else inner
            place = eqn.outvars.index(var)
            same_results = len(inner.outvars) == len(eqn.outvars)
            return summed_over(inner, place) if same_results else ()
        var = eqn.invars[0]
    return ()


def step_of(loop: Any) -> Any:
    """The jaxpr of a step of a loop."""
    return loop.params["jaxpr"]


def with_step(loop: Any, step: Any, *, invars: Any = None, unroll: int | None = None) -> Any:
    """A loop with other steps, and perhaps other operands, or unrolled otherwise."""
    changed = {"jaxpr": step} | ({} if unroll is None else {"unroll": unroll})
    return loop.replace(
        invars=loop.invars if invars is None else invars, params=loop.params | changed
    )


def length_of(loop: Any) -> tuple[int, bool, int]:
    """How many steps a loop has, whether it runs from the last to the first, how it is unrolled."""
    return loop.params["length"], loop.params["reverse"], loop.params["unroll"]


def carried(loop: Any, step: Any) -> tuple[int, int]:
    """Returns which operands of a loop are the carry; JAX 0.12 names their number differently."""
    ranks = [v.aval.ndim for v in loop.invars], [v.aval.ndim for v in step.jaxpr.invars]
    results = [v.aval.ndim for v in loop.outvars], [v.aval.ndim for v in step.jaxpr.outvars]
    num_xs, num_carry = sum(map(operator.ne, *ranks)), sum(map(operator.eq, *results))
    end = len(loop.invars) - num_xs
    return end - num_carry, end


def ranks_of(jaxpr: Any) -> list[tuple[int, ...]]:
    """For each result of a jaxpr, the equation that makes it, and those within nested ones."""
    found: dict[Any, tuple[int, ...]] = {}
    wanted = set(variables(jaxpr.outvars))
    for i, eqn in enumerate(jaxpr.eqns):
        if wanted.isdisjoint(eqn.outvars):
            continue
        inner: list[tuple[int, ...]] = [()] * len(eqn.outvars)
        if _NESTED.get(eqn.primitive.name) == "jaxpr":
            nested = eqn.params["jaxpr"]
            inner = ranks_of(getattr(nested, "jaxpr", nested))
        found |= {v: (i, *rank) for v, rank in zip(eqn.outvars, inner, strict=True)}
    return [() if isinstance(v, core.Literal) else found.get(v, ()) for v in jaxpr.outvars]


def results_alone(traced: Any) -> tuple[Any, list[bool]]:
    """A jaxpr without what its first result does not depend on; which arguments are left.

    Callbacks and prints that do not make it are left out, also those in loops.
    """
    jaxpr, is_used = partial_eval.dce_jaxpr(_without_effects(traced.jaxpr), [True])
    return core.ClosedJaxpr(jaxpr, traced.consts), is_used


def _without_effects(jaxpr: Any) -> Any:
    """A jaxpr, and those in it, without effects and what is made for them alone."""

    def nested(x: Any) -> Any:
        if isinstance(x, tuple | list):
            is_any = any(isinstance(y, core.ClosedJaxpr | core.Jaxpr) for y in x)
            return type(x)(map(nested, x)) if is_any else x
        if isinstance(x, core.ClosedJaxpr):
            return core.ClosedJaxpr(_without_effects(x.jaxpr), x.consts)
        return _without_effects(x) if isinstance(x, core.Jaxpr) else x

    needed, eqns = set(variables(jaxpr.outvars)), list[Any]()
    for eqn in reversed(jaxpr.eqns):
        if needed.isdisjoint(eqn.outvars):
            continue
        params = {name: nested(x) for name, x in eqn.params.items()}
        eqns.append(eqn.replace(params=params, effects=core.no_effects))
        needed.update(variables(eqn.invars))
    return jaxpr.replace(eqns=eqns[::-1], effects=core.no_effects)


def with_eqns(traced: Any, eqns: Sequence[Any], same: Mapping[Any, Any] | None = None) -> Any:
    """A jaxpr with other equations; ``same``: variables, or literals, that stand for others."""

    def known(atoms: Iterable[Any]) -> list[Any]:
        found = list(atoms)
        for i, v in enumerate(found):
            while same and not isinstance(v, core.Literal) and v in same:
                v = found[i] = same[v]
        return found

    jaxpr = traced.jaxpr
    if same is not None:
        eqns = [eqn.replace(invars=known(eqn.invars)) for eqn in eqns]
    new = jaxpr.replace(eqns=list(eqns), outvars=known(jaxpr.outvars))
    return core.ClosedJaxpr(new, traced.consts)


def with_consts(traced: Any, consts: Sequence[Any]) -> Any:
    """A jaxpr with other constants."""
    return core.ClosedJaxpr(traced.jaxpr, consts)


def run(traced: Any, *args: Any) -> list[Any]:
    """Evaluates a jaxpr."""
    results: list[Any] = core.jaxpr_as_fun(traced)(*args)
    return results


def evaluate(
    traced: Any, args: Sequence[Any], otherwise: Callable[[Any, list[Any]], list[Any] | None]
) -> list[Any]:
    """Evaluates a jaxpr; equations for which ``otherwise`` returns results have these."""
    jaxpr = traced.jaxpr
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*traced.consts, *args], strict=True))
    for eqn in jaxpr.eqns:
        values = values_of(eqn.invars, known)
        names = source_info_util.current_name_stack() + eqn.source_info.name_stack
        with source_info_util.set_name_stack(names):  # of operations in place of the equation
            results = otherwise(eqn, values)
        if results is None:
            results = evaluate_one(jaxpr, eqn, values)
        known.update(zip(eqn.outvars, results, strict=True))
    return values_of(jaxpr.outvars, known)


def values_of(atoms: Iterable[Any], known: Mapping[Any, Any]) -> list[Any]:
    """The values of variables and literals of a jaxpr."""
    return [v.val if isinstance(v, core.Literal) else known[v] for v in atoms]


def evaluate_one(jaxpr: Any, eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Evaluates one equation like JAX, with its context and its name."""
    pairs = zip(eqn.invars, values, strict=True)
    known = {v: x for v, x in pairs if not isinstance(v, core.Literal)}
    return evaluate_some(jaxpr, [eqn], known, eqn.outvars)


def evaluate_some(
    jaxpr: Any, eqns: Sequence[Any], known: Mapping[Any, Any], results: Sequence[Any]
) -> list[Any]:
    """Evaluates some equations of a jaxpr, and returns results, from all values that they need."""
    some = jaxpr.replace(constvars=[], invars=list(known), outvars=list(results), eqns=list(eqns))
    return jax.core.eval_jaxpr(some, [], *known.values())


def is_nested(eqn: Any, names: Collection[str]) -> bool:
    """Whether it is a nested function, or rematerializes, and has operations of these names."""
    return eqn.primitive.name in _NESTED and contains(eqn, names)


def inlined(traced: Any, *args: Any, names: Collection[str]) -> list[Any]:
    """Evaluates a jaxpr, and nested equations that contain ``names`` operation by operation."""

    def opened(eqn: Any, values: list[Any]) -> list[Any] | None:
        if not is_nested(eqn, names):
            return None
        inner = eqn.params[_NESTED[eqn.primitive.name]]
        if eqn.primitive.name == _REMAT:
            inner, values = core.ClosedJaxpr(inner, ()), _not_shared(eqn, values)
        return inlined(inner, *values, names=names)

    return evaluate(traced, args, opened)


def _not_shared(eqn: Any, values: list[Any]) -> list[Any]:
    """The operands of rematerialized operations, behind the barrier that JAX puts before them."""
    is_kept = np.broadcast_to(eqn.params["prevent_cse"], len(values))
    if not (eqn.params["differentiated"] and is_kept.any()):
        return values
    kept = jax.lax.optimization_barrier([x for x, is_ in zip(values, is_kept, strict=True) if is_])
    rest = iter(kept)
    return [next(rest) if is_ else x for x, is_ in zip(values, is_kept, strict=True)]


# What this file knows, tried.

_OVERLAP = "copies, updates and collectives may not overlap the model, and steps take longer"
_COUNTED = "a loss that was summed over devices may not be detected"
_CRASHES = "a program that crashes XLA for CPUs may not be refused"


def unknown() -> dict[str, str]:
    """Returns what this JAX traces in another way, and what that costs."""
    found = {}
    for name, (is_as_known, cost) in _TRIALS.items():
        try:
            with collectives.no_mesh(), jax.disable_jit(False):
                is_known = is_as_known()
        except Exception:  # of any kind: parameters are missing, for example
            is_known = False
        if not is_known:
            found[name] = cost
    return found


@functools.cache  # once for a process
def warn_of_unknown() -> None:
    """Warns of what this JAX traces in another way; results are right, but see the costs."""
    # In a thread of its own: the caller may be inside of a program, or under a mesh.
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        found = pool.submit(unknown).result()
    if found:
        costs = "; ".join(dict.fromkeys(found.values()))
        warnings.warn(
            f"jdistadam: JAX {jax.__version__} traces programs in a way that this version does not "
            f"know: {', '.join(found)}. Results are right, but {costs}. Use a version of "
            "jdistadam for this JAX, or an older JAX.",
            stacklevel=2,
        )


_X = jax.ShapeDtypeStruct((2, 2), jnp.float32)


def _traced(function: Callable[..., Any]) -> Any:
    return jax.make_jaxpr(function)(_X)


def _only(function: Callable[..., Any], is_wanted: Callable[[Any], Any]) -> Any:
    """The only such equation of a traced function."""
    (eqn,) = [eqn for eqn in _traced(function).jaxpr.eqns if is_wanted(eqn)]
    return eqn


def _opens(function: Callable[..., Any]) -> bool:
    """Whether nothing nested that has a product is left of a function once it is opened."""
    traced = _traced(function)
    opened = jax.make_jaxpr(functools.partial(inlined, traced, names=PRODUCTS))(_X)
    eqns = opened.jaxpr.eqns
    nested = [eqn for eqn in eqns if contains(eqn, PRODUCTS) and name_of(eqn) not in PRODUCTS]
    return not nested and any(name_of(eqn) in PRODUCTS for eqn in eqns)


def _of_own_vjp() -> bool:
    function = jax.custom_vjp(lambda x: x @ x)
    function.defvjp(lambda x: (x @ x, x), lambda x, y: (x @ y,))
    return _opens(function)


def _of_remat() -> bool:
    kept = jax.checkpoint(lambda x: jnp.sum(jnp.sin(x @ x)))
    return _opens(kept) and _opens(jax.grad(kept))


def _of_loop() -> bool:
    step = lambda c, x: (c + x, x @ _zeros())  # noqa: E731
    loop = _only(lambda x: jax.lax.scan(step, x[0], x, reverse=True, unroll=2)[1], is_loop)
    replaced = with_step(loop, step_of(loop), unroll=1)
    lengths = length_of(loop), length_of(replaced)
    return lengths == ((2, True, 2), (2, True, 1)) and carried(loop, step_of(loop)) == (0, 1)


def _zeros() -> jax.Array:
    return jnp.zeros(_X.shape, _X.dtype)


def _over_axis(function: Callable[..., Any]) -> Any:
    """The jaxpr of a function over an axis "i", inside of ``jax.shard_map``."""
    mesh = AbstractMesh((2,), ("i",))
    mapped = jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return _traced(mapped).jaxpr


def _inside(function: Callable[..., Any]) -> list[Any]:
    """Its equations."""
    found = manual_inside(_over_axis(function), frozenset())
    return [eqn for eqn, axes in found if axes == {"i"}]


def _of_sums() -> bool:
    narrow = lambda x: collectives.all_reduce(x.astype(jnp.bfloat16), ("i",))  # noqa: E731
    return any(map(sums_bfloat16, _inside(narrow)))


def _of_summed_result() -> bool:
    total = jax.jit(lambda x: collectives.all_reduce(x, ("i",)))
    traced = _over_axis(lambda x: total(x).reshape(-1))
    (inner,) = [j for eqn in traced.eqns for j in core.jaxprs_in_params(eqn.params)]
    return summed_over(inner, 0) == ("i",)


def _of_gathers() -> bool:
    gathered = lambda x: collectives.all_gather(x, ("i",), dim=0)  # noqa: E731
    return any(name_of(eqn) in GATHERS for eqn in _inside(gathered))


def _of_effects() -> bool:
    shown = _only(lambda x: jax.debug.callback(lambda x: None, x), has_effects)
    ordered = _only(lambda x: jax.debug.callback(lambda x: None, x, ordered=True), has_effects)
    indices = lambda x: collectives.axis_index(("i",)) * 1  # noqa: E731
    are_known = has_ordered_effects(ordered) and not has_ordered_effects(shown)
    return are_known and not any(map(has_effects, _inside(indices)))


def _of_products() -> bool:
    plain, other = (
        _only(f, lambda eqn: name_of(eqn) in PRODUCTS)
        for f in (lambda x: x @ _zeros(), lambda x: jnp.einsum("ij,ik->jk", x, _zeros()))
    )
    image = lambda x: jax.lax.conv(x[None, None], x[None, None], (1, 1), "SAME")  # noqa: E731
    convolution = _only(image, lambda eqn: name_of(eqn) in PRODUCTS)
    return not transposes(plain) and transposes(other) and not transposes(convolution)


_TRIALS: dict[str, tuple[Callable[[], bool], str]] = {
    "jax.jit": (lambda: _opens(jax.jit(lambda x: x @ x)), _OVERLAP),
    "jax.checkpoint": (_of_remat, _OVERLAP),
    "jax.custom_vjp": (_of_own_vjp, _OVERLAP),
    "jax.lax.scan": (_of_loop, _OVERLAP),
    "jax.lax.optimization_barrier": (
        lambda: bool(_only(jax.lax.optimization_barrier, is_barrier)),
        _OVERLAP,
    ),
    "products": (_of_products, _OVERLAP),
    "casts": (
        lambda: bool(_only(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), widened)),
        _OVERLAP,
    ),
    "all_gather": (_of_gathers, _OVERLAP),
    "effects": (_of_effects, _OVERLAP),
    "psum": (_of_summed_result, _COUNTED),
    "sums over axes": (_of_sums, _CRASHES),
}
