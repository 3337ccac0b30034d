"""Every message of the package has the form that jdistadam/errors.py describes."""

import ast
import collections
import re

from jdistadam import errors
from support.literals import literals
from support.paths import ROOT

PACKAGE = ROOT / "jdistadam"
CLASSES = {
    name
    for name, x in vars(errors).items()
    if isinstance(x, type) and issubclass(x, errors.JDistAdamError)
}
FORM = re.compile(r"[^:]+: .+: got .+, expected .+\. (?:\0|\S.*[.?]\0?)")
# Where an error is made of a message that is written elsewhere in the file, or is another error's.
MADE_BEFORE = {"core/algorithm.py": 1, "core/arguments.py": 1, "training/agreement.py": 1}


def test_every_message_has_the_form():
    """What is put into it may be anything, also all of where, what, got, expected or action."""
    messages, made_before = [], collections.Counter()
    for path in sorted(PACKAGE.rglob("*.py")):
        name, tree = path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text())
        texts = dict(literals(tree))
        calls = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) in CLASSES
        ]
        for call in calls:
            (argument,) = call.args
            made_before[name] += ": got " not in texts.get(argument, "")
        if calls:
            messages += [(name, x.lineno, text) for x, text in texts.items() if ": got " in text]
    assert len(messages) > 150
    assert [x for x in messages if not FORM.fullmatch(x[2]) or "  " in x[2]] == []
    assert +made_before == MADE_BEFORE
