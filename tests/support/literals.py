"""String literals of source files."""

import ast


def literals(tree):
    """Yields each literal and its text: adjacent ones joined, \\0 for an inserted value."""
    nodes = list(ast.walk(tree))
    parts = {id(x) for node in nodes if isinstance(node, ast.JoinedStr) for x in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            text = "".join(x.value if isinstance(x, ast.Constant) else "\0" for x in node.values)
            yield node, text
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in parts:
                yield node, node.value
