"""``TrainState``: parameters and optimizer state on a mesh; how to make, place and change it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jdistadam.core import trees
from jdistadam.core.precision import float_dtype
from jdistadam.core.trees import OptState, Params
from jdistadam.distributed.checks import check_state
from jdistadam.distributed.global_arrays import copy_to
from jdistadam.distributed.state import find_state, map_state
from jdistadam.distributed.state_view import StateView
from jdistadam.distributed.transformation import DistributedTransformation, check_distributed
from jdistadam.errors import TreeError
from jdistadam.training.agreement import agree, values_of
from jdistadam.training.checks import check_created
from jdistadam.training.remembered import Leaves, keep_memory, remember_params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Parameters and optimizer state, as ``train_step`` takes and returns them.

    The optimizer updates the main parameters in ``opt_state``; ``params`` are their rounded copies.
    To give a state other parameters use ``replace(params=..., tx=tx)`` or ``reload_main_params``.
    ``train_step`` raises if params were changed in another way, as far as main parameters or an
    average show the change.

    Attributes:
      params: The params of the model; shards of large ones under "optim_grads_params".
      opt_state: The state of the distributed optimizer.
      model_state: Arrays that the loss updates without a gradient; None if there are none.
      rng: The key from which each step derives keys for the loss; None if the loss needs none.
    """

    params: Params
    opt_state: OptState
    model_state: Any = None
    rng: Any = None

    @property
    def step(self) -> jax.Array:
        """The number of updates applied so far, without skipped steps.

        Shape (), int32; also inside ``jax.jit`` and with a ``chain``. For ``TrainState.shapes`` a
        shape.

        Raises:
          TreeError: ``opt_state`` is not the state of a distributed optimizer.

        Example:
          >>> import jdistadam as jda
          >>> tx = jda.distributed(jda.fused_adamw(1e-3), mesh=jax.make_mesh((1,), ("data",)))
          >>> step = jda.train_step(lambda params, x: params["w"] @ x, tx)
          >>> state, _ = step(TrainState.create({"w": jnp.zeros(3)}, tx), jnp.ones(3))
          >>> int(state.step)
          1
        """
        count = find_state(self.opt_state).count
        on_host = isinstance(count, np.ndarray | np.generic)  # as restored without shardings
        return jnp.asarray(count) if on_host else count

    def __getstate__(self) -> dict[str, Any]:
        """Returns only the fields, for pickle and copy: not the cached checks."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def replace(self, *, tx: DistributedTransformation | None = None, **changes: Any) -> TrainState:
        """Returns a state with some of its fields changed.

        Args:
          tx: The distributed optimizer, required for new ``params``. Main parameters get their
            values, as ``reload_main_params`` describes.
          **changes: New values by name: ``params``, ``opt_state``, ``model_state``, ``rng``.

        Returns:
          A new state, with the same arrays in the other fields.

        Raises:
          TreeError: New params without ``tx``.

        Example:
          >>> import jdistadam as jda
          >>> tx = jda.distributed(jda.fused_adamw(1e-3), mesh=jax.make_mesh((1,), ("data",)))
          >>> state = TrainState.create({"w": jnp.zeros(3)}, tx)
          >>> state.replace(params={"w": jnp.ones(3)}, tx=tx).params["w"].tolist()
          [1.0, 1.0, 1.0]
        """
        new = dataclasses.replace(self, **changes)
        if tx is not None:
            return reload_main_params(new, tx)
        if "params" in changes and not Leaves.of(self.params).is_same(Leaves.of(new.params)):
            raise TreeError(
                "params: the optimizer would continue from its own main parameters, and these "
                "would be lost: "
                "got new params and no tx, expected state.replace(params=..., tx=tx). "
                "Pass the optimizer, whose main parameters then take these values. To evaluate "
                "other params, such as an average, write dataclasses.replace(state, params=...): "
                "docs/evaluation.md."
            )
        if "opt_state" not in changes:
            keep_memory(self, new)
        return new

    @classmethod
    def create(
        cls,
        params: Params,
        tx: DistributedTransformation,
        *,
        param_dtypes: Any = None,
        model_state: Any = None,
        rng: Any = None,
    ) -> TrainState:
        """Copies its arguments onto the mesh and makes the optimizer state.

        ``train_step`` donates the arrays of the state; the caller's arrays stay valid. Main
        parameters are kept if they differ from the parameters in dtype or sharding: always on
        several devices, on one device for 16-bit parameters.

        Args:
          params: Tree of float32, bfloat16 or float16 arrays (jax or numpy).
          tx: A distributed optimizer.
          param_dtypes: Dtype in which the model computes, or a tree of them. The main parameters
            begin exactly as ``params``. If they began rounded to bfloat16 instead, a bfloat16 model
            would not change until the first small updates add up to half the spacing of bfloat16
            numbers. None: the dtypes of ``params``.
          model_state: Tree of arrays that the loss reads and updates without a gradient, such as
            batch statistics. After each step, floats are averaged over the devices, except for
            leaves that the loss returns as it got them. For integers, such as counters, the maximum
            is kept.
          rng: ``jax.random.key`` for dropout and the like. None: the loss gets none.

        Returns:
          The state before the first step.

        Raises:
          DtypeError: A leaf has another dtype, or ``rng`` is not a key.
          TreeError: ``params`` are shapes, or all variables of a Flax model.
          AgreementError: Several processes make different states.
        """
        check_distributed(tx)
        check_created(params, model_state, rng)
        replicated = NamedSharding(tx.config.mesh, P())
        # Placed with the trained dtypes: tx records the dtypes that it sees.
        trained = _trained(params, param_dtypes)
        values = functools.partial(values_of, params=params, model_state=model_state, rng=rng)
        agree("TrainState.create", tx.config, trained, values)
        params = copy_to(params, tx.param_shardings(trained))
        model_state, rng = copy_to((model_state, rng), replicated)
        rounded = _rounded(tx, params, trained)
        # Other state of a chain may be the caller's too.
        copied = functools.partial(copy_to, sharding=replicated)
        opt_state = map_state(lambda part: part, tx.init(rounded), others=copied)
        if param_dtypes is not None:
            view = StateView(tx.config, rounded)
            opt_state = view.with_exact_values(opt_state, params, rounded)
        return remember_params(cls(rounded, opt_state, model_state, rng))

    @classmethod
    def shapes(
        cls, params: Params, tx: DistributedTransformation, *, param_dtypes: Any = None
    ) -> TrainState:
        """Returns shapes, dtypes and shardings of the result of ``create``; makes no array.

        For ``audit`` and ``train_step(...).lower`` before there is a state, and as the template
        for restoring a checkpoint.

        Args:
          params: Tree of arrays or of shapes, as ``jax.eval_shape`` of a model's initialization.
          tx: A distributed optimizer; its devices need not exist.
          param_dtypes: As in ``create``.

        Returns:
          A state of ``jax.ShapeDtypeStruct``.

        Example:
          >>> import jdistadam as jda
          >>> tx = jda.distributed(jda.fused_adamw(1e-3), mesh=jax.make_mesh((1,), ("data",)))
          >>> state = TrainState.shapes({"w": jax.ShapeDtypeStruct((3,), jnp.bfloat16)}, tx)
          >>> state.opt_state.main_params.dtype
          dtype('float32')
        """
        check_distributed(tx)
        trees.check_dtypes(params, name="params")
        params = _trained(params, param_dtypes)
        state = cls(params, jax.eval_shape(tx.init, params))
        return jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            state,
            places_of(state, tx),
        )


def _trained(params: Params, dtypes: Any) -> Any:
    """Returns the shapes of params, in the dtypes given by None, one dtype or a tree of them."""
    if dtypes is None:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    if jax.tree_util.treedef_is_leaf(jax.tree.structure(dtypes)):
        dtypes = jax.tree.map(lambda _: dtypes, params)
    trees.check_same_structure(dtypes, params, name="param_dtypes", like_name="params")
    dtypes = jax.tree.map(lambda dtype: float_dtype("param_dtypes", dtype), dtypes)
    return jax.tree.map(lambda x, dtype: jax.ShapeDtypeStruct(x.shape, dtype), params, dtypes)


def _rounded(tx: DistributedTransformation, params: Params, trained: Params) -> Any:
    """Params in the dtypes of ``trained``, in which the model computes."""
    kind, layout = tx.config.policy.main_params, tx.layout(trained)

    def rounded(x: Any, like: Any, is_frozen: bool) -> Any:
        is_split = kind.is_remainder and like.dtype == jnp.bfloat16 and not is_frozen
        if is_split and x.dtype != like.dtype and x.size:
            # The half that matches the remainder.
            return kind.split(x.astype(jnp.float32), like.dtype, jnp)[0]
        return x.astype(like.dtype)

    treedef: Any = jax.tree.structure(params)
    is_frozen = treedef.unflatten([leaf.group is None for leaf in layout.leaves])
    return jax.tree.map(rounded, params, trained, is_frozen)


def reload_main_params(state: TrainState, tx: DistributedTransformation) -> TrainState:
    """Returns a state whose main parameters have the values of its params.

    Call it after params were restored, averaged or edited. The optimizer reads and updates the main
    parameters, and would discard a change of ``state.params`` alone. Moments, counts, loss scale
    and all others stay the same arrays, which the next step donates.

    Args:
      state: A train state with other params of the same paths, shapes and dtypes; jax or numpy
        arrays with any placement. They are copied, and placed as the optimizer needs them.
      tx: The distributed optimizer.

    Returns:
      A state with new params and main parameters.

    Raises:
      LayoutError: The params have other paths, shapes or dtypes than those of the state.
      TreeError: The state lacks fields of this optimizer, or has others.
      MeshError: The state was donated to a step.

    Example:
      >>> import dataclasses
      >>> import jdistadam as jda
      >>> tx = jda.distributed(jda.fused_adamw(1e-3), mesh=jax.make_mesh((1,), ("data",)))
      >>> state = TrainState.create({"w": jnp.zeros(3, jnp.bfloat16)}, tx)
      >>> state = dataclasses.replace(state, params={"w": jnp.ones(3, jnp.bfloat16)})
      >>> reload_main_params(state, tx).opt_state.main_params[:3].tolist()
      [1.0, 1.0, 1.0]
    """
    check_distributed(tx)
    check_train_state(state)
    config = tx.config
    trees.check_dtypes(state.params, name="params")
    view = StateView(config, state.params)
    check_state(config, find_state(state.opt_state), view.layout, of_params=True)
    params = copy_to(state.params, tx.param_shardings(state.params))
    opt_state = view.with_begun("main_params", state.opt_state, params)
    return remember_params(dataclasses.replace(state, params=params, opt_state=opt_state))


def places_of(state: TrainState, tx: DistributedTransformation) -> TrainState:
    """Returns the shardings of a state's arrays, or of its shapes."""
    everywhere = NamedSharding(tx.config.mesh, P())
    params = tx.param_shardings(state.params)
    each = TrainState(params, tx.state_shardings(), everywhere, everywhere)
    places: TrainState = jax.tree.broadcast(each, state)
    return places


def check_train_state(state: Any) -> None:
    """Raises TreeError unless ``state`` is a TrainState of this package."""
    if not isinstance(state, TrainState):
        raise TreeError(
            f"state: not a train state: got {type(state).__module__}.{type(state).__qualname__}, "
            "expected jdistadam.TrainState. Make it with TrainState.create(params, tx); "
            "restore a checkpoint into TrainState.shapes(params, tx)."
        )
