"""Files in the safetensors format: what cannot be written, and files that nobody should read."""

import json

import numpy as np
import pytest

import jdistadam as jda
from jdistadam import interop


@pytest.mark.parametrize(
    "tree",
    [
        {1: np.ones(2), "1": np.zeros(2)},
        {1: {"a": np.ones(2)}, "1": np.zeros(2)},
        {"a": {2: 5, "2": np.zeros(2)}},
        {1: 5, "1": 6},
    ],
)
def test_keys_that_are_written_alike_raise(tmp_path, tree):
    """One of the two was lost."""
    with pytest.raises(jda.TreeError, match=r"two keys are written alike: got '[12]'"):
        interop.write_safetensors(tmp_path / "x", tree)
    assert not (tmp_path / "x").exists()


def test_array_with_the_name_of_the_metadata_raises(tmp_path):
    with pytest.raises(jda.TreeError, match="'__metadata__': cannot be a part of a path"):
        interop.write_safetensors(tmp_path / "x", {"__metadata__": np.ones(2)})
    tree = {"a": {"__metadata__": np.ones(2)}, "__metadata__": "text"}
    interop.write_safetensors(tmp_path / "x", tree)
    got = interop.read_safetensors(tmp_path / "x")
    assert got["__metadata__"] == "text" and got["a"]["__metadata__"].tolist() == [1, 1]


def write(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def tensor(shape, end=0):
    return {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}


BAD = {
    "JSON nested too deeply": {"__metadata__": {"deep": "[" * 10**5 + "]" * 10**5}},
    "a number of too many digits": {"__metadata__": {"deep": "1" * 5000}},
    "a header nested too deeply": b'{"deep":' + b"[" * 10**5 + b"]" * 10**5 + b"}",
    "a shape beyond 64 bits": {"deep": tensor([2**64])},
    "a product of sizes beyond 64 bits": {"deep": tensor([2**40, 2**40], 8)},
    "an empty shape beyond 63 bits": {"deep": tensor([0, 2**63])},
    "a negative size": {"deep": tensor([-1])},
    "offsets beyond the file": {"deep": tensor([2], 8)},
    "offsets that do not fit the shape": {"deep": tensor([2], 4)},
    "no JSON": b"{",
}


@pytest.mark.parametrize("case", BAD)
def test_damaged_files_raise(tmp_path, case):
    path = tmp_path / "x.safetensors"
    write(path, BAD[case])
    with pytest.raises(jda.TreeError, match=r"x\.safetensors: .*not a file of the safetensors"):
        interop.read_safetensors(path)
