"""Results of one study on disk, kept after every finished entry so that an interrupted run continues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments._io import fingerprint, load_json, now, write_json_atomic

SCHEMA = 1


class Results:
    """The JSON document of one study: `{schema, study, fingerprint, config, started, updated, entries}`.

    `config` is everything on which the numbers depend (versions, machine, sources, options). Its fingerprint decides
    whether an existing file is continued; a corrupt one or one of another configuration is set aside. `notes` tells
    what happened to it. With `fresh`, an existing file is emptied in any case, once the first entry is finished.

    An entry is a dict with "status" "measured" or "failed"; only measured entries are kept on continuing.
    """

    def __init__(self, path: Path, study: str, config: dict[str, Any], fresh: bool = False):
        self.path = Path(path)
        self.notes: list[str] = []
        identity = fingerprint(config)
        document, note = load_json(self.path, lambda value: _problem(value, study, identity))
        if note:
            self.notes.append(note)
        kept = {}
        started = now()
        if document and not fresh:
            kept = {key: entry for key, entry in document["entries"].items() if entry["status"] == "measured"}
            started = document["started"]
            if kept:
                self.notes.append(f"{self.path}: {len(kept)} finished entries kept (--fresh measures them again)")
        self._document = {
            "schema": SCHEMA,
            "study": study,
            "fingerprint": identity,
            "config": config,
            "started": started,
            "updated": started,
            "entries": kept,
        }

    @property
    def entries(self) -> dict[str, dict[str, Any]]:
        """Finished entries by key."""
        return self._document["entries"]

    def put(self, key: str, entry: dict[str, Any], status: str = "measured") -> None:
        """Adds or replaces one entry and writes the file."""
        if status not in ("measured", "failed"):
            raise ValueError(f"status must be 'measured' or 'failed', found {status!r}")
        self._document["entries"][key] = {"status": status, "finished": now(), **entry}
        self._document["updated"] = now()
        write_json_atomic(self.path, self._document)


def _problem(value: Any, study: str, identity: str) -> str | None:
    if not isinstance(value, dict) or value.get("schema") != SCHEMA or value.get("study") != study:
        return f"not a {study} result of schema {SCHEMA}"
    if value.get("fingerprint") != identity:
        return "other versions, machine, sources or options"
    entries = value.get("entries")
    if not isinstance(value.get("started"), str) or not isinstance(entries, dict):
        return "no start or no entries"
    if not all(isinstance(e, dict) and e.get("status") in ("measured", "failed") for e in entries.values()):
        return "an entry without a status"
    return None
