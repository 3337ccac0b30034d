"""State that does not depend on the mesh: optax's own pytree, and back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jdistadam import buckets, trees
from jdistadam.distributed import DistributedState, DistributedTransformation
from jdistadam.errors import TreeError, describe
from jdistadam.training import TrainState


def to_optax_state(state: TrainState, tx: DistributedTransformation) -> tuple[Any, Any]:
    """Returns ``(main_params, opt_state)`` of a train state as ``optax.adamw`` would hold them.

    Values are exact copies, whatever the number of devices and the buckets.

    Args:
      state: A train state made with ``tx``.
      tx: The distributed optimizer.

    Returns:
      The float32 main parameters, and exactly the pytree that ``optax.adamw(...).init`` returns
      for the same hyperparameters, with the counts, mu and nu of ``state``. numpy arrays.
    """
    config = tx.config
    layout = config.layout(state.params)
    treedef = jax.tree.structure(state.params)
    opt_state: DistributedState = state.opt_state

    def leaves(flat: jax.Array) -> Any:
        return jax.tree.unflatten(
            treedef, map(np.asarray, buckets.leaves_of_flat(layout, np.asarray(flat)))
        )

    count = np.asarray(opt_state.count)
    adam, *rest = _optax_template(tx, state.params)
    adam = adam._replace(count=count, mu=leaves(opt_state.mu), nu=leaves(opt_state.nu))
    return leaves(opt_state.main_params), (adam, *(_with_count(part, count) for part in rest))


def from_optax_state(
    main_params: Any, opt_state: Any, tx: DistributedTransformation, *, param_dtypes: Any = None
) -> TrainState:
    """Shards parameters and a state of ``optax.adamw`` over the mesh of ``tx``.

    Args:
      main_params: Tree of parameters, exact in float32.
      opt_state: The state that ``optax.adamw`` or ``to_optax_state`` returned for it.
      tx: The distributed optimizer.
      param_dtypes: Tree of dtypes, or one dtype, in which the model computes. None: as given.

    Returns:
      A train state that continues from there.

    Raises:
      TreeError, ShapeError: The state is not one of adamw for these parameters.
    """
    template: Any = jax.tree.structure(_optax_template(tx, main_params))
    if jax.tree.structure(opt_state) != template:
        raise TreeError(
            describe(
                "opt_state",
                "not the state of optax.adamw with these hyperparameters",
                got=jax.tree.structure(opt_state),
                expected=template,
                action="Use the same schedules and mask on both sides.",
            )
        )
    adam: optax.ScaleByAdamState = opt_state[0]
    for name in ("mu", "nu"):
        trees.check_same_shapes(
            getattr(adam, name), main_params, name=f"opt_state[0].{name}", like_name="params"
        )
    if param_dtypes is None or not jax.tree_util.treedef_is_leaf(jax.tree.structure(param_dtypes)):
        dtypes = (
            jax.tree.map(lambda x: x.dtype, main_params) if param_dtypes is None else param_dtypes
        )
    else:
        dtypes = jax.tree.map(lambda _: param_dtypes, main_params)
    params = jax.tree.map(lambda x, dtype: jnp.asarray(x).astype(dtype), main_params, dtypes)
    state = TrainState.create(params, tx)
    config = tx.config
    layout = config.layout(state.params)

    def flat(tree: Any, like: jax.Array) -> jax.Array:
        leaves = [jnp.asarray(x) for x in jax.tree.leaves(tree)]
        shards = [
            buckets.flat_shard(layout, leaves, i, like.dtype) for i in range(config.num_shards)
        ]
        return jax.device_put(
            jnp.concatenate(shards), NamedSharding(config.mesh, P(config.shard_axis))
        )

    old: DistributedState = state.opt_state
    new = old._replace(
        count=jax.device_put(np.array(adam.count), old.count.sharding),  # a copy: it is donated
        main_params=flat(main_params, old.main_params),
        mu=flat(adam.mu, old.mu),
        nu=flat(adam.nu, old.nu),
    )
    return TrainState(state.params, new)


def _optax_template(tx: DistributedTransformation, params: Any) -> Any:
    hyper = tx.config.hyper
    template = optax.adamw(
        hyper.learning_rate,
        weight_decay=hyper.weight_decay,
        mask=tx.config.mask,
        nesterov=hyper.nesterov,
    )
    return jax.eval_shape(template.init, params)


def _with_count(part: Any, count: Any) -> Any:
    return jax.tree.map(lambda _: count, part)  # the only leaves beside Adam's are step counts
