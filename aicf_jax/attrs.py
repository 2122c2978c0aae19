"""`AttrBlob`: the attributes of a fused operation, packed to bytes.

Layout, little endian: ``uint16 kind_id, uint16 schema_id``, then the schema's fields in order: ``int`` as int32,
``float`` as float64, ``enum`` as int32 index into its choices. Equal attributes give equal bytes on every machine, so
a blob is the key of kernel specialization, of lowering caches and of tuning caches on disk.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Field:
    """One attribute: `kind` is ``"int"``, ``"float"`` or ``"enum"`` (then `choices` lists the words)."""

    name: str
    kind: str
    choices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ("int", "float", "enum"):
            raise ValueError(f"Field({self.name!r}): expected kind 'int', 'float' or 'enum', found {self.kind!r}")
        if (self.kind == "enum") != bool(self.choices):
            raise ValueError(f"Field({self.name!r}): choices belong to kind 'enum' and only there")

    @property
    def code(self) -> str:
        return "d" if self.kind == "float" else "i"


@dataclasses.dataclass(frozen=True)
class Schema:
    """Names and types of the attributes of one kind of operation. A changed field list needs a new `schema_id`."""

    kind_id: int
    schema_id: int
    fields: tuple[Field, ...]

    def pack(self, values: Mapping[str, object]) -> AttrBlob:
        """The blob of `values`. Raises ValueError for a missing, unknown or ill-typed field."""
        names = [f.name for f in self.fields]
        if sorted(values) != sorted(names):
            raise ValueError(f"attributes of kind {self.kind_id}: expected {names}, found {sorted(values)}")
        packed = []
        for f in self.fields:
            v = values[f.name]
            if f.kind == "enum":
                if v not in f.choices:
                    raise ValueError(f"attribute {f.name}: expected one of {list(f.choices)}, found {v!r}")
                v = f.choices.index(v)
            elif not isinstance(v, (int, float)) or (f.kind == "int" and int(v) != v):
                raise ValueError(f"attribute {f.name}: expected {f.kind}, found {v!r}")
            packed.append(v)
        return AttrBlob(self, struct.pack(self._format, self.kind_id, self.schema_id, *packed))

    @property
    def _format(self) -> str:
        return "<HH" + "".join(f.code for f in self.fields)


@dataclasses.dataclass(frozen=True)
class AttrBlob:
    """Packed attributes; hashable, equal when kind, schema and all fields are equal."""

    schema: Schema
    data: bytes

    def unpack(self) -> dict[str, object]:
        """The attributes by name; words again for enums."""
        values = struct.unpack(self.schema._format, self.data)[2:]
        return {
            f.name: f.choices[v] if f.kind == "enum" else v for f, v in zip(self.schema.fields, values, strict=True)
        }

    def __getitem__(self, name: str) -> Any:
        return self.unpack()[name]

    def __str__(self) -> str:
        return " ".join(f"{k}={v}" for k, v in self.unpack().items())
