"""Fingerprints and attribute blobs: the bits and bytes other parts rely on."""

import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aicf_jax import OpFlags
from aicf_jax.attrs import Field, Schema
from aicf_jax.flags import PRIMITIVE_FLAGS, STATIC_MASK, describe, has
from aicf_jax.graph import build

SCHEMA = Schema(7, 2, (Field("trans_a", "int"), Field("act", "enum", ("none", "relu")), Field("alpha", "float")))


def test_every_flag_is_one_bit_of_64():
    bits = [int(f) for f in OpFlags if f]
    assert all(b & (b - 1) == 0 for b in bits)
    assert len(set(bits)) == len(bits)
    assert max(bits) < 1 << 64


def test_primitives_set_static_bits_only():
    assert all(int(f) & ~int(STATIC_MASK) == 0 for f in PRIMITIVE_FLAGS.values())


def test_has_requires_all_and_forbids_any():
    gemm, batched = int(OpFlags.IS_GEMM_LIKE), int(OpFlags.IS_BATCHED)
    assert has(gemm, gemm)
    assert not has(gemm, gemm | batched)
    assert not has(gemm | batched, gemm, forbid=batched)


def test_describe_names_bits_in_order():
    assert describe(int(OpFlags.SAFE_NODE | OpFlags.IS_GEMM_LIKE)) == "GEMM_LIKE|SAFE_NODE"
    assert describe(0) == "-"


def test_graph_flags_are_a_uint64_array_with_static_and_derived_bits():
    jaxpr = jax.make_jaxpr(lambda x, w: jnp.tanh(x @ w))(jnp.ones((2, 3)), jnp.ones((3, 4))).jaxpr
    graph = build(jaxpr)
    assert graph.flags.dtype == np.uint64
    gemm, tanh = graph.flag_list
    assert has(gemm, OpFlags.IS_GEMM_LIKE | OpFlags.SAFE_NODE | OpFlags.DTYPE_F32 | OpFlags.LAYOUT_CONTIG)
    assert has(tanh, OpFlags.IS_ELEMENTWISE | OpFlags.ESCAPES, OpFlags.SAFE_NODE)


@pytest.mark.parametrize(
    ("dtype", "flag"),
    [("float32", OpFlags.DTYPE_F32), ("bfloat16", OpFlags.DTYPE_BF16), ("float16", OpFlags.DTYPE_F16), ("int32", 0)],
)
def test_dtype_bit_follows_the_result(dtype, flag):
    graph = build(jax.make_jaxpr(lambda x: x + x)(jnp.ones(3, dtype)).jaxpr)
    dtypes = OpFlags.DTYPE_F64 | OpFlags.DTYPE_F32 | OpFlags.DTYPE_BF16 | OpFlags.DTYPE_F16
    assert graph.flag_list[0] & dtypes == flag


def test_an_unknown_primitive_is_opaque():
    graph = build(jax.make_jaxpr(lambda x: jnp.fft.fft(x))(jnp.ones(4)).jaxpr)
    fft = next(n for n in graph.nodes if n.op == "fft")
    assert fft.flags == OpFlags.NONE


def test_blob_is_kind_schema_then_fields_little_endian():
    blob = SCHEMA.pack({"trans_a": 1, "act": "relu", "alpha": 0.5})
    assert blob.data == struct.pack("<HHiid", 7, 2, 1, 1, 0.5)
    assert blob.unpack() == {"trans_a": 1, "act": "relu", "alpha": 0.5}
    assert str(blob) == "trans_a=1 act=relu alpha=0.5"


def test_equal_attributes_are_one_key():
    values = {"trans_a": 0, "act": "none", "alpha": 0.0}
    assert len({SCHEMA.pack(values), SCHEMA.pack(dict(values)), SCHEMA.pack({**values, "act": "relu"})}) == 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"trans_a": 0, "act": "none"}, "expected .*alpha.*found"),
        ({"trans_a": 0, "act": "gelu", "alpha": 0.0}, "act: expected one of .*relu.*found 'gelu'"),
        ({"trans_a": 0.5, "act": "none", "alpha": 0.0}, "trans_a: expected int, found 0.5"),
    ],
)
def test_bad_attributes_are_named(values, message):
    with pytest.raises(ValueError, match=message):
        SCHEMA.pack(values)


def test_bad_fields_cannot_be_built():
    with pytest.raises(ValueError, match="expected kind"):
        Field("x", "str")
    with pytest.raises(ValueError, match="choices belong to kind 'enum'"):
        Field("x", "int", ("a",))
