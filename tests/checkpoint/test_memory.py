"""Memory of the host: what a save and a restore take beside the state, and that none is kept."""

import ctypes
import gc
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdistadam as jda
from jdistadam.checkpoint import storage
from support.optimizers import distributed_adamw

pytestmark = [
    pytest.mark.slow,  # how arrays go in batches is in test_round_trips.py
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
]

MIB = 1 << 20
DEVICES = 2
LEAF = 4 * MIB  # in float32
OTHER = 32 * MIB  # Python's objects, stacks, and what malloc keeps of freed pieces for each thread


def resident(field):
    """VmRSS: what this process has in memory. VmHWM: the most since it was reset."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def settled():
    """What this process has in memory, when what it has freed is given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident("VmRSS")


def peak_beside(function):
    """Returns the most memory that a function takes beside what was there before, and its result."""
    before = settled()
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
    result = function()
    return resident("VmHWM") - before, result


class MallocInfo(ctypes.Structure):
    """What mallinfo2 returns, of all threads."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]  # fmt: skip


def in_use():
    """Bytes that malloc has given out. What it keeps of freed ones differs from save to save."""
    gc.collect()
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = MallocInfo
    info = mallinfo2()
    return info.uordblks + info.hblkhd


def make_state(num_leaves):
    """A state of large leaves: bfloat16 params that both devices have, main_params, mu and nu."""
    mesh = jax.make_mesh((DEVICES,), ("data",), devices=jax.devices("cpu")[:DEVICES])
    tx = distributed_adamw(1e-3, mesh=mesh)
    shapes = {f"w{i}": jax.ShapeDtypeStruct((1024, 1024), jnp.float32) for i in range(num_leaves)}
    rng = np.random.default_rng(0)
    params = {name: rng.standard_normal(x.shape, np.float32) for name, x in shapes.items()}
    template = jda.TrainState.shapes(shapes, tx, param_dtypes=jnp.bfloat16)
    return tx, jda.TrainState.create(params, tx, param_dtypes=jnp.bfloat16), template


def test_peak_memory_is_a_few_batches_beside_the_state(tmp_path, monkeypatch):
    """Of a save a few batches; in the background one copy of the state; of a restore the new state.

    A save has two batches at a time, one that is made and one that is written, each at most three
    times: as arrays, as chunks, and as what is collected for a file. One in the background has what
    it writes once as arrays, and the newest batch thrice. A restore has the new state, with params
    on both devices, and a batch four times: as chunks, as what was read, as arrays, and as what is
    put into the state.
    """
    monkeypatch.setattr(storage, "BATCH_BYTES", 2 * MIB)  # of a device: as much as each leaf
    leaves = 16
    tx, state, template = make_state(leaves)
    flat = sum(x.nbytes for x in jax.tree.leaves(state.opt_state))
    params = sum(x.nbytes for x in jax.tree.leaves(state.params))
    assert flat // MIB == 3 * LEAF * leaves // MIB and params == LEAF * leaves // 2
    jda.save(tmp_path / "first", state, tx)  # compiles
    jax.block_until_ready(jda.restore(tmp_path / "first", template, tx))

    peak, _ = peak_beside(lambda: jda.save(tmp_path / "one", state, tx))
    assert LEAF < peak <= 2 * 3 * LEAF + OTHER < flat / 3

    with jda.Checkpointer(tmp_path / "two", tx) as checkpointer:

        def in_background():
            checkpointer.save(state)
            checkpointer.wait()

        peak, _ = peak_beside(in_background)
    assert LEAF < peak <= flat + params + 3 * LEAF + OTHER

    peak, new = peak_beside(lambda: jda.restore(tmp_path / "one", template, tx))
    largest = 3 * LEAF  # its main parameter and both moments are read at once
    assert peak - flat - DEVICES * params <= 4 * largest + OTHER
    del new


def test_thousands_of_steps_and_saves_leak_no_memory(tmp_path, steps=5_000):
    """Of a training that saves ten times in the background: its second half takes no more.

    A tolerance of 256 KiB is what the smallest leaks exceed: a copy of the state that each save left
    would be 5 times 3 LEAF, and 128 bytes that each step left 312 KiB. Steps leave no
    object of Python; a save leaves some hundreds of small ones, of 20 KiB, in TensorStore's metrics.
    """
    tx, state, _ = make_state(1)
    step = jda.train_step(lambda p, x: jnp.sum(p["w0"].astype(jnp.float32) ** 2) * jnp.mean(x), tx)
    every, memory, objects = steps // 10, [], []
    with jda.Checkpointer(tmp_path, tx, every=every, keep=2) as checkpointer:
        for i in range(1, steps + 1):
            state, _ = step(state, np.float32([i, 1]))
            if i % every == 0:
                objects.append(num_objects())
            if checkpointer.after_step(i, state):
                checkpointer.wait()
                memory.append(in_use())
                objects.append(num_objects())
        assert jda.checkpoint_steps(tmp_path) == [steps - every, steps]
    assert max(memory[5:]) - max(memory[:5]) <= MIB / 4, [x - memory[0] for x in memory]
    left = [after - before for before, after in zip(objects[1::2], objects[2::2], strict=False)]
    assert max(left[2:]) < every / 2, left


def num_objects():
    gc.collect()
    return sys.getallocatedblocks()
