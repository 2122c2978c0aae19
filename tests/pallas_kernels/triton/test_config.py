"""What needs no Triton: arguments that are refused, and defaults."""

import subprocess
import sys

import jax
import pytest

from pallas_kernels.gemm_epilogue import portable as gemm
from pallas_kernels.norm import portable as norm


def struct(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gemm.TileConfig(block_m=48), "block_m.*power of two from 16 to 256, found 48"),
        (lambda: gemm.TileConfig(stages=0), "stages.*at least 1, found 0"),
        (lambda: gemm.StripeConfig(groups=0), "groups.*at least 1, found 0"),
        (lambda: norm.RowConfig(3, 1), "rows.*power of two up to 128, found 3"),
        (lambda: norm.RowConfig(1, 1, 0), "steps.*at least 1, found 0"),
        (
            lambda: gemm.forward(struct(4, 4, dtype="float32"), struct(4, 4)),
            r"forward\(a=...\): expected bfloat16",
        ),
        (lambda: gemm.forward(struct(4, 4), struct(5, 4)), r"forward\(b=...\): expected a contracted dimension of 4"),
        (lambda: gemm.forward(struct(0, 4), struct(4, 4)), r"forward\(a=...\): expected no empty dimension"),
        (lambda: gemm.forward(struct(2**16, 16), struct(16, 2**16)), "matrices of at most 2147483647 elements"),
        (
            lambda: gemm.backward(struct(4, 4), struct(4, 5), activation="relu"),
            r"\(dy=...\): expected the residual",
        ),
        (lambda: gemm.backward(struct(4, 4), struct(4, 4), activation="silu", from_output=True), "False for silu"),
        (lambda: norm.forward(struct(2, 8193), eps=1e-5), "rows of 1 to 8192 elements"),
        (lambda: norm.forward(struct(2, 8), eps=1e-5, variance="none"), "expected one of"),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_defaults_fill_the_device():
    assert gemm.default_tiles(1, 8192, 4096, 108).block_n == 256
    assert gemm.default_tiles(1, 512, 512, 108).block_m == 64
    assert norm.default(8192, 8192, sm_count=108) == norm.RowConfig(1, 16)
    assert norm.default(1, 1, sm_count=108).rows == 16
    blocks = -(-8192 // norm.default(8192, 4096, backward=True, sm_count=108).steps)
    assert blocks <= 2 * 108


def test_importing_them_imports_no_triton():
    program = (
        "import sys, aicf_jax, pallas_kernels.norm.portable, pallas_kernels.gemm_epilogue.portable\n"
        "import jax, jax.numpy as jnp\n"
        "f = lambda x, w: jax.nn.relu(x @ w)\n"
        "x = jax.ShapeDtypeStruct((32, 32), jnp.bfloat16)\n"
        "for target in (None, 'cpu', 'cuda', 'h200'):\n"
        "    report = aicf_jax.explain(f, x, x, policy=aicf_jax.Policy(target=target))\n"
        "    assert not [r for r in report.refusals if r.code == 'environment']\n"
        "assert not {'triton', 'jax_triton'} & set(sys.modules), 'imported'\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
