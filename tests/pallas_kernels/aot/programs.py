"""Programs that the tests compile for a described GPU."""

import jax
import jax.numpy as jnp
from flax import linen as nn

BF16 = jnp.bfloat16


def aval(shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


def gradients(f):
    """The gradients of all arguments; the last argument is the cotangent."""
    return lambda *args: jax.vjp(f, *args[:-1])[1](args[-1])


def gemm_relu(x, w, b):
    return jax.nn.relu(x @ w + b)


def norm_residual(x, residual, scale, bias):
    h = (x + residual).astype(jnp.float32)
    mean = jnp.mean(h, -1, keepdims=True)
    variance = jnp.mean(jnp.square(h - mean), -1, keepdims=True)
    return ((h - mean) * jax.lax.rsqrt(variance + 1e-6) * scale + bias).astype(x.dtype)


def attention(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(512, dtype=BF16)(nn.relu(nn.Dense(2048, dtype=BF16)(x)))


def wgmma_product(a, b):
    """64x64x64 on the tensor cores of one Hopper multiprocessor: a Mosaic kernel as small as they get."""
    from pallas_kernels._mosaic import mosaic

    m = mosaic()
    transforms = (m.gpu.TilingTransform((8, 64)), m.gpu.SwizzleTransform(128))
    tile = m.gpu.SMEM((64, 64), BF16, transforms=transforms)

    def product(a_gmem, b_gmem, out_gmem, a_smem, b_smem, out_smem, barrier):
        m.gpu.copy_gmem_to_smem(a_gmem, a_smem, barrier)
        m.gpu.copy_gmem_to_smem(b_gmem, b_smem, barrier)
        m.gpu.barrier_wait(barrier)

        def multiply(acc):
            m.gpu.wgmma(acc, a_smem, b_smem)
            return acc[...]

        out_smem[...] = m.pl.run_scoped(multiply, m.gpu.ACC((64, 64), jnp.float32)).astype(BF16)
        m.gpu.commit_smem()
        m.gpu.copy_smem_to_gmem(out_smem, out_gmem)
        m.gpu.wait_smem_to_gmem(0)

    return m.gpu.kernel(
        product,
        out_type=jax.ShapeDtypeStruct((64, 64), BF16),
        scratch_types=[tile, tile, tile, m.gpu.Barrier(num_arrivals=2)],
    )(a, b)
