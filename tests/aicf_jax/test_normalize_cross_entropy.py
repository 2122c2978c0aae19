"""The normal form of cross entropy: which equations it covers, idempotence, any order of rules."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aicf_jax import _compat
from aicf_jax.graph import build
from aicf_jax.normalize import RULES, normalize
from aicf_jax.normalize._log_region import LogRegion
from aicf_jax.normalize._loss_region import LossRegion
from aicf_jax.ops._loss_rows import Rows, count
from aicf_jax.rewrite import _body
from tests.aicf_jax.attention_support import evaluate, graph_of, normal, only
from tests.linear_cross_entropy.spellings import SPELLINGS, TOTALS, by_optax, totalled

X = normal(0, 3, 4, 37)
LABELS = jnp.asarray(np.random.default_rng(1).integers(0, 37, (3, 4)), jnp.int32)


def inputs_of(graph, node, *args):
    """Values of a canonical node's inputs, by running the equations before it."""
    operands = [graph.values[v].atom for v in node.inputs if graph.values[v].kind != "literal"]
    jaxpr = graph.program.replace(eqns=[f.eqn for f in graph.equations], outvars=operands)
    return _compat.as_function(jaxpr)(*args)


@pytest.mark.parametrize("name", SPELLINGS)
def test_one_node_that_computes_the_loss(name):
    loss = SPELLINGS[name]
    graph = graph_of(loss, X, LABELS)
    node = only(graph, "cross_entropy")
    found = jnp.ravel(evaluate(graph, node, *inputs_of(graph, node, X, LABELS)))
    if name == "log_of_softmax_at_label":  # everything flows through the probability already
        found = jnp.log(found)
    want = jnp.ravel(loss(X, LABELS))
    # Scale and sign may stand outside, and the select that makes losses of rows without elements 0. Sums of 37 terms.
    found, want = found[want != 0], want[want != 0]
    np.testing.assert_allclose(found * (want[0] / found[0]), want, rtol=64 * float(jnp.finfo("float32").eps))


@pytest.mark.parametrize("name", SPELLINGS)
def test_numbers_of_rows_give_what_the_equations_give(name):
    """The loss from m, l and what is taken is that of the equations: the algebra, without streaming."""
    graph = graph_of(SPELLINGS[name], X, LABELS)
    node = only(graph, "cross_entropy")
    values = inputs_of(graph, node, X, LABELS)
    body = build(_body(graph, node, [v for v in node.inputs if graph.values[v].kind != "literal"]))
    region = LossRegion(LogRegion(body, body.arguments[0], node.attr("axis")), whole=True)
    x, others = values[0], values[1:]
    m = Rows(region, others).maximum(x)
    l, taken = Rows(region, others).total(x, m), Rows(region, others).taken_from(x)
    assert len(taken) == count(region) > 0
    found = Rows(region, others).loss(m, l, taken)
    # Sums of 37 terms of about 5.
    want = evaluate(graph, node, *values)
    np.testing.assert_allclose(found, want, rtol=0, atol=5 * 64 * float(jnp.finfo("float32").eps))


def test_normalizing_again_changes_nothing():
    for loss in (by_optax, totalled(by_optax, "padded mean")):
        graph = graph_of(loss, X, LABELS)
        assert normalize(graph).nodes == graph.nodes


@pytest.mark.parametrize("total", TOTALS)
def test_totals_are_part_of_it(total):
    graph = graph_of(totalled(by_optax, total), X, LABELS)
    node = only(graph, "cross_entropy")
    assert graph.values[node.outputs[0]].aval.shape == ()


def test_rules_of_other_families_in_any_order_leave_it_alone():
    jaxpr = _compat.without_constants(jax.make_jaxpr(totalled(by_optax))(X, LABELS).jaxpr)
    expected = normalize(build(jaxpr)).nodes
    first = [r for r in RULES if r.order <= 4]
    for seed in range(3):
        later = [r for r in RULES if r.order > 4]
        random.Random(seed).shuffle(later)
        assert normalize(build(jaxpr), (*first, *later)).nodes == expected
