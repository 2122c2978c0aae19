"""What the command lines of the packages share: functions and types given as text, and files written in one step."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _compat

#: Of short names, as jax prints them and as HLO does.
_LETTERS = {"f": "float", "bf": "bfloat", "i": "int", "s": "int", "u": "uint", "c": "complex"}
_SHORT = (
    "f16",
    "f32",
    "f64",
    "bf16",
    *(f"{kind}{n}" for kind in "isu" for n in (8, 16, 32, 64)),
    "c64",
    "c128",
    "pred",
)


class Unusable(Exception):
    """An argument that cannot be used: which one, what was expected, what was found, what to do."""

    def __init__(self, argument: str, expected: str, found: str, remedy: str = ""):
        super().__init__(f"{argument}: expected {expected}, found {found}" + (f". {remedy}" if remedy else ""))


def named(argument: str, text: str) -> Any:
    """The object that ``module:name`` stands for."""
    module_name, colon, path = text.partition(":")
    if not (module_name and colon and path):
        raise Unusable(argument, "module:name", repr(text), "For example mypackage.model:loss")
    # `python -m` puts the current folder on the path; a console script or a test may not have.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        remedy = "Run the command from the folder that holds it, or install it"
        raise Unusable(argument, f"a module {module_name}", f"none ({error})", remedy) from error
    except Exception as error:
        found_text = f"one that fails: {type(error).__name__}: {error}"
        raise Unusable(argument, f"a module {module_name} that can be imported", found_text) from error
    for name in path.split("."):
        if not hasattr(found, name):
            names = ", ".join(n for n in dir(found) if not n.startswith("_"))[:200] or "no public names"
            raise Unusable(argument, f"{module_name} to have {path}", f"no {name!r}", f"It has: {names}")
        found = getattr(found, name)
    return found


def initial(argument: str, text: str | None) -> tuple[Any, ...]:
    """What the function returns that ``module:name`` stands for; nothing where there is none."""
    if text is None:
        return ()
    make: Callable[..., Any] = named(argument, text)
    if not callable(make):
        raise Unusable(argument, "a function", f"a {type(make).__name__}")
    try:
        found = make()
    except Exception as error:
        failed = f"{type(error).__name__}: {error}"
        raise Unusable(argument, f"{text}() to return the arguments", failed, "It is called without any") from error
    if not isinstance(found, (tuple, list)):
        raise Unusable(argument, f"{text}() to return a tuple", type(found).__name__, "Return (variables, x)")
    return tuple(found)


def array_type(argument: str, text: str) -> jax.ShapeDtypeStruct:
    """``f32[8,128]`` or ``float32[8, 128]``."""
    example = f"For example f32[8,128], bf16[4], i32[], pred[8]; element types are {', '.join(_SHORT)}"
    match = re.fullmatch(r"\s*([a-z]+)(\d*)\s*\[([\d\s,]*)\]\s*", text)
    if match is None:
        raise Unusable(argument, "an element type and a shape", repr(text), example)
    word, bits, sizes = match.groups()
    try:
        dtype = jnp.dtype("bool" if word + bits == "pred" else _LETTERS.get(word, word) + bits)
        shape = tuple(int(n) for n in sizes.split(",")) if sizes.strip() else ()
    except (TypeError, ValueError) as error:
        raise Unusable(argument, "an element type and a shape", repr(text), example) from error
    if dtype.itemsize == (16 if jnp.issubdtype(dtype, jnp.complexfloating) else 8) and not _compat.x64_enabled():
        raise Unusable(argument, "types of up to 32 bits", repr(text), "JAX_ENABLE_X64=1 turns 64 bits on")
    return jax.ShapeDtypeStruct(shape, dtype)


def check_call(argument: str, fn: Callable[..., Any], args: Sequence[Any], name: str) -> None:
    """Raises Unusable where a function cannot be called with so many arguments."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return  # of a builtin: the call tells
    try:
        signature.bind(*args)
    except TypeError as error:
        known = signature.parameters.values()
        needed = sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in known)
        takes = ", ".join(map(str, known))
        expected = f"a type for each of the {needed} arguments of {name}({takes})"
        raise Unusable(argument, expected, f"{len(args)} ({error})", "--init can make the first ones") from error


def positive(text: str) -> float:
    """A number above 0, as an argument's `type` of argparse."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number above 0, found {text!r}") from None
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, found {text}")
    return value


def check_file(argument: str, path: Path | None) -> None:
    """Raises Unusable for a folder."""
    if path is not None and path.is_dir():
        raise Unusable(argument, "the name of a file", f"the folder {path}", f"For example {path / 'report'}")
