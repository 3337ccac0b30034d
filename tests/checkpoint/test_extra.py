"""A tree of the user's beside the state: each leaf comes back as what it was, or an error says which."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jdistadam as jda
from jdistadam.checkpoint import storage
from support.headers import rewrite_header
from support.lookalike import make_params, make_tx
from support.samples import few

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

HEADER = "0/state/header.json"
VALUES = {
    "int": 3, "big": 2**128 - 7, "bool": True, "float": 0.1, "zero": -0.0, "inf": float("-inf"), "text": "ä\n\ud800'\"",
    "bytes": bytes(range(256)), "no bytes": b"", "none": None, "no keys": {}, "no items": [], "no values": (),
}  # fmt: skip
NUMPY = {
    "int64": np.array([2**60, -1]), "float64": np.array([[1 / 3, np.nan, -0.0]]), "scalar": np.uint64(2**63 + 1), "no dimensions": np.array(3),
    "bool": np.array([True, False]), "complex": np.array([1 + 2j]), "text": np.array(["a", "bcd"]), "none": np.zeros((0, 3)),
    "bfloat16": np.arange(5).astype(ml_dtypes.bfloat16), "float8": np.arange(4).astype(ml_dtypes.float8_e4m3fn),
    "time": np.array(["2025-01-02"], "M8[s]"), "not contiguous": np.arange(12.0).reshape(3, 4).T, "other order": np.arange(3, dtype=">i4"),
}  # fmt: skip


def state_of(x=1.0):
    params = {"w": jnp.full((4, 3), x)}
    return {"params": params, "opt_state": optax.adamw(0.1).init(params)}


def mesh(n):
    return jax.make_mesh((n,), ("x",), devices=jax.devices("cpu")[:n])


def assert_same(got, want):
    """Types, dtypes, shapes and bits; also of NaN and -0.0."""
    is_leaf = lambda x: x is None  # noqa: E731
    assert jax.tree.structure(got, is_leaf=is_leaf) == jax.tree.structure(want, is_leaf=is_leaf)
    for a, b in zip(*(jax.tree.leaves(x, is_leaf=is_leaf) for x in (got, want)), strict=True):
        assert type(a) is type(b), (a, b)
        if not hasattr(b, "dtype"):
            assert repr(a) == repr(b)
        elif jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            assert a.dtype == b.dtype and np.array_equal(*map(jax.random.key_data, (a, b)))
        else:
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@few(1)
@pytest.mark.parametrize("values", [VALUES, NUMPY], ids=["python", "numpy"])
def test_values_come_back_as_what_they_were(tmp_path, values):
    extra = {"deep": {"er": values}, "top": 1}
    jda.save(tmp_path, state_of(), extra=extra)
    for got in (jda.restore_extra(tmp_path), jda.restore_extra(tmp_path, extra)):
        assert_same(got, extra)
    x = jda.restore_extra(tmp_path)["deep"]["er"].get("int64", np.zeros(1))
    x += 1  # its own, and not of what was read


def test_arrays_in_host_memory_come_back_there(tmp_path):
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    extra = {"x": jax.device_put(jnp.arange(7.0), place)}
    jda.save(tmp_path, state_of(), extra=extra)
    for like, kind in ((None, "device"), (extra, "pinned_host")):
        got = jda.restore_extra(tmp_path, like)
        assert_same(got, extra)
        assert got["x"].sharding.memory_kind == kind


def test_jax_arrays_come_back_on_another_mesh(tmp_path):
    """Beside a distributed state, whose restore knows nothing of them; in a tree of any nodes."""
    rows = jnp.arange(48.0, dtype=jnp.bfloat16).reshape(16, 3) / 7
    extra = (
        [jax.device_put(rows, NamedSharding(mesh(8), P("x"))), jnp.int32(5)],
        optax.EmaState(jnp.int32(3), {"a/b": jnp.full(2, jnp.nan)}),
        nnx.Param(jnp.arange(3)),
        jax.random.key(7, impl="rbg"),
        {1: np.float64(0.1), 2: None},
        "text",
    )
    tx = make_tx(4)
    state = jda.TrainState.create(make_params(), tx)
    jda.save(tmp_path, state, tx, extra=extra)
    like = jax.tree.map(lambda x: x, extra)
    like[0][0] = jax.ShapeDtypeStruct(
        rows.shape, rows.dtype, sharding=NamedSharding(mesh(2), P(None))
    )
    got = jda.restore_extra(tmp_path, like)
    assert_same(got, extra)
    assert got[0][0].sharding.is_equivalent_to(like[0][0].sharding, 2)
    restored = jda.restore(tmp_path, jda.TrainState.shapes(make_params(), make_tx(2)), make_tx(2))
    assert_same(jax.device_get(restored.params), jax.device_get(state.params))
    with pytest.raises(jda.TreeError, match=r"extra\[0\]\[0\]: not in dictionaries alone"):
        jda.restore_extra(tmp_path)


@pytest.mark.parametrize("extra", [7, np.arange(3), {"data": {"epoch": 2}}, "text", {}, [], ()])
def test_restore_extra_without_like_returns_the_same_tree(tmp_path, extra):
    jda.save(tmp_path, state_of(), extra=extra)
    assert_same(jda.restore_extra(tmp_path), extra)


def test_extra_may_change_while_it_is_written(tmp_path):
    """Arrays in place, and donated ones; each step with its own, and the newest is restored."""
    position, add = np.arange(3), jax.jit(lambda x: x + 1, donate_argnums=0)
    seen = jnp.zeros(5)
    with jda.Checkpointer(tmp_path, every=2) as checkpointer:
        for i in range(1, 7):
            extra = {"position": position, "seen": seen, "epoch": i}
            assert checkpointer.after_step(i, state_of(), extra) == (i % 2 == 0)
            position += 1
            seen = add(seen)
    for step in (2, 4, 6, None):
        i = step or 6
        want = {"position": np.arange(3) + i - 1, "seen": jnp.full(5, i - 1.0), "epoch": i}
        assert_same(jda.restore_extra(tmp_path, step=step), want)


SAVED = {"a": {"b": np.arange(3)}, "c": jnp.zeros(2), "d": 1}
DIFFERENT = [
    ("another value", {}, None, None),
    ("missing", {"new": {"e": 1}}, jda.TreeError, r"extra\['new'\]\['e'\]: not saved: got .*, expected int\. Leave like out"),
    ("unexpected", {"d": ...}, jda.TreeError, r"extra\['d'\]: in the file, and not in like: got extra\['d'\], expected "),
    ("shape", {"a": {"b": np.zeros(4, int)}}, jda.ShapeError, r"extra\['a'\]\['b'\]: differs from like: got numpy <i8 of shape \(3,\) in the file, expected numpy <i8 of shape \(4,\)\."),
    ("dtype", {"c": jnp.zeros(2, jnp.int32)}, jda.DtypeError, r"extra\['c'\]: differs from like: got jax float32 of shape \(2,\) in the file, expected jax int32 of shape \(2,\)"),
    ("kind", {"c": np.zeros(2, np.float32)}, jda.DtypeError, r"extra\['c'\]: differs from like: got jax float32 .* expected numpy <f4"),
    ("python", {"d": "x"}, jda.DtypeError, r"extra\['d'\]: differs from like: got int in the file, expected str"),
]  # fmt: skip


def test_like_that_differs_from_the_saved_tree_raises(tmp_path):
    jda.save(tmp_path, state_of(), extra=SAVED)
    assert_same(jda.restore_extra(tmp_path, SAVED | {"d": 9}), SAVED)
    for _, change, error, message in DIFFERENT[1:]:
        like = {name: x for name, x in (SAVED | change).items() if x is not ...}
        with pytest.raises(error, match=f"{HEADER}: {message}"):
            jda.restore_extra(tmp_path, like)


def test_checkpoint_without_extra_raises(tmp_path):
    state = state_of()
    jda.save(tmp_path, state)
    message = (
        r"extra: not saved: got no extra, expected any, as of save\(\.\.\., extra=tree\)\. Leave"
    )
    with pytest.raises(jda.TreeError, match=message):
        jda.restore_extra(tmp_path)
    for empty in ({}, {"a": [], "b": {"c": ()}}):
        assert_same(jda.restore_extra(tmp_path, empty), empty)
    jda.save(tmp_path, state, step=1, extra={"epoch": 1})
    assert_same(jax.device_get(jda.restore(tmp_path, state)), jax.device_get(state))
    assert_same(jax.device_get(jda.restore_params(tmp_path)), jax.device_get(state["params"]))
    with pytest.raises(jda.CheckpointError, match="no checkpoint of step 7"):
        jda.restore_extra(tmp_path, step=7)


class Tagged(np.ndarray):
    """An array with more than numbers, as np.matrix is."""


@pytest.mark.parametrize(
    ("leaf", "got"),
    [
        (object(), "object <object"),
        ({1, 2}, r"set \{1, 2\}"),
        (np.array([None]), "ndarray array"),
        (jax.ShapeDtypeStruct((2,), jnp.float32), "ShapeDtypeStruct"),
        (iter([1]), "list_iterator"),
        (np.ma.array([1, 2], mask=[True, False]), "MaskedArray"),
        (np.zeros(2).view(Tagged), "Tagged"),
        pytest.param(10**5000, "int a number of 16610 bits", id="huge number"),
    ],
)
def test_what_cannot_be_saved_is_named(tmp_path, leaf, got):
    with pytest.raises(
        jda.TreeError, match=rf"^extra\['a'\]\['b'\]: nothing that a checkpoint holds: got {got}"
    ):
        jda.save(tmp_path, state_of(), extra={"a": {"b": leaf}})
    assert jda.checkpoint_steps(tmp_path) == []


def test_a_traced_leaf_is_named(tmp_path):
    state = state_of()
    save = jax.jit(lambda x: jda.save(tmp_path, state, extra={"a": x}))
    with pytest.raises(
        jda.TreeError, match=r"^extra\['a'\]: nothing that a checkpoint holds: got "
    ):
        save(1.0)


def test_extra_with_the_name_of_a_field_raises(tmp_path):
    state = state_of() | {"extra": {"a": jnp.zeros(2)}}
    with pytest.raises(
        jda.TreeError, match=r"extra\['a'\]: two arrays of the state have this name"
    ):
        jda.save(tmp_path, state, extra={"a": jnp.ones(2)})
    jda.save(tmp_path, state)
    assert jda.restore(tmp_path, state)["extra"]["a"].tolist() == [0, 0]


def test_damaged_extra_raises(tmp_path):
    """A value in the header, the dtype of numpy's bytes, and bits of either array."""
    extra = {"epoch": 3, "rows": np.arange(1000), "seen": jnp.arange(1000.0) / 7}
    jda.save(tmp_path, state_of(), extra=extra)
    header = tmp_path / HEADER
    text = header.read_text()
    for old, new in (('"value": 3', '"value": 4'), ('"<i8"', '"<u8"'), ('"epoch"', '"epoxx"')):
        assert old in text
        header.write_text(text.replace(old, new))
        with pytest.raises(jda.CheckpointError, match="its own checksum differs"):
            jda.restore_extra(tmp_path)
    header.write_text(text)
    for name in ("rows", "seen"):
        bits = np.asarray(extra[name])[500:520].tobytes()
        (path,) = (x for x in tmp_path.rglob("d/*") if x.is_file() and bits in x.read_bytes())
        whole = path.read_bytes()
        at = whole.find(bits) + 1
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(jda.CheckpointError, match=rf"extra\['{name}'\]: damaged in the files"):
            jda.restore_extra(tmp_path)
        path.write_bytes(whole)
    assert_same(jda.restore_extra(tmp_path), extra)


def test_a_failed_save_leaves_state_and_extra_of_the_one_before(tmp_path, monkeypatch):
    with jda.Checkpointer(tmp_path, in_background=False) as checkpointer:
        checkpointer.save(state_of(), step=1, extra={"epoch": 1, "rows": np.arange(9)})
        monkeypatch.setattr(storage, "FILE", "no such folder/header.json")
        with pytest.raises(jda.CheckpointError, match="could not be written"):
            checkpointer.save(state_of(), step=2, extra={"epoch": 2, "rows": np.arange(8)})
        monkeypatch.undo()
    assert_same(jda.restore_extra(tmp_path), {"epoch": 1, "rows": np.arange(9)})


OTHER_TYPES = {  # of a header whose own checksum fits
    "kind": lambda extra: extra["extra['epoch']"].update(kind=["int"]),
    "kind that does not exist": lambda extra: extra["extra['epoch']"].update(kind="complex"),
    "no kind": lambda extra: extra["extra['epoch']"].pop("kind"),
    "value": lambda extra: extra["extra['epoch']"].update(value="3"),
    "keys": lambda extra: extra["extra['epoch']"].update(keys="epoch"),
    "an entry": lambda extra: extra.update({"extra['epoch']": 3}),
    "dtype": lambda extra: extra["extra['rows']"].update(dtype=8),
    "shape": lambda extra: extra["extra['rows']"].update(shape=[3.0]),
    "another shape": lambda extra: extra["extra['rows']"].update(shape=[4]),
    "bytes": lambda extra: extra["extra['state']"].update(value="ä"),
    "an array that is not there": lambda extra: extra.update({"extra['x']": {"keys": ["x"], "kind": "jax"}}),
}  # fmt: skip


@few(5)
@pytest.mark.parametrize("change", OTHER_TYPES)
def test_extra_of_other_types_in_the_header_raises(tmp_path, change):
    extra = {"epoch": 3, "rows": np.arange(3), "state": b"abc"}
    jda.save(tmp_path, state_of(), extra=extra)
    rewrite_header(tmp_path / HEADER, lambda header: OTHER_TYPES[change](header["extra"]))
    for read in (jda.restore_extra, lambda x: jda.restore(x, state_of())):
        with pytest.raises(
            jda.CheckpointError, match=rf"{HEADER}: damaged, .*(extra|KeyError|JSON)"
        ):
            read(tmp_path)
