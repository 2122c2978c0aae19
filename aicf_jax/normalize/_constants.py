"""Numbers in a program, however they were broadcast and converted."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from aicf_jax.graph import Graph

#: Primitives whose result is their operand, in another type or for another purpose.
SAME_VALUE = ("convert_element_type", "stop_gradient", "copy", "copy_p", "pvary", "pcast")


def is_float(graph: Graph, vid: int) -> bool:
    """Whether a value is an array of floating-point numbers."""
    dtype = getattr(graph.values[vid].aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


def constant(graph: Graph, vid: int) -> tuple[float | None, tuple[int, ...]]:
    """``(number, covers)`` of a scalar constant, also broadcast or converted; ``(None, ())`` for all else."""
    covers: list[int] = []
    while graph.values[vid].kind != "literal":
        position = int(graph.producer[vid])
        node = graph.nodes[position] if position >= 0 else None
        if node is None or len(node.inputs) != 1 or node.op not in ("broadcast_in_dim", *SAME_VALUE):
            return None, ()
        covers.extend(node.covers)
        vid = node.inputs[0]
    value = np.asarray(graph.literal(vid))
    if value.ndim or (value.dtype.kind in "OcbV" and value.dtype != jnp.bfloat16):
        return None, ()
    return float(value), tuple(covers)
