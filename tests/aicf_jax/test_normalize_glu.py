"""Gates in their normal form: which multiplications are one, what the node says, and that nothing else changes."""

import itertools
import random

import jax
import jax.numpy as jnp
import pytest

from aicf_jax import OpFlags
from aicf_jax.fingerprint import Keys
from aicf_jax.normalize import RULES, normalize
from aicf_jax.normalize._values import same_value
from aicf_jax.normalize.gate import branches, part
from tests.aicf_jax.attention_support import evaluate, graph_of, normal, only, ops_of
from tests.aicf_jax.patterns.test_glu import ARGS, NEAR_MISSES, SPELLINGS, H, V, W, X


@pytest.mark.parametrize("name", SPELLINGS)
def test_the_node_covers_the_multiplication_alone(name):
    graph = graph_of(SPELLINGS[name][0], *ARGS)
    node = only(graph, "gate")
    assert node.flags & OpFlags.IS_GATE and node.flags & OpFlags.IS_JOIN
    assert [graph.eqn(c).primitive.name for c in node.covers] == ["mul"]
    a, b = (normal(i, *graph.values[v].aval.shape, dtype=graph.values[v].aval.dtype) for i, v in enumerate(node.inputs))
    assert jnp.array_equal(evaluate(graph, node, a, b), a * b)


@pytest.mark.parametrize("turned", [False, True])
def test_the_first_input_is_the_gate(turned):
    def f(x, w, v, b, c, h, d):
        g, u = jax.nn.silu(x @ w), x @ v
        return u * g if turned else g * u

    graph = graph_of(f, *ARGS)
    gate, up = branches(graph, only(graph, "gate"))
    assert gate.activation.op == "silu" and up.activation is None
    assert only(graph, "gate").inputs == (gate.vid, up.vid)
    assert graph.nodes[gate.product].inputs[1] == graph.arguments[1]


def test_halves_by_slice_and_by_split_are_the_same_parts():
    def sliced(h):
        return h[:, :3] * 2, h[:, 3:] * 2

    def split(h):
        return [a * 2 for a in jnp.split(h, 2, axis=1)]

    def strided(h):
        return h[:, ::2] * 2, h[:, 1::2] * 2

    found = []
    for f in (sliced, split, strided):
        graph = graph_of(f, X @ W)
        found.append([part(graph, v) for n in graph.nodes if n.flags & OpFlags.IS_SLICE for v in n.outputs])
    assert found[0] == found[1] == [(1, 0, 3, 1), (1, 3, 6, 1)]
    assert [tuple(range(*p[1:])) for p in found[2]] == [(0, 2, 4), (1, 3, 5)]


def test_a_cut_along_two_axes_is_no_part():
    graph = graph_of(lambda h: h[:2, :3] * 2, X @ W)
    (node,) = (n for n in graph.nodes if n.flags & OpFlags.IS_SLICE)
    assert part(graph, node.outputs[0]) is None


def test_equal_casts_are_the_same_value():
    def f(x):
        return x.astype(jnp.bfloat16) * 2, x.astype(jnp.bfloat16) * 3, x.astype(jnp.float16) * 2, (x + 1) * 2

    graph = graph_of(f, X)
    keys = Keys()
    (a, b, half), other = ([n.outputs[0] for n in graph.nodes if n.op == op] for op in ("convert_element_type", "add"))
    assert same_value(graph, a, b, keys)
    assert not same_value(graph, a, half, keys) and not same_value(graph, a, other[0], keys)
    x = graph.arguments[0]
    assert same_value(graph, x, x, keys) and not same_value(graph, x, a, keys)


def test_draws_from_two_keys_are_different_values():
    def f(x, k):
        a, b = jax.random.split(k)
        return x * jax.random.uniform(a, x.shape), x * jax.random.uniform(b, x.shape)

    graph = graph_of(f, X, jax.random.key(0))
    first, second = (n.inputs[1] for n in graph.nodes if n.op == "mul" and n.outputs[0] in graph.results)
    assert not same_value(graph, first, second, Keys())


@pytest.mark.parametrize("f", NEAR_MISSES, ids=lambda f: f.__name__)
def test_a_near_miss_is_the_node_it_was_with_a_reason(f):
    graph = graph_of(f, *ARGS)
    assert "gate" not in ops_of(f, *ARGS)
    (node,) = (n for n in graph.nodes if n.flags & OpFlags.IS_NEAR_GATE)
    assert node.op in ("mul", "add") and node.attr("code") == NEAR_MISSES[f]


ALL = [f for f, *_ in SPELLINGS.values()] + [*NEAR_MISSES]


@pytest.mark.parametrize("f", ALL)
def test_normalizing_twice_changes_nothing(f):
    graph = graph_of(f, *ARGS)
    assert str(normalize(graph)) == str(graph)


@pytest.mark.parametrize("name", ["biases", "jax.nn.glu", "each casts its input"])
def test_rules_of_one_rank_may_run_in_any_order(name):
    """`Rule.order` is the only order there is: rules of one rank do not see each other's work."""
    expected = str(graph_of(SPELLINGS[name][0], *ARGS))
    for seed in range(4):
        shuffled = random.Random(seed).sample(RULES, len(RULES))
        rules = tuple(itertools.chain(sorted(shuffled, key=lambda rule: rule.order)))
        graph = graph_of(SPELLINGS[name][0], *ARGS)
        assert str(normalize(graph, rules)) == expected


def test_a_gate_inside_a_call_that_is_seen_through():
    assert "gate" in ops_of(lambda x, w, v: jax.jit(lambda g, u: jax.nn.silu(g) * u)(x @ w, x @ v), X, W, V)
    assert "gate" in ops_of(lambda x, h: jax.jit(jax.nn.glu)(x @ h), X, H)
