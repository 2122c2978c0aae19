"""Attention through Triton: in its interpreter against float64, and compiled for Ampere and Ada.

The interpreter rounds to bfloat16 towards zero, a GPU to the nearest: bfloat16 has twice the error here.
"""

import importlib
import re
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _triton
from pallas_kernels.attention import portable, reference

HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(
    not HAS_TRITON, reason="needs Triton, which the extra `gpu` installs for Python 3.12 and later"
)
TILE = portable.TileConfig(16, 16, 1, 1)
TILES = portable.BackwardConfig(TILE, TILE, 16)


def struct(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: portable.TileConfig(24, 16), "block_q.*power of two from 16 to 256, found 24"),
        (lambda: portable.TileConfig(16, 16, stages=0), "stages.*at least 1, found 0"),
        (lambda: portable.BackwardConfig(TILE, TILE, 0), "rows.*power of two from 1 to 256, found 0"),
        (lambda: forward(q=struct(1, 4, 1, 16, dtype="float32")), r"forward\(q=...\): expected bfloat16 or float16"),
        (lambda: forward(q=struct(1, 4, 1, 257)), r"\(q=...\): expected heads of at most 256"),
        (lambda: forward(k=struct(1, 0, 1, 16)), r"\(k=...\): expected four dimensions, none of them empty"),
        (lambda: forward(k=struct(1, 4, 2, 16)), r"\(k=...\): expected a number of heads that divides"),
        (lambda: forward(v=struct(1, 5, 1, 16)), r"\(v=...\): expected the sizes of k"),
        (lambda: forward(scale=-1.0), "scale.*a positive number"),
        (lambda: forward(upper=-1), r"\(upper=...\): expected a key for each query"),
        (lambda: forward(lower=1), r"\(lower=...\): expected a key for each query"),
        (lambda: forward(layouts=("bsd",) * 4), "layouts.*four of bshd, bhsd"),
        (lambda: backward(m=struct(1, 1, 4)), r"backward\(m=...\): expected float32 \(1, 1, 4\)"),
        (lambda: backward(dout=struct(1, 1, 4, 16)), r"backward\(dout=...\): expected bfloat16 \(1, 4, 1, 16\)"),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


X, ROWS = struct(1, 4, 1, 16), struct(1, 1, 4, dtype="float32")


def forward(q=X, k=X, v=X, **options):
    return portable.forward(q, k, v, **options)


def backward(m=ROWS, dout=X):
    return portable.backward(X, X, X, X, m, ROWS, dout)


# -- in the interpreter ------------------------------------------------------------------------------------

MIXED = ("bhsd", "bshd", "bhsd", "bshd")
# Name -> (queries, keys, heads, heads of K, length of heads), options. The first two are the quick ones.
CASES = {
    "to the last key, shared heads, mixed layouts": ((40, 56, 2, 1, 20), {"upper": 16, "layouts": MIXED}),
    "window, softcap": ((33, 48, 1, 1, 16), {"lower": -5, "upper": 9, "softcap": 2.0, "dtype": "bfloat16"}),
    "no limits": ((32, 48, 2, 2, 16), {}),
    "causal": ((40, 40, 2, 1, 16), {"upper": 0, "dtype": "bfloat16"}),
    "causal to the first key": ((90, 40, 1, 1, 16), {"upper": 3}),
    "lower limit alone": ((40, 90, 1, 1, 16), {"lower": 50}),
    "lower limit behind": ((48, 24, 1, 1, 16), {"lower": -30}),
    "window far from the diagonal": ((48, 100, 1, 1, 16), {"lower": 20, "upper": 40}),
    "keys that nobody sees": ((20, 90, 1, 1, 16), {"upper": 3}),
    "one key": ((17, 1, 1, 1, 16), {}),
    "one query": ((1, 50, 1, 1, 16), {}),
    "large scores": ((32, 32, 1, 1, 16), {"scale": 10.0}),
    "several batches, wide blocks": ((70, 70, 4, 2, 40), {"upper": 0, "batch": 2, "wide": True}),
}


def arrays(sizes, batch, dtype, layouts):
    queries, keys, heads, kv_heads, depth = sizes
    rng = np.random.default_rng(0)
    found = []
    for (length, h), layout in zip(
        ((queries, heads), *((keys, kv_heads),) * 2, (queries, heads)), layouts, strict=True
    ):
        of = {"b": batch, "s": length, "h": h, "d": depth}
        found.append(jnp.asarray(rng.standard_normal([of[d] for d in layout]).astype(jnp.dtype(dtype))))
    return found


@needs_triton
@pytest.mark.parametrize("name", [n if k < 2 else pytest.param(n, marks=pytest.mark.slow) for k, n in enumerate(CASES)])
def test_values_and_gradients(name):
    sizes, options = CASES[name]
    options = {"scale": 0.25, "layouts": ("bshd",) * 4, **options}
    dtype, batch, wide = (options.pop(n, d) for n, d in (("dtype", "float16"), ("batch", 1), ("wide", False)))
    *given, dout = arrays(sizes, batch, dtype, options["layouts"])
    tile = portable.TileConfig(32, 64, 1, 1) if wide else TILE
    got = portable.forward(*given, **options, with_statistics=True, config=tile, interpret=True)

    def exact(*xs):
        return reference.forward(*xs, **options, dtype=jnp.float64)

    with jax.enable_x64(True):
        wide_arrays = [x.astype(jnp.float64) for x in given]
        want = jax.jit(exact)(*wide_arrays)
        _, pull = jax.vjp(lambda *xs: exact(*xs)[0], *wide_arrays)
        gradients = jax.jit(pull)(dout.astype(jnp.float64))
    unit = {"bfloat16": 2.0**-7, "float16": 2.0**-11}[dtype]
    # Weights are rounded before the product with V, and the result is. Scores are rounded to float32: their errors are
    # errors of the exponent.
    scores = 4 * float(np.abs(want[1]).max()) * 2.0**-24
    assert_near(got[0], want[0], 2 * unit + scores)
    assert_near(got[1], want[1], 2.0**-22)
    assert_near(got[2], want[2], (sizes[1] + 8) * 2.0**-24 + scores)
    kept = [jnp.asarray(np.asarray(x)).astype(t) for x, t in zip(want, (dtype, "float32", "float32"), strict=True)]
    tiles = portable.BackwardConfig(tile, tile, 16) if wide else TILES
    found = portable.backward(*given, *kept, dout, **options, config=tiles, interpret=True)
    # O is rounded, and so is what the weights' slopes are computed from; slopes are rounded, and the result.
    size = max(float(np.abs(x).max()) for x in gradients)
    for a, b in zip(found, gradients, strict=True):
        assert a.dtype == jnp.dtype(dtype)
        assert_near(a, b, 8 * unit + 2 * scores, size)


def assert_near(got, want, bound, size=0.0):
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    assert got.shape == want.shape
    assert np.max(np.abs(got - want)) <= bound * max(size, float(np.abs(want).max()))


@needs_triton
def test_gradients_are_the_same_bits_on_every_run():
    *given, dout = arrays((20, 20, 1, 1, 16), 1, "float16", ("bshd",) * 4)
    out, m, total = portable.forward(*given, with_statistics=True, config=TILE, interpret=True)
    runs = [portable.backward(*given, out, m, total, dout, config=TILES, interpret=True) for _ in "ab"]
    for a, b in zip(*runs, strict=True):
        np.testing.assert_array_equal(a, b)


@needs_triton
@pytest.mark.slow
def test_values_that_are_no_numbers_stay_in_their_rows():
    q, k, v, _ = arrays((20, 20, 1, 1, 16), 1, "float16", ("bshd",) * 4)
    q = q.at[0, 3].set(jnp.nan).at[0, 7].set(jnp.inf)
    (out,) = portable.forward(q, k, v, upper=0, config=TILE, interpret=True)
    is_number = np.isfinite(np.asarray(out, np.float32)).all((0, 2, 3))
    np.testing.assert_array_equal(is_number, ~np.isin(np.arange(20), (3, 7)))


# -- compiled ----------------------------------------------------------------------------------------------


def compiled(name, pointers, constants, capability, config):
    """``(PTX, bytes of spills, shared memory)``."""
    triton = importlib.import_module("triton")
    kernel = getattr(importlib.import_module(portable._MODULE), name)
    names = [p.name for p in kernel.params]
    constants = {n: constants.get(n) for n in names if n not in pointers}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in pointers}
    found = triton.compile(
        triton.compiler.ASTSource(kernel, {n: pointers.get(n, "constexpr") for n in names}, constants, aligned),
        target=triton.backends.compiler.GPUTarget("cuda", capability, 32),
        options={"num_warps": config.warps, "num_stages": config.stages, "enable_fp_fusion": True},
    )
    command = [triton.knobs.nvidia.ptxas.path, "-v", f"-arch=sm_{capability}", "-", "-o", "/dev/null"]
    report = subprocess.run(command, input=found.asm["ptx"], capture_output=True, text=True, check=True).stderr
    spills = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", report)))
    return found.asm["ptx"], spills, found.metadata.shared


#: What one block of an L4 may have, the least of theirs.
L4_SMEM_BYTES = 101_376


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("kind", ["full", "causal", "all"])
def test_defaults_spill_nothing_and_fit(capability, head_dim, kind):
    cap = 50.0 if kind == "all" else None
    lower, upper = {"full": (None, None), "causal": (None, 0), "all": (-255, 0)}[kind]
    length = 1000 if kind == "all" else 2048
    p = portable.Problem(4, 16, 4, length, length, head_dim, ("bshd",) * 4, 0.125, lower, upper, cap)
    tiles = portable.default_backward(head_dim, cap is not None)
    given = dict.fromkeys(("q", "k", "v"), "*bf16")
    gradients = {**given, "dout": "*bf16", "power": "*fp32", "delta": "*fp32"}
    for name, pointers, config in (
        ("attention_forward", {**given, "out": "*bf16", "m": "*fp32", "l": "*fp32"},
         portable.default_forward(head_dim, cap is not None)),
        ("attention_query_gradient", {**gradients, "dq": "*bf16"}, tiles.queries),
        ("attention_key_gradient", {**gradients, "dk": "*bf16", "dv": "*bf16"}, tiles.keys),
    ):  # fmt: skip
        constants = {**p.constants(config), "scale": 0.125}
        ptx, spills, smem = compiled(name, pointers, constants, capability, config)
        assert spills == 0 and smem <= L4_SMEM_BYTES, (name, spills, smem)
        assert "mma.sync" in ptx and "cp.async" in ptx, name  # tensor cores, loads ahead


@pytest.mark.skipif(_triton.unavailable() is not None, reason=f"jax-triton: {_triton.unavailable()}")
@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("target", ["a100", "l4"])
def test_fused_attention_compiled_for_the_gpu_is_four_kernels(target):
    import aicf_jax
    from pallas_kernels import aot

    def attention(q, k, v, dy):
        def f(q, k, v):
            return jax.nn.dot_product_attention(q, k, v, is_causal=True)

        y, vjp = jax.vjp(aicf_jax.fuse(f, policy=aicf_jax.Policy(target=target, on_failure="raise")), q, k, v)
        return y, vjp(dy)

    x = struct(4, 2048, 16, 64)
    report = aot.compile_for(target, attention, x, x, x, x)
    assert report.names.count("triton_kernel_call") == report.count == 4
    # Statistics of the rows and what is made of them: four numbers a row.
    assert report.temporaries_bytes <= 4 * 4 * 2048 * 16 * 4 + 2**20
