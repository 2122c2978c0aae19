"""Measured times of kernels, which selection ranks by where there are any (`tune` writes them).

A table on disk (JSON, written in one step) holds seconds by device, versions, and operation with its packed attributes
and types. What does not match is not used: another device, another release of jax or of this package. A file that
cannot be read is reported and ignored, and set aside when the next measurement is written.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from aicf_jax import log
from aicf_jax.ops import FusedOp
from aicf_jax.policy import TARGETS
from gpu_probe.files import set_aside, write_json_atomic

SCHEMA = 1

Table = Mapping[str, Mapping[str, float]]


def key_of(op: FusedOp) -> str:
    """The operation in a table: name, attributes, types, and a digest of what it requires of a kernel."""
    types = ",".join(map(_type_text, op.in_avals)) + "->" + ",".join(map(_type_text, op.out_avals))
    needs = repr(sorted((k, repr(v)) for k, v in op.requirements().items()))
    return f"{op.semantic.name}[{op.blob}]({types}) {hashlib.sha256(needs.encode()).hexdigest()[:12]}"


def _type_text(aval: Any) -> str:
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"


def machine(platform: str) -> str | None:
    """What measurements for a platform must come from: this process's device, None where it is of another platform."""
    if TARGETS.get(jax.default_backend()) != platform:
        return None
    device = jax.local_devices()[0]
    return f"{device.device_kind}, jax {jax.__version__}, aicf_jax {_version()}"


@functools.cache
def _version() -> str:
    try:
        return importlib.metadata.version("aicf-jax")
    except importlib.metadata.PackageNotFoundError:
        return "from source"


def times(op: FusedOp, platform: str) -> Mapping[str, float]:
    """Seconds by kernel name that were measured for this operation on this machine; empty without a table."""
    policy = op.context.policy
    if policy.tuning is None:
        return {}
    return load(policy.tuning).get(machine(platform) or "", {}).get(key_of(op), {})


def load(path: str | Path) -> Mapping[str, Table]:
    """Device -> operation -> kernel -> seconds. A file that cannot be used counts as empty, and is reported once."""
    path = Path(path)
    try:
        stamp = path.stat().st_mtime_ns
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        stamp, problem = 0, f"it cannot be read ({error})"
        found: Mapping[str, Table] = {}
    else:
        found, problem = _read(path, stamp)
    if problem is not None:
        log.once(f"tuning table {path} is ignored: {problem}")
    return found


@functools.lru_cache(maxsize=16)
def _read(path: Path, stamp: int) -> tuple[Mapping[str, Table], str | None]:
    return _parse(path)


def _parse(path: Path) -> tuple[Mapping[str, Table], str | None]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return {}, f"it cannot be read ({error})"
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        return {}, f"expected a table of schema {SCHEMA}, found {str(value)[:60]}"
    devices = value.get("devices")
    if devices is None or not _is_table(devices):
        return {}, "expected seconds by device, operation and kernel"
    return devices, None


def _is_table(devices: Any) -> bool:
    return isinstance(devices, dict) and all(
        isinstance(seconds, dict) and all(map(_is_time, seconds.values()))
        for table in devices.values()
        for seconds in (table.values() if isinstance(table, dict) else [None])
    )


def _is_time(s: Any) -> bool:
    return isinstance(s, int | float) and not isinstance(s, bool) and 0 < s <= sys.float_info.max


def check_path(path: Path) -> None:
    """Raises ValueError for a path where no table can be written, as far as that shows before it is written."""
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        is_folder = False
    except (OSError, ValueError) as error:
        raise ValueError(f"tune(path=...): expected the name of a file, found {str(path)[:200]!r} ({error})") from error
    if is_folder:
        raise ValueError(f"tune(path=...): expected the name of a file, found the folder {path}")
    above = next(p for p in path.absolute().parents if p.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise ValueError(f"tune(path=...): expected a file in a folder that can be written to, found {path} in {above}")


def write(path: Path, device: str, seconds: Table) -> None:
    """Adds measurements to a table; one that cannot be used is set aside first."""
    known: dict[str, Any] = {}
    if path.exists():
        found, problem = _parse(path)  # what lies there now: two tables may be written within one tick of the clock
        if problem is not None:
            log.once(f"tuning table {path}: {problem}; set aside as {set_aside(path, 'unusable')}")
        known = {d: dict(table) for d, table in found.items()}
    known.setdefault(device, {}).update({op: dict(found) for op, found in seconds.items()})
    write_json_atomic(path, {"schema": SCHEMA, "devices": known})
