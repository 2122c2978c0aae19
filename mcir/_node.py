"""What `mcir.read` passes on to `mcir._finish`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from mcir._axes import Dim

REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min")


@dataclasses.dataclass(eq=False)
class Node:
    """A value whose axes are still being found out."""

    op: str
    args: tuple[Node, ...]
    params: tuple[tuple[str, Any], ...]
    varies: tuple[Dim, ...]
    dtype: str
    over: tuple[Dim, ...] = ()
    layout: tuple[Dim, ...] = ()


#: A node with the axes of each dimension of the array it is here.
Instance = tuple[Node, list[Dim]]
#: Called at each use. What does not depend on a contraction or reduction is made anew, so that it can have other axes.
Use = Callable[[], Instance]
