"""Text of a graph: one line per active node, VIDs, types, fingerprints and covered equations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aicf_jax import flags

if TYPE_CHECKING:
    from aicf_jax.graph import Graph


def type_text(aval: object) -> str:
    """``f32[4,8]``; jax's own short form."""
    short = getattr(aval, "str_short", None)
    return short(short_dtypes=True) if short else str(aval)


def value_text(graph: Graph, vid: int) -> str:
    """``%7`` for a computed value or argument, the number itself for a literal."""
    value = graph.values[vid]
    return f"{value.atom.val}" if value.kind == "literal" else f"%{vid}"


def graph_text(graph: Graph) -> str:
    """The whole graph as text, stable enough for golden files.

    ``%5: f32[4,8] = gelu_tanh %4  {alpha=0}  [ELEMENTWISE|ACTIVATION|SAFE_NODE|DTYPE_F32]  covers 3..10``
    """
    from aicf_jax.graph import schedule

    lines = ["graph(" + ", ".join(f"%{v}: {type_text(graph.values[v].aval)}" for v in graph.arguments) + ")"]
    for i in schedule(graph):
        node = graph.nodes[i]
        outputs = ", ".join(f"%{v}: {type_text(graph.values[v].aval)}" for v in node.outputs)
        inputs = " ".join(value_text(graph, v) for v in node.inputs)
        attrs = "  {" + ", ".join(f"{k}={v}" for k, v in node.attrs) + "}" if node.attrs else ""
        covers = f"  covers {','.join(map(str, node.covers))}" if len(node.covers) > 1 else ""
        lines.append(f"  {outputs} = {node.op} {inputs}{attrs}  [{flags.describe(graph.flag_list[i])}]{covers}")
    lines.append("  return " + ", ".join(value_text(graph, v) for v in graph.results))
    return "\n".join(lines)
