"""Layered drawing: edges go down, boxes keep their distance, straight chains are straight."""

import itertools

import hypothesis
import hypothesis.strategies as st
import pytest

from aicf_jax.html.layout import GAP_X, layout


@st.composite
def dags(draw):
    n = draw(st.integers(1, 14))
    sizes = draw(st.lists(st.tuples(st.floats(20, 200), st.floats(20, 90)), min_size=n, max_size=n))
    pairs = [(a, b) for b in range(n) for a in range(b)]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=20)) if pairs else []
    return sizes, edges


@hypothesis.given(dags())
@hypothesis.settings(max_examples=60)
def test_boxes_do_not_overlap_and_edges_go_down(graph):
    sizes, edges = graph
    placed = layout(sizes, edges)
    assert len(placed.centres) == len(sizes) and len(placed.edges) == len(edges)
    boxes = [(x - w / 2, x + w / 2, y - h / 2, y + h / 2) for (x, y), (w, h) in zip(placed.centres, sizes, strict=True)]
    for k, (left, right, top, bottom) in enumerate(boxes):
        assert left >= -1e-6 and right <= placed.width + 1e-6 and top >= -1e-6 and bottom <= placed.height + 1e-6
        for other in boxes[:k]:
            apart = left >= other[1] + GAP_X - 1e-6 or other[0] >= right + GAP_X - 1e-6
            assert apart or top >= other[3] - 1e-6 or other[2] >= bottom - 1e-6
    for (a, b), path in zip(edges, placed.edges, strict=True):
        assert path[0] == placed.centres[a] and path[-1] == placed.centres[b]
        assert all(y < below for (_, y), (_, below) in itertools.pairwise(path))


def test_a_chain_is_one_straight_line():
    placed = layout([(50, 20), (90, 20), (30, 20)], [(0, 1), (1, 2)])
    assert len({x for x, _ in placed.centres}) == 1


def test_a_diamond_is_symmetric():
    (top, _), (left, y1), (right, y2), (bottom, _) = layout([(40, 20)] * 4, [(0, 1), (0, 2), (1, 3), (2, 3)]).centres
    assert y1 == y2 and top == bottom == pytest.approx((left + right) / 2)


def test_an_edge_past_a_layer_goes_around_its_boxes():
    placed = layout([(80, 20)] * 3, [(0, 1), (1, 2), (0, 2)])
    long = placed.edges[2]
    assert len(long) == 3 and abs(long[1][0] - placed.centres[1][0]) > 40


def test_nothing_has_no_size():
    assert layout([], []).width == layout([], []).height == 0


def test_an_edge_backwards_is_refused():
    with pytest.raises(ValueError, match=r"expected edges from a box to a later one, found \(1, 0\)"):
        layout([(1, 1), (1, 1)], [(1, 0)])
