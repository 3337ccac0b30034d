"""The kernels without Python and JAX, under the checkers: driver/driver.cc."""

import os
import shutil
import subprocess

import jax.ffi
import pytest

from support.paths import ROOT, TESTS

CUDA = ROOT / "cuda"
DRIVER = TESTS / "kernels" / "driver"
HOST = ["-std=c++17", "-g", "-DJDISTADAM_NO_CLONES", "-pthread", f"-I{CUDA}"]
STRICT = ["-ffp-contract=off", "-fno-fast-math"]
EXACTLY = ["-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true"]


KERNELS = ("adam", "compact", "norm", "sum", "keep", "peer")
CPU_KERNELS = [CUDA / f"{kernel}_cpu.cc" for kernel in KERNELS]
CPU_SOURCES = [DRIVER / "driver.cc", *CPU_KERNELS]
CUDA_SOURCES = [CUDA / f"{kernel}_cuda.cu" for kernel in KERNELS]


def run(command, **kwargs):
    done = subprocess.run(
        [str(x) for x in command], capture_output=True, text=True, timeout=600, **kwargs
    )
    return done, done.stdout + done.stderr


def build_cpu(path, *flags, main="driver.cc"):
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    sources = [DRIVER / main, *CPU_KERNELS]
    done, output = run([compiler, *HOST, *STRICT, *flags, *sources, "-o", path])
    if done.returncode and "cannot find -l" in output:
        pytest.skip(f"needs the compiler's sanitizer libraries: {output}")
    assert done.returncode == 0, output


def test_address_and_undefined_behaviour_sanitizers_are_clean(tmp_path):
    flags = ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    build_cpu(tmp_path / "driver", *flags)
    for options in ((), ("--exact",)):
        done, output = run([tmp_path / "driver", *options])
        assert done.returncode == 0 and "SUCCESS" in output, output


@pytest.mark.slow
def test_thread_sanitizer_is_clean(tmp_path):
    build_cpu(tmp_path / "driver", "-O1", "-fsanitize=thread")
    done, output = run([tmp_path / "driver"])
    assert done.returncode == 0 and "SUCCESS" in output, output


@pytest.mark.parametrize(
    "sanitize", ["thread", pytest.param("address,undefined", marks=pytest.mark.slow)]
)
def test_devices_meet(tmp_path, sanitize):
    """Loops, executions that take turns, devices that fail or do not come, steps in meetings."""
    build_cpu(tmp_path / "meeting", "-O1", f"-fsanitize={sanitize}", main="meeting.cc")
    done, output = run([tmp_path / "meeting"])
    assert done.returncode == 0 and "SUCCESS" in output, output


@pytest.mark.slow
def test_a_step_without_the_second_meeting_is_a_race(tmp_path):
    build_cpu(
        tmp_path / "meeting", "-O1", "-fsanitize=thread", "-DJDISTADAM_PLANT_BUG",
        main="meeting.cc",
    )  # fmt: skip
    done, output = run([tmp_path / "meeting"])
    assert done.returncode != 0 and "data race" in output, output


@pytest.mark.parametrize("sanitize", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_planted_bug_fails_the_run(tmp_path, sanitize):
    """One element too many: seen by the guard words alone, and by the sanitizer."""
    flags = ["-fsanitize=address"] if sanitize else []
    build_cpu(tmp_path / "driver", "-O1", "-DJDISTADAM_PLANT_BUG", *flags)
    done, output = run([tmp_path / "driver", *(["--exact"] if sanitize else [])])
    assert done.returncode != 0
    assert ("AddressSanitizer" if sanitize else "guard overwritten") in output


def nvcc():
    path = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if path is None:
        pytest.skip("needs nvcc")
    return path


def build_cuda(path, *flags):
    host = [f"-Xcompiler={flag}" for flag in STRICT]
    done, output = run(
        [nvcc(), "-x", "cu", "-std=c++17", "-O2", "-lineinfo", "-arch=sm_90", "-DJDISTADAM_NO_CLONES",
         "-DJDISTADAM_DRIVER_CUDA", f"-I{CUDA}", *EXACTLY, *host, *flags, *CPU_SOURCES, *CUDA_SOURCES, "-o", path]
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
def test_compute_sanitizer_sees_a_planted_bug(tmp_path):
    build_cuda(tmp_path / "driver", "-DJDISTADAM_PLANT_BUG")
    command = [sanitizer(), "--tool", "memcheck", "--error-exitcode", "7"]
    done, output = run([*command, tmp_path / "driver", "--exact"])
    assert done.returncode != 0 and "Invalid" in output, output


@pytest.fixture(scope="module")
def peer_waits(tmp_path_factory):
    """The handlers of CUDA with their kernel over peers, called without XLA."""
    path = tmp_path_factory.mktemp("peers") / "peer_waits"
    host = [f"-Xcompiler={flag}" for flag in ("-pthread", "-DJDISTADAM_NO_CLONES", *STRICT)]
    kernels = [CUDA / f"{name}_cuda.cu" for name in ("peer", "norm")]
    kernels += [CUDA / f"{name}_cpu.cc" for name in ("peer", "adam", "norm")]
    include = [f"-I{CUDA}", f"-I{jax.ffi.include_dir()}"]
    done, output = run(
        [nvcc(), "-std=c++17", "-O2", "-lineinfo", "-arch=sm_90", *EXACTLY, *host, *include,
         DRIVER / "peer_waits.cu", *kernels, "-o", path]
    )  # fmt: skip
    assert done.returncode == 0, output
    return path


@pytest.mark.slow
def test_the_driver_of_peers_compiles(peer_waits):
    assert peer_waits.exists()


@pytest.mark.multigpu
def test_late_gpus_are_waited_for(peer_waits):
    """Each in turn, before its gradients, before its kernel, behind it, and its host thread."""
    done, output = run([peer_waits])
    assert done.returncode == 0 and "SUCCESS" in output, output


@pytest.mark.multigpu
@pytest.mark.parametrize("wait", ["ready", "done"])
def test_without_a_wait_a_late_gpu_changes_bits(peer_waits, wait):
    done, output = run([peer_waits, wait])
    assert done.returncode == 1 and "late at place" in output, output


@pytest.mark.multigpu
def test_memcheck_of_steps_over_peers_is_clean(peer_waits):
    command = [sanitizer(), "--tool", "memcheck", "--leak-check", "full", "--error-exitcode", "7"]
    done, output = run([*command, peer_waits])
    assert done.returncode == 0 and "SUCCESS" in output, output
