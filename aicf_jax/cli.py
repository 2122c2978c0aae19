"""The command line: ``python -m aicf_jax explain``.

Exit codes: 0 done, 1 the target cannot be traced, 2 an argument is unusable.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aicf_jax.explain import explain
from aicf_jax.policy import Policy
from gpu_probe.files import write_atomic
from pallas_kernels.command_line import Unusable, array_type, check_file, initial, named

EXIT_DONE, EXIT_UNTRACEABLE, EXIT_USAGE = 0, 1, 2

_EXAMPLE = "python -m aicf_jax explain mymodel:loss --arg f32[8,128] --arg f32[128,64] --html report.html"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        policy = _policy(options.policy)
        for flag in ("html", "json"):
            check_file(f"--{flag}", getattr(options, flag))
        target = _target(options.target)
        args = (*initial("--init", options.init), *(array_type("--arg", text) for text in options.arg))
    except Unusable as error:
        parser.exit(EXIT_USAGE, f"{parser.prog}: {error}\n")
    try:
        report = explain(target, *args, policy=policy)
    except Exception as error:
        traceback.print_exception(error)
        given = ", ".join(map(_type_text, args)) or "no arguments"
        print(f"{parser.prog}: {options.target} cannot be traced with {given}: {error}", file=sys.stderr)
        if options.init is None and hasattr(target, "init") and hasattr(target, "apply"):
            print("a flax linen module takes its variables first: --init names what makes them", file=sys.stderr)
        return EXIT_UNTRACEABLE
    files = [
        (p, make()) for p, make in ((options.html, report.to_html), (options.json, report.to_json)) if p is not None
    ]
    for path, text in files:  # before anything is printed: who reads only the first lines closes the pipe
        write_atomic(path, lambda temporary, text=text: temporary.write_text(text, encoding="utf-8"))
    _show(str(report))
    for path, _ in files:
        print(f"wrote {path}")
    return EXIT_DONE


def _parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m aicf_jax", description="What fuse does with a program.")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    one = commands.add_parser(
        "explain",
        help="what is fused in a call, what is refused and why; runs nothing",
        description="What is fused in a call of TARGET, what is refused and why. The call is traced, nothing is run.",
        epilog=f"example: {_EXAMPLE}",
    )
    one.add_argument("target", metavar="TARGET", help="module:name of a function or of a flax module (an instance)")
    one.add_argument(
        "--arg", action="append", default=[], metavar="TYPE", help="type of the next argument, as f32[8,128]; repeated"
    )
    one.add_argument(
        "--init", metavar="CALLABLE", help="module:name of a function that returns the first arguments as a tuple"
    )
    one.add_argument(
        "--policy", action="append", default=[], metavar="KEY=VALUE", help="an option of Policy, as numerics=bitwise"
    )
    one.add_argument("--html", type=Path, metavar="FILE", help="write the report as a page")
    one.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    return top


def _target(text: str) -> Any:
    found = named("TARGET", text)
    if isinstance(found, type) or not (callable(found) or hasattr(found, "apply")):
        kind = f"the class {found.__name__}" if isinstance(found, type) else f"a {type(found).__name__}"
        raise Unusable("TARGET", "a function or a flax module", kind, "Name an instance or a function that calls it")
    return found


def _policy(pairs: Sequence[str]) -> Policy:
    fields = {f.name: f for f in dataclasses.fields(Policy)}
    values: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or key not in fields:
            raise Unusable("--policy", f"KEY=VALUE with one of {', '.join(fields)}", repr(pair))
        known = {"true": True, "false": False, "none": None}
        values[key] = known[text.lower()] if text.lower() in known else int(text) if text.isdecimal() else text
    try:
        return Policy(**values)
    except ValueError as error:
        raise Unusable("--policy", "values that Policy takes", str(error)) from error


def _type_text(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "shape") and hasattr(x, "dtype") else type(x).__name__


#: First word of a line, or what it starts with -> its colour on a terminal.
_STYLES = (("fused ", "bold green"), ("refused ", "bold yellow"), ("runs unfused", "bold red"))


def _show(text: str) -> None:
    """Prints a report; in colours where it is read on a terminal and rich is there."""
    if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        print(text)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for k, line in enumerate(text.splitlines()):
        style = "bold" if k == 0 else next((s for start, s in _STYLES if line.startswith(start)), "")
        faint = "dim" if line.lstrip().startswith("at ") else style
        console.print(Text(line, style=faint))
