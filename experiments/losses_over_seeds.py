"""Last losses of train_lm.py over several seeds: jdistadam, optax, and optax with reordered sums.

    python experiments/losses_over_seeds.py --seeds 8 --out runs/losses.json
    JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=4 \\
        python experiments/losses_over_seeds.py --preset tiny --learning-rate 3e-3  # sums over four

All have the same start, batches and hyperparameters for a seed, and a model that computes in
bfloat16. "optax, reversed" gets the sequences of each batch in reversed order, which changes the
order of sums and nothing else. If the losses of jdistadam differ from optax's by as much as these
do, the order of sums explains it. jdistadam has bfloat16 matrices, whose gradients are sent in
bfloat16 and summed in float32; with "float32 parameters" it has those of optax, and sends float32,
so that only the order of sums is left. A difference is the mean over seeds, with its standard
error; losses are in nats per byte, of the same windows of the validation set.

Losses at the end differ by chance, because a small difference grows with every step. So the record
has distances, too: how far parameters are from optax's after some steps, as the norm of the
difference by that of optax's parameters, the median over seeds.
"""

import pathlib

import jax
import numpy as np
import train_lm
from lm import command_line, corpus, options, report

import jdistadam as jda

WIDE = "jdistadam, float32 parameters"
WAYS = ("optax", "optax, reversed", "jdistadam", WIDE)
EVALUATED = 8  # batches
MOMENTS = (2, 5, 10, 20, 50, 100, 200)  # steps after which parameters are compared


def trained(way, given, texts, seed):
    """Trains; returns the loss of the validation set, and float32 parameters after MOMENTS."""
    optimizer = way.split(",")[0]
    args = train_lm.parse_args([*given, "--optimizer", optimizer, "--seed", str(seed)])
    config = options.resolve(args)
    mesh = train_lm.make_mesh(args)
    model, params, specs = train_lm.make_model(args, config, mesh)
    if way == WIDE:
        args.param_dtype = args.grad_comm_dtype = "float32"
    setup = {"jdistadam": train_lm.setup_jdistadam, "optax": train_lm.setup_optax}[optimizer]
    state, step, loss_of = setup(args, mesh, model, params, specs)

    def drawn(text, rng):
        tokens = corpus.batch(text, config.batch, config.length, rng)
        return tokens[::-1].copy() if way.endswith("reversed") else tokens

    place = jax.NamedSharding(mesh, jax.P("data"))
    with jax.set_mesh(mesh):
        rng, found = np.random.default_rng(seed), {}
        for i in range(1, args.steps + 1):
            state, metrics = step(state, jax.device_put(drawn(texts[0], rng), place))
            jax.block_until_ready(metrics)  # CPU devices may not wait for each other otherwise
            if i in MOMENTS:
                found[i] = [np.asarray(x) for x in jax.tree.leaves(float32_params(state, step))]
        rng = np.random.default_rng(1234)
        losses = [
            float(loss_of(state, jax.device_put(drawn(texts[1], rng), place)))
            for _ in range(EVALUATED)
        ]
    return float(np.mean(losses)), found


def float32_params(state, step):
    """Of a state of optax, or of jdistadam, whose main parameters they are."""
    if isinstance(state, dict):
        return state["params"]
    return jda.main_params(state.params, state.opt_state, step.tx)


def distances(found, of_optax):
    """How far parameters are from optax's, by the norm of optax's, after each of MOMENTS."""
    squares = lambda leaves: sum(float(np.sum(np.square(x, dtype=np.float64))) for x in leaves)  # noqa: E731
    return {
        i: (squares(map(np.subtract, found[i], leaves)) / squares(leaves)) ** 0.5
        for i, leaves in of_optax.items()
    }


def difference(losses, way):
    """Mean and standard error over seeds of what a way's loss is above optax's."""
    apart = np.subtract(losses[way], losses["optax"])
    return {"mean": float(apart.mean()), "error": float(apart.std(ddof=1) / len(apart) ** 0.5)}


def main():
    parser = command_line.make_parser(__doc__)
    parser.add_argument("--preset", default="gpt2-small")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--seeds", type=int, default=8, help="at least 2")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/losses.json"))
    args = parser.parse_args()
    names = ("preset", "steps", "batch", "learning_rate")
    given = [x for k in names for x in (f"--{k.replace('_', '-')}", str(getattr(args, k)))]
    given += ["--param-dtype", "bfloat16", "--grad-reduce-dtype", "float32"]
    texts = corpus.load()
    losses, apart = {way: [] for way in WAYS}, {way: [] for way in WAYS[1:]}
    for seed in range(args.seeds):
        for way in WAYS:
            loss, params = trained(way, given, texts, seed)
            losses[way].append(loss)
            if way == WAYS[0]:
                of_optax = params
            else:
                apart[way].append(distances(params, of_optax))
        print(seed, *(f"{way} {losses[way][-1]:.4f}" for way in WAYS), flush=True)
        if seed > 0:  # a difference needs two; after each, so that nothing is lost
            report.write_run(
                args.out,
                args.revision,
                **{k: getattr(args, k) for k in names},
                devices=jax.device_count(),
                losses=losses,
                differences={way: difference(losses, way) for way in WAYS[1:]},
                distances={
                    way: {i: float(np.median([x[i] for x in found])) for i in found[0]}
                    for way, found in apart.items()
                },
            )
    for way in WAYS[1:]:
        found = difference(losses, way)
        print(f"{way}: {found['mean']:+.4f} ± {found['error']:.4f} of optax")


if __name__ == "__main__":
    main()
