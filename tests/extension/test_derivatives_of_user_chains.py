"""Any chain of tests may be a user's pattern: its derivative is that of the equations, whatever stands in it."""

import jax
import jax.numpy as jnp
import pytest

import aicf_jax
from aicf_jax import Kernel, Pattern
from aicf_jax.attrs import Schema
from aicf_jax.ops import SemanticOp
from aicf_jax.pattern import ELEMENTWISE, GEMM, LAYOUT, SOFTMAX, star
from tests.support import ACTIVATION_ROUNDINGS, assert_same, normal, quick_jit

OP = SemanticOp("chain", Schema(1001, 1, ()), lambda match: {}, lambda op: {})
PATTERN = Pattern("chain", (GEMM, star(ELEMENTWISE | LAYOUT | GEMM | SOFTMAX)), rewrite=OP)
KERNEL = Kernel("same", "chain", ("cpu",), {}, lambda op, *xs: op.reference(*xs), cost_bytes=lambda op: 0)

X, W, S = normal(1, 4, 6, scale=0.5), normal(2, 6, 6, scale=0.5), normal(3) + 2
# Products of 6 terms, at most two of them, and up to four functions, in value and derivative.
ROUNDINGS = 8 * (2 * 6 + 4 * ACTIVATION_ROUNDINGS)

CHAINS = {
    "two_functions": lambda x, w, s: jnp.sin(jnp.tanh(x @ w)),
    "exponential": lambda x, w, s: jnp.exp(x @ w),
    "traced_scale": lambda x, w, s: (x @ w) * s,
    "divided_by_a_traced_number": lambda x, w, s: (x @ w) / s,
    "added_constant": lambda x, w, s: (x @ w) + 3.0,
    "reversed": lambda x, w, s: 3.0 - (x @ w),
    "reciprocal": lambda x, w, s: 2.0 / (5.0 + x @ w),
    "product_of_a_product": lambda x, w, s: (x @ w) @ w,
    "function_between_products": lambda x, w, s: jnp.tanh(x @ w) @ w,
    "softmax": lambda x, w, s: jax.nn.softmax(x @ w, axis=-1),
    "negated_transpose": lambda x, w, s: -jnp.transpose(x @ w),
    "power": lambda x, w, s: (x @ w) ** 3,
    "square_of_itself": lambda x, w, s: (lambda z: z * z)(x @ w),
}


@pytest.mark.parametrize("kernels", [(), (KERNEL,)], ids=["xla", "kernel"])
@pytest.mark.parametrize("f", CHAINS.values(), ids=CHAINS)
def test_derivatives(f, kernels):
    report = aicf_jax.explain(f, X, W, S, patterns=(PATTERN,), kernels=kernels)
    assert report.count("chain") >= 1
    assert report.fusions[0].kernel == ("same" if kernels else "xla")
    tangents = normal(4, 4, 6), normal(5, 6, 6), normal(6)

    def every(h):
        def loss(*xs):
            return (h(*xs) ** 2).sum()

        @quick_jit
        def results(*xs):
            second = jax.grad(lambda x: jnp.sum(jax.grad(loss)(x, *xs[1:]) ** 2))(xs[0])
            return h(*xs), jax.grad(loss, (0, 1, 2))(*xs), jax.jvp(h, xs, tangents), second

        return results(X, W, S)

    assert_same(every(aicf_jax.fuse(f, patterns=(PATTERN,), kernels=kernels)), every(f), roundings=ROUNDINGS)
