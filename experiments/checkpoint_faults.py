"""Damages a checkpoint in many ways and counts the outcomes of a restore.

    python experiments/checkpoint_faults.py --out runs/checkpoint_faults.json

"error": CheckpointError that names the folder. "same": exactly the saved state, because the damaged
part is not read. Anything else ends the script. The cases are those of tests/checkpoint.
"""

import pathlib
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from lm import command_line, report

import jdistadam as jda

FLIPS = 200  # in the data, and as many elsewhere
SHAPES = {"a": (256, 128), "b": (128, 256), "bias": (5,), "empty": (0, 2)}


def make_state():
    mesh = jax.make_mesh((2,), ("data",))
    tx = jda.distributed(jda.fused_adamw(1e-3), mesh=mesh, bucket_bytes=64)
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    step = jda.train_step(
        lambda p, x: sum(jnp.sum(jnp.sin(w.astype(jnp.float32))) for w in p.values()) * jnp.mean(x),
        tx,
    )
    state = jda.TrainState.create(params, tx, param_dtypes=jnp.bfloat16)
    for i in range(3):
        state, _ = step(state, np.float32([i + 1, i + 2]))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    return tx, state, jda.TrainState.shapes(shapes, tx, param_dtypes=jnp.bfloat16)


class Faults:
    def __init__(self, folder):
        self.folder = folder
        self.tx, state, self.shapes = make_state()
        jda.save(folder, state, self.tx)
        self.want = self.bits(state)
        self.counts = {}

    def bits(self, state):
        leaves = jax.tree.leaves(jda.to_optax_state(state, self.tx)[:2])
        return [np.asarray(x).tobytes() for x in leaves]

    def count(self, fault, path, damaged):
        """Replaces a file's bytes or removes it; restores; and puts it back."""
        data = path.read_bytes()
        path.unlink() if damaged is None else path.write_bytes(damaged)
        try:
            got = self.bits(jda.restore(self.folder, self.shapes, self.tx))
            outcome = "same" if got == self.want else sys.exit(f"{fault} of {path}: another state")
        except jda.CheckpointError as error:
            outcome = "error" if str(self.folder) in str(error) else sys.exit(f"no folder: {error}")
        path.write_bytes(data)
        row = self.counts.setdefault(fault, {"cases": 0, "error": 0, "same": 0})
        row["cases"] += 1
        row[outcome] += 1


def flipped(data, rng):
    data = bytearray(data)
    data[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
    return bytes(data)


def main():
    parser = command_line.make_parser(__doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 2)
    rng = np.random.default_rng(1)
    with tempfile.TemporaryDirectory() as folder:
        faults = Faults(pathlib.Path(folder))
        files = sorted(x for x in faults.folder.rglob("*") if x.is_file() and x.stat().st_size)
        large = max(files, key=lambda path: path.stat().st_size)
        for i in range(FLIPS):
            faults.count("bit flipped in the arrays' data", large, flipped(large.read_bytes(), rng))
            path = files[i % len(files)]
            faults.count("bit flipped in some file", path, flipped(path.read_bytes(), rng))
        for path in files:
            data = path.read_bytes()
            faults.count("file missing", path, None)
            faults.count("file empty", path, b"")
            faults.count("file cut in half", path, data[: len(data) // 2])
            faults.count("last byte of a file missing", path, data[:-1])
    report.write_run(args.out, args.revision, files=len(files), faults=faults.counts)
    for fault, row in faults.counts.items():
        print(f"| {fault} | {row['cases']} | {row['error']} error, {row['same']} same |")


if __name__ == "__main__":
    main()
