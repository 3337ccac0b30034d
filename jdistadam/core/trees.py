"""Trees: names for signatures, flattening with paths, checks that two match, and Flax's boxes."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from jdistadam.core.arguments import FLOATS
from jdistadam.core.codecs import BlockCodes, is_codes
from jdistadam.errors import DtypeError, MeshError, ShapeError, TreeError

Params: TypeAlias = Any
"""A tree of arrays: the parameters of the model."""

Grads: TypeAlias = Any
"""A tree of arrays with the structure and the shapes of the params."""

OptState: TypeAlias = Any
"""The result of an optimizer's ``init``, ``update`` or ``step``."""


T = TypeVar("T")

STORAGE_DTYPES = tuple(map(jnp.dtype, FLOATS))
"""Dtypes that the kernel reads and writes."""


def named_leaves(tree: Any, name: str) -> list[tuple[str, Any]]:
    """Returns the leaves of a tree, each with its path without boxes: ``params['block']['w']``."""
    return [(name + jax.tree_util.keystr(path), x) for path, x in leaves_with_path(tree)]


def paths(tree: Any, name: str) -> list[str]:
    """Returns the paths of ``named_leaves``."""
    return [path for path, _ in named_leaves(tree, name)]


def parts_of(tree: Any, kind: Any) -> list[Any]:
    """Returns the parts of a tree that have this type, or one of these."""
    parts = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind))
    return [x for x in parts if isinstance(x, kind)]


def batches_of_equals(kinds: Sequence[Any], most: int) -> list[list[int]]:
    """Returns all indices in batches of at most ``most``, as many as possible of one kind.

    This needs few programs. Up to ``most`` items are a single batch, in their order.

    Example:
      >>> batches_of_equals("aabaabc", 2), batches_of_equals("aab", 3)
      ([[0, 1], [3, 4], [2, 5], [6]], [[0, 1, 2]])
    """
    of_kind: dict[Any, list[int]] = {}
    for i, kind in enumerate(kinds):
        of_kind.setdefault(kind, []).append(i)
    ends = {kind: len(same) // most * most for kind, same in of_kind.items()}
    full = [same[: ends[kind]] for kind, same in of_kind.items()]
    rest = sorted(i for kind, same in of_kind.items() for i in same[ends[kind] :])
    return [run[k : k + most] for run in (*full, rest) for k in range(0, len(run), most)]


def runs_within(
    items: Iterable[T], sizes: Iterable[int], most: int, *, most_items: float = math.inf
) -> list[list[T]]:
    """Splits items, in order, into runs of at most ``most`` in all, or of a single larger item.

    An item of size 0 begins no run because of ``most``.

    Example:
      >>> runs_within("abcde", [2, 1, 7, 0, 1], 3)
      [['a', 'b'], ['c', 'd'], ['e']]
    """
    runs, filled = list[list[T]](), 0
    for item, size in zip(items, sizes, strict=True):
        is_full = runs and (len(runs[-1]) >= most_items or (size and filled + size > most))
        if not runs or is_full:
            runs.append([])
            filled = 0
        runs[-1].append(item)
        filled += size
    return runs


def is_traced(tree: Any) -> bool:
    """Whether a leaf is traced."""
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))


def is_concrete(x: Any) -> bool:
    """Whether ``x`` is a jax array that has values, unlike a traced one."""
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)


def check_given(params: Params) -> None:
    """Raises optax's error if params are missing; optax has no public name for its text."""
    if params is None:
        raise ValueError(optax._src.base.NO_PARAMS_MSG)


def check_same_structure(tree: Any, like: Any, *, name: str, like_name: str) -> None:
    """Raises TreeError, naming the first leaf that only one of the two trees has."""
    got: Any = jax.tree.structure(tree)
    expected: Any = jax.tree.structure(like)
    if got == expected:
        return
    given_paths, like_paths = paths(tree, ""), paths(like, "")
    missing = [path for path in like_paths if path not in given_paths]
    unexpected = [path for path in given_paths if path not in like_paths]
    if missing or unexpected:
        what = f"missing, {like_name} has it"
        if not missing:
            what = f"unexpected, {like_name} does not have it"
        instead = f", among them {unexpected[0]}" if missing and unexpected else ""
        raise TreeError(
            f"{name}{(missing or unexpected)[0]}: {what}: got {len(given_paths)} leaves{instead}, "
            f"expected the {len(like_paths)} leaves of {like_name}. "
            f"Pass {name} with the tree structure of {like_name}."
        )
    where, has, wanted = first_difference(tree, like)
    raise TreeError(
        f"{name}{where}: tree structure differs from {like_name}: got {has}, expected {wanted}. "
        f"Build {name} with the same containers as {like_name}."
    )


def first_difference(
    tree: Any, like: Any, *, is_prefix: bool = False, is_leaf: Any = None
) -> tuple[str, str, str]:
    """Returns the path of the first node that differs between two trees, and both as text.

    The text is the type if that differs, as of a dict and an ``nnx.State``, else the structure.

    Args:
      tree: A tree.
      like: A tree of another structure.
      is_prefix: Whether a leaf of ``tree`` may stand for a subtree.
      is_leaf: Which containers in ``tree`` are leaves.

    Example:
      >>> first_difference({"a": (1, [2])}, {"a": (1, (2,))})
      ("['a'][1]", 'list', 'tuple')
    """

    def at(path: str, x: Any, y: Any) -> tuple[str, Any, Any] | None:
        if is_prefix and jax.tree.structure(x, is_leaf=is_leaf) == _LEAF:
            return None
        if _node(x) != _node(y):
            return path, x, y
        parts = zip(_parts(x), _parts(y), strict=True)
        found = (at(path + key, child, other) for (key, child), (_, other) in parts)
        return next((difference for difference in found if difference is not None), None)

    path, x, y = at("", tree, like) or ("", tree, like)
    if _kind(x) != _kind(y):
        return path, _kind(x), _kind(y)
    return path, *_short(str(jax.tree.structure(x)), str(jax.tree.structure(y)))


_LEAF: Any = jax.tree.structure(0)
_SHORT = 120  # characters


def _node(x: Any) -> Any:
    """The structure of a tree's root and its children."""
    return jax.tree.structure(x, is_leaf=lambda child: child is not x)


def _kind(x: Any) -> str:
    """The type of a node, with the module that defines it; "a leaf" for a leaf."""
    name, module = type(x).__qualname__, type(x).__module__
    if jax.tree.structure(x) == _LEAF:
        return "a leaf"
    return name if module == "builtins" else f"{module}.{name}"


def _parts(x: Any) -> list[tuple[str, Any]]:
    """The children of a node with their path components; empty for a leaf."""
    flat, _ = jax.tree_util.tree_flatten_with_path(x, is_leaf=lambda child: child is not x)
    return [(jax.tree_util.keystr(path), child) for path, child in flat if path]


def _short(text: str, other: str) -> tuple[str, str]:
    """Two texts cut to a limited length, from shortly before their first difference."""
    pairs = enumerate(zip(text, other, strict=False))
    common = next((i for i, (x, y) in pairs if x != y), min(len(text), len(other)))
    begin = common - _SHORT // 4 if common > _SHORT // 2 else 0

    def short(text: str) -> str:
        before, after = begin > 0, len(text) > begin + _SHORT
        return before * "..." + text[begin : begin + _SHORT] + after * "..."

    return short(text), short(other)


def check_same_shapes(tree: Any, like: Any, *, name: str, like_name: str) -> None:
    """Raises TreeError or ShapeError unless every leaf has the shape of its counterpart."""
    check_same_structure(tree, like, name=name, like_name=like_name)
    for (path, x), y in zip(named_leaves(tree, name), jax.tree.leaves(like), strict=True):
        if np.shape(x) != np.shape(y):
            raise ShapeError(
                f"{path}: shape differs from {like_name}: got {np.shape(x)}, expected "
                f"{np.shape(y)}. Nothing is broadcast here: fix the shape where this tree is made."
            )


def check_numbers(tree: Any, *, name: str) -> None:
    """Raises DtypeError unless every leaf is an array or a Python number, as optax takes them.

    Arrays of random keys raise, though optax makes a state for them.
    """
    _refuse_state(tree, name)
    for path, x in named_leaves(tree, name):
        is_array = hasattr(x, "dtype") and not is_key(x)
        if not is_array and not isinstance(x, bool | int | float | complex):
            what = "not an array of numbers" if is_key(x) else "not an array"
            raise DtypeError(
                f"{path}: {what}: got {x.dtype if is_key(x) else repr(x)}, expected a jax or numpy "
                "array, or a number. Leave it out of the tree, or put None in its place."
            )


def _refuse_state(tree: Any, name: str) -> None:
    """Raises TreeError for a train state, of this package or of Flax, in place of a part of it."""
    if hasattr(tree, "params") and hasattr(tree, "opt_state"):
        raise TreeError(
            f"{name}: a whole train state: got {type(tree).__name__}, expected a tree of arrays. "
            "Pass the part that is meant, such as state.params."
        )


def refuse_shapes(
    tree: Any, *, name: str, action: str = "Pass arrays; for shapes alone use jax.eval_shape."
) -> None:
    """Raises TreeError if a leaf is a ``jax.ShapeDtypeStruct``."""
    for path, x in named_leaves(tree, name):
        if isinstance(x, jax.ShapeDtypeStruct):
            raise TreeError(
                f"{path}: a shape, not an array: got {x}, expected a jax or numpy array. {action}"
            )


def check_arrays(tree: Any, *, name: str) -> None:
    """Raises TreeError for a shape, DtypeError for anything else but arrays and numbers."""
    refuse_shapes(tree, name=name)
    for path, x in named_leaves(tree, name):
        if not is_number(x):
            raise DtypeError(
                f"{path}: not an array of numbers: got {x!r}, "
                f"expected a jax or numpy array, or a number. Leave it out of {name}."
            )


def is_number(x: Any) -> bool:
    """Whether ``x`` is a number, or an array of numbers or of random keys."""
    dtype = getattr(x, "dtype", None)
    if dtype is None:
        return isinstance(x, bool | int | float | complex)
    kinds = (np.number, np.bool_, jax.dtypes.prng_key)
    return any(jnp.issubdtype(dtype, kind) for kind in kinds)


def is_key(x: Any) -> bool:
    """Whether ``x`` is an array of new-style random keys."""
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def impl_of_key(x: Any) -> Any:
    """Returns the implementation of random keys; None for other arrays."""
    return jax.random.key_impl(x) if is_key(x) else None


def words_of(x: Any) -> Any:
    """Returns the words of random keys; other arrays as they are."""
    return jax.random.key_data(x) if is_key(x) else x


def from_words(x: Any, impl: Any) -> Any:
    """Returns random keys from their words; other arrays, without ``impl``, as they are."""
    return x if impl is None else jax.random.wrap_key_data(x, impl=impl)


def check_key(name: str, value: Any) -> None:
    """Raises DtypeError unless ``value`` is one random key, new-style or legacy."""
    if is_key(value) and value.shape == ():
        return
    is_array = isinstance(value, jax.Array | np.ndarray)
    legacy = jax.eval_shape(lambda: jax.random.PRNGKey(0))
    if is_array and (value.dtype, value.shape) == (legacy.dtype, legacy.shape):
        return
    got = f"{value.dtype}, shape {value.shape}" if is_array else repr(value)
    raise DtypeError(
        f"{name}: not a random key: got {got}, expected one key, as jax.random.key(0) returns. "
        f"Pass {name}=jax.random.key(seed)."
    )


def check_scalar(name: str, value: Any) -> None:
    """Raises ShapeError or DtypeError unless ``value`` is one real number or scalar array."""
    dtype = getattr(value, "dtype", None)
    if dtype is None and isinstance(value, bool | int | float):
        dtype = np.result_type(type(value))
    real = (np.floating, np.integer, np.bool_)
    if dtype is None or not any(jnp.issubdtype(dtype, kind) for kind in real):
        raise DtypeError(
            f"{name}: not a real number: got {type(value).__name__ if dtype is None else dtype}, "
            f"expected a floating-point scalar. Return or pass {name} as one number."
        )
    if np.shape(value) != ():
        raise ShapeError(
            f"{name}: not a scalar: got {np.shape(value)}, expected (). "
            "Take the mean, or the sum, first."
        )


def check_dtypes(
    tree: Any,
    *,
    name: str,
    allowed: Sequence[Any] = STORAGE_DTYPES,
    action: str = "Cast the leaf, or keep it elsewhere: in model_state of a TrainState, or under "
    "optax.masked without jda.distributed.",
) -> None:
    """Raises DtypeError unless every leaf has one of the allowed dtypes."""
    _refuse_state(tree, name)
    allowed = [jnp.dtype(dtype) for dtype in allowed]
    for path, x in named_leaves(tree, name):
        dtype = getattr(x, "dtype", None)
        if (
            dtype is None
            or not jnp.issubdtype(dtype, np.generic)
            or jnp.issubdtype(dtype, jax.dtypes.extended)
            or jnp.dtype(dtype) not in allowed
        ):
            raise DtypeError(
                f"{path}: dtype cannot be used: "
                f"got {type(x).__name__ if dtype is None else dtype}, "
                f"expected {' or '.join(map(str, allowed))}. {action}"
            )


def check_memory(advice: str = "", /, **named: Any) -> None:
    """Raises MeshError for an array in host memory, which programs here do not read.

    ``advice`` says how to move it; "": all of the tree to the device.
    """
    for name, tree in named.items():
        kinds = [_host_memory(x) for x in jax.tree.leaves(tree)]
        if any(kinds):
            place = next(i for i, kind in enumerate(kinds) if kind)
            to_device = f"Move it there first: jax.device_put({name}, jax.memory.Space.Device)."
            raise MeshError(
                f"{paths(tree, name)[place]}: in host memory, which is not supported here: "
                f"got memory kind {kinds[place]!r}, expected device memory. {advice or to_device}"
            )


def _host_memory(x: Any) -> str:
    """The memory kind of an array or a shape if it is the host's; otherwise ""."""
    if isinstance(x, jax.core.Tracer):  # its type does not say
        return "host" if jax.typeof(x).memory_space == jax.memory.Space.Host else ""
    sharding: Any = getattr(x, "sharding", None)
    kind: str = getattr(sharding, "memory_kind", None) or ""
    if "host" not in kind:
        return ""
    device = next(iter(sharding.device_set))
    return "" if kind == device.default_memory().kind else kind


def placed_like(param: Any, zeros: Any) -> Any:
    """Gives zeros made inside a program the sharding of a parameter of the same shape.

    Inside a program zeros are constants. XLA would keep all of them on every device, because
    nothing in a step says that moments are sharded like params. An elementwise operation on both
    says it.
    """
    if not isinstance(param, jax.core.Tracer):
        return zeros  # zeros_like has placed them
    never = (param != param) & (param == param)
    return jnp.where(never, param.astype(zeros.dtype), zeros)


def keep_if(is_skipped: jax.Array | None, old: Any, new: Any) -> Any:
    """Returns ``old`` after a skipped step, otherwise ``new``: trees of equal shapes."""
    if is_skipped is None:
        return new
    return jax.tree.map(lambda a, b: jnp.where(is_skipped, a, b), old, new)


# Flax's boxes around the arrays of a tree: ``nnx.Variable``, and ``nn.Partitioned`` of linen.
#
# [Note: boxes]
# A box is a node of a tree with one child and metadata, such as its sharding. Trees like params
# have the boxes of params. A coded moment is two arrays in place of one: in a state each of them
# has its own box, because nnx puts one array into a Variable and linen reads one sharding from a
# box. During a step the box is around both, as around the parameter. Leaves have the same order and
# the same names either way: those of a tree without boxes.

_KINDS = (("flax.nnx", "Variable"), ("flax.core.meta", "AxisMetadata"))
_SHARDINGS = ("out_sharding", "optimizer_sharding")  # of a Variable, if it has them


def is_box(x: Any) -> bool:
    """Whether ``x`` is a box. If Flax is not imported, nothing is."""
    kinds = (getattr(sys.modules.get(module), name, None) for module, name in _KINDS)
    return isinstance(x, tuple(kind for kind in kinds if kind is not None))


def _content(box: Any) -> Any:
    return next(iter(jax.tree.leaves(box, is_leaf=lambda x: x is not box)), None)


def _with(box: Any, content: Any) -> Any:
    treedef: Any = jax.tree.structure(box, is_leaf=lambda x: x is not box)
    return treedef.unflatten([content])


def unboxed(tree: Any) -> Any:
    """Returns a tree without its boxes."""
    return jax.tree.map(lambda x: unboxed(_content(x)) if is_box(x) else x, tree, is_leaf=is_box)


def leaves_with_path(tree: Any, is_leaf: Any = None) -> list[tuple[tuple[Any, ...], Any]]:
    """Returns the leaves of a tree, each with its path in a tree without boxes."""
    stop = is_leaf or (lambda x: False)
    found: list[tuple[tuple[Any, ...], Any]] = []
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: stop(x) or is_box(x))
    for path, x in flat:
        if is_box(x) and not stop(x):
            found.extend((path + rest, y) for rest, y in leaves_with_path(_content(x), is_leaf))
        else:
            found.append((path, x))
    return found


def codes_outside(moments: Any) -> Any:
    """Returns moments in the form of a state: codes and scales each in a box."""

    def outside(x: Any) -> Any:
        if not is_box(x):
            return x
        content = codes_outside(_content(x))
        if not is_codes(content):
            return _with(x, content)
        return BlockCodes(_with(x, content.codes), _of_scales(_with(x, content.scales)))

    return jax.tree.map(outside, moments, is_leaf=is_box)


def codes_inside(moments: Any) -> Any:
    """Returns moments in the form of a step: the inverse."""

    def inside(x: Any) -> Any:
        if not is_codes(x) or not is_box(x.codes):
            return x
        both = inside(BlockCodes(_content(x.codes), _content(x.scales)))
        return _with(x.codes, both)

    return jax.tree.map(inside, moments, is_leaf=is_codes)


def _of_scales(box: Any) -> Any:
    """Gives the box of the one-dimensional scales the sharding of the codes' first dimension."""
    if isinstance(names := getattr(box, "names", None), tuple):
        return box.replace(names=names[:1])
    if hasattr(box, "set_metadata"):
        known = box.get_metadata()
        for name in _SHARDINGS:
            if isinstance(known.get(name), tuple | list | P):
                box.set_metadata(name, tuple(known[name])[:1])
    return box
