"""What repeated samples say: median, spread, outliers; and intervals that another run is expected to fall into."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from gpu_probe.property_map import Property

#: Beyond the quartiles by so many times their distance a sample is an outlier.
FENCE = 3.0
#: Of `bootstrap`.
RESAMPLES = 200


@dataclasses.dataclass(frozen=True)
class Summary:
    """Of repeated samples.

    Attributes:
      count: all of them.
      median, low, high: of all but the outliers; `low` and `high` are the least and the most.
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
    return Summary(
        len(values),
        float(statistics.median(kept)),
        min(kept),
        max(kept),
        tuple(v for v in values if not least <= v <= most),
    )


def measured(values: Sequence[float], unit: str, method: str, *probes: str) -> Property:
    """The property whose samples these are: their median, and as interval all that are no outliers.

    A run visits each point at moments that are spread over it, so what changes from run to run changes within one.
    """
    found = summarize(values)
    if found.outliers:
        method = f"{method}; {len(found.outliers)} of {found.count} samples left out as outliers"
    return Property(found.median, unit, "measured", method, (found.low, found.high), probes)


def ratio(values: Sequence[float], to: Sequence[float], method: str, *probes: str) -> Property:
    """The ratio of two medians; its interval has the ends of both."""
    a, b = summarize(values), summarize(to)
    interval = (a.low / b.high, a.high / b.low)
    return Property(a.median / b.median, "ratio", "measured", method, interval, probes)


def bootstrap(samples: Mapping[int, Sequence[float]], statistic: Callable[[Mapping[int, float]], float]) -> list[float]:
    """`statistic` of the medians by parameter, for resamples of the repetitions; the same for the same samples."""
    generator = np.random.default_rng(0)
    return [
        statistic({n: float(np.median(generator.choice(v, len(v)))) for n, v in samples.items()})
        for _ in range(RESAMPLES)
    ]
