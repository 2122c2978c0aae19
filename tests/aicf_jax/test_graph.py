"""The graph: construction, printing, verification."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from aicf_jax import FUSION_PATTERNS, KERNELS, GraphError, OpFlags, Policy
from aicf_jax.engine import Context, Engine
from aicf_jax.graph import build, schedule
from aicf_jax.normalize import RULES, normalize

X, W, B = jnp.ones((4, 8)), jnp.ones((8, 6)), jnp.ones(6)


def graph_of(f, *args):
    return build(jax.make_jaxpr(f)(*args).jaxpr)


def dense(x, w, b):
    return jax.nn.gelu(x @ w + b)


def test_csr_adjacency_lists_consumers():
    graph = graph_of(lambda x: (jnp.sin(x) + jnp.cos(x)) * 2, X)
    assert graph.row_ptr.dtype == graph.col_indices.dtype == np.int32
    assert graph.row_ptr.tolist() == [0, 1, 2, 3, 3]
    assert graph.col_indices.tolist() == [2, 2, 3]
    assert [graph.consumers(i) for i in range(4)] == [[2], [2], [3], []]


def test_a_node_with_a_value_used_twice_by_one_node_has_one_consumer():
    graph = graph_of(lambda x: (lambda s: s * s)(jnp.sin(x)), X)
    assert graph.consumers(0) == [1]
    assert graph.flag_list[0] & OpFlags.SAFE_NODE


def test_printing(golden):
    golden(str(graph_of(dense, X, W, B)), "built")
    golden(str(normalize(graph_of(dense, X, W, B))), "normalized")
    jaxpr = jax.make_jaxpr(dense)(X, W, B).jaxpr
    golden(str(Engine(Context(Policy(), FUSION_PATTERNS, KERNELS)).rewrite(jaxpr).graph), "rewritten")


def test_printing_a_flax_layer(golden):
    module = nn.Dense(6, dtype=jnp.bfloat16)
    variables = module.init(jax.random.key(0), X)
    golden(str(normalize(graph_of(lambda v, x: nn.silu(module.apply(v, x)), variables, X))))


def test_transparent_calls_are_seen_through_and_large_ones_are_not():
    small = graph_of(lambda x: jax.nn.silu(x), X)
    assert [n.op for n in small.nodes] == ["logistic", "mul"]
    big = jax.jit(lambda x: sum(jnp.sin(x + i) for i in range(30)))
    assert [n.op for n in graph_of(lambda x: big(x), X).nodes] in (["jit"], ["pjit"])


@pytest.mark.parametrize(
    "body",
    [lambda x: x, lambda x: 1.0, lambda x: (x, jnp.sin(x)), lambda x: (lambda s: (s, s))(jnp.sin(x))],
    ids=["identity", "constant", "argument among results", "one result twice"],
)
def test_calls_whose_results_have_no_equation_of_their_own_are_kept_whole(body):
    call = jax.jit(body)
    graph = graph_of(lambda x: jax.tree.map(lambda y: y + 1.0, call(x)), X).verify()
    assert graph.nodes[0].op in ("jit", "pjit")


def test_normalization_is_a_view_and_idempotent():
    graph = graph_of(dense, X, W, B)
    once = normalize(graph)
    assert once.equations is graph.equations
    assert [n.op for n in once.nodes if n.op != "nop"] == ["gemm", "bias_add", "gelu_tanh"]
    covered = sorted(c for n in once.nodes for c in n.covers)
    assert covered == list(range(len(graph.equations)))
    assert str(normalize(once)) == str(once)


def test_rules_are_unique_and_ordered():
    assert [r.name for r in RULES] == [r.name for r in sorted(RULES, key=lambda r: r.order)]
    assert len({r.name for r in RULES}) == len(RULES)


def test_unused_operations_become_nop():
    graph = normalize(graph_of(lambda x: (jnp.sin(x), x * 2)[1], X))
    graph = graph.replace({})
    assert [n.op for n in graph.nodes] == ["nop", "mul"]
    assert schedule(graph) == [1]


class TestVerifyFindsBrokenInvariants:
    def broken(self, **changes):
        graph = graph_of(lambda x: jnp.cos(jnp.sin(x)), X)
        nodes = list(graph.nodes)
        for i, change in changes.items():
            k = int(i[1:])
            nodes[k] = dataclasses.replace(nodes[k], **change)
        return dataclasses.replace(graph, nodes=tuple(nodes))

    def test_two_producers(self):
        with pytest.raises(GraphError, match="already has a producer"):
            self.broken(n1={"outputs": (1,), "inputs": (0,)}).verify()

    def test_use_of_a_value_nobody_computes(self):
        graph = self.broken()
        with pytest.raises(GraphError, match="uses %1, which nothing computes"):
            dataclasses.replace(graph, nodes=graph.nodes[1:]).verify()

    def test_cycle(self):
        with pytest.raises(GraphError, match="depend on its own outputs"):
            self.broken(n0={"inputs": (2,)}).verify()

    def test_lost_result(self):
        graph = self.broken()
        with pytest.raises(GraphError, match="result %2 is not computed"):
            dataclasses.replace(graph, nodes=graph.nodes[:1]).verify()

    def test_nop_with_inputs(self):
        with pytest.raises(GraphError, match="NOP has no inputs"):
            self.broken(n1={"flags": OpFlags.IS_NOP}).verify()


def test_a_very_long_chain_needs_no_recursion():
    def f(x):
        for _ in range(1500):
            x = x + 0.001
        return x

    graph = graph_of(f, jnp.ones(3)).verify()
    assert len(schedule(normalize(graph))) == 1500
