"""String literals of source files."""

import ast


def literals(tree):
    """Yields each literal with its text: adjacent ones as one, \\0 where a value is put into it."""
    nodes = list(ast.walk(tree))
    parts = {id(x) for node in nodes if isinstance(node, ast.JoinedStr) for x in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            text = "".join(x.value if isinstance(x, ast.Constant) else "\0" for x in node.values)
            yield node, text
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in parts:
                yield node, node.value
