"""``python -m pytest`` and ``pytest`` start the tests, wherever the compiled module is.

Each arrangement is made of conftest.py and pyproject.toml with a package of another name, so that
the jdistadam which runs this test is in no one's way. Its compiled module is an empty file.
"""

import importlib.machinery
import os
import re
import subprocess
import sys

import pytest

from support.paths import ROOT, TESTS
from support.samples import often

MODULE = f"_cpu{importlib.machinery.EXTENSION_SUFFIXES[0]}"
STARTS = {"python -m pytest": ["-m"], "pytest": ["-P", "-m"]}  # -P: without the current directory

WHERE = """
import pathlib, subprocess, sys, other

def test_where(request):
    expected = request.config.rootpath.joinpath(*EXPECTED, "other", "__init__.py")
    assert pathlib.Path(other.__file__) == expected
    command = [sys.executable, "-P", "-c", "import other; print(other.__file__)"]
    assert subprocess.check_output(command, text=True).strip() == str(expected)
"""

# Warns wherever a plugin may: pytest-benchmark does in its configuration, beside pytest-xdist.
PLUGIN = """
import warnings

def pytest_configure(): warnings.warn("from a plugin")
def pytest_sessionstart(): warnings.warn("from a plugin")
def pytest_collection_modifyitems(): warnings.warn("from a plugin", DeprecationWarning)
def pytest_sessionfinish(): warnings.warn("from a plugin")
def pytest_terminal_summary(): warnings.warn("from a plugin")
"""

WARNS = """
import pytest, warnings

@pytest.fixture
def warned():
    warnings.warn("from a fixture")

def test_error(): warnings.warn("from a test", DeprecationWarning)
def test_error_of_a_fixture(warned): pass

@pytest.mark.filterwarnings("ignore:from a test")
def test_ignored(): warnings.warn("from a test")
"""


def arrange(folder, *with_modules):
    """A source tree beside an installed package; of these some have a compiled module."""
    for package in (folder / "other", folder / "site" / "other"):
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
    for place in with_modules:
        (folder.joinpath(*place) / "other" / MODULE).touch()
    support = (TESTS / "support").glob("*.py")
    for source in (ROOT / "pyproject.toml", TESTS / "conftest.py", *support):
        copy = folder / source.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(source.read_text().replace("jdistadam", "other"))


def start(folder, how, program, *options, **environment):
    (folder / "tests" / "test_one.py").write_text(program)
    return subprocess.run(
        [sys.executable, *STARTS[how], "pytest", "-q", "-p", "no:cacheprovider", *options],
        capture_output=True, text=True, timeout=120, cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder / "site"), "JAX_PLATFORMS": "cpu"} | environment,
    )  # fmt: skip


@pytest.mark.parametrize("how", STARTS)
@pytest.mark.parametrize("place", [("site",), ()], ids=["installed", "in the tree"])
@often(lambda how, place: place and how != "pytest")
def test_the_package_with_the_compiled_module_is_found(tmp_path, how, place):
    arrange(tmp_path, place)
    done = start(tmp_path, how, f"EXPECTED = {place}\n{WHERE}")
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("how", STARTS)
@often(lambda how: how != "pytest")
def test_one_line_says_what_to_do_where_there_is_no_compiled_module(tmp_path, how):
    arrange(tmp_path)
    done = start(tmp_path, how, WHERE, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")  # these may warn
    said = (done.stdout + done.stderr).strip()
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, said
    assert said.startswith("ERROR: ") and len(said.splitlines()) == 1, said
    assert said.endswith(f'run `pip install ".[test]"` in {tmp_path}')


def test_the_tree_on_the_path_hides_no_installed_package(tmp_path):
    """Nor does a worker of pytest-xdist see the tree, which starts with the path of its parent."""
    arrange(tmp_path, ("site",))
    path = os.pathsep.join([str(tmp_path), str(tmp_path / "site")])
    done = start(tmp_path, "pytest", f'EXPECTED = ("site",)\n{WHERE}', "-n1", PYTHONPATH=path)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


def test_warnings_are_errors_in_tests_and_not_in_plugins(tmp_path):
    arrange(tmp_path, ("site",))
    (tmp_path / "site" / "a_plugin.py").write_text(PLUGIN)
    done = start(tmp_path, "pytest", WARNS, "-p", "a_plugin")
    assert "1 failed, 1 passed" in done.stdout and "1 error" in done.stdout, done.stdout
    assert "INTERNALERROR" not in done.stdout + done.stderr


@pytest.mark.slow
def test_a_test_file_that_warns_is_an_error(tmp_path):
    arrange(tmp_path, ("site",))
    done = start(tmp_path, "pytest", "import warnings\nwarnings.warn('at import')")
    assert done.returncode == pytest.ExitCode.INTERRUPTED, done.stdout
    assert "UserWarning: at import" in done.stdout and "1 error" in done.stdout


TO_REPORT = """
import pytest

def test_plain(): pass

@pytest.mark.slow
def test_marked(): pass

@pytest.mark.parametrize("i", range(3))
@pytest.mark.gpu
def test_gpu(i): pass

def test_skips(): pytest.skip("needs torch")
"""


@pytest.mark.slow
def test_ci_reports_skips_by_reason_and_slow_tests_without_the_mark(tmp_path):
    arrange(tmp_path, ("site",))
    (tmp_path / "tests" / "test_file.py").write_text("import pytest\npytest.importorskip('xyz')")
    file = tmp_path / "report.xml"
    done = start(tmp_path, "pytest", TO_REPORT, "-m", "", "-n1", f"--junitxml={file}")
    assert "2 passed, 5 skipped" in done.stdout, done.stdout
    file.write_text(re.sub(r'(<testcase [^>]*time=)"[^"]*"', r'\1"11.5"', file.read_text()))
    command = [sys.executable, ROOT / ".ci" / "report.py", file]
    first, *lines = subprocess.check_output(command, text=True).splitlines()
    assert first == "2 tests ran, 5 were skipped:"
    assert {"     3  needs an NVIDIA GPU; jax sees none", "     1  needs torch"} < set(lines[:3])
    assert any(x.startswith("     1  could not import 'xyz'") for x in lines[:3])
    slow = [x for x in lines if "11.5 s" in x]
    assert any("tests.test_one::test_plain" in x for x in slow)
    assert not any("test_marked" in x for x in slow)
