"""Maps and samples as images. The only module here that needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gpu_probe.files import write_atomic
from gpu_probe.probe import Probe
from gpu_probe.property_map import PropertyMap
from gpu_probe.samples import Samples

#: Rates that are roofs, by the first part of their names.
ROOFS = ("gemm", "tensor", "vector")
#: Bandwidths that are slopes.
SLOPES = ("l1.bw", "l2.bw", "dram.bw_read", "dram.bw_copy", "dram.bw")


def write_all(found: PropertyMap, samples: Samples, probes: Sequence[Probe], folder: Path) -> list[Path]:
    """``<probe>.png`` of each probe that draws, and ``roofline.png`` where the map has a bandwidth and a rate."""
    paths = []
    for probe in probes:
        own = samples.of(probe.name)
        if probe.plot is not None and len(own):
            draw = probe.plot
            paths.append(_write(folder / f"{probe.name}.png", lambda axes, own=own, draw=draw: draw(own, axes), found))
    if _rates(found) and _bandwidths(found):
        paths.append(_write(folder / "roofline.png", lambda axes: roofline(found, axes), found))
    return paths


def _write(path: Path, draw: Callable[[Any], None], found: PropertyMap) -> Path:
    figure = Figure(figsize=(7.0, 4.5), layout="constrained")
    axes = figure.subplots()
    draw(axes)
    axes.grid(alpha=0.3)
    axes.set_title(f"{axes.get_title()}, {found.name}")
    canvas = FigureCanvasAgg(figure)
    write_atomic(path, lambda temporary: canvas.print_png(str(temporary)))
    return path


def _rates(found: PropertyMap) -> dict[str, float]:
    return {n: found[n].to("FLOP/s").value for n in found if n.split(".")[0] in ROOFS}


def _bandwidths(found: PropertyMap) -> dict[str, float]:
    return {n: found[n].to("B/s").value for n in SLOPES if n in found}


def roofline(found: PropertyMap, axes: Any) -> None:
    """Reachable operations a second over operations a byte: ``min(rate, intensity * bandwidth)``.

    Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", 2009.
    """
    rates, bandwidths = _rates(found), _bandwidths(found)
    intensity = np.logspace(-2, 4, 200)
    for name, rate in rates.items():
        for source, bandwidth in bandwidths.items():
            axes.plot(intensity, np.minimum(rate, intensity * bandwidth) / 1e9, lw=1, label=f"{name}, {source}")
    axes.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="GFLOP/s", title="roofline")
    axes.legend(fontsize=6, ncols=2)
