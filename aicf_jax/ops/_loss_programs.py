"""Memory flow programs of linear cross entropy: what is whole, what is cut in blocks, what they cost.

Streams over the vocabulary keep all rows on chip: a block of logits is ``rows x block``, and W is read once. Where
gradients are computed in the forward, the log-sum-exp of a row must be known before its gradient: there the stream goes
over blocks of rows, which have the whole vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import Any

import mcir
from aicf_jax import _compat
from aicf_jax.memo import memo
from aicf_jax.ops import _programs
from aicf_jax.ops._loss_composition import input_names, kept_gradients, logits_aval, names, places, results, save
from aicf_jax.ops._semantic import FusedOp, nbytes
from mcir.derive import Derived, from_graph
from mcir.graph import has_positions, split
from mcir.lower_jax import lower

#: Of a block of logits.
BLOCK_BYTES = 16 * 2**20
#: Blocks of rows with their gradients are so many times larger: 512 rows of 16384 classes take 0.93 of the time of 256.
WITH_GRADIENTS = 2
#: Blocks have no fewer rows or classes than this: a product of few is slow.
LEAST_ROWS, LEAST_CLASSES = 128, 128
#: One axis of rows may be sharded over so many devices without being moved.
SHARDS = 32
#: Logits of at least this size are never computed whole, also where that would be faster.
TOO_LARGE = 2**30


def _names(op: FusedOp) -> list[str]:
    found = input_names(op)
    return [found.get(i, f"in{i}").lower() for i in range(len(op.in_avals))]


@memo()
def forward(op: FusedOp) -> Derived:
    """The program of the loss."""
    graph = mcir.trace(lambda *xs: results(op, xs), *map(_compat.plain_aval, op.in_avals))
    return from_graph(graph, "linear_cross_entropy", _names(op), ("loss",))


@memo()
def forward_saving(op: FusedOp) -> Derived:
    """The program of the loss and of what its backward wants kept."""

    def f(*xs: Any) -> list[Any]:
        out, saved = save(op, xs)
        return [*out, *saved]

    graph = mcir.trace(f, *map(_compat.plain_aval, op.in_avals))
    if not kept_gradients(op):
        return from_graph(graph, "linear_cross_entropy", _names(op), ("loss", *names(op)[1:]))
    graph = _spread(graph, frozenset(_vocabulary(op, graph)))
    # Of batch and positions only positions are cut: arrays that are sharded over the batch stay where they are.
    whole = frozenset(_vocabulary(op, graph))
    batch, classes = _rows(graph, whole)[:-1], math.prod(graph.axes[a] for a in whole)
    if math.prod(graph.axes[a] for a in batch) <= max(LEAST_ROWS, BLOCK_BYTES // classes):
        whole |= frozenset(batch)
    return from_graph(graph, "linear_cross_entropy", _names(op), ("loss", *names(op)[1:]), whole)


@memo()
def backward(op: FusedOp) -> Derived:
    """The program of a backward from the numbers of each row."""
    graph = mcir.trace(op.reference, *map(_compat.plain_aval, op.in_avals))
    given = [{"Y": "loss", "dY": "dloss"}.get(n, n.lower()) for n in op.input_names]
    made = [n[0] + n[1:].lower() for n in op.result_names]
    return from_graph(graph, "linear_cross_entropy_backward", given, made)


def _spread(graph: Any, vocabulary: frozenset[str]) -> Any:
    """Rows that are one axis as two, so that blocks of rows take some of every part of an array that is sharded.

    Not where a row's loss depends on its position, as with weights that are one: such rows are cut as they are.
    """
    rows = _rows(graph, vocabulary)
    if len(rows) != 1 or has_positions(graph, rows[0]):
        return graph
    size = graph.axes[rows[0]]
    major = min(size & -size, SHARDS)  # the largest power of two that divides it
    return split(graph, rows[0], major) if major > 1 and major * major <= size else graph


def _rows(graph: Any, vocabulary: Collection[str]) -> list[str]:
    """Axes of the logits besides the vocabulary, major first."""
    logits = max(graph.values, key=lambda v: math.prod(graph.axes[a] for a in v.axes))
    return [a for a in logits.axes if a not in vocabulary]


def _vocabulary(op: FusedOp, graph: Any) -> set[str]:
    """Axes of a graph that are the vocabulary."""
    argument, d = places(op)[0]
    views = [v for i, v in graph.views.items() if graph.values[i].param("argument") == argument]
    return {axis for view in views for axis in view.dims[d]}


def scheduled(make: Any, op: FusedOp) -> mcir.Program:
    """The program with blocks of the vocabulary and all rows, or of rows and the whole vocabulary (`block`)."""
    derived = make(op)
    program = derived.program
    sizes = {a.name: a.size for a in program.axes}
    looped = [a.name for a in program.axes if a.name in {a for loops, _ in program.statements() for a in loops}]
    inside = _classes(make, op, derived)
    rows, vocabulary = [a for a in looped if a not in inside], [a for a in sizes if a in inside]
    by_rows = make is forward_saving and bool(kept_gradients(op))
    cut = rows[::-1] if by_rows else vocabulary
    blocks = {a: sizes[a] for a in looped}
    if by_rows:
        beside = math.prod(sizes[a] for a in program.buffer("m").type.axes if a not in looped)
        logits = beside * math.prod(sizes[a] for a in vocabulary)
        left = block(logits, max(1, LEAST_ROWS // beside), WITH_GRADIENTS * BLOCK_BYTES)
    else:
        left = block(math.prod(sizes[a] for a in rows), LEAST_CLASSES, BLOCK_BYTES)
    for a in cut:
        if a in blocks:
            blocks[a] = min(sizes[a], left)
            left = max(1, left // blocks[a])
    return program.with_blocks(**blocks)


def _classes(make: Any, op: FusedOp, derived: Derived) -> set[str]:
    """The axis of a program that is the vocabulary: in a backward all that is looped over but the rows of m."""
    if make is backward:
        rows = next((view for k, view in derived.arguments if op.input_names[k] == "m"), None)
        if rows is None:
            return set()  # gradients that do not rest on the logits
        looped = {a for loops, _ in derived.program.statements() for a in loops}
        return looped - {a for dim in rows.dims for a in dim}
    argument, d = places(op)[0]
    return set(next(view.dims[d] for k, view in derived.arguments if k == argument))


def block(elements: int, least: int, size: int) -> int:
    """How many rows (or classes) of so many elements a block of about `size` bytes has: a power of two."""
    return max(least, 2 ** int(math.log2(max(1, size // (4 * elements)))))


@memo()
def lowered(make: Any, op: FusedOp) -> Any:
    """The program of an operation as a function, with blocks."""
    return lower(dataclasses.replace(make(op), program=scheduled(make, op)))


def text(op: FusedOp) -> str:
    """The program of an operation with its blocks, and what it is when it is differentiated, where that differs."""
    forwards = str(scheduled(forward, op))
    if not kept_gradients(op):
        return forwards
    return f"{forwards}\nDifferentiated, with its gradients:\n{scheduled(forward_saving, op)}"


def unfused_bytes(op: FusedOp, platform: str) -> int:
    """As `_programs.unfused_bytes`; more than anything for logits that are too large to be computed whole."""
    if nbytes(logits_aval(op)) >= TOO_LARGE:
        return 2**62
    return _programs.unfused_bytes(op, platform)


def moved_bytes(op: FusedOp) -> int:
    """Inputs and results once, and the traffic that takes as long as the product that a backward computes again."""
    moved = op.outer_bytes() + sum(nbytes(op.in_avals[i]) for i in kept_gradients(op))
    if kept_gradients(op):
        return moved
    product = next(step for step in op.steps if step.role == "bilinear")
    (contracted, _), _ = product.body.eqns[0].params["dimension_numbers"]
    left = product.body.eqns[0].invars[0].aval
    depth = math.prod(left.shape[k] for k in contracted)
    flops = 2 * depth * math.prod(product.body.outvars[0].aval.shape)
    return moved + int(flops / (_programs.machine(op).flops_per_byte or 8.0))
