"""Files that are changed, cut off, missing or of something else: an error that names them."""

import dataclasses
import gc
import json
import shutil
import sys
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdistadam as jda
from jdistadam.checkpoint.storage import OLDEST_ORBAX, Reader
from support.bits import assert_trees_same_bits
from support.headers import rewrite_header
from support.lookalike import make_params, make_tx
from support.paths import ROOT
from support.samples import few, often

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

HEADER = "3/state/header.json"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of a state with noise in all of it, the optimizer and the state."""
    tx = make_tx(2, bucket_bytes=64)
    state = jda.TrainState.create(make_params(jnp.float32), tx, param_dtypes=jnp.bfloat16)
    noise = lambda x: x + jnp.arange(1.0, 1 + x.size, dtype=x.dtype).reshape(x.shape)  # noqa: E731
    opt_state = state.opt_state._replace(
        mu=noise(state.opt_state.mu), nu=noise(state.opt_state.nu), count=state.opt_state.count + 3
    )
    state = jda.TrainState(state.params, opt_state)
    folder = tmp_path_factory.mktemp("saved")
    jda.save(folder, state, tx)
    return folder, tx, state


@pytest.fixture
def copied(saved, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(saved[0], folder)
    return folder


def shapes_of(tx):
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), make_params())
    return jda.TrainState.shapes(shapes, tx, param_dtypes=jnp.bfloat16)


def exported(state, tx):
    return jda.to_optax_state(state, tx)[:2]


def data_files(folder):
    """The files that hold the arrays, the largest first."""
    files = [path for path in (folder / "3" / "state").rglob("d/*") if path.is_file()]
    return sorted(files, key=lambda path: (-path.stat().st_size, path))


def outcome(folder, tx, want):
    """ "error", or "same" if a restore gave the very state; anything else fails."""
    try:
        got = jda.restore(folder, shapes_of(tx), tx)
    except jda.CheckpointError as error:
        assert str(folder) in str(error)
        return "error"
    assert_trees_same_bits(exported(got, tx), want)
    return "same"


def flip(path, position, bit):
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.parametrize("every", [2, pytest.param(400, marks=pytest.mark.slow)])
def test_flipped_bits_raise_or_change_nothing(saved, copied, every):
    """Anywhere in the files: an error, or the very state, where a byte is read by none. Never else.

    In the moments a flip is always an error. The bfloat16 params are such bytes that are read by
    none, as they are rounded from the main parameters.
    """
    _, tx, state = saved
    want, rng = exported(state, tx), np.random.default_rng(0)
    mu = np.asarray(state.opt_state.mu).reshape(-1)
    everything = [x for x in (copied / "3").rglob("*") if x.is_file() and x.stat().st_size]
    for k in range(every):
        if k % 2:
            path, position = place_of(mu, copied, rng)
        else:
            path = everything[rng.integers(len(everything))]
            position = rng.integers(path.stat().st_size)
        bit = rng.integers(8)
        flip(path, position, bit)
        assert outcome(copied, tx, want) == "error" or k % 2 == 0, (path, position)
        flip(path, position, bit)
    assert outcome(copied, tx, want) == "same"


def place_of(array, folder, rng):
    """A file that holds eight elements of an array, and where they are.

    Drawn again where the eight are not together in a file, since a leaf ends between them.
    """
    for _ in range(10):
        start = 8 * rng.integers(array.size // 8)
        for path in data_files(folder):
            position = path.read_bytes().find(array[start : start + 8].tobytes())
            if position >= 0:
                return path, position
    raise AssertionError("in no file: are the arrays compressed?")


def test_every_leaf_is_compared_with_its_checksum(saved, copied, monkeypatch):
    """A changed checksum in the header, as a changed array: the error names the leaf."""
    _, tx, _ = saved
    path = copied / HEADER
    text = path.read_text()
    names = list(json.loads(text)["header"]["leaves"])
    assert len(names) == 3 * 4 + 2  # params, main_params, mu, nu; count, grad_norm
    for name in names:
        rewrite_header(path, lambda header: header["leaves"][name].update(sum="0" * 16))  # noqa: B023
        if name.startswith("params"):  # their exact values are read
            with pytest.raises(jda.CheckpointError, match="damaged in the files") as caught:
                jda.restore_params(copied)
        else:
            with pytest.raises(jda.CheckpointError, match="damaged in the files") as caught:
                jda.restore(copied, shapes_of(tx), tx)
        assert f"state: {name}: damaged in the files: " in str(caught.value)
        path.write_text(text)


def test_damaged_headers_raise(saved, copied):
    _, tx, _ = saved
    path, text = copied / HEADER, (copied / HEADER).read_text()
    texts = {
        "damaged: its own checksum differs": text.replace('"count": 3', '"count": 4'),
        "damaged, or of something else": text[: len(text) // 2],
        "missing: this is no checkpoint": None,
        "a checkpoint of another version": lambda h: h.update(version=2),
        "the header of something else": lambda h: h.update(format="other"),
    }
    for message, change in texts.items():
        if change is None:
            path.unlink()
        elif callable(change):
            rewrite_header(path, change)
        else:
            path.write_text(change)
        with pytest.raises(jda.CheckpointError, match=message) as caught:
            jda.restore(copied, shapes_of(tx), tx)
        assert str(path) in str(caught.value).split(": ")[0]
        path.write_text(text)
    assert outcome(copied, tx, exported(saved[2], tx)) == "same"


OTHER_TYPES = {
    "all leaves": lambda header: header.update(leaves=[]),
    "a leaf": lambda header: header["leaves"].update(count=7),
    "shape": lambda header: header["leaves"]["count"].update(shape="x"),
    "negative shape": lambda header: header["leaves"]["count"].update(shape=[-1]),
    "dtype": lambda header: header["leaves"]["count"].update(dtype=["int32"]),
    "unknown dtype": lambda header: header["leaves"]["count"].update(dtype="int33"),
    "sum": lambda header: header["leaves"]["count"].update(sum=1),
    "keys": lambda header: header["leaves"]["count"].update(keys=[1]),
    "is_count": lambda header: header["leaves"]["count"].update(is_count="yes"),
    "random key": lambda header: header["leaves"]["count"].update(key="no such generator"),
    "extra": lambda header: header.update(extra=[1]),
}


@few(5)
@pytest.mark.parametrize("change", OTHER_TYPES)
def test_headers_of_other_types_raise(saved, copied, change):
    """Their own checksum fits, so that the types alone tell."""
    path, text = copied / HEADER, (copied / HEADER).read_text()
    rewrite_header(path, OTHER_TYPES[change])
    with pytest.raises(jda.CheckpointError, match="damaged, or of something else") as caught:
        jda.restore(copied, shapes_of(saved[1]), saved[1])
    assert str(path) in str(caught.value)
    for other in ("7", "[1]", '{"header": 1, "sha256": "x"}', "[" * 10**5, "1" * 5000):
        path.write_text(other)
        with pytest.raises(jda.CheckpointError, match="damaged, or of something else"):
            jda.restore(copied, shapes_of(saved[1]), saved[1])
    path.write_text(text)


def test_folders_that_are_no_steps_are_left_out(saved, copied):
    """int("007") is 7, and digits of other scripts are digits to Python."""
    for name in ("007", "\u0663", "1_0", "+4"):
        (copied / name).mkdir()
    assert outcome(copied, saved[1], exported(saved[2], saved[1])) == "same"


@pytest.fixture
def unraisable(monkeypatch):
    """What was raised where nothing can catch it."""
    told = []
    monkeypatch.setattr(sys, "unraisablehook", lambda x: told.append(repr(x.exc_value)[:200]))
    return told


@pytest.mark.parametrize("how", ["missing", "empty", "half", "byte"])
@often(lambda how: how == "half")
def test_truncated_and_missing_files_raise_or_change_nothing(saved, copied, how, unraisable):
    """Each file of a checkpoint: an error, or the very state where no part of it is needed.

    And no read is left half done, which would print a page when it is deleted.
    """
    _, tx, state = saved
    want, errors = exported(state, tx), []
    for path in sorted(x for x in copied.rglob("*") if x.is_file() and x.stat().st_size):
        data = path.read_bytes()
        if how == "missing":
            path.unlink()
        else:
            path.write_bytes({"empty": b"", "half": data[: len(data) // 2], "byte": data[:-1]}[how])
        if outcome(copied, tx, want) == "error":
            errors.append(path)
        path.write_bytes(data)
    assert copied / HEADER in errors or how == "byte"  # which ends with a line feed
    if how != "byte":  # orbax pads its data files; the one that holds the large arrays is needed
        assert data_files(copied)[0] in errors
    gc.collect()
    assert not unraisable


def test_folders_without_a_checkpoint_raise(saved, tmp_path):
    _, tx, _ = saved
    with pytest.raises(jda.CheckpointError, match="no checkpoint: got none"):
        jda.restore(tmp_path / "nowhere", shapes_of(tx), tx)
    with pytest.raises(
        jda.HyperparameterError, match="step: not the number of a checkpoint: got '3'"
    ):
        jda.restore(saved[0], shapes_of(tx), tx, step="3")
    with pytest.raises(jda.CheckpointError, match=r"no checkpoint of step 5: got steps \[3\]"):
        jda.restore(saved[0], shapes_of(tx), tx, step=5)
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "7" / "state", {"w": jnp.ones(3)})
    with pytest.raises(jda.CheckpointError, match="missing: this is no checkpoint of jdistadam"):
        jda.restore(tmp_path, shapes_of(tx), tx)


def test_templates_that_differ_from_the_file_raise(saved):
    """orbax would cast, pad and cut off: dtypes and shapes are compared before it may."""
    folder, tx, _ = saved
    shapes = shapes_of(tx)
    float32 = {k: jax.ShapeDtypeStruct(x.shape, jnp.float32) for k, x in shapes.params.items()}
    half = make_tx(2, mu_dtype=jnp.bfloat16)
    no_main = make_tx(2, policy=jda.MixedPrecisionPolicy(main_params_dtype=None))
    wider = shapes.params | {"a": jax.ShapeDtypeStruct((256, 129), jnp.bfloat16)}
    fewer = {k: x for k, x in shapes.params.items() if k != "a"}
    more = shapes.params | {"c": jax.ShapeDtypeStruct((2,), jnp.bfloat16)}
    of = jda.TrainState.shapes
    cases = [
        (of(wider, tx), tx, jda.ShapeError, r"header.json: params\['a'\]: has another shape in the file: got \(256, 128\), expected shape \(256, 129\)"),
        (of(fewer, tx), tx, jda.TreeError, r"params\['a'\]: in the file, and not in the template: got params\['a'\] and 3 more, .* unused=lambda path: path.startswith\(\"params\['a'\]\"\)\."),
        (of(more, tx), tx, jda.TreeError, r"params\['c'\]: missing in the file"),
        (of(shapes.params, half), half, jda.DtypeError, r"mu\['a'\]: a cast for mu\['a'\] .* got float32, expected bfloat16"),
        (of(shapes.params, no_main), no_main, jda.DtypeError, r"main_params\['a'\]: a cast for params\['a'\]"),
        ({"params": 1}, None, jda.TreeError, "state: has no params and opt_state"),
        ({"params": {}, "opt_state": optax.sgd(0.1).init({})}, None, jda.TreeError, "not the state of one Adam"),
        (shapes, None, jda.PolicyError, "tx: not a distributed optimizer"),
        (dataclasses.replace(shapes, rng=jax.random.key(0)), tx, jda.TreeError, "rng: missing in the file"),
    ]  # fmt: skip
    for template, optimizer, error, message in cases:
        with pytest.raises(error, match=message):
            jda.restore(folder, template, optimizer)
    assert jda.restore(folder, of(shapes.params, half), half, cast=True).opt_state.mu.dtype == "bfloat16"  # fmt: skip
    assert jda.restore(folder, of(float32, tx), tx).params["a"].dtype == jnp.float32  # exact
    instead = r".* Leave like out, or give it the paths and shapes that were saved\."
    with pytest.raises(jda.TreeError, match=rf"params\['b'\]: in the file, and not .*{instead}"):
        jda.restore_params(folder, {"a": shapes.params["a"]})
    with pytest.raises(jda.TreeError, match=rf"params\['c'\]: missing in the file: .*{instead}"):
        jda.restore_params(folder, shapes.params | {"c": shapes.params["a"]})
    with pytest.raises(jda.TreeError, match=r"^like: a whole train state: got TrainState"):
        jda.restore_params(folder, shapes)
    with pytest.raises(jda.DtypeError, match=r"^like\.init: not an array: got <function"):
        jda.restore_params(folder, tx)
    with pytest.raises(jda.DtypeError, match=r"params\['a'\]: a cast"):
        jda.restore_params(folder, shapes.params | {"a": jax.ShapeDtypeStruct((256, 128), jnp.float16)})  # fmt: skip


def test_one_error_names_all_that_the_file_lacks(saved):
    folder, tx, _ = saved
    shapes, leaf = shapes_of(tx), jax.ShapeDtypeStruct((2,), jnp.bfloat16)

    def raised(**changed):
        with pytest.raises((jda.TreeError, jda.ShapeError)) as caught:
            jda.restore(folder, jda.TrainState.shapes(shapes.params | changed, tx), tx)
        return str(caught.value).partition(": params")[2]

    one = raised(c=leaf)
    assert one.startswith("['c']: missing in the file: got ")
    assert "Also" not in one and one.endswith("""path.startswith("params['c']").""")
    head = raised(head={str(i): leaf for i in range(6)})
    assert head.startswith("['head']['0']: missing in the file: got ")
    others = ", ".join(f"params['head']['{i}']" for i in (1, 2, 3))
    assert f"shape (2,). Also missing or of another shape: {others} and 2 more. Restore" in head
    assert head.endswith("""new=lambda path: path.startswith("params['head']").""")
    mixed = raised(a=leaf, c=leaf)  # b is in the file: what a and c have in common covers it
    assert mixed.startswith("['a']: has another shape in the file: got (256, 128), expected")
    assert "shape: params['c']. Restore" in mixed
    assert mixed.endswith("""path.startswith(("params['a']", "params['c']")).""")
    more = jda.TrainState.shapes(shapes.params | {"c": leaf}, tx)
    with pytest.raises(
        jda.TreeError, match=r"params\['c'\]: stays .* which has but its shape: got"
    ):
        jda.restore(folder, more, tx, new=lambda path: path == "params['c']")


def test_saving_params_beside_main_params_of_others_raises(tmp_path):
    """A restore returned the main parameters, and the params that were saved were lost."""
    for dtype in (jnp.bfloat16, jnp.float16):
        tx = jda.fused_adamw(1e-2, main_params_dtype=jnp.float32)
        params = {str(i): jnp.ones(i + 2, dtype) for i in range(6)} | {"empty": jnp.ones(0, dtype)}
        opt_state = tx.init(params)
        average = jax.tree.map(lambda x: x / 2, params)
        with pytest.raises(
            jda.LayoutError, match=r"^params\['0'\]: differs from its main parameter"
        ):
            jda.save(tmp_path, {"params": average, "opt_state": opt_state}, step=1)
        anew = opt_state._replace(main_params=tx.init(average).main_params)
        jda.save(tmp_path / str(dtype), {"params": average, "opt_state": anew}, step=1)
        other_shape = params | {"0": jnp.ones(7, dtype)}
        with pytest.raises(jda.LayoutError, match=r"^params\['0'\]: differs from its main"):
            jda.save(tmp_path, {"params": other_shape, "opt_state": opt_state}, step=1)
        with pytest.raises(jda.errors.TreeError, match="not an array"):
            shapes = jax.eval_shape(lambda x: x, params)
            jda.save(tmp_path, {"params": shapes, "opt_state": opt_state}, step=1)


def test_saving_inconsistent_states_raises(saved, tmp_path):
    _, tx, state = saved
    edited = jda.TrainState(state.params | {"a": state.params["a"] + 1}, state.opt_state)
    with pytest.raises(jda.LayoutError, match=r"params\['a'\]: differ from the main parameters"):
        jda.save(tmp_path, edited, tx)
    with pytest.raises(jda.LayoutError, match="num_shards 2 instead of 4"):
        jda.save(tmp_path, state, make_tx(4, bucket_bytes=64))
    with pytest.raises(jda.TreeError, match=r"model_state\['x'\]: not an array"):
        jda.save(tmp_path, dataclasses.replace(state, model_state={"x": "text"}), tx)
    with pytest.raises(jda.DtypeError, match=r"model_state\['x'\]: would lose bits"):
        jda.save(tmp_path, dataclasses.replace(state, model_state={"x": np.ones(2)}), tx)
    with pytest.raises(jda.PolicyError, match="tx: not a distributed optimizer"):
        jda.save(tmp_path, state)
    with pytest.raises(jda.TreeError, match="state: traced, so that it holds no values to save"):
        jax.jit(lambda state: jda.save(tmp_path, state, tx))(state)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state.params)
    for kind in (jnp.float32, "remainder16"):
        flat = optax.flatten(jda.fused_adamw(0.1, main_params_dtype=kind))
        with pytest.raises(jda.TreeError, match="opt_state: main_params: a main parameter without"):
            jda.save(tmp_path, {"params": params, "opt_state": flat.init(params)})
    assert [x.name for x in tmp_path.iterdir()] == [".jdistadam.lock"]


def test_empty_arrays_and_odd_names_are_restored(tmp_path):
    """orbax does not take arrays without elements, and would take a slash for a folder."""
    params = {"a/b": {"%": jnp.ones((0, 3))}, "c.d": [jnp.arange(3.0)], "": jnp.ones(())}
    state = {"params": params, "opt_state": optax.adamw(0.1).init(params), "key": jax.random.key(1, impl="rbg")}  # fmt: skip
    jda.save(tmp_path, state)
    got = jda.restore(tmp_path, jax.eval_shape(lambda: state))
    assert got["key"].dtype == state["key"].dtype
    words = [jax.random.key_data(x["key"]) for x in (got, state)]
    assert_trees_same_bits(*({k: v for k, v in x.items() if k != "key"} | {"words": w} for x, w in zip((got, state), words, strict=True)))  # fmt: skip
    with pytest.raises(jda.TreeError, match=r"params\['c.d'\]\[0\]: not in dictionaries alone"):
        jda.restore_params(tmp_path)
    assert_trees_same_bits(jda.restore_params(tmp_path, params), params)


def test_an_array_that_differs_from_the_header_is_told_once(saved, monkeypatch):
    folder, tx, _ = saved
    monkeypatch.setattr(Reader, "load", lambda self, wanted: [jnp.zeros(3) for _ in wanted])
    with pytest.raises(jda.CheckpointError, match="damaged in the files: got Array") as caught:
        jda.restore(folder, shapes_of(tx), tx)
    assert "CheckpointError" not in str(caught.value)


def test_missing_or_old_orbax_raises(saved, monkeypatch):
    import orbax.checkpoint as ocp

    folder, tx, state = saved

    def check(message):
        for call in (lambda: jda.save(folder, state, tx), lambda: jda.restore_params(folder)):
            with pytest.raises(jda.CheckpointError, match=message) as caught:
                call()
            assert str(caught.value).endswith('. Run pip install "jdistadam[checkpoint]".')

    monkeypatch.setattr(ocp, "__version__", "0.12.0")
    check(rf"is too old: got 0.12.0, expected orbax-checkpoint >= {OLDEST_ORBAX}\.")
    monkeypatch.setattr(ocp, "__version__", OLDEST_ORBAX)
    assert jda.restore_params(folder)
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    check(r"cannot be imported: got ImportError|got ModuleNotFoundError")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = settings["project"]["optional-dependencies"]["checkpoint"]
    assert needed == [f"orbax-checkpoint>={OLDEST_ORBAX}"]
