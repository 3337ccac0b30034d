"""The kernels without Python and JAX, under the checkers: driver/driver.cc."""

import os
import shutil
import subprocess

import pytest

from support.paths import ROOT, TESTS

CUDA = ROOT / "cuda"
DRIVER = TESTS / "kernels" / "driver"
HOST = ["-std=c++17", "-g", "-DJDISTADAM_NO_CLONES", "-pthread", f"-I{CUDA}"]
STRICT = ["-ffp-contract=off", "-fno-fast-math"]
EXACTLY = ["-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true"]
KERNELS = {
    "driver.cc": ("adam", "quantized", "squares", "norm", "sum", "parts"),
    "copies.cc": (),
    "processes.cc": (),
    "copies_cuda.cc": (),
}
FEW = ("--one-in", "13")  # of the many cases of Adam and of sums, which take most of the time
"""A prime, so that those chosen have every value of every loop."""


def run(command, **kwargs):
    done = subprocess.run(
        [str(x) for x in command], capture_output=True, text=True, timeout=600, **kwargs
    )
    return done, done.stdout + done.stderr


def build_cpu(path, *flags, main="driver.cc"):
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    flags = (*flags, f"-I{DRIVER / 'fake'}") if main == "copies_cuda.cc" else flags
    sources = [DRIVER / main, *(CUDA / f"{kernel}_cpu.cc" for kernel in KERNELS[main])]
    done, output = run([compiler, *HOST, *STRICT, *flags, *sources, "-o", path])
    if done.returncode and "cannot find -l" in output:
        pytest.skip(f"needs the compiler's sanitizer libraries: {output}")
    assert done.returncode == 0, output
    return path


def run_to_success(*command, **kwargs):
    done, output = run(command, **kwargs)
    assert done.returncode == 0 and "SUCCESS" in output, output


def build_with_sanitizer(path, sanitize, main):
    """Without optimization: that takes longer than the program then runs."""
    flags = ["-O0", f"-fsanitize={sanitize}", "-fno-sanitize-recover=undefined"]
    return build_cpu(path, *flags, main=main)


@pytest.mark.slow  # .ci/run runs it with few cases
@pytest.mark.parametrize("cases", [FEW, ()], ids=len)
def test_address_and_undefined_behaviour_sanitizers_find_a_planted_bug_alone(tmp_path, cases):
    """One element too many: seen by the guard words, and by the sanitizer where there are none."""
    driver = build_with_sanitizer(tmp_path / "driver", "address,undefined", "driver.cc")
    for options, said in ((), "guard overwritten"), (("--exact",), "AddressSanitizer"):
        run_to_success(driver, *cases, *options)
        done, output = run([driver, "--plant", *cases, *options])
        assert done.returncode != 0 and said in output, output


@pytest.mark.slow
def test_thread_sanitizer_is_clean(tmp_path):
    run_to_success(build_with_sanitizer(tmp_path / "driver", "thread", "driver.cc"))


@pytest.mark.slow
def test_address_and_undefined_behaviour_sanitizers_are_clean_of_copies(tmp_path):
    """A device that leaves without waiting for its copies is seen by what they write."""
    copies = build_with_sanitizer(tmp_path / "copies", "address,undefined", "copies.cc")
    run_to_success(copies)
    done, output = run([copies, "--plant"])
    assert done.returncode != 0 and "memory was written later" in output, output


@pytest.mark.slow
@pytest.mark.parametrize("main", ["copies.cc", "processes.cc", "copies_cuda.cc"])
def test_copies_have_no_data_race(tmp_path, main):
    """Of devices: executions that take turns, some that fail, leave or do not come, and the end.

    Of processes: starts on their way, others than those of other processes, deaths and messages
    that are none. Of GPUs: what their streams do, with threads in place of streams.
    """
    copies = build_with_sanitizer(tmp_path / "copies", "thread", main)
    env = os.environ | {"TSAN_OPTIONS": "halt_on_error=1"}
    run_to_success(copies, env=env)
    done, output = run([copies, "--plant"], env=env)
    assert done.returncode != 0 and "data race" in output, output


@pytest.mark.slow
def test_address_and_undefined_behaviour_sanitizers_are_clean_of_processes(tmp_path):
    run_to_success(build_with_sanitizer(tmp_path / "p", "address,undefined", "processes.cc"))


def nvcc():
    path = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if path is None:
        pytest.skip("needs nvcc")
    return path


def build_cuda(path):
    host = [f"-Xcompiler={flag}" for flag in STRICT]
    kernels = [
        CUDA / f"{kernel}_{way}" for kernel in KERNELS["driver.cc"] for way in ("cpu.cc", "cuda.cu")
    ]
    done, output = run(
        [nvcc(), "-x", "cu", "-std=c++17", "-O2", "-lineinfo", "-arch=sm_90", "-DJDISTADAM_NO_CLONES",
         "-DJDISTADAM_DRIVER_CUDA", f"-I{CUDA}", *EXACTLY, *host, DRIVER / "driver.cc", *kernels, "-o", path]
    )  # fmt: skip
    assert done.returncode == 0, output


@pytest.fixture(scope="module")
def cuda_driver(tmp_path_factory):
    path = tmp_path_factory.mktemp("cuda") / "driver"
    build_cuda(path)
    return path


@pytest.mark.slow
def test_the_driver_compiles_for_cuda(cuda_driver):
    assert cuda_driver.exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kernel_bound", "peer_bound"])
def test_experiments_on_what_bounds_a_kernel_compile(tmp_path, name):
    source = ROOT / "experiments" / f"{name}.cu"
    flags = ["-std=c++17", "-arch=sm_90", f"-I{CUDA}"]
    done, output = run([nvcc(), *flags, "-c", source, "-o", tmp_path / f"{name}.o"])
    assert done.returncode == 0, output


@pytest.mark.gpu
def test_ordinary_arithmetic_is_that_of_ieee(tmp_path):
    """2^34 quotients by c1 and c2, roots and quotients: DRIVER/arithmetic.cu."""
    build = [nvcc(), "-std=c++17", "-arch=sm_90", *EXACTLY, f"-I{CUDA}", DRIVER / "arithmetic.cu"]
    done, output = run([*build, "-o", tmp_path / "arithmetic"])
    assert done.returncode == 0, output
    done, output = run([tmp_path / "arithmetic"])
    assert done.returncode == 0 and "SUCCESS" in output, output


@pytest.mark.gpu
def test_cuda_gives_the_bits_of_the_cpu_and_keeps_in_bounds(cuda_driver):
    """All kernels, and the hardware's rounding of all 2^32 floats."""
    done, output = run([cuda_driver])
    assert done.returncode == 0 and "SUCCESS" in output, output


def sanitizer():
    path = shutil.which("compute-sanitizer") or shutil.which(
        "/usr/local/cuda/bin/compute-sanitizer"
    )
    if path is None:
        pytest.skip("needs compute-sanitizer")
    return path


@pytest.mark.gpu
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_compute_sanitizer_is_clean(cuda_driver, tool):
    options = ["--leak-check", "full"] if tool == "memcheck" else []
    command = [sanitizer(), "--tool", tool, *options, "--error-exitcode", "7"]
    done, output = run([*command, cuda_driver, "--exact"])
    assert done.returncode == 0 and "SUCCESS" in output, output


@pytest.mark.gpu
def test_compute_sanitizer_sees_a_planted_bug(cuda_driver):
    command = [sanitizer(), "--tool", "memcheck", "--error-exitcode", "7"]
    done, output = run([*command, cuda_driver, "--exact", "--plant"])
    assert done.returncode != 0 and "Invalid" in output, output
