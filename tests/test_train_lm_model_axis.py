"""The example language model, its heads and hidden units split over an axis of the mesh."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support.bits import assert_trees_same_bits
from support.paths import ROOT

sys.path.insert(0, str(ROOT / "experiments"))
import train_lm
from lm import gpt, report

import jdistadam as jda

WIDTH = 32
# Never clipped: a norm is a sum in the order of a layout.
SMALL = (
    "--layers", "1", "--width", str(WIDTH), "--batch", "16", "--steps", "6",
    "--learning-rate", "0.01", "--max-grad-norm", "1e6",
    "--grad-comm-dtype", "float16", "--grad-reduce-dtype", "float32", "--devices", "8",
)  # fmt: skip
SHARDED = ("--strategy", "optim_grads_params", "--width", "128", "--layers", "2")  # large enough


def run(batches, *options):
    """Losses of all steps, the params at the end, and bytes of params on a device and sent by it."""
    args = train_lm.parse_args([*SMALL, *options])
    config = dataclasses.replace(train_lm.options.resolve(args), length=16)
    mesh = train_lm.make_mesh(args)
    model, params, specs = train_lm.make_model(args, config, mesh)
    model, params = model.clone(dtype=jnp.float64), jax.tree.map(jnp.float32, params)
    state, step, _ = train_lm.setup_jdistadam(args, mesh, model, params, specs)
    losses = []
    with jax.set_mesh(mesh):
        for tokens in batches:
            state, metrics = step(state, tokens)
            losses.append(float(metrics["loss"]))
    trained = jax.device_get(jda.full_params(state, step.tx))
    return losses, trained, report.bytes_on_first_device(state.params), args.bytes_sent


@pytest.fixture
def batches(monkeypatch):
    """Six, of sixteen sequences each; the loss is an eighth of the model's."""
    whole_loss = gpt.loss_fn
    monkeypatch.setattr(gpt, "loss_fn", lambda model: lambda *args: whole_loss(model)(*args) / 8)
    rng = np.random.default_rng(3)
    return [rng.integers(97, 123, (16, 17), np.int32) for _ in range(6)]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        ("--strategy", "optim_grads"),
        ("--strategy", "optim_grads", "--scan"),
        SHARDED,
        (*SHARDED, "--scan"),
        (*SHARDED, "--gathered-in-model"),
    ],
)
@pytest.mark.slow
def test_a_split_model_trains_as_a_whole_one(batches, options, replicas):
    """4 x 2 devices, and 2 x 2 x 2, against 8: six steps with data of their own on all, in bits.

    Computed in float64, the gradient of two sequences is the same but for its last bits, in
    whatever order XLA sums over the model axis; sent as float16 it is the same. Numbers of float16
    are multiples of 2^-24, and float32 holds all of those below 1: so its sums over eight devices,
    or over four and two micro-batches, are exact in every order. An eighth of the loss keeps them
    there: absolute gradients of an element add up to at most 0.25 in the first step.
    """
    split = ("--model-axis", "2", "--accumulate-steps", "2", "--replicas", str(replicas))
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        want, whole, bytes_of_whole, _ = run(batches, *options)
        got, parts, bytes_of_parts, _ = run(batches, *options, *split)
    assert_trees_same_bits(parts, whole, "4 x 2")
    assert want[-1] < 0.9 * want[0]
    # A mean of at most eight losses in float32, each rounded once, on both sides.
    np.testing.assert_allclose(got, want, rtol=2 * 9 * 2.0**-24)
    if "optim_grads" in options:  # half of the matrices, and of the biases of heads and units
        assert bytes_of_whole - bytes_of_parts == (12 * WIDTH**2 + 7 * WIDTH) // 2 * 4
    else:
        total = sum(x.nbytes for x in jax.tree.leaves(whole))
        assert max(bytes_of_whole, bytes_of_parts) < total / 2


@pytest.mark.slow
def test_blocks_gathered_in_the_model_train_as_all_that_are_gathered_first(batches):
    """The same curve; each block is sent once more, for the backward pass.

    What is recomputed may be rounded otherwise, and so may a few of the gradients that are sent as
    float16: of 3e6 in two steps 15 were. A loss is a mean in float32 of eight devices.
    """
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        want, _, held_first, sent_first = run(batches, *SHARDED)
        got, _, held, sent = run(batches, *SHARDED, "--gathered-in-model")
    np.testing.assert_allclose(got, want, rtol=2 * 9 * 2.0**-24)
    assert held == held_first
    once_more = 2 * 12 * 128**2 * 4 * 7 / 8  # the matrices of two blocks in float32, of 8 devices
    assert once_more <= sent - sent_first < 1.01 * once_more


@pytest.mark.parametrize(
    "options, words",
    [
        (("--model-axis", "3"), "does not divide 8 devices"),
        (("--model-axis", "4", "--replicas", "4"), "does not divide 8 devices"),
        (("--model-axis", "0"), "does not divide 8 devices"),
        (("--model-axis", "8"), "does not divide 4 heads"),
        (("--gathered-in-model",), "add --strategy optim_grads_params"),
        ((*SHARDED, "--gathered-in-model", "--optimizer", "optax"), "are unsharded already"),
        ((*SHARDED, "--gathered-in-model", "--scan"), "leave one of the two out"),
    ],
)
def test_options_that_do_not_go_together_end_in_words(options, words):
    with pytest.raises(SystemExit, match=words):
        train_lm.options.resolve(train_lm.parse_args([*SMALL, *options]))
