"""Every rule of the language has a program that breaks it."""

import dataclasses

import jax
import pytest

from mcir.errors import VerifyError
from mcir.ir import Store
from mcir.text import parse
from tests.mcir.programs import attention, backward, moments

PROGRAMS = {
    "attention": attention(),
    "masked": attention(-1e30),
    "backward": backward(-1e30),
    "moments": moments(),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_that_keep_the_rules(name):
    assert PROGRAMS[name].verify() is PROGRAMS[name]


@pytest.mark.parametrize("name", PROGRAMS)
def test_rules_do_not_depend_on_tile_sizes(name):
    program = PROGRAMS[name]
    looped = {axis for loops, _ in program.statements() for axis in loops}
    program.with_blocks(**dict.fromkeys(looped, 1)).verify()
    program.with_blocks(**dict.fromkeys(looped, 1000)).verify()


def breaks(name, message, edits):
    """The program with these edits of its text is still one, and breaks the rule that the message ends with."""
    text = str(PROGRAMS[name])
    for old, new in edits.items():
        assert old in text, f"{old!r} is not in the program"
        text = text.replace(old, new, 1)
    with pytest.raises(VerifyError) as raised:
        parse(text).verify()
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "message, edits",
    [
        ("axis d: a name is declared once", {"axis d": "axis d = 4 block 4\naxis d"}),
        ("buffer q: a name is declared once", {"input k:": "input q:"}),
        ("input q: axis x is not declared", {"q: float32[h, i, d]": "q: float32[h, x]"}),
        ("input q: axes of a type come in the program's order", {"q: float32[h, i, d]": "q: float32[i, h, d]"}),
        ("input q: axes of a type come in the program's order", {"q: float32[h, i, d]": "q: float32[h, h, d]"}),
        ("input q: an element type that jax has, not 'float33'", {"q: float32": "q: float33"}),
        ("`tile h, i, i`: each axis is looped over once", {"tile h, i:": "tile h, i, i:"}),
        ("axis z is not declared", {"tile h, i:": "tile h, i, z:"}),
        ("`stream i:`: each axis is looped over once", {"stream j:": "stream i:"}),
        ("`q1 = load k: float32[h, j, d]`: q1 is assigned twice in a nest", {"k1 = load k": "q1 = load k"}),
        ("q is a buffer; values and buffers have names of their own", {"q1 = load q": "q = load q"}),
        (
            "statement 6, `s = dot(q1, v1) over=(d): float32[h, i, j]`: v1 is not defined",
            {"dot(q1, k1)": "dot(q1, v1)"},
        ),
        ("s is not defined before it is read here", {"store out = o": "store out = s"}),
        ("m is not defined before it is read here (state is read after its update)", {"neg(s)": "add(s, m)"}),
    ],
)
def test_names(message, edits):
    breaks("attention", message, edits)


@pytest.mark.parametrize(
    "message, edits",
    [
        ("a load has the type of its buffer, float32[h, i, d]", {"load q: float32": "load q: bfloat16"}),
        ("a load has the type of its buffer, float32[h, j, e]", {"load v: float32[h, j, e]": "load v: float32[h, j]"}),
        ("nothing is not a buffer", {"load q:": "load nothing:"}),
        (
            "out is not an input, and no earlier nest stores it",
            {"load q: float32[h, i, d]": "load out: float32[h, i, e]"},
        ),
        ("the result of neg has the axes h, i, j", {"neg(s): float32[h, i, j]": "neg(s): float32[h, i]"}),
        ("the result of neg has the axes h, i, j", {"neg(s): float32[h, i, j]": "neg(s): float32[h, i, j, d]"}),
        ("neg of float32 gives float32", {"neg(s): float32": "neg(s): int32"}),
        ("not of float32 gives an error of jax", {"neg(s)": "not(s)"}),
        ("negate is not an operation of the language", {"neg(s)": "negate(s)"}),
        ("the parameters of neg are (), not (y)", {"neg(s)": "neg(s) y=2"}),
        ("the parameters of integer_pow are (y), not ()", {"neg(s)": "integer_pow(s)"}),
        ("`over` names axes of the arguments; e is not one", {"over=(d)": "over=(e)"}),
        ("the result of dot has the axes i, j, d", {"over=(d)": "over=(h)"}),
        ("dot takes 2 argument(s), not 1", {"dot(q1, k1)": "dot(q1)"}),
        ("shifted_exp takes 2 argument(s), not 1", {"shifted_exp(x, m)": "shifted_exp(x)"}),
        (
            "axis d is cut in blocks (2 of 4), so it needs a loop around this",
            {"axis d = 4 block 4": "axis d = 4 block 2"},
        ),
        ("axis i is cut in blocks (5 of 13), so it needs a loop around this", {"tile h, i:": "tile h:"}),
    ],
)
def test_types(message, edits):
    breaks("attention", message, edits)


def test_type_of_an_iota():
    breaks("masked", "the result of iota has the axes i", {"iota() axis=j: int32[j]": "iota() axis=i: int32[j]"})


def test_type_of_a_constant():
    edits = {"constant() value=0: int32[]": "constant() value=0: int32[j]"}
    breaks("masked", "the result of constant has the axes nothing", edits)


def test_types_that_jax_does_not_have_here_are_not_checked():
    wide = parse(str(attention()).replace("float32", "float64"))
    wide.verify()
    with jax.enable_x64(True):
        wide.verify()
        with pytest.raises(VerifyError, match="neg of float64 gives float64"):
            parse(str(wide).replace("neg(s): float64", "neg(s): float32")).verify()


@pytest.mark.parametrize(
    "name, message, edits",
    [
        ("moments", "moments has 3 state name(s)", {"n, mu, m2 = m": "n, mu = m", "n, mu, m2 <-": "n, mu <-"}),
        ("attention", "`over` names one declared axis or more", {"m = max over j": "m = max over z"}),
        ("attention", "`over` names one declared axis or more", {"m = max over j": "m = max"}),
        ("attention", "state does not vary along the axes it reduces", {"m = max over j": "m = max over i"}),
        (
            "attention",
            "a reduction over i is declared outside of the loop over i",
            {"m = max over j: float32[h, i]": "m = max over i: float32[h]"},
        ),
    ],
)
def test_declarations_of_state(name, message, edits):
    breaks(name, message, edits)


UPDATES = [
    (
        "reduction l: state is updated exactly once, in one stream",
        {"l <- sum(p)\n    ": "", "div(acc, l)": "neg(acc)", "log(l)": "log(m)"},
    ),
    ("l is updated by more than one statement", {"l <- sum(p)": "l <- sum(p)\n    l <- sum(p)"}),
    ("an update names the state of one reduction", {"l <- sum(p)": "p <- undeclared(p)"}),
    ("too few or many arguments: max", {"m <- max(x)": "m <- max(x, x)"}),
    ("the arguments together have the axes h, i, j, e", {"acc <- sum(p, v1)": "acc <- sum(p)"}),
    ("the arguments together have the axes h, i, j", {"l <- sum(p)": "l <- sum(p, k1)"}),
    ("acc is not a max reduction", {"l = sum over j corrected by m": "l = sum over j corrected by acc"}),
    ("a corrected reduction is a sum", {"l = sum": "l = min", "l <- sum": "l <- min"}),
    (
        "a corrected reduction is a sum over what m is over, with its axes or more",
        {"by m: float32[h, i]": "by m: float32[i]"},
    ),
    ("depends on the running m but is not corrected by it", {"l = sum over j corrected by m": "l = sum over j"}),
    (
        "m, which corrects it, is updated before it in the same stream",
        {"m <- max(x)": "l <- sum(s)\n    m <- max(x)", "    l <- sum(p)\n": ""},
    ),
]


@pytest.mark.parametrize("message, edits", UPDATES)
def test_updates(message, edits):
    breaks("attention", message, edits)


def test_state_is_declared_outside_of_the_stream_that_updates_it():
    head = "  reduction t = max over i: float32[h, j]\n"
    breaks(
        "backward",
        "axis i is cut in blocks",
        {
            "  stream i": f"{head}  stream i",
            "over=(e): float32[h, i, j]": "over=(e): float32[h, i, j]\n    t <- max(dp)",
            "t = max over i: float32[h, j]": "t = max over j: float32[h, i]",
        },
    )


def test_a_stream_walks_over_what_the_state_reduces():
    text = """
program total
axis a = 5 block 2
axis b = 7 block 3
input x: float32[a, b]
output y: float32[]
tile:
  reduction t = sum over {over}: float32[]
  stream a:
    stream b:
      x1 = load x: float32[a, b]
      t <- sum(x1)
  store y = t
"""
    parse(text.format(over="a, b")).verify()
    with pytest.raises(VerifyError, match="the stream over b is not one that t reduces over"):
        parse(text.format(over="a")).verify()
    unlooped = text.replace("    stream b:\n", "").replace("      ", "    ").format(over="a, b")
    parse(unlooped.replace("block 3", "block 7")).verify()
    with pytest.raises(VerifyError, match="axis b is cut in blocks"):
        parse(unlooped).verify()
    inside = text.replace("  reduction t = sum over {over}: float32[]\n", "")
    inside = inside.replace("      x1 =", "      reduction t = sum over c: float32[]\n      x1 =").replace(
        "axis a", "axis c = 1 block 1\naxis a", 1
    )
    with pytest.raises(VerifyError, match="t is declared outside of the stream that updates it"):
        parse(inside).verify()


def test_running_values_do_not_leave_their_stream():
    edits = {"acc <- sum(p, v1)": "acc <- sum(p, v1)\n    store out += acc", "  store out = o\n": ""}
    breaks("attention", "depends on acc, which still changes", edits)


def test_maximum_of_a_part():
    edits = {"sv <- sum(p, do)": "sv <- sum(p, do)\n    part = reduce_max(p) over=(j): float32[h, i]"}
    breaks("backward", "a reduce_max over j, which is looped over, needs a reduction", edits)


@pytest.mark.parametrize(
    "message, edits",
    [
        ("nothing is not a buffer", {"store dk": "store nothing"}),
        ("k is an input, which nothing stores", {"store dk": "store k"}),
        ("dk is stored by more than one statement", {"store dv": "store dk"}),
        ("a stored value has the type of the buffer, float32[h, j, d]", {"store dk = sk": "store dk = sv"}),
        ("output dv: an output is stored by one statement; nothing stores it", {"  store dv = sv\n": ""}),
        ("`=` in the loop over j stores again and again; use `+=`", {"store dq +=": "store dq ="}),
        ("`+=` adds parts of a sum over j; this is part of a sum over nothing", {"store dq += dt": "store dq += q1"}),
        (
            "dt is the sum over a part of j: only linear operations may take it",
            {"store dq += dt": "u = exp(dt): float32[h, i, d]\n    store dq += u"},
        ),
        (
            "dt is the sum over a part of j: only linear operations may take it",
            {"store dq += dt": "u = mul(dt, dt): float32[h, i, d]\n    store dq += u"},
        ),
        (
            "dt is the sum over a part of j: only linear operations may take it",
            {"store dq += dt": "u = div(q1, dt): float32[h, i, d]\n    store dq += u"},
        ),
        (
            "a sum over a part of j cannot vary along it",
            {"store dq += dt": "u = dot(dt, k1) over=(d): float32[h, i, j]"},
        ),
        ("delta is not an input, and no earlier nest stores it", {"  store delta = dl\n": ""}),
        (
            "delta is not an input, and no earlier nest stores it",
            {"w = mul(o1, g1)": "w1 = load delta: float32[h, i]\n  w = mul(o1, g1)"},
        ),
        (
            "only a plain sum takes in parts of sums, on the way to a `+=`",
            {"sk <- sum(ds, q1)": "dt0 = dot(ds, k1) over=(j): float32[h, i, d]\n    sk <- sum(ds, dt0)"},
        ),
    ],
)
def test_memory(message, edits):
    breaks("backward", message, edits)


@pytest.mark.parametrize(
    "line", ["u = mul(dt, q1)", "u = mul(q1, dt)", "u = div(dt, q1)", "u = neg(dt)", "u = add(dt, dt)"]
)
def test_linear_operations_take_parts_of_sums(line):
    text = str(PROGRAMS["backward"]).replace("store dq += dt", f"{line}: float32[h, i, d]\n    store dq += u")
    parse(text).verify()


def test_a_store_in_a_stream_with_skipped_blocks_leaves_holes():
    edits = {
        "store dq += dt": "store dq += dt\n    store dx_out = dx",
        "temporary": "output dx_out: float32[h, i, j]\ntemporary",
    }
    breaks("backward", "`=` in a stream with skipped blocks leaves holes; use `+=`", edits)


@pytest.mark.parametrize(
    "message, edits",
    [
        ("`stream j while z is true", {"while g": "while z"}),
        ("the predicate z is not a value of the stream", {"while g": "while z"}),
        ("the predicate x is not boolean", {"while g": "while x"}),
        ("the predicate js is not boolean", {"while g": "while js"}),
        ("z is neither a buffer, a loaded value nor max state that this stream updates", {"unless m": "unless z"}),
        ("l is neither a buffer, a loaded value nor max state that this stream updates", {"unless m": "unless l"}),
        ("out is not an input, and no earlier nest stores it", {"unless m": "unless out"}),
        (
            "z is neither a buffer, a loaded value nor max state",
            {"unless m": "unless z", "  reduction m": "  z = neg(q1): float32[h, i, d]\n  reduction m"},
        ),
    ],
)
def test_skips(message, edits):
    breaks("masked", message, edits)


@pytest.mark.parametrize("rows", ["lse", "q1"])
def test_rows_may_be_a_buffer_or_a_loaded_value(rows):
    text = (
        str(PROGRAMS["masked"])
        .replace("output lse", "input bound: float32[h, i]\noutput lse")
        .replace("unless m", f"unless {rows}")
    )
    parse(text.replace("unless lse", "unless bound")).verify()


def test_statements_only():
    program = PROGRAMS["attention"]
    nest = dataclasses.replace(program.nests[0], body=("x = 1",))
    with pytest.raises(TypeError, match="expected a statement"):
        dataclasses.replace(program, nests=(nest,)).verify()


def test_nests_have_names_of_their_own():
    """The same name in two nests is two values; within a nest there is one assignment of it."""
    program = PROGRAMS["moments"]
    text = str(program).replace("output mean", "output copy: float32[r, c]\noutput mean")
    parse(text + "tile r, c:\n  x1 = load x: float32[r, c]\n  store copy = x1\n").verify()
    text = text.replace("x2", "x1")
    with pytest.raises(VerifyError, match="x1 is assigned twice in a nest"):
        parse(text).verify()


def test_values_of_a_stream_end_with_it():
    breaks("attention", "p is not defined before it is read here", {"lg = log(l)": "lg = reduce_sum(p) over=(j)"})


def test_later_nests_do_not_see_stores_of_their_own():
    program = PROGRAMS["backward"]
    nests = (program.nests[1], program.nests[0])
    with pytest.raises(VerifyError, match="delta is not an input, and no earlier nest stores it"):
        dataclasses.replace(program, nests=nests).verify()
    assert Store("delta", "dl") in program.nests[0].body
