"""Random chains of operations around matrix products, with random consumers and outputs of intermediates.

Whatever the matcher makes of them, the fused program equals the unfused one in value, gradient and tangent.
"""

import dataclasses

import jax
import jax.numpy as jnp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import aicf_jax
from tests.support import ACTIVATION_ROUNDINGS, ACTIVATIONS, assert_same, dyadic
from tests.transformations import transformed

WIDTH = 4
# In low precision a rounding may push a pre-activation across a kink, which changes a gradient by O(1) and is nobody's
# fault: kinks are drawn in float32 only, and not together with casts.
KINKED = {"relu", "leaky_relu", "elu", "select"}


@dataclasses.dataclass(frozen=True)
class Step:
    """One operation on the value at `source`; `other` is a second operand: an earlier value or a parameter."""

    kind: str
    source: int
    other: int


UNARY = {name: act for name, act in ACTIVATIONS.items() if name != "none"} | {
    "double": lambda y: y * 2,
    "negate": jnp.negative,
    "sine": jnp.sin,
    "cast_down_and_up": lambda y: y.astype(jnp.bfloat16).astype(y.dtype),
    "reshape_there_and_back": lambda y: y.reshape(-1).reshape(y.shape),
    "transposed_tanh": lambda y: jnp.swapaxes(jnp.tanh(jnp.swapaxes(y, 0, -1)), 0, -1),
    "checkpoint": jax.checkpoint(jnp.tanh),
    "inner_jit": jax.jit(jax.nn.silu),
    "stop_gradient_factor": lambda y: jnp.sin(y) * jax.lax.stop_gradient(y),
}
BINARY = {
    "add": jnp.add,
    "subtract": jnp.subtract,
    "multiply": lambda y, z: y * jnp.cos(z),
    "select": lambda y, z: jnp.where(jnp.abs(z) < 0.7, y, z),
}
WITH_PARAMETERS = {
    "matmul": lambda y, p: y @ p["w"],
    "matmul_transposed": lambda y, p: y @ p["w"].T,
    "einsum": lambda y, p: jnp.einsum("...d,df->...f", y, p["w"]),
    "bias": lambda y, p: y + p["b"],
    "bias_first": lambda y, p: p["b"] + y,
    "bias_subtracted": lambda y, p: y - p["b"],
    "scale": lambda y, p: y * p["b"],
    "dense_relu_like": lambda y, p: jnp.tanh(y @ p["w"] + p["b"]),
}
MATMULS = {"matmul", "matmul_transposed", "einsum", "dense_relu_like"}


@dataclasses.dataclass(frozen=True)
class Chain:
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]

    def __call__(self, x, params):
        values = [x]
        for step in self.steps:
            y = values[step.source]
            if step.kind in UNARY:
                y = UNARY[step.kind](y)
            elif step.kind in BINARY:
                y = BINARY[step.kind](y, values[step.other % len(values)])
            else:
                y = WITH_PARAMETERS[step.kind](y, params[step.other % len(params)])
            values.append(y)
        return [values[i] for i in self.outputs]

    @property
    def roundings(self):
        return sum(WIDTH if step.kind in MATMULS else ACTIVATION_ROUNDINGS // 2 for step in self.steps)


@st.composite
def chains(draw, kinks):
    excluded = {"cast_down_and_up"} if kinks else KINKED
    kinds = [k for k in (*UNARY, *BINARY, *WITH_PARAMETERS) if k not in excluded]
    steps = [Step(draw(st.sampled_from(sorted(MATMULS))), 0, draw(st.integers(0, 1)))]
    for i in range(draw(st.integers(1, 6))):
        # mostly the newest value, so chains form; sometimes an older one, which then has a second consumer
        source = i + 1 if draw(st.integers(0, 3)) else draw(st.integers(0, i + 1))
        steps.append(Step(draw(st.sampled_from(kinds)), source, draw(st.integers(0, i + 1))))
    newest = len(steps)
    extra = draw(st.lists(st.integers(1, newest), max_size=2))
    return Chain(tuple(steps), (newest, *extra))


@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    data=st.data(),
    dtype=st.sampled_from([jnp.float32, jnp.float32, jnp.bfloat16, jnp.float16]),
    shape=st.sampled_from([(3, WIDTH), (1, WIDTH), (2, 3, WIDTH), (WIDTH, WIDTH), (7, WIDTH), (WIDTH,)]),
)
def test_fused_chain_equals_unfused_chain(data, dtype, shape):
    chain = data.draw(chains(kinks=dtype == jnp.float32 and data.draw(st.booleans())))
    x = dyadic(1, *shape, dtype=dtype)
    # weights of at most 1/4, so that a product is no larger than its input and no step amplifies roundings much
    params = [
        {"w": dyadic(2 + i, WIDTH, WIDTH, dtype=dtype) * 0.25, "b": dyadic(5 + i, WIDTH, dtype=dtype)} for i in range(2)
    ]

    # tolerance: unit roundoff x roundings in the chain (a product: 4 terms; any other step: at most an activation),
    # forward and backward. In low precision the low-precision roundings are one for each step, two passes.
    low = dtype != jnp.float32
    roundings = 2 * (len(chain.steps) + 1 if low else chain.roundings)
    lowest = jnp.bfloat16 if any(step.kind == "cast_down_and_up" for step in chain.steps) else dtype
    fused = aicf_jax.fuse(chain)
    names, args = ("vjp", "jvp"), (x, params)
    assert_same(transformed(names, fused, args), transformed(names, chain, args), roundings=roundings, dtype=lowest)
