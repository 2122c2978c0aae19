"""What an operation takes and gives: the number of arguments, parameters, axes and element type of its result."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mcir.ir import Compute, Type
from mcir.operations import PARAMETERS, POINTWISE

#: Operations that are not pointwise: number of arguments, and parameters in order.
_SPECIAL: dict[str, tuple[int, tuple[str, ...]]] = {
    "constant": (0, ("value",)),
    "iota": (0, ("axis",)),
    "bits": (1, ("axes", "shape")),
    "dot": (2, ("over",)),
    "shifted_exp": (2, ("base",)),
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min"), (1, ("over",))),
}

#: Parameters that may be left out: how precisely a ``dot`` multiplies, as `jax.lax.Precision` names it.
OPTIONAL = frozenset({("dot", "precision")})


def pointwise(s: Compute) -> bool:
    """Whether it is a function of each element."""
    return s.op == "shifted_exp" or s.op in POINTWISE


def signature_problem(s: Compute) -> str | None:
    """What is wrong with its arguments or parameters."""
    if s.op not in _SPECIAL and s.op not in POINTWISE:
        return f"{s.op} is not an operation of the language"
    if s.op in POINTWISE and pointwise(s):
        count, allowed = len(s.args), PARAMETERS.get(s.op, ())
    else:
        count, allowed = _SPECIAL[s.op]
    if len(s.args) != count:
        return f"{s.op} takes {count} argument(s), not {len(s.args)}"
    found = tuple(name for name, _ in s.params if (s.op, name) not in OPTIONAL)
    if found != tuple(sorted(allowed)) and not (s.op == "shifted_exp" and not found):
        return f"the parameters of {s.op} are ({', '.join(sorted(allowed))}), not ({', '.join(found)})"
    if s.op == "bits" and len(s.param("shape")) != len(s.param("axes")):
        return "bits has as many sizes in `shape` as names in `axes`"
    return None


def result_axes(s: Compute, args: Sequence[Sequence[str]]) -> set[str]:
    """The axes of its result, from those of its arguments."""
    if s.op == "iota":
        return {s.param("axis")}
    if s.op == "bits":
        return {axis for axis in s.param("axes") if axis}
    return {axis for axes in args for axis in axes} - set(s.param("over", ()))


def dtype_problem(s: Compute, args: Sequence[str]) -> str | None:
    """What jax says of these element types, where the result is not what it gives."""
    if s.op not in POINTWISE or not pointwise(s):
        return None
    if not jax.config.read("jax_enable_x64") and any(jnp.dtype(d).itemsize == 8 for d in (*args, s.type.dtype)):
        return None  # jax cannot say: it has no such types here
    found = _result_dtype(s.op, tuple(args), s.params)
    return None if found == jnp.dtype(s.type.dtype).name else f"{s.op} of {', '.join(args)} gives {found}"


def type_problem(type: Type, order: Sequence[str]) -> str | None:
    """What is wrong with a type, in a program with these axes."""
    try:
        jnp.dtype(type.dtype)
    except TypeError:
        return f"an element type that jax has, not {type.dtype!r}"
    unknown = [a for a in type.axes if a not in order]
    if unknown:
        return f"axis {unknown[0]} is not declared"
    if list(type.axes) != [a for a in order if a in type.axes]:
        return f"axes of a type come in the program's order, each once, not {type}"
    return None


@functools.lru_cache(maxsize=1024)
def _result_dtype(op: str, args: tuple[str, ...], params: tuple[tuple[str, Any], ...]) -> str:
    """What jax says this operation gives for these element types, or why it refuses."""
    try:
        function = functools.partial(POINTWISE[op], **dict(params))
        return np.dtype(jax.eval_shape(function, *(jax.ShapeDtypeStruct((), jnp.dtype(d)) for d in args)).dtype).name
    except (TypeError, ValueError) as error:
        return f"an error of jax: {str(error).splitlines()[0]}"
