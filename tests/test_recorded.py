"""What revision 073d8f6 trained and saved: the same bits now, and its checkpoints restore to them."""

import json
import zipfile

import jax
import numpy as np
import pytest

import jdistadam as jda
from support import recorded
from support.samples import few

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
DIGESTS = json.loads(recorded.DIGESTS.read_text())


def test_everything_is_recorded():
    assert set(DIGESTS) == set(recorded.CASES)
    assert set(recorded.FOLDER.glob("*.zip")) == set(recorded.checkpoints())


@few(1)
@pytest.mark.parametrize("name", recorded.CASES)
def test_ten_steps_have_the_bits_of_the_record(name):
    assert recorded.found_digest(name) == DIGESTS[name]


@few(1)
@pytest.mark.parametrize("file", recorded.checkpoints(), ids=lambda file: file.stem)
def test_a_checkpoint_restores_to_the_bits_of_the_record(file, tmp_path):
    zipfile.ZipFile(file).extractall(tmp_path)
    name = recorded.checkpoints()[file]
    tx, dtype = recorded.optimizer(name), recorded.CASES[name]["dtype"]
    params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, dtype), recorded.params_of(np.float32)
    )
    state = jda.restore(tmp_path, jda.TrainState.shapes(params, tx), tx)
    assert recorded.digest_of(state, tx) == DIGESTS[name]
