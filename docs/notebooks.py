"""Runs the notebooks of this folder, which keep what their cells print.

python docs/notebooks.py     # runs them and writes their outputs

The pages show these outputs; Sphinx (conf.py) runs the notebooks too and fails if one prints
something else.
"""

import pathlib

import nbclient
import nbformat

FOLDER = pathlib.Path(__file__).parent


def executed(path: pathlib.Path) -> nbformat.NotebookNode:
    """Runs a notebook, and returns it with what its cells print, as one text for each cell."""
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute(cwd=str(FOLDER))
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = _outputs(cell)
    return notebook


def _outputs(cell) -> list:
    text = "".join(x.get("text") or x.get("data", {}).get("text/plain", "") for x in cell.outputs)
    return [nbformat.v4.new_output("stream", name="stdout", text=text)] if text else []


def notebooks() -> list[pathlib.Path]:
    """The notebooks of this folder."""
    return sorted(FOLDER.glob("*.ipynb"))


def check() -> None:
    """Raises SystemExit if a notebook prints something else than it keeps."""
    for path in notebooks():
        for old, new in zip(nbformat.read(path, 4).cells, executed(path).cells, strict=True):
            if old.get("outputs") != new.get("outputs"):
                raise SystemExit(
                    f"{path.name}: a cell prints something else than the file keeps:\n"
                    f"{new.source}\nkept: {old.outputs}\nprinted: {new.outputs}\n"
                    "If that is meant, run python docs/notebooks.py"
                )


def main() -> None:
    """Writes their outputs."""
    for path in notebooks():
        nbformat.write(executed(path), path)


if __name__ == "__main__":
    main()
