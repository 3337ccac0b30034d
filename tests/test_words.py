"""Plain words: what is not written, anywhere, and what to write instead."""

import re
import subprocess

import pytest

from support.paths import ROOT

UNITS = "arrays?|scalars?|nats|bytes?|tokens|MB|GB|ms|us|elements|sequences|vectors?|all-gathers?|reduce-scatters?"
OF = "byte|parameter|second|step|device|layer|thread|vector|leaf|micro-batch|process|GPU"
# A pattern, in which a space also stands for a new line, and what to write instead.
WORDS = {
    r"wires?": "communication dtype, communicated, sent",
    r"oracles?": "reference implementation",
    r"refus(e|es|ed|ing)": "raises, is not supported",
    r"one's own": "a custom training loop, a separate",
    r"own loops?": "a custom training loop",
    rf"({UNITS}) an? (\w+ )?({OF})": "per",
    r"ways? out": "what to do",
    r"contested|contradiction": "say which two settings do not fit",
    r"types do not tell|counts not|what runs differ by|makes the mean of it": "a whole sentence",
    r"in every bit|to the bit": "bitwise identical",
    r"world": "devices",
    r"(?<!Nesterov )momentum": "mu, the first moment",
    r"lies?|lay|lain": "is, are, is placed",
    r"sums of (the )?(gradients|grads)": "accumulated gradients",
    r"not finite": "non-finite",
    r"whole (params|parameters)": "unsharded",
    r"for a moment": "temporarily, peak temporary memory",
    r"travel(s|led|ling)?": "is communicated, is sent",
    r"gather(s|ed)? again": "re-gathered",
}
FOUND_IN = {  # what must name such a word, by the file
    "experiments/update_readme.py": ('row["policy"].replace("wire", "communication")',),
    "experiments/scaling_check.py": ('row["policy"].replace("wire", "communication")',),
    "experiments/vision/resnet.py": ("momentum=0.9",),  # Flax's name of an argument
    "tests/support/placements.py": ("to lay eight devices out",),
}
# Within a comment a new line begins with its sign.
SPACE = r"\\s+(?:(?:#|//)\\s*)?"
PATTERNS = {
    re.compile(rf"\b(?:{re.sub('(?<!Nesterov) ', SPACE, words)})\b", re.I): instead
    for words, instead in WORDS.items()
}
NAMES = re.compile(r"def (test_\w*(?:refus|wire|oracle)\w*)")  # also of tests
HERE = "tests/test_words.py"
PLACES = "jdistadam cuda tests experiments docs .ci README.md CONTRIBUTING.md CHANGELOG.md pyproject.toml"
RECORDS = "experiments/results/"
TEXTS = ("", ".cc", ".cu", ".cuh", ".h", ".ipynb", ".md", ".py", ".toml", ".txt")


def find(name, text):
    """Lines with words that are not used, and what to write instead."""
    for allowed in FOUND_IN.get(name, ()):
        text = text.replace(allowed, "")
    found = []
    for pattern, instead in PATTERNS.items():
        for match in pattern.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(f"{name}:{line}: {match[0]!r}: write {instead!r}")
    return found + [f"{name}: rename {test}" for test in NAMES.findall(text)]


def sources():
    """The files that git knows and that are there, with their texts."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *PLACES.split()],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for name in listed.splitlines():
        path = ROOT / name
        is_text = path.suffix in TEXTS and not name.startswith(RECORDS)
        if is_text and path.exists() and name != HERE:
            yield name, path.read_text()


def test_no_other_words_are_used():
    texts = dict(sources())
    assert {"README.md", "docs/index.md", "jdistadam/errors.py", "cuda/dtype.h"} <= set(texts)
    found = [line for name, text in texts.items() for line in find(name, text)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "bfloat16 on the Wire",
        "equal to the oracle",
        "an option is refused",
        "nats a byte",
        "28 bytes a\nparameter",
        "28 bytes a float32 parameter",
        "# two vectors a\n# thread",
        "momentum",
        "a value that is not\n    finite",
        "where arrays lie",
        "sums of gradients",
        "def test_that_it_is_refused():",
    ],
)
def test_such_a_word_is_found(text):
    assert find("a file", f"before\n{text}\nafter")


@pytest.mark.parametrize("text", ["Nesterov momentum", "wire_dtype", "a byte", "earlier", "client"])
def test_other_words_are_not(text):
    assert not find("a file", text)
