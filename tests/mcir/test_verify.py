"""Every rule of the language has a program that breaks it, in one line."""

import dataclasses

import jax
import pytest

from mcir.errors import VerifyError
from mcir.ir import Store, Tile
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


def broken(name, *replacements):
    text = str(PROGRAMS[name])
    for old, new in replacements:
        assert old in text, f"{old!r} is not in the program"
        text = text.replace(old, new, 1)
    return text


def check(text, message):
    program = parse(text)  # what is broken is not the grammar
    with pytest.raises(VerifyError) as raised:
        program.verify()
    assert message in str(raised.value)


NAMES = [
    ("attention", [("axis d = 4 block 4\n", "axis d = 4 block 4\naxis d = 4 block 4\n")], "axis d: a name is declared once"),
    ("attention", [("input k:", "input q:")], "buffer q: a name is declared once"),
    ("attention", [("input q: float32[h, i, d]", "input q: float32[h, x]")], "input q: axis x is not declared"),
    ("attention", [("input q: float32[h, i, d]", "input q: float32[i, h, d]")], "input q: axes of a type come in the pro"),
    ("attention", [("input q: float32[h, i, d]", "input q: float32[h, h]")], "input q: axes of a type come in the prog"),
    ("attention", [("input q: float32", "input q: float33")], "input q: an element type that jax has, not 'float33'"),
    ("attention", [("tile h, i:", "tile h, i, i:")], "each axis is looped over once"),
    ("attention", [("tile h, i:", "tile h, i, z:")], "axis z is not declared"),
    ("attention", [("stream j:", "stream i:")], "`stream i:`: each axis is looped over once"),
    ("attention", [("k1 = load k", "q1 = load k")], "`q1 = load k: float32[h, j, d]`: q1 is assigned twice"),
    ("attention", [("q1 = load q", "q = load q")], "q is a buffer; values and buffers have names of their own"),
    ("attention", [("dot(q1, k1)", "dot(q1, v1)")], "`s = dot(q1, v1) over=(d): float32[h, i, j]`: v1 is not defined"),
    ("attention", [("store out = o", "store out = s")], "s is not defined before it is read here"),
    ("attention", [("x = neg(s)", "x = add(s, m)")], "m is not defined before it is read here (state is read after its"),
]

TYPES = [
    ("attention", [("q1 = load q: float32", "q1 = load q: bfloat16")], "a load has the type of its buffer, float32[h, i, d]"),
    ("attention", [("load q:", "load nothing:")], "nothing is not a buffer"),
    ("attention", [("load q:", "load out:")], "out is not an input, and no earlier nest stores it"),
    ("attention", [("x = neg(s): float32[h, i, j]", "x = neg(s): float32[h, i]")], "the result of neg has the axes h, i, j"),
    ("attention", [("x = neg(s): float32", "x = neg(s): int32")], "neg of float32 gives float32"),
    ("attention", [("x = neg(s): float32", "x = not(s): float32")], "not of float32 gives an error of jax: not"),
    ("attention", [("x = neg(s)", "x = negate(s)")], "negate is not an operation of the language"),
    ("attention", [("x = neg(s)", "x = neg(s) y=2")], "the parameters of neg are (), not (y)"),
    ("attention", [("x = neg(s)", "x = integer_pow(s)")], "the parameters of integer_pow are (y), not ()"),
    ("attention", [("over=(d): float32[h, i, j]", "over=(e): float32[h, i, j]")], "`over` names axes of the arguments; e"),
    ("attention", [("dot(q1, k1)", "dot(q1)")], "dot takes 2 argument(s), not 1"),
    ("attention", [("over=(d): float32[h, i, j]", "over=(h): float32[h, i, j]")], "the result of dot has the axes i, j, d"),
    ("masked", [("constant() value=0: int32[]", "constant() value=0: int32[j]")], "the result of constant has the axes noth"),
    ("masked", [("axis=j: int32[j]", "axis=i: int32[j]")], "the result of iota has the axes i"),
    ("attention", [("axis d = 4 block 4", "axis d = 4 block 2")], "axis d is cut in blocks (2 of 4), so it needs a loop"),
    ("attention", [("  k1 =", "k1 =")], ""),
]

REDUCTIONS = [
    ("attention", [("reduction m = max over j: float32[h, i]", "reduction m = max over j: float32[h, i, j]")], "axis j is cut"),
    ("attention", [("l = sum over j corrected by m: float32[h, i]", "l = sum over j corrected by m: float32[i]")], "with its"),
    ("moments", [("n, mu, m2 = moments", "n, mu = moments"), ("n, mu, m2 <-", "n, mu <-")], "moments has 3 state name(s)"),
    ("attention", [("m = max over j", "m = max over z")], "`over` names one declared axis or more"),
    ("attention", [("m = max over j", "m = max")], "`over` names one declared axis or more"),
    ("attention", [("m = max over j", "m = max over i")], "state does not vary along the axes it reduces"),
    ("backward", [("sk = sum over i", "sk = sum over i, e")], "the arguments together have the axes h, i, j, d, e"),
    ("attention", [("    m <- max(x)\n", "")], "m is not defined before it is read here"),
    ("attention", [("    l <- sum(p)\n", ""), ("div(acc, l)", "neg(acc)"), ("log(l)", "log(m)")], "reduction l: state is upd"),
    ("attention", [("    l <- sum(p)\n", "    l <- sum(p)\n    l <- sum(p)\n")], "l is updated by more than one statement"),
    ("attention", [("    l <- sum(p)\n", "    p <- undeclared(p)\n")], "an update names the state of one reduction"),
    ("moments", [("n, mu, m2 <- moments(x1)", "n <- moments(x1)")], "an update names the state of one reduction"),
    ("attention", [("m <- max(x)", "m <- max(x, x)")], "too few or many arguments: max"),
    ("attention", [("l <- sum(p)", "l <- sum(p, v1)"), ("    v1 =", "    v2 ="), ("    l <-", "    v1 = load v: float32[h, j, e]\n    l <-")],
     "the arguments together have the axes h, i, j"),
    ("attention", [("l = sum over j corrected by m", "l = sum over j corrected by acc"), ], "acc is not a max reduction"),
    ("attention", [("l = sum over j corrected by m", "l = max over j corrected by m"), ("l <- sum", "l <- max")], "is a sum over"),
    ("attention", [("l = sum over j corrected by m", "l = sum over j")], "depends on the running m but is not corrected by it"),
    ("attention", [("reduction m = max over j: float32[h, i]\n  ", ""), ("stream j:\n", "stream j:\n    reduction m = max over j: float32[h, i]\n")],
     "m is not a max reduction"),
    ("moments", [("  stream c:\n    x1 = load x: float32[r, c]\n    n, mu, m2 <- moments(x1)\n", "  x0 = load x: float32[r, c]\n"), ("block 4", "block 13")],
     "x"),
]
