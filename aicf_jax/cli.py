"""The command line: ``python -m aicf_jax explain``.

Exit codes: 0 done, 1 the target cannot be traced, 2 an argument is unusable.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from aicf_jax import _compat
from aicf_jax.explain import explain
from aicf_jax.policy import Policy
from gpu_probe.files import write_atomic

EXIT_DONE, EXIT_UNTRACEABLE, EXIT_USAGE = 0, 1, 2

_LETTERS = {"f": "float", "bf": "bfloat", "i": "int", "u": "uint", "c": "complex"}
_EXAMPLE = "python -m aicf_jax explain mymodel:loss --arg f32[8,128] --arg f32[128,64] --html report.html"


class _Unusable(Exception):
    """An argument that cannot be used: which one, what was expected, what was found, what to do."""

    def __init__(self, argument: str, expected: str, found: str, remedy: str = ""):
        super().__init__(f"{argument}: expected {expected}, found {found}" + (f". {remedy}" if remedy else ""))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        policy = _policy(options.policy)
        for flag in ("html", "json"):
            _check_file(f"--{flag}", getattr(options, flag))
        target = _named("TARGET", options.target)
        args = (*_initial(options.init), *(_shape(text) for text in options.arg))
    except _Unusable as error:
        parser.exit(EXIT_USAGE, f"{parser.prog}: {error}\n")
    try:
        report = explain(target, *args, policy=policy)
    except Exception as error:
        traceback.print_exception(error)
        given = ", ".join(map(_type_text, args)) or "no arguments"
        print(f"{parser.prog}: {options.target} cannot be traced with {given}: {error}", file=sys.stderr)
        return EXIT_UNTRACEABLE
    _show(str(report))
    for path, write in ((options.html, report.to_html), (options.json, report.to_json)):
        if path is not None:
            text = write()
            write_atomic(path, lambda temporary, text=text: temporary.write_text(text, encoding="utf-8"))
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


def _named(argument: str, text: str) -> Any:
    """The object that ``module:name`` stands for."""
    module_name, colon, path = text.partition(":")
    if not (module_name and colon and path):
        raise _Unusable(argument, "module:name", repr(text), "For example mypackage.model:loss")
    # `python -m` puts the current folder on the path; a console script or a test may not have.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        remedy = "Run the command from the folder that holds it, or install it"
        raise _Unusable(argument, f"a module {module_name}", f"none ({error})", remedy) from error
    except Exception as error:
        found_text = f"one that fails: {type(error).__name__}: {error}"
        raise _Unusable(argument, f"a module {module_name} that can be imported", found_text) from error
    for name in path.split("."):
        if not hasattr(found, name):
            names = ", ".join(n for n in dir(found) if not n.startswith("_"))[:200] or "no public names"
            raise _Unusable(argument, f"{module_name} to have {path}", f"no {name!r}", f"It has: {names}")
        found = getattr(found, name)
    if isinstance(found, type) or not (callable(found) or hasattr(found, "apply")):
        kind = f"the class {found.__name__}" if isinstance(found, type) else f"a {type(found).__name__}"
        raise _Unusable(argument, "a function or a flax module", kind, "Name an instance or a function that calls it")
    return found


def _initial(text: str | None) -> tuple[Any, ...]:
    if text is None:
        return ()
    make: Callable[..., Any] = _named("--init", text)
    try:
        found = make()
    except Exception as error:
        failed = f"{type(error).__name__}: {error}"
        raise _Unusable("--init", f"{text}() to return the arguments", failed, "It is called without any") from error
    if not isinstance(found, (tuple, list)):
        raise _Unusable("--init", f"{text}() to return a tuple", type(found).__name__, "Return (variables, x)")
    return tuple(found)


def _shape(text: str) -> jax.ShapeDtypeStruct:
    """``f32[8,128]`` or ``float32[8, 128]``."""
    example = "For example f32[8,128], bf16[4], i32[]"
    match = re.fullmatch(r"\s*([a-z]+)(\d*)\s*\[([\d\s,]*)\]\s*", text)
    if match is None:
        raise _Unusable("--arg", "an element type and a shape", repr(text), example)
    word, bits, sizes = match.groups()
    try:
        dtype = jnp.dtype(_LETTERS.get(word, word) + bits)
        shape = tuple(int(n) for n in sizes.split(",")) if sizes.strip() else ()
    except (TypeError, ValueError) as error:
        raise _Unusable("--arg", "an element type and a shape", repr(text), example) from error
    if dtype.itemsize == (16 if jnp.issubdtype(dtype, jnp.complexfloating) else 8) and not _compat.x64_enabled():
        raise _Unusable("--arg", "types of up to 32 bits", repr(text), "JAX_ENABLE_X64=1 turns 64 bits on")
    return jax.ShapeDtypeStruct(shape, dtype)


def _policy(pairs: Sequence[str]) -> Policy:
    fields = {f.name: f for f in dataclasses.fields(Policy)}
    values: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or key not in fields:
            raise _Unusable("--policy", f"KEY=VALUE with one of {', '.join(fields)}", repr(pair))
        known = {"true": True, "false": False, "none": None}
        values[key] = known[text.lower()] if text.lower() in known else int(text) if text.isdecimal() else text
    try:
        return Policy(**values)
    except ValueError as error:
        raise _Unusable("--policy", "values that Policy takes", str(error)) from error


def _check_file(argument: str, path: Path | None) -> None:
    if path is not None and path.is_dir():
        raise _Unusable(argument, "the name of a file", f"the folder {path}", f"For example {path / 'report'}")


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
