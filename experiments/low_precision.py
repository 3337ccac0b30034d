"""The effect of 16- and 8-bit moments and stochastic rounding on training, paired by seed.

    python experiments/low_precision.py --out runs/low_precision.json

Each variant trains the same model on the same batches from the same parameters, for each seed. It
is compared with float32 main parameters and moments by two measures: the mean difference of the
validation loss with its 95 % interval, and the distance of the parameters, relative to how far
training moved them. The loss alone can hide wrong second moments. One planted variant must fail:
its second moments have 8 bits of their square root, so small ones become zero. A variant that only
starts from other last bits shows the difference between equivalent runs.
"""

import dataclasses
import functools
import pathlib
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import optax
from lm import command_line, corpus, gpt, markdown, report

import jdistadam as jda

MAIN = dict(main_params_dtype=jnp.float32)
EIGHT = dict(mu_dtype="block8", nu_dtype="block8", rounding="stochastic")
BLOCK16 = dict(mu_dtype="block16", nu_dtype="block16", rounding="stochastic")
SIXTEEN = dict(mu_dtype=jnp.bfloat16, nu_dtype=jnp.bfloat16, rounding="stochastic")
FIRST, AGAIN, PLANTED = "float32 state", "float32 state, other last bits", "planted: 8-bit sqrt(nu)"
WAYS = {
    FIRST: MAIN,
    AGAIN: MAIN,
    "remainder16, 8-bit moments": dict(main_params_dtype="remainder16") | EIGHT,
    "bf16 parameters, stochastic, 8-bit moments": EIGHT,
    "remainder16, 16-bit moments": dict(main_params_dtype="remainder16") | BLOCK16,
    "bf16 parameters, stochastic, bf16 moments": SIXTEEN,
    PLANTED: MAIN,
}
EVALUATIONS = 8
LOSS_BOUND = 0.01
"""Nats: the whole interval of the mean difference must be inside."""
T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}
"""Student's t for 95 % and this many seeds."""


def with_sqrt_in_8_bits(state):
    """Rounds the second moments of a state to 256 steps of their square root, by blocks of 128."""

    def rounded(v):
        if v.size < 4096:
            return v
        root = jnp.sqrt(jnp.pad(v.reshape(-1), (0, -v.size % 128)).reshape(-1, 128))
        largest = jnp.max(root, axis=1, keepdims=True)
        codes = jnp.round(root / jnp.where(largest > 0, largest, 1) * 255)
        return jnp.square(codes / 255 * largest).reshape(-1)[: v.size].reshape(v.shape)

    adam, *others = state.inner
    return state._replace(inner=(adam._replace(nu=jax.tree.map(rounded, adam.nu)), *others))


def make_step(args, way, loss):
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, args.learning_rate, args.steps // 10, args.steps
    )
    tx = jda.fused_adamw(schedule, b1=0.9, b2=0.99, weight_decay=0.1, **WAYS[way])

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, tokens):
        grads = jax.grad(loss)(params, tokens)
        params, state = tx.step(grads, state, params)
        return params, with_sqrt_in_8_bits(state) if way == PLANTED else state

    return tx, step


def train(args, config, way, steps, seed, texts, model, evaluate):
    """Returns the validation loss, the exact parameters before and after."""
    tokens = jnp.zeros((1, config.length), jnp.int32)
    exact = model.init(jax.random.key(seed), tokens)["params"]
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), exact)
    before = jax.tree.map(lambda x: np.asarray(x, np.float32), params)
    tx, step = steps[way]
    state = tx.init(params)
    if way == AGAIN:
        main = jax.tree.map(lambda x: x * (1 + 2.0**-20), state.main_params)
        state = state._replace(main_params=main)
    rng = np.random.default_rng(seed)
    for _ in range(args.steps):
        batch = corpus.batch(texts[0], config.batch, config.length, rng)
        params, state = step(params, state, batch)
    held_out = np.random.default_rng(0)
    losses = [
        float(evaluate(params, corpus.batch(texts[1], config.batch, config.length, held_out)))
        for _ in range(EVALUATIONS)
    ]
    after = jda.main_params(params, state) if "main_params_dtype" in WAYS[way] else params
    return statistics.mean(losses), before, jax.tree.map(lambda x: np.asarray(x, np.float32), after)


def norm_of_difference(x, y):
    squares = jax.tree.map(lambda a, b: float(np.sum(np.square(a - b), dtype=np.float64)), x, y)
    return sum(jax.tree.leaves(squares)) ** 0.5


def summary(runs):
    """For each variant: mean difference of the loss, half its interval, mean distance."""
    found = {}
    for way in WAYS:
        seeds = [seed for seed in runs if way in runs[seed]]
        if way == FIRST or len(seeds) < 2:
            continue
        differences = [runs[s][way]["loss"] - runs[s][FIRST]["loss"] for s in seeds]
        half = T95[len(seeds)] * float(np.std(differences, ddof=1)) / len(seeds) ** 0.5
        mean = statistics.fmean(differences)
        found[way] = dict(
            mean_difference=mean,
            half_interval=half,
            distance=statistics.mean(runs[s][way]["distance"] for s in seeds),
            loss_is_equal=abs(mean) + half < LOSS_BOUND,
        )
    return found


def table(results):
    """One line per variant."""
    rows = [
        (
            way,
            *(
                ("diverged", "-")
                if np.isnan(r["mean_difference"])
                else (
                    f"{r['mean_difference']:+.4f} ± {r['half_interval']:.4f}",
                    f"{r['distance']:.3f}",
                )
            ),
        )
        for way, r in results["summary"].items()
    ]
    return markdown.table(
        ("state", "validation loss minus that with float32 state, nats", "relative distance"), rows
    )


def main():
    parser = command_line.make_parser(__doc__)
    parser.add_argument("--preset", choices=gpt.PRESETS, default="tiny")
    for name in ("layers", "width", "length", "batch"):
        parser.add_argument(f"--{name}", type=int, help="in place of the preset's")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=4, choices=T95)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/low_precision.json"))
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    given = {k: getattr(args, k) for k in ("layers", "width", "length", "batch")}
    given = {k: x for k, x in given.items() if x is not None}
    config, texts = dataclasses.replace(gpt.PRESETS[args.preset], **given), corpus.load()
    compute = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    model = gpt.GPT(config, compute)
    loss = gpt.loss_fn(model)
    evaluate = jax.jit(loss)
    steps = {way: make_step(args, way, loss) for way in WAYS}  # compiled once for all seeds
    runs = {}
    for seed in range(args.seeds):
        runs[seed], first = {}, None
        for way in WAYS:
            got, before, after = train(args, config, way, steps, seed, texts, model, evaluate)
            first = first or after
            moved = norm_of_difference(first, before)
            distance = norm_of_difference(after, first) / moved
            runs[seed][way] = {"loss": got, "distance": distance}
            print(f"seed {seed}, {way}: loss {got:.4f}, distance {distance:.3f}", flush=True)
            results = dict(runs=runs, summary=summary(runs))
            report.write_run(args.out, args.revision, **results)  # after each: nothing is lost
    print(table(results))


if __name__ == "__main__":
    main()
