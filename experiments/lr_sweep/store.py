"""Results on disk: one JSON file, replaced atomically after each cell, trusted only if whole and of this sweep."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax
import jax
import jaxlib
import numpy as np
import optax
import sklearn

from experiments._io import set_aside, write_json_atomic
from experiments.lr_sweep.config import Cell, SweepConfig
from experiments.lr_sweep.gradients import GradientAgreement
from experiments.lr_sweep.train import Divergence, Outcome

SCHEMA_VERSION = 1
FILE_NAME = "results.json"


@dataclasses.dataclass(frozen=True)
class CellResult:
    """Both variants of one cell and the agreement of their gradients; all sequences follow the learning rates."""

    unfused: Outcome
    fused: Outcome
    gradient: GradientAgreement


Results = Mapping[Cell, CellResult]


def environment(fuse_name: str) -> dict:
    """What else decides the numbers: versions, platform, and which function fused the model."""
    modules = (flax, jax, jaxlib, np, optax, sklearn)
    versions = {module.__name__: module.__version__ for module in modules}
    return {"fuse": fuse_name, "platform": jax.default_backend(), "versions": versions}


class Store:
    """The result file of one sweep. `notes` tells in words what `load` did with a file it could not use."""

    def __init__(self, folder: Path, config: SweepConfig, fuse_name: str):
        self.path = Path(folder) / FILE_NAME
        self.notes: list[str] = []
        self._head = {
            "schema_version": SCHEMA_VERSION,
            "config": config.to_json(),
            "environment": environment(fuse_name),
        }
        self._head["fingerprint"] = _digest(self._head)
        self._config = config

    def load(self) -> dict[Cell, CellResult]:
        """Finished cells of this very sweep; none, a note and the file kept aside if it is corrupt or of another."""
        if not self.path.exists():
            return {}
        try:
            document = json.loads(self.path.read_text(encoding="utf-8"))
            if not isinstance(document, dict):
                raise ValueError("it holds no JSON object")
            if reason := self._stale(document):
                return self._set_aside("stale", reason)
            if document["checksum"] != _digest(document["cells"]):
                raise ValueError("its checksum does not match its cells")
            results = dict(_decode_cell(record) for record in document["cells"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return self._set_aside("corrupt", f"it cannot be read ({type(error).__name__}: {error})")
        return results

    def save(self, results: Results, summary: dict) -> Path:
        """Replace the file in one step; an interruption leaves the old one whole."""
        cells = [_encode_cell(cell, results[cell]) for cell in self._config.cells() if cell in results]
        document = self._head | {"cells": cells, "checksum": _digest(cells), "summary": _encode(summary)}
        write_json_atomic(self.path, document)
        return self.path

    def _stale(self, document: dict) -> str:
        """Why a readable file is not of this sweep; empty if it is."""
        if document.get("fingerprint") == self._head["fingerprint"]:
            return ""
        if document.get("schema_version") != SCHEMA_VERSION:
            return f"its schema version is {document.get('schema_version')!r}, this program writes {SCHEMA_VERSION}"
        differing = []
        for part in ("config", "environment"):
            found, expected = document.get(part), self._head[part]
            if not isinstance(found, dict):
                raise ValueError(f"its {part} is missing")
            differing += [name for name in expected if found.get(name) != expected[name]]
        return f"it was made with other settings ({', '.join(differing) or 'fingerprint'})"

    def _set_aside(self, suffix: str, reason: str) -> dict:
        """Rename the file to a free name, so nothing anybody may want is overwritten."""
        aside = set_aside(self.path, suffix)
        self.notes.append(f"{self.path} is not used: {reason}. It is kept as {aside.name}; all cells are trained anew.")
        return {}


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _encode(value: Any) -> Any:
    """JSON values; a float that JSON lacks becomes "nan", "inf" or "-inf", which `float` reads back."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encode(item) for item in value]
    return value


def _encode_cell(cell: Cell, result: CellResult) -> dict:
    return _encode(dataclasses.asdict(cell) | dataclasses.asdict(result))


def _decode_cell(record: dict) -> tuple[Cell, CellResult]:
    cell = Cell(record["inputs"], record["optimizer"], record["dtype"])
    gradient = record["gradient"]
    agreement = GradientAgreement(
        tuple(map(float, gradient["per_step"])),
        tuple(map(float, gradient["per_rate"])),
        *(float(gradient[name]) for name in ("max_difference", "bound", "unit_roundoff")),
    )
    return cell, CellResult(_decode_outcome(record["unfused"]), _decode_outcome(record["fused"]), agreement)


def _decode_outcome(record: dict) -> Outcome:
    diverged = tuple(None if item is None else Divergence(**item) for item in record["diverged"])
    loss, accuracy = (tuple(map(float, record[name])) for name in ("loss", "accuracy"))
    return Outcome(float(record["initial_loss"]), loss, accuracy, diverged)
