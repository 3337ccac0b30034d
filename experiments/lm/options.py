"""The options of train_lm.py, and values derived from them."""

import pathlib
import sys

import jax
import jax.numpy as jnp

from lm import command_line, gpt

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


def parse(description, argv=None):
    """Returns the options."""
    parser = command_line.make_parser(description)
    for add_options in (_add_model, _add_sharding, _add_dtypes, _add_training, _add_run):
        add_options(parser.add_argument)
    return parser.parse_args(argv)


def _add_model(add):
    add("--preset", choices=gpt.PRESETS, help="default: tiny on CPU, gpt2-small on GPU")
    add("--optimizer", choices=("jdistadam", "optax", "optax_sharded"), default="jdistadam")
    add("--steps", type=int, help="default: 400 for tiny, 2000 for gpt2-small")
    add("--batch", type=int, help="sequences per step, over all devices")
    add("--layers", type=int)
    add("--width", type=int)


def _add_sharding(add):
    add("--devices", type=int, help="default: 8 virtual CPU devices, or all GPUs")
    add("--replicas", type=int, default=1, help="hybrid sharding: how often the state is held")
    add("--model-axis", type=int, default=1, help="devices over which XLA splits heads and MLP")
    add(
        "--strategy",
        choices=("no_shard", "optim", "optim_grads", "optim_grads_params"),
        default="optim",
        help="what jdistadam shards over the devices of a replica",
    )
    add(
        "--gathered-in-model",
        action="store_true",
        help="gather the parameters of each block where the model uses it",
    )


def _add_dtypes(add):
    add(
        "--param-dtype",
        choices=DTYPES,
        help="dtype of the model's matrices, not of its vectors; default: float32 on CPU, bfloat16 "
        "on GPU",
    )
    add(
        "--grad-comm-dtype",
        choices=DTYPES,
        default="bfloat16",
        help="communication dtype of gradients",
    )
    add(
        "--grad-reduce-dtype",
        choices=("float32", "none"),
        help="dtype of the sums over devices; none: --grad-comm-dtype; default: none on CPU, "
        "float32 on GPU, over peer memory",
    )
    add(
        "--communication",
        choices=("auto", "xla", "peer"),
        default="auto",
        help="transport of gradients and parameters; peer: with sums in float32 alone",
    )
    add(
        "--main-grads-dtype",
        choices=DTYPES,
        default="float32",
        help="dtype of the sums over micro-batches",
    )
    add(
        "--main-params-dtype",
        choices=("float32", "remainder16", "none"),
        default="float32",
        help="what is kept of the parameters beside those of the model",
    )
    add(
        "--mu-dtype",
        choices=(*DTYPES, "block8", "block16"),
        default="float32",
        help="of first moments",
    )
    add(
        "--nu-dtype",
        choices=("float32", "bfloat16", "block8", "block16"),
        default="float32",
        help="of second moments",
    )
    add(
        "--rounding",
        choices=("nearest", "stochastic"),
        default="nearest",
        help="how moments, and parameters without main parameters, are rounded",
    )


def _add_training(add):
    add("--learning-rate", type=float, help="peak; default: 3e-3 for tiny, 1.5e-4 for gpt2-small")
    add("--b2", type=float, default=0.95, help="decay rate of the second moment")
    add("--max-grad-norm", type=float, default=1.0)
    add("--accumulate-steps", type=int, default=1, help="micro-batches a step, of jdistadam")
    add(
        "--report-nonfinite",
        action="store_true",
        help="look for non-finite gradients in every parameter, of jdistadam",
    )
    add("--scan", action="store_true", help="stack the layers' parameters and scan over them")


def _add_run(add):
    add("--processes", type=int, help="start so many on this machine, each with its devices")
    add("--distributed", nargs="?", const="auto", help="be one of several processes")
    add("--evals", type=int, default=10, help="how often to compute the validation loss")
    add("--seed", type=int, default=0)
    add("--out", type=pathlib.Path, default=pathlib.Path("runs/train_lm"))
    add("--tensorboard", type=pathlib.Path, help="folder for files that TensorBoard shows")
    add("--save-every", type=int, help="steps between checkpoints, in OUT/checkpoints; two stay")
    add("--resume", action="store_true", help="go on from the newest checkpoint")


def resolve(args):
    """Sets defaults that depend on the machine and on the preset; returns the model's config."""
    on_gpu = jax.default_backend() == "gpu"
    args.preset = args.preset or ("gpt2-small" if on_gpu else "tiny")
    args.steps = args.steps or {"tiny": 400}.get(args.preset, 2000)
    args.learning_rate = args.learning_rate or {"tiny": 3e-3}.get(args.preset, 1.5e-4)
    args.param_dtype = args.param_dtype or ("bfloat16" if on_gpu else "float32")
    args.grad_reduce_dtype = args.grad_reduce_dtype or ("float32" if on_gpu else "none")
    args.devices = args.devices or len(jax.devices())
    chosen = {key: getattr(args, key) for key in ("layers", "width", "batch") if getattr(args, key)}
    config = gpt.GPTConfig(**(vars(gpt.PRESETS[args.preset]) | chosen))
    check_model_axis(args, config)
    check_gathered_in_model(args)
    return config


def check_model_axis(args, config):
    """Ends the run with a message if a model axis contradicts the other options."""
    size = args.model_axis
    if size < 1 or args.devices % (size * args.replicas):
        sys.exit(
            f"--model-axis {size} with --replicas {args.replicas} does not divide "
            f"{args.devices} devices: choose numbers whose product does"
        )
    if config.heads % size:
        sys.exit(f"--model-axis {size} does not divide {config.heads} heads: choose one that does")


def check_gathered_in_model(args):
    """Ends the run with a message if the model has nothing to gather block by block."""
    if not args.gathered_in_model:
        return
    if args.optimizer != "jdistadam" or args.strategy != "optim_grads_params":
        sys.exit(
            f"--gathered-in-model with --optimizer {args.optimizer} and --strategy "
            f"{args.strategy}: parameters are unsharded already; add --strategy optim_grads_params"
        )
    if args.scan:
        sys.exit(
            "--gathered-in-model with --scan: a scan gathers its layers without this option; "
            "leave one of the two out"
        )
