"""The state of a distributed optimizer, the digest of its layout, and its place in a chain."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jdistadam.core import trees
from jdistadam.core.guards import LossScaleState, NormGuardState
from jdistadam.core.trees import Grads, OptState, Params
from jdistadam.distributed.layout import Bucket, Layout, Leaf
from jdistadam.distributed.schedule import Schedule
from jdistadam.errors import TreeError

# A canonical text of everything that decides the position and meaning of a flat state's elements.
#
# Flat arrays of two layouts can have the same size: without an identifier, a state that is restored
# into another layout gives every leaf another leaf's moments. So a state carries a digest of this
# text as an array of 16 bytes, which survives checkpoints, pickle and tree maps; every function
# that takes a state compares it with the digest of the expected layout. Our checkpoints store the
# text.
#
# The text is JSON, one line for each leaf and each bucket, always written the same way: equal
# layouts have equal bytes in every process, on every platform and in every version of Python. It
# contains no hyperparameter, no name of a strategy or of a mesh axis, and nothing that merely
# follows from the layout::
#
#     {"jdistadam_layout":1,"flat_size":384,"main_size":384,"num_shards":4,"tensor_parts":[]
#     ,"leaves":[
#     {"dtype":"float32","path":"['b']","shape":[3]},
#     {"dtype":"float32","path":"['w']","shape":[512,64]}]
#     ,"buckets":[
#     {"dim":0,"leaves":[1],"main":"float32","offset":0,"padding":0,"shard_shape":[128,64]},
#     {"dim":null,"leaves":[0],"main":"float32","offset":8192,"padding":1,"shard_shape":[1]}]
#     }

VERSION = 1
"""Increases whenever the same text would mean another position or meaning of an element."""

DIGEST_SIZE = 16  # bytes
_MAX_SHOWN = 3  # differences in one message
_FOLLOW = ("flat_size", "main_size", "leaves", "buckets")  # from leaves and the rest of a text
_TEXTS: dict[bytes, str] = {}  # of this process, by digest: errors say how two layouts differ


@functools.lru_cache(maxsize=16)
def text_of(layout: Layout, tensor_parts: tuple[int, ...], main_kind: str) -> str:
    """Returns the text of a layout.

    Args:
      layout: The layout of the parts of leaves that one device holds.
      tensor_parts: Sizes of the mesh axes, other than data axes, over which leaves are cut.
      main_kind: "float32" or "remainder16": how a bucket's main parameters are kept, if any.

    Example:
      >>> from jdistadam.distributed.layout import make_layout
      >>> layout = make_layout([Leaf("params['b']", (3,), "float32", 0)], 4, 1 << 20)
      >>> print(text_of(layout, (), "float32"))
      {"jdistadam_layout":1,"flat_size":128,"main_size":128,"num_shards":4,"tensor_parts":[]
      ,"leaves":[
      {"dtype":"float32","path":"['b']","shape":[3]}]
      ,"buckets":[
      {"dim":null,"leaves":[0],"main":"float32","offset":0,"padding":1,"shard_shape":[1]}]
      }
    """
    header = {
        "flat_size": layout.flat_size,
        "main_size": layout.main_size,
        "num_shards": layout.num_shards,
        "tensor_parts": list(tensor_parts),
    }
    leaves = [_leaf_entry(leaf) for leaf in layout.leaves]
    buckets = [_bucket_entry(bucket, main_kind) for bucket in layout.buckets]
    text = f'{{"jdistadam_layout":{VERSION},{_json(header)[1:-1]}\n'
    text += f',"leaves":[\n{_lines(leaves)}]\n,"buckets":[\n{_lines(buckets)}]\n}}'
    return text


def digest_of(text: str) -> np.ndarray:
    """Returns the first bytes of the SHA-256 of a layout's text, shape (16,), uint8."""
    digest = hashlib.sha256(text.encode("ascii")).digest()[:DIGEST_SIZE]
    _TEXTS[digest] = text
    return np.frombuffer(digest, np.uint8)


def differs(got: jax.Array, expected: np.ndarray) -> jax.Array:
    """Whether two digests differ, shape (), bool, in a program.

    Word by word, not as a reduction, for which XLA for GPUs would launch a separate kernel.
    """
    words = jax.lax.bitcast_convert_type(got.reshape(-1, 4), jnp.uint32)
    pairs = zip(words, expected.view(np.uint32), strict=True)
    return functools.reduce(jnp.logical_or, (x != word for x, word in pairs))


def known_text(digest: Any) -> str | None:
    """Returns the text of a digest, if this process made it."""
    return _TEXTS.get(np.asarray(digest).tobytes())


def _leaf_entry(leaf: Leaf) -> dict[str, Any]:
    """The identity of a leaf. Its path is relative to the params."""
    entry: dict[str, Any] = {
        "path": leaf.path.removeprefix("params"),
        "shape": list(leaf.shape),
        "dtype": jnp.dtype(leaf.dtype).name,
    }
    if leaf.group is None:
        entry["frozen"] = True
    if leaf.is_coded:
        entry["coded"] = True
    if any(leaf.cuts):
        entry["cuts"] = [list(axes) for axes in leaf.cuts]
    return entry


def _bucket_entry(bucket: Bucket, main_kind: str) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "leaves": list(bucket.leaves),
        "dim": bucket.dim,
        "shard_shape": list(bucket.shard_shape),
        "padding": bucket.padding,
        "offset": bucket.offset,
        "main": main_kind if bucket.has_main else None,
    }
    if bucket.leaf_alignment > 1:
        entry["unit"] = bucket.leaf_alignment
    return entry


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def _lines(entries: Sequence[Any]) -> str:
    return ",\n".join(map(_json, entries))


def sizes_of(text: str) -> str:
    """Describes the sizes of a layout's flat arrays.

    Example:
      >>> from jdistadam.distributed.layout import make_layout
      >>> layout = make_layout([Leaf("params['b']", (3,), "float32", 0)], 4, 1 << 20)
      >>> sizes_of(text_of(layout, (), "float32"))
      'mu of 512 elements'
    """
    header = json.loads(text)
    parts = header["num_shards"] * math.prod(header["tensor_parts"])
    return f"mu of {parts * header['flat_size']} elements"


def differences(got: str, expected: str) -> str | None:
    """Describes how the texts of two layouts differ; None if they are equal.

    Example:
      >>> from jdistadam.distributed.layout import make_layout
      >>> leaves = [Leaf("params['b']", (3,), "float32", 0)]
      >>> four, two = (make_layout(leaves, n, 1 << 20) for n in (4, 2))
      >>> differences(text_of(four, (), "float32"), text_of(two, (), "float32"))
      "num_shards 4 instead of 2; bucket of ['b']: shard_shape [1] instead of [2]"
    """
    if got == expected:
        return None
    found = _differences(json.loads(got), json.loads(expected))
    more = f"; and {len(found) - _MAX_SHOWN} more" if len(found) > _MAX_SHOWN else ""
    return "; ".join(found[:_MAX_SHOWN]) + more


def changed_dtypes(got: str, expected: str) -> list[tuple[str, str, str]]:
    """Returns path and both dtypes of leaves that differ, if dtypes alone made the layouts differ.

    Example:
      >>> from jdistadam.distributed.layout import make_layout
      >>> of = lambda dtype: make_layout([Leaf("params['b']", (3,), dtype, 0)], 2, 1 << 20)
      >>> changed_dtypes(*(text_of(of(x), (), "float32") for x in ("bfloat16", "float32")))
      [("['b']", 'bfloat16', 'float32')]
    """
    texts = [json.loads(text) for text in (got, expected)]
    dtypes = [{leaf["path"]: leaf.pop("dtype") for leaf in text["leaves"]} for text in texts]
    kept = [{k: v for k, v in text.items() if k not in _FOLLOW} for text in texts]
    if kept[0] != kept[1] or texts[0]["leaves"] != texts[1]["leaves"]:
        return []
    mine, like = dtypes
    return [(path, mine[path], x) for path, x in like.items() if mine[path] != x]


def _differences(got: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    headers = [{k: v for k, v in text.items() if k not in _FOLLOW} for text in (got, expected)]
    found = _changed(*headers)
    leaves, like = ({x["path"]: x for x in text["leaves"]} for text in (got, expected))
    found += [f"leaf {path} is not expected" for path in leaves if path not in like]
    found += [f"leaf {path} is missing" for path in like if path not in leaves]
    for path in like:
        if path in leaves and (changes := _changed(leaves[path], like[path])):
            found.append(f"leaf {path}: {', '.join(changes)}")
    if leaves.keys() == like.keys() and list(leaves) != list(like):
        found.append("the leaves are in another order")
    mine, theirs = (_by_leaf(text) for text in (got, expected))
    for path in theirs:
        if path in mine and mine[path] != theirs[path]:
            found.append(f"bucket of {path}: {', '.join(_changed(mine[path], theirs[path]))}")
    sizes = [{k: text[k] for k in ("flat_size", "main_size")} for text in (got, expected)]
    return found or _changed(*sizes)


def _by_leaf(text: dict[str, Any]) -> dict[str, Any]:
    """The bucket of each leaf, with its leaves by path."""
    paths = [leaf["path"] for leaf in text["leaves"]]
    named = [
        bucket | {"leaves": [paths[i] for i in bucket["leaves"]]} for bucket in text["buckets"]
    ]
    return {path: bucket for bucket in named for path in bucket["leaves"]}


def _changed(got: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """The entries of two dictionaries that differ."""
    return [
        f"{key} {_short(got.get(key))} instead of {_short(expected.get(key))}"
        for key in sorted(got.keys() | expected.keys())
        if got.get(key) != expected.get(key)
    ]


def _short(value: Any) -> str:
    if isinstance(value, list) and len(value) > _MAX_SHOWN:
        return f"[{', '.join(map(str, value[:_MAX_SHOWN]))}, ...]"
    return "none" if value is None else str(value)


class DistributedState(NamedTuple):
    """The state of a distributed optimizer: a few flat arrays, for any number of leaves.

    Attributes:
      count: Shape (), int32: steps taken, excluding skipped ones; replicated.
      main_params: Shape (devices * main_size,), float32, sharded: the main parameters. uint16
        with main_params_dtype "remainder16": their low halves. None if no parameter has one.
        ``devices``: how many hold different parts, over the axes of shards and of a model.
      mu: Shape (devices * flat_size,), mu_dtype of the optimizer, sharded; FlatCodes for "block8"
        and "block16".
      nu: The same shape, nu_dtype of the optimizer, sharded; likewise.
      grad_norm: Shape (), float32: global norm of the last mean gradient, before clipping. NaN if
        the state was of another layout.
      layout_digest: Shape (16,), uint8, replicated: a digest of the layout, which identifies the
        leaf of each element of the flat arrays. Every function that takes a state compares it;
        keep it with the arrays.
      scaling: The loss scale and the number of skipped steps; None without loss_scale.
      key: Shape (2,), uint32, replicated: the constant seed of random bits; None without
        stochastic rounding.
      ema: Shape (devices * flat_size,), float32, sharded: the moving average of the exact
        parameters, which ``ema_params`` returns; None without ema_decay.
      guard: The running mean of the gradient norm, and its skipped steps; None without norm_guard.
    """

    count: jax.Array  # type: ignore[assignment]
    main_params: jax.Array | None
    mu: Any
    nu: Any
    grad_norm: jax.Array
    layout_digest: jax.Array
    scaling: LossScaleState | None = None
    key: jax.Array | None = None
    ema: jax.Array | None = None
    guard: NormGuardState | None = None


class StepResult(NamedTuple):
    """The result of a step on one device.

    Attributes:
      params: The new parameters.
      opt_state: The new state.
      is_skipped: Shape (), bool: whether the step was skipped; the same on all devices. None if
        that cannot happen.
      is_other_layout: Shape (), bool: whether the state has another layout. New parameters,
        moments and norm are then NaN, and the state keeps the digest of the other layout.
      learning_rate: Shape (), float32: of this step, without those of groups.
      norms: The norms by name, shape (), float32; the same on all devices. None without
        ``norms``.
    """

    params: Params
    opt_state: OptState
    is_skipped: jax.Array | None
    is_other_layout: jax.Array
    learning_rate: jax.Array
    norms: dict[str, jax.Array] | None = None


class Functions(Protocol):
    """The functions of a distributed optimizer in ``jax.shard_map``, for params of a schedule."""

    def init(self, schedule: Schedule, params: Params) -> Any:
        """Makes the state."""

    def local_step(
        self, schedule: Schedule, grads: Grads, state: Any, params: Params, **extra_args: Any
    ) -> StepResult:
        """Takes a step with plain params, in the form that a device holds."""

    def norm(self, schedule: Schedule, grads: Grads, state: Any) -> jax.Array:
        """The global norm of the mean gradient."""


def find_state(opt_state: OptState) -> DistributedState:
    """Returns the DistributedState in a state that may be a chain's."""
    found = trees.parts_of(opt_state, DistributedState)
    if len(found) != 1:
        raise TreeError(
            "opt_state: not the state of a distributed optimizer: "
            f"got {type(opt_state).__name__} with {len(found)} DistributedState in it, "
            "expected a DistributedState, or the state of a chain with one. Call "
            "step(grads, opt_state, params) with what init, step or TrainState.create returned; "
            "restore a checkpoint into TrainState.shapes(params, tx), which gives it these types."
        )
    return found[0]


def check_own_state(state: Any) -> None:
    """Raises TreeError unless ``state`` is itself a DistributedState."""
    if not is_distributed_state(state):
        raise TreeError(
            f"opt_state: not the state of this optimizer: got {type(state).__name__}, expected "
            "DistributedState. Call step(grads, opt_state, params) with what init or step returned."
        )


def map_state(function: Callable[[DistributedState], Any], opt_state: OptState) -> Any:
    """Replaces the DistributedState in a state that may be a chain's."""
    return jax.tree.map(
        lambda part: function(part) if is_distributed_state(part) else part,
        opt_state,
        is_leaf=is_distributed_state,
    )


def scale_loss(loss: jax.Array, opt_state: OptState) -> jax.Array:
    """Returns the loss times the loss scale of the state, in float32, for differentiation.

    ``train_step`` does this itself. In a custom training loop::

        local = jda.local_params(params, tx)
        grads = jax.grad(lambda p: jda.scale_loss(loss(p, batch), opt_state))(local)

    Args:
      loss: The loss, shape ().
      opt_state: The state of a distributed optimizer, or of a ``chain`` with one. Without a
        ``loss_scale`` the loss is returned unchanged.

    Returns:
      The scaled loss, shape (), float32; without a ``loss_scale``, the loss as it is.

    Raises:
      TreeError: ``opt_state`` has no state of a distributed optimizer.
      ShapeError, DtypeError: The loss is not one real number.
    """
    scaling = find_state(opt_state).scaling
    trees.check_scalar("loss", loss)
    loss = jnp.asarray(loss)
    return loss if scaling is None else loss.astype(jnp.float32) * scaling.loss_scale


def is_distributed_state(x: Any) -> bool:
    """Whether ``x`` is a DistributedState."""
    return isinstance(x, DistributedState)
