"""Which form a value of a stream has, rule by rule."""

import jax
import jax.numpy as jnp
import pytest

from mcir.algebra import Affine, Exp, Forms, Squared
from mcir.read import trace

X = jax.ShapeDtypeStruct((5, 7), "float32")


def form_of(function):
    """The form of the operand of the last sum over j of `function(x, m)`; and the forms. m is a maximum over j."""

    def f(x):
        return jnp.sum(function(x, jnp.max(x, axis=1, keepdims=True)), axis=1)

    graph = trace(f, X)
    (axis,) = next(v.param("over") for v in graph.values if v.op == "reduce_sum")
    pending = {i for i, v in enumerate(graph.values) if axis in v.param("over", ())}
    forms = Forms(graph, axis, pending)
    last = max(i for i in pending if graph.values[i].op == "reduce_sum")
    return forms.of(graph.values[last].args[0]), forms


def named(forms, position):
    return forms.graph.values[position].op


AFFINE = {
    "shift": (lambda x, m: x - m, 1.0, (-1.0,)),
    "shift, turned": (lambda x, m: m - x, -1.0, (1.0,)),
    "sum": (lambda x, m: m + x, 1.0, (1.0,)),
    "negated": (lambda x, m: -(x - m), -1.0, (1.0,)),
    "multiple": (lambda x, m: (x - m) * 3.0, 3.0, (-3.0,)),
    "multiple, turned": (lambda x, m: 3.0 * (x - m), 3.0, (-3.0,)),
    "quotient": (lambda x, m: (x - m) / 2.0, 0.5, (-0.5,)),
    "two shifts": (lambda x, m: (x - m) - m * 2.0, 1.0, (-1.0, -1.0)),
    "cast": (lambda x, m: (x - m).astype("bfloat16").astype("float32"), 1.0, (-1.0,)),
}


@pytest.mark.parametrize("name", AFFINE)
def test_affine(name):
    function, scale, coefficients = AFFINE[name]
    form, forms = form_of(function)
    assert isinstance(form, Affine)
    assert form.scale == scale
    assert tuple(c for _, c in form.rows) == coefficients
    assert named(forms, form.x) == "input"


EXP = {
    "exp": (lambda x, m: jnp.exp(x - m), 1.0, 1, 0, 0),
    "base": (lambda x, m: jnp.exp((x - m) * 2.0), 2.0, 1, 0, 0),
    "divided": (lambda x, m: jnp.exp(x - m) / jnp.sum(jnp.exp(x - m), axis=1, keepdims=True), 1.0, 1, 1, 0),
    "times a row": (lambda x, m: jnp.exp(x - m) * m, 1.0, 1, 1, 0),
    "times plain": (lambda x, m: jnp.exp(x - m) * x, 1.0, 1, 0, 1),
    "divided by plain": (lambda x, m: jnp.exp(x - m) / (x * x), 1.0, 1, 0, 1),
    "times a constant": (lambda x, m: jnp.exp(x - m) * 3.0, 1.0, 1, 0, 1),
    "masked": (lambda x, m: jnp.where(x > 0, jnp.exp(x - m), 0), 1.0, 1, 0, 1),
    "masked, turned": (lambda x, m: jnp.where(x > 0, 0, jnp.exp(x - m)), 1.0, 1, 0, 1),
    "cast": (lambda x, m: jnp.exp(x - m).astype("bfloat16").astype("float32"), 1.0, 1, 0, 2),
}


@pytest.mark.parametrize("name", EXP)
def test_exponentials(name):
    function, base, rows, factors, linear = EXP[name]
    form, _ = form_of(function)
    assert isinstance(form, Exp)
    assert form.base == base
    assert (len(form.rows), len(form.factors), len(form.linear)) == (rows, factors, linear)


def test_exp2_has_the_base_two():
    form, _ = form_of(lambda x, m: jnp.exp2(x - m))
    assert isinstance(form, Exp)
    assert form.base == pytest.approx(0.6931471805599453, rel=1e-15)


@pytest.mark.parametrize("square", [lambda d: d * d, lambda d: d**2, jnp.square], ids=["product", "power", "square"])
def test_squared_deviations(square):
    form, forms = form_of(lambda x, m: square(x - jnp.mean(x, axis=1, keepdims=True)))
    assert isinstance(form, Squared)
    assert forms.is_mean(form.row, form.x, ("a1",))


REFUSED = {
    "growing with smaller x": lambda x, m: jnp.exp(m - x),
    "not linear in the exponential": lambda x, m: jnp.exp(x - m) ** 2,
    "exponential plus something": lambda x, m: jnp.exp(x - m) + x,
    "exponential in a denominator": lambda x, m: x / jnp.exp(x - m),
    "product of exponentials": lambda x, m: jnp.exp(x - m) * jnp.exp(x + m),
    "a row times x": lambda x, m: x * m,
    "tanh of a shift": lambda x, m: jnp.tanh(x - m),
    "fill that is not zero": lambda x, m: jnp.where(x > 0, jnp.exp(x - m), 1.0),
    "a condition on a row": lambda x, m: jnp.where(x > m, jnp.exp(x - m), 0),
    "cube": lambda x, m: (x - m) ** 3,
    "square of a sum": lambda x, m: (x + m) ** 2,
    "square of a multiple": lambda x, m: (2.0 * x - m * 2.0 - x) ** 2,
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_values_have_no_form(name):
    assert form_of(REFUSED[name])[0] is None


def test_plain_values_have_no_form():
    """They need none."""
    form, forms = form_of(lambda x, m: jnp.exp(x))
    assert form is None
    assert not any(forms.depends(i) for i, v in enumerate(forms.graph.values) if v.op == "exp")


def test_a_mean_is_a_sum_divided_by_the_number_of_elements():
    form, forms = form_of(lambda x, m: (x - jnp.sum(x, axis=1, keepdims=True) / 6.0) ** 2)
    assert isinstance(form, Squared)
    assert not forms.is_mean(form.row, form.x, ("a1",))
    form, forms = form_of(lambda x, m: (x - m) ** 2)
    assert isinstance(form, Squared)
    assert not forms.is_mean(form.row, form.x, ("a1",))


# -- row values --------------------------------------------------------------------------------------------------------


def exponent_of(function):
    """The row value that an exponential is shifted by, as a sum."""
    form, forms = form_of(lambda x, m: jnp.exp(x - function(x, m)))
    assert isinstance(form, Exp)
    ((row, _),) = form.rows
    return {(kind, named(forms, r)): c for (kind, r), c in forms.exponent(row).items()}


def log_sum_exp(x, m):
    return m + jnp.log(jnp.sum(jnp.exp(x - m), axis=1, keepdims=True))


@pytest.mark.parametrize(
    "function, expected",
    [
        (lambda x, m: m, {("row", "reduce_max"): 1.0}),
        (lambda x, m: m * 2.0, {("row", "reduce_max"): 2.0}),
        (lambda x, m: -m, {("row", "reduce_max"): -1.0}),
        (lambda x, m: (m + m) / 4.0, {("row", "reduce_max"): 0.5}),
        (log_sum_exp, {("row", "reduce_max"): 1.0, ("log", "reduce_sum"): 1.0}),
        (lambda x, m: log_sum_exp(x, m) - m, {("log", "reduce_sum"): 1.0}),
        (lambda x, m: jnp.maximum(-jnp.inf, m), {("row", "reduce_max"): 1.0}),
        (lambda x, m: jnp.where(jnp.isfinite(m), m, 0), {("row", "reduce_max"): 1.0}),
        (lambda x, m: jnp.log(jnp.abs(jnp.sum(x, axis=1, keepdims=True))), {("log", "reduce_sum"): 1.0}),
        (lambda x, m: jnp.tanh(m), {("row", "tanh"): 1.0}),
    ],
    ids=["m", "2m", "-m", "m/2", "lse", "lse - m", "max(-inf, m)", "guarded", "abs", "opaque"],
)
def test_exponents_are_sums_of_rows_and_logarithms(function, expected):
    assert exponent_of(function) == expected


def test_casts_of_rows_are_seen_through_only_where_they_lose_nothing():
    f = jax.ShapeDtypeStruct((5, 7), "bfloat16")

    def wide(x):
        m = jnp.max(x, axis=1, keepdims=True).astype("float32")
        return jnp.sum(jnp.exp(x.astype("float32") - m), axis=1)

    graph = trace(wide, f)
    forms = Forms(graph, "a1", {i for i, v in enumerate(graph.values) if v.param("over")})
    casts = [i for i, v in enumerate(graph.values) if v.op == "convert_element_type" and forms.is_row(i)]
    assert [graph.values[forms.row(i)].op for i in casts] == ["reduce_max"]

    def narrow(x):
        m = jnp.max(x, axis=1, keepdims=True).astype("bfloat16").astype("float32")
        return jnp.sum(jnp.exp(x - m), axis=1)

    graph = trace(narrow, X)
    forms = Forms(graph, "a1", {i for i, v in enumerate(graph.values) if v.param("over")})
    casts = [i for i, v in enumerate(graph.values) if v.op == "convert_element_type" and forms.is_row(i)]
    assert [graph.values[forms.row(i)].op for i in casts] == ["convert_element_type"] * 2
