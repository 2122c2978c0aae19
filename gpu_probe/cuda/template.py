"""Typed templates of CUDA C++: a frozen dataclass whose fields are checked, and the text in which they stand."""

from __future__ import annotations

import dataclasses
import re
import string
from typing import Any, ClassVar

from gpu_probe.cuda.code import Check

#: What every kernel may use. `asm volatile` keeps the optimizer from moving, merging or dropping what is timed.
PRELUDE = """\
typedef unsigned int u32;
typedef unsigned long long u64;

__device__ __forceinline__ u64 cycles() {
  u64 t;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(t) : : "memory");
  return t;
}

__device__ __forceinline__ u64 nanoseconds() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t) : : "memory");
  return t;
}

__device__ __forceinline__ u32 shared_address(const void* p) {
  return (u32)__cvta_generic_to_shared(p);
}
"""

#: Every kernel's name starts so: the profiler finds ours by it.
PREFIX = "probe_"


@dataclasses.dataclass(frozen=True)
class Template:
    """A kernel with compile-time parameters.

    A subclass is a frozen dataclass; its fields are the parameters, and `$field` in `NAME` and `TEXT` stands for their
    values. What `derived` returns may be used the same way. `__post_init__` of the subclass checks the fields, so that
    a template that exists can be compiled.

    Attributes:
      NAME: of the kernel's function; parameters in it tell instances apart in a profile.
      TEXT: CUDA C++ with one ``extern "C" __global__`` function of that name.
      CHECKS: what must be true of the compiled code, see `gpu_probe.cuda.code`.
    """

    NAME: ClassVar[str]
    TEXT: ClassVar[str]
    CHECKS: ClassVar[tuple[Check, ...]] = ()

    def derived(self) -> dict[str, Any]:
        """Further values for the text, computed from the fields."""
        return {}

    def values(self) -> dict[str, str]:
        """Everything that `$name` may stand for."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {key: str(value) for key, value in {**fields, **self.derived()}.items()}

    @property
    def name(self) -> str:
        """The kernel's function."""
        return string.Template(self.NAME).substitute(self.values())

    @property
    def source(self) -> str:
        """The whole translation unit."""
        return PRELUDE + string.Template(self.TEXT).substitute({**self.values(), "name": self.name})

    @property
    def parameters(self) -> tuple[str, ...]:
        """The types of the kernel's arguments, as ``("const u64*", "u32")``."""
        found = re.search(
            rf"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?{self.name}\s*\(([^)]*)\)", self.source
        )
        if found is None:
            raise ValueError(f"{type(self).__name__}: no __global__ function {self.name} in its text")
        listed = [p.strip() for p in found[1].split(",") if p.strip()]
        return tuple(re.sub(r"\s+\*", "*", p.rpartition(" ")[0].strip()) for p in listed)


def check_range(template: Template, field: str, low: int, high: int) -> None:
    """Raises ValueError unless the field is a whole number from `low` to `high`."""
    value = getattr(template, field)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(
            f"{type(template).__name__}.{field}: expected a whole number from {low} to {high}, found {value!r}"
        )


def check_choice(template: Template, field: str, choices: tuple[Any, ...]) -> None:
    """Raises ValueError unless the field is one of `choices`."""
    value = getattr(template, field)
    if value not in choices:
        listed = ", ".join(map(repr, choices))
        raise ValueError(f"{type(template).__name__}.{field}: expected one of {listed}, found {value!r}")
