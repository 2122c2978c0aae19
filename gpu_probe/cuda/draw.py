"""Curves of samples over one parameter, for the images of CUDA probes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gpu_probe.samples import Samples
from gpu_probe.statistics import summarize


def curve(by: Mapping[Any, list[float]], axes: Any, label: str | None = None) -> None:
    """The medians over the keys of `by`, with the spread of each as a band."""
    found = {key: summarize(values) for key, values in by.items()}
    axes.fill_between(list(found), [s.low for s in found.values()], [s.high for s in found.values()], alpha=0.25, lw=0)
    axes.plot(list(found), [s.median for s in found.values()], marker="o", ms=3, label=label)


def plot_over(
    parameter: str, title: str, y: str, series: str | None = None, expected: Callable[[int], float] | None = None
) -> Callable[[Samples, Any], None]:
    """A `Probe.plot`: values over a parameter on a logarithmic axis.

    Args:
      parameter: along the axis.
      title: of the image.
      y: what a value is.
      series: another parameter; there is a curve for each of its values.
      expected: what a value should be at a parameter's value, drawn as a dotted line.
    """

    def plot(samples: Samples, axes: Any) -> None:
        names = sorted({s.point[series] for s in samples}, key=str) if series else [None]
        for name in names:
            own = samples if series is None else Samples(tuple(s for s in samples if s.point[series] == name))
            curve(own.by(parameter), axes, None if series is None else f"{series} {name}")
        if expected is not None:
            along = list(samples.by(parameter))
            axes.plot(along, [expected(int(k)) for k in along], color="black", lw=0.8, ls=":", label="expected")
        if series is not None or expected is not None:
            axes.legend()
        axes.set(xlabel=parameter, ylabel=y, title=title)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")

    return plot
