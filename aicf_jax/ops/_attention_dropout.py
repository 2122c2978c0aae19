"""Dropout of the weights of attention, read off the computation graph from the product with V up to the softmax."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from aicf_jax.ops._attention_scores import through_casts
from aicf_jax.ops._position_band import Unidentified, number
from aicf_jax.ops._side_arrays import Mask, behind, side


@dataclasses.dataclass(frozen=True)
class Dropout:
    """Weights are multiplied by `factor` where all of `keeps` hold, and by 0 elsewhere."""

    keeps: tuple[Mask, ...]
    factor: float


@dataclasses.dataclass(frozen=True)
class Drawn:
    """``jax.random.bernoulli(key, probability, shape)`` of jax's default generator.

    Attributes:
      argument: of the operation, which the key is.
      probability: of true.
      axes: those that `shape` has, major first.
    """

    argument: int
    probability: float
    axes: tuple[str, ...]


def dropout(graph: Any, v: int, p: int) -> Dropout | None:
    """What lies between the weights `p` and an operand `v` of the product. Raises Unidentified unless it is dropout."""
    factor, keeps = 1.0, []
    while (v := through_casts(graph, v, p)) != p:
        value = graph.values[v]
        if value.op == "select_n" and len(value.args) == 3:
            v, keep = _chosen(graph, value)
            keeps.append(keep)
            continue
        if value.op not in ("mul", "div"):
            raise _unidentified()
        v, other = value.args
        if value.op == "mul" and p not in behind(graph, v):
            v, other = other, v
        found = _multiplier(graph, other)
        if value.op == "div" and found.keeps:
            raise _unidentified()
        factor = factor / found.factor if value.op == "div" else factor * found.factor
        keeps += found.keeps
    if not keeps and factor == 1.0:
        return None
    if not keeps or not math.isfinite(factor):
        raise _unidentified()
    return Dropout(tuple(dict.fromkeys(keeps)), factor)


def _unidentified() -> Unidentified:
    return Unidentified("something between weights and values")


def _chosen(graph: Any, value: Any) -> tuple[int, Mask]:
    """What is kept by a choice between it and 0, and where."""
    predicate, *cases = value.args
    for dropped in (0, 1):
        if number(graph, cases[dropped]) == 0:
            return cases[1 - dropped], Mask(side(graph, predicate), dropped == 0)
    raise _unidentified()


def _multiplier(graph: Any, v: int) -> Dropout:
    """A number, truth values as numbers, or their product."""
    if (known := number(graph, v)) is not None:
        if known == 0 or not math.isfinite(known):
            raise _unidentified()
        return Dropout((), float(known))
    value = graph.values[v]
    if value.op == "convert_element_type":
        (a,) = value.args
        return Dropout((Mask(side(graph, a), True),), 1.0) if graph.values[a].dtype == "bool" else _multiplier(graph, a)
    if value.op == "select_n" and len(value.args) == 3:
        v, keep = _chosen(graph, value)
        found = _multiplier(graph, v)
        return Dropout((keep, *found.keeps), found.factor)
    if value.op not in ("mul", "div"):
        raise _unidentified()
    a, b = (_multiplier(graph, i) for i in value.args)
    if value.op == "div" and b.keeps:
        raise _unidentified()
    return Dropout((*a.keeps, *b.keeps), a.factor / b.factor if value.op == "div" else a.factor * b.factor)


def drawn(graph: Any, keeps: Sequence[Mask]) -> Drawn | None:
    """What `keeps` is drawn as; None where it is anything else than one call of `jax.random.bernoulli`."""
    if len(keeps) != 1 or not keeps[0].seen:
        return None
    value = graph.values[keeps[0].side.value]
    if value.op not in ("gt", "lt"):
        return None
    limit, uniform = value.args if value.op == "gt" else value.args[::-1]
    probability = number(graph, limit)
    bits = _bits_of_uniform(graph, uniform)
    if probability is None or bits is None or not 0 < probability <= 1 or graph.values[limit].dtype != "float32":
        return None
    value = graph.values[bits]
    (key,) = value.args
    if graph.values[key].op != "input":
        return None
    return Drawn(int(graph.values[key].param("argument")), float(probability), value.param("axes"))


def _bits_of_uniform(graph: Any, v: int) -> int | None:
    """The random bits that a float32 number in [0, 1) is made of, as `jax.random.uniform` makes it."""
    for op, known in (("max", 0.0), ("add", 0.0), ("mul", 1.0)):
        v = v if (rest := _without(graph, v, op, known)) is None else rest
    # The numbers from 1 to 2 have the mantissa's bits, and the exponent that 1 has.
    steps = (("sub", 1.0), ("bitcast_convert_type", None), ("or", float(0x3F800000)), ("shift_right_logical", 9.0))
    for op, known in steps:
        if (rest := _without(graph, v, op, known)) is None:
            return None
        v = rest
    return v if graph.values[v].op == "bits" else None


def _without(graph: Any, v: int, op: str, known: float | None) -> int | None:
    """The operand beside a number of an operation; None where it is another."""
    value = graph.values[v]
    if value.op != op or known is None:
        return value.args[0] if value.op == op else None
    a, b = value.args
    if number(graph, b) == known:
        return a
    return b if op in ("max", "add", "mul", "or") and number(graph, a) == known else None
