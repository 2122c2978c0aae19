"""Command line: `python -m experiments.device_check`.

Exit codes: 0 everything is right (with --dry-run: compiles, without spills), 1 something is not, or was not checked,
2 no GPU or wrong use, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from experiments._io import environment, now, write_json_atomic
from experiments._progress import Progress
from experiments.benchmarks.report import print_table
from experiments.device_check import report, timing
from experiments.device_check.cases import every_case
from experiments.device_check.dry_run import compile_cases
from experiments.device_check.probes import run_probes
from experiments.device_check.run import run
from pallas_kernels import aot
from pallas_kernels.command_line import positive
from pallas_kernels.device_case import DeviceCase

OUTPUT = Path("results/device_check")
SCHEMA = 1
#: Below six minutes, with time for what the last step takes and for starting.
BUDGET_S = 320.0
DEFAULT_TARGET = "h200"
EXIT_RIGHT, EXIT_WRONG, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130


def parser() -> argparse.ArgumentParser:
    """The options."""
    result = argparse.ArgumentParser(
        prog="python -m experiments.device_check",
        description="Checks every kernel on this GPU against float64, then times it beside XLA and cuBLASLt. The cases "
        "are those that each package in pallas_kernels lists; those that cannot run here are refused, with the reason.",
        epilog="exit codes: 0 all right, 1 something is wrong or was not checked, 2 no GPU or wrong use",
    )
    result.add_argument("--dry-run", action="store_true", help="compile everything for a GPU that need not be there")
    result.add_argument(
        "--target", choices=aot.targets(), help=f"GPU to compile for (default: this one, else {DEFAULT_TARGET})"
    )
    result.add_argument("--cases", nargs="+", metavar="TEXT", help="only cases with one of these texts in their name")
    result.add_argument(
        "--budget", type=positive, metavar="SECONDS", help=f"for all of it (default: {BUDGET_S:.0f}; dry run: 1800)"
    )
    result.add_argument("--output", type=Path, default=OUTPUT, metavar="DIR", help="for the JSON: %(default)s")
    result.add_argument(
        "--no-probes", action="store_true", help="leave the probes of gpu_probe out; --cases leaves them out as well"
    )
    result.add_argument("--list", action="store_true", help="name the cases, and stop")
    return result


def target_of_device() -> str:
    """The target that describes this machine's GPU, `DEFAULT_TARGET` where none does."""
    kind = jax.devices()[0].device_kind.lower()
    return next((name for name in aot.targets() if name in kind), DEFAULT_TARGET)


def main(
    arguments: Sequence[str] | None = None,
    console: Console | None = None,
    find_cases: Callable[[str], Mapping[str, DeviceCase]] = every_case,
    probes: Callable[[str | None, Path], int] = run_probes,
) -> int:
    """Runs the command line; returns the exit code. `probes` is the last step, see `run_probes`."""
    console = console or Console()
    options = parser().parse_args(arguments)
    target = options.target or target_of_device()
    cases, folder = _chosen(find_cases(target), options.cases), options.output / "probes"
    if not cases:
        return _refuse(f"no case has {options.cases} in its name; --list names them")
    if options.list:
        for name in cases:
            console.print(name, markup=False, highlight=False, soft_wrap=True)
        return EXIT_RIGHT
    refused = {name: why for name, case in cases.items() if (why := case.refusal(target)) is not None}
    cases = {name: case for name, case in cases.items() if name not in refused}
    if options.dry_run:
        found = dry(cases, target, options, console, refused)
        return found if found == EXIT_USAGE else _with_probes(found, options, console, lambda: probes(target, folder))
    if jax.default_backend() != "gpu":
        return _refuse(
            f"there is no GPU here (jax runs on {jax.default_backend()}), so nothing was checked; --dry-run compiles "
            "everything for a GPU that is not there"
        )
    found = on_device(cases, options, console, refused=refused)
    return found if found == EXIT_INTERRUPTED else _with_probes(found, options, console, lambda: probes(None, folder))


def _with_probes(code: int, options: argparse.Namespace, console: Console, probes: Callable[[], int]) -> int:
    """The exit code after the probes, where they are wanted; they tell by themselves what is wrong with them."""
    if options.no_probes or options.cases is not None:
        return code
    console.print("probes", highlight=False)
    return code if probes() == 0 else EXIT_WRONG


def _refuse(text: str, code: int = EXIT_USAGE) -> int:
    print(f"python -m experiments.device_check: {text}", file=sys.stderr)
    return code


def _chosen(cases: Mapping[str, DeviceCase], texts: Sequence[str] | None) -> dict[str, DeviceCase]:
    return {name: case for name, case in cases.items() if texts is None or any(text in name for text in texts)}


def _refused_entries(refused: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    return {name: {"status": "refused", "reason": why} for name, why in refused.items()}


def _all_in(entries: Mapping[str, Mapping[str, Any]], status: str) -> bool:
    """Whether all have this status, but for what was refused."""
    return all(e["status"] in (status, "refused") for e in entries.values())


def dry(
    cases: Mapping[str, DeviceCase],
    target: str,
    options: argparse.Namespace,
    console: Console,
    refused: Mapping[str, str],
) -> int:
    """Compiles everything; prints the table and writes the JSON."""
    try:
        compiled = compile_cases(cases, target, options.budget or 1800.0) if cases else {}
    except (ImportError, TimeoutError, aot.CompileError) as error:
        return _refuse(str(error), EXIT_USAGE if isinstance(error, ImportError) else EXIT_WRONG)
    entries = {**compiled, **_refused_entries(refused)}
    path = options.output / f"compiled-{target}.json"
    write_json_atomic(path, {**_head(), "target": target, "entries": entries})
    print_table(console, report.dry_table(entries, target))
    console.print(f"written: {path}", markup=False, highlight=False, soft_wrap=True)
    _name_failures(entries, console)
    return EXIT_RIGHT if _all_in(entries, "compiled") else EXIT_WRONG


def on_device(
    cases: Mapping[str, DeviceCase],
    options: argparse.Namespace,
    console: Console,
    clock: tuple[timing.Clock, str] | None = None,
    refused: Mapping[str, str] | None = None,
    **others: Any,
) -> int:
    """Checks and times; prints the table and writes the JSON, after each step as well."""
    found, note = clock or timing.clock()
    if note:
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    path = options.output / "device_check.json"
    left_out = _refused_entries(refused or {})
    document: dict[str, Any] = {**_head(), "clock": found.name, "clock_note": note, "ceilings": None}
    document["entries"] = dict(left_out)

    def keep(name: str, value: Any) -> None:
        if name == "ceilings":
            document["ceilings"] = value
        else:
            document["entries"][name] = value
        write_json_atomic(path, {**document, "updated": now()})

    try:
        with Progress("device check", 2 * len(cases) + 1, console) as progress:
            entries = {**run(cases, found, options.budget or BUDGET_S, progress, keep, **others), **left_out}
    except KeyboardInterrupt:
        console.print(f"interrupted; what was found until then is in {path}", markup=False, highlight=False)
        return EXIT_INTERRUPTED
    if document["ceilings"] is not None:
        console.print(report.ceilings_text(document["ceilings"]), highlight=False, soft_wrap=True)
    print_table(console, report.check_table(entries, document["ceilings"], found.name))
    console.print(f"written: {path}", markup=False, highlight=False, soft_wrap=True)
    _name_failures(entries, console)
    return EXIT_RIGHT if _all_in(entries, "right") else EXIT_WRONG


def _head() -> dict[str, Any]:
    return {"schema": SCHEMA, "started": now(), "environment": environment()}


def _name_failures(entries: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    """The whole of each error, after the table, which has room for one line of it."""
    for name, entry in entries.items():
        if entry["status"] == "failed":
            console.print(f"{name} failed:\n{entry['error']}\n", markup=False, highlight=False, soft_wrap=True)
