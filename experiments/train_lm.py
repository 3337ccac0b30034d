"""Trains a byte-level GPT on the source text of Python's standard library.

The main job of jdistadam: a Flax model, data parallel, its optimizer state sharded over all
devices. Without a GPU it runs on virtual CPU devices, in minutes; with GPUs it uses them.

    python experiments/train_lm.py                                    # 8 virtual CPU devices
    python experiments/train_lm.py --preset gpt2-small --steps 2000   # on GPUs
    python experiments/train_lm.py --optimizer optax                  # the same with optax.adamw
    python experiments/train_lm.py --optimizer optax_sharded          # its moments sharded by XLA
    python experiments/train_lm.py --model-axis 2                     # heads and MLP split by XLA
    python experiments/train_lm.py --strategy optim_grads_params --gathered-in-model    # ZeRO-3
    python experiments/train_lm.py --processes 4                      # one process for each GPU
    srun python experiments/train_lm.py --distributed                 # on many hosts
    python experiments/train_lm.py --save-every 100 --resume          # resumes after an end
    python experiments/train_lm.py --tensorboard runs/tensorboard     # loss, norm, rate and speed

With --save-every, SIGTERM ends the run after the current step: it saves, and exits with 75
(EX_TEMPFAIL of sysexits.h, "try again"). So the caller can tell a run to resume from one that
failed (1) or ended without a checkpoint (143). --resume continues from the newest checkpoint in the
folder of --out, if there is one, also on other devices, with another --strategy or --param-dtype.
On the same devices every loss has the bits of an uninterrupted run.
"""

import functools
import os
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from lm import corpus, gpt, options, processes, report
from lm.options import DTYPES
from tqdm import tqdm

import jdistadam as jda

CHECKPOINTS = "checkpoints"


def parse_args(argv=None):
    return options.parse(__doc__, argv)


def make_mesh(args):
    """Axes "replica" and "model" exist only if requested; the model's is the innermost."""
    # Auto axes, so optax and other jitted functions need no shardings.
    shape = {"replica": args.replicas} if args.replicas > 1 else {}
    shape["data"] = args.devices // args.replicas // args.model_axis
    shape |= {"model": args.model_axis} if args.model_axis > 1 else {}
    auto = (AxisType.Auto,) * len(shape)
    devices = jax.devices()[: args.devices]
    return jax.make_mesh(tuple(shape.values()), tuple(shape), auto, devices=devices)


def make_model(args, config, mesh):
    """Returns (model, params, specs): float32, and the axis over which each leaf is split."""
    model = gpt.GPT(config, DTYPES[args.param_dtype], args.scan, remat_policy=jda.remat_policy)
    tokens = jnp.zeros((1, config.length), jnp.int32)
    params = jax.jit(model.init)(jax.random.key(args.seed), tokens)["params"]  # float32
    if "model" not in mesh.axis_names:
        return model, params, jax.tree.map(lambda x: P(), params)
    return model.clone(axis="model"), params, gpt.partition_specs(params, "model")


def make_schedule(args):
    warmup = max(1, args.steps // 10)
    return optax.warmup_cosine_decay_schedule(
        0.0, args.learning_rate, warmup, args.steps, 0.1 * args.learning_rate
    )


def layers_of(path):
    """What the model gathers itself: layers of a scan, or blocks."""
    return "scan" if "layers" in path else "block" if "block_" in path else None


def matrices(params):
    """Which leaves have more than one dimension, unlike biases and norm scales, in one layer."""

    def is_matrix(path, x):
        return len(x.shape) > (2 if layers_of(jax.tree_util.keystr(path)) == "scan" else 1)

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def setup_jdistadam(args, mesh, model, params, specs):
    """Returns (state, step, loss_of): sharded optimizer state, explicit collectives.

    Main parameters start with the float32 values; the model computes with their rounded ones.
    """
    gathers_scanned = args.scan and args.strategy == "optim_grads_params"
    policy = jda.MixedPrecisionPolicy(
        main_grads_dtype=DTYPES[args.main_grads_dtype],
        grad_comm_dtype=DTYPES[args.grad_comm_dtype],
        grad_reduce_dtype=None if args.grad_reduce_dtype == "none" else args.grad_reduce_dtype,
    )
    adamw = jda.fused_adamw(
        make_schedule(args),
        b2=args.b2,
        weight_decay=0.1,
        mask=matrices,
        main_params_dtype=None if args.main_params_dtype == "none" else args.main_params_dtype,
        mu_dtype=args.mu_dtype,
        nu_dtype=args.nu_dtype,
        rounding=args.rounding,
        seed=args.seed if args.rounding == "stochastic" else None,
    )
    tx = jda.distributed(
        adamw,
        mesh=mesh,
        replica_axis="replica" if args.replicas > 1 else None,
        sharding_strategy=args.strategy,
        policy=policy,
        communication=args.communication,
        max_grad_norm=args.max_grad_norm,
        layers=layers_of if gathers_scanned or args.gathered_in_model else None,
        param_specs=specs if args.model_axis > 1 else None,
    )  # fmt: skip
    if gathers_scanned or args.gathered_in_model:
        model = model.clone(gather=functools.partial(jda.gather_params, tx=tx))
    loss = gpt.loss_fn(model)
    # Biases and norm scales are in float32: near 1, bfloat16 has steps of 1/128.
    low = DTYPES[args.param_dtype]
    dtypes = jax.tree.map(lambda is_matrix: low if is_matrix else jnp.float32, matrices(params))
    if can_resume(args):
        shapes = jda.TrainState.shapes(params, tx, param_dtypes=dtypes)
        state = jda.restore(args.out / CHECKPOINTS, shapes, tx)
    else:
        state = jda.TrainState.create(params, tx, param_dtypes=dtypes)
    args.checkpointer = make_checkpointer(args, tx)
    step = jda.train_step(
        loss, tx, accumulate_steps=args.accumulate_steps, report_nonfinite=args.report_nonfinite
    )
    args.bytes_sent = jda.plan(state.params, tx, accumulate_steps=args.accumulate_steps).bytes_sent
    evaluate = jda.eval_step(loss, tx)
    return state, step, lambda state, tokens: evaluate(state, tokens)[0]


def setup_optax(args, mesh, model, params, specs):
    """The same with optax.adamw: XLA inserts the collectives.

    The moments are placed like the parameters; for "optax_sharded" also over the data axis (ZeRO-1
    by annotations), if a dimension divides.
    """
    loss = gpt.loss_fn(model)
    schedule = make_schedule(args)
    tx = optax.chain(
        optax.clip_by_global_norm(args.max_grad_norm),
        optax.adamw(schedule, b2=args.b2, weight_decay=0.1, mask=matrices),
    )
    everywhere = NamedSharding(mesh, P())
    of_params = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    of_moments = of_params
    if args.optimizer == "optax_sharded":
        of_moments = jax.tree.map(
            lambda x, s: sharded_over_data(mesh, x, s.spec), params, of_params
        )
    of_state = optax.tree.map_params(
        tx, lambda _, sharding: sharding, jax.eval_shape(tx.init, params), of_moments,
        transform_non_params=lambda _: everywhere,
    )  # fmt: skip
    params = jax.device_put(params, of_params)
    state = {"params": params, "opt_state": jax.jit(tx.init, out_shardings=of_state)(params)}
    if can_resume(args):
        state = jda.restore(args.out / CHECKPOINTS, state)
    args.checkpointer = make_checkpointer(args)
    of_both = {"params": of_params, "opt_state": of_state}

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(of_both, everywhere))
    def update(state, tokens):
        params, opt_state = state["params"], state["opt_state"]
        value, grads = jax.value_and_grad(loss)(params, tokens)
        rate = schedule(opt_state[1][0].count)
        updates, opt_state = tx.update(grads, opt_state, params)
        metrics = {"loss": value, "grad_norm": optax.tree.norm(grads), "learning_rate": rate}
        return {"params": optax.apply_updates(params, updates), "opt_state": opt_state}, metrics

    @functools.partial(jax.jit, out_shardings=everywhere)
    def evaluate(state, tokens):
        return loss(state["params"], tokens)

    args.bytes_sent = None  # XLA decides
    return state, update, evaluate


def sharded_over_data(mesh, x, spec):
    """Adds the data axis to the largest free dimension that divides, if there is one."""
    entries = [*spec, *[None] * (x.ndim - len(spec))]
    count = mesh.shape["data"]
    free = [i for i in range(x.ndim) if entries[i] is None and x.shape[i] % count == 0]
    if free:
        entries[max(free, key=lambda i: x.shape[i])] = "data"
    return NamedSharding(mesh, P(*entries))


def can_resume(args):
    return args.resume and bool(jda.checkpoint_steps(args.out / CHECKPOINTS))


def make_checkpointer(args, tx=None):
    if not args.save_every:
        return None
    folder = args.out / CHECKPOINTS
    if not args.resume and jda.checkpoint_steps(folder):
        sys.exit(f"{folder} has checkpoints: add --resume, or choose another --out")
    return jda.Checkpointer(folder, tx, every=args.save_every, keep=2)


class Run:
    """The loop around a training step: batches, progress, metrics and validation."""

    def __init__(self, args, config, mesh):
        self.args, self.config, self.mesh = args, config, mesh
        self.train_text, self.validation_text = corpus.load()
        text = np.concatenate([self.train_text, self.validation_text])
        self.entropy = corpus.bigram_entropy(text)
        self.zlib_entropy = corpus.zlib_entropy(text)
        self.metrics_path = args.out / "metrics.jsonl"
        resumed = jda.checkpoint_steps(args.out / CHECKPOINTS) if can_resume(args) else [0]
        self.first = resumed[-1]  # the last step taken before
        self.metrics = (
            report.MetricsFile(self.metrics_path, self.first, args.tensorboard)
            if processes.is_first()
            else report.MetricsFile(pathlib.Path(os.devnull))
        )
        self.last: dict[str, float] = {}  # the last value of each metric
        self.validation_loss = float("nan")
        self.tokens_per_step = config.batch * config.length
        self.tokens_per_second = 0.0

    def place(self, tokens):
        """Puts on each device of this process its part of the batch, which all processes draw."""
        names = tuple(name for name in self.mesh.axis_names if name != "model")
        sharding = NamedSharding(self.mesh, P(names if len(names) > 1 else names[0]))
        return jax.make_array_from_callback(tokens.shape, sharding, lambda where: tokens[where])

    def evaluate(self, step, state, loss_of, num_batches=4):
        """Mean loss over the same windows of the held-out files at every call."""
        rng = np.random.default_rng(1234)
        losses = []
        for _ in range(num_batches):
            tokens = corpus.batch(self.validation_text, self.config.batch, self.config.length, rng)
            losses.append(loss_of(state, self.place(tokens)))
        self.validation_loss = float(np.mean(losses))
        self.write(step, validation_loss=self.validation_loss)

    def write(self, step, **values):
        self.metrics.write(step=step, tokens=step * self.tokens_per_step, **values)
        self.last |= values

    def train(self, state, step_fn, loss_of):
        """Trains to the last step; returns the state."""
        args = self.args
        rng = np.random.default_rng(args.seed)
        eval_every = max(1, args.steps // args.evals)
        seconds = 0.0  # of training, without compilation and evaluation
        kind = self.mesh.devices.flat[0].device_kind
        label = f"{args.devices} x {kind}"
        for _ in range(self.first):  # skips batches of earlier training
            corpus.batch(self.train_text, self.config.batch, self.config.length, rng)
        stop = processes.StopSignal() if args.checkpointer else None
        # A bar on a terminal; otherwise a line per evaluation.
        hidden = None if processes.is_first() else True
        with tqdm(
            total=args.steps, initial=self.first, unit="step", desc=label, disable=hidden
        ) as bar:
            start = time.perf_counter()
            for i in range(self.first + 1, args.steps + 1):
                tokens = corpus.batch(self.train_text, self.config.batch, self.config.length, rng)
                state, metrics = step_fn(state, self.place(tokens))
                if i == self.first + 1:
                    jax.block_until_ready(metrics)
                    start = time.perf_counter()  # compiled
                if i % 10 == 0 or i == args.steps:
                    self.report(bar, i, metrics, lambda: seconds + time.perf_counter() - start)  # noqa: B023
                bar.update()
                if i % eval_every == 0 or i == args.steps:
                    jax.block_until_ready(state)
                    seconds += time.perf_counter() - start
                    self.evaluate(i, state, loss_of)
                    if bar.disable and processes.is_first():
                        line = ", ".join(f"{k} {v}" for k, v in report.shown(self.last).items())
                        print(f"step {i} of {args.steps}: {line}", flush=True)
                    start = time.perf_counter()
                if args.checkpointer:
                    self.save(i, state, stop.is_set(i))
        return state

    def save(self, step, state, stops):
        """Saves every so many steps, after the last one, and when the run should stop."""
        checkpointer = self.args.checkpointer
        saved = checkpointer.after_step(step, state)
        if (stops or step == self.args.steps) and not saved:
            checkpointer.save(state, step=step)
        if stops or step == self.args.steps:
            checkpointer.close()
        if stops and step < self.args.steps:
            self.metrics.close()
            print(f"saved step {step}; --resume goes on from there", flush=True)
            sys.exit(processes.TRY_AGAIN)

    def report(self, bar, step, metrics, elapsed):
        values = {f"train_{k}": float(v) for k, v in metrics.items() if v.shape == ()}  # waits
        self.tokens_per_second = (step - self.first - 1) * self.tokens_per_step / elapsed()
        peak = report.peak_bytes(jax.local_devices()[0])
        if peak is not None:
            values["peak_bytes"] = peak
        self.write(step, tokens_per_second=self.tokens_per_second, **values)
        bar.set_postfix(report.shown(self.last))


def main(argv=None):
    args = parse_args(argv)
    if args.processes and not args.distributed:
        sys.exit(processes.launch(args.processes, sys.argv))
    if args.distributed:
        processes.join(args.distributed, args.devices)
    else:
        jax.config.update("jax_num_cpu_devices", args.devices or 8)
    config = options.resolve(args)
    mesh = make_mesh(args)
    model, params, specs = make_model(args, config, mesh)
    # optax has no main parameters: its params stay float32, and the model casts them.
    setup = setup_jdistadam if args.optimizer == "jdistadam" else setup_optax
    state, step, loss_of = setup(args, mesh, model, params, specs)

    run = Run(args, config, mesh)
    print_first = print if processes.is_first() else lambda text: None
    print_first(
        f"{len(run.train_text) / 1e6:.1f} MB of source text, "
        f"{len(run.validation_text) / 1e6:.2f} MB held out; "
        f"bigram entropy {run.entropy:.3f} nats per byte, zlib -9 {run.zlib_entropy:.3f}"
    )
    with jax.set_mesh(mesh):  # for the model's constraints
        state = run.train(state, step, loss_of)
    run.metrics.close()
    if processes.is_first():
        write_report(run, state, params)


def write_report(run, state, params):
    """Plots, tables and the record of the run."""
    args = run.args
    marks = {"bigram entropy of the text": run.entropy, "zlib -9": run.zlib_entropy}
    report.plot_loss(run.metrics_path, args.out / "loss.png", marks)
    memory = None
    if args.optimizer == "jdistadam":
        memory = report.print_memory(state.opt_state, state.params, args.devices)
    report.write_run(
        args.out / "run.json",
        args.revision,
        preset=args.preset,
        optimizer=args.optimizer,
        devices=args.devices,
        processes=jax.process_count(),
        replicas=args.replicas,
        model_axis=args.model_axis,
        strategy=args.strategy if args.optimizer == "jdistadam" else None,
        parameters=sum(x.size for x in jax.tree.leaves(params)),
        validation_loss=run.validation_loss,
        bigram_entropy=run.entropy,
        zlib_entropy=run.zlib_entropy,
        tokens=args.steps * run.tokens_per_step,
        tokens_per_second=run.tokens_per_second,
        optimizer_bytes_per_device=memory,
        bytes_sent_per_device=args.bytes_sent,
        state_bytes_per_device=report.bytes_on_first_device(state),
        peak_bytes_per_device=report.peak_bytes(jax.local_devices()[0]),
        seed=args.seed,
    )
    verdict = "below" if run.validation_loss < run.entropy else "NOT below"
    print(f"validation loss {run.validation_loss:.3f} nats per byte, {verdict} the bigram entropy")
    print(f"wrote {run.metrics_path} and {args.out / 'loss.png'}")


if __name__ == "__main__":
    main()
