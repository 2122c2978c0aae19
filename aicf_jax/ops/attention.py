"""``attention``: ``softmax(f(Q K^T)) W(V)`` over the keys, with all that may stand in between.

f is what the program does to the scores (scale, mask, bias, softcap, casts), W what it does to the weights (dropout,
casts); both are the user's own equations. Values that f and W need and that are cheaper to compute again than to read
(masks from positions, padding or segments, random bits) become part of the operation (`extend`).

That it is attention is proved on the operation as a whole (`prove`): with its axes named, the one axis that the softmax
normalizes over must be the one contracted with the values, whatever transposes and reshapes say.

Backward, from the results and the log-sum-exp of each row, kept as maximum m and sum l so that neither large fills nor
large scores cost precision::

    P = exp(a (X - m)) / l      dV = W'(P)^T dY      dP = W'^T(dY V^T)
    dX = a P (dP - delta)       delta = sum_e dY Y   dQ, dK, d... = f^T(dX)

Dao et al., "FlashAttention", 2022; Rabe and Staats, "Self-attention does not need O(n^2) memory", 2021.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import mcir
from aicf_jax import _compat
from aicf_jax.attrs import Field, Schema
from aicf_jax.errors import Refusal
from aicf_jax.flags import OpFlags
from aicf_jax.legality import refuse
from aicf_jax.ops._absorb import absorb
from aicf_jax.ops._semantic import Composite, FusedOp, SemanticOp, Step
from aicf_jax.pattern import Match

KEEP = ("all", "where_true", "where_false")

FIELDS = (
    Field("axis", "int"),  # of the scores, counted from the end: the keys
    Field("base", "float"),  # a in exp(a x)
    Field("keep", "enum", KEEP),  # a softmax with `where=`
    Field("zeroed", "int"),  # ... that is 0, not NaN, where a row has no elements
    Field("guarded", "int"),  # a maximum that is not finite counts as 0
)

SCHEMA = Schema(kind_id=3, schema_id=1, fields=FIELDS)

_ACCUMULATE = {"bfloat16": "float32", "float16": "float32"}


def _attributes(match: Match) -> Mapping[str, object]:
    softmax = match.first(OpFlags.IS_SOFTMAX)
    if softmax is None:
        raise ValueError("attention stands for a softmax between two products: the sequence needs SOFTMAX")
    keep = {None: "all", True: "where_true", False: "where_false"}[softmax.attr("keep_when")]
    return {
        # From the end: `batched_op` adds dimensions in front.
        "axis": softmax.attr("axis") - match.graph.values[softmax.inputs[0]].aval.ndim,
        "base": softmax.attr("base"),
        "keep": keep,
        "zeroed": int(softmax.attr("zeroed")),
        "guarded": int(softmax.attr("guarded")),
    }


def _check(match: Match) -> Refusal | None:
    for node in match.nodes:
        shape = match.graph.values[node.outputs[0]].aval.shape
        if 0 in shape:
            return refuse(match, "empty", "arrays with elements", f"{node.op} of shape {shape}", node)
    return None


def _requirements(op: FusedOp) -> Mapping[str, Hashable]:
    q, k = (op.in_avals[s] for s in op.steps[_products(op)[0]].operands)
    return {
        "operand_dtypes": (str(q.dtype), str(k.dtype)),
        "output_dtype": str(op.out_avals[0].dtype),
        "steps": tuple(step.name for step in op.steps),
    }


# -- the operation as a composition ---------------------------------------------------------------------------


def _products(op: FusedOp) -> tuple[int, int]:
    """Positions of the score product and of the value product among the steps."""
    first, second = (k for k, step in enumerate(op.steps) if step.role == "bilinear")
    return first, second


def _softmax_step(op: FusedOp) -> tuple[int, Step]:
    return next((k, step) for k, step in enumerate(op.steps) if step.role == "softmax")


def evaluate(op: FusedOp, inputs: Sequence[Any], slot: int, given: Mapping[int, Any]) -> Any:
    """The value of one slot by the equations, with some slots given. What is normalized late stays as it is given."""
    values: dict[int, Any] = {**dict(enumerate(inputs)), **given}
    n = len(op.in_avals)

    def get(s: int) -> Any:
        if s not in values:
            step = op.steps[s - n]
            if step.role == "normalize" and given:
                values[s] = get(step.operands[0]).astype(step.body.outvars[0].aval.dtype)
            else:
                (values[s],) = _compat.as_function(step.body)(*map(get, step.operands))
        return values[s]

    return get(slot)


def _scores_and_mask(op: FusedOp, inputs: Sequence[Any]) -> tuple[Any, Any]:
    """X, and which elements take part (None: all)."""
    _, step = _softmax_step(op)
    x = evaluate(op, inputs, step.operands[0], {})
    keep = op.blob["keep"]
    if keep == "all":
        return x, None
    mask = _beside_scores(step, evaluate(op, inputs, step.operands[1], {}))
    mask = jnp.broadcast_to(mask, x.shape)
    return x, mask if keep == "where_true" else ~mask


def _beside_scores(step: Step, mask: Any) -> Any:
    """A softmax's mask with its dimensions where the equations put them."""
    x, var = step.body.invars
    for eqn in step.body.eqns:
        if var.aval.ndim == x.aval.ndim:
            break
        if eqn.primitive.name in ("broadcast_in_dim", "reshape") and list(eqn.invars) == [var]:
            mask, (var,) = eqn.primitive.bind(mask, **eqn.params), eqn.outvars
    if var.aval.ndim != x.aval.ndim:
        raise ValueError(f"a mask of shape {var.aval.shape} beside scores of shape {x.aval.shape}")
    return mask


def _wide(x: Any, mask: Any) -> Any:
    x = x.astype(_ACCUMULATE.get(str(x.dtype), x.dtype))
    return x if mask is None else jnp.where(mask, x, -jnp.inf)


def _finite(m: Any) -> Any:
    return jnp.where(jnp.isfinite(m), m, 0)


@jax.custom_jvp
def _at_most(x: Any, m: Any) -> Any:
    """X, which is no larger than m but for rounding; with the derivative of x everywhere, also where x is m."""
    return jnp.minimum(x, m)


@_at_most.defjvp
def _at_most_jvp(primals: Any, tangents: Any) -> Any:
    return _at_most(*primals), tangents[0]


def _exponential(op: FusedOp, x: Any, m: Any) -> Any:
    difference = x - jnp.expand_dims(_finite(m), op.blob["axis"])
    base = op.blob["base"]
    return jnp.exp(difference if base == 1.0 else difference * jnp.asarray(base, difference.dtype))


def save(op: FusedOp, inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """``(results, [m, l])``: the row maximum of X and ``l = sum_j exp(a (x_j - m))``, in float32 or wider."""
    axis = op.blob["axis"]
    x, mask = _scores_and_mask(op, inputs)
    x = _wide(x, mask)
    # P does not depend on m, so m needs no derivative. That of a maximum would be 0/0 where the compiler rounds x
    # differently for the maximum and for the comparison with it.
    m = jax.lax.stop_gradient(jnp.max(x, axis=axis))
    total = jnp.sum(_exponential(op, x, m), axis=axis)
    if not op.blob["guarded"]:
        # inf - inf: an infinite score makes its whole row NaN.
        total = jnp.where(m == jnp.inf, jnp.nan, total)
    return [evaluate(op, inputs, s, {}) for s in op.results], [m, total]


def weights(op: FusedOp, inputs: Sequence[Any], m: Any, total: Any) -> Any:
    """P from the scores, recomputed, and the log-sum-exp of each row."""
    x, mask = _scores_and_mask(op, inputs)
    x = _wide(x, mask)
    if not op.blob["guarded"]:
        # x is computed anew, rounded otherwise perhaps, and no larger than m all the same.
        x = _at_most(x, jnp.expand_dims(m, op.blob["axis"]))
    p = _exponential(op, x, m) * jnp.expand_dims(1 / total, op.blob["axis"])
    if mask is not None and op.blob["zeroed"]:
        p = jnp.where(mask, p, 0)
    return p


def cotangent(
    op: FusedOp, inputs: Sequence[Any], results: Sequence[Any], saved: Sequence[Any], ct: Any, wanted: Sequence[int]
) -> list[Any]:
    """See the module's docstring. X and P are computed again; no array of their size is kept."""
    k, step = _softmax_step(op)
    slot = len(op.in_avals) + k
    chosen = [inputs[i] for i in wanted]

    def given(xs: Sequence[Any]) -> list[Any]:
        replaced = dict(zip(wanted, xs, strict=True))
        return [replaced.get(i, x) for i, x in enumerate(inputs)]

    x, pull_scores = jax.vjp(lambda *xs: evaluate(op, given(xs), step.operands[0], {}), *chosen)
    p = weights(op, inputs, *saved)
    dtype = step.body.outvars[0].aval.dtype

    def after(p: Any, *xs: Any) -> Any:
        return evaluate(op, given(xs), op.results[0], {slot: p})

    _, pull_after = jax.vjp(after, p.astype(dtype), *chosen)
    dp, *direct = pull_after(ct)
    delta = _rows(op, results[0].astype(p.dtype) * ct.astype(p.dtype))
    dx = p * (dp.astype(p.dtype) - delta)
    if op.blob["base"] != 1.0:
        dx = dx * jnp.asarray(op.blob["base"], dx.dtype)
    through = pull_scores(dx.astype(x.dtype))
    return [a + b for a, b in zip(through, direct, strict=True)]


def _rows(op: FusedOp, product: Any) -> Any:
    """A sum of an array like the result over all axes but those of the rows of P, laid out beside P."""
    rows, p_dims, out_dims, sizes = _layout(op)
    product = product.reshape([sizes[a] for d in out_dims for a in d])
    flat = [a for d in out_dims for a in d]
    product = jnp.sum(product, axis=tuple(k for k, a in enumerate(flat) if a not in rows))
    left = [a for a in flat if a in rows]
    product = product.transpose([left.index(a) for d in p_dims for a in d if a in rows])
    return product.reshape([math.prod(sizes[a] for a in d if a in rows) for d in p_dims])


@functools.lru_cache(maxsize=512)
def _layout(op: FusedOp) -> tuple[set[str], Any, Any, dict[str, int]]:
    """``(axes of P's rows, axes of P's dimensions, of the result's dimensions, sizes)``."""
    graph = region_graph(op)
    (_, p), (_, out) = graph.outputs
    rows = {a for k, d in enumerate(p.dims) if k != op.blob["axis"] % len(p.dims) for a in d}
    return rows, p.dims, out.dims, graph.axes


@functools.lru_cache(maxsize=512)
def region_graph(op: FusedOp) -> Any:
    """The computation graph of the operation, with P and the result as its outputs."""
    k, _ = _softmax_step(op)
    slot = len(op.in_avals) + k

    def f(*inputs: Any) -> tuple[Any, Any]:
        slots = list(inputs)
        for step in op.steps:
            slots.extend(_compat.as_function(step.body)(*[slots[i] for i in step.operands]))
        return slots[slot], slots[op.results[0]]

    return mcir.trace(f, *op.in_avals)


# -- the proof ------------------------------------------------------------------------------------------------


def _prove(op: FusedOp) -> Refusal | None:
    def no(code: str, expected: str, found: str) -> Refusal:
        return Refusal("attention", "legality", code, f"resembles attention: {found}", expected, found, op.site)

    try:
        graph = region_graph(op)
    except mcir.DeriveError as error:
        return no(error.code, error.expected, error.found)
    return _axes_refusal(op, graph, no) or _streaming_refusal(op, no)


def _axes_refusal(op: FusedOp, graph: Any, no: Any) -> Refusal | None:
    (p_value, p), (out_value, _) = graph.outputs
    keys = set(p.dims[op.blob["axis"] % len(p.dims)])
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
    from aicf_jax.kernels import _streamed

    try:
        program = _streamed.forward(op).program
    except mcir.MCIRError as error:
        code = getattr(error, "code", "derive")
        return no(code, getattr(error, "expected", "a program"), getattr(error, "found", str(error)))
    streams = [s for _, s in program.statements() if isinstance(s, mcir.Stream)]
    reductions = [s for _, s in program.statements() if isinstance(s, mcir.OnlineReduction)]
    if len(program.nests) != 1 or len(streams) != 1 or not any(r.corrected_by for r in reductions):
        return no("not_linear", "weights that enter the product linearly, in one pass over the keys", "several passes")
    return None


def _unfused_bytes(op: FusedOp, platform: str) -> int:
    """Inputs and results once, and each larger intermediate written and read; what fits in the cache stays there."""
    from aicf_jax.kernels import _streamed
    from aicf_jax.select import nbytes

    outside = sum(nbytes(a) for a in (*op.in_avals, *op.out_avals))
    cache = _streamed.cache_bytes(platform)
    avals = op.slot_avals[len(op.in_avals) :]
    return outside + sum(2 * nbytes(a) for a in avals if nbytes(a) > cache)


COMPOSITE = Composite(save, cotangent, "attention_grad", ("Y", "m", "l"))

#: Names of the region's inputs in prints.
NAMES = (("bilinear", 0, "Q"), ("bilinear", 1, "K"))

OP = SemanticOp(
    "attention",
    SCHEMA,
    _attributes,
    _requirements,
    _check,
    names=NAMES,
    extend=absorb,
    prove=_prove,
    composite=COMPOSITE,
    any_operands=True,
    unfused_bytes=_unfused_bytes,
)
