"""Canonical matrix products: any ``dot_general`` that is a GEMM once its dimensions are grouped."""

from __future__ import annotations

import dataclasses

from aicf_jax.flags import OpFlags
from aicf_jax.graph import Graph, Node
from aicf_jax.normalize._roles import gemm_roles
from aicf_jax.normalize._rule import Rule


def _apply(graph: Graph) -> dict[int, Node]:
    found = {}
    for i, node in enumerate(graph.nodes):
        if node.op != "dot_general" or not node.flags & OpFlags.IS_GEMM_LIKE:
            continue
        params = graph.eqn(node.covers[0]).params
        lhs, rhs = (graph.values[v].aval for v in node.inputs)
        (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = params["dimension_numbers"]
        attrs = (
            ("roles", gemm_roles(params["dimension_numbers"], lhs.ndim, rhs.ndim)),
            # The left operand is stored [M, K] unless its contracted dimensions come before its free ones.
            ("trans_a", _contracted_first(lhs.ndim, lhs_contract, lhs_batch)),
            ("trans_b", not _contracted_first(rhs.ndim, rhs_contract, rhs_batch)),
        )
        found[i] = dataclasses.replace(node, op="gemm", attrs=attrs)
    return found


def _contracted_first(ndim: int, contract: tuple[int, ...], batch: tuple[int, ...]) -> bool:
    free = [d for d in range(ndim) if d not in contract and d not in batch]
    return bool(free) and min(contract) < min(free)


RULE = Rule("gemm", 0, _apply)
