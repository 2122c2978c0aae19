"""GPUs that programs can be compiled for: one text file each in ``targets/``."""

from __future__ import annotations

import dataclasses
import functools
import re
from importlib import resources

_FOLDER = resources.files("pallas_kernels.aot") / "targets"


@dataclasses.dataclass(frozen=True)
class Target:
    """A described GPU.

    Attributes:
      name: as `compile_for` takes it.
      text: the description, a GpuTargetConfigProto as text.
    """

    name: str
    text: str = dataclasses.field(repr=False)

    @property
    def device_kind(self) -> str:
        """The name under which jax knows such a device."""
        return self._value("device_description_str").strip('"')

    @property
    def sm_count(self) -> int:
        """Multiprocessors."""
        return int(self._value("core_count"))

    @property
    def smem_bytes(self) -> int:
        """Shared memory that one block may have."""
        return int(self._value("shared_memory_per_block_optin"))

    @property
    def compute_capability(self) -> int:
        """As 80 for 8.0."""
        found = re.search(r"cuda_compute_capability \{ major: (\d+)(?: minor: (\d+))?", self.text)
        if found is None:
            raise ValueError(f"target {self.name}: its description has no cuda_compute_capability")
        return 10 * int(found[1]) + int(found[2] or 0)

    def _value(self, key: str) -> str:
        found = re.search(rf"^\s*{key}: (.*)$", self.text, re.M)
        if found is None:
            raise ValueError(f"target {self.name}: its description has no {key}")
        return found[1]


@functools.cache
def names() -> tuple[str, ...]:
    """The targets that there is a description of."""
    return tuple(sorted(f.name.removesuffix(".txtpb") for f in _FOLDER.iterdir() if f.name.endswith(".txtpb")))


@functools.cache
def load(name: str) -> Target:
    """A target by its name.

    Raises:
      ValueError: there is no such target; the message lists those that there are.
    """
    if name not in names():
        raise ValueError(f"target: expected one of {', '.join(names())}, found {name!r}")
    return Target(name, (_FOLDER / f"{name}.txtpb").read_text(encoding="utf-8"))
