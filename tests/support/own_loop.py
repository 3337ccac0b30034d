"""Training steps as users write them, inside their own jax.shard_map."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jdistadam as jda


def make_own_step(tx, loss, check_vma, micro_batches=1):
    """A user's step: takes state, params and batch, returns the same; and the norm before."""

    def local_step(params, state, batch):
        local = jda.local_params(params, tx)
        if micro_batches == 1:
            grads = jax.grad(loss)(local, batch)
        else:
            parts = jax.tree.map(lambda x: x.reshape(micro_batches, -1, *x.shape[1:]), batch)

            def body(acc, part):
                return tx.accumulate(acc, jax.grad(loss)(local, part)), None

            grads, _ = jax.lax.scan(body, tx.init_grads(params), parts)
        norm = tx.grad_norm(grads, state)
        params, state = tx.step(grads, state, params)
        return params, state, norm

    specs = (P(), tx.state_specs())
    return jax.jit(
        jax.shard_map(
            local_step, mesh=tx.config.mesh, in_specs=(*specs, P("data")), out_specs=(*specs, P()), check_vma=check_vma
        ),
        donate_argnums=(0, 1),
    )  # fmt: skip


def jit_over_mesh(local_step, tx, params, check_vma=True, **options):
    """(params, state, batch) -> (params, state); each device takes its part of the batch."""
    specs = tx.param_specs(params), tx.state_specs()
    own = jax.shard_map(
        local_step,
        mesh=tx.config.mesh,
        in_specs=(*specs, tx.config.parallel.batch_spec),
        out_specs=specs,
        check_vma=check_vma,
    )
    return jax.jit(own, **options)


def own_state(tx, params, check_vma):
    """Params copied to the mesh, and the state made inside the shard_map."""
    params = jax.jit(
        lambda tree: jax.tree.map(jnp.copy, tree),
        out_shardings=jax.NamedSharding(tx.config.mesh, P()),
    )(params)
    init = jax.shard_map(
        tx.init,
        mesh=tx.config.mesh,
        in_specs=(P(),),
        out_specs=tx.state_specs(params),
        check_vma=check_vma,
    )
    return params, jax.jit(init)(params)
