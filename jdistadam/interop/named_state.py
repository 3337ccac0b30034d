"""Between two frameworks: the arrays of Adam by the other one's names, and where they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jdistadam.core import trees
from jdistadam.errors import DtypeError, HyperparameterError, ShapeError, TreeError


class NamedLeaf(NamedTuple):
    """One parameter of the other framework, in its shape, and what Adam keeps of it.

    Attributes:
      param: The parameter as exact as it is known: the main parameter where one was kept. None if
        it was not given.
      mu: The first moment; None where the other optimizer has none, as of frozen parameters.
      nu: The second moment, likewise.
    """

    param: Any
    mu: Any
    nu: Any


class Group(NamedTuple):
    """A group of parameters with hyperparameters of its own.

    Attributes:
      names: The names of its parameters, in their order.
      settings: The hyperparameters, by the other framework's names: ``lr``, ``betas`` and so on.
    """

    names: tuple[str, ...]
    settings: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class NamedState:
    """The state of an Adam of another framework, as numpy arrays.

    Attributes:
      step: The number of steps taken.
      leaves: The parameters and their moments, by the other framework's names.
      groups: Its groups of parameters, in their order.
    """

    step: int
    leaves: Mapping[str, NamedLeaf]
    groups: tuple[Group, ...]

    def arguments(self) -> dict[str, Any]:
        """Returns the hyperparameters as arguments of our optimizers.

        Those of ``fused_adamw``; where weight decay is a part of
        the gradient, ``l2`` instead of ``weight_decay``, as ``fused_adam`` takes it.

        Raises:
          HyperparameterError: There are groups with different ones.

        Example:
          >>> import jdistadam as jda
          >>> settings = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
          >>> theirs = NamedState(0, {}, (Group(("w",), settings),))
          >>> tx = jda.fused_adamw(**theirs.arguments())
          >>> theirs.arguments()["b2"]
          0.95
        """
        found = [our_arguments(group.settings) for group in self.groups if group.names]
        if not found or any(other != found[0] for other in found):
            what = "have different hyperparameters" if found else "there are none"
            raise HyperparameterError(
                f"groups: {what}: got {found}, expected the same in all groups. "
                "Pass them as mask, or as param_labels and groups: see NamedState.groups."
            )
        return found[0]


def our_arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the hyperparameters of one group by our names."""
    arguments = {"learning_rate": settings["lr"]} if "lr" in settings else {}
    if "betas" in settings:
        arguments |= dict(zip(("b1", "b2"), settings["betas"], strict=True))
    if "eps" in settings:
        arguments["eps"] = settings["eps"]
    if "weight_decay" in settings:
        is_decoupled = settings.get("decoupled_weight_decay", True)
        arguments["weight_decay" if is_decoupled else "l2"] = settings["weight_decay"]
    if not settings.get("bias_correction", True):
        arguments["bias_correction"] = False
    return arguments


def joined_groups(settings: Mapping[str, Mapping[str, Any]]) -> tuple[Group, ...]:
    """Returns groups of parameters with equal settings, in the order of their first ones."""
    groups: list[Group] = []
    for name, given in settings.items():
        for i, group in enumerate(groups):
            if group.settings == given:
                groups[i] = Group((*group.names, name), given)
                break
        else:
            groups.append(Group((name,), given))
    return tuple(groups)


def check_named_state(theirs: Any) -> None:
    """Raises TreeError unless ``theirs`` is a NamedState."""
    if not isinstance(theirs, NamedState):
        raise TreeError(
            f"theirs: not a NamedState: got {type(theirs).__name__}, "
            "expected what from_torch, from_train_state or another reader returned. "
            "Read the other framework's dictionary with one of them first."
        )


Rename = Callable[[str], str | None] | Mapping[str, str | None] | None
Transpose = Callable[[str, int], Sequence[int] | None] | Mapping[str, Sequence[int]] | None


class Place(NamedTuple):
    """One leaf of ours, and what it is of theirs.

    Attributes:
      where: Its path in messages, such as ``params['Dense_0']['kernel']``.
      name: Their name of it.
      axes: The order of its dimensions: ours is ``np.transpose(theirs, axes)``.
      shape: Its shape.
    """

    where: str
    name: str
    axes: tuple[int, ...]
    shape: tuple[int, ...]


class AdamTrees(NamedTuple):
    """What Adam holds, as trees with the structure of our parameters, of numpy arrays.

    Attributes:
      params: Exact parameters, float32.
      mu: First moments, in the dtype in which they were kept.
      nu: Second moments, likewise.
    """

    params: Any
    mu: Any
    nu: Any


def flax_kernels(path: str, ndim: int) -> tuple[int, ...] | None:
    """Says how the weights of torch's layers become kernels of Flax.

    A linear weight (out, in) becomes (in, out); a convolution's (out, in, ...) becomes
    (..., in, out): OIHW to HWIO. What is not called ``kernel``, such as an embedding, stays.

    Args:
      path: The path of our leaf.
      ndim: The number of its dimensions.

    Example:
      >>> flax_kernels("Conv_0/kernel", 4), flax_kernels("Dense_0/kernel", 2)
      ((2, 3, 1, 0), (1, 0))
      >>> flax_kernels("layers/0/kernel", 2), flax_kernels("Embed_0/embedding", 2)
      ((1, 0), None)
    """
    if path.rpartition("/")[2] != "kernel" or ndim < 2:
        return None
    return (*range(2, ndim), 1, 0)


def places(names: Iterable[str], like: Any, rename: Rename, transpose: Transpose) -> list[Place]:
    """Returns the place of each of our leaves; rename and transpose as ``to_train_state`` says.

    Raises:
      TreeError: A name leads to none of our leaves, or two lead to one, or none leads to one; or
        transpose has a path of no leaf.
      ShapeError: The axes are no order of the dimensions.
    """
    flat = trees.leaves_with_path(like)
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in flat]
    where = dict(zip(paths, trees.paths(like, "params"), strict=True))
    found = _names_by_path(list(names), rename, where)
    if isinstance(transpose, Mapping) and (extra := [x for x in transpose if x not in where]):
        raise TreeError(
            f"transpose[{extra[0]!r}]: belongs to no leaf: got {extra[0]}, "
            f"expected a path such as {next(iter(where), '')!r}. Fix or remove it."
        )
    order = transpose if callable(transpose) else lambda path, _: (transpose or {}).get(path)
    made = []
    for path, leaf in zip(paths, jax.tree.leaves(like), strict=True):
        shape = tuple(leaf.shape)
        axes = order(path, len(shape))
        place = Place(
            where[path], found[path], tuple(range(len(shape)) if axes is None else axes), shape
        )
        if sorted(place.axes) != list(range(len(shape))):
            raise ShapeError(
                f"{place.where}: cannot be transposed so: got axes {place.axes}, "
                f"expected an order of its {len(shape)} dimensions. Fix transpose."
            )
        made.append(place)
    return made


def _names_by_path(names: list[str], rename: Rename, where: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in names:
        path = _renamed(name, rename)
        if path is None:
            continue
        if path in found:
            raise TreeError(
                f"{where[path]}: two parameters lead here: "
                f"got {name!r} and {found[path]!r}, expected one of theirs. "
                f"Fix rename for {name!r}: a path of ours, or None to leave it out."
            )
        if path not in where:
            raise TreeError(
                f"params: {path}: unexpected: params has no leaf: got {name!r}, "
                f"expected a path such as {next(iter(where), '')!r}. "
                f"Fix rename for {name!r}: a path of ours, or None to leave it out."
            )
        found[path] = name
    if missing := [path for path in where if path not in found]:
        raise TreeError(
            f"{where[missing[0]]}: missing: none of their parameters leads here: got {len(found)} "
            f"of {len(where)} leaves from {len(names)} names {names[:3]}, expected one that rename "
            f"brings to {missing[0]!r}. Fix rename, or give the optimizer's whole state."
        )
    return found


def _renamed(name: str, rename: Rename) -> str | None:
    if rename is None:
        return name.replace(".", "/")
    if callable(rename):
        return rename(name)
    if name not in rename:
        raise TreeError(
            f"rename[{name!r}]: missing: the other optimizer has this parameter: "
            f"got {len(rename)} names, expected a path of ours, or None to leave it out. Add it."
        )
    return rename[name]


def to_trees(
    leaves: Mapping[str, NamedLeaf], ours: Sequence[Place], like: Any, is_frozen: Sequence[bool]
) -> AdamTrees:
    """Returns trees of what is theirs, of the structure of ``like``.

    Leaves that are never trained may have no moments, and get zeros.

    Raises:
      TreeError: A parameter or its moments are missing.
      ShapeError: One has another shape than ours.
      DtypeError: One has a dtype that float32 does not hold.
    """
    treedef: Any = jax.tree.structure(like)
    made = [_ours(x, leaves[x.name], frozen) for x, frozen in zip(ours, is_frozen, strict=True)]
    return AdamTrees(*(treedef.unflatten([leaf[i] for leaf in made]) for i in range(3)))


def _ours(place: Place, leaf: NamedLeaf, is_frozen: bool) -> NamedLeaf:
    """Copies one leaf into our order of dimensions."""
    if leaf.param is None:
        raise TreeError(
            f"{place.where}: missing: the state has moments of it alone: "
            f"got no parameter {place.name!r}, expected an array of shape {place.shape}. "
            f"Pass it in params, under the name {place.name!r}."
        )
    if (leaf.mu is None or leaf.nu is None) and not is_frozen:
        raise TreeError(
            f"{place.where}: has no moments in the other optimizer, which never stepped it: "
            f"got no state of {place.name!r}, expected exp_avg and exp_avg_sq. "
            "Freeze it here too, with param_labels and groups."
        )
    zeros = np.zeros(np.shape(leaf.param), np.float32)
    given = [zeros if x is None else x for x in leaf]
    for key, x in zip(("parameter", "exp_avg", "exp_avg_sq"), given, strict=True):
        if x.dtype not in trees.STORAGE_DTYPES:
            raise DtypeError(
                f"{place.where}: dtype cannot be used: got {x.dtype} for {key} of {place.name!r}, "
                f"expected {' or '.join(map(str, trees.STORAGE_DTYPES))}. "
                "Convert it before, if the rounding is meant."
            )
    shape = given[0].shape
    if len(shape) != len(place.axes) or tuple(shape[i] for i in place.axes) != place.shape:
        raise ShapeError(
            f"{place.where}: shape differs from the other framework's: "
            f"got {shape} of {place.name!r}, whose dimensions are taken in the order {place.axes}, "
            f"expected {place.shape}. "
            "Fix transpose or rename; flax_kernels transposes what torch's layers have."
        )
    param, mu, nu = (_copy(x, place.axes) for x in given)  # theirs may train on
    return NamedLeaf(param.astype(np.float32, copy=False), mu, nu)


def to_leaves(
    trees_of_ours: AdamTrees, ours: Sequence[Place], names: Sequence[str], is_frozen: Sequence[bool]
) -> dict[str, NamedLeaf]:
    """Returns named leaves of what is ours, in the order of ``names``: the inverse."""
    made = {}
    parts = zip(*map(jax.tree.leaves, trees_of_ours), strict=True)
    for place, (param, *moments), frozen in zip(ours, parts, is_frozen, strict=True):
        back = tuple(np.argsort(place.axes))
        kept = (None if frozen else _copy(x, back) for x in moments)
        made[place.name] = NamedLeaf(_copy(param, back), *kept)
    return {name: made[name] for name in names if name in made}


def _copy(x: Any, axes: tuple[int, ...]) -> np.ndarray:
    return np.array(np.asarray(x).transpose(axes), order="C")
