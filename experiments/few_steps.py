"""A few clipped steps over copies between all GPUs, small enough for compute-sanitizer.

    XLA_FLAGS="--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false" compute-sanitizer \\
        --tool memcheck --report-api-errors no python experiments/few_steps.py

``--tool racecheck`` looks for races. ``--report-api-errors no`` leaves out calls that CUDA refuses
and that are no errors: NCCL makes many.
"""

import os

os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
import jax
import jax.numpy as jnp
import numpy as np

import jdistadam as jda


def loss_fn(params, batch):
    h = batch.astype(jnp.bfloat16)
    for w in params["w"]:
        h = jnp.tanh(h @ w)
    return jnp.mean(jnp.square(h - 1.0).astype(jnp.float32))


def main():
    mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    policy = jda.MixedPrecisionPolicy(grad_comm_dtype=jnp.bfloat16, grad_reduce_dtype=jnp.float32)
    draws = [np.random.default_rng(i).normal(size=(64, 64)) * 0.1 for i in range(6)]
    params = {"w": [jnp.asarray(draw, jnp.bfloat16) for draw in draws]}
    for strategy in ("optim", "optim_grads_params"):
        tx = jda.distributed(
            jda.fused_adamw(3e-2, weight_decay=0.1),
            mesh=mesh,
            policy=policy,
            sharding_strategy=strategy,
            max_grad_norm=1.0,
            communication="peer",
        )
        state = jda.TrainState.create(params, tx)
        step = jda.train_step(loss_fn, tx, accumulate_steps=2)
        for i in range(3):
            batch = np.random.default_rng(i).normal(size=(4 * mesh.size, 64)).astype(np.float32)
            state, metrics = step(state, batch)
            jax.block_until_ready(state)
        print(f"{strategy}: loss {float(metrics['loss'])}", flush=True)


if __name__ == "__main__":
    main()
