"""Tables of README.md and of docs."""

from collections.abc import Iterable, Sequence


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    first, rule, *others = ("| " + " | ".join(cells) + " |" for cells in lines)
    return "\n".join([first, rule.replace(" ", ""), *others])
