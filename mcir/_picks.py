"""One element of each row, ``sum_j (x_j where j = label else 0)``, read at its place rather than summed.

On a CPU XLA writes what a sum reads: a pass over a block of logits for one number of each row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mcir.ir import Axis, Compute, Load


@dataclasses.dataclass(frozen=True)
class Pick:
    """Values of a tile by name: of `x` along `axis` the element at `label`, which does not vary along it."""

    x: str
    label: str
    axis: str


def picks(statements: Sequence[Any], axes: Mapping[str, Axis]) -> dict[str, Pick]:
    """The values whose sums over `Pick.axis` alone are picks.

    None among several devices: rows or the axis may be split over them, and are not to be fetched.
    """
    if jax.device_count() != 1:
        return {}
    made = {s.result: s for s in statements if isinstance(s, Compute)}
    vary = {s.result: s.type.axes for s in statements if isinstance(s, (Compute, Load))}
    found = {name: _pick(s, made) for name, s in made.items() if s.op == "select_n" and len(s.args) == 3}
    return {
        name: p
        for name, p in found.items()
        if p is not None and p.axis not in vary.get(p.label, (p.axis,)) and _counts(made, name, axes[p.axis])
    }


def _counts(made: Mapping[str, Compute], select: str, axis: Axis) -> bool:
    """Whether the compared positions are all different: integers of 8 bits start again, large floats are rounded."""
    test = made[made[select].args[0]]
    dtype = next(made[a].type.dtype for a in test.args if a in made and made[a].op == "iota")
    return np.issubdtype(dtype, np.integer) and axis.count * axis.block - 1 <= np.iinfo(dtype).max


def _pick(select: Compute, made: Mapping[str, Compute]) -> Pick | None:
    """What ``select_n(eq(iota, label), 0, x)`` takes."""
    test, otherwise, x = select.args
    if test not in made or made[test].op != "eq" or otherwise not in made or made[otherwise].op != "constant":
        return None
    if made[otherwise].param("value") != 0:
        return None
    for index, label in (made[test].args, made[test].args[::-1]):
        if index in made and made[index].op == "iota":
            return Pick(x, label, made[index].type.axes[0])
    return None


def element(x: Any, label: Any, start: Any, axis: int) -> Any:
    """The element at `label` of a tile whose first is at `start`, 0 where there is none.

    `label` has a dimension of one at `axis`.
    """
    n, integer = x.shape[axis], jnp.result_type(int)
    label = label.astype(integer) - jnp.asarray(start, integer)
    there = (label >= 0) & (label < n)
    shape = [1 if d == axis else size for d, size in enumerate(x.shape)]
    place = jnp.broadcast_to(jnp.clip(label, 0, n - 1), shape)
    found = jnp.take_along_axis(x, place, axis, mode="promise_in_bounds")
    return jnp.squeeze(jnp.where(there, found, jnp.zeros((), x.dtype)), axis)
