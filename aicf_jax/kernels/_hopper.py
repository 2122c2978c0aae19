"""What the kernels of `pallas_kernels.gemm_epilogue` can take, in terms of what operations require."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

#: The machines they are made for.
TARGETS = ("h100", "h200")

#: Types of operands and results.
NARROW = ("bfloat16", "float16")
STORED = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True, eq=False)
class Where:
    """Contains the values for which `holds` is true; prints as `text`."""

    text: str
    holds: Callable[[Any], bool]

    def __contains__(self, item: object) -> bool:
        return bool(self.holds(item))

    def __repr__(self) -> str:
        return self.text
