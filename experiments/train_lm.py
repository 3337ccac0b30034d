"""Trains a byte-level GPT on the source text of Python's standard library.

The main job of jdistadam: a Flax model, data parallel, its optimizer state sharded over all
devices. Without a GPU it runs on virtual CPU devices, in minutes; with GPUs it uses them.

    python experiments/train_lm.py                                    # 8 virtual CPU devices
    python experiments/train_lm.py --preset gpt2-small --steps 2000   # on GPUs
    python experiments/train_lm.py --optimizer optax                  # the same with optax.adamw
"""

import argparse
import functools
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from lm import corpus, gpt, report
from tqdm import tqdm

import jdistadam as jda

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = functools.partial(parser.add_argument)
    add("--preset", choices=gpt.PRESETS, help="default: tiny on CPU, gpt2-small on GPU")
    add("--optimizer", choices=("jdistadam", "optax"), default="jdistadam")
    add("--steps", type=int, help="default: 400 for tiny, 2000 for gpt2-small")
    add("--batch", type=int, help="sequences a step, over all devices")
    add("--layers", type=int)
    add("--width", type=int)
    add("--devices", type=int, help="default: 8 virtual CPU devices, or all GPUs")
    add("--param-dtype", choices=DTYPES, help="dtype of the model's parameters; default: float32 on CPU, bfloat16 on GPU")
    add("--grad-comm-dtype", choices=DTYPES, default="bfloat16", help="dtype of gradients on the wire")
    add("--mu-dtype", choices=DTYPES, default="float32", help="dtype of the first moment")
    add("--learning-rate", type=float, help="peak; default: 3e-3 for tiny, 6e-4 for gpt2-small")
    add("--max-grad-norm", type=float, default=1.0)
    add("--evals", type=int, default=10, help="how often to compute the validation loss")
    add("--seed", type=int, default=0)
    add("--out", type=pathlib.Path, default=pathlib.Path("runs/train_lm"))
    return parser.parse_args(argv)


def resolve(args):
    """Fills in what depends on the machine and on the preset; returns the model's config."""
    on_gpu = jax.default_backend() == "gpu"
    args.preset = args.preset or ("gpt2-small" if on_gpu else "tiny")
    args.steps = args.steps or {"tiny": 400, "gpt2-small": 2000}[args.preset]
    args.learning_rate = args.learning_rate or {"tiny": 3e-3, "gpt2-small": 6e-4}[args.preset]
    args.param_dtype = args.param_dtype or ("bfloat16" if on_gpu else "float32")
    args.devices = args.devices or len(jax.devices())
    chosen = {key: getattr(args, key) for key in ("layers", "width", "batch") if getattr(args, key)}
    return gpt.GPTConfig(**(vars(gpt.PRESETS[args.preset]) | chosen))


def make_schedule(args):
    warmup = max(1, args.steps // 20)
    return optax.warmup_cosine_decay_schedule(0.0, args.learning_rate, warmup, args.steps, 0.1 * args.learning_rate)


def decays(params):
    """Weight decay for matrices, none for biases and norms."""
    return jax.tree.map(lambda x: x.ndim > 1, params)


def setup_jdistadam(args, mesh, loss, params):
    """Returns (state, step, params_of): sharded optimizer state, explicit collectives."""
    policy = jda.MixedPrecisionPolicy(
        grad_comm_dtype=DTYPES[args.grad_comm_dtype], mu_dtype=DTYPES[args.mu_dtype]
    )
    tx = jda.distributed_fused_adamw(
        make_schedule(args), b2=0.95, weight_decay=0.1, mask=decays,
        mesh=mesh, policy=policy, max_grad_norm=args.max_grad_norm,
    )  # fmt: skip
    state = jda.TrainState.create(params, tx)
    step = jda.train_step(loss, tx)
    return state, step, lambda state: jda.full_params(state, tx)


def setup_optax(args, mesh, loss, params):
    """The same with optax.adamw: parameters and state replicated, XLA inserts the collectives."""
    tx = optax.chain(
        optax.clip_by_global_norm(args.max_grad_norm),
        optax.adamw(make_schedule(args), b2=0.95, weight_decay=0.1, mask=decays),
    )
    params = jax.device_put(params, NamedSharding(mesh, P()))
    state = (params, jax.jit(tx.init)(params))
    batch_sharding = NamedSharding(mesh, P("data"))

    @functools.partial(jax.jit, donate_argnums=0)
    def update(state, tokens):
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        metrics = {"loss": value, "grad_norm": optax.tree.norm(grads)}
        return (optax.apply_updates(params, updates), opt_state), metrics

    return state, lambda s, tokens: update(s, jax.device_put(tokens, batch_sharding)), lambda s: s[0]


def evaluate(loss, params, text, config, mesh, num_batches):
    """Mean loss over the same windows of the held-out files at every call."""
    rng = np.random.default_rng(1234)
    sharding = NamedSharding(mesh, P("data"))
    windows = [corpus.batch(text, config.batch, config.length, rng) for _ in range(num_batches)]
    return float(np.mean([loss(params, jax.device_put(tokens, sharding)) for tokens in windows]))


def main(argv=None):
    args = parse_args(argv)
    jax.config.update("jax_num_cpu_devices", args.devices or 8)
    config = resolve(args)
    # Auto axes, so that the evaluation below can be an ordinary jitted function.
    mesh = jax.make_mesh((args.devices,), ("data",), (AxisType.Auto,), devices=jax.devices()[: args.devices])
    train, validation = corpus.load()
    entropy = corpus.bigram_entropy(np.concatenate([train, validation]))
    print(
        f"{len(train) / 1e6:.1f} MB of source text, {len(validation) / 1e6:.2f} MB held out; "
        f"bigram entropy {entropy:.3f} nats a byte"
    )

    compute_dtype = DTYPES[args.param_dtype]
    # optax keeps no main parameters: it gets float32 ones, cast where the model computes.
    stored_dtype = compute_dtype if args.optimizer == "jdistadam" else jnp.float32
    model = gpt.GPT(config, compute_dtype, stored_dtype)
    params = model.init(jax.random.key(args.seed), jnp.zeros((1, config.length), jnp.int32))["params"]
    loss = gpt.loss_fn(model)
    setup = {"jdistadam": setup_jdistadam, "optax": setup_optax}[args.optimizer]
    state, step, params_of = setup(args, mesh, loss, params)
    jitted_loss = jax.jit(loss)

    metrics_path = args.out / "metrics.jsonl"
    metrics_file = report.MetricsFile(metrics_path)
    rng = np.random.default_rng(args.seed)
    tokens_per_step = config.batch * config.length
    eval_every = max(1, args.steps // args.evals)
    validation_loss = float("nan")
    seconds = 0.0  # of training, without evaluation and compilation
    with tqdm(total=args.steps, unit="step", desc=f"{args.devices} {jax.devices()[0].device_kind} devices") as bar:
        start = time.perf_counter()
        for i in range(1, args.steps + 1):
            state, metrics = step(state, corpus.batch(train, config.batch, config.length, rng))
            if i == 1:
                jax.block_until_ready(metrics)
                start = time.perf_counter()  # compiled
            if i % 10 == 0 or i == args.steps:
                values = {f"train_{key}": float(value) for key, value in metrics.items()}
                elapsed = seconds + time.perf_counter() - start
                speed = (i - 1) * tokens_per_step / elapsed if i > 1 else 0.0
                metrics_file.write(step=i, tokens=i * tokens_per_step, tokens_per_second=speed, **values)
                bar.set_postfix(
                    loss=f"{values['train_loss']:.3f}", val=f"{validation_loss:.3f}", tokens_per_s=f"{speed:,.0f}"
                )
            bar.update()
            if i % eval_every == 0 or i == args.steps:
                jax.block_until_ready(state)
                seconds += time.perf_counter() - start
                validation_loss = evaluate(jitted_loss, params_of(state), validation, config, mesh, 4)
                metrics_file.write(step=i, tokens=i * tokens_per_step, validation_loss=validation_loss)
                start = time.perf_counter()

    report.plot_loss(metrics_path, args.out / "loss.png", entropy)
    if args.optimizer == "jdistadam":
        report.print_memory(state.opt_state, state.params, args.devices)
    verdict = "below" if validation_loss < entropy else "NOT below"
    print(f"validation loss {validation_loss:.3f} nats a byte, {verdict} the bigram entropy {entropy:.3f}")
    print(f"wrote {metrics_path} and {args.out / 'loss.png'}")
    return validation_loss, entropy


if __name__ == "__main__":
    main()
