"""The ResNet with batch norm of experiments/train_resnet.py, small: it learns over 8 devices."""

import sys

import jax
import numpy as np

from support.bits import assert_same_bits
from support.paths import ROOT

sys.path.insert(0, str(ROOT / "experiments"))
import train_resnet


def test_resnet_learns_digits_and_devices_agree_on_batch_statistics(capsys):
    with jax.numpy_rank_promotion("allow"):  # Flax's batch norm relies on it
        losses, state = train_resnet.main(["--steps", "60", "--batch", "64"])
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.3
    assert float(capsys.readouterr().out.split()[-1]) > 0.5  # of ten digits; chance is 0.1
    statistics = state.model_state["BatchNorm_0"]
    assert state.params["Conv_0"]["kernel"].shape == (3, 3, 1, 16)  # height, width, channels
    assert statistics["mean"].shape == (16,)
    for x in jax.tree.leaves(state.model_state):
        of_devices = [np.asarray(shard.data) for shard in x.addressable_shards]
        assert len(of_devices) == 8 and np.ptp(of_devices[0]) > 0
        for other in of_devices[1:]:
            assert_same_bits(other, of_devices[0])
