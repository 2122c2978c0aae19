"""Files that are whole or absent: what every package here writes is written in one step."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    """Calls `write(temporary)` and moves the finished temporary file over `path` in one step.

    The temporary file lies in the same folder (a rename is atomic only within one file system), keeps the suffix of
    `path` (writers choose a format by it) and is removed if `write` raises. Missing folders are created. A reader, or
    a later run after an interruption, therefore sees the old content or the new, never half of it.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
    os.close(descriptor)
    temporary = Path(name)
    try:
        write(temporary)
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        # mkstemp makes the file private; a result has the permissions that an ordinary new file would have
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json_atomic(path: Path, value: Any) -> None:
    """Writes `value` as indented JSON to `path` in one step (see `write_atomic`).

    Raises ValueError for NaN and infinities, which are not JSON: say None where a number is unknown.
    """
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    write_atomic(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def folder_problem(path: Path) -> str | None:
    """Why no files can be written into the folder `path`, in a few words; None where they can. The folder is made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return None
    except FileExistsError:
        return "a file of that name"
    except OSError as error:
        return f"one that cannot be written ({error.strerror or type(error).__name__})"


def set_aside(path: Path, label: str) -> Path:
    """Renames `path` to `<stem>.<label>-<n><suffix>` with the first free n, and returns the new path."""
    path = Path(path)
    number = 1
    while (target := path.with_name(f"{path.stem}.{label}-{number}{path.suffix}")).exists():
        number += 1
    return path.rename(target)


def load_json(path: Path, problem: Callable[[Any], str | None]) -> tuple[Any | None, str | None]:
    """Reads the JSON at `path`; a file that cannot be used is set aside.

    `problem(value)` says in a few words why a readable value cannot be used (another schema, another configuration),
    or None when it can. Returns `(value, None)`, `(None, None)` when there is no file, or `(None, message)` when the
    file was set aside; the message names the reason and the new path, for the caller to show. Unreadable text is
    labelled "corrupt", an unusable value "stale".
    """
    path = Path(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None, None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        return None, f"{path} is corrupt ({error}); set aside as {set_aside(path, 'corrupt')}"
    reason = problem(value)
    if reason is None:
        return value, None
    return None, f"{path} cannot be continued ({reason}); set aside as {set_aside(path, 'stale')}"
