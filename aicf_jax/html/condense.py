"""What of a program is drawn: runs of operations that stay as written become one box, and very long ones end early."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from aicf_jax.outline import Operation, Outline

#: Programs of more operations than this are condensed.
MAX_PLAIN = 24
#: Boxes drawn of one program.
MAX_BOXES = 60
_SHORTEST_RUN = 3


@dataclasses.dataclass(frozen=True)
class Box:
    """One box of the drawing after fusing, and the operations before fusing that it stands for.

    Attributes:
      label, result: what is written in it.
      fusion: the fusion it is, None: operations that stay as written.
      before: places in `Outline.before` of the operations that a fusion joins; empty for other boxes.
      count: operations in it; more than one: a run of them.
      names: of the operations of a run.
    """

    label: str
    result: str
    fusion: int | None = None
    before: tuple[int, ...] = ()
    count: int = 1
    names: tuple[str, ...] = ()
    is_result: bool = False


@dataclasses.dataclass(frozen=True)
class Drawing:
    """Boxes in order, edges between them, and how many operations are not drawn."""

    boxes: tuple[Box, ...]
    edges: tuple[tuple[int, int], ...]
    left_out: int


def condense(outline: Outline) -> Drawing:
    """A stretch of neighbours in the order of execution can become one box without making a cycle."""
    runs = _runs(outline.after)
    kept = runs[:MAX_BOXES]
    box_of = {i: k for k, run in enumerate(kept) for i in run}
    boxes = tuple(_box(outline, run) for run in kept)
    edges = {
        (box_of[j], box_of[i])
        for i, operation in enumerate(outline.after)
        for j in operation.inputs
        if i in box_of and j in box_of and box_of[i] != box_of[j]
    }
    return Drawing(boxes, tuple(sorted(edges)), sum(map(len, runs[MAX_BOXES:])))


def _runs(operations: Sequence[Operation]) -> list[list[int]]:
    if len(operations) <= MAX_PLAIN:
        return [[i] for i in range(len(operations))]
    runs: list[list[int]] = []
    open_ = False
    for i, operation in enumerate(operations):
        plain = operation.fusion is None and not operation.inner
        if plain and open_:
            runs[-1].append(i)
        else:
            runs.append([i])
        open_ = plain
    return [part for run in runs for part in ([run] if len(run) >= _SHORTEST_RUN else [[i] for i in run])]


def _box(outline: Outline, run: Sequence[int]) -> Box:
    operations = [outline.after[i] for i in run]
    last = operations[-1]
    is_result = any(o.is_result for o in operations)
    if len(run) > 1:
        names = tuple(o.name for o in operations)
        return Box(f"{len(run)} operations", ", ".join(dict.fromkeys(names)), None, (), len(run), names, is_result)
    label = f"{last.name}, {last.inner} inside" if last.inner else last.name
    before = () if last.fusion is None else tuple(i for i, o in enumerate(outline.before) if o.fusion == last.fusion)
    return Box(label, last.result, last.fusion, before, 1, (last.name,), is_result)
