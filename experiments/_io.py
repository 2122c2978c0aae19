"""Results on disk, for every study: atomic JSON, bad files set aside, fingerprints, facts about the environment.

A result file is either whole or absent, and one that cannot be used is never overwritten nor silently skipped: it is
renamed next to where it was, so that a person can look at it.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterable
from importlib import metadata
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


def fingerprint(value: Any) -> str:
    """16 hex digits that change when `value` (dataclasses, dicts, sequences, scalars) does; equal across processes.

    Raises TypeError for a value that is not plain data, because its text might hold an address and never repeat.
    """
    text = json.dumps(_plain(value), sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    raise TypeError(f"a fingerprint covers plain data, found {type(value).__name__}: {value!r}")


def source_digest(folders: Iterable[Path]) -> str:
    """16 hex digits over the names and contents of every `*.py` below `folders`: results are of *this* code."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(Path(folder).rglob("*.py")):
            digest.update(f"{Path(folder).name}/{path.relative_to(folder).as_posix()}\0".encode())
            digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load_average() -> float | None:
    """Processes that wanted a core during the last minute, on average; None where the system does not count them."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def environment() -> dict[str, Any]:
    """Facts needed to read a result elsewhere: versions, backend, cores; no host name, user or path."""
    import jax

    def version(package: str) -> str | None:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    return {
        "python": platform.python_version(),
        "packages": {name: version(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy")},
        "backend": jax.default_backend(),
        "device_kind": jax.devices()[0].device_kind,
        "architecture": platform.machine(),
        "cores": cores(),
    }


def now() -> str:
    """The time in UTC to the second, ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
