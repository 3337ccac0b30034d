"""Random configurations of a distributed optimizer, compared with the reference bit for bit.

A configuration combines features: its first placement and the one to which it moves (mesh, model
axis, strategy, stacked leaves, ... or ``fused_adamw`` on one device), and how steps are computed
(groups, mask, chain, dtypes, codes, rounding, micro-batches, loss scale, clipping). ``draw`` makes
one from a seed, and ``run`` raises AssertionError if a bit differs. The reference, in
reference_training.py, has unsharded arrays and no meshes.

Run a range of seeds, which resumes after the last one in its log:

    PYTHONPATH=tests python -m support.differential --seeds 0:300 --log differential.jsonl
"""

import argparse
import collections
import contextlib
import functools
import json
import math
import pathlib
import tempfile
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from jdistadam.checkpoint.parts import adam_of
from jdistadam.distributed import calls, host_memory
from support.bits import assert_same_bits, assert_trees_same_bits
from support.configurations import (
    GROUPS,
    MEMORY,
    MESHES,
    SHAPES,
    SPIKE,
    SPIKES,
    STEPS,
    draw,
    each_leaf,
    group_of_norms,
    is_gathered_in_model,
    layers_of,
)
from support.norms import assert_near
from support.optimizers import distributed_adam, distributed_adamw
from support.reference_training import SEED, Batch, Reference

calls.WINDOW = 4096  # elements, of which these states have more
host_memory.WINDOWS_BYTES = 1 << 16


def make_params(config):
    rng = np.random.default_rng(config.seed)
    shapes = {name: SHAPES[name] for name in config.names}
    return jax.tree.map(lambda s: np.float32(rng.normal(size=s)), shapes, is_leaf=_is_shape)


def _is_shape(x):
    return type(x) is tuple


def make_batch(config, place, step, like):
    """Gradients (devices, micro-batches, ...) of a step, with weights; in some, one is infinite.

    "exact": their sums are exact in every order, also in bfloat16, and so are those of squares.
    "any": none is subnormal in float16 behind a chain, if that would round it.
    """
    rng = np.random.default_rng([config.seed, step])
    devices, micro = (1, 1) if place is None else (place.devices, config.micro)
    is_guarded = config.norm_guard is not None and place is not None
    size = np.float32(SPIKE if is_guarded and step in SPIKES else 1)

    def one(x):
        shape = (devices, micro, *x.shape)
        if config.data == "exact":
            return np.float32(rng.integers(-1, 2, shape) * rng.integers(0, 2, shape)) / 64 * size
        x = rng.normal(size=shape) * 10.0 ** rng.integers(-3, 2, x.shape)
        return np.float32(np.copysign(np.maximum(np.abs(x), 2.0**-10), x)) * size

    grads, weights = jax.tree.map(one, like), None
    is_skipping = is_guarded or (config.scale is not None and place is not None)
    if step == config.skip and is_skipping:
        grads["matrix"][rng.integers(devices), rng.integers(micro), 5, 7] = np.inf
    if config.weighted and place is not None:
        weights = rng.integers(0, 3, (devices, micro)).astype(np.float32)
        for x in jax.tree.leaves(grads):
            x[weights == 0] = np.nan  # a mean over nothing
    return Batch(grads, weights)


def make_tx(config, place):
    """The optimizer for a place."""
    params = make_params(config)
    decays, labels = (each_leaf(f, params) for f in (config.decays, config.label))
    given = dict(config.hyper)
    if config.mask != "none":
        given["mask"] = decays if config.mask == "tree" else lambda p: each_leaf(config.decays, p)
    if config.groups != "none":
        by_size = config.groups == "size"
        given["param_labels"] = (lambda p: each_leaf(config.label, p)) if by_size else labels
        given["groups"] = {label: GROUPS[label] for label in sorted(set(jax.tree.leaves(labels)))}
    name = "fused_adam" if config.adam == "l2" else "fused_adamw"
    if place is None:
        tx = getattr(jda, name)(**given, **_low_precision(config))
    else:
        tx = (distributed_adam if config.adam == "l2" else distributed_adamw)(
            **given,
            **_low_precision(config),
            **_of_mesh(config),
            **_placing(place, params),
        )
    return tx if config.chain == "none" else jda.chain(_before(config.chain), tx)


def _low_precision(config):
    return dict(
        main_params_dtype=config.main,
        mu_dtype=config.mu,
        nu_dtype=config.nu,
        rounding=config.rounding,
        seed=SEED if config.rounding == "stochastic" else None,
        float32_moments=(lambda path: "block" in path) if config.float32_moments else None,
    )


def _of_mesh(config):
    """Arguments of only distributed optimizers that change bits."""
    policy = jda.MixedPrecisionPolicy(
        main_grads_dtype=config.main_grads,
        grad_comm_dtype=config.grad_comm,
        grad_reduce_dtype=config.grad_reduce,
        param_comm_dtype=config.param_comm,
    )
    return dict(
        policy=policy,
        max_grad_norm=config.clip,
        loss_scale=config.scale,
        average_grads=config.average,
        ema_decay=config.ema_decay,
        norm_guard=config.guard,
        norms=group_of_norms if config.norms == "groups" else config.norms,
    )


def _placing(place, params):
    mesh = MESHES[place.mesh]
    types = {"explicit": AxisType.Explicit, "auto": AxisType.Auto}
    devices = jax.devices("cpu")[: math.prod(mesh["shape"])]
    axis_types = (types[place.axes],) * len(mesh["names"])
    given = {name: value for name, value in mesh.items() if name.endswith("_axis")}
    if specs := place.specs_of_leaves:
        given["param_specs"] = each_leaf(lambda path, _: specs.get(path) or P(), params)
    return given | dict(
        mesh=jax.make_mesh(mesh["shape"], mesh["names"], axis_types, devices=devices),
        sharding_strategy=place.strategy,
        outer_sharding_strategy=place.outer,
        reshard_after_forward=place.reshard,
        reshard_after_backward=(lambda path: "matrix" not in path) if place.rests_whole else None,
        bucket_bytes=place.bucket_bytes,
        layers=layers_of(place) if place.stacked or place.gathered_in_model else None,
        communication=place.communication,
        state_memory=MEMORY.get(place.state_memory, place.state_memory),
        early_updates=place.early_updates,
    )


def _before(chain):
    """The transformation before the optimizer: linear in the gradients, with powers of two."""

    def by_signs(grads, state, params):
        def one(g, p):
            return g * jnp.exp2(-(jnp.sum(jnp.signbit(p)) % 3).astype(jnp.float32)).astype(g.dtype)

        return jax.tree.map(one, grads, params), state

    return {
        "scale": lambda: optax.scale(0.5),
        "schedule": lambda: optax.scale_by_schedule(lambda count: 0.5 ** (count % 2)),
        "masked": lambda: optax.masked(
            optax.scale(2.0), lambda p: each_leaf(lambda path, _: "matrix" in path, p)
        ),
        "params": lambda: optax.GradientTransformation(lambda params: optax.EmptyState(), by_signs),
    }[chain]()


MODEL_STATE = np.float32(0.5)


def next_model_state(old, batch):
    """The mean of what devices count in their last micro-batches of a weight above zero."""
    weights = np.ones(batch.grads["matrix"].shape[:2]) if batch.weights is None else batch.weights
    counted = [old] * len(weights)
    for device, micro in np.argwhere(weights > 0):
        counted[device] = np.sum(batch.grads["matrix"][device, micro] > 0)
    return np.mean(counted)


def nonfinite_devices(batch):
    """For each leaf, how many devices have a non-finite gradient in a micro-batch that counts."""

    def one(x):
        found = ~np.isfinite(x).all(axis=tuple(range(2, x.ndim)))
        return np.sum((found if batch.weights is None else found & (batch.weights > 0)).any(1))

    return np.asarray(jax.tree.leaves(jax.tree.map(one, batch.grads)))


def _split_dim(place, path):
    """The dimension along which devices have other parts of a leaf; None: they do not."""
    spec = place.specs_of_leaves.get(jax.tree_util.keystr(path), ())
    return next((dim for dim, axis in enumerate(spec) if axis), None)


def to_experts(place, path, x, weight):
    """What all devices of a group contribute to a part of a leaf, on the device that has it.

    Contributions are in a new dimension, behind that of scanned layers. What has no weight is not
    sent, as NaNs would reach others.
    """
    dim = _split_dim(place, path)
    if dim is None:
        return x
    x = x if weight is None else jnp.where(weight == 0, jnp.zeros((), x.dtype), x)
    n, shape = jax.lax.axis_size("expert"), x.shape
    x = x.reshape(*shape[:dim], n, shape[dim] // n, *shape[dim + 1 :])
    first = int(place.stacked and "layers" in jax.tree_util.keystr(path))
    return jax.lax.all_to_all(x, "expert", split_axis=dim, concat_axis=first)


def from_experts(place, path, x):
    """The whole of a leaf."""
    dim = _split_dim(place, path)
    return x if dim is None else jax.lax.all_gather(x, "expert", axis=dim, tiled=True)


@jax.custom_vjp
def _products(p, xs):
    return jnp.stack([jnp.tensordot(p.astype(jnp.float32), x, p.ndim) for x in xs])


def _products_backward(operands, cotangents):
    p, xs = operands
    terms = jax.vmap(jnp.multiply)(cotangents, xs)
    while len(terms) > 1:  # as a tree
        terms = terms[::2] + terms[1::2]
    return terms[0].astype(p.dtype), jnp.zeros_like(xs)


_products.defvjp(lambda p, xs: (_products(p, xs), (p, xs)), _products_backward)


def of_expert(p, xs):
    """The products of a part of a leaf, each of which goes back to the device that contributed."""
    return jnp.sum(jax.lax.all_to_all(_products(p, xs), "expert", 0, 0))


def make_loss(place, tx):
    """A loss whose gradient is the batch, and which reports its params.

    Early updates run between products, such as those of matrices. The float of a model state
    becomes an integer.
    """

    def product(p, x):
        p = p.astype(jnp.float32)
        return jnp.sum(p * x) if place.has_model_axis else jnp.tensordot(p, x, p.ndim)

    def total(params, x):
        products = jax.tree.map(
            lambda p, x: (of_expert if x.ndim > p.ndim else product)(p, x), params, x
        )
        return sum(jax.tree.leaves(products), jnp.float32(0))

    @functools.partial(jax.checkpoint, policy=jda.remat_policy)
    def body(loss, part_and_x):
        part = jda.gather_params(part_and_x[0], tx)
        return loss + total(part, part_and_x[1]), part

    def loss_of(params, x):
        seen, loss = {}, jnp.float32(0)
        scanned = [(tree.pop("layers") if place.stacked else None) for tree in (params, x)]
        if place.gathered_in_model:
            names = [name for name in params if is_gathered_in_model(name)]
            parts = [{name: tree.pop(name) for name in names} for tree in (params, x)]
            loss, seen = body(loss, parts)
        loss, seen = loss + total(params, x), seen | params
        if place.stacked:
            loss, seen["layers"] = jax.lax.scan(body, loss, scanned)
        return loss, seen

    def loss_fn(params, batch, model_state=None):
        x = jax.tree.map(lambda x: x[0], batch.grads)
        if place.has_experts:
            weight = None if batch.weights is None else batch.weights[0]
            sent = jax.tree_util.tree_map_with_path(
                lambda path, x: to_experts(place, path, x, weight), x
            )
            loss, seen = loss_of(dict(params), sent)
            seen = jax.tree_util.tree_map_with_path(
                lambda path, x: from_experts(place, path, x), seen
            )
        else:
            loss, seen = loss_of(dict(params), dict(x))
        new = () if model_state is None else (jnp.sum(x["matrix"] > 0),)
        return loss if batch.weights is None else (loss, batch.weights[0]), *new, seen

    return loss_fn


class NotSupported(Exception):
    """A PolicyError before the first step in a place; any other error is a fault.

    Trees, meshes and numbers are all valid: only settings may be incompatible.
    """


@contextlib.contextmanager
def may_raise():
    try:
        yield
    except (jda.PolicyError, jda.DtypeError) as error:
        raise NotSupported(str(error)) from error


def _is_key(path):
    return path.endswith("key")


def _is_average(path):
    return path.startswith("ema")


class OnMesh:
    """Training over a mesh: makes, steps, moves and compares a state."""

    def __init__(self, config, place, params, dtypes, **kwargs):
        self.config, self.place, self.dtypes = config, place, dtypes
        self.tx = make_tx(config, place)
        self.mesh = self.tx.config.mesh
        self.train_step = jda.train_step(
            make_loss(place, self.tx),
            self.tx,
            accumulate_steps=config.micro,
            has_aux=True,
            weighted=config.weighted,
            report_nonfinite=config.reports,
            **kwargs,
        )
        self.shapes = jda.TrainState.shapes(params, self.tx, param_dtypes=dtypes)

    def create(self, params):
        self.state = jda.TrainState.create(params, self.tx, param_dtypes=self.dtypes)
        self.keep_model_state()

    def keep_model_state(self):
        if self.config.reports:
            self.state = self.state.replace(model_state=jnp.asarray(MODEL_STATE))

    def step(self, batch, reference):
        """Takes a step, as the reference does; returns the metrics."""
        rows = jax.tree.map(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), batch)
        model_state, count = jax.device_get(self.state.model_state), reference.count
        self.state, metrics = self.train_step(self.state, rows)
        metrics = jax.device_get(metrics)
        seen = metrics.pop("aux")
        if self.is_rounded(reference):  # a row per device and micro-batch
            repeat = lambda p, x: np.broadcast_to(p, x.shape)  # noqa: E731
            want = jax.tree.map(repeat, reference.params(), seen)
            assert_trees_same_bits(seen, want, "what the loss got")
        want = reference.step(self.place, batch)
        if self.config.reports:
            np.testing.assert_array_equal(metrics.pop("nonfinite"), nonfinite_devices(batch))
            is_taken = reference.count > count
            new = next_model_state(model_state, batch) if is_taken else model_state
            np.testing.assert_allclose(self.state.model_state, new, rtol=1e-6)
        assert metrics.keys() == want.keys() | {"loss"}
        for name, x in want.items():
            if "_norm" in name and (name != "grad_norm" or self.config.data == "any"):
                assert_near(metrics[name], x, name)
            elif np.isfinite(x):
                assert_same_bits(metrics[name], np.asarray(x, metrics[name].dtype), name)
        return metrics

    def is_rounded(self, reference):
        """Before the first step the strategy determines whether params are rounded for sending."""
        return reference.count > 0 or self.config.param_comm is None

    def move(self, folder, before):
        self.restore(folder, before)
        self.keep_model_state()

    def restore(self, folder, before):
        if self.config.move == "converted":
            main, opt_state, extra = jda.to_optax_state(before.state, before.tx)
            self.state = jda.from_optax_state(
                main, opt_state, self.tx, extra, param_dtypes=self.dtypes
            )
            return
        jda.save(folder, before.state, before.tx if before.place else None)
        unused, new = (None, None) if before.place else (_is_key, _is_average)
        self.state = jda.restore(folder, self.shapes, self.tx, unused=unused, new=new)

    def compare(self, reference):
        main, opt_state, extra = jda.to_optax_state(self.state, self.tx)
        assert int(extra.step) == reference.count
        compare(main, opt_state, reference)
        if self.config.ema_decay is not None:
            assert_trees_same_bits(extra.ema, reference.floats("ema"), "ema")
        compare_guards(extra.guard, reference)
        if self.is_rounded(reference):
            full = jda.full_params(self.state, self.tx)
            assert_trees_same_bits(full, reference.params(), "full_params")
        for x in jax.tree.leaves((self.state.params, self.state.opt_state)):
            copies = {}
            for shard in x.addressable_shards:
                first = copies.setdefault(str(shard.index), shard.data)
                assert_same_bits(shard.data, first, "copies on two devices")


class DropIn:
    """Training by ``fused_adamw`` on one device."""

    place = None

    def __init__(self, config, place, params, dtypes):
        self.tx, self.dtypes = make_tx(config, place), dtypes
        self.jitted = jax.jit(self.tx.step)
        self.create(params)

    def create(self, params):
        params = jax.tree.map(lambda x, t: jnp.asarray(x.astype(t)), params, self.dtypes)
        self.state = {"params": params, "opt_state": self.tx.init(params)}

    def step(self, batch, reference):
        given = batch.grads
        grads = jax.tree.map(lambda x, t: jnp.asarray(x[0, 0].astype(t)), given, self.dtypes)
        params, opt_state = self.jitted(grads, self.state["opt_state"], self.state["params"])
        self.state = {"params": params, "opt_state": opt_state}
        reference.step(None, batch)

    def move(self, folder, before):
        jda.save(folder, before.state, before.tx)
        self.state = jda.restore(folder, self.state, new=_is_key, unused=_is_average)

    def compare(self, reference):
        params, opt_state = self.state["params"], self.state["opt_state"]
        assert_trees_same_bits(params, reference.params(), "params")
        compare(jda.main_params(params, opt_state), jda.decoded(opt_state), reference)


def compare(main, opt_state, reference):
    adam = adam_of(opt_state)
    for name, got in (("main_params", main), ("mu", adam.mu), ("nu", adam.nu)):
        want = reference.floats(name)
        got = jax.tree.map(_as_float32, want, got)
        assert_trees_same_bits(got, want, name)
    assert int(adam.count) == reference.count


def compare_guards(got, want):
    """Compares the state of a guard, or None, with that of training: counts bit for bit.

    The mean, too, if norms are exact, but for a product that a compiler may leave unrounded;
    otherwise their sums are in another order.
    """
    assert (got is None) == (want.config.norm_guard is None)
    if got is not None:
        mean, guard = np.asarray(got.mean), want.guard
        if want.config.data == "exact":
            distance = abs(np.float64(mean) - np.float64(guard.mean))
            assert distance <= guard.unrounded, f"mean of norms: got {mean}, not {guard.mean}"
        else:
            assert_near(mean, np.asarray(guard.mean), "mean of norms")
        for name in ("steps", "spikes", "nonfinite"):
            assert int(getattr(got, name)) == getattr(want.guard, name), name


def _as_float32(want, got):
    """Zeros for a frozen leaf without moments on one device: its moments on other meshes."""
    is_frozen = isinstance(got, optax.MaskedNode)
    return np.zeros_like(want) if is_frozen else np.asarray(got, np.float32)


def run(config):
    """Steps a configuration and the reference, and compares them.

    Raises:
      NotSupported: The package does not support the configuration.
      AssertionError: Something differs, or another error was raised; it names the configuration.
    """
    try:
        params = make_params(config)
        dtypes = each_leaf(lambda path, _: config.dtype_of(path), params)
        with may_raise():
            trained = [
                (OnMesh if place else DropIn)(config, place, params, dtypes)
                for place in config.places
            ]
            trained[0].create(params)
        if config.places[0] is None:  # its main parameters start with the values of params
            params = jax.tree.map(np.float32, trained[0].state["params"])
        _steps(config, trained, Reference(config, params))
    except NotSupported:
        raise
    except Exception as error:
        raise AssertionError(f"seed {config.seed}, {config}: {error}") from error


def _steps(config, trained, reference):
    params, first = reference.floats("main_params"), 0
    for one, before, steps in zip(trained, (None, *trained), STEPS, strict=False):
        if before is not None:
            if before.place:  # moves are of the optimizer's state
                before.state = before.state.replace(model_state=None)
            with tempfile.TemporaryDirectory() as folder:
                one.move(folder, before)
            if before.place is None:
                reference.begin()
            one.compare(reference)
        for i in range(first, first + steps):
            with may_raise() if i == first else contextlib.nullcontext():
                one.step(make_batch(config, one.place, i, params), reference)
        one.compare(reference)
        first += steps


def outcome(seed):
    """Runs a seed; returns "passed", "not supported" or "failed", and the message."""
    try:
        run(draw(seed))
    except NotSupported as error:
        return "not supported", str(error)
    except AssertionError:
        return "failed", traceback.format_exc()
    finally:
        jax.clear_caches()
    return "passed", ""


def main():
    """Resumes after the last seed in the log; one that crashed the process counts as failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:300", help="first:end")
    parser.add_argument("--log", type=pathlib.Path, required=True)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_numpy_rank_promotion", "raise")
    lines = args.log.read_text().splitlines() if args.log.exists() else []
    done = {row["seed"]: row for row in map(json.loads, lines)}
    with args.log.open("a") as log:
        for seed in range(*map(int, args.seeds.split(":"))):
            if seed in done:
                continue
            row = dict(seed=seed, outcome="failed", message="the process ended")
            print(json.dumps(row), file=log, flush=True)
            start = time.perf_counter()
            row["outcome"], row["message"] = outcome(seed)
            row["seconds"] = round(time.perf_counter() - start, 1)
            print(json.dumps(row), file=log, flush=True)
            done[seed] = row
            print(seed, row["outcome"], row["seconds"], row["message"][-300:], flush=True)
    print(collections.Counter(row["outcome"] for row in done.values()))
    rows = [row for row in done.values() if row["outcome"] == "not supported"]
    for message, count in collections.Counter(row["message"] for row in rows).most_common():
        print(count, message)
    print("failed:", *(seed for seed, row in done.items() if row["outcome"] == "failed"))


if __name__ == "__main__":
    main()
