"""Calls the raw FFI handlers with hypothesis's inputs; run by test_handler_fuzz.py.

Every call must raise a Python exception that names its cause, or succeed. Anything else ends this
process, which the parent checks. Each kind has so many CALLS, and each handler must have more than
LEAST of either outcome.

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
        draw(st.sampled_from(MUTATIONS if call["attributes"] else OF_ARRAYS))(draw, call)
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
    sizes = draw(st.lists(st.sampled_from([33, 1, 0, 5000]), min_size=1, max_size=3))
    dtype = draw(storage)
    tiles = sum(-(-n // reference.NORM_TILE) for n in sizes)
    operands, results = [((tiles, 2), jnp.uint32)], [((), jnp.float32), ((), jnp.bool_)]
    call = dict(name="norm", operands=operands, results=results, aliases={}, attributes={})
    if draw(st.booleans()):
        grads = [((n,), dtype) for n in sizes]
        call |= dict(name="norm_tiles", operands=[((), jnp.float32), *grads], results=operands)
    return with_mistakes(draw, call)


@st.composite
def parts_calls(draw):
    """A sum or a step on parts of several devices, as kernels/parts.py makes them."""
    kind = draw(st.sampled_from(["sum", "sum", "step", "step on sums"]))
    devices = draw(st.sampled_from([[0, 1], [0], [2, 0, 1], [3, 2, 1, 0]]))
    n, summed, whole = len(devices), kind == "step on sums", draw(st.booleans())
    rows = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    sizes = [row * draw(st.sampled_from([3, 1, 4, 50])) for row in rows]
    grad, out = draw(storage), draw(storage)
    tiles = ((sum(-(-size // reference.NORM_TILE) for size in sizes), 2), jnp.uint32)
    sums = [((size,), jnp.float32) for size in sizes]
    grads = [((n * size,), grad) for size in sizes]
    grads += [((n - 1, size), grad) for size in sizes if n > 1]
    attributes = dict(
        devices=np.asarray(devices, np.int64), per_group=np.int64(n),
        rows=np.asarray(rows, np.int64), sizes=np.asarray(sizes, np.int64),
    )  # fmt: skip
    if kind == "sum":
        call = dict(
            name="sum_parts", operands=[((), jnp.float32), *grads], results=[*sums, tiles],
            aliases={}, attributes=attributes,
        )  # fmt: skip
        return with_mistakes(draw, call)
    offsets = [start + i for i, start in enumerate(starts_of(sizes))]
    total = sum(sizes) + len(sizes) + 2
    state = [((total,), dtype) for dtype in (jnp.float32, draw(storage), draw(storage))]
    scalars = [((), jnp.float32), ((2, NUMBERS), jnp.float32), ((), jnp.float32), ((), jnp.bool_)]
    for name in ("offsets", "mu_offsets", "nu_offsets"):
        first = draw(st.integers(0, 2))
        attributes[name] = np.asarray([first + start for start in offsets], np.int64)
    attributes |= dict(
        flags=np.int32(draw(st.integers(0, 3))), summed=np.bool_(summed), whole=np.bool_(whole),
        groups=np.asarray([i % 2 for i in range(len(sizes))], np.int32),
    )  # fmt: skip
    operands = [*scalars, *(sums if summed else grads), *state]
    params = [((size * (n if whole else 1),), out) for size in sizes]
    call = dict(
        name="step_parts", operands=operands, results=[*params, *state, tiles],
        aliases=state_aliases(len(operands), len(sizes)), attributes=attributes,
    )  # fmt: skip
    return with_mistakes(draw, call)


def state_aliases(operands, leaves):
    """The aliases of the state, the last three operands of a step on parts."""
    return {operands - 3 + i: leaves + i for i in range(3)}


@st.composite
def copies_calls(draw):
    """A start or a wait of one device, as kernels/copies.py makes them; `start` is the other one's.

    A wait may lack its start.
    """
    gathers, in_place = draw(st.sampled_from([(True, False), (True, True)] * 2 + [(False, False)]))
    rows = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    sources = [((row, draw(st.sampled_from([3, 40, 1, 0]))), draw(any_dtype)) for row in rows]
    targets = sources if gathers else [((0, *shape), dtype) for shape, dtype in sources]
    order = [((), jnp.float32)] * draw(st.integers(0, 1))
    devices = dict(devices=np.asarray([0], np.int64), per_group=np.int64(1))
    start = dict(
        name="copy_start", operands=[*sources, *order], results=list(targets),
        aliases={i: i for i in range(len(rows))} if in_place else {},
        attributes=dict(
            **devices, gathers=np.bool_(gathers), in_place=np.bool_(in_place),
            rows=np.asarray(rows, np.int64), channel=np.int64(1),
        ),
    )  # fmt: skip
    kind = draw(st.sampled_from(["start", "wait", "start", "wait", "wrong rows", "no start"]))
    if kind == "wrong rows":
        change_rows(draw, start)  # alone, because another mistake would hide it
        return start
    if kind == "start":
        return with_mistakes(draw, start)
    wait = dict(
        name="copy_wait", operands=[*targets, *([] if in_place else sources), *order],
        results=list(targets), aliases={i: i for i in range(len(rows))},
        attributes=devices,
        start=None if kind == "no start" else start,
    )  # fmt: skip
    return with_mistakes(draw, wait)


@st.composite
def adam_calls(draw, with_members):
    """A step as kernels/adam.py makes it."""
    count = draw(st.sampled_from([2, 1, 3, 0]))
    sizes = draw(st.lists(st.sampled_from([33, 1, 0, 70]), min_size=count, max_size=count))
    offsets = np.cumsum([0, *sizes])[:-1].tolist() if count else []
    mode = draw(st.integers(0, 3))
    flat = draw(st.sampled_from([0b01110, 0, 0b01100, 0b11111]))
    members = ()
    if with_members:
        members = draw(st.sampled_from([(3,), (1,), (2, 2), (0,)]))
        flat = 0
        sizes = [n * math.prod(members) for n in sizes]
    kinds = {name: draw(storage) for name in ("grads", "params", "mu", "nu", "out")}
    if mode == 3:
        kinds |= {"params": jnp.bfloat16, "out": jnp.uint16}

    def arrays(name, bit):
        dtype = kinds[name]
        return [((n,), dtype) for n in ([sum(sizes)] if flat >> bit & 1 else sizes)]

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
        mode=np.int32(mode), flags=np.int32(draw(st.integers(0, 3))), groups=np.asarray([i % 2 for i in range(count)], np.int32),
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
        mode=np.int32(mode), flags=np.int32(0),
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
    sizes = np.ravel(attributes.get("sizes", none)).tolist()
    sizes = sizes or [math.prod(x[0]) for x in step["operands"][first : first + count]]
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
    """Coefficients for a number of members other than that of the leaves; no rows, or too many."""
    rows = call["attributes"].get("rows")
    if np.ndim(rows) == 1 and np.size(rows):
        wrong = np.array(rows)
        wrong[draw(st.integers(0, wrong.size - 1))] = draw(st.sampled_from([0, -1, 7, HUGE]))
        call["attributes"]["rows"] = wrong
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


FIELDS = collections.defaultdict(
    lambda: ["flat", "mode"],
    sum=["flat", "contributions", "mode"],
    sum_parts=["per_group"],
    step_parts=["flags", "summed", "whole", "per_group"],
    copy_start=["channel", "gathers", "in_place", "per_group"],
    copy_wait=["per_group"],
)


def change_number(draw, call):
    for name in draw(st.permutations(FIELDS[call["name"]]))[:1]:
        if name == "channel":
            value = np.int64(draw(integers))
        elif name == "per_group":
            value = np.int64(draw(st.integers(-1, 4)))
        elif name in ("summed", "whole", "gathers", "in_place"):
            value = np.bool_(draw(st.booleans()))
        else:
            value = np.int32(draw(st.integers(-3, 70)))
        call["attributes"][name] = value


LISTS = collections.defaultdict(
    lambda: ["groups", "sizes", "offsets", "mu_offsets", "nu_offsets"],
    quantized=["groups", "sizes", "offsets", "ids", "mu_offsets", "nu_offsets", "cuts", "tables"],
    sum_parts=["devices", "rows", "sizes"],
    step_parts=["devices", "rows", "sizes", "offsets", "mu_offsets", "nu_offsets", "groups"],
    copy_start=["devices", "rows"],
    copy_wait=["devices"],
)


def change_list(draw, call):
    name = draw(st.sampled_from(LISTS[call["name"]]))
    dtype = np.int32 if name in ("groups", "ids") else np.int64
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


OF_ARRAYS = (change_operand, drop_operand, add_operand, change_result, drop_result)
MUTATIONS = (
    change_list_element, *OF_ARRAYS, break_alias, change_number, change_list, change_attribute_type,
    drop_attribute, change_rows,
)  # fmt: skip
seen = collections.Counter()


def kind_of(call):
    rows = call["operands"][:1]
    has_members = call["name"] == "adam" and rows and len(rows[0][0]) > 2
    return "adam of members" if has_members else call["name"]


def assert_in_bounds(call):
    """Accepted calls read and write only inside their arrays."""
    checks = {"adam": check_adam, "sum": check_sum, "norm": check_norm, "norm_tiles": check_tiles}
    checks |= {"quantized": check_quantized, "sum_parts": check_parts, "step_parts": check_parts}
    checks |= {"copy_start": check_start, "copy_wait": check_wait}
    checks |= {"adam_squares": check_squares, "quantized_squares": check_squares}
    checks[call["name"]](call)


def group_of(attributes):
    """The devices with which this one copies; none: there are no such groups."""
    devices, count = attributes["devices"].tolist(), int(attributes["per_group"])
    if 0 not in devices or count < 1 or len(devices) % count:
        return []
    first = devices.index(0) // count * count
    return devices[first : first + count]


def check_parts(call):
    """Whole runs of this device, and shards in the arrays without overlap."""
    attributes, is_step = call["attributes"], call["name"] == "step_parts"
    sizes, rows = attributes["sizes"].tolist(), attributes["rows"].tolist()
    assert 1 <= len(group_of(attributes)) <= 64, call
    assert all(size > 0 < row and size % row == 0 for size, row in zip(sizes, rows, strict=True))
    n, count = len(group_of(attributes)), len(sizes)
    elements = [math.prod(shape) for shape, _ in call["operands"][4 if is_step else 1 :]]
    results = [math.prod(shape) for shape, _ in call["results"]]
    parts = [n * size for size in sizes] + [(n - 1) * size for size in sizes if n > 1]
    parts = sizes if is_step and attributes["summed"] else parts
    assert elements[: len(parts)] == parts, call
    copies = n if is_step and attributes["whole"] else 1
    assert results[:count] == [copies * size for size in sizes], call
    assert results[-1] == 2 * sum(-(-size // reference.NORM_TILE) for size in sizes), call
    if not is_step:
        return
    state, groups = elements[len(parts) :], call["operands"][1][0][0]
    assert len(state) == 3 and state == results[count:-1], call
    for name, total in zip(("offsets", "mu_offsets", "nu_offsets"), state, strict=True):
        end = 0
        for first, size in zip(attributes[name].tolist(), sizes, strict=True):
            assert end <= first, call
            end = first + size
        assert end <= total, call
    assert all(0 <= group < groups for group in attributes["groups"]), call
    assert call["aliases"] == state_aliases(len(call["operands"]), count), call


def bytes_of(arrays):
    return [math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in arrays]


def assert_aliased(call):
    needed = {i: i for i, size in enumerate(bytes_of(call["results"])) if size}
    assert needed.items() <= call["aliases"].items(), call


def check_start(call):
    """One device, which gathers whole rows of its own."""
    attributes, sources = call["attributes"], bytes_of(call["operands"])
    rows = attributes["rows"].tolist()
    assert group_of(attributes) == [0] and attributes["gathers"], call
    assert sources[: len(rows)] == bytes_of(call["results"]), call
    assert all(row > 0 == size % row for size, row in zip(sources, rows, strict=False)), call
    if attributes["in_place"]:
        assert_aliased(call)


def check_wait(call):
    """After its start; of the devices only the place of this one is read."""
    assert call["start"] is not None and group_of(call["attributes"])[:1] == [0], call
    assert_aliased(call)


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
        assert attributes["flat"] == 0, call
        leaves = [math.prod(shape) for shape, _ in operands[3:]]
        assert all(n % max(math.prod(members), 1) == 0 for n in leaves), call
        assert math.prod(members) or not any(leaves), call
    arrays = iter(operands[3:])  # after the scalars
    expected = list(sizes) or None
    for kind in range(5 if attributes["mode"] == 3 else 4):
        if attributes["flat"] >> kind & 1:
            total = int(np.prod(next(arrays)[0]))
            given = attributes.get({2: "mu_offsets", 3: "nu_offsets"}.get(kind), ())
            mine = given if len(given) else starts
            ends = mine.astype(object) + sizes
            assert all(0 <= a <= b <= total for a, b in zip(mine, ends, strict=True)), call
        else:
            found = [int(np.prod(next(arrays)[0])) for _ in groups]
            expected = expected or found
            assert found == expected, call


def check_squares(call):
    """As a step without; the partials are those of its leaves, and each segment has a sum."""
    assert_in_bounds(call["step"])
    attributes, operands = call["attributes"], call["operands"]
    first = 4 if call["name"] == "adam_squares" else 8
    count = len(attributes["groups"])
    sizes = attributes["sizes"].tolist()
    sizes = sizes or [math.prod(x[0]) for x in operands[first : first + count]]
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


def assert_values(call, results):
    """Of operands that are all ones."""
    if call["name"] == "sum_parts":
        n, sizes = len(group_of(call["attributes"])), call["attributes"]["sizes"].tolist()
        assert all((x == n).all() for x in results[:-1]), (call, results)
        assert results[-1][:, 0].view(np.float32).tolist() == [n * n * x for x in sizes], call
    elif call["name"].startswith("copy"):
        first = call["operands"]
        for (_, dtype), x in zip(first, results, strict=False):
            assert x.dtype != dtype or (x == 1).all(), (call, results)


def ffi_call(call):
    results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in call["results"]]
    function = jax.ffi.ffi_call(
        f"jdistadam_{call['name']}", results, input_output_aliases=call["aliases"]
    )
    return lambda *x: function(*x, **call["attributes"])


def program_of(call):
    """The call alone; a wait after its start; a start before a wait."""
    if call["name"] == "copy_start":
        aliases = {i: i for i in range(len(call["results"]))}
        attributes = dict(devices=np.asarray([0]), per_group=np.int64(1))  # if the start has none
        attributes |= {name: x for name, x in call["attributes"].items() if name in attributes}
        wait = dict(
            name="copy_wait", results=call["results"], aliases=aliases, attributes=attributes
        )
        return lambda *x: ffi_call(wait)(*ffi_call(call)(*x))
    if call.get("start") is None:
        return ffi_call(call)

    def start_and_wait(*x):
        sources = [jnp.ones(shape, dtype) for shape, dtype in call["start"]["operands"]]
        started = ffi_call(call["start"])(*sources)
        fits = [a.shape == b.shape and a.dtype == b.dtype for a, b in zip(started, x, strict=False)]
        targets = [a if fit else b for a, b, fit in zip(started, x, fits, strict=False)]
        return ffi_call(call)(*targets, *x[len(targets) :])

    return start_and_wait


def call_handler(call):
    operands = [np.ones(shape, dtype) for shape, dtype in call["operands"]]
    try:
        results = jax.device_get(jax.jit(program_of(call))(*operands))
        if any(np.prod(shape) for shape, _ in call["results"]):  # otherwise XLA drops the call
            assert_in_bounds(call)
            assert_values(call, results)
            seen[kind_of(call), "succeeded"] += 1
    except jax.errors.JaxRuntimeError as error:
        causes = ("INVALID_ARGUMENT",)
        if call["name"].startswith("copy"):
            causes += ("INTERNAL: jdistadam: copies between devices were not finished: ",)
        assert str(error).startswith(causes), error
        seen[kind_of(call), "raised"] += 1


if __name__ == "__main__":
    assert native.status("cpu").available, native.status("cpu").detail
    thoroughly = settings(
        max_examples=int(sys.argv[1]), deadline=None, database=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    for calls in (
        adam_calls(False), adam_calls(True), sum_calls(), norm_calls(), parts_calls(), copies_calls(),
        quantized_calls(), squares_calls(),
    ):  # fmt: skip
        thoroughly(given(calls)(call_handler))()
    assert len(seen) == 24 and min(seen.values()) > int(sys.argv[2]), seen
    print(seen)
