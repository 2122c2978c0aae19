"""Results on disk: a checkpoint while a run is unfinished, one JSON file when it is done; both replaced atomically."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from pathlib import Path
from typing import Any

from flax import serialization

from experiments._io import (
    environment,
    fingerprint,
    load_json,
    set_aside,
    source_digest,
    write_atomic,
    write_json_atomic,
)
from experiments.text_lm.config import TextConfig
from experiments.text_lm.corpus import Corpus
from experiments.text_lm.train import History, Pair

SCHEMA_VERSION = 1
RESULTS_NAME, CHECKPOINT_NAME = "results.json", "checkpoint.msgpack"
# the packages whose code the numbers are about
PACKAGES = ("gpu_probe", "mcir", "pallas_kernels", "aicf_jax", "experiments/text_lm", "experiments/benchmarks")


class Store:
    """The files of one run. `notes` tells in words what was done with a file that could not be used."""

    def __init__(self, folder: Path, config: TextConfig, corpus: Corpus, fuse_name: str):
        self.results_path, self.checkpoint_path = Path(folder) / RESULTS_NAME, Path(folder) / CHECKPOINT_NAME
        self.notes: list[str] = []
        root = Path(__file__).resolve().parents[2]
        self._head: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "config": dataclasses.asdict(config),
            "corpus": {"files": corpus.files, "characters": len(corpus.vocabulary), "digest": corpus.digest},
            "environment": environment(),
            "sources": source_digest(root / package for package in PACKAGES),
            "fuse": fuse_name,
        }
        self._head["fingerprint"] = fingerprint(self._head)

    def load_results(self) -> dict[str, Any] | None:
        """The results of this very run if it is finished; any other file is kept aside with a note."""
        document, note = load_json(self.results_path, self._problem)
        if note:
            self.notes.append(note)
        return None if document is None else document["results"]

    def save_results(self, results: dict[str, Any]) -> None:
        """Writes the results of a finished run; its checkpoint is of no more use and is removed."""
        results = encode(results)
        write_json_atomic(self.results_path, self._head | {"results": results, "checksum": fingerprint(results)})
        self.checkpoint_path.unlink(missing_ok=True)

    def _problem(self, document: Any) -> str | None:
        if not isinstance(document, dict) or document.get("schema_version") != SCHEMA_VERSION:
            return f"it is no result of schema {SCHEMA_VERSION}"
        if document.get("fingerprint") != self._head["fingerprint"]:
            names = [name for name in self._head if name != "fingerprint" and document.get(name) != self._head[name]]
            return f"it was made with another {', '.join(names) or 'fingerprint'}"
        if "results" not in document or document.get("checksum") != fingerprint(document["results"]):
            return "its checksum does not match"
        return None

    def save_checkpoint(self, states: Pair, history: History) -> None:
        """Writes both states and the history: one line of JSON about the rest, then the rest."""
        record = {"states": states, "history": json.dumps(dataclasses.asdict(history))}
        payload = serialization.msgpack_serialize(serialization.to_state_dict(record))
        head = {"fingerprint": self._head["fingerprint"], "sha256": hashlib.sha256(payload).hexdigest()}
        content = json.dumps(head).encode() + b"\n" + payload
        write_atomic(self.checkpoint_path, lambda temporary: temporary.write_bytes(content))

    def load_checkpoint(self, states: Pair) -> tuple[Pair, History] | None:
        """States (in the structure of `states`) and history of this very run; None when there is nothing to resume."""
        try:
            content = self.checkpoint_path.read_bytes()
        except FileNotFoundError:
            return None
        line, _, payload = content.partition(b"\n")
        try:
            head = json.loads(line)
            fits, whole = head["fingerprint"], head["sha256"]
        except (ValueError, KeyError, TypeError):
            return self._unusable("corrupt", "it has no readable head")
        if whole != hashlib.sha256(payload).hexdigest():
            return self._unusable("corrupt", "its checksum does not match")
        if fits != self._head["fingerprint"]:
            return self._unusable("stale", "it was made with other settings, versions or sources")
        record: Any = serialization.msgpack_restore(payload)
        restored = serialization.from_state_dict(states, record["states"])
        return restored, History(**json.loads(record["history"]))

    def _unusable(self, label: str, reason: str) -> None:
        aside = set_aside(self.checkpoint_path, label)
        self.notes.append(f"{self.checkpoint_path} is not used: {reason}. It is kept as {aside.name}.")


def encode(value: Any) -> Any:
    """JSON values; a float that JSON lacks becomes "nan", "inf" or "-inf", which `float` reads back."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    return value
