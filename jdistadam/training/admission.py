"""The gate: all that is asked of a train state before a program runs, in one order.

==================================================================  =====  ====  ====  ======
Question                                                            train  eval  save  export
==================================================================  =====  ====  ====  ======
1.  Is it a train state?                                            x      x           x
2.  Did a step return these very arrays? Then skip 5 to 7, 9, 10.   x      x           7
3.  Is it traced? Then only types are asked, and 8 to 10 skipped.   x      x
4.  Has it values, which were given to no other step?               x      x     x     x
5.  Is it in the memory that ``state_memory`` says?                 x      x     x
6.  Is it on this mesh, with the fields and the scale of this tx?   x      x     f.    f.
7.  Has it the layout of this optimizer?                            x      x     x     x
8.  Do all processes call the same program?                         x      x
9.  Do its params follow its main parameters?                       x            x     o.
10. Does it hold an array twice, or share one with the batch?       x
==================================================================  =====  ====  ====  ======

"7": it skips this question alone; "f.": only the fields are asked, by a save also the parts of a
chain; "o.": only for optax and torch.

The answer is an ``Admitted``, or one error. Up to 7, the host answers alone: a process that raises
there is missing in 8, and the others name it. After 8, arrays in other places are copied, and
programs run that need all processes. A program that a traced state is part of compares the
digest while it runs. ``reload_main_params`` asks 1, 4, the fields of 6, and 7: its
params need not follow.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jdistadam.core import trees
from jdistadam.core.trees import OptState, Params
from jdistadam.distributed import host_memory
from jdistadam.distributed.checks import (
    check_alive,
    check_placement,
    check_state,
)
from jdistadam.distributed.global_arrays import apart, brought, type_of
from jdistadam.distributed.main_params import compared_with_main
from jdistadam.distributed.state import DistributedState, find_state, is_distributed_state
from jdistadam.distributed.transformation import DistributedTransformation, check_distributed
from jdistadam.errors import HyperparameterError, LayoutError
from jdistadam.training.agreement import agree, agree_again, texts_of
from jdistadam.training.checks import check_parts, check_structure
from jdistadam.training.placement import is_placed, shard_batch
from jdistadam.training.remembered import Leaves, Memory, remember_returned
from jdistadam.training.train_state import TrainState, check_train_state, places_of


class Admitted(NamedTuple):
    """What a program takes.

    Attributes:
      state: The state: its arrays are placed. If the program donates it, it can be donated, and its
        params are ``Leaves``.
      batch: The batch, on the mesh.
      digest: The digest of the layout; None: the state or the batch is traced, and was not changed.
    """

    state: TrainState
    batch: Any
    digest: bytes | None


class Program(Protocol):
    """What the gate must know of the program of a step."""

    __name__: str

    @property
    def tx(self) -> DistributedTransformation:
        """The optimizer."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Its arguments besides the loss and the optimizer, by name."""

    @property
    def batch_spec(self) -> P:
        """PartitionSpec of the batch."""


class Gate:
    """Admits states and batches to one program.

    Args:
      program: The program.
      given_spec: The argument ``batch_spec``; None: the default.
      lower: Lowers the program for a state and a batch, so that processes can compare it.
      donates: Whether the program donates the state.
    """

    def __init__(
        self, program: Program, given_spec: Any, lower: Callable[..., Any], *, donates: bool
    ) -> None:
        self._program, self._tx, self._given_spec = program, program.tx, given_spec
        self._lower, self._donates = lower, donates
        self._batch_sharding = NamedSharding(program.tx.config.mesh, program.batch_spec)
        self._has_agreed = False
        self._types: set[Any] = set()  # of arrays of states: a batch of another type shares none

    def admit(self, state: TrainState, batch: Any) -> Admitted:
        """Asks all questions of a state, and places the batch."""
        check_train_state(state)
        batch, memory, tx = self._placed(batch), Memory.of(state), self._tx
        is_ours = memory.has_params and memory.tx is tx
        is_traced = trees.is_traced(batch) or (not is_ours and trees.is_traced(state))
        sharded, digest, params = find_state(state.opt_state), memory.digest, memory.params
        check_alive(sharded, None if is_ours else state)
        if not is_ours:
            host_memory.check_memory(tx.config, state=state)
            if not is_traced:
                check_placement(tx.config, sharded)
            check_structure(state.opt_state, sharded, tx)
            layout = tx.layout(state.params)
            digest = check_state(tx.config, sharded, layout, digest=digest)
        if is_traced:
            return Admitted(state, batch, None)
        self._agree(state, batch)
        if not is_ours:
            if self._donates:
                state = with_numbers_as_arrays(state, tx.config.mesh, memory.arrays)
            state = _placed(state, tx, is_all=not memory.has_params or _has_other_type(sharded, tx))
        if not self._donates:
            return Admitted(state, batch, digest)
        if not is_ours:
            if not memory.has_params:
                check_params_follow(state.params, find_state(state.opt_state), tx)
            state = apart(state, returned=memory.arrays)
            params = Leaves.of(state.params)
        if not (is_ours and self._types):
            self._types |= set(map(type_of, jax.tree.leaves(state)))
        flat = TrainState(params, state.opt_state, state.model_state, state.rng)
        return Admitted(flat, self._apart(batch, state), digest)

    def admit_types(self, state: Any, batch: Any) -> Any:
        """Asks what shapes can be asked; returns the batch placed, or its shapes with a place."""
        check_train_state(state)
        sharded = find_state(state.opt_state)
        if not trees.is_traced(state):
            check_placement(self._tx.config, sharded)
        check_structure(state.opt_state, sharded, self._tx)
        self._tx.layout(state.params)  # on which compiler options may depend
        if not trees.parts_of(batch, jax.ShapeDtypeStruct):
            return self._placed(batch)

        def with_place(x: Any) -> Any:
            is_shape = isinstance(x, jax.ShapeDtypeStruct) and x.sharding is None
            return x.update(sharding=self._batch_sharding) if is_shape else x

        return jax.tree.map(with_place, batch)

    def returned(self, state: TrainState, digest: bytes) -> TrainState:
        """Returns a step's result, whose params are ``Leaves``; the next call recognizes it."""
        params: Leaves = state.params
        new = TrainState(params.tree, state.opt_state, state.model_state, state.rng)
        return remember_returned(new, params, self._tx, digest)

    def _placed(self, batch: Any) -> Any:
        if is_placed(batch, self._batch_sharding):
            return batch
        return shard_batch(batch, self._tx, self._given_spec)

    def _agree(self, state: TrainState, batch: Any) -> None:
        """Compares the first call in all processes; before later evaluations, waits for them."""
        call, config = self._program.__name__, self._tx.config
        if not self._has_agreed:
            facts = functools.partial(texts_of, self._program.arguments)
            lower = lambda: self._lower(_shapes_placed(state, self._tx), batch)  # noqa: E731
            agree(call, config, state.params, facts, lower, batch)
            self._has_agreed = True
        elif not self._donates:
            agree_again(call, config)

    def _apart(self, batch: Any, state: TrainState) -> Any:
        """Returns a batch that shares no donated memory with the state; copies if needed."""
        types = set(map(type_of, jax.tree.leaves(batch)))
        if self._types.isdisjoint(types):
            return batch
        return apart(batch, (x for x in jax.tree.leaves(state) if type_of(x) in types))


def check_layout(state: TrainState, tx: DistributedTransformation) -> bytes:
    """Raises unless ``state`` is a TrainState of the layout of ``tx``, on the host.

    If a step returned the state, its digest is known, and this does not wait for the arrays.

    Returns:
      The digest of the layout.
    """
    check_distributed(tx)
    check_train_state(state)
    sharded, layout = find_state(state.opt_state), tx.layout(state.params)
    return check_state(tx.config, sharded, layout, digest=Memory.of(state).digest)


def check_export(state: TrainState, tx: DistributedTransformation) -> None:
    """Raises as ``check_layout``, and unless the params are the rounded main parameters."""
    check_layout(state, tx)
    if not (Memory.of(state).has_params or trees.is_traced(state)):
        check_params_follow(state.params, find_state(state.opt_state), tx)


def admit_to_save(state: Any, params: Params, opt_state: OptState, tx: Any) -> tuple[Any, Any]:
    """Returns params and optimizer state of a state that can be saved: their arrays, placed.

    Args:
      state: The state: a TrainState, or another tree with both.
      params: Its params.
      opt_state: Its optimizer state; not that of a distributed optimizer: it is not asked.
      tx: The distributed optimizer, or None.
    """
    host_memory.check_memory(getattr(tx, "config", None), state=state)
    if not trees.parts_of(opt_state, DistributedState):
        return params, opt_state
    check_distributed(tx)
    whole = TrainState(params, opt_state)
    check_layout(whole, tx)
    check_parts(opt_state, tx)
    whole = brought(whole, jax.tree.leaves(places_of(whole, tx)), exactly=False)
    if not (isinstance(state, TrainState) and Memory.of(state).has_params):
        check_params_follow(whole.params, find_state(whole.opt_state), tx)
    return whole.params, whole.opt_state


def _shapes_placed(state: TrainState, tx: DistributedTransformation) -> TrainState:
    """The shapes of a state, placed as the optimizer needs it; numbers are float32."""

    def shape(x: Any, place: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(np.shape(x), getattr(x, "dtype", np.float32), sharding=place)

    shapes: TrainState = jax.tree.map(shape, state, places_of(state, tx))
    return shapes


def _has_other_type(state: DistributedState, tx: DistributedTransformation) -> bool:
    """Whether the axes of the optimizer's mesh are Explicit, which is a type, and others here."""
    of_state = getattr(jax.tree.leaves(state.mu)[0], "sharding", None)
    types = tx.config.mesh.axis_types
    is_same = getattr(getattr(of_state, "mesh", None), "axis_types", types) == types
    return AxisType.Explicit in types and not is_same


def _placed(state: TrainState, tx: DistributedTransformation, *, is_all: bool) -> TrainState:
    """Returns a state placed as the optimizer needs it; copies the arrays that moved.

    ``is_all``: not only model state and random key. For states restored without shardings, or made
    for another strategy of the same layout.
    """
    if is_all:
        return brought(state, jax.tree.leaves(places_of(state, tx)))
    extras = (state.model_state, state.rng)
    places = [NamedSharding(tx.config.mesh, P())] * len(jax.tree.leaves(extras))
    model_state, rng = brought(extras, places, exactly=False)
    return TrainState(state.params, state.opt_state, model_state, rng)


def check_params_follow(
    params: Params, state: DistributedState, tx: DistributedTransformation
) -> None:
    """Raises LayoutError if params are not the rounded main parameters: a step would drop them.

    Also raises if they are the moving average. Compares values, for states of unknown origin.
    """
    of_buckets, is_average = compared_with_main(tx.config, params, state)
    if is_average:
        raise LayoutError(
            "params: equal to the moving average, rounded: they would be trained in place of those "
            "of the last step: got params that were put into the state, expected those that "
            "train_step returned. Only evaluate a state with averaged parameters, and train the "
            "state that train_step returned; to train the average call reload_main_params(state, "
            "tx)."
        )
    if of_buckets:
        paths = [path for paths in of_buckets for path in paths]
        more = f" and {len(paths) - 1} more (of {len(paths)})" if len(paths) > 1 else ""
        some = ", or some of these" if len(paths) > len(of_buckets) else ""
        raise LayoutError(
            f"{paths[0]}{more}{some}: "
            "differ from the main parameters, which the optimizer updates: they would be lost: "
            "got params that were put into the state, "
            "expected the main parameters of opt_state, rounded. "
            "Call reload_main_params(state, tx) to continue from these params."
        )


_INJECTED = optax.InjectStatefulHyperparamsState  # the state of ``inject_hyperparams``


def with_numbers_as_arrays(state: TrainState, mesh: Mesh, returned: Sequence[Any]) -> TrainState:
    """Returns a state whose hyperparameters are replicated arrays: the same state if they are.

    A Python number, or an array on one device, is an argument of another type than the one that the
    step returned, and would compile the step again. An array that a user set is copied: a step
    donates its arrays, and the user may set this one again.

    Args:
      state: A train state. Its params stay the same arrays.
      mesh: The mesh.
      returned: The arrays of the state that a step returned, which need no copy.

    Raises:
      HyperparameterError: A hyperparameter is not one number.
    """
    # The first test is free, and enough for most states.
    if is_distributed_state(state.opt_state) or not trees.parts_of(state.opt_state, _INJECTED):
        return state
    replicated, known = NamedSharding(mesh, P()), {id(x) for x in returned}

    def as_array(name: str, x: Any) -> jax.Array:
        if trees.is_concrete(x) and id(x) not in known:
            x = jnp.copy(x)
        return _as_array(name, x, replicated)

    def as_arrays(part: Any) -> Any:
        if not isinstance(part, _INJECTED):
            return part
        items = part.hyperparams.items()
        return part._replace(hyperparams={k: as_array(k, x) for k, x in items})

    is_part = lambda x: isinstance(x, (_INJECTED, DistributedState))  # noqa: E731
    opt_state = jax.tree.map(as_arrays, state.opt_state, is_leaf=is_part)
    return TrainState(state.params, opt_state, state.model_state, state.rng)


def _as_array(name: str, x: Any, replicated: NamedSharding) -> jax.Array:
    if isinstance(x, jax.Array) and x.shape == () and x.sharding == replicated:
        return x
    is_number = trees.is_number(x) and not isinstance(x, bool) and np.shape(x) == ()
    real = (np.integer, np.floating)
    if not is_number or not any(jnp.issubdtype(jnp.result_type(x), kind) for kind in real):
        raise HyperparameterError(
            f"opt_state.hyperparams[{name!r}]: not one real number: got {x!r}, expected a scalar. "
            "Set a Python number or an array of shape ()."
        )
    keeps_dtype = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, np.floating)
    return jax.device_put(x if keeps_dtype else np.float32(x), replicated)
