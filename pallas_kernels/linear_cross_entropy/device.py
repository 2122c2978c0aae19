"""Vocabulary losses as `DeviceCase`s: the kernels, what XLA makes of the same equations, and those in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.device_case import CUBLASLT, DeviceCase, nbytes, tolerance
from pallas_kernels.linear_cross_entropy import reference
from pallas_kernels.linear_cross_entropy.backward import backward
from pallas_kernels.linear_cross_entropy.forward import forward


def _problem(rows: int, depth: int, classes: int, trans_w: bool, dtype: str) -> Any:
    def arrays(key: jax.Array) -> tuple[Any, ...]:
        kx, kw, kt = jax.random.split(key, 3)
        x = jax.random.normal(kx, (rows, depth)).astype(dtype)
        w = jax.random.normal(kw, (classes, depth) if trans_w else (depth, classes)) * depth**-0.5
        return x, w.astype(dtype), jax.random.randint(kt, (rows,), 0, classes)

    return arrays


def _losses(x: Any, w: Any, labels: Any, trans_w: bool) -> Any:
    """As people write it, with logits in float32."""
    logits = jnp.matmul(x, w.T if trans_w else w).astype(jnp.promote_types(x.dtype, jnp.float32))
    return jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]


def forward_case(rows: int, depth: int, classes: int, trans_w: bool = False, dtype: str = "bfloat16") -> DeviceCase:
    """The cross entropy of each row. Logits have a variance of 1."""
    arrays = _problem(rows, depth, classes, trans_w, dtype)

    def kernel(x: Any, w: Any, labels: Any) -> tuple[Any, ...]:
        found = forward(x, w, labels, trans_w=trans_w)
        return (found.m + jnp.log(found.l) - found.taken,)

    def unfused(x: Any, w: Any, labels: Any) -> tuple[Any, ...]:
        return (_losses(x, w, labels, trans_w),)

    def exact(x: Any, w: Any, labels: Any) -> tuple[Any, ...]:
        m, l, taken, _ = reference.forward(x, w, labels, trans_w=trans_w, dtype=jnp.float64)
        return (m + jnp.log(l) - taken,)

    avals = jax.eval_shape(arrays, jax.eval_shape(lambda: jax.random.key(0)))
    return DeviceCase(
        name=f"{dtype} {rows}x{depth}x{classes}{' W transposed' if trans_w else ''}",
        arrays=arrays,
        kernel=kernel,
        unfused=unfused,
        reference=exact,
        # Sums over the depth in float32; exponentials of the GPU are off by 2^-22.
        tolerances=(tolerance("float32", depth) + 2.0**-20,),
        flops=2 * rows * depth * classes,
        bytes=nbytes(avals, jax.eval_shape(unfused, *avals)),
        libraries={"cuBLASLt": CUBLASLT},
    )


def backward_case(rows: int, depth: int, classes: int, trans_w: bool = False, dtype: str = "bfloat16") -> DeviceCase:
    """The mean of the rows' cross entropies with its gradients: four products, where XLA has three and the logits."""
    arrays = _problem(rows, depth, classes, trans_w, dtype)

    def kernel(x: Any, w: Any, labels: Any) -> tuple[Any, ...]:
        found = forward(x, w, labels, trans_w=trans_w)
        each = jnp.full((rows,), 1.0 / rows, jnp.float32)
        dx, dw = backward(x, w, labels, found.m, each / found.l, -each, trans_w=trans_w)
        return jnp.mean(found.m + jnp.log(found.l) - found.taken), dx, dw

    def unfused(x: Any, w: Any, labels: Any) -> tuple[Any, ...]:
        value, grads = jax.value_and_grad(lambda x, w: jnp.mean(_losses(x, w, labels, trans_w)), (0, 1))(x, w)
        return value, *grads

    def exact(x: Any, w: Any, labels: Any) -> tuple[Any, ...]:
        return unfused(x.astype(jnp.float64), w.astype(jnp.float64), labels)

    avals = jax.eval_shape(arrays, jax.eval_shape(lambda: jax.random.key(0)))
    loose = 2 * float(jnp.finfo(dtype).eps)
    return DeviceCase(
        name=f"{dtype} {rows}x{depth}x{classes}{' W transposed' if trans_w else ''} and gradients",
        arrays=arrays,
        kernel=kernel,
        unfused=unfused,
        reference=exact,
        # The gradient of the logits is rounded before it is multiplied.
        tolerances=(
            tolerance("float32", depth) + 2.0**-20,
            tolerance(dtype, classes) + loose,
            tolerance(dtype, rows) + loose,
        ),
        flops=6 * rows * depth * classes,
        bytes=nbytes(avals, jax.eval_shape(unfused, *avals)),
        libraries={"cuBLASLt": CUBLASLT},
    )
