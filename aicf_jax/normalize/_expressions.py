"""Hash-consed expressions of one variable: equal expressions get equal numbers.

The reduction is deliberately small, so that two expressions with the same number compute the same thing: operands of
commutative operations are ordered, ``<`` is ``>`` turned round, squares are products, conversions to the same type
and copies vanish, constants are compared after rounding to the type they are used in. User-written derivatives stay
part of an
expression: a custom_jvp function equals another only if rule and body are equal.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from aicf_jax import _compat
from aicf_jax.fingerprint import Keys
from aicf_jax.trace import is_call

_COMMUTATIVE = {"add", "mul", "max", "min", "add_any", "and", "or", "eq", "ne"}
_TURNED = {"lt": "gt", "le": "ge"}
_IDENTITY = {"copy", "copy_p", "pvary", "pcast", "stop_gradient_identity"}
#: What a parametric spelling accepts in place of every constant but zero.
ANY_CONSTANT = ("const", "any")


class Expressions:
    """A table of expressions. `any_constant` makes all constants but zero equal (for parametric spellings)."""

    def __init__(self, base: Expressions | None = None, any_constant: bool = False):
        self._base, self._own = base, {}
        self.any_constant = base.any_constant if base else any_constant
        self._start: int = base._size() if base else 0

    def _size(self) -> int:
        return self._start + len(self._own)

    def intern(self, key: Hashable) -> int:
        """The number of an expression. A derived table leaves its base as it is."""
        if self._base is not None:
            known = self._base._own.get(key)
            if known is not None:
                return known
        return self._own.setdefault(key, self._size())

    def variable(self) -> int:
        return self.intern(("z",))

    def constant(self, value: Any) -> int | None:
        """The number of a scalar constant, None for arrays."""
        array = np.asarray(value)
        if array.ndim or array.dtype == object:
            return None
        number = complex(array) if array.dtype.kind == "c" else float(array)
        if self.any_constant and number != 0:
            return self.intern(ANY_CONSTANT)
        return self.intern(("const", number if number == number else "nan"))

    def is_constant(self, number: int) -> bool:
        return any(number == n and k[0] == "const" for k, n in self._items() if isinstance(k, tuple))

    def _items(self) -> list[tuple[Any, int]]:
        return [*(self._base._own.items() if self._base else ()), *self._own.items()]

    def apply(self, eqn: Any, operands: Sequence[int], keys: Keys) -> int | None:
        """The number of an equation's (only) result, None when it is not a pointwise function of its operands."""
        name = eqn.primitive.name
        if name in _IDENTITY or (name == "convert_element_type" and _same_type(eqn)):
            return operands[0]
        if name == "custom_jvp_call":
            body = self.program(eqn.params["call_jaxpr"], operands, keys)
            rule = keys.value(_compat.unbatched_rule(_compat.rule_function(eqn.params, "jvp")))
            return None if body is None else self.intern(("custom_jvp", rule, body, *operands))
        if is_call(eqn):
            return self.program(eqn.params["jaxpr"], operands, keys)
        if name in ("integer_pow", "square"):
            return self._power(operands[0], 2 if name == "square" else eqn.params["y"])
        if name in _TURNED:
            name, operands = _TURNED[name], operands[::-1]
        if name in _COMMUTATIVE:
            operands = sorted(operands)
        params = () if not eqn.params else tuple(sorted((k, str(v)) for k, v in eqn.params.items()))
        return self.intern((name, params, *operands))

    def _power(self, x: int, y: int) -> int:
        if not 2 <= y <= 4:
            return self.intern(("integer_pow", y, x))
        out = x
        for _ in range(y - 1):
            out = self.intern(("mul", (), *sorted((out, x))))
        return out

    def program(self, body: Any, operands: Sequence[int], keys: Keys) -> int | None:
        """The number of a nested program's only result."""
        jaxpr, consts = _compat.open_jaxpr(body)  # pyright: ignore[reportGeneralTypeIssues]
        if consts or len(jaxpr.outvars) != 1:
            return None
        env = dict(zip(jaxpr.invars, operands, strict=True))

        def read(v: Any) -> int | None:
            return self.constant(v.val) if isinstance(v, _compat.Literal) else env.get(v)

        for eqn in jaxpr.eqns:
            inner = [read(v) for v in eqn.invars]
            if None in inner or len(eqn.outvars) != 1:
                return None
            number = self.step(eqn, inner, keys)  # pyright: ignore[reportArgumentType]
            if number is None:
                return None
            env[eqn.outvars[0]] = number
        return read(jaxpr.outvars[0])

    def step(self, eqn: Any, operands: Sequence[int], keys: Keys) -> int | None:
        """`apply`, where a broadcast or conversion of a constant is still that constant."""
        if eqn.primitive.name in ("broadcast_in_dim", "convert_element_type") and len(operands) == 1:
            if self.is_constant(operands[0]):
                return operands[0]
            if eqn.primitive.name == "broadcast_in_dim":
                return None
        return self.apply(eqn, operands, keys)


def _same_type(eqn: Any) -> bool:
    return eqn.params["new_dtype"] == eqn.invars[0].aval.dtype
