"""Tables of README.md and of docs."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    first, rule, *others = ("| " + " | ".join(cells) + " |" for cells in lines)
    return "\n".join([first, rule.replace(" ", ""), *others])


def fill(text: str, tables: Mapping[str, Callable[[], str]], where: str) -> str:
    """Replaces the text between each pair of markers in a file."""
    for name, make in tables.items():
        pattern = rf"(<!-- table: {name} -->\n).*?(<!-- end -->)"
        text, count = re.subn(
            pattern, lambda m, make=make: m[1] + make() + "\n" + m[2], text, flags=re.S
        )
        if count != 1:
            raise SystemExit(f"{where} needs one pair of markers for table {name}, has {count}")
    return text
