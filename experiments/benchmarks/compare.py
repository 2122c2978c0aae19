"""Whether two compiled programs are the same, and whether two results agree."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# A leaf that is zero in exact arithmetic (the gradient of a bias before a softmax or a BatchNorm) holds only rounding
# noise of the whole computation; below this part of the largest value of the tree a leaf is judged by the tree.
LEAF_FLOOR = 1e-3

_METADATA = re.compile(r',? ?metadata=\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}')
_PARAMETER_NAME = re.compile(r"(?<=[(\s])[\w.\-]+: ")


def canonical_hlo(text: str) -> str:
    """Optimized HLO text without what does not run: module name, source tables, metadata, instruction names.

    Names are numbered in order of appearance. Equal results mean equal programs: same instructions, order, layouts,
    aliasing. The converse may fail (a reordering that does not matter), so "different" is no proof of difference.
    """
    header, _, rest = text.partition("\n")
    lines = [re.sub(r"^HloModule [^,\s]+", "HloModule", header)]
    body = rest.splitlines()
    start = next((i for i, line in enumerate(body) if line.startswith(("%", "ENTRY"))), len(body))
    for line in body[start:]:
        line = _METADATA.sub("", line)
        if line.endswith("{") and not line.startswith(" "):
            line = _PARAMETER_NAME.sub("", line)
        lines.append(line)
    numbers: dict[str, str] = {}
    return re.sub(r"%[\w.\-]+", lambda m: numbers.setdefault(m[0], f"%{len(numbers)}"), "\n".join(lines))


def relative_difference(expected: Any, found: Any) -> float:
    """Largest over the leaves of `max|found - expected| / max(max|expected|, LEAF_FLOOR * T)`, T the largest of all.

    Computed in float64 of the host. Infinite where trees, shapes, dtypes or the places of non-finite values differ.
    """
    leaves, tree = jax.tree.flatten(expected)
    others, other_tree = jax.tree.flatten(found)
    if tree != other_tree or any(a.shape != b.shape or a.dtype != b.dtype for a, b in zip(leaves, others, strict=True)):
        return float("inf")
    pairs = [(_host(a), _host(b)) for a, b in zip(leaves, others, strict=True)]
    largest = max((_size(a) for a, _ in pairs), default=0.0)
    return max((_leaf_difference(a, b, LEAF_FLOOR * largest) for a, b in pairs), default=0.0)


def _host(leaf: jax.Array) -> np.ndarray:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).astype(np.float64)


def _size(leaf: np.ndarray) -> float:
    return float(np.max(np.abs(leaf), initial=0.0, where=np.isfinite(leaf)))


def _leaf_difference(expected: np.ndarray, found: np.ndarray, floor: float) -> float:
    finite = np.isfinite(expected)
    if not np.array_equal(expected[~finite], found[~finite], equal_nan=True) or not np.all(np.isfinite(found[finite])):
        return float("inf")
    difference = float(np.max(np.abs(found[finite] - expected[finite]), initial=0.0))
    scale = max(_size(expected), floor)
    return difference / scale if scale else (0.0 if difference == 0.0 else float("inf"))
