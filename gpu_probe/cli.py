"""Command line: `python -m gpu_probe`.

Exit codes: 0 done (compare: the maps agree), 1 some points failed (compare: some properties disagree), 2 no such
device, file or wrong use, 130 interrupted (run again to continue).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from gpu_probe import ncu, report
from gpu_probe.compare import against_system, compare
from gpu_probe.cuda.compile import ARCHS
from gpu_probe.devices import connect, kinds
from gpu_probe.environment import cores, load_average
from gpu_probe.files import folder_problem
from gpu_probe.probe import DeviceError, Probe, Target, Unsupported
from gpu_probe.probes import probes
from gpu_probe.progress import Progress
from gpu_probe.property_map import MapError, PropertyMap, shipped
from gpu_probe.runner import (
    QUICK_REPEATS,
    REPEATS,
    Failure,
    Session,
    analyze,
    configuration,
    load_samples,
    measure,
    visits,
)
from gpu_probe.samples import Samples

OUTPUT = Path("results/gpu_probe")
MAP, SAMPLES = "map.json", "samples.json"
DEFAULT_NAME = {"cuda": "h200"}
EXIT_DONE, EXIT_WRONG, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130


def parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    result = argparse.ArgumentParser(
        prog="python -m gpu_probe", description="Measures this machine into a hardware property map."
    )
    commands = result.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure, or continue a measurement")
    run.add_argument("--device", choices=kinds(), default="cpu", help="(default: %(default)s)")
    run.add_argument("--dry-run", action="store_true", help="generate and compile every program, execute nothing")
    run.add_argument(
        "--profile", action="store_true", help="with --device cuda: count with Nsight Compute too (ncu), and compare"
    )
    run.add_argument("--quick", action="store_true", help="fewer points and repetitions")
    run.add_argument("--probes", nargs="+", metavar="TEXT", help="only probes with one of these texts in their name")
    targets = f"{', '.join(sorted(ARCHS))}, or an architecture such as sm_90a"
    run.add_argument(
        "--target", metavar="NAME", help=f"with --dry-run: the GPU to compile for, {targets} (default: h200)"
    )
    run.add_argument("--repeats", type=_repeats, metavar="N", help=f"of each point (default: {REPEATS})")
    run.add_argument("--seed", type=int, default=0, help="of the order in which points are visited")
    run.add_argument("--fresh", action="store_true", help="start anew instead of continuing")
    run.add_argument("--output", type=Path, metavar="DIR", help=f"(default: {OUTPUT}/<device>)")
    for name, text in (("show", "print a map"), ("plot", "draw a map, and the samples beside it")):
        command = commands.add_parser(name, help=text)
        command.add_argument("map", help=f"a file, its folder, or one of {', '.join(shipped())}")
        if name == "show":
            command.add_argument("--methods", action="store_true", help="how each value was found")
        else:
            command.add_argument("--output", type=Path, metavar="DIR", help="(default: beside the map)")
    both = commands.add_parser("compare", help="two maps side by side")
    both.add_argument("first", help="as for show")
    both.add_argument("second", help="as for show")
    listed = commands.add_parser("list", help="name the probes: what they measure, what to expect, what may be wrong")
    listed.add_argument("--device", choices=kinds(), help="(default: all)")
    return result


def _repeats(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 3:
        raise argparse.ArgumentTypeError(f"expected a whole number from 3 on, found {text!r}")
    return int(text)


def main(arguments: Sequence[str] | None = None, console: Console | None = None) -> int:
    """Runs the command line; returns the exit code."""
    options = parser().parse_args(arguments)
    console = console or Console()
    commands = {"run": _run, "show": _show, "plot": _plot, "compare": _compare, "list": _list}
    try:
        return commands[options.command](options, console)
    except (DeviceError, MapError) as error:
        print(f"python -m gpu_probe: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print("python -m gpu_probe: interrupted; the same command continues", file=sys.stderr)
        return EXIT_INTERRUPTED


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _chosen(kind: str, texts: Sequence[str] | None) -> tuple[Probe, ...]:
    def those(of: str) -> tuple[Probe, ...]:
        return tuple(p for p in probes(of) if texts is None or any(text in p.name for text in texts))

    found = those(kind)
    if not found:
        others = [other for other in kinds() if other != kind and those(other)]
        hint = "".join(f", but {other} has: --device {other}" for other in others)
        raise DeviceError(f"no probe for {kind} has {texts} in its name{hint}; `list` names them")
    return found


def _check_folder(folder: Path) -> None:
    """Raises DeviceError where nothing can be written into the folder of the results."""
    problem = folder_problem(folder)
    if problem is not None:
        raise DeviceError(f"--output: expected a folder for the results, found '{folder}', {problem}; name another")


def _run(options: argparse.Namespace, console: Console) -> int:
    if options.target and not options.dry_run:
        raise DeviceError("--target names a GPU to compile for, which needs --dry-run; without it the one here is used")
    if options.profile and options.device != "cuda":
        raise DeviceError(
            f"--profile: expected --device cuda, whose kernels Nsight Compute counts, found {options.device}"
        )
    chosen = _chosen(options.device, options.probes)
    name = options.target or (DEFAULT_NAME.get(options.device) if options.dry_run else None)
    target = connect(options.device, name, compile_only=options.dry_run)
    if options.dry_run:
        return _dry_run(target, chosen, options.quick, console)
    folder = options.output or OUTPUT / options.device
    _check_folder(folder)
    repeats = options.repeats or (QUICK_REPEATS if options.quick else REPEATS)
    config = configuration(target, chosen, options.quick, repeats, options.seed)
    session = Session(folder / SAMPLES, config, options.fresh)
    started, kept = time.monotonic(), len(session.samples)
    with Progress(target.name, visits(chosen, repeats, options.quick), console, tenths=True) as progress:
        for note in session.notes:
            progress.note(note)
        try:
            failures = measure(target, chosen, session, options.quick, progress.advance)
        except KeyboardInterrupt:
            session.write()
            raise
    samples = Samples(tuple(session.samples))
    seconds = time.monotonic() - started if len(samples) > kept or not kept else None
    if options.profile:
        samples, notes = ncu.profile_all(samples, [p.name for p in chosen], folder)
        session.samples = list(samples)
        session.write()
        for note in notes:
            _say(console, note)
    return _report(target, chosen, samples, failures, folder, seconds, console)


def _report(
    target: Target,
    chosen: Sequence[Probe],
    samples: Samples,
    failures: Sequence[Failure],
    folder: Path,
    seconds: float | None,
    console: Console,
) -> int:
    """Writes the map and the images, prints the tables and the rest; `seconds` is None where nothing was measured."""
    from gpu_probe import plots

    found = analyze(target, chosen, samples)
    found.save(folder / MAP)
    images = plots.write_all(found, samples, chosen, folder)
    console.print(report.map_table(found))
    console.print(report.probe_table(chosen, samples, failures))
    stated = against_system(found)
    if stated:
        title = "caches: a size agrees within one class, a factor of two"
        console.print(report.difference_table(stated, title, ("system", "measured")))
        if any(d.agrees is not True for d in stated):
            _say(
                console,
                "A cache that is shared with other cores, processes or virtual machines measures as what they leave; "
                "a level that is hidden by that takes no number.",
            )
    for failure in failures:
        _say(console, f"failed: {failure.probe} {dict(failure.point)}: {failure.error}")
    load = None if seconds is None else load_average()
    if seconds is None:
        _say(console, f"all {len(samples)} samples are an earlier run's, nothing was measured; --fresh measures again")
    else:
        _say(console, f"measured in {seconds:.0f} s, load average {load}")
    for path in (folder / MAP, folder / SAMPLES, *images):
        _say(console, f"written: {path}")
    warning = report.noise(chosen, samples, load, cores())
    if warning is not None:
        _say(console, warning)
    return EXIT_WRONG if failures else EXIT_DONE


def _dry_run(target: Target, chosen: Sequence[Probe], quick: bool, console: Console) -> int:
    """Generates and compiles every point of every probe."""
    points = [(probe, point) for probe in chosen for point in probe.points(quick)]
    failed = 0
    with Progress(f"compiling for {target.name}", len(points), console) as progress:
        for probe in chosen:
            own = [point for p, point in points if p is probe]
            errors, absent = [], []
            for point in own:
                progress.advance(probe.name)
                try:
                    probe.generate(point, target)
                except Unsupported as error:
                    absent.append(str(error))
                except Exception as error:
                    errors.append(f"{dict(point)}: {type(error).__name__}: {error}")
            failed += len(errors)
            compiled = len(own) - len(errors) - len(absent)
            progress.note(f"{probe.name}: {compiled} of {len(own)} programs compile")
            for reason in dict.fromkeys(absent):
                progress.note(f"  {absent.count(reason)} not for this device: {reason}")
            for error in errors:
                progress.note(f"  failed: {error}")
    return EXIT_WRONG if failed else EXIT_DONE


def _show(options: argparse.Namespace, console: Console) -> int:
    console.print(report.map_table(PropertyMap.load(options.map), options.methods))
    return EXIT_DONE


def _plot(options: argparse.Namespace, console: Console) -> int:
    from gpu_probe import plots

    source = Path(options.map) / MAP if Path(options.map).is_dir() else Path(options.map)
    found = PropertyMap.load(source)
    beside = source.parent / SAMPLES
    try:
        samples = load_samples(beside) if source.exists() and beside.exists() else Samples()
    except (OSError, KeyError, TypeError, json.JSONDecodeError, ValueError) as error:
        raise MapError(f"{beside}: cannot be read ({error})") from error
    folder = options.output or (source.parent if source.exists() else OUTPUT / str(options.map))
    _check_folder(folder)
    for path in plots.write_all(found, samples, probes(found.kind), folder):
        _say(console, f"written: {path}")
    return EXIT_DONE


def _compare(options: argparse.Namespace, console: Console) -> int:
    first, second = (PropertyMap.load(source) for source in (options.first, options.second))
    found = compare(first, second)
    console.print(report.difference_table(found, f"{first.name} and {second.name}", (options.first, options.second)))
    differ = [d.name for d in found if d.agrees is False]
    _say(console, f"{len(differ)} of {len(found)} properties disagree{': ' if differ else ''}{', '.join(differ)}")
    return EXIT_WRONG if differ else EXIT_DONE


def _list(options: argparse.Namespace, console: Console) -> int:
    for probe in probes(options.device):
        _say(console, report.probe_text(probe) + "\n")
    return EXIT_DONE
