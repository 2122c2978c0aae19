"""Numbers in a program, however they were broadcast and converted."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

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


def number(graph: Graph, vid: int) -> tuple[float, tuple[int, ...]] | None:
    """``(number, covers)`` of a value that is one number everywhere, also by arithmetic; None for all else."""
    if graph.values[vid].kind == "literal":
        value = np.asarray(graph.literal(vid))
        return None if value.ndim or (value.dtype.kind in "OcV" and value.dtype != jnp.bfloat16) else (float(value), ())
    position = int(graph.producer[vid])
    node = graph.nodes[position] if position >= 0 else None
    if node is None or len(node.covers) != 1 or node.op not in _FOLDED:
        return None
    if node.op not in _LAYOUT and (graph.values[vid].aval.ndim or (node.op == "div" and not is_float(graph, vid))):
        return None  # arithmetic with arrays is arithmetic of the program
    values: list[float] = []
    covers: set[int] = set()
    for v in node.inputs:
        found = number(graph, v)
        if found is None:
            return None
        values.append(found[0])
        covers.update(found[1])
    result = _FOLDED[node.op](*values) if values else None
    return None if result is None else (float(result), (*sorted(covers), *node.covers))


def _quotient(a: float, b: float) -> float | None:
    return a / b if b else None


def _root(a: float) -> float | None:
    return math.sqrt(a) if a >= 0 else None


_LAYOUT = ("broadcast_in_dim", "reshape", "squeeze", "expand_dims", *SAME_VALUE)
#: What `number` computes: jax counts the elements of a mean, and tests the count, in equations.
_FOLDED: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(_LAYOUT, lambda a: a),
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": _quotient,
    "sqrt": _root,
    "neg": operator.neg,
    "max": max,
    "gt": operator.gt,
    "ge": operator.ge,
    "lt": operator.lt,
    "eq": operator.eq,
    "ne": operator.ne,
    "select_n": lambda pred, *cases: cases[int(pred)],
}
