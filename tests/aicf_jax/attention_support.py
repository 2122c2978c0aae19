"""Normal forms and matches of a function's program; nothing is legal or illegal yet at these stages."""

import jax
import jax.numpy as jnp
import numpy as np

from aicf_jax import _compat, ops
from aicf_jax.graph import Graph, Node, build
from aicf_jax.normalize import normalize
from aicf_jax.pattern import Pattern, match, near_miss
from aicf_jax.patterns import p20_attention, p30_attention_late
from aicf_jax.rewrite import _body

PATTERNS = tuple(
    Pattern(p.name, p.sequence, rewrite=ops.gemm_epilogue, near_misses=p.near_misses)  # any operation: never applied
    for p in (p20_attention.PATTERN, p30_attention_late.PATTERN)
)


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def graph_of(f, *args) -> Graph:
    jaxpr = _compat.without_constants(jax.make_jaxpr(f)(*args).jaxpr)
    return normalize(build(jaxpr).verify()).verify()


def ops_of(f, *args):
    """Names of the nodes, in program order."""
    return [n.op for n in graph_of(f, *args).nodes if n.op != "nop"]


def only(graph: Graph, *names) -> Node:
    (node,) = (n for n in graph.nodes if n.op in names)
    return node


def evaluate(graph: Graph, node: Node, *args):
    """A canonical node's own equations, from its inputs to its result: fails when they need anything else."""
    operands = [v for v in node.inputs if graph.values[v].kind != "literal"]
    jaxpr = _body(graph, node, operands)
    defined = {*jaxpr.invars, *(v for e in jaxpr.eqns for v in e.outvars)}
    assert all(v in defined for e in jaxpr.eqns for v in e.invars if not isinstance(v, _compat.Literal))
    (out,) = _compat.as_function(jaxpr)(*args)
    return out


def matches(f, *args):
    """``(pattern, operations of the chain)`` of every match."""
    graph = graph_of(f, *args)
    hits = [match(graph, p, i) for p in PATTERNS for i in range(len(graph.nodes))]
    return [(hit.pattern.name, [n.op for n in hit.nodes]) for hit in hits if hit]


def codes(f, *args):
    """Codes of the near misses, one for each product, as the engine would report them."""
    graph, found = graph_of(f, *args), {}
    for pattern in PATTERNS:
        for i in range(len(graph.nodes)):
            if i not in found and match(graph, pattern, i) is None:
                refusal, _ = near_miss(graph, pattern, i)
                if refusal is not None:
                    found[i] = refusal.code
    return list(found.values())
