"""Eight CPU devices for every test, the GPUs that jax sees, and the package that has its kernels."""

import glob
import inspect
import math
import os
import pathlib
import warnings

import pytest

pytest.register_assert_rewrite("support")  # its assertions say what they compared, too
from support import fast_compilation  # noqa: E402

flags = [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8"]
if not glob.glob("/dev/nvidia[0-9]*"):
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # so that jax looks for no other accelerator
    if "optimization_level" not in flags[0]:
        flags.append(fast_compilation.flags())
os.environ["XLA_FLAGS"] = " ".join(flags).strip()
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # processes share a GPU

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import Mesh  # noqa: E402

from support import gpus, samples  # noqa: E402
from support.package import choose_package  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_platform_name", "cpu")  # beside GPUs, too, tests run on CPUs by default


def is_case(when, item):
    """Whether a function of some of a test's parameters, by their names, is true."""
    return when(*(item.callspec.params[name] for name in inspect.signature(when).parameters))


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist starts others
def pytest_sessionstart():
    choose_package()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Warnings are errors where a test file is imported, as while a test runs: not in plugins."""
    with warnings.catch_warnings():
        if isinstance(collector, pytest.Module):
            warnings.simplefilter("error")
        return (yield)


def warnings_are_errors(item):
    """Marks a test, where its own filters count for more, and those of the command line, too."""
    own = [x for mark in item.iter_markers("filterwarnings") for x in mark.args]
    given = item.config.getoption("pythonwarnings") or ()
    item.add_marker(pytest.mark.filterwarnings("error", *given, *own))


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the markers
def pytest_collection_modifyitems(config, items):
    for item in items:
        warnings_are_errors(item)
        if "h200s" in item.fixturenames:
            item.add_marker("h200")
        if (mark := item.get_closest_marker("often")) and not is_case(mark.kwargs["when"], item):
            item.add_marker("slow")
    samples.mark_the_rest_slow(items)
    for item in items:
        if item.get_closest_marker("slow"):
            item.user_properties.append(("marked", "slow"))  # for .ci/report.py


@pytest.hookimpl(tryfirst=True)  # before a fixture asks for a GPU
def pytest_runtest_setup(item):
    if reason := gpus.why_skipped({mark.name for mark in item.iter_markers()}):
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def default_devices(request, monkeypatch):
    """Tests of GPUs run there by default; all others, and processes that they start, on CPUs."""
    if gpus.NEEDED.keys() & {mark.name for mark in request.node.iter_markers()}:
        with jax.default_device(jax.devices("gpu")[0]):
            yield
    else:
        monkeypatch.setenv("JAX_PLATFORMS", "cpu")
        yield


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def platform(request):
    """Runs a test on the CPU and on a GPU."""
    with jax.default_device(jax.devices(request.param)[0]):
        yield request.param


@pytest.fixture
def cpu_mesh():
    """Makes a one-dimensional mesh of n CPU devices, with Explicit axes as make_mesh does."""

    def make(n, axis="data"):
        return jax.make_mesh((n,), (axis,), devices=jax.devices("cpu")[:n])

    return make


@pytest.fixture(scope="session")
def h200s():
    """Makes a mesh of n H200s that exist only for the compiler."""
    from jdistadam.kernels import native

    if not native.status("cuda").available:
        pytest.skip(f"needs the CUDA module: {native.status('cuda').detail}")
    config = (pathlib.Path(__file__).parent / "support" / "h200.txtpb").read_text()

    def make(*shape, names=("data",), **kwargs):
        n = math.prod(shape)
        try:
            topology = topologies.get_topology_desc(
                platform="cuda", target_config=config, topology=f"1x1x{n}"
            )
        except Exception as error:
            version = jax.__version__
            pytest.skip(
                f"needs JAX's CUDA plugin (pip install --no-deps jax-cuda13-plugin=={version} "
                f"jax-cuda13-pjrt=={version}): {error}"
            )
        return Mesh(np.asarray(topology.devices).reshape(shape), names, **kwargs)

    return make


@pytest.fixture
def short_wait():
    """Copies wait two seconds for a device."""
    from jdistadam.core import waits

    before = waits.wait_limit()
    waits.set_wait_limit(2)
    yield
    waits.set_wait_limit(before)


@pytest.fixture
def several_kernel_calls(monkeypatch):
    """A kernel call for each bucket, as large states have several."""
    from jdistadam.distributed import calls

    monkeypatch.setattr(calls, "MERGED_BYTES", 1)
