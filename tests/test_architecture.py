"""The layers hold: imports go downward, and each idea has one place."""

import ast
import pathlib
import re

import pytest

import jdistadam

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "jdistadam"

# From the ground up. A module may import only what stands on lower lines.
LAYERS = (
    {"errors", "transformation", "linearity", "hlo", "flattened"},
    {"trees"},
    {"config", "layout", "masks", "train_state_checks"},
    {"layout_identity"},
    {"coefficients", "reference", "native", "groups", "loss_scale", "data_parallel"},
    {"collectives", "distributed_config", "distributed_state"},
    {"kernel", "reductions", "optax_leaves"},
    {"buckets", "gradient_reduction", "communication"},
    {"partitioning", "distributed_checks", "main_state"},
    {"tree_step", "accumulation"},
    {"distributed_step"},
    {"optimizer", "distributed_transformation"},
    {
        "distributed",
        "combine",
        "gather",
        "nonfinite",
        "memory_plan",
        "batches",
        "loss_function",
        "main_shards",
    },
    {"micro_batches", "train_state"},
    {"training"},
    {"checkpoint", "program_audit"},
    {"diagnostics", "bench"},
    {"command_line"},
    {"__main__"},
)
FLOOR = {module: floor for floor, modules in enumerate(LAYERS) for module in modules}


def imports(path):
    """Names of the package's modules that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] == "jdistadam"
        ):
            parts = node.module.split(".")
            yield from [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("jdistadam."):
                    yield alias.name.split(".")[1]


def test_every_module_has_a_layer():
    assert {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"} == set(FLOOR)


@pytest.mark.parametrize("module", sorted(FLOOR))
def test_imports_go_downward(module):
    for name in imports(PACKAGE / f"{module}.py"):
        assert FLOOR[name] < FLOOR[module], (
            f"{module} imports {name}, which does not stand below it"
        )


def test_only_one_module_names_collectives():
    pattern = re.compile(
        r"lax\.(psum|psum_scatter|pmean|pmax|all_gather|all_to_all|ppermute|axis_index)\b"
    )
    users = {path.stem for path in PACKAGE.glob("*.py") if pattern.search(path.read_text())}
    assert users == {"collectives"}


def test_the_formula_is_written_once_in_cpp_and_once_in_python():
    cpp = {
        path.name
        for path in (ROOT / "cuda").iterdir()
        if re.search(r"\bsqrtf?\(", path.read_text())
    }
    python = {
        path.name
        for path in PACKAGE.glob("*.py")
        if re.search(r"eps_root\"?\]?\)", path.read_text())
    }
    assert cpp == {"adam_math.h"}
    assert python == {"reference.py"}


def test_kernels_know_neither_xla_nor_python():
    """adam_math -> kernels -> FFI handlers -> module: each include points down."""
    floors = [
        {"dtype.h", "parallel.h", "leaf_table.cuh", "driver_memory.h"}, {"pairwise.h", "vector.cuh"}, {"adam_math.h", "adam.h", "norm.h", "sum.h", "keep.h"},
        {"kernels_cuda.h"},
        {"adam_cpu.cc", "norm_cpu.cc", "sum_cpu.cc", "keep_cpu.cc", "keep_cuda.cu", "adam_cuda.cu", "norm_cuda.cu", "sum_cuda.cu", "driver.cc", "ffi_common.h"},
        {"ffi_adam.h", "ffi_norm.h", "ffi_sum.h", "ffi_keep.h", "ffi_graph_node.h"}, {"ffi_cpu.cc", "ffi_cuda.cc"}, {"module.cc"},
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


def test_the_package_never_imports_its_experiments():
    for path in PACKAGE.glob("*.py"):
        assert "experiments" not in {
            n.split(".")[0]
            for n in re.findall(r"^\s*(?:from|import) (\S+)", path.read_text(), re.M)
        }


def test_files_hold_one_idea():
    for path in [*PACKAGE.glob("*.py"), *(ROOT / "cuda").glob("*.*")]:
        assert len(path.read_text().splitlines()) <= 400, path


def test_every_public_name_is_documented():
    for name in jdistadam.__all__:
        assert (getattr(jdistadam, name).__doc__ or "").strip(), name
