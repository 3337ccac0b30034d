"""The pages in docs name what the package has, and the messages that it raises."""

import ast
import functools
import inspect
import json
import pathlib
import re
import tomllib

import pytest

import jdistadam
from jdistadam.distributed.flat_arrays import FLAT_ARRAYS
from jdistadam.tools.audit import Audit
from jdistadam.training import planned
from support.literals import literals
from support.paths import ROOT

DOCS = ROOT / "docs"


@functools.cache
def texts_of_code():
    """The string literals of the package, joined where a value is put into them by \\0."""
    trees = (ast.parse(path.read_text()) for path in sorted((ROOT / "jdistadam").rglob("*.py")))
    return [text for tree in trees for _, text in literals(tree)]


def test_the_reference_has_every_public_name():
    named, module = set(), ""
    for page in DOCS.glob("api/*.md"):
        directives = re.findall(r"^\.\. (currentmodule|auto\w+):: (\S+)$", page.read_text(), re.M)
        for directive, name in directives:
            if directive == "currentmodule":
                module = name
            else:
                named.add(f"{module}.{name}")
    modules = jdistadam, jdistadam.interop, jdistadam.flax
    public = {f"{x.__name__}.{name}" for x in modules for name in x.__all__}
    assert named == public - {"jdistadam.interop"}
    listed = re.findall(r"^\| \[`([\w.]+)`\]\(\.\./(\S+)\)", (DOCS / "api.md").read_text(), re.M)
    assert {f"jdistadam.{name}" for name, _ in listed} == named
    assert all((ROOT / path).is_file() for _, path in listed)


INTERNAL = {"make", "schedule", "of_bucket"}  # methods that the reference leaves out


def public_functions():
    """Functions and methods that the reference shows."""
    for module in (jdistadam, jdistadam.interop, jdistadam.flax):
        for thing in (getattr(module, name) for name in module.__all__):
            members = vars(thing).items() if inspect.isclass(thing) else [(thing.__name__, thing)]
            for name, member in members:
                if name not in INTERNAL and (name[0] != "_" or name == "__call__"):
                    yield getattr(member, "__func__", member)


def test_every_public_function_says_what_it_returns():
    functions = {x for x in public_functions() if inspect.isfunction(x)}
    functions = {x for x in functions if x.__module__.startswith("jdistadam")}  # not of Flax
    returning = [x for x in functions if inspect.signature(x).return_annotation != "None"]
    assert len(returning) > 60
    assert not [x for x in returning if "Returns:\n" not in (inspect.getdoc(x) or "")]


HEADINGS = re.findall(r"^### `(.*)`$", (DOCS / "troubleshooting.md").read_text(), re.M)


@pytest.mark.parametrize("text", HEADINGS)
def test_a_message_that_can_be_looked_up_is_one_that_is_raised(text):
    assert any(text in literal for literal in texts_of_code())


def test_messages_can_be_looked_up():
    assert len(HEADINGS) == len(set(HEADINGS)) >= 30


@pytest.mark.parametrize("name", sorted(x.name for x in DOCS.glob("*.ipynb")))
def test_a_notebook_keeps_what_it_prints(name):
    """docs/notebooks.py writes it; that it is what the cells print is checked by Sphinx."""
    notebook = json.loads((DOCS / name).read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    prints = [cell for cell in code if "print(" in "".join(cell["source"])]
    assert prints and all(cell["outputs"] for cell in prints)
    assert {x["output_type"] for cell in code for x in cell["outputs"]} == {"stream"}


def test_the_source_distribution_leaves_records_out():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "/experiments/results" in settings["tool"]["scikit-build"]["sdist"]["exclude"]


def test_the_table_of_extras_is_what_pip_installs():
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|", (DOCS / "installation.md").read_text(), re.M)
    listed = {name: set(installed.replace("`", "").split(", ")) for name, installed in rows}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for name, required in extras.items():
        names = ",".join(re.split("[><=]", x)[0] for x in required)
        names = re.sub(r"jdistadam\[(.*?)\]", r"\1", names)  # other extras
        assert listed.pop(name) == set(names.split(","))
    assert not listed


def test_wheels_have_code_for_the_gpus_that_the_page_names():
    """However they are built: by the command, or by the workflow."""
    page = (DOCS / "installation.md").read_text()
    rows = re.findall(r"^\| ([\d., ]+) \|.*\| machine code \| [^|]* \|$", page, re.M)
    named = [x.split(",")[0].replace(".", "") for x in rows]
    archs = ";".join([*(f"{x}-real" for x in named[:-1]), named[-1]])  # PTX of the newest, too
    command = (ROOT / ".ci" / "wheels").read_text()
    workflow = (ROOT / ".github" / "workflows" / "wheels.yml").read_text()
    assert f"CUDAARCHS:-{archs}}}" in command and f'CUDAARCHS="{archs}"' in workflow, archs


def test_the_calls_that_no_cuda_graph_takes_are_on_a_page():
    """Those whose handlers do not say that they only enqueue kernels."""
    handlers = (ROOT / "cuda" / "ffi_backend.h").read_text().partition("HandlersOf() {")[2]
    named = re.findall(r'\{"(\w+)",\s*CallFromXla<([^{}]*)>\}', handlers)
    assert len(named) > 8
    outside = {name for name, arguments in named if "kCapturable" not in arguments}
    text = (DOCS / "design.md").read_text().partition("calls are in no CUDA graph")[2]
    assert set(re.findall(r"`(jdistadam_\w+)`", text.partition("\n\n")[0])) == outside


RESULTS = ROOT / "experiments" / "results"
RECORDS = sorted(str(x.relative_to(RESULTS)) for x in RESULTS.glob("*/*/*"))


def test_records_are_named_by_experiment_hardware_and_variant():
    assert all(x.is_dir() for pattern in ("*", "*/*") for x in RESULTS.glob(pattern))
    hardware = {x.parts[1] for x in map(pathlib.PurePath, RECORDS)}
    assert hardware <= {
        "cpu",
        "h100",
        "h100_x2",
        "h100_x4",
        "h200",
        "h200_x2",
        "h200_x4",
        "h200_x8",
    }


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_is_listed_with_its_revisions(name):
    """experiments/README.md says of each what it answers."""
    page, path = (ROOT / "experiments" / "README.md").read_text(), RESULTS / name
    row = next((line for line in page.splitlines() if f"| `{name}` |" in line), None)
    assert row, f"experiments/README.md lacks {name}"
    runs = path.rglob("run.json") if path.is_dir() else [path] if path.suffix == ".json" else []
    for run in runs:
        assert json.loads(run.read_text())["revision"][:7] in row


@pytest.mark.parametrize(
    "name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "experiments/README.md"]
)
def test_links_lead_somewhere(name):
    """Those of pages in docs are followed when they are built."""
    page = ROOT / name
    links = re.findall(r"\]\(([^)\s#]+)[^)]*\)", page.read_text())
    missing = [x for x in links if "://" not in x and not (page.parent / x).exists()]
    assert not missing


def test_every_test_that_a_page_names_exists():
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", (DOCS / "guarantees.md").read_text())
    assert len(named) > 40
    for file, test in named:
        source = (ROOT / "tests" / file).read_text()
        assert re.search(rf"^def {test}\(", source, re.M), f"{file} has no {test}"


def test_the_rows_and_columns_of_plans_and_audits_are_on_their_page():
    page = (DOCS / "plan_and_audit.md").read_text()
    cells = re.findall(r"^\| (`.*?`) \|", page, re.M)
    explained = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    source = inspect.getsource(planned)
    rows = set(re.findall(r'(?:yield |buffers\[)"([\w ]+)"', source))
    assert len(rows) > 8
    missing = (rows | set(FLAT_ARRAYS) | {"accumulated gradients", "params", "scalars"}) - explained
    assert not missing
    headers = planned.format_collectives(()), str(Audit((), 0, 8, None)).splitlines()[0]
    for header in headers:
        for name in sorted(explained, key=len, reverse=True):
            header = header.replace(name, "")
        assert not header.strip()
