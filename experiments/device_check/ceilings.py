"""What the GPU reaches at best: bytes a second when copying, operations a second in a large product of random data.

Zeros would make a product look faster: a GPU that toggles fewer bits clocks higher.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from experiments.device_check.timing import Clock, medians_s
from pallas_kernels.device_case import CUBLASLT

#: Elements that are copied, and the sides of the product.
COPIED, SIDE = 1 << 29, 8192


def measure(clock: Clock, copied: int = COPIED, side: int = SIDE) -> dict[str, Any]:
    """``{copy_bytes_per_s, product_flops_per_s, ...}`` of bfloat16; the product by the faster of XLA and cuBLASLt."""
    x = jax.random.normal(jax.random.key(0), (copied,), jnp.bfloat16)
    copy = medians_s({"copy": jax.jit(jnp.negative)}, (x,), clock)["copy"]
    del x
    keys = jax.random.split(jax.random.key(1))
    a, b = (jax.random.normal(k, (side, side), jnp.bfloat16) for k in keys)
    programs = {"XLA": jax.jit(jnp.matmul), "cuBLASLt": with_options(jnp.matmul, CUBLASLT)}
    products = medians_s(programs, (a, b), clock)
    best = min(products, key=lambda name: products[name]["median_s"])
    return {
        "copy_bytes_per_s": 4 * copied / copy["median_s"],
        "product_flops_per_s": 2 * side**3 / products[best]["median_s"],
        "product_by": best,
        "copy": copy,
        "products": products,
    }


def with_options(f: Any, options: Any) -> Any:
    """`jax.jit` of a function with options of XLA, those left out that are the GPU's where there is none."""
    gpu = jax.default_backend() == "gpu"
    return jax.jit(
        f, compiler_options={k: v for k, v in options.items() if gpu or not k.startswith("xla_gpu_")} or None
    )
