"""Results on disk, for every study: atomic JSON, bad files set aside, fingerprints, facts about the environment.

A result file is either whole or absent, and one that cannot be used is never overwritten nor silently skipped: it is
renamed next to where it was, so that a person can look at it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gpu_probe.environment import cores, environment, load_average, now
from gpu_probe.files import load_json, set_aside, write_atomic, write_json_atomic

__all__ = [
    "cores",
    "environment",
    "fingerprint",
    "load_average",
    "load_json",
    "now",
    "set_aside",
    "source_digest",
    "write_atomic",
    "write_json_atomic",
]


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
