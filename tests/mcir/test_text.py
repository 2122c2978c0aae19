"""Programs as text and back."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcir.errors import ParseError
from mcir.ir import (
    MONOIDS,
    ROLES,
    Axis,
    Buffer,
    Compute,
    Load,
    OnlineReduction,
    Program,
    Rematerialization,
    Skip,
    Store,
    Stream,
    Tile,
    Type,
    Update,
)
from mcir.text import parse
from tests.mcir.programs import attention, backward, moments


@pytest.mark.parametrize(
    "program",
    [attention(), attention(-1e30), attention(-np.inf), backward(-1e30), moments()],
    ids=["attention", "masked", "masked with -inf", "backward", "moments"],
)
def test_round_trip(program):
    assert parse(str(program)) == program
    assert str(parse(str(program))) == str(program)


def test_attention(golden):
    golden(str(attention(-1e30, h=8, i=4096, j=4096, d=64, e=64, bh=8, bi=512, bj=512)))


def test_backward(golden):
    golden(str(backward(-1e30, h=8, i=4096, j=4096, d=64, e=64, bh=8, bi=512, bj=512)))


def params_program(*params):
    statement = Compute("y", "op", ("x",), tuple((f"p{i}", v) for i, v in enumerate(params)), Type("float32", ()))
    return Program("p", (), (), (Tile((), (statement,)),))


VALUES = [0, -3, 10**30, 0.1, -0.0, 1e-45, 1e300, 1.0, math.inf, -math.inf, math.nan, True, False, None]
VALUES += ["float32", "two words", "", "inf", "true", 'a "quoted" \\ one\n', jnp.dtype("bfloat16"), np.dtype("float32")]
VALUES += [(), (1,), ("j",), (1, (2.5, "h"), ()), ("", "é", "a:b")]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_parameters_keep_value_and_type(value):
    program = params_program(value, 7)
    read = parse(str(program))
    assert read == program
    found = read.nests[0].body[0].param("p0")
    assert type(found) is type(value)
    assert repr(found) == repr(value)


def test_numpy_numbers_are_written_as_python_numbers():
    program = params_program(np.float32(0.1), np.int32(3), np.bool_(True))
    assert parse(str(program)) == program


def test_other_parameters_are_refused():
    with pytest.raises(TypeError, match="as a parameter"):
        str(params_program([1]))


NAMES = st.sampled_from(
    ["x", "load", "store", "stream", "reduction", "recompute", "over", "inf", "a.b", "<lambda>", ""]
)
SOME = st.lists(NAMES, min_size=1, max_size=3).map(tuple)
ANY = st.lists(NAMES, max_size=2).map(tuple)
TYPES = st.builds(Type, st.sampled_from(["float32", "key<fry>"]), ANY)
NUMBERS = st.one_of(st.integers(-9, 9), st.floats(allow_nan=False, allow_subnormal=False))
PARAMS = st.lists(st.tuples(NAMES, NUMBERS | NAMES | SOME), max_size=2).map(tuple)
SKIPS = st.none() | st.builds(Skip, NAMES, st.booleans(), NUMBERS, st.none() | NAMES, NUMBERS)


@st.composite
def bodies(draw, depth=2):
    """Any statements; the states that are updated are those of the reductions declared so far."""
    out, results = [], []
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(["load", "compute", "recompute", "reduction", "update", "store", "stream"]))
        if kind == "load":
            out.append(Load(draw(NAMES), draw(NAMES), draw(TYPES)))
        elif kind in ("compute", "recompute"):
            build = Compute if kind == "compute" else Rematerialization
            out.append(build(draw(NAMES), draw(NAMES), draw(ANY), draw(PARAMS), draw(TYPES)))
        elif kind == "reduction":
            monoid, by = draw(st.sampled_from(MONOIDS)), draw(st.none() | NAMES)
            out.append(OnlineReduction(draw(SOME), monoid, draw(ANY), draw(TYPES), by, draw(NUMBERS)))
            results.append(out[-1].results)
        elif kind == "update":
            out.append(Update(draw(st.sampled_from(results)) if results else draw(SOME), draw(SOME)))
        elif kind == "store":
            out.append(Store(draw(NAMES), draw(NAMES), draw(st.booleans())))
        elif depth:
            out.append(Stream(draw(NAMES), draw(bodies(depth - 1)), draw(SKIPS)))
    return tuple(out)


PROGRAMS = st.builds(
    Program,
    NAMES,
    st.lists(st.builds(lambda n, s: Axis(n, s, max(1, s // 2)), NAMES, st.integers(0, 99)), max_size=2).map(tuple),
    st.lists(st.builds(Buffer, NAMES, st.sampled_from(ROLES), TYPES), max_size=2).map(tuple),
    st.lists(st.builds(Tile, ANY, bodies()), max_size=2).map(tuple),
)


@given(PROGRAMS)
def test_any_program_is_read_back(program):
    assert parse(str(program)) == program


def test_comments_and_blank_lines_say_nothing():
    text = "\n# one\n" + str(attention()).replace("\n", "  # it\n\n")
    assert parse(text) == attention()


def with_line(old, new):
    text = str(attention(-1e30))
    assert old in text
    return text.replace(old, new, 1)


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "line 1: expected `program`, found nothing"),
        ("axis i = 4 block 2", "line 1: expected `program`, found axis"),
        ("program p q", "line 1: expected the end of the line, found q"),
        ("program p\naxis i = x block 2", "line 2: expected a size, found x"),
        ("program p\naxis i = 4 block 8", "line 2: expected 1 <= block <= size for axis i, found block 8 of 4"),
        ("program p\n  axis i = 4 block 2", "line 2: expected no more indentation than `program` has, found 2 spaces"),
        ("program p\ntile:\naxis i = 4 block 2", "line 3: expected `tile`, found axis"),
        ("program p\ntile:\n  x ? y", r"line 3: expected a token, found \? y"),
        ("program p\ntile:\n  x load y", "line 3: expected a statement, found x"),
        ("program p\ntile:\n  x = load y: float32[]\n    z = load y: float32[]", "line 4: expected 2 spaces of inden"),
        ("program p\ntile:\n  x = neg(y) z: float32[]", "line 3: expected `=`, found :"),
        ("program p\ntile:\n  x = neg(y)", "line 3: expected `:` or a parameter, found the end of the line"),
        ("program p\ntile:\n  x = cast(y) to=dtype(f99): float32[]", "line 3: expected an element type, found f99"),
        ("program p\ntile:\n  reduction m = mean over j: float32[]", "line 3: expected one of sum, max, min, moments"),
        (with_line("m <- max(x)", "m <- sum(x)"), "line 27: expected `max`, which m is, found sum"),
        (with_line("g is true", "g is 1"), "line 17: expected `true` or `false`, found 1"),
        (with_line("unless m low", "unless m"), "line 17: expected `low`, found :"),
    ],
)
def test_errors_name_line_expected_and_found(text, message):
    with pytest.raises(ParseError, match=message):
        parse(text)


def test_update_of_undeclared_state_can_be_written():
    program = Program("p", (), (), (Tile((), (Update(("m",), ("x",)),)),))
    assert "m <- undeclared(x)" in str(program)
    assert parse(str(program)) == program


def test_recompute_is_another_kind_of_statement():
    program = backward(-1e30)
    plain = parse(str(program).replace("recompute ", ""))
    assert plain != program
    assert [f.name for f in dataclasses.fields(Rematerialization)] == [f.name for f in dataclasses.fields(Compute)]
