"""What repeated samples say: median, spread, outliers; and intervals that another run is expected to fall into."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

import numpy as np

from gpu_probe.property_map import Property

#: Beyond the quartiles by so many times their distance a sample is an outlier.
FENCE = 3.0


@dataclasses.dataclass(frozen=True)
class Summary:
    """Of repeated samples.

    Attributes:
      count: all of them.
      median, low, high: of all but the outliers; `low` and `high` are the 10th and the 90th percentile.
      outliers: samples more than `FENCE` interquartile ranges beyond the quartiles of all.
    """

    count: int
    median: float
    low: float
    high: float
    outliers: tuple[float, ...]


def summarize(values: Sequence[float]) -> Summary:
    """Raises ValueError for no values."""
    if not values:
        raise ValueError("summarize(values=...): expected samples, found none")
    q1, q3 = np.percentile(values, [25, 75])
    least, most = q1 - FENCE * (q3 - q1), q3 + FENCE * (q3 - q1)
    kept = [v for v in values if least <= v <= most]
    low, high = (float(x) for x in np.percentile(kept, [10, 90]))
    median = float(statistics.median(kept))
    return Summary(len(values), median, low, high, tuple(v for v in values if not least <= v <= most))


def measured(values: Sequence[float], unit: str, method: str, *probes: str) -> Property:
    """The property whose samples these are: their median, with the 10th and the 90th percentile as interval."""
    found = summarize(values)
    if found.outliers:
        method = f"{method}; {len(found.outliers)} of {found.count} samples left out as outliers"
    return Property(found.median, unit, "measured", method, (found.low, found.high), probes)
