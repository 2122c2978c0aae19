"""The page of a report: well-formed, self-contained, escaped, with a text for every picture."""

import dataclasses
import html.parser
import re
import xml.etree.ElementTree as ElementTree

import pytest

import aicf_jax
from aicf_jax.errors import Refusal
from tests.aicf_jax.report_support import KINDS, report

VOID = {"meta", "link", "wbr"}
HOSTILE = "<script>alert('x')</script>&\"</svg>"


class Reader(html.parser.HTMLParser):
    """Fails on a tag that is closed in the wrong order; collects elements and text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.words = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        assert len({name for name, _ in attrs}) == len(attrs), f"an attribute of {tag} is given twice"
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    def named(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.mark.parametrize("kind", KINDS)
class TestEveryPage:
    def test_is_well_formed(self, kind):
        page = report(kind).to_html()
        assert page.startswith("<!doctype html>")
        read = Reader(page)
        assert read.named("html") == [{"lang": "en"}]
        assert len(read.named("h1")) == len(read.named("title")) - len(re.findall(r"<title>", _svgs_text(page))) == 1

    def test_loads_nothing(self, kind):
        page = report(kind).to_html()
        read = Reader(page)
        assert not {"script", "iframe", "img", "object", "embed"} & {name for name, _ in read.elements}
        assert [a.get("href") for a in read.named("link")] == ["data:,"]
        assert not any("src" in a or "onclick" in a for _, a in read.elements)
        assert "http" not in page and "@import" not in page and "url(" not in page

    def test_its_drawings_are_svg_with_a_text_alternative(self, kind):
        for text in re.findall(r"<svg.*?</svg>", report(kind).to_html(), re.S):
            root = ElementTree.fromstring(text)
            assert root.get("role") == "img" and root.get("aria-label")
            assert root.find("title").text == root.get("aria-label")
            left, top, width, height = map(float, root.get("viewBox").split())
            assert left == top == 0 and width > 0 and height > 0

    def test_no_rectangle_lies_outside_its_drawing(self, kind):
        for text in re.findall(r"<svg.*?</svg>", report(kind).to_html(), re.S):
            root = ElementTree.fromstring(text)
            width, height = float(root.get("width")), float(root.get("height"))
            for rect in root.iter("rect"):
                x, y, w, h = (float(rect.get(name)) for name in ("x", "y", "width", "height"))
                assert w > 0 and h > 0 and x >= -0.1 and y >= -0.1 and x + w <= width and y + h <= height

    def test_a_notebook_gets_the_same_parts_without_a_document(self, kind):
        part = report(kind)._repr_html_()
        read = Reader(part)
        assert part.startswith('<div class="aicf-report">') and not read.named("html") and not read.named("body")
        assert _titles(part) == _titles(report(kind).to_html())

    def test_styles_touch_nothing_outside(self, kind):
        (style,) = re.findall(r"<style>(.*?)</style>", report(kind)._repr_html_(), re.S)
        selectors = [s.strip() for s in re.findall(r"([^{}]+)\{", re.sub(r"@media[^{]*\{", "", style))]
        assert selectors
        for selector in (part for s in selectors for part in s.split(",")):
            assert selector.strip().startswith((".aicf-report", "body:has(> .aicf-report"))


def _svgs_text(page):
    return "".join(re.findall(r"<svg.*?</svg>", page, re.S))


def _titles(page):
    return re.findall(r"<h2>(.*?)</h2>", page)


def _words(page):
    return " ".join(" ".join(Reader(page).words).split())


def test_the_headline_has_the_four_numbers():
    r = report("mlp")
    text = _words(r.to_html())
    assert "fusions 2 2 gemm_epilogue" in text and "refusals 0" in text
    assert f"launches {r.launches_before} → {r.launches_after}" in text
    assert r.launches_before == sum(f.launches_before for f in r.fusions) == 5
    assert r.bytes_after == sum(f.bytes_after for f in r.fusions) < r.bytes_before


def test_sums_of_nothing_are_dashes():
    text = _words(report("empty").to_html())
    assert "memory traffic – of the fused operations" in text
    assert "No part of this program was fused." in text and "The program has no operations." in text


def test_refusals_say_what_was_expected_and_found():
    text = _words(report("refusals").to_html())
    for r in report("refusals").refusals:
        assert r.code in text and r.expected in text and r.found in text
    assert "Nothing in it was fused." in text


def test_a_streamed_fusion_shows_its_program_traffic_and_lifetimes():
    (fusion,) = (f for f in report("block").fusions if f.program)
    page = report("block").to_html()
    text = _words(page)
    assert "attention, tests/" not in text  # the short place: folder, file, line
    assert "Memory flow programs" in text and "What is on chip, statement by statement" in text
    assert "No program of this computation moves fewer than" in text
    plain = re.sub(r"<[^>]+>", "", page)
    for line in fusion.program.splitlines():
        assert line.replace("<-", "&lt;-") in plain


def test_statements_are_numbered_as_the_chart_numbers_them():
    import mcir

    (fusion,) = (f for f in report("block").fusions if f.program)
    page = report("block").to_html()
    numbers = [int(n) for n in re.findall(r'data-n="(\d+)"', page.split("attention backward")[0])]
    assert numbers == list(range(1, len(list(mcir.parse(fusion.program).statements())) + 1))


def test_the_backward_is_behind_a_click():
    page = report("mlp").to_html()
    assert re.search(r"<details><summary>backward \(\d lines\)</summary><pre>.*dZ", page)


def test_seconds_by_a_property_map_are_told_where_there_is_one():
    told = dataclasses.replace(report("mlp").fusions[0], hardware="NVIDIA H200: 2 us -> 1 us\nmemory: 2 us -> 1 us")
    page = dataclasses.replace(report("mlp"), fusions=(told,)).to_html()
    assert "<summary>on NVIDIA H200: 2 us -&gt; 1 us</summary><pre>memory: 2 us -&gt; 1 us</pre>" in page
    assert "<summary>on " not in report("mlp").to_html()


def test_equal_fusions_are_one_row():
    rows = re.findall(r"<tr role=\"row\"><th scope=\"row\"", report("long").to_html())
    fusions = {(f.op, f.site, f.result) for f in report("long").fusions}
    assert len(fusions) <= len(rows) < len(report("long").fusions)


def test_a_long_program_is_cut_and_says_so():
    text = _words(report("long").to_html())
    assert "drawn as one box" in text
    assert re.search(r"\d+ further operations of the program not drawn", text)


def test_programs_inside_are_drawn_on_their_own():
    text = _words(report("inner").to_html())
    assert "scan, 1 inside" in text and "Inside: scan at" in text


def test_text_of_others_is_escaped():
    mlp = report("mlp")
    fusion = dataclasses.replace(
        mlp.fusions[0],
        **dict.fromkeys(("op", "pattern", "kernel", "site", "attrs", "result", "backward", "program"), HOSTILE),
    )
    refusal = Refusal(HOSTILE, "match", HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE)
    outline = mlp.outlines[0]
    hostile = [dataclasses.replace(o, name=HOSTILE, result=HOSTILE, fusion=0) for o in outline.after]
    drawn = dataclasses.replace(outline, name=HOSTILE, before=tuple(hostile), after=tuple(hostile))
    page = dataclasses.replace(
        mlp, target=HOSTILE, fusions=(fusion,), refusals=(refusal,), failure=HOSTILE, outlines=(drawn,)
    ).to_html()
    Reader(page)
    assert "<script" not in page and "alert('" not in page.replace("&#x27;", "")
    assert page.count("&lt;script&gt;") > 10


def test_a_program_of_another_language_is_shown_and_not_counted():
    r = report("mlp")
    other = dataclasses.replace(r.fusions[0], program="for tile in q:\n  mma(tile)")
    text = _words(dataclasses.replace(r, fusions=(other,)).to_html())
    assert "mma ( tile )" in text and "Not counted: line 1: expected `program`" in text


def test_a_failure_is_the_first_thing_to_read():
    page = aicf_jax.Report("f", (), (), "", 0, 0, failure="TypeError: no").to_html()
    assert _words(page).startswith("f: what was fused") and 'role="alert"' in page
    assert "Runs unfused: TypeError: no" in _words(page) and "The program runs as written." in _words(page)


@pytest.mark.parametrize(("n", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2_345_678, "2.35 MB")])
def test_bytes_in_words(n, text):
    from aicf_jax.html.markup import bytes_text

    assert bytes_text(n) == text


@pytest.mark.parametrize("scheme", ["light", "dark", "print"])
def test_text_has_contrast(scheme):
    """WCAG 2.2, 1.4.3: at least 4.5 to 1 for text, on the page and on panels."""
    from aicf_jax.html.page import style

    blocks = re.findall(r"\.aicf-report \{([^}]*)\}", style())
    colours = dict(re.findall(r"--([\w-]+): (#\w+)", blocks[["light", "dark", "print"].index(scheme)]))
    for ink in ("ink", "soft", "fused", "keyword", "type", "operation", "number", "comment"):
        for paper in ("paper", "panel"):
            assert _contrast(colours[ink], colours[paper]) >= 4.5, (ink, paper)
    assert _contrast(colours["ink"], colours["fused-panel"]) >= 4.5
    assert _contrast(colours["fused"], colours["fused-panel"]) >= 4.5
    assert _contrast(colours["warn"], colours["warn-panel"]) >= 4.5


def _contrast(a, b):
    def luminance(colour):
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)
