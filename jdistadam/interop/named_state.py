"""The exchange format: Adam by another framework's names; arrays and hyperparameters, both ways."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from jdistadam.core import trees
from jdistadam.core.algorithm import Groups
from jdistadam.core.arguments import shown, warn_caller
from jdistadam.core.hyperparameters import FLAGS, Hyperparameters
from jdistadam.errors import DtypeError, HyperparameterError, ShapeError, TreeError


class NamedLeaf(NamedTuple):
    """One parameter of the other framework, in its shape, with its Adam state.

    Attributes:
      param: The main parameter if there is one, otherwise the parameter; None if not given.
      mu: The first moment; None if the other optimizer has none, as for frozen parameters.
      nu: The second moment, likewise.
    """

    param: Any
    mu: Any = None
    nu: Any = None


class Group(NamedTuple):
    """Parameters of the other framework with the same hyperparameters.

    Attributes:
      names: The names of the parameters, in order.
      settings: The hyperparameters by the other framework's names.
    """

    names: tuple[str, ...]
    settings: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class NamedState:
    """The state of an Adam of another framework, as numpy arrays.

    Attributes:
      step: The number of steps taken.
      leaves: The parameters and their moments by the other framework's names.
      groups: Its groups of parameters in its order.
    """

    step: int
    leaves: Mapping[str, NamedLeaf]
    groups: tuple[Group, ...]

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of ``fused_adamw``, or of ``fused_adam`` if weight decay is L2.

        Returns:
          Keyword arguments by name.

        Raises:
          HyperparameterError: Groups differ in hyperparameters.

        Example:
          >>> group = Group(("w",), dict(lr=1e-3, betas=(0.9, 0.95)))
          >>> NamedState(0, {}, (group,)).arguments()
          {'learning_rate': 0.001, 'b1': 0.9, 'b2': 0.95}
        """
        found = [_our_arguments(group.settings) for group in self.groups if group.names]
        if not found or any(other != found[0] for other in found):
            what = "have different hyperparameters" if found else "there are none"
            raise HyperparameterError(
                f"groups: {what}: got {found}, expected the same in all groups. "
                "Pass them as mask, or as param_labels and groups: see NamedState.groups."
            )
        return found[0]


def check_named_state(theirs: Any) -> None:
    """Raises TreeError unless ``theirs`` is a NamedState."""
    if not isinstance(theirs, NamedState):
        raise TreeError(
            f"theirs: not a NamedState: got {type(theirs).__name__}, "
            "expected what from_torch, from_train_state or another reader returned. "
            "Read the other framework's dictionary with one of them first."
        )


# Names and arrays.

Rename = Callable[[str], str | None] | Mapping[str, str | None] | None
Transpose = Callable[[str, int], Sequence[int] | None] | Mapping[str, Sequence[int]] | None


class Place(NamedTuple):
    """One of our leaves and its name in the other framework: ours is ``transpose(theirs, axes)``.

    ``where`` is its path in messages, such as ``params['Dense_0']['kernel']``.
    """

    where: str
    name: str
    axes: tuple[int, ...]
    shape: tuple[int, ...]


def flax_kernels(path: str, ndim: int) -> tuple[int, ...] | None:
    """Returns the axes that turn the weight of a torch layer into a Flax kernel.

    A linear weight (out, in) becomes (in, out); a convolution's (out, in, ...) becomes
    (..., in, out): OIHW to HWIO. ``path`` and ``ndim`` describe our leaf.

    Returns:
      Axes for ``np.transpose``; None if the path does not end in ``kernel``.

    Example:
      >>> flax_kernels("Conv_0/kernel", 4), flax_kernels("Embed_0/embedding", 2)
      ((2, 3, 1, 0), None)
    """
    is_kernel = path.rpartition("/")[2] == "kernel" and ndim >= 2
    return (*range(2, ndim), 1, 0) if is_kernel else None


def places(names: Iterable[str], like: Any, rename: Rename, transpose: Transpose) -> list[Place]:
    """Returns the place of each of our leaves; rename and transpose as in ``to_train_state``."""
    flat = trees.leaves_with_path(like)
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in flat]
    where = dict[str, str]()
    for path, full in zip(paths, trees.paths(like, "params"), strict=True):
        if path in where:
            raise TreeError(
                f"{full}: two leaves have the same path here, and one would be taken for both: got "
                f"{path!r} for it and {where[path]}, expected different paths. Rename a key with /."
            )
        where[path] = full
    name_of = _names_by_path(list(names), rename, where)
    if isinstance(transpose, Mapping) and (extra := [x for x in transpose if x not in where]):
        raise TreeError(
            f"transpose[{extra[0]!r}]: belongs to no leaf: got {extra[0]}, "
            f"expected a path such as {next(iter(where), '')!r}. Fix or remove it."
        )
    axes_of = transpose if callable(transpose) else lambda path, _: (transpose or {}).get(path)
    made = []
    for path, (_, leaf) in zip(paths, flat, strict=True):
        ndim = len(leaf.shape)
        axes = axes_of(path, ndim)
        axes = tuple(range(ndim) if axes is None else axes)
        if sorted(axes) != list(range(ndim)):
            raise ShapeError(
                f"{where[path]}: cannot be transposed so: got axes {axes}, "
                f"expected an order of its {ndim} dimensions. Fix transpose."
            )
        made.append(Place(where[path], name_of[path], axes, tuple(leaf.shape)))
    return made


def _names_by_path(names: list[str], rename: Rename, where: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    ours: Any = {name: name.replace(".", "/") for name in names} if rename is None else rename
    for name in names:
        if isinstance(rename, Mapping) and name not in rename:
            raise TreeError(
                f"rename[{name!r}]: missing: the other optimizer has this parameter: got "
                f"{len(rename)} names, expected a path of ours, or None to leave it out. Add it."
            )
        path = ours[name] if isinstance(ours, Mapping) else ours(name)
        if path is None:
            continue
        fix = f"Fix rename for {name!r}: a path of ours, or None to leave it out."
        if path in found:
            raise TreeError(
                f"{where[path]}: two parameters lead here: "
                f"got {name!r} and {found[path]!r}, expected one of theirs. {fix}"
            )
        if path not in where:
            raise TreeError(
                f"params: {path}: unexpected: params has no leaf: got {name!r}, "
                f"expected a path such as {next(iter(where), '')!r}. {fix}"
            )
        found[path] = name
    if missing := [path for path in where if path not in found]:
        raise TreeError(
            f"{where[missing[0]]}: missing: none of their parameters leads here: got {len(found)} "
            f"of {len(where)} leaves from {len(names)} names {names[:3]}, expected one that rename "
            f"brings to {missing[0]!r}. Fix rename, or give the optimizer's whole state. A frozen "
            "parameter that the optimizer did not get can be added: "
            "theirs.leaves[name] = jda.interop.NamedLeaf(param)."
        )
    return found


def to_trees(theirs: NamedState, ours: list[Place], like: Any, rows: Sequence[Any]) -> list[Any]:
    """Returns copies of the exact float32 parameters, mu and nu: trees like ``like``.

    Leaves whose row is None are frozen: they may have no moments, and get zeros.
    """
    made = []
    for place, row in zip(ours, rows, strict=True):
        leaf = theirs.leaves[place.name]
        _check_leaf(place, leaf, is_frozen=row is None)
        zeros = np.zeros(leaf.param.shape, np.float32)
        param, mu, nu = (_copy(zeros if x is None else x, place.axes) for x in leaf)
        made.append((param.astype(np.float32, copy=False), mu, nu))
    treedef: Any = jax.tree.structure(like)
    return [treedef.unflatten([leaf[i] for leaf in made]) for i in range(3)]


def _check_leaf(place: Place, leaf: NamedLeaf, *, is_frozen: bool) -> None:
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
    for key, x in zip(("parameter", "exp_avg", "exp_avg_sq"), leaf, strict=True):
        if x is not None and x.dtype not in trees.STORAGE_DTYPES:
            raise DtypeError(
                f"{place.where}: dtype cannot be used: got {x.dtype} for {key} of {place.name!r}, "
                f"expected {' or '.join(map(str, trees.STORAGE_DTYPES))}. "
                "Convert it before, if the rounding is meant."
            )
    shape = leaf.param.shape
    if len(shape) != len(place.axes) or tuple(shape[i] for i in place.axes) != place.shape:
        raise ShapeError(
            f"{place.where}: shape differs from the other framework's: "
            f"got {shape} of {place.name!r}, whose dimensions are taken in the order {place.axes}, "
            f"expected {place.shape}. "
            "Fix transpose or rename; flax_kernels transposes what torch's layers have."
        )


def to_leaves(ours: list[Place], names: Iterable[str], *adam: Any) -> dict[str, NamedLeaf]:
    """The inverse of ``to_trees``; moments of frozen leaves may be ``optax.MaskedNode``."""
    made: dict[str, NamedLeaf] = {}
    treedef: Any = jax.tree.structure(adam[0])
    for place, *leaf in zip(ours, *map(treedef.flatten_up_to, adam), strict=True):
        back = tuple(np.argsort(place.axes))
        arrays = (None if isinstance(x, optax.MaskedNode) else _copy(x, back) for x in leaf)
        made[place.name] = NamedLeaf(*arrays)
    return {name: made[name] for name in names if name in made}


def _copy(x: Any, axes: tuple[int, ...]) -> np.ndarray:
    return np.array(np.asarray(x).transpose(axes), order="C")  # they may go on


# Hyperparameters: those of a leaf by our names, or those of a group by torch's.

Numbers = dict[str, Any]
OfLeaves = Sequence[Numbers | None] | None  # None for a frozen leaf; as a whole, if they are hidden
# Arguments that other frameworks lack; they behave like our defaults.
_ONLY_OURS = {x: getattr(Hyperparameters(0.0), x) for x in ("eps_root", "bias_correction", *FLAGS)}
# A schedule uses float32 arithmetic here and float64 there: some ten operations of half an ulp.
_SCHEDULE_TOLERANCE = 10 * 2.0**-24


def numbers_of_leaves(groups: Groups, like: Any, step: int) -> list[Numbers | None]:
    """Returns the hyperparameters of each leaf in the step after ``step``; None for frozen ones."""

    def number(x: Any) -> Any:
        x = x(step) if callable(x) else x
        if isinstance(x, jax.core.Tracer):
            return None  # it is unknown in a program
        return x if isinstance(x, bool) else float(x)

    rows: list[Numbers] = []
    for hyper in groups.used:
        decayed = {name: number(x) for name, x in vars(hyper).items()}
        rows += [decayed, decayed | {"weight_decay": 0.0}]
    return [None if row is None else rows[row] for row in groups.row_of_leaves(like)]


def compare(theirs: NamedState, numbers: OfLeaves, ours: list[Place], differences: str) -> None:
    """Raises HyperparameterError, or warns, if hyperparameters differ."""
    if differences not in ("raise", "warn"):
        raise HyperparameterError(
            f'differences: unknown: got {differences!r}, expected "raise" or "warn". Change it.'
        )
    if numbers is None:
        warn_caller(
            "tx: its hyperparameters cannot be seen from outside, as of a chain, and were not "
            "compared with those of the other optimizer. Compare them with "
            f"{[shown(_our_arguments(group.settings)) for group in theirs.groups]}."
        )
        return
    settings = {name: group.settings for group in theirs.groups for name in group.names}
    told = set()
    for place, mine in zip(ours, numbers, strict=True):
        for key, got, expected in _differences(mine or {}, settings.get(place.name, {})):
            error = HyperparameterError(
                f"tx, {key} for {place.where}: differs from what the other "
                f"optimizer has for {place.name!r}: got {got}, expected {expected}. "
                'Make tx with the hyperparameters in NamedState.groups, or pass differences="warn".'
            )
            if differences == "raise":
                raise error
            if (key, got, expected) not in told:
                warn_caller(str(error))
            told.add((key, got, expected))


def _differences(mine: Numbers, settings: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yields the hyperparameters that differ, with our and their values."""
    no_decay = {"weight_decay": 0.0, "l2": 0.0} if "weight_decay" in settings else {}
    theirs = _ONLY_OURS | no_decay | _our_arguments(settings)
    for key, value in mine.items():
        if key in theirs and value is not None:
            a, b = np.float32(value), np.float32(theirs[key])
            is_scheduled = key in ("learning_rate", "weight_decay")
            if not abs(a - b) <= (_SCHEDULE_TOLERANCE * abs(b) if is_scheduled else 0):
                yield key, value, theirs[key]


def joined_groups(settings: Mapping[str, Mapping[str, Any]]) -> tuple[Group, ...]:
    """Returns groups of parameters with equal settings, ordered by their first parameters."""
    different: list[Mapping[str, Any]] = []
    for given in settings.values():
        if given not in different:
            different.append(given)
    return tuple(Group(tuple(k for k, x in settings.items() if x == y), y) for y in different)


def groups_of(numbers: OfLeaves, ours: list[Place], names: Iterable[str]) -> tuple[Group, ...]:
    """Returns groups of equal hyperparameters; one without settings if these are hidden."""
    if numbers is None:
        return (Group(tuple(names), {}),)
    of_name = {place.name: mine for place, mine in zip(ours, numbers, strict=True)}
    return joined_groups({k: _torch_settings(k, mine) for k in names if (mine := of_name[k])})


def _our_arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    given = dict(settings)
    if "betas" in given:
        given |= zip(("b1", "b2"), given["betas"], strict=True)
    decay = "weight_decay" if given.get("decoupled_weight_decay", True) else "l2"
    names = {"lr": "learning_rate", "b1": "b1", "b2": "b2", "eps": "eps", "weight_decay": decay}
    found = {ours: given[key] for key, ours in names.items() if key in given}
    return found if given.get("bias_correction", True) else found | {"bias_correction": False}


def _torch_settings(name: str, mine: Numbers) -> dict[str, Any]:
    lacking = ("eps_root", *FLAGS, *(["l2"] if mine["weight_decay"] else []))
    for key in lacking:
        if mine[key]:
            raise HyperparameterError(
                f"{key} for {name!r}: Adam of torch's layout has no such hyperparameter, "
                f"or not beside weight_decay: got {mine[key]}, expected 0. "
                "Pass groups with the settings that it is to go on with."
            )
    return {
        "lr": mine["learning_rate"],
        "betas": (mine["b1"], mine["b2"]),
        "eps": mine["eps"],
        "weight_decay": mine["weight_decay"] or mine["l2"],
        "decoupled_weight_decay": not mine["l2"],
        "bias_correction": mine["bias_correction"],
    }
