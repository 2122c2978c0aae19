"""The program before and after fusing, side by side, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aicf_jax.html.condense import Box, Drawing, condense
from aicf_jax.html.layout import Layout, layout
from aicf_jax.html.markup import Markup, join, plural, tag
from aicf_jax.outline import Operation, Outline

if TYPE_CHECKING:
    from aicf_jax.report import Report

_MARGIN, _PAD, _HEAD, _HEIGHT = 12.0, 10.0, 18.0, 36.0
_LONGEST = 24


def graphs(report: Report) -> Markup | None:
    """A pair of drawings for the program and for each program inside of it that holds a fusion."""
    drawn = [_pair(outline) for outline in report.outlines if outline.before]
    return join(*drawn) if drawn else None


def _pair(outline: Outline) -> Markup:
    drawing = condense(outline)
    head = tag("h3", "The program" if outline.name == "program" else f"Inside: {outline.name}")
    left = plural(drawing.left_out, "further operation") + " of the program not drawn."
    notes = ["Arguments are not drawn."]
    if any(b.count > 1 for b in drawing.boxes):
        notes.append("Neighbouring operations that stay as written are drawn as one box.")
    if drawing.left_out:
        notes.append(left)
    if all(o.fusion is None for o in outline.after):
        notes.insert(0, "Nothing in it was fused.")
        return tag("section", head, _figure("as written", outline, drawing), tag("p", " ".join(notes), class_="note"))
    pictures = [_figure("before", outline, drawing), _figure("after", outline, drawing)]
    note = tag("p", " ".join(notes), class_="note")
    return tag("section", head, tag("div", *pictures, class_="pair-of-graphs"), note)


def _figure(which: str, outline: Outline, drawing: Drawing) -> Markup:
    told = f"{which}: {plural(len(outline.after if which == 'after' else outline.before), 'operation')}"
    inside = [_inside(outline.before, b) if which == "before" else None for b in drawing.boxes]
    fused = [b.label for b in drawing.boxes if b.fusion is not None]
    label = f"Graph of {outline.name} {told}" + (f", fused: {', '.join(fused)}." if fused else ", nothing fused.")
    svg = _svg(drawing, inside, outline.before, label)
    box = tag(
        "div", svg, class_="scroll graph", role="region", aria_label=f"graph of {outline.name} {which}", tabindex=0
    )
    kind = "one-graph" if which == "as written" else None
    return tag("figure", tag("figcaption", told.capitalize()), box, class_=kind)


class _Inside:
    """The members of a fused region, laid out on their own."""

    def __init__(self, name: str, operations: Sequence[Operation], members: Sequence[int]):
        self.members = tuple(members)
        place = {m: k for k, m in enumerate(members)}
        self.operations = [operations[m] for m in members]
        edges = [(place[j], k) for k, o in enumerate(self.operations) for j in o.inputs if j in place]
        self.layout = layout([_size(o.name, o.result) for o in self.operations], edges)
        inner = max(self.layout.width, 7.6 * len(_cut(name)))
        self.indent = _PAD + (inner - self.layout.width) / 2
        self.size = (inner + 2 * _PAD, self.layout.height + 2 * _PAD + _HEAD)

    def centre(self, k: int, centre: tuple[float, float]) -> tuple[float, float]:
        """Where a member is, for a region with this centre."""
        (x, y), (width, height) = self.layout.centres[k], self.size
        return centre[0] - width / 2 + self.indent + x, centre[1] - height / 2 + _PAD + _HEAD + y


def _inside(operations: Sequence[Operation], box: Box) -> _Inside | None:
    return _Inside(_number(box) + box.label, operations, box.before) if len(box.before) > 1 else None


def _svg(drawing: Drawing, inside: Sequence[_Inside | None], before: Sequence[Operation], label: str) -> Markup:
    sizes = [i.size if i else _box_size(b) for b, i in zip(drawing.boxes, inside, strict=True)]
    placed = layout(sizes, drawing.edges)
    ends = _Ends(drawing, inside, before, placed, sizes)
    edges = [_edge(ends.fitted(a, b, path)) for (a, b), path in zip(drawing.edges, placed.edges, strict=True)]
    boxes = []
    for box, part, centre, size in zip(drawing.boxes, inside, placed.centres, sizes, strict=True):
        boxes.append(_region(box, part, centre) if part else _node(box, centre, size))
    width, height = (round(n + 2 * _MARGIN, 1) for n in (placed.width, placed.height))
    moved = tag("g", *edges, *boxes, transform=f"translate({_MARGIN:g} {_MARGIN:g})")
    view = f"0 0 {width} {height}"
    return tag(
        "svg", tag("title", label), moved, role="img", aria_label=label, viewBox=view, width=width, height=height
    )


class _Ends:
    """Where edges start and end: at the member of a region that they mean, and at the rim of every other box."""

    def __init__(
        self,
        drawing: Drawing,
        inside: Sequence[_Inside | None],
        before: Sequence[Operation],
        placed: Layout,
        sizes: Sequence[tuple[float, float]],
    ):
        self.inside, self.before, self.placed, self.sizes = inside, before, placed, sizes
        self.boxes = drawing.boxes

    def fitted(self, a: int, b: int, path: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        """The path from the lower rim of `a` to the upper rim of `b`, or of the member that is meant."""
        (ax, ay), (bx, by) = path[0], path[-1]
        below, above = ay + self.sizes[a][1] / 2, by - self.sizes[b][1] / 2
        start, end = [(ax, below)], [(bx, above)]
        source, target = self.inside[a], self.inside[b]
        if source is not None:
            x, y = source.centre(len(source.members) - 1, path[0])
            start = [(x, y + _HEIGHT / 2), (x, below)] if below - y > _HEIGHT else [(x, y + _HEIGHT / 2)]
        if target is not None:
            x, y = target.centre(self._reader(target, source), path[-1])
            end = [(x, y - _HEIGHT / 2)] if y - above < 2 * _HEIGHT else [(x, above)]
        return [*start, *path[1:-1], *end]

    def _reader(self, target: _Inside, source: _Inside | None) -> int:
        """The member that reads another region; the first where it is not known."""
        made = set(source.members) if source is not None else set()
        found = (k for k, o in enumerate(target.operations) if made.intersection(o.inputs))
        return next(found, 0)


def _edge(points: Sequence[tuple[float, float]], kind: str = "edge") -> Markup:
    """A smooth line that enters and leaves every point downwards."""
    (x0, y0), *rest = points
    path = [f"M{x0:.1f} {y0:.1f}"]
    for x, y in rest:
        middle = (y0 + y) / 2
        path.append(f"C{x0:.1f} {middle:.1f} {x:.1f} {middle:.1f} {x:.1f} {y:.1f}")
        x0, y0 = x, y
    return tag("path", d=" ".join(path), class_=kind)


def _region(box: Box, part: _Inside, centre: tuple[float, float]) -> Markup:
    """A fused region: a frame with its name around the operations it joins."""
    (x, y), (width, height) = centre, part.size
    left, top = x - width / 2, y - height / 2
    frame = tag("rect", x=round(left, 1), y=round(top, 1), width=round(width, 1), height=round(height, 1), rx=8,
                class_="region")  # fmt: skip
    name = tag("text", _cut(f"{_number(box)}{box.label}"), x=round(left + _PAD, 1), y=round(top + 16, 1), class_="name")
    edges = []
    for k, o in enumerate(part.operations):
        for j in o.inputs:
            if j in part.members:
                (ax, ay), (bx, by) = (part.centre(i, centre) for i in (part.members.index(j), k))
                edges.append(_edge([(ax, ay + _HEIGHT / 2), (bx, by - _HEIGHT / 2)]))
    nodes = [
        _rectangle(o.name, o.result, part.centre(k, centre), _size(o.name, o.result), "node member")
        for k, o in enumerate(part.operations)
    ]
    return tag("g", tag("title", f"fused: {box.label}, {box.result}"), frame, name, *edges, *nodes)


def _node(box: Box, centre: tuple[float, float], size: tuple[float, float]) -> Markup:
    kind = "node fused" if box.fusion is not None else "node run" if box.count > 1 else "node"
    tip = ", ".join(box.names) if box.count > 1 else f"{box.label}: {box.result}"
    return tag("g", tag("title", tip), _rectangle(f"{_number(box)}{box.label}", box.result, centre, size, kind))


def _rectangle(label: str, result: str, centre: tuple[float, float], size: tuple[float, float], kind: str) -> Markup:
    (x, y), (width, height) = centre, size
    rect = tag(
        "rect", x=round(x - width / 2, 1), y=round(y - height / 2, 1), width=round(width, 1), height=height, rx=5
    )
    name = tag("text", _cut(label), x=round(x, 1), y=round(y - 3, 1), class_="name", text_anchor="middle")
    type_ = tag("text", _cut(result), x=round(x, 1), y=round(y + 12, 1), class_="type", text_anchor="middle")
    return tag("g", rect, name, type_, class_=kind)


def _number(box: Box) -> str:
    return "" if box.fusion is None else f"#{box.fusion + 1} "


def _box_size(box: Box) -> tuple[float, float]:
    return _size(_number(box) + box.label, box.result)


def _size(label: str, result: str) -> tuple[float, float]:
    return max(64.0, 7.4 * len(_cut(label)) + 16, 6.6 * len(_cut(result)) + 16), _HEIGHT


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
