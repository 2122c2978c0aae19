"""`Report.plot`: a matplotlib figure, or the name of the extra that has matplotlib."""

import sys

import pytest

from tests.aicf_jax.report_support import KINDS, report


@pytest.mark.parametrize("kind", KINDS)
def test_a_figure_can_be_drawn(kind, tmp_path):
    figure = report(kind).plot()
    figure.savefig(tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 1000


def test_bars_are_the_bytes_of_the_fusions():
    r = report("mlp")
    ax = r.plot().axes[0]
    widths = [[bar.get_width() for bar in container] for container in ax.containers]
    assert widths == [[f.bytes_before for f in r.fusions], [f.bytes_after for f in r.fusions]]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["#1 gemm_epilogue", "#2 gemm_epilogue"]


def test_streamed_programs_have_their_lifetimes():
    import mcir

    (fusion,) = (f for f in report("block").fusions if f.program)
    figure = report("block").plot()
    forward, backward = figure.axes[1:]
    names = [v.name for v in mcir.lifetimes(mcir.parse(fusion.program))]
    assert [t.get_text() for t in forward.get_yticklabels()] == names
    assert "attention backward" in backward.get_title()


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"matplotlib, which is in the extra `experiments`: pip install"):
        report("mlp").plot()
