"""Which parts of a call are traced, and which are fixed.

Arrays, NumPy values and Python floats are traced; everything else (strings, None, booleans, integers, functions,
dtypes, configurations) is part of the program. Nothing static is ever a cache key by itself: the user's Python runs
again at every call, and what it made of its static arguments is in the program that it traced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

#: Takes the place of a static leaf while the others are passed through jax.
_HOLE = None


@dataclasses.dataclass(frozen=True)
class Split:
    """A call's arguments, taken apart.

    Attributes:
      dynamic: the traced leaves, in order.
      static: position -> leaf, for all others.
      tree: structure of ``(args, kwargs)``.
    """

    dynamic: tuple[Any, ...]
    static: dict[int, Any]
    tree: Any

    def join(self, dynamic: Sequence[Any]) -> Any:
        """``(args, kwargs)`` with these leaves in the place of the traced ones."""
        rest = iter(dynamic)
        leaves = [self.static[i] if i in self.static else next(rest) for i in range(self.tree.num_leaves)]
        return jax.tree.unflatten(self.tree, leaves)

    def outline(self) -> Any:
        """``(args, kwargs)`` with static leaves left out, so that jax sees the user's argument names."""
        leaves = iter(self.dynamic)
        marked = [_HOLE if i in self.static else next(leaves) for i in range(self.tree.num_leaves)]
        return jax.tree.unflatten(self.tree, marked)


def split(args: tuple[Any, ...], kwargs: dict[str, Any], host_static: bool, is_leaf: Callable[[Any], bool]) -> Split:
    """Takes a call apart. `host_static`: Python floats and NumPy values are fixed as well (the function needs them)."""
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=is_leaf)
    static = {i: x for i, x in enumerate(leaves) if not is_traced(x, host_static)}
    return Split(tuple(x for i, x in enumerate(leaves) if i not in static), static, tree)


def is_traced(x: Any, host_static: bool = False) -> bool:
    """Whether a leaf becomes an argument of the traced program."""
    if isinstance(x, (jax.Array, jax.ShapeDtypeStruct)):
        return True
    if host_static:
        return False
    if isinstance(x, (np.ndarray, np.generic)):
        return x.dtype.kind in "biufcV" and x.dtype != jax.dtypes.float0 and _is_jax_dtype(x.dtype)
    return isinstance(x, (float, complex)) and not isinstance(x, bool)


def _is_jax_dtype(dtype: Any) -> bool:
    return (
        dtype.kind != "V" or dtype.name in ("bfloat16",) or dtype.name.startswith(("float8", "int4", "uint4", "int2"))
    )


def has_host_values(s: Split) -> bool:
    """Whether making host values static would change anything."""
    return any(not isinstance(x, (jax.Array, jax.ShapeDtypeStruct)) for x in s.dynamic)
