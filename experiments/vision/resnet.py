"""ResNets in Flax: images (batch, height, width, channels), batch norm, residual blocks."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax


@dataclasses.dataclass(frozen=True)
class ResNetConfig:
    """Sizes of a model and of its images."""

    blocks: tuple[int, ...]
    width: int
    classes: int
    image: tuple[int, int, int]
    is_deep: bool  # bottleneck blocks, and a stem of stride 4


PRESETS = {
    "digits": ResNetConfig((1, 1), 16, 10, (8, 8, 1), is_deep=False),
    "tiny": ResNetConfig((1, 1, 1, 1), 8, 10, (32, 32, 3), is_deep=True),
    "resnet50": ResNetConfig((3, 4, 6, 3), 64, 1000, (224, 224, 3), is_deep=True),
}


class Block(nn.Module):
    """Two 3 x 3 convolutions, or one between two of 1 x 1, with a residual."""

    width: int
    stride: int
    is_deep: bool
    conv: Any
    norm: Any

    @nn.compact
    def __call__(self, x):
        out = self.width * (4 if self.is_deep else 1)
        stride = (self.stride, self.stride)
        y = x
        if self.is_deep:
            y = nn.relu(self.norm()(self.conv(self.width, (1, 1))(y)))
        y = nn.relu(self.norm()(self.conv(self.width, (3, 3), stride)(y)))
        y = self.conv(out, (1, 1) if self.is_deep else (3, 3))(y)
        y = self.norm(scale_init=nn.initializers.zeros)(y)
        if x.shape != y.shape:
            x = self.norm()(self.conv(out, (1, 1), stride)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Maps images to logits, float32; statistics of batches are in ``batch_stats``."""

    config: ResNetConfig
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x, train=True):
        c = self.config
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(
            nn.BatchNorm, use_running_average=not train, momentum=0.9, dtype=self.dtype
        )
        if c.is_deep:
            x = nn.relu(norm()(conv(c.width, (7, 7), (2, 2))(x.astype(self.dtype))))
            x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        else:
            x = nn.relu(norm()(conv(c.width, (3, 3))(x.astype(self.dtype))))
        for i, count in enumerate(c.blocks):
            for j in range(count):
                stride = 2 if i and not j else 1
                x = Block(c.width << i, stride, c.is_deep, conv, norm)(x)
        return nn.Dense(c.classes, dtype=self.dtype)(x.mean((1, 2))).astype(jnp.float32)


def shapes_of(model):
    """Returns shapes of the params and of the batch statistics."""
    image = jax.ShapeDtypeStruct((1, *model.config.image), jnp.float32)
    found = jax.eval_shape(model.init, jax.random.key(0), image)
    return found["params"], found["batch_stats"]


def loss_of(model):
    """Returns ``loss(params, batch, model_state)``, as ``train_step`` takes it."""

    def loss(params, batch, model_state):
        variables = {"params": params, "batch_stats": model_state}
        logits, new = model.apply(variables, batch["image"], mutable=["batch_stats"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return jnp.mean(losses), new["batch_stats"]

    return loss
