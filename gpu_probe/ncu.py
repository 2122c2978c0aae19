"""Nsight Compute: drives `ncu` over the CUDA probes, reads what it counts, and holds that beside what the probes time.

Names of metrics move between versions, so each is a list of aliases, of which the first that the installed profiler
knows is asked for. Counting needs permission: an error of `ncu` (as ``ERR_NVGPUCTRPERM``) is passed on as it stands.
"""

from __future__ import annotations

import csv
import dataclasses
import importlib
import importlib.util
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_probe.samples import Point, Samples, point_key

#: What we count -> the names it has, newest first.
METRICS: Mapping[str, tuple[str, ...]] = {
    "seconds": ("gpu__time_duration.sum",),
    "sectors_per_request": (
        "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio",
        "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.avg",
    ),
    "used_percent": ("smsp__sass_average_data_bytes_per_sector_mem_global_op_ld.pct",),
    "shared_wavefronts": (
        "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
        "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    ),
    "shared_requests": ("smsp__sass_inst_executed_op_shared_ld.sum", "smsp__inst_executed_op_shared_ld.sum"),
    "bank_conflicts": ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",),
    "warps_active": ("sm__warps_active.avg.per_cycle_active",),
    "l2_hit_percent": ("lts__t_sector_hit_rate.pct",),
    "waiting_ratio": ("smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",),
    "dram_read_bytes": ("dram__bytes_read.sum", "dram__bytes_op_read.sum"),
    "dram_write_bytes": ("dram__bytes_write.sum", "dram__bytes_op_write.sum"),
    "tensor_instructions": ("sm__inst_executed_pipe_tensor_op_gmma.sum", "sm__inst_executed_pipe_tensor.sum"),
}

#: Probe -> what is counted of it, beside the time. Probes that are not here are not profiled.
COUNTED: Mapping[str, tuple[str, ...]] = {
    "cuda_stride": ("sectors_per_request", "used_percent"),
    "cuda_banks": ("shared_wavefronts", "shared_requests", "bank_conflicts"),
    "cuda_occupancy": ("warps_active", "dram_read_bytes"),
    "cuda_latency": ("l2_hit_percent", "waiting_ratio"),
    "cuda_bandwidth": ("dram_read_bytes", "dram_write_bytes"),
    "cuda_tensor": ("tensor_instructions",),
}

#: Units of ``--print-units base`` that are not 1.
_SECONDS = {
    "nsecond": 1e-9,
    "ns": 1e-9,
    "usecond": 1e-6,
    "us": 1e-6,
    "msecond": 1e-3,
    "ms": 1e-3,
    "second": 1.0,
    "s": 1.0,
}

#: Before the name of a counter in `Sample.counters`.
PREFIX = "ncu."


#: Point of a probe, by `point_key` -> what we count -> value.
Counters = Mapping[str, Mapping[str, float]]


class ProfilerError(RuntimeError):
    """`ncu` is not there or did not do what was asked; the message says what it said."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """One profiled launch.

    Attributes:
      kernel: its function.
      values: metric -> value, seconds for times; what has no value is left out.
    """

    kernel: str
    values: Mapping[str, float]


def read_csv(text: str) -> list[Launch]:
    """What ``--page raw --csv --print-units base`` prints: a row of names, one of units, and one for each launch.

    Raises:
      ProfilerError: there is no such table; the message shows what there is.
    """
    lines = text.splitlines()
    start = next((n for n, line in enumerate(lines) if line.startswith(('"ID",', "ID,"))), None)
    if start is None:
        raise ProfilerError(f"expected a table that starts with ID, found:\n{text.strip()[:2000]}")
    names, *rows = csv.reader(io.StringIO("\n".join(line for line in lines[start:] if not line.startswith("=="))))
    if not rows or rows[0][:1] != [""]:
        raise ProfilerError(f"expected a row of units after the names, found {rows[:1]}")
    units, *launches = rows
    at = names.index("Kernel Name")
    found = []
    for row in launches:
        if not row:
            continue
        values = {}
        for name, unit, cell in zip(names, units, row, strict=True):
            number = _number(cell)
            if "__" in name and number is not None:  # so metrics are called, and no other column
                values[name] = number * _SECONDS.get(unit, 1.0)
        found.append(Launch(row[at].partition("(")[0].removeprefix("void ").strip(), values))
    return found


def _number(cell: str) -> float | None:
    """A cell's value; None for text, as in "n/a"."""
    try:
        return float(cell.replace(",", ""))
    except ValueError:
        return None


def read_report(path: Path) -> list[Launch]:
    """The launches in a report file, by NVIDIA's package ncu-report.

    Raises:
      ImportError: the package is not installed.
    """
    if importlib.util.find_spec("ncu_report") is None:
        raise ImportError(
            "reading a report without ncu needs the package ncu-report; install with: pip install ncu-report"
        )
    module: Any = importlib.import_module("ncu_report")
    context = module.load_report(str(path))
    found = []
    for r in range(context.num_ranges()):
        part = context.range_by_idx(r)
        for a in range(part.num_actions()):
            action = part.action_by_idx(a)
            values = {}
            for name in action.metric_names():
                metric = action.metric_by_name(name)
                if "__" in name and metric is not None and metric.has_value():
                    values[name] = float(metric.as_double()) * _SECONDS.get(metric.unit(), 1.0)
            found.append(Launch(action.name().partition("(")[0], values))
    return found


def resolve(known: Iterable[str], wanted: Iterable[str]) -> dict[str, str]:
    """What we count -> the first of its names whose metric the profiler knows.

    It lists metrics without what follows the dot. What it has under no name is left out, and with it the cross-checks
    that need it.
    """
    bases = {name.partition(".")[0] for name in known}
    found = {}
    for what in wanted:
        name = next((n for n in METRICS[what] if n.partition(".")[0] in bases), None)
        if name is not None:
            found[what] = name
    return found


def find() -> str:
    """The profiler. Raises ProfilerError where there is none."""
    found = shutil.which("ncu")
    if found is None:
        raise ProfilerError("ncu is not on PATH; Nsight Compute comes with the CUDA toolkit")
    return found


def known_metrics(ncu: str) -> list[str]:
    """The metrics that the installed profiler has for this GPU."""
    return re.findall(r"^(\w+__\w+)", _run([ncu, "--query-metrics"], 120.0), re.M)


def command(ncu: str, report: Path, metrics: Iterable[str], probe: str, quick: bool) -> list[str]:
    """The profiler over one probe, each of whose programs is executed once.

    Caches are left as the probe leaves them, since it warms what it means to be warm; clocks are left alone too.
    """
    ours = [sys.executable, "-m", "gpu_probe.cuda.once", probe, *(["--quick"] if quick else [])]
    options = ["--clock-control", "none", "--cache-control", "none", "--target-processes", "all"]
    chosen = ["-k", "regex:^probe_", "--metrics", ",".join(metrics)]
    return [ncu, *options, *chosen, "-f", "-o", str(report.with_suffix("")), *ours]


def profile(probe: str, folder: Path, quick: bool = True, timeout_s: float = 300.0) -> Counters:
    """Profiles a probe on this machine.

    Args:
      probe: its name, one of `COUNTED`.
      folder: the report is left there, as ``<probe>.ncu-rep``.
      quick: whether only the probe's quick points.
      timeout_s: for each of the two runs of `ncu`.

    Raises:
      ProfilerError: `ncu` is not there, or fails; the message holds what it said.
    """
    ncu = find()
    names = resolve(known_metrics(ncu), ("seconds", *COUNTED[probe]))
    report = folder / f"{probe}.ncu-rep"
    printed = _run(command(ncu, report, names.values(), probe, quick), timeout_s)
    rows = _run([ncu, "--import", str(report), "--page", "raw", "--csv", "--print-units", "base"], timeout_s)
    return match(printed, read_csv(rows), names)


def profile_all(samples: Samples, probes: Iterable[str], folder: Path) -> tuple[Samples, list[str]]:
    """Profiles those of the probes that are in `COUNTED`, one after the other, at their quick points.

    Returns:
      The samples with what was counted at their points, and a line for each comparison that differs and each probe that
      could not be profiled.
    """
    notes: list[str] = []
    for probe in probes:
        if probe in COUNTED:
            try:
                samples = with_counters(samples, probe, profile(probe, folder))
            except ProfilerError as error:
                notes.append(f"{probe} was not profiled: {error}")
    compared = cross_check(samples)
    notes += dict.fromkeys(str(a) for a in compared if not a.agrees)
    return samples, [*notes, f"{sum(a.agrees for a in compared)} of {len(compared)} comparisons with counters agree"]


def _run(command: Sequence[str], timeout_s: float) -> str:
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise ProfilerError(f"{command[0]} took longer than {timeout_s:g} seconds") from error
    if ran.returncode:
        raise ProfilerError(f"{command[0]} ended with code {ran.returncode}:\n{ran.stdout}{ran.stderr}".strip())
    return ran.stdout


def match(printed: str, launches: Sequence[Launch], names: Mapping[str, str]) -> Counters:
    """The counters of each point. `printed`: the lines of ``gpu_probe.cuda.once``, one for each execution, in order.

    The n-th launch of a kernel is that of the n-th execution that says it uses it.

    Raises:
      ProfilerError: there are fewer launches than executions.
    """
    left: dict[str, list[Launch]] = {}
    for launch in launches:
        left.setdefault(launch.kernel, []).append(launch)
    found: dict[str, Mapping[str, float]] = {}
    for line in printed.splitlines():
        if not line.startswith("{"):
            continue
        execution = json.loads(line)
        queue = left.get(execution["kernel"], [])
        if not queue:
            raise ProfilerError(f"no launch of {execution['kernel']} was profiled for {execution['point']}")
        values = queue.pop(0).values
        found[point_key(execution["point"])] = {what: values[name] for what, name in names.items() if name in values}
    return found


def with_counters(samples: Samples, probe: str, counters: Counters) -> Samples:
    """The samples, those of the probe with what was counted at their point, each under `PREFIX`."""
    return Samples(
        tuple(
            dataclasses.replace(s, counters={**s.counters, **_prefixed(counters.get(point_key(s.point), {}))})
            if s.probe == probe
            else s
            for s in samples
        )
    )


def _prefixed(values: Mapping[str, float]) -> dict[str, float]:
    return {PREFIX + what: value for what, value in values.items()}


@dataclasses.dataclass(frozen=True)
class Agreement:
    """What a probe timed beside what the profiler counted.

    Attributes:
      probe, point: whose.
      what: is compared.
      timed, counted: the two values.
      tolerance: by how much of the larger they may differ.
    """

    probe: str
    point: Point
    what: str
    timed: float
    counted: float
    tolerance: float

    @property
    def agrees(self) -> bool:
        """Whether they are as near to each other as they should be."""
        return abs(self.timed - self.counted) <= self.tolerance * max(abs(self.timed), abs(self.counted))

    def __str__(self) -> str:
        word = "agree" if self.agrees else "differ"
        place = " ".join(f"{k}={v}" for k, v in self.point.items())
        return f"{self.probe} {place}: {self.what} {word}: timed {self.timed:.4g}, counted {self.counted:.4g}"


def cross_check(samples: Samples) -> list[Agreement]:
    """Every comparison that the samples and their counters (see `with_counters`) allow; one for each sample."""
    found = []
    for s in samples:
        count = {k.removeprefix(PREFIX): v for k, v in s.counters.items() if k.startswith(PREFIX)}
        for what, timed, counted, tolerance in _comparisons(s.probe, s.point, s.value, s.counters, count):
            found.append(Agreement(s.probe, s.point, what, timed, counted, tolerance))
    return found


def _comparisons(
    probe: str, point: Point, value: float, own: Mapping[str, float], count: Mapping[str, float]
) -> Iterable[tuple[str, float, float, float]]:
    """(what, timed, counted, tolerance).

    A profiled launch is another launch, at another clock: what depends on it gets a wide tolerance.
    """
    if (
        probe == "cuda_stride"
        and point["level"] == "l1"
        and int(point["stride"]) <= 8
        and "sectors_per_request" in count
    ):
        # the L1 passes four sectors a cycle; a request of a warp uses 128 bytes
        yield "sectors of a request", 4 * 128 / value, count["sectors_per_request"], 0.25
    if probe == "cuda_banks" and count.get("shared_requests") and "shared_wavefronts" in count:
        yield "cycles and wavefronts of a request", value, count["shared_wavefronts"] / count["shared_requests"], 0.2
    if probe == "cuda_occupancy" and "warps_active" in count:
        yield "warps of a multiprocessor", float(point["warps"]), count["warps_active"], 0.15
    if probe == "cuda_bandwidth" and "dram_read_bytes" in count and "dram_write_bytes" in count:
        moved = count["dram_read_bytes"] + count["dram_write_bytes"]
        yield "bytes", own["bytes"], moved, 0.1
        if count.get("seconds"):
            yield "bytes a second", value, moved / count["seconds"], 0.2
