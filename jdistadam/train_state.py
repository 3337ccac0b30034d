"""Parameters and optimizer state over a mesh: made, placed, and put together again."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jdistadam import collectives, reference, trees
from jdistadam.config import MixedPrecisionPolicy, float_dtype
from jdistadam.distributed_step import is_distributed_state, main_shard
from jdistadam.distributed_transformation import DistributedTransformation
from jdistadam.errors import MeshError, describe


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Parameters and optimizer state, as ``train_step`` takes and returns them."""

    params: Any
    opt_state: Any
    model_state: Any = None
    rng: Any = None

    @classmethod
    def create(
        cls,
        params: Any,
        tx: DistributedTransformation,
        *,
        param_dtypes: Any = None,
        model_state: Any = None,
        rng: Any = None,
    ) -> TrainState:
        """Copies what it is given onto the mesh and makes the optimizer state.

        The state owns its arrays: train_step donates them, and the caller's stay valid. Main
        parameters are kept where they differ from the parameters in dtype or in sharding: always
        on several devices, on one device for 16-bit parameters.

        Args:
          params: Tree of float32, bfloat16 or float16 arrays (jax or numpy).
          tx: A distributed optimizer.
          param_dtypes: Dtype in which the model computes, or a tree of them; the main parameters
            begin as ``params`` are. So a model in bfloat16 begins with float32 values between those
            that bfloat16 has; begun on them, it does not move at all until the first small updates
            add up to half the distance to the next. None: the dtypes of ``params``.
          model_state: Tree of arrays that the loss reads and renews without a gradient, such as
            batch statistics. After each step floats are averaged over the devices; of whole
            numbers, such as counters, the largest is kept.
          rng: ``jax.random.key`` for dropout and the like. None: the loss gets none.

        Raises:
          DtypeError: A leaf has another dtype.
        """
        check_distributed(tx)
        trees.check_dtypes(params, name="params")
        dtypes = _dtypes_of(params, param_dtypes)
        mesh = tx.config.mesh
        replicated = NamedSharding(mesh, P())
        placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), tx.param_specs(params))
        params = own(params, placed)
        model_state, rng = own((model_state, rng), replicated)
        rounded = _rounded(tx.config.policy, params, dtypes)
        opt_state = jax.tree.map(  # what a chain keeps besides may be the caller's too
            lambda part: part if is_distributed_state(part) else own(part, replicated),
            tx.init(rounded),
            is_leaf=is_distributed_state,
        )
        if param_dtypes is not None:
            opt_state = _with_main_params(tx, opt_state, rounded, params)
        return cls(rounded, opt_state, model_state, rng)

    @classmethod
    def shapes(
        cls, params: Any, tx: DistributedTransformation, *, param_dtypes: Any = None
    ) -> TrainState:
        """Returns shapes, dtypes and shardings of what ``create`` makes, and makes no array.

        For ``audit`` and ``train_step(...).lower`` before there is a state, and as the target into
        which a checkpoint is restored.

        Args:
          params: Tree of arrays or of shapes, as ``jax.eval_shape`` of a model's initialisation.
          tx: A distributed optimizer; its devices need not exist.
          param_dtypes: As in ``create``.

        Example:
          >>> import jdistadam as jda
          >>> tx = jda.distributed_fused_adamw(1e-3, mesh=jax.make_mesh((1,), ("data",)))
          >>> state = TrainState.shapes({"w": jax.ShapeDtypeStruct((3,), jnp.bfloat16)}, tx)
          >>> state.opt_state.main_params.dtype
          dtype('float32')
        """
        check_distributed(tx)
        dtypes = _dtypes_of(params, param_dtypes)
        params = jax.tree.map(lambda x, t: jax.ShapeDtypeStruct(x.shape, t), params, dtypes)

        def place(spec: P, tree: Any) -> Any:
            sharding = NamedSharding(tx.config.mesh, spec)
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
            )

        there = cls(params, jax.eval_shape(tx.init, params))
        specs = cls(tx.param_specs(params), tx.state_specs())
        return jax.tree.map(place, specs, there, is_leaf=lambda x: isinstance(x, P))


def own(tree: Any, sharding: Any) -> Any:
    """Returns copies placed as ``sharding`` says, which no one else holds, with definite types.

    ``device_put`` may hand out the caller's own buffer as the replica of its device, also with
    may_alias=False; the results of a jitted copy are never shared with its arguments. A Python
    number would come back from a step as another type, and compile the step again.
    """

    def copy(x: Any) -> Any:
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return jnp.copy(x) if is_key else jax.lax.convert_element_type(jnp.copy(x), x.dtype)

    return jax.jit(lambda tree: jax.tree.map(copy, tree))(jax.device_put(tree, sharding))


def check_distributed(tx: Any) -> None:
    """Raises MeshError unless ``tx`` is a distributed optimizer."""
    if not isinstance(tx, DistributedTransformation):
        raise MeshError(
            describe(
                "tx",
                "not a distributed optimizer",
                got=type(tx).__name__,
                expected="DistributedTransformation",
                action="Make it with distributed_fused_adamw or distributed_fused_adam.",
            )
        )


def _dtypes_of(params: Any, dtypes: Any) -> Any:
    """Returns a tree of dtypes like params, from None, one dtype or such a tree."""
    if dtypes is None:
        return jax.tree.map(lambda x: x.dtype, params)
    if jax.tree_util.treedef_is_leaf(jax.tree.structure(dtypes)):
        dtypes = jax.tree.map(lambda _: dtypes, params)
    trees.check_same_structure(dtypes, params, name="param_dtypes", like_name="params")
    return jax.tree.map(lambda dtype: float_dtype("param_dtypes", dtype), dtypes)


def _rounded(policy: MixedPrecisionPolicy, params: Any, dtypes: Any) -> Any:
    """Params in the dtypes in which the model computes."""

    def rounded(x: Any, dtype: Any) -> Any:
        if policy.keeps_remainders and dtype == jnp.bfloat16 and x.dtype == jnp.float32:
            return reference.split(x, jnp.bfloat16, jnp)[0]  # the half that fits a remainder
        return x.astype(dtype)

    return jax.tree.map(rounded, params, dtypes)


def _with_main_params(tx: DistributedTransformation, opt_state: Any, params: Any, main: Any) -> Any:
    """Gives a new state the main parameters ``main`` in place of the widened ``params``."""
    config = tx.config
    layout = config.layout(config.tensor_local(params))
    if not layout.main_size:
        return opt_state
    shard = collectives.shard_map(
        lambda tree: main_shard(config, layout, jax.tree.leaves(tree)),
        mesh=config.mesh,
        in_specs=(tx.param_specs(params),),
        out_specs=config.parallel.state_spec,
    )
    flat = jax.jit(shard)(main)
    return jax.tree.map(
        lambda part: part._replace(main_params=flat) if is_distributed_state(part) else part,
        opt_state,
        is_leaf=is_distributed_state,
    )


def full_params(state: TrainState, tx: DistributedTransformation) -> Any:
    """Returns the whole parameters, in the dtype the model computes with.

    Every device gets them, but for what ``param_specs`` shards over tensor axes.
    """
    config = tx.config
    if not config.parallel.shards_params:
        return state.params
    specs = config.tensor_specs(state.params)
    placed = jax.tree.map(lambda spec: NamedSharding(config.mesh, spec), specs)
    return jax.jit(lambda x: x, out_shardings=placed)(state.params)
