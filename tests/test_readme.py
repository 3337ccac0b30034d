"""The examples of README and of the pages in docs run as they stand."""

import doctest
import json
import os
import re
import subprocess
import sys

import pytest

from support.paths import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text() for path in PAGES}
EXAMPLES = {  # what imports the package is a program, all else a part of one
    name: [x for x in re.findall(r"```python\n(.*?)```", text, re.S) if "import jdistadam" in x]
    for name, text in TEXTS.items()
}
DOCTESTS = [name for name, text in TEXTS.items() if "```pycon\n" in text]
SEPARATOR = "-- the next example --"
RUN = f"""
import json, os, sys
for page, examples in json.load(sys.stdin):
    os.mkdir(page.replace("/", "_"))
    os.chdir(page.replace("/", "_"))
    names = {{"__name__": "__main__"}}
    for example in examples:
        exec(compile(example, page, "exec"), names)
        print({SEPARATOR!r})
    os.chdir("..")
"""

FIRST = ["README.md", "docs/sharded_training.md"]
OTHERS = [name for name, found in EXAMPLES.items() if found and name not in FIRST]
GROUPS = [FIRST, *(pytest.param(OTHERS[i::2], marks=pytest.mark.slow) for i in range(2))]


@pytest.mark.parametrize("pages", GROUPS, ids=" ".join)
def test_examples_run_and_learn(tmp_path, pages):
    """Those of a page with the same names, on 8 devices; what is printed falls as it trains."""
    programs = [(page, EXAMPLES[page]) for page in pages]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-P", "-c", RUN], input=json.dumps(programs), capture_output=True,
        text=True, timeout=300, cwd=tmp_path, env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    examples = [example for _, found in programs for example in found]
    printed = done.stdout.split(f"{SEPARATOR}\n")[:-1]
    for example, text in zip(examples, printed, strict=True):
        if "for _ in range(20):" in example:
            values = [float(line.split()[0]) for line in text.splitlines()]
            assert len(values) == 20 and values[-1] < 0.9 * values[0], values


@pytest.mark.parametrize("name", DOCTESTS)
def test_sessions_show_what_they_say(name):
    """What a page shows of a Python session is what Python prints."""
    sessions = "\n".join(re.findall(r"```pycon\n(.*?)```", TEXTS[name], re.S))
    test = doctest.DocTestParser().get_doctest(sessions, {}, name, name, 0)
    assert test.examples
    assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test).failed == 0


def test_every_way_to_train_has_an_example():
    examples = [example for found in EXAMPLES.values() for example in found]
    training = [example for example in examples if "for _ in range(20):" in example]
    assert len(training) >= 8
    for name in ("optax.chain(", "tx.step(", "jda.train_step(", "jax.shard_map(", "param_specs="):
        assert any(name in example for example in training)
    assert any("jda.train_step(" in example for example in EXAMPLES["README.md"])


def test_readme_is_short():
    assert len(TEXTS["README.md"].splitlines()) <= 110
