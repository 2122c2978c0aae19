"""The command line: ``python -m pallas_kernels.aot``.

Exit codes: 0 done, 1 the program cannot be traced or compiled, 2 an argument is unusable or a package is missing.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_probe.files import write_atomic
from pallas_kernels.aot.compile import check_packages, compile_all
from pallas_kernels.aot.report import Comparison, CompileReport
from pallas_kernels.aot.target import names
from pallas_kernels.command_line import Unusable, array_type, check_call, check_file, initial, named, positive

EXIT_DONE, EXIT_FAILED, EXIT_USAGE = 0, 1, 2

_EXAMPLE = (
    "python -m pallas_kernels.aot h200 mymodel:layer --arg bf16[8192,4096] --arg bf16[4096,4096] --json h200.json"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        check_file("--json", options.json)
        programs = {text: _function(where, text) for where, text in _programs(options)}
        args = (*initial("--init", options.init), *(array_type("--arg", text) for text in options.arg))
        for text, fn in programs.items():
            check_call("--arg", fn, args, text)
        check_packages()
    except (Unusable, ImportError) as error:
        parser.exit(EXIT_USAGE, f"{parser.prog}: {error}\n")
    try:
        found = compile_all(options.gpu, {text: (fn, args) for text, fn in programs.items()}, options.timeout)
    except Exception as error:
        traceback.print_exception(error)
        print(f"{parser.prog}: {', '.join(programs)}: {error}", file=sys.stderr)
        return EXIT_FAILED
    reports = [r for r in found.values() if isinstance(r, CompileReport)]
    for text, report in found.items():
        if isinstance(report, Exception):
            traceback.print_exception(report)
            print(f"{parser.prog}: {text}: {report}", file=sys.stderr)
        else:
            print(report, end="\n\n")
    if len(reports) > 1:
        print(Comparison(tuple(reports)))
    if options.json is not None and reports:
        text = (Comparison(tuple(reports)) if len(programs) > 1 else reports[0]).to_json() + "\n"
        write_atomic(options.json, lambda temporary: temporary.write_text(text, encoding="utf-8"))
        print(f"wrote {options.json}")
    return EXIT_DONE if len(reports) == len(programs) else EXIT_FAILED


def _programs(options: argparse.Namespace) -> list[tuple[str, str]]:
    return [("TARGET", options.target), *(("--beside", text) for text in options.beside)]


def _function(argument: str, text: str) -> Any:
    found = named(argument, text)
    if isinstance(found, type) or not callable(found):
        kind = f"the class {found.__name__}" if isinstance(found, type) else f"a {type(found).__name__}"
        raise Unusable(argument, "a function", kind, "Name a function that calls it")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.aot",
        description="What a function compiles to on a GPU that need not be there: kernels, temporaries, bytes moved "
        "between kernels, and what Mosaic GPU kernels need of a multiprocessor. Nothing is run.",
        epilog=f"example: {_EXAMPLE}",
    )
    parser.add_argument("gpu", metavar="GPU", choices=names(), help=f"one of {', '.join(names())}")
    parser.add_argument("target", metavar="TARGET", help="module:name of a function")
    parser.add_argument(
        "--arg",
        "--shape",
        action="append",
        default=[],
        metavar="TYPE",
        help="type of the next argument, as bf16[8,128]; repeated",
    )
    parser.add_argument(
        "--init", metavar="CALLABLE", help="module:name of a function that returns the first arguments as a tuple"
    )
    parser.add_argument(
        "--beside",
        action="append",
        default=[],
        metavar="TARGET",
        help="another function of the same arguments; repeated",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument(
        "--timeout", type=positive, default=300.0, metavar="SECONDS", help="for compiling (default: %(default)g)"
    )
    return parser
