"""Calls the raw FFI handlers with hypothesis's inputs; run by test_handler_fuzz.py.

Every call must raise a Python exception that names its cause, or succeed. Anything else ends this
process, which the parent checks. Each handler must have more than LEAST calls of either outcome.

Usage: fuzz_handler.py CALLS LEAST
"""

import collections
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jdistadam.core import hyperparameters
from jdistadam.core.codecs import BLOCK
from jdistadam.kernels import native, reference

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.uint16, jnp.uint8, jnp.int32, jnp.bool_)
CODES = (jnp.uint8, jnp.uint16)  # dtypes of moments that have scales
NUMBERS = len(hyperparameters.NAMES)
HUGE = 2**62

storage = st.sampled_from(DTYPES[:3])
any_dtype = st.sampled_from(DTYPES)
shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
integers = st.one_of(
    st.sampled_from([HUGE, -HUGE, 2**40, 2**31, 2**63 - 1, -(2**63)]), st.integers(-2, 40)
)


def with_mistakes(draw, call):
    """Up to three mistakes in a call."""
    for _ in range(draw(st.sampled_from([1, 1, 0, 0, 2, 3]))):
        draw(st.sampled_from(MUTATIONS))(draw, call)
    return call


@st.composite
def sum_calls(draw):
    """A sum, a pack or an unpack as kernels/multi_tensor.py makes them."""
    flat, contributions = draw(st.sampled_from([(0, 1), (0, 3), (0, 8), (1, 1), (2, 1), (3, 1)]))
    sizes = draw(st.lists(st.sampled_from([33, 1, 0, 70]), max_size=3))
    gap = draw(st.integers(0, 5))
    offsets = [sum(sizes[:i]) + i * gap for i in range(len(sizes))]
    total = sum(sizes) + len(sizes) * gap
    dtype, out = draw(storage), draw(storage)
    operands = [((contributions * n,), dtype) for n in ([total] if flat & 1 else sizes)]
    results = [((n,), out) for n in ([total] if flat & 2 else sizes)]
    attributes = dict(
        contributions=np.int32(contributions), flat=np.int32(flat),
        sizes=np.asarray(sizes, np.int64), offsets=np.asarray(offsets, np.int64),
    )  # fmt: skip
    call = dict(name="sum", operands=operands, results=results, aliases={}, attributes=attributes)
    return with_mistakes(draw, call)


@st.composite
def norm_calls(draw):
    sizes = draw(st.lists(st.sampled_from([33, 1, 0, 5000]), max_size=3))
    dtype = draw(storage)
    tiles = sum(-(-n // reference.NORM_TILE) for n in sizes)
    operands, results = [((tiles, 2), jnp.uint32)], [((), jnp.float32), ((), jnp.bool_)]
    call = dict(name="norm", operands=operands, results=results, aliases={}, attributes={})
    if draw(st.booleans()):
        grads = [((n,), dtype) for n in sizes]
        call |= dict(name="norm_tiles", operands=[((), jnp.float32), *grads], results=operands)
    return with_mistakes(draw, call)


@st.composite
def peer_calls(draw):
    """A sum or a step over the memory of one device, as kernels/multi_tensor.py makes them."""
    kind = draw(st.sampled_from(["sum", "sum", "step", "step on sums"]))
    runs = draw(st.lists(st.sampled_from([3, 1, 0, 50]), max_size=3))
    sizes = [run * draw(st.integers(1, 3)) for run in runs]
    offsets = [sum(sizes[:i]) + i for i in range(len(sizes))]
    grad, out = (jnp.float32 if kind == "step on sums" else draw(storage)), draw(storage)
    tiles = sum(-(-n // reference.NORM_TILE) for n in sizes)
    norm = [((), jnp.float32), ((), jnp.bool_), ((tiles, 2), jnp.uint32)]
    grads = [((n,), grad) for n in sizes]
    received = 0 if kind == "step on sums" else len(sizes) % 3
    attributes = dict(
        devices=np.asarray([0], np.int64), site=np.int64(1), limit_seconds=np.int64(1),
        sizes=np.asarray(sizes, np.int64), runs=np.asarray(runs, np.int64),
        received=np.asarray([received] * len(sizes), np.int32),
    )  # fmt: skip
    if kind == "sum":
        call = dict(
            name="peer_sum", operands=[((), jnp.float32), *grads],
            results=[*(((n,), jnp.float32) for n in sizes), *norm], aliases={},
            attributes=attributes,
        )  # fmt: skip
        return with_mistakes(draw, call)
    total = sum(sizes) + len(sizes)
    state = [((total,), dtype) for dtype in (jnp.float32, draw(storage), draw(storage))]
    scalars = [((), jnp.float32), ((2, NUMBERS), jnp.float32), ((), jnp.float32), ((), jnp.bool_)]
    attributes |= dict(
        offsets=np.asarray(offsets, np.int64), flags=np.int32(draw(st.integers(0, 3))),
        groups=np.asarray([i % 2 for i in range(len(sizes))], np.int32),
        summed=np.bool_(kind == "step on sums"),
    )  # fmt: skip
    count = len(sizes)
    call = dict(
        name="peer_step", operands=[*scalars, *grads, *state],
        results=[*(((n,), out) for n in sizes), *state, *([] if kind == "step on sums" else norm)],
        aliases=peer_aliases(count), attributes=attributes,
    )  # fmt: skip
    return with_mistakes(draw, call)


def peer_aliases(count):
    """The aliases of the state, by operand."""
    return {4 + count + i: count + i for i in range(3)}


@st.composite
def adam_calls(draw, with_members):
    """A step as kernels/adam.py makes it."""
    count = draw(st.sampled_from([2, 1, 3, 0]))
    sizes = draw(st.lists(st.sampled_from([33, 1, 0, 70]), min_size=count, max_size=count))
    offsets = np.cumsum([0, *sizes])[:-1].tolist() if count else []
    mode = draw(st.integers(0, 3))
    contributions = draw(st.sampled_from([1, 1, 2, 3]))
    flat = draw(st.sampled_from([0b01110, 0, 0b01100, 0b11111]))
    members = ()
    if with_members:
        members = draw(st.sampled_from([(3,), (1,), (2, 2), (0,)]))
        contributions, flat = 1, 0
        sizes = [n * math.prod(members) for n in sizes]
    kinds = {name: draw(storage) for name in ("grads", "params", "mu", "nu", "out")}
    if mode == 3:
        kinds |= {"params": jnp.bfloat16, "out": jnp.uint16}

    def arrays(name, bit):
        dtype, copies = kinds[name], contributions if name == "grads" else 1
        if flat >> bit & 1:
            return [((copies * sum(sizes),), dtype)]
        return [((copies * n,), dtype) for n in sizes]

    operands = [((*members, 2, NUMBERS), jnp.float32), ((), jnp.float32), ((), jnp.bool_)]
    starts = {}
    for bit, name in enumerate(("grads", "params", "mu", "nu", "out")[: 5 if mode == 3 else 4]):
        starts[name] = len(operands)
        operands += arrays(name, bit)
    results, aliases = [], {}
    for bit, name in enumerate(("params", "mu", "nu", "out")[: 4 if mode == 3 else 3], start=1):
        if name == "params" and mode == 2:
            continue
        for i, array in enumerate(arrays(name, bit)):
            aliases[starts[name] + i] = len(results)
            results.append(array)
    results += arrays("out", 4) if mode in (1, 2) else []
    attributes = dict(
        mode=np.int32(mode), flags=np.int32(draw(st.integers(0, 3))), contributions=np.int32(contributions), groups=np.asarray([i % 2 for i in range(count)], np.int32),
        flat=np.int32(flat), sizes=np.asarray(sizes if flat else [], np.int64), offsets=np.asarray(offsets if flat else [], np.int64),
        **own_offsets(draw, offsets if flat else []),
    )  # fmt: skip
    call = dict(operands=operands, results=results, aliases=aliases, attributes=attributes)
    call["name"] = "adam"
    if with_members and draw(st.sampled_from([False, False, True])):
        change_rows(draw, call)  # alone, because another mistake would hide it
        return call
    return with_mistakes(draw, call)


def own_offsets(draw, offsets):
    """Offsets of the flat moments alone, or none."""
    return {
        name: np.asarray(draw(st.sampled_from([[], offsets])), np.int64)
        for name in ("mu_offsets", "nu_offsets")
    }


def starts_of(sizes):
    return np.cumsum([0, *sizes])[:-1].tolist() if sizes else []


@st.composite
def quantized_calls(draw):
    """A coded or stochastically rounded step, as kernels/adam.py makes it."""
    count = draw(st.sampled_from([2, 1, 3, 0]))
    sizes = draw(st.lists(st.sampled_from([130, 1, 0, 300]), min_size=count, max_size=count))
    blocks = [-(-n // BLOCK) for n in sizes]
    offsets = [BLOCK * start for start in starts_of(blocks)]
    mode, is_flat = draw(st.integers(0, 3)), draw(st.booleans())
    kinds = {name: draw(storage) for name in ("grads", "params", "out")}
    kinds |= {
        name: draw(st.sampled_from([jnp.uint8, jnp.uint16, jnp.bfloat16])) for name in ("mu", "nu")
    }
    if mode == 3:
        kinds |= {"params": jnp.bfloat16, "out": jnp.uint16}

    def arrays(name):
        lengths = blocks if name.endswith("scales") else sizes
        if is_flat and name[:2] in ("mu", "nu"):
            lengths = [sum(blocks) * (1 if name.endswith("scales") else BLOCK)]
        return [((n,), kinds.get(name, jnp.float32)) for n in lengths]

    operands = [
        ((2, NUMBERS), jnp.float32), ((), jnp.float32), ((), jnp.bool_), ((2,), jnp.uint32), ((), jnp.int32),
        ((count, 2), jnp.int32), ((sum(blocks) or 1, 2), jnp.uint32),
    ]  # fmt: skip
    scales = [f"{name}_scales" for name in ("mu", "nu") if kinds[name] in CODES]
    given = ["grads", "params", "mu", "nu", *(["out"] if mode == 3 else []), *scales]
    made = [*([] if mode == 2 else ["params"]), "mu", "nu", *(["out"] if mode else []), *scales]
    starts, results, aliases = {}, [], {}
    for name in given:
        starts[name] = len(operands)
        operands += arrays(name)
    for name in made:
        for i, array in enumerate(arrays(name)):
            if name in starts:
                aliases[starts[name] + i] = len(results)
            results.append(array)
    attributes = dict(
        mode=np.int32(mode), flags=np.int32(0), contributions=np.int32(1),
        groups=np.asarray([i % 2 for i in range(count)], np.int32), flat=np.int32(0b01100 * is_flat),
        sizes=np.asarray(sizes if is_flat else [], np.int64),
        offsets=np.asarray(offsets if is_flat else [], np.int64), random=np.bool_(draw(st.booleans())),
        ids=np.asarray(range(count), np.int32),
        **own_offsets(draw, offsets if is_flat else []),
        cuts=np.asarray(draw(st.sampled_from([[], [BLOCK, 2 * BLOCK, 512, 512] * count])), np.int64),
        tables=np.asarray(draw(st.sampled_from([[], starts_of(blocks), [-1] * count])), np.int64),
    )  # fmt: skip
    call = dict(operands=operands, results=results, aliases=aliases, attributes=attributes)
    return with_mistakes(draw, call | {"name": "quantized"})


@st.composite
def squares_calls(draw):
    """One of the two with sums of squares, as kernels/adam.py makes it of what they make."""
    step = draw(st.one_of(adam_calls(False), quantized_calls()))
    call = step | {"name": f"{step['name']}_squares", "step": step}
    attributes, none = step["attributes"], np.zeros(0, np.int64)
    first = 3 if step["name"] == "adam" else 7
    groups = attributes.get("groups")
    count = np.size(groups) if groups is not None else 1
    copies = attributes.get("contributions", 1)
    sizes = np.ravel(attributes.get("sizes", none)).tolist()
    if not sizes and isinstance(copies, np.int32) and copies > 0:
        sizes = [math.prod(x[0]) // int(copies) for x in step["operands"][first : first + count]]
    by_element = [draw(st.integers(0, 1)) for _ in sizes]
    is_sane = all(isinstance(n, int) and 0 <= n < 1000 for n in sizes)
    runs = sum(map(reference.num_runs, sizes, by_element)) if is_sane else 1
    segments = draw(st.integers(0, 3))
    own = [((segments, 2), jnp.int32), ((segments, 3), jnp.float32), ((3, runs), jnp.float32)]
    if draw(st.sampled_from([False, False, False, True])):
        own[draw(st.integers(0, 2))] = draw(
            st.sampled_from([((segments, 2), jnp.float32), ((3, runs + 1), jnp.float32), ((2, 3), jnp.int32)])
        )  # fmt: skip
    call["operands"] = [own[0], *step["operands"]]
    call["results"] = [*own[1:], *step["results"]]
    call["aliases"] = {k + 1: v + 2 for k, v in step["aliases"].items()}
    call["attributes"] = attributes | {"fine": np.asarray(by_element, np.int32)}
    return call


def change_operand(draw, call):
    if not call["operands"]:
        return
    i = draw(st.integers(0, len(call["operands"]) - 1))
    call["operands"][i] = (draw(shapes), draw(any_dtype))
    call["aliases"].pop(i, None)


def change_rows(draw, call):
    """Coefficients for a number of members other than that of the leaves."""
    if call["name"] == "adam" and call["operands"]:
        members = draw(st.sampled_from([(7,), (2,), (3, 1), (), (0,)]))
        call["operands"][0] = (
            (*members, draw(st.sampled_from([2, 3, 1, 0])), NUMBERS),
            jnp.float32,
        )


def drop_operand(draw, call):
    call["operands"] = call["operands"][: draw(st.integers(0, len(call["operands"])))]
    call["aliases"] = {k: v for k, v in call["aliases"].items() if k < len(call["operands"])}


def add_operand(draw, call):
    call["operands"].append((draw(shapes), draw(any_dtype)))


def change_result(draw, call):
    if call["results"]:
        i = draw(st.integers(0, len(call["results"]) - 1))
        call["results"][i] = (draw(shapes), draw(any_dtype))
        call["aliases"] = {k: v for k, v in call["aliases"].items() if v != i}


def drop_result(draw, call):
    call["results"] = call["results"][: draw(st.integers(0, len(call["results"])))]
    call["aliases"] = {k: v for k, v in call["aliases"].items() if v < len(call["results"])}


def break_alias(draw, call):
    if call["aliases"]:
        call["aliases"].pop(draw(st.sampled_from(sorted(call["aliases"]))))


def change_number(draw, call):
    if call["name"].startswith("peer"):
        call["attributes"][draw(st.sampled_from(["site", "limit_seconds"]))] = np.int64(
            draw(integers)
        )
        return
    name = draw(st.sampled_from(["flat", "contributions", "mode"]))
    call["attributes"][name] = np.int32(draw(st.integers(-3, 70)))


LISTS = collections.defaultdict(
    lambda: ["groups", "sizes", "offsets", "mu_offsets", "nu_offsets"],
    quantized=["groups", "sizes", "offsets", "ids", "mu_offsets", "nu_offsets", "cuts", "tables"],
    peer_sum=["devices", "sizes", "runs", "received"],
    peer_step=["devices", "sizes", "runs", "received", "offsets", "groups"],
)


def change_list(draw, call):
    name = draw(st.sampled_from(LISTS[call["name"]]))
    dtype = np.int32 if name in ("groups", "received", "ids") else np.int64
    limit = np.iinfo(dtype).max
    values = draw(st.lists(integers, max_size=5))
    call["attributes"][name] = np.asarray([max(-limit, min(limit, v)) for v in values], dtype)


def change_list_element(draw, call):
    name = draw(st.sampled_from(LISTS[call["name"]]))
    values = np.array(call["attributes"].get(name, []))
    if values.ndim == 1 and values.size and values.dtype.kind == "i":
        i = draw(st.integers(0, values.size - 1))
        info = np.iinfo(values.dtype)
        values[i] = max(info.min, min(info.max, draw(integers)))
        call["attributes"][name] = values


def change_attribute_type(draw, call):
    if not call["attributes"]:
        return
    name = draw(st.sampled_from(sorted(call["attributes"])))
    wrong = [np.float32(1), np.int64(1), "text", np.asarray([1.5], np.float32), True]
    call["attributes"][name] = draw(st.sampled_from(wrong))


def drop_attribute(draw, call):
    if call["attributes"]:
        call["attributes"].pop(draw(st.sampled_from(sorted(call["attributes"]))))


MUTATIONS = (
    change_list_element, change_operand, drop_operand, add_operand, change_result, drop_result, break_alias, change_number,
    change_list, change_attribute_type, drop_attribute, change_rows,
)  # fmt: skip
seen = collections.Counter()


def kind_of(call):
    rows = call["operands"][:1]
    has_members = call["name"] == "adam" and rows and len(rows[0][0]) > 2
    return "adam of members" if has_members else call["name"]


def assert_in_bounds(call):
    """Accepted calls read and write only inside their arrays."""
    checks = {"adam": check_adam, "sum": check_sum, "norm": check_norm, "norm_tiles": check_tiles}
    checks |= {
        "quantized": check_quantized,
        "peer_sum": check_peer,
        "peer_step": check_peer,
    }
    checks |= {"adam_squares": check_squares, "quantized_squares": check_squares}
    checks[call["name"]](call)


def check_peer(call):
    """One device, whole runs, and shards in the arrays without overlap."""
    attributes, is_step = call["attributes"], call["name"] == "peer_step"
    sizes, runs = attributes["sizes"].tolist(), attributes["runs"].tolist()
    assert attributes["devices"].tolist() == [0] and attributes["limit_seconds"] > 0, call
    assert all(n == run == 0 or run > 0 == n % run for n, run in zip(sizes, runs, strict=True)), (
        call
    )
    assert len(attributes["received"]) == len(sizes), call
    assert set(attributes["received"].tolist()) <= {0, 1, 2}, call
    first = 4 if is_step else 1
    elements = [math.prod(shape) for shape, _ in call["operands"][first:]]
    assert elements[: len(sizes)] == sizes, call
    assert [math.prod(shape) for shape, _ in call["results"][: len(sizes)]] == sizes, call
    if not is_step:
        return
    end = 0
    for start, size in zip(attributes["offsets"].tolist(), sizes, strict=True):
        assert end <= start, call
        end = start + size
    state = elements[len(sizes) :]
    assert len(state) == 3 and end <= min(state), call
    rows = call["operands"][1][0][0]
    assert all(0 <= group < rows for group in attributes["groups"]), call
    wanted = peer_aliases(len(sizes))
    needed = {i: wanted[i] for i in wanted if elements[i - 4]}  # an empty one is not written
    assert needed.items() <= call["aliases"].items() <= wanted.items(), call


def check_tiles(call):
    sizes = [np.prod(shape, dtype=int) for shape, _ in call["operands"][1:]]
    assert call["results"][0][0] == (sum(-(-n // reference.NORM_TILE) for n in sizes), 2), call


def check_norm(call):
    assert call["operands"][0][0][1:] == (2,), call


def check_sum(call):
    attributes, contributions = call["attributes"], int(call["attributes"]["contributions"])
    sides = (call["operands"], contributions, 1), (call["results"], 1, 2)
    starts, sizes = attributes["offsets"].astype(object), attributes["sizes"]
    for arrays, copies, bit in sides:
        elements = [int(np.prod(shape)) / copies for shape, _ in arrays]
        if attributes["flat"] & bit:
            ends = [0, *(starts + sizes)]
            assert all(a <= b for a, b in zip(ends, starts, strict=False)), call
            assert ends[-1] <= elements[0], call
        else:
            assert elements == list(sizes), call


def check_adam(call):
    attributes, operands = call["attributes"], call["operands"]
    groups, starts, sizes = (attributes[name] for name in ("groups", "offsets", "sizes"))
    *members, rows, _ = operands[0][0]
    assert all(0 <= group < rows for group in groups), call
    if members:
        assert attributes["flat"] == 0 and attributes["contributions"] == 1, call
        leaves = [math.prod(shape) for shape, _ in operands[3:]]
        assert all(n % max(math.prod(members), 1) == 0 for n in leaves), call
        assert math.prod(members) or not any(leaves), call
    arrays = iter(operands[3:])  # after the scalars
    expected = list(sizes) or None
    for kind in range(5 if attributes["mode"] == 3 else 4):
        copies = int(attributes["contributions"]) if kind == 0 else 1
        if attributes["flat"] >> kind & 1:
            total = int(np.prod(next(arrays)[0])) // copies
            given = attributes.get({2: "mu_offsets", 3: "nu_offsets"}.get(kind), ())
            mine = given if len(given) else starts
            ends = mine.astype(object) + sizes
            assert all(0 <= a <= b <= total for a, b in zip(mine, ends, strict=True)), call
        else:
            found = [int(np.prod(next(arrays)[0])) / copies for _ in groups]
            expected = expected or found
            assert found == expected, call


def check_squares(call):
    """As a step without; the partials are those of its leaves, and each segment has a sum."""
    assert_in_bounds(call["step"])
    attributes, operands = call["attributes"], call["operands"]
    first = 4 if call["name"] == "adam_squares" else 8
    count, copies = len(attributes["groups"]), int(attributes["contributions"])
    sizes = attributes["sizes"].tolist()
    sizes = sizes or [math.prod(x[0]) // copies for x in operands[first : first + count]]
    runs = sum(map(reference.num_runs, sizes, attributes["fine"].tolist()))
    segments = operands[0][0][0]
    assert operands[0] == ((segments, 2), jnp.int32), call
    assert [shape for shape, _ in call["results"][:2]] == [(segments, 3), (3, runs)], call
    assert attributes["mode"] != 2, call


def check_quantized(call):
    """As for a step without codes, and all blocks of each leaf have a scale."""
    attributes, operands = call["attributes"], call["operands"]
    check_adam(call | {"operands": operands[:3] + operands[7:]})
    assert [x[0] for x in operands[3:5]] == [(2,), ()], call
    count, flat = len(attributes["groups"]), int(attributes["flat"])
    assert len(attributes["ids"]) == count and operands[5][0] == (count, 2), call
    rows, columns = operands[6][0]
    assert columns == 2, call
    offsets_of = {
        kind: attributes[f"{name}_offsets"].tolist() or attributes["offsets"].tolist()
        for kind, name in ((2, "mu"), (3, "nu"))
    }
    arrays = iter(operands[7:])
    sizes, coded = list(attributes["sizes"]), []
    for kind in range(5 if attributes["mode"] == 3 else 4):
        taken = [next(arrays) for _ in range(1 if flat >> kind & 1 else count)]
        sizes = sizes or [math.prod(shape) for shape, _ in taken][:count]
        coded += [kind] * (kind in (2, 3) and bool(taken) and taken[0][1] in CODES)
    for kind in coded:
        if flat >> kind & 1:
            have = math.prod(next(arrays)[0])
            for start, size in zip(offsets_of[kind], sizes, strict=True):
                assert start % BLOCK == 0 and start // BLOCK + -(-size // BLOCK) <= have, call
        else:
            have = [math.prod(next(arrays)[0]) for _ in range(count)]
            assert have == [-(-size // BLOCK) for size in sizes], call
    assert next(arrays, None) is None, call
    cuts = attributes["cuts"].reshape(-1, 2).tolist()
    assert len(cuts) in (0, 2 * count), call
    for i, (piece, whole_piece) in enumerate(cuts):
        size = sizes[i // 2]
        assert min(size, 1) <= piece <= whole_piece and (piece >= size or piece % BLOCK == 0), call
    tables = attributes["tables"].tolist()
    assert len(tables) in (0, count), call
    for start, size in zip(tables, sizes, strict=False):
        assert start < 0 or start + -(-size // BLOCK) <= rows, call


@settings(
    max_examples=int(sys.argv[1]), deadline=None, database=None, derandomize=True,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(
    st.one_of(
        adam_calls(False), adam_calls(True), sum_calls(), norm_calls(),
        peer_calls(), quantized_calls(), squares_calls(),
    )
)  # fmt: skip
def call_handler(call):
    results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in call["results"]]
    operands = [np.ones(shape, dtype) for shape, dtype in call["operands"]]
    try:
        function = jax.ffi.ffi_call(
            f"jdistadam_{call['name']}", results, input_output_aliases=call["aliases"]
        )
        jax.block_until_ready(jax.jit(lambda *x: function(*x, **call["attributes"]))(*operands))
        if any(np.prod(shape) for shape, _ in call["results"]):  # otherwise XLA drops the call
            assert_in_bounds(call)
            seen[kind_of(call), "succeeded"] += 1
    except jax.errors.JaxRuntimeError as error:
        did_not_come = call["name"].startswith("peer") and "did not come within" in str(error)
        assert did_not_come or str(error).startswith("INVALID_ARGUMENT"), error
        seen[kind_of(call), "raised"] += 1


if __name__ == "__main__":
    assert native.status("cpu").available, native.status("cpu").detail
    call_handler()
    assert len(seen) == 20 and min(seen.values()) > int(sys.argv[2]), seen
    print(seen)
