"""The public names of the package: one line and the source of each, for docs/api.md.

Read from the sources, so that the page is written without an installed package.
"""

import ast
import pathlib
import re

from lm import markdown

ROOT = pathlib.Path(__file__).parent.parent
PAGES = (  # in docs/api, and what is above their tables
    ("drop_in", "Drop-in optimizers"),
    ("distributed", "Distributed optimizers"),
    ("training", "Training and evaluation"),
    ("precision", "Precision and storage"),
    ("checkpoints", "Checkpoints"),
    ("interop", "Other libraries"),
    ("tools", "Plan and audit"),
    ("errors", "Errors"),
)


def _tree(path):
    return ast.parse(path.read_text())


def _file_of(module: str) -> pathlib.Path:
    """The file of a module, such as ``jdistadam.interop``."""
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def source_of(module: str, name: str) -> pathlib.Path:
    """The file that defines what a module exports."""
    path = _file_of(module)
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return source_of(node.module, alias.name)
    return path


def first_line(path: pathlib.Path, name: str) -> str:
    """The first line of a docstring, in Markdown."""
    for node in _tree(path).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            line = (ast.get_docstring(node) or "").splitlines()[0]
            return line.replace("``", "`").replace("|", "\\|")
    raise LookupError(f"{path} does not define {name}")


def names_of(page: str):
    """Yields (module, name) of what a page in docs/api describes, in its order."""
    text = (ROOT / "docs" / "api" / f"{page}.md").read_text()
    module = ""
    for directive, name in re.findall(r"^\.\. (currentmodule|auto\w+):: (\S+)$", text, re.M):
        if directive == "currentmodule":
            module = name
        else:
            yield module, name


def tables() -> str:
    """One table for each page: each name with a link to its source, and what it is."""
    parts = []
    for page, title in PAGES:
        rows = []
        for module, name in names_of(page):
            path = source_of(module, name)
            shown = f"{module}.{name}".removeprefix("jdistadam.")
            link = f"[`{shown}`](../{path.relative_to(ROOT).as_posix()})"
            rows.append((link, first_line(path, name)))
        parts.append(
            f"## [{title}](api/{page}.md)\n\n{markdown.table(('name', 'what it is'), rows)}"
        )
    return "\n\n".join(parts)
