"""The layers hold: imports go downward, and each idea has one place; the tests stand as they do."""

import ast
import collections
import io
import re
import tokenize

import pytest

import jdistadam
from support.paths import ROOT, TESTS

PACKAGE = ROOT / "jdistadam"

# From the ground up: a file may import from its own folder and from those on lines above it.
ORDER = (
    "errors",
    "core",  # values
    "compat",
    "kernels",  # every custom call, and the reference implementation
    "drop_in",  # one program
    "distributed",  # one device of several, inside of shard_map
    "compose",
    "training",
    "interop",  # states of other frameworks
    "checkpoint",
    "tools",
    "flax",  # an optional package
    "__main__",
)
ABOVE_ALL = "__init__"
FILES = sorted(PACKAGE.rglob("*.py"))


def place(parts):
    """Where a module stands in ORDER, by its folder or, at the top, by its name."""
    return ORDER.index(parts[0])


def imports(path):
    """The package's modules that a file imports, as tuples of names, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            found = []
        for name in found:
            parts = tuple(name.split("."))
            if parts[0] == "jdistadam" and len(parts) > 1:
                yield parts[1:]


def module_of(parts):
    """The file that an import leads to: a name may be a module, or something inside of one."""
    for n in (len(parts), len(parts) - 1):
        path = PACKAGE.joinpath(*parts[:n]).with_suffix(".py")
        if n and path.exists():
            return path
    return None


def test_every_folder_and_file_has_a_place():
    top = {x.stem for x in PACKAGE.iterdir() if x.is_dir() or x.suffix == ".py"}
    assert top - {ABOVE_ALL, "__pycache__"} == set(ORDER)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_imports_go_downward(path):
    mine = path.relative_to(PACKAGE).with_suffix("").parts
    if mine == (ABOVE_ALL,):
        return  # names what users see
    for theirs in imports(path):
        if theirs[0] in ("__version__", ABOVE_ALL):
            continue
        assert theirs[0] in ORDER, f"{mine} imports {theirs} by way of the package itself"
        assert place(theirs) <= place(mine), f"{mine} imports {theirs}, which stands above it"


def test_files_of_a_folder_import_each_other_in_no_circle():
    below = {path: {module_of(parts) for parts in imports(path)} - {None} for path in FILES}
    seen, open_files = set(), []

    def visit(path):
        assert path not in open_files, f"a circle: {[str(x) for x in [*open_files, path]]}"
        if path not in seen:
            open_files.append(path)
            for other in below[path]:
                visit(other)
            seen.add(open_files.pop())

    for path in FILES:
        visit(path)


def test_only_one_module_names_collectives():
    pattern = re.compile(
        r"lax\.(psum|psum_scatter|pmean|pmax|all_gather|all_to_all|ppermute|axis_index)\b"
    )
    users = {path.stem for path in PACKAGE.rglob("*.py") if pattern.search(path.read_text())}
    assert users == {"collectives"}


def test_the_formula_is_written_once_in_cpp_and_once_in_python():
    cpp = {
        path.name
        for path in (ROOT / "cuda").iterdir()
        if re.search(r"\bsqrtf?\(", path.read_text())
    }
    python = {
        path.name
        for path in PACKAGE.rglob("*.py")
        if re.search(r"eps_root\"?\]?\)", path.read_text())
    }
    assert cpp == {"adam_math.h"}
    assert python == {"reference.py"}


def test_kernels_know_neither_xla_nor_python():
    """adam_math -> kernels -> FFI handlers -> module: each include points down."""
    floors = [
        {"dtype.h", "parallel.h", "leaf_table.cuh"}, {"pairwise.h", "vector.cuh", "rounding.h", "squares.h"}, {"adam_math.h", "adam.h", "norm.h", "sum.h", "copies.h", "host_copy.h"},
        {"coefficients.cuh", "norm.cuh", "squares.cuh", "parts.h", "copies_cuda.h", "processes.h", "quantized.h", "variants.cuh", "host_copy_cuda.h"}, {"kernels_cuda.h", "processes_cuda.h", "quantized_part.cuh"}, {"quantized_math.cuh"}, {"quantized_chunk.cuh"},
        {"adam_cpu.cc", "quantized_cpu.cc", "quantized_cuda.cu", "squares_cpu.cc", "norm_cpu.cc", "sum_cpu.cc", "adam_cuda.cu", "squares_cuda.cu", "norm_cuda.cu", "sum_cuda.cu", "parts_cpu.cc", "parts_cuda.cu", "ffi_common.h"},
        {"ffi_adam.h", "ffi_norm.h", "ffi_sum.h", "ffi_copies.h", "ffi_host_copy.h"}, {"ffi_quantized.h", "ffi_parts.h"}, {"ffi_squares.h"}, {"ffi_backend.h"}, {"ffi_cpu.cc", "ffi_cuda.cc"}, {"module.cc"},
    ]  # fmt: skip
    floor = {name: i for i, names in enumerate(floors) for name in names}
    sources = {
        path.name: path.read_text()
        for path in (ROOT / "cuda").iterdir()
        if path.suffix in {".h", ".cc", ".cu", ".cuh"}
    }
    assert set(sources) == set(floor)
    for name, text in sources.items():
        for included in re.findall(r'#include "(\w+\.cuh?|\w+\.h)"', text):
            assert floor[included] < floor[name], (name, included)
        if not name.startswith("ffi_") and name != "module.cc":
            assert "xla/" not in text and "nanobind" not in text and "Python.h" not in text, name


def test_the_driver_of_the_kernels_knows_only_them():
    """It is with the tests, and runs what stands below the FFI handlers."""
    folder = TESTS / "kernels" / "driver"
    files = [path for path in folder.rglob("*") if path.is_file()]
    mine = {path.relative_to(folder).as_posix(): path.read_text() for path in files}
    assert set(mine) == {
        "arithmetic.cu",
        "copies.cc",
        "copies_cuda.cc",
        "driver.cc",
        "driver_memory.h",
        "expect.h",
        "fake/cuda_runtime.h",
        "processes.cc",
    }
    for name, text in mine.items():
        included = set(re.findall(r'#include "([^"]+)"', text))
        assert {x for x in included - set(mine) if not (ROOT / "cuda" / x).is_file()} == set()
        assert not any(x.startswith(("ffi_", "module")) for x in included), name
        assert "xla/" not in text and "nanobind" not in text and "Python.h" not in text, name


def test_the_package_never_imports_its_experiments():
    for path in PACKAGE.rglob("*.py"):
        assert "experiments" not in {
            n.split(".")[0]
            for n in re.findall(r"^\s*(?:from|import) (\S+)", path.read_text(), re.M)
        }


MOST_LINES = 60
LONGER = {"distributed": 85}  # and how long they may be


def lines_of_code(path):
    """The name and the lines of each function of a file, without docstring, comments and blanks."""
    source = path.read_text()
    code, other = set(), (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.DEDENT)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in other:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            doc = node.body[0]
            documented = set(range(doc.lineno, doc.end_lineno + 1)) if body != node.body else set()
            inside = set(range(node.lineno, node.end_lineno + 1))
            yield node.name, len(code & inside - documented)


def test_functions_have_at_most_60_lines():
    """A file holds one idea, however long; a function is what a reader must hold at once."""
    long = {
        name: size
        for path in FILES
        for name, size in lines_of_code(path)
        if size > LONGER.get(name, MOST_LINES)
    }
    assert long == {}


def test_checks_of_pairs_are_few_and_in_contributing():
    """Each row of the table names a function that raises."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = text.partition("## Options that contradict each other")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| .+ \| `(\S+): (\w+)` \| .+ \|$", section, re.M)
    assert len(rows) == section.count("\n|") - 2 and 0 < len(rows) <= 18
    expected, found = collections.Counter(rows), collections.Counter()
    for path, name in expected:
        functions = {
            node.name: node
            for node in ast.walk(ast.parse((PACKAGE / path).read_text()))
            if isinstance(node, ast.FunctionDef)
        }
        raised = [x for x in ast.walk(functions[name]) if isinstance(x, ast.Raise)]
        found[path, name] = min(len(raised), expected[path, name])
    assert found == expected


MOST_IMPORTS = 25
MORE = {  # where parts meet, and how many names of the package they may import
    "__init__.py": 76,
    "distributed/checks.py": 33,
    "distributed/config.py": 26,
    "distributed/optimizer.py": 39,
    "distributed/step.py": 34,
    "distributed/update.py": 27,
    "drop_in/step.py": 35,
    "interop/convert.py": 27,
    "training/admission.py": 32,
    "training/optax_state.py": 27,
}


def test_files_import_at_most_25_names_of_the_package():
    """Who reads a file must know them."""
    found = {}
    for path in FILES:
        names = {
            alias.name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jdistadam")
            for alias in node.names
        }
        name = path.relative_to(PACKAGE).as_posix()
        if len(names) > MORE.get(name, MOST_IMPORTS):
            found[name] = len(names)
    assert found == {}


def test_every_public_name_is_documented():
    for name in jdistadam.__all__:
        assert (getattr(jdistadam, name).__doc__ or "").strip(), name


def folders_of(root):
    """The folders in which a Python file is, by their paths from the root."""
    folders = {path.parent.relative_to(root).as_posix() for path in root.rglob("*.py")}
    return folders - {"."}


def test_folders_of_tests_are_those_of_the_package():
    assert folders_of(TESTS) - {"support"} == folders_of(PACKAGE)


def names_imported_by(path):
    """Every name that a file imports, in parts; of ``from a import b`` both a and b."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").split(".")
            yield from ([*module, alias.name] for alias in node.names)


@pytest.mark.parametrize(
    "path", sorted(TESTS.rglob("*.py")), ids=lambda path: path.relative_to(TESTS).as_posix()
)
def test_tests_share_by_way_of_support_alone(path):
    """No file imports a test file or conftest.py, and no folder of tests but support."""
    others = {"tests", "conftest"} | folders_of(TESTS) - {"support"}
    for parts in names_imported_by(path):
        assert parts[0] not in others, parts
        assert not any(x.startswith("test_") for x in parts), parts
