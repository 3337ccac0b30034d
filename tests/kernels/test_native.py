"""Loading: late, once, and never at the price of JAX's own backends."""

import os
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdistadam as jda
from jdistadam.kernels import native
from support.bits import assert_trees_same_bits
from support.paths import ROOT


def run(code, **env):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=120,
        cwd="/",
    )


def test_import_starts_no_backend_and_loads_no_native_code():
    done = run(
        "import sys, jdistadam; from jax._src import xla_bridge as x;"
        "assert not x._backends, x._backends;"
        "assert not [m for m in sys.modules if m in ('jdistadam._cpu', 'jdistadam._cuda')]"
    )
    assert done.returncode == 0, done.stderr


def test_exit_reports_no_leaks():
    done = run(
        "import jdistadam.kernels.native as n; assert n.status('cpu').available; import jdistadam._cpu"
    )
    assert done.returncode == 0 and "leaked" not in done.stderr, done.stderr


def test_version_of_the_running_jaxlib_is_read():
    major, minor = native.runtime_ffi_api_version()
    assert major == 0 and minor >= 3


@pytest.mark.parametrize("built", [(0, 99), (1, 0)])
def test_module_with_newer_headers_raises(built):
    with pytest.raises(
        jda.NativeError,
        match=rf"FFI version does not fit jaxlib .*got {built[0]}.{built[1]}, expected at most",
    ):
        native.check_ffi_api_version(built, native.runtime_ffi_api_version())


def test_module_with_newer_headers_leaves_jax_alone(monkeypatch):
    """It is never registered: JAX keeps working and the status says what to do."""
    module = types.SimpleNamespace(
        ffi_api_version=(0, 99), handlers=lambda: pytest.fail("registered"), build_info=""
    )
    with monkeypatch.context() as replaced:  # JAX imports its plugins and dialects by it, too
        replaced.setattr(native.importlib, "import_module", lambda name: module)
        status = native.status.__wrapped__("cpu")
    assert not status.available and "Reinstall" in status.detail
    assert jax.jit(lambda x: x + 1)(1) == 2


def test_missing_module_says_how_to_get_it(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(native.importlib, "import_module", missing)
    # Also where the package is in its source tree, as in an editable installation.
    assert "without a CUDA compiler" in native.status.__wrapped__("cuda").detail
    for platform in native.PLATFORMS:
        status = native.status.__wrapped__(platform)
        assert not status.available
        assert "nstall" in status.detail
    assert "no compiled kernels for platform 'tpu'" in native.status("tpu").detail


def test_fallback_warns_once_and_works():
    done = run(
        "import warnings, importlib, jax, jax.numpy as jnp, jdistadam as jda\n"
        "from jdistadam.kernels import native\n"
        "real = importlib.import_module\n"
        "def fake(name, *a):\n"
        "    if name in ('jdistadam._cpu', 'jdistadam._cuda'): raise ModuleNotFoundError(name)\n"
        "    return real(name, *a)\n"
        "native.importlib.import_module = fake\n"
        "tx = jda.fused_adamw(1e-2)\n"
        "p = {'w': jnp.ones(3), 'b': jnp.ones((2, 2))}\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always')\n"
        "    q, s = tx.step(p, tx.init(p), p)\n"
        "    u, s = tx.update(p, s, p)\n"
        "assert len(seen) == 1 and 'jax.numpy fallback on cpu' in str(seen[0].message), seen\n"
        "assert abs(float(q['w'][0]) - 0.989999) < 1e-5, q\n",
        JAX_PLATFORMS="cpu",
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("gpus", "codes", "chosen", "why"),
    [
        ("", "sm_80 sm_90 sm_120", "75-virtual;80-real;90-real;100-real;120-virtual", "has no GPU"),
        ("", "sm_80 sm_90", "75-virtual;80-real;90-real;90-virtual", "has no GPU"),
        ("9.0 9.0", "sm_80 sm_90 sm_120", "90", "the GPUs of this machine"),
        ("10.0 8.9 10.0", "sm_89 sm_100", "89-real;100", "the GPUs of this machine"),
        ("9.0 12.1", "sm_90 sm_120", "75-virtual;80-real;90-real;100-real;120-virtual", "knows no"),
        ("7.0", "sm_70 sm_90", "75-virtual;80-real;90-real;90-virtual", "knows no"),
        ("[N/A]", "sm_90", "75-virtual;80-real;90-real;90-virtual", "has no GPU"),
    ],
)
def test_a_build_is_for_the_gpus_of_the_machine(tmp_path, gpus, codes, chosen, why):
    """As nvidia-smi and nvcc tell them; without any, for all."""
    for name, lines in (("nvidia-smi", gpus), ("nvcc", codes)):
        (tmp_path / name).write_text(f"#!/bin/sh\nprintf '%s\\n' {lines}\n")
        (tmp_path / name).chmod(0o755)
    script = ROOT / "cuda" / "architectures.py"
    command = [sys.executable, "-S", script, tmp_path / "nvcc"]
    env = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    assert done.stdout.splitlines()[0] == chosen and why in done.stdout.splitlines()[1]


def test_a_build_without_cuda_traces_no_fallback(monkeypatch):
    """Where there are CPU devices alone; on Explicit axes some fallbacks cannot be traced."""
    status = native.status
    missing = native.Status(False, "not built")
    monkeypatch.setattr(native, "status", lambda x: missing if x == "cuda" else status(x))
    monkeypatch.setattr(native, "_has_cpus_alone", lambda: native.default_platform() == "cpu")
    monkeypatch.setattr(native, "default_platform", lambda: "cpu")  # also beside a GPU

    def fallback(x):
        raise AssertionError("was traced")

    jax.make_jaxpr(lambda x: native.choose(lambda y: y + 1, fallback)(x))(1)
    monkeypatch.setattr(native, "default_platform", lambda: "cuda")  # a GPU, and no kernels for it
    with pytest.raises(AssertionError, match="was traced"), pytest.warns(match="not built"):
        native.warn_if_unavailable.cache_clear()
        jax.make_jaxpr(lambda x: native.choose(lambda y: y + 1, fallback)(x))(1)


def exported_step():
    """A fused step as a function of leaves, which jax can serialize; its arguments; and exported."""
    tx = jda.fused_adamw(0.03, b1=0.87, b2=0.9973, weight_decay=0.13)
    params = {"w": jnp.linspace(-1, 1, 60).reshape(5, 12), "b": jnp.ones(3, jnp.bfloat16)}
    grads = jax.tree.map(lambda x: jnp.cos(3 * x), params)
    leaves, tree = jax.tree.flatten((grads, tx.init(params), params))
    step = jax.jit(lambda *leaves: jax.tree.leaves(tx.step(*tree.unflatten(leaves))))
    return step, leaves, jax.export.export(step, disabled_checks=jda.export_checks())(*leaves)


def test_a_step_can_be_exported():
    step, leaves, exported = exported_step()
    assert "jdistadam_adam" in exported.mlir_module()  # not the fallback
    assert_trees_same_bits(exported.call(*leaves), step(*leaves))
    with pytest.raises(ValueError, match="Cannot serialize code with custom calls"):
        jax.export.export(step)(*leaves)


def test_an_exported_step_runs_in_another_process(tmp_path):
    """With the same bits, where export_checks has registered the kernels, and only there."""
    pytest.importorskip("flatbuffers", reason="needs flatbuffers, by which jax serializes")
    step, leaves, exported = exported_step()
    (tmp_path / "step").write_bytes(exported.serialize())
    as_bits = [np.asarray(x) for x in leaves]
    np.savez(tmp_path / "in.npz", *[x.view(f"u{x.itemsize}") for x in as_bits])
    code = f"""if True:
        import jax, numpy as np, pathlib, jdistadam
        folder = pathlib.Path({str(tmp_path)!r})
        exported = jax.export.deserialize((folder / "step").read_bytes())
        bits = np.load(folder / "in.npz").values()
        leaves = [x.view(aval.dtype) for x, aval in zip(bits, exported.in_avals, strict=True)]
        # here
        found = [np.asarray(x) for x in exported.call(*leaves)]
        np.savez(folder / "out.npz", *[x.view(f"u{{x.itemsize}}") for x in found])
    """
    done = run(code, JAX_PLATFORMS="cpu")
    assert "No FFI handler registered for jdistadam" in done.stderr
    done = run(code.replace("# here", "jdistadam.export_checks()"), JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stderr
    expected = [np.asarray(x).view(f"u{x.dtype.itemsize}") for x in step(*leaves)]
    assert_trees_same_bits([*np.load(tmp_path / "out.npz").values()], expected)
