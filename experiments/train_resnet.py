"""Trains a ResNet with batch norm.

    python experiments/train_resnet.py                       # handwritten digits: a minute on a CPU
    python experiments/train_resnet.py --preset resnet50 --batch 128 --steps 50    # on a GPU

The digits are scikit-learn's, 8 x 8; a fifth of them is for testing. The other presets train on
random images of their size.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from vision import resnet

import jdistadam as jda


def digits():
    """Returns images and labels for training, and others for testing; in random order."""
    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    images = (found.images[order, :, :, None] / 16).astype(np.float32)
    labels = found.target[order].astype(np.int32)
    last = len(labels) // 5 * 4
    return (images[:last], labels[:last]), (images[last:], labels[last:])


def random_images(config, count):
    rng = np.random.default_rng(0)
    images = rng.normal(size=(count, *config.image)).astype(np.float32)
    return images, rng.integers(config.classes, size=count).astype(np.int32)


def accuracy(model, params, stats, images, labels):
    predict = jax.jit(lambda x: model.apply({"params": params, "batch_stats": stats}, x, False))
    return float(np.mean(np.argmax(predict(images), 1) == labels))


def main(argv=None):
    """Trains as the command line says; returns the losses and the last state."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=resnet.PRESETS, default="digits")
    parser.add_argument("--dtype", default=None, help="of the model; default: bfloat16 on GPUs")
    parser.add_argument("--batch", type=int, default=64, help="images per step, over all devices")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--strategy", default="optim")
    args = parser.parse_args(argv)
    config = resnet.PRESETS[args.preset]
    dtype = args.dtype or ("bfloat16" if jax.default_backend() == "gpu" else "float32")
    model = resnet.ResNet(config, jnp.dtype(dtype))
    is_digits = args.preset == "digits"
    train, test = digits() if is_digits else (random_images(config, 2 * args.batch), None)

    variables = jax.jit(model.init)(jax.random.key(0), train[0][:1])
    params, stats = variables["params"], variables["batch_stats"]
    loss = resnet.loss_of(model)
    tx = jda.distributed(
        jda.fused_adamw(
            optax.warmup_cosine_decay_schedule(0.0, 3e-3, args.steps // 10, args.steps),
            weight_decay=1e-2,
            mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
        ),
        mesh=jax.sharding.Mesh(jax.devices(), ("data",)),
        sharding_strategy=args.strategy,
    )
    state = jda.TrainState.create(params, tx, model_state=stats)

    step = jda.train_step(loss, tx)
    rng, losses = np.random.default_rng(1), []
    began = time.perf_counter()
    for i in range(args.steps):
        rows = rng.choice(len(train[1]), args.batch, replace=False)
        state, metrics = step(state, {"image": train[0][rows], "label": train[1][rows]})
        losses.append(metrics["loss"])
        if i % max(1, args.steps // 10) == 0 or i == args.steps - 1:
            print(f"step {i + 1:4d}  loss {float(losses[-1]):.4f}", flush=True)
    rate = args.steps * args.batch / (time.perf_counter() - began)
    print(f"{rate:,.0f} images/s, with compiling")
    if test is not None:
        whole = jda.full_params(state, tx)
        print(f"test accuracy {accuracy(model, whole, state.model_state, *test):.3f}")
    return losses, state


if __name__ == "__main__":
    main()
