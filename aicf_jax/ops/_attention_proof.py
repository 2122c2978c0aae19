"""That a match is attention, proved on the whole operation with its axes named; which inputs are Q, K and V."""

from __future__ import annotations

from typing import Any

import mcir
from aicf_jax.errors import Refusal
from aicf_jax.ops import _programs
from aicf_jax.ops._attention_composition import keys_dimension, region_graph, softmax_step
from aicf_jax.ops._semantic import FusedOp
from mcir.graph import multiple_of


def prove(op: FusedOp) -> Refusal | None:
    def no(code: str, expected: str, found: str) -> Refusal:
        return Refusal("attention", "legality", code, f"resembles attention: {found}", expected, found, op.site)

    try:
        graph = region_graph(op)
    except mcir.DeriveError as error:
        return no(error.code, error.expected, error.found)
    if _stops_weights(op):
        return no("stopped_weights", "weights that are differentiated", "weights behind stop_gradient")
    return _axes_refusal(op, graph, no) or _streaming_refusal(op, no)


def _stops_weights(op: FusedOp) -> bool:
    """Whether a step between softmax and result stops differentiation: the backward knows dP's rows from dY."""
    n = len(op.in_avals)
    first, _ = softmax_step(op)
    behind = {n + first}
    for k, step in enumerate(op.steps):
        if not behind.isdisjoint(step.operands) and k != first:
            behind.add(n + k)
            if any(eqn.primitive.name == "stop_gradient" for eqn in step.body.eqns):
                return True
    return False


def _axes_refusal(op: FusedOp, graph: Any, no: Any) -> Refusal | None:
    (p_value, p), (out_value, _) = graph.outputs
    keys = set(p.dims[keys_dimension(op, len(p.dims))])
    if not keys:
        return no("one_key", "a softmax over several keys", "one key")
    values = [i for i, v in enumerate(graph.values) if v.op == "dot"]
    contracted = [set(graph.values[i].param("over")) for i in values]
    if len(values) != 2:
        return no("products", "two products", f"{len(values)}")
    if contracted[1] != keys:
        return no("softmax_axis", "a softmax over the axis contracted with the values", "another axis")
    rows = set(graph.values[p_value].axes) - keys
    if not rows <= set(graph.values[out_value].axes):
        return no("rows_summed", "a result for each row of the weights", "rows summed in the product with the values")
    return None


def _streaming_refusal(op: FusedOp, no: Any) -> Refusal | None:
    try:
        program = _programs.forward(op).program
    except mcir.MCIRError as error:
        code = getattr(error, "code", "derive")
        return no(code, getattr(error, "expected", "a program"), getattr(error, "found", str(error)))
    streams = [s for _, s in program.statements() if isinstance(s, mcir.Stream)]
    reductions = [s for _, s in program.statements() if isinstance(s, mcir.OnlineReduction)]
    if len(program.nests) != 1 or len(streams) != 1 or not any(r.corrected_by for r in reductions):
        return no("not_linear", "weights that enter the product linearly, in one pass over the keys", "several passes")
    return None


def input_names(op: FusedOp) -> dict[int, str]:
    """Q, K and V among the inputs: by the axes they have, whichever operand of its product each is."""
    graph = region_graph(op)
    (_, p), _ = graph.outputs
    keys = set(p.dims[keys_dimension(op, len(p.dims))])
    first, second = (v for v in graph.values if v.op == "dot")
    found: dict[int, str] = {}
    for operand in first.args:
        _name(graph, operand, "K" if keys & set(graph.values[operand].axes) else "Q", found)
    for operand in second.args:
        _name(graph, operand, "V", found)
    return found


def _before(graph: Any, value: int) -> int | None:
    """What a value is in another type, or scaled."""
    is_cast = graph.values[value].op == "convert_element_type"
    return graph.values[value].args[0] if is_cast else multiple_of(graph, value)


def _name(graph: Any, value: int, name: str, found: dict[int, str]) -> None:
    """Names the input that an operand of a product is, if it is one, perhaps scaled."""
    while (before := _before(graph, value)) is not None:
        value = before
    if graph.values[value].op == "input":
        found.setdefault(int(graph.values[value].param("argument")), name)
