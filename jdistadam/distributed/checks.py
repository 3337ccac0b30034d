"""Argument and state checks of ``distributed`` and its step, and their messages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jdistadam.core import collectives, memory, trees
from jdistadam.core.arguments import check_flag, is_real, out_of_range
from jdistadam.core.codecs import BLOCK_CODECS
from jdistadam.core.guards import GUARDS
from jdistadam.core.trees import Grads, Params
from jdistadam.distributed.config import DistributedConfig
from jdistadam.distributed.flat_arrays import Field, FlatCodes, types_of_arrays
from jdistadam.distributed.layout import Layout
from jdistadam.distributed.layout_text import (
    DIGEST_SIZE,
    changed_dtypes,
    differences,
    digest_of,
    known_text,
    sizes_of,
)
from jdistadam.distributed.mesh_axes import DataParallel
from jdistadam.distributed.schedule import Schedule
from jdistadam.distributed.shard import is_shard, leaves_of, plain
from jdistadam.errors import (
    DtypeError,
    HyperparameterError,
    LayoutError,
    MeshError,
    PolicyError,
    ShapeError,
    TreeError,
)

CONVERSION = (
    "params, adam, extra = to_optax_state(state, old_tx), then "
    "from_optax_state(params, adam, tx, extra)"
)


def check_arguments(
    max_grad_norm: Any,
    bucket_bytes: Any,
    average_grads: Any,
    early_updates: Any,
    reshard_after_backward: Any,
) -> None:
    """Raises HyperparameterError unless types and ranges are right."""
    if not (reshard_after_backward is None or callable(reshard_after_backward)):
        raise HyperparameterError(
            f"reshard_after_backward: not a function: got {reshard_after_backward!r}, expected a "
            "function of the path of a leaf. "
            'Pass for example lambda path: "embed" not in path.'
        )
    if early_updates is not None:
        check_flag("early_updates", early_updates)
    check_flag("average_grads", average_grads)
    is_whole = is_real(bucket_bytes) and 0 < bucket_bytes < math.inf
    if not (is_whole and bucket_bytes == int(bucket_bytes)):
        raise out_of_range("bucket_bytes", bucket_bytes, "a whole number of bytes > 0")
    # An array is a number that inject_hyperparams put into the state: its value is unknown here.
    if max_grad_norm is not None and not isinstance(max_grad_norm, jax.Array):
        if not (is_real(max_grad_norm) and 0 < max_grad_norm < math.inf):
            raise out_of_range("max_grad_norm", max_grad_norm, "a finite Python number > 0")
    if np.shape(max_grad_norm) != ():
        raise HyperparameterError(
            f"max_grad_norm: not a single number: got shape {np.shape(max_grad_norm)}, "
            "expected a scalar. Change max_grad_norm."
        )


def check_ema_decay(value: Any) -> None:
    """Raises HyperparameterError unless ``ema_decay`` is None or a number between 0 and 1."""
    if value is not None and not (is_real(value) and 0 < value < 1 and np.float32(1 - value) > 0):
        raise out_of_range("ema_decay", value, "a Python number above 0 and below 1")


def parse_state_memory(value: Any, fields: Mapping[str, Field]) -> tuple[str, ...]:
    """The flat arrays that ``state_memory`` puts on the host, in the order of ``FLAT_ARRAYS``.

    Args:
      value: The argument.
      fields: The flat arrays of the state by name.

    Raises:
      PolicyError: It names an array or a memory that does not exist.
    """
    names = list(fields)
    memories = " or ".join(map(repr, memory.MEMORIES))
    memory_of = dict(value) if isinstance(value, Mapping) else dict.fromkeys(names, value)
    for name, kind in memory_of.items():
        if name not in names:
            raise PolicyError(
                f"state_memory: an array that this state does not have: got {name!r}, expected "
                f"{', '.join(map(repr, names))}. Use one of these names; a state has "
                '"main_params" only if it keeps them, and "ema" with ema_decay.'
            )
        if kind not in memory.MEMORIES:
            what = f"state_memory[{name!r}]" if isinstance(value, Mapping) else "state_memory"
            raise PolicyError(
                f"{what}: unknown: got {kind!r}, expected {memories}, or a dict. "
                'Pass for example {"mu": "pinned_host", "nu": "pinned_host"}.'
            )
    on_host = tuple(name for name in names if memory_of.get(name) == memory.HOST)
    apart = [name for name, x in fields.items() if x.begins == "params" and name not in on_host]
    if apart and "main_params" in on_host:
        raise PolicyError(
            "state_memory: the average is made from main parameters, and cannot be on the device "
            f'without them: got {value!r}, expected "{apart[0]}" in host memory too. '
            f'Add "{apart[0]}": "pinned_host", or leave main_params on the device.'
        )
    return on_host


def check_inside(parallel: DataParallel, function: str, *, over_data_only: bool = False) -> None:
    """Raises MeshError unless called inside a shard_map over all axes, or over the data axes."""
    axes = parallel.shard_axes + parallel.replica_axes
    axes += () if over_data_only else parallel.tensor_axes
    if missing := collectives.unbound(axes):
        raise MeshError(
            f"{function}: called outside of jax.shard_map: "
            f"got no manual axis {missing[0]!r}, expected axes {', '.join(map(repr, axes))}. "
            "Use train_step or eval_step, or a jax.shard_map over the whole mesh."
        )


def check_grads(
    config: DistributedConfig, schedule: Schedule, grads: Grads, *, marker: Any, like_name: str
) -> None:
    """Raises unless gradients fit the params, and are local or, for a ``Shard``, summed.

    Args:
      config: The configuration.
      schedule: The schedule of the params.
      grads: The gradients.
      marker: A value that varies between devices, if types record that.
      like_name: The name of the params in messages.
    """
    layout, nodes, grads = schedule.layout, leaves_of(grads), plain(grads)
    trees.check_same_structure(grads, schedule.whole(), name="grads", like_name=like_name)
    like = layout.shapes()
    for bucket in layout.buckets:
        if not bucket.is_packed and is_shard(nodes[bucket.leaf]):
            like[bucket.leaf] = jax.ShapeDtypeStruct(bucket.inner_shape, bucket.dtype)
    expected = schedule.treedef.unflatten(like)
    trees.check_same_shapes(grads, expected, name="grads", like_name=like_name)
    trees.check_dtypes(grads, name="grads", action="Cast the gradients.")
    known = collectives.varying_axes(marker)
    axes = [axis for axis in config.parallel.data_axes if axis in known]
    if not axes:
        return  # shard_map runs with check_vma=False: types say nothing about reductions
    for path, grad in trees.named_leaves(grads, "grads"):
        missing = [axis for axis in axes if axis not in collectives.varying_axes(grad)]
        if missing and np.size(grad):  # compat.shard_map makes zero-size ones anew
            raise MeshError(
                f"{path}: already reduced over the mesh: "
                f"got the same value on all devices of axis {missing[0]!r}, expected this "
                "device's own gradient. "
                "Differentiate with respect to local_params(params, tx)."
            )


def check_held(schedule: Schedule, params: Params, *, may_be_whole: bool = False) -> None:
    """Raises unless params match a schedule in the form that a device holds.

    Args:
      schedule: The schedule of the params.
      params: Tree of arrays or shapes.
      may_be_whole: Whether a device may also hold all of them unsharded.
    """
    whole = schedule.whole()
    trees.check_same_structure(params, whole, name="params", like_name="the params of bind")
    held: list[Any] = jax.tree.leaves(whole)
    for bucket in schedule.layout.buckets:
        if bucket.is_sharded_param:
            held[bucket.leaf] = jax.ShapeDtypeStruct(bucket.inner_shape, bucket.dtype)
    leaves = zip(schedule.layout.leaves, jax.tree.leaves(params), held, strict=True)
    for leaf, x, like in leaves:
        is_cut = like.shape != leaf.shape
        if x.shape != like.shape and not (is_cut and may_be_whole and x.shape == leaf.shape):
            what = "not placed as sharding_strategy says" if is_cut else "shape differs from bind's"
            action = (
                "Use tx.param_specs(params) in the in_specs of shard_map."
                if is_cut
                else "Pass the params of which bind got arrays or shapes."
            )
            raise MeshError(
                f"{leaf.path}: {what}: got {x.shape}, expected {like.shape} on each device. "
                f"{action}"
            )
        if x.dtype != like.dtype:
            raise DtypeError(
                f"{leaf.path}: dtype differs from bind's: got {x.dtype}, expected {like.dtype}. "
                "Bind to params of this dtype, or cast them."
            )


def check_equal_params(
    parallel: DataParallel, schedule: Schedule, params: Params, on_a_device: Any
) -> None:
    """Raises MeshError if types say that params differ between devices.

    A device keeps the main parameters of its shard alone, and a step replaces all others.

    Args:
      parallel: The data axes.
      schedule: The schedule of the params.
      params: Tree of arrays in ``jax.shard_map``, which a device holds whole or as shards.
      on_a_device: Their shapes on one device.
    """
    shards = {b.leaf: b.inner_shape for b in schedule.layout.buckets if b.is_sharded_param}
    known = zip(jax.tree.leaves(params), jax.tree.leaves(on_a_device), strict=True)
    for i, (x, held) in enumerate(known):
        is_cut = held.shape == shards.get(i)
        mine = parallel.without(schedule.layout.leaves[i].tensor_axes)
        axes = mine.replica_axes if is_cut else mine.data_axes
        varying = [axis for axis in axes if axis in collectives.varying_axes(x)]
        if varying and x.size:  # compat.shard_map makes zero-size ones anew
            raise MeshError(
                f"{schedule.layout.leaves[i].path}: may differ between devices, and a step would "
                f"make it equal: got an array that varies over data axis {varying[0]!r}, expected "
                "the same on all devices. Pass params as in_specs=P() gives them, before "
                "local_params; name the axis over which experts differ in param_specs: "
                "docs/experts.md."
            )


def check_step(config: DistributedConfig, layout: Layout, state: Any) -> None:
    """Raises unless a state has the form that a device holds."""
    check_digest_type(state.layout_digest)
    check_options(config, state)
    _check_flat_arrays(config, layout, state)


def check_state(
    config: DistributedConfig,
    state: Any,
    layout: Layout,
    *,
    of_params: bool = False,
    digest: bytes | None = None,
) -> bytes:
    """Raises unless a DistributedState has values, the optimizer's fields and its layout.

    The last two arguments and what is returned are those of ``check_layout_of``.
    """
    check_alive(state)
    check_options(config, state)  # what this optimizer does not know would be lost
    text = config.layout_text(layout)
    found = check_layout_of(state, text, of_params=of_params, digest=digest)
    needed = [name for name, x in _types_of(config, layout).items() if x is not None]
    if missing := [name for name in (*needed, "count") if getattr(state, name) is None]:
        raise TreeError(
            f"opt_state.{missing[0]}: missing: got None, expected its array. "
            "Keep all fields of the state, or make one with init(params)."
        )
    return found


def check_alive(state: Any, train_state: Any = None) -> None:
    """Raises MeshError for a donated DistributedState, TreeError for shapes.

    If given, also checks the other arrays of the ``train_state`` around it.
    """
    if isinstance(state.layout_digest, jax.ShapeDtypeStruct):
        raise TreeError(
            "state: shapes, not arrays: got what TrainState.shapes or jax.eval_shape returned, "
            "expected a state with values. Restore it: jda.restore(folder, shapes, tx); "
            "or make one with TrainState.create(params, tx)."
        )
    looked_at = state.mu if train_state is None else train_state
    leaves = jax.tree.leaves(looked_at)
    if (first := next((i for i, x in enumerate(leaves) if _is_deleted(x)), None)) is not None:
        gone = trees.paths(looked_at, "mu" if train_state is None else "state")[first]
        raise MeshError(
            "state: its arrays were donated to an earlier step, and are gone: got a state whose "
            f"{gone} was passed to a step before, expected the state that this step returned. "
            "Write state, metrics = step(state, batch); copy a state that you keep."
        )


def _is_deleted(x: Any) -> bool:
    """Whether ``x`` is an array that was donated; False for a tracer."""
    return trees.is_concrete(x) and bool(x.is_deleted())


def check_placement(config: DistributedConfig, state: Any) -> None:
    """Raises MeshError if a state is sharded over other devices, or in another order.

    JAX would move the shards without an error, and each device would use those of another.
    """
    expected = NamedSharding(config.mesh, config.parallel.state_spec)
    got = getattr(next(iter(jax.tree.leaves(state.mu)), None), "sharding", None)
    if not isinstance(got, NamedSharding) or got.is_fully_replicated:
        return  # no shards to confuse
    got = memory.device_sharding(got)
    if got == expected or got.is_equivalent_to(expected, 1):
        return
    texts = [f"{x.spec} on {dict(x.mesh.shape)}" for x in (got, expected)]
    if texts[0] == texts[1]:
        pairs = zip(got.mesh.devices.flat, expected.mesh.devices.flat, strict=True)
        for i, differing in enumerate(pairs):
            if differing[0] != differing[1]:
                texts = [f"{texts[0]} with {device} at place {i}" for device in differing]
                break
    raise MeshError(
        "opt_state.mu: sharded over another mesh, or in another order: "
        f"got {texts[0]}, expected {texts[1]}. Convert it: {CONVERSION}."
    )


_DIGEST = "opt_state.layout_digest"


def check_digest_type(got: Any) -> None:
    """Raises LayoutError unless the digest of a layout has the right dtype and length."""
    if got is None or not hasattr(got, "dtype"):
        raise LayoutError(
            f"{_DIGEST}: missing: nothing says where the elements of the flat arrays belong: "
            f"got {None if got is None else type(got).__name__}, expected uint8, shape "
            f"({DIGEST_SIZE},). Keep this leaf with the state, or make a state with init(params)."
        )
    if got.dtype != np.uint8 or np.shape(got) != (DIGEST_SIZE,):
        raise LayoutError(
            f"{_DIGEST}: no longer the digest of a layout: it was averaged, cast or sliced: "
            f"got {got.dtype}, shape {np.shape(got)}, expected uint8, shape ({DIGEST_SIZE},). "
            "Leave this leaf out of arithmetic on states: take it from one of them."
        )


def check_layout_of(
    state: Any,
    expected: str,
    *,
    of_params: bool = False,
    digest: bytes | None = None,
) -> bytes:
    """Raises LayoutError if a state has another layout; reads its digest on the host.

    Args:
      state: The DistributedState; for a traced one only types are checked.
      expected: The text of the expected layout.
      of_params: Whether the params are wrong if they do not fit, instead of the state.
      digest: The bytes of its digest, if known: then the array is not read.

    Returns:
      The bytes of the digest of the expected layout.
    """
    check_digest_type(state.layout_digest)
    wanted = digest_of(expected).tobytes()
    if isinstance(state.layout_digest, jax.core.Tracer):
        return wanted
    got = np.asarray(state.layout_digest).tobytes() if digest is None else digest
    if got == wanted:
        return wanted
    text = known_text(got)
    if text is not None:
        pair = (expected, text) if of_params else (text, expected)
        words = differences(*pair), "the layout of this optimizer for these params"
    else:
        size = np.size(jax.tree.leaves(state.mu)[0])
        words = (
            f"digest {got.hex()}, mu of {size} elements",
            f"digest {wanted.hex()}, {sizes_of(expected)}",
        )
    if of_params:
        raise LayoutError(
            f"params: do not fit the state: got {words[0]}, "
            "expected the paths, shapes and dtypes of the params that the state was made for. "
            "Cast them, or make a new state with TrainState.create."
        )
    if text is not None and (changed := changed_dtypes(text, expected)):
        leaf, was, now = changed[0]
        raise LayoutError(
            f"params{leaf}: dtype differs from that for which the state was made: got {now}, "
            f"expected {was}. If params were put into the state, such as its average, cast them: "
            "jax.tree.map(lambda x, p: x.astype(p.dtype), new, state.params). To train in another "
            "dtype: to_optax_state with the optimizer that made the state, then from_optax_state."
        )
    what = "the state of another layout"
    if text is None:
        what += ", or its digest was changed by arithmetic"
    raise LayoutError(
        f"{_DIGEST}: {what}: got {words[0]}, expected {words[1]}. Convert it: "
        "to_optax_state with the optimizer that made it, from_optax_state with this one."
    )


def _check_flat_arrays(config: DistributedConfig, layout: Layout, state: Any) -> None:
    """Raises unless the flat arrays of a state have the layout's sizes and the policy's dtypes."""
    for name, wanted in _types_of(config, layout).items():
        _check_flat_array(name, getattr(state, name, "no such field"), wanted)


def _types_of(config: DistributedConfig, layout: Layout) -> dict[str, Any]:
    """Returns shapes and dtypes of one device's flat arrays, and of the key; None: it has none."""
    is_stochastic = config.algorithm.storage.is_stochastic
    key = jax.ShapeDtypeStruct((2,), jnp.uint32) if is_stochastic else None
    return types_of_arrays(config, layout) | {"key": key}


def _kind(x: Any) -> Any:
    """How a flat array, or its substitute, is stored, for comparisons and messages."""
    if isinstance(x, FlatCodes):
        known = {codec.dtype: codec.name for codec in BLOCK_CODECS}
        dtype: Any = getattr(x.codes, "dtype", None)
        return known.get(dtype, f"codes in {dtype}")
    return getattr(x, "dtype", type(x).__name__)


def _check_flat_array(name: str, got: Any, wanted: Any) -> None:
    are_codes = [isinstance(x, FlatCodes) for x in (got, wanted)]
    if are_codes[0] != are_codes[1] or (are_codes[0] and _kind(got) != _kind(wanted)):
        raise DtypeError(
            f"opt_state.{name}: is not stored as the optimizer expects: "
            f"got {_kind(got)}, expected {_kind(wanted)}. "
            "Make the state with init(params) of this optimizer, or convert it."
        )
    if isinstance(wanted, FlatCodes):
        for field in wanted._fields:
            _check_flat_array(f"{name}.{field}", getattr(got, field), getattr(wanted, field))
        return
    expected = None if wanted is None else wanted.shape
    have = None if got is None else getattr(got, "shape", type(got).__name__)
    if have != expected:
        raise ShapeError(
            f"opt_state.{name}: not the state of these params on this mesh: got {have}, expected "
            f"{expected} on each device. Make the state with init(params) of this optimizer."
        )
    if got is not None and got.dtype != wanted.dtype:
        action = "Make the state with init(params) of this optimizer."
        if name in ("main_params", "mu", "nu"):  # no option of the policy sets others
            action = f"Cast it, or set {name}_dtype of the optimizer."
        raise DtypeError(
            f"opt_state.{name}: dtype differs from the optimizer's: got {got.dtype}, "
            f"expected {wanted.dtype}. {action}"
        )


_OF_OPTIONS = (
    *((guard.field, guard.option, guard.kind.__name__) for guard in GUARDS),
    ("ema", "ema_decay", "an array"),
)


def check_options(config: DistributedConfig, state: Any) -> None:
    """Raises TreeError if the fields of a state do not match the optimizer's options."""
    for name, option, kind in _OF_OPTIONS:
        got, is_on = getattr(state, name), getattr(config, option) is not None
        if (got is not None) != is_on:
            raise TreeError(
                f"opt_state.{name}: does not fit {option}: got {type(got).__name__}, expected "
                f"{kind if is_on else None}. Convert it: {CONVERSION}. Or begin anew with "
                "init(params)."
            )
