"""Real text that every Python has: the source files of its standard library, as bytes."""

import pathlib
import sysconfig
import zlib

import numpy as np

VOCABULARY_SIZE = 256
_HOLD_OUT_EVERY = 20  # each twentieth file is for validation
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idle_test"}


def load(root: pathlib.Path | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Returns (train, validation) as uint8 arrays, files in sorted order.

    Some installations have copies of a file under several names. If one of them is for validation,
    no copy is for training.

    Args:
      root: A folder of source files. None: the standard library.
    """
    root = root or pathlib.Path(sysconfig.get_path("stdlib"))
    files = sorted(
        path.relative_to(root)
        for path in root.rglob("*.py")
        if not _SKIPPED_FOLDERS.intersection(path.relative_to(root).parts)
    )
    if len(files) < 2 * _HOLD_OUT_EVERY:
        raise SystemExit(f"{root} holds only {len(files)} source files; this needs a full Python")
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for i, path in enumerate(files):
        parts[i % _HOLD_OUT_EVERY == _HOLD_OUT_EVERY - 1].append((root / path).read_bytes())
    held_out = set(parts[1])
    train = [text for text in parts[0] if text not in held_out]
    return np.frombuffer(b"".join(train), np.uint8), np.frombuffer(b"".join(parts[1]), np.uint8)


def batch(text: np.ndarray, size: int, length: int, rng: np.random.Generator) -> np.ndarray:
    """Returns random windows of ``text``, shape (size, length + 1), int32."""
    starts = rng.integers(0, len(text) - length - 1, size)
    return text[starts[:, None] + np.arange(length + 1)].astype(np.int32)


def bigram_entropy(text: np.ndarray) -> float:
    """Returns the entropy of a byte given the previous one, in nats.

    A model that sees only the previous byte reaches it; a real one must end below it.
    """
    counts = np.zeros((VOCABULARY_SIZE, VOCABULARY_SIZE))
    np.add.at(counts, (text[:-1], text[1:]), 1)
    rows = counts.sum(1, keepdims=True)
    p = counts / np.maximum(rows, 1)
    return float(-(counts * np.log(np.where(p > 0, p, 1))).sum() / counts.sum())


def zlib_entropy(text: np.ndarray) -> float:
    """Returns the size of ``text`` compressed by ``zlib -9``, in nats per byte."""
    return len(zlib.compress(text.tobytes(), 9)) / len(text) * 8 * float(np.log(2))
