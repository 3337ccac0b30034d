"""The text of a layout and its digest, by which a state knows where its elements belong."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdistadam.distributed.layout import Bucket, Layout, Leaf

# A canonical text of everything that decides the position and meaning of a flat state's elements.
#
# Flat arrays of two layouts can have the same size. Without an identifier, a state that is restored
# into another layout gives every leaf another leaf's moments. A state therefore carries a digest of
# this text as an array of 16 bytes, which survives checkpoints, pickle and tree maps. Every
# function that takes a state compares it with the digest of the expected layout. Our checkpoints
# store the text.
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
def text_of(
    layout: Layout,
    tensor_parts: tuple[int, ...],
    main_kind: str,
    shard_parts: tuple[int, ...] = (),
) -> str:
    """Returns the text of a layout.

    Args:
      layout: The layout of the shards of leaves that tensor axes cut.
      tensor_parts: Sizes of the mesh axes, other than data axes, over which leaves are cut.
      main_kind: "float32" or "remainder16": how a bucket's main parameters are kept, if any.
      shard_parts: Sizes of data axes, which may cut leaves after those of ``tensor_parts``.

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
    header: dict[str, Any] = {
        "flat_size": layout.flat_size,
        "main_size": layout.main_size,
        "num_shards": layout.num_shards,
        "tensor_parts": list(tensor_parts),
    }
    if any(leaf.split > 1 for leaf in layout.leaves):  # otherwise no leaf refers to them
        header["shard_parts"] = list(shard_parts)
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


def known_text(digest: bytes) -> str | None:
    """Returns the text of a digest, if this process made it."""
    return _TEXTS.get(digest)


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
    shards = header["num_shards"] * math.prod(header["tensor_parts"])
    return f"mu of {shards * header['flat_size']} elements"


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
    lines = _differences(json.loads(got), json.loads(expected))
    more = f"; and {len(lines) - _MAX_SHOWN} more" if len(lines) > _MAX_SHOWN else ""
    return "; ".join(lines[:_MAX_SHOWN]) + more


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
    lines = _changed(*headers)
    leaves, like = ({x["path"]: x for x in text["leaves"]} for text in (got, expected))
    lines += [f"leaf {path} is not expected" for path in leaves if path not in like]
    lines += [f"leaf {path} is missing" for path in like if path not in leaves]
    for path in like:
        if path in leaves and (changes := _changed(leaves[path], like[path])):
            lines.append(f"leaf {path}: {', '.join(changes)}")
    if leaves.keys() == like.keys() and list(leaves) != list(like):
        lines.append("the leaves are in another order")
    mine, theirs = (_by_leaf(text) for text in (got, expected))
    for path in theirs:
        if path in mine and mine[path] != theirs[path]:
            lines.append(f"bucket of {path}: {', '.join(_changed(mine[path], theirs[path]))}")
    sizes = [{k: text[k] for k in ("flat_size", "main_size")} for text in (got, expected)]
    return lines or _changed(*sizes)


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
