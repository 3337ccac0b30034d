"""ResNets in Flax: images (batch, height, width, channels), batch norm, residual blocks."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import optax


@dataclasses.dataclass(frozen=True)
class ResNetConfig:
    """Sizes of a model and of its images."""

    blocks: tuple[int, ...]
    width: int
    classes: int
    image: tuple[int, int, int]


PRESETS = {
    "tiny": ResNetConfig((1, 1, 1, 1), 8, 10, (32, 32, 3)),
    "resnet50": ResNetConfig((3, 4, 6, 3), 64, 1000, (224, 224, 3)),
}


class Block(nn.Module):
    """A 3 x 3 convolution between two of 1 x 1, with a residual."""

    width: int
    stride: int
    conv: Any
    norm: Any

    @nn.compact
    def __call__(self, x):
        out = 4 * self.width
        stride = (self.stride, self.stride)
        y = nn.relu(self.norm()(self.conv(self.width, (1, 1))(x)))
        y = nn.relu(self.norm()(self.conv(self.width, (3, 3), stride)(y)))
        y = self.conv(out, (1, 1))(y)
        y = self.norm(scale_init=nn.initializers.zeros)(y)
        if x.shape != y.shape:
            x = self.norm()(self.conv(out, (1, 1), stride)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Maps images to logits, float32; statistics of batches are in ``batch_stats``."""

    config: ResNetConfig
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        c = self.config
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(
            nn.BatchNorm, use_running_average=False, momentum=0.9, dtype=self.dtype
        )
        x = nn.relu(norm()(conv(c.width, (7, 7), (2, 2))(x.astype(self.dtype))))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for i, count in enumerate(c.blocks):
            for j in range(count):
                stride = 2 if i and not j else 1
                x = Block(c.width << i, stride, conv, norm)(x)
        return nn.Dense(c.classes, dtype=self.dtype)(x.mean((1, 2))).astype(jnp.float32)


def loss_of(model):
    """Returns ``loss(params, batch, model_state)``, as ``train_step`` takes it."""

    def loss(params, batch, model_state):
        variables = {"params": params, "batch_stats": model_state}
        logits, new = model.apply(variables, batch["image"], mutable=["batch_stats"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return jnp.mean(losses), new["batch_stats"]

    return loss
