"""What the two attention patterns share: what may stand around the softmax, and what resembles them."""

from __future__ import annotations

import dataclasses

from aicf_jax.flags import OpFlags
from aicf_jax.pattern import (
    BATCHED_GEMM,
    BROADCAST,
    ELEMENTWISE,
    GEMM,
    LAYOUT,
    MASK,
    NEAR_SOFTMAX,
    SCALE,
    TRANSPOSE,
    NearMiss,
    Test,
    shared,
    star,
)

#: Between the score product and the softmax: scale, mask, bias, softcap, casts, layout.
SCORES = star(ELEMENTWISE | LAYOUT | BROADCAST)
#: Between the softmax and the value product: dropout, casts, layout.
WEIGHTS = star(ELEMENTWISE | LAYOUT | BROADCAST)
#: Behind the value product: the order of dimensions that the program wants is the one to write the result in. No other
#: layout, since a reshape may split the axis of the queries.
RESULT = star(TRANSPOSE)

#: Scores and weights that others use too: the chain is followed all the same, to say what stands in the way.
_SHARED_SCORES = (shared(GEMM), star(shared(SCORES)))


def _and(inner: Test, flag: OpFlags) -> Test:
    """The same test, for nodes that have one more bit."""
    return dataclasses.replace(inner, alternatives=tuple((r | int(flag), f) for r, f in inner.alternatives))


_ESCAPING = _and(ELEMENTWISE | LAYOUT | BROADCAST, OpFlags.ESCAPES)


def near_misses(softmax: Test) -> tuple[NearMiss, ...]:
    """Rows for a pattern whose weights are computed by a node that passes `softmax`."""
    return (
        NearMiss(
            "weights_returned",
            (*_SHARED_SCORES, shared(_and(softmax, OpFlags.ESCAPES)), star(shared(WEIGHTS)), GEMM),
            expected="the attention weights are used by the product with the values only",
            found="the attention weights are also a result of the program",
        ),
        NearMiss(
            "weights_returned",
            (*_SHARED_SCORES, shared(softmax), star(shared(WEIGHTS)), shared(_ESCAPING), WEIGHTS, GEMM),
            expected="the attention weights are used by the product with the values only",
            found="the attention weights are also a result of the program",
        ),
        NearMiss(
            "scores_reused",
            (*_SHARED_SCORES, softmax, WEIGHTS, GEMM),
            expected="the scores are used by the softmax only",
            found="the scores are used elsewhere too",
        ),
        # The node marked as a near miss says which one it is.
        NearMiss("almost_softmax", (*_SHARED_SCORES, shared(NEAR_SOFTMAX), star(shared(WEIGHTS)), GEMM)),
    )


#: Batched products with a scale or a mask in between: weights by sigmoid or relu, retention, linear attention.
NOT_SOFTMAX = NearMiss(
    "not_softmax",
    (BATCHED_GEMM, SCORES, SCALE | MASK, WEIGHTS, BATCHED_GEMM),
    expected="a softmax between the two products",
    found="other weights",
)
