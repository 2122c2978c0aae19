"""Kernels are read from the text of a compiled program: what launches, once, with its bytes and where it stands."""

import pytest

from pallas_kernels.aot import hlo

# Forms that XLA prints in one release or another: names with and without `%`, operands with and without types, comments
# in long tuples, layouts with tiles, quoted text with brackets, tables before the computations.
MODULE = r"""
HloModule jit_f, is_scheduled=true, entry_computation_layout={(bf16[8,4]{1,0})->bf16[8,4]{1,0}}

FileNames
1 "f.py"

%fused_computation (param_0: bf16[8,4]) -> bf16[8,4] {
  %param_0 = bf16[8,4]{1,0} parameter(0)
  %constant_1 = bf16[] constant(2)
  %broadcast_1 = bf16[8,4]{1,0} broadcast(%constant_1), dimensions={}
  ROOT %multiply_1 = bf16[8,4]{1,0} multiply(%param_0, %broadcast_1)
}

body (p: (s32[], f32[16])) -> (s32[], f32[16]) {
  p = (s32[], f32[16]{0}) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  x = f32[16]{0} get-tuple-element(p), index=1
  next = s32[] fusion(i), kind=kLoop, calls=fused_next
  y.3 = f32[16]{0} fusion(x), kind=kInput, calls=fused_y
  ROOT t = (s32[], f32[16]{0}) tuple(next, y.3)
}

%cond (q: (s32[], f32[16])) -> pred[] {
  %q = (s32[], f32[16]{0}) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  ROOT %less = pred[] fusion(%j), kind=kLoop, calls=%fused_less
}

%branch_a (a: f32[16]) -> f32[16] {
  %a = f32[16]{0} parameter(0)
  ROOT %copy_a = f32[16]{0} copy(%a)
}

%branch_b (b: f32[16]) -> f32[16] {
  %b = f32[16]{0} parameter(0)
  ROOT %negate_b = f32[16]{0} negate(%b)
}

%command_buffer (c: f32[16]) -> f32[16] {
  %c = f32[16]{0} parameter(0)
  ROOT %sort_c = f32[16]{0} sort(%c), dimensions={0}, to_apply=%compare
}

ENTRY %main (x: bf16[8,4], w: bf16[4,4], h: f32[16], p: s32[]) -> bf16[8,4] {
  %x = bf16[8,4]{1,0:T(8,128)(2,1)} parameter(0), metadata={op_name="x"}
  %w = bf16[4,4]{1,0} parameter(1)
  %h = f32[16]{0} parameter(2)
  %p = s32[] parameter(3)
  %flat = bf16[32]{0} bitcast(%x)
  %gemm = (bf16[8,4]{1,0}, s8[4194304]{0}) custom-call(bf16[8,4]{1,0} %x, bf16[4,4]{1,0} %w, bf16[32]{0} %flat), custom_call_target="__cublas$gemm", backend_config={"note":"} ) ]"}, metadata={op_name="jit(f)/dot_general"}
  %product = bf16[8,4]{1,0} get-tuple-element(%gemm), index=0
  %loop_multiply_fusion.12.1 = bf16[8,4]{1,0} fusion(%product), kind=kLoop, calls=%fused_computation
  %start = (s32[], f32[16]{0}) tuple(%p, %h)
  %while.3 = (s32[], /*index=1*/f32[16]{0}) while(%start), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"12"}}
  %out = f32[16]{0} get-tuple-element(%while.3), index=1
  %either = f32[16]{0} conditional(%p, %out, %out), branch_computations={%branch_a, %branch_b}
  %sorted = f32[16]{0} call(%either), to_apply=%command_buffer
  %copy-start = (f32[16]{0}, f32[16]{0}, u32[]) copy-start(%sorted)
  %copy-done = f32[16]{0} copy-done(%copy-start)
  %marked = f32[16]{0} custom-call(%copy-done), custom_call_target="Sharding"
  ROOT %mine.7 = bf16[8,4]{1,0} custom-call(%loop_multiply_fusion.12.1, %marked), custom_call_target="mosaic_gpu_v2", backend_config={kernel_hash = "\22a\7D", module = "ML\EF\00stable_mosaic_gpu\00add_mosaic_gpu\00)"}, metadata={op_name="jit(call)/call_exported/jit(f)/add"}
}
"""  # noqa: E501 - as long as XLA prints them


@pytest.fixture(scope="module")
def launches():
    return {k.name: k for k in hlo.launches(MODULE)}


def test_what_launches_is_listed_once_in_the_order_of_the_schedule(launches):
    names = [k.name for k in hlo.launches(MODULE)]
    assert names == [
        "gemm",
        "loop_multiply_fusion",
        "less",
        "next",
        "y",
        "copy_a",
        "negate_b",
        "sort_c",
        "copy-start",
        "add",
    ]


def test_kinds(launches):
    kinds = {name: k.kind for name, k in launches.items()}
    assert (kinds["gemm"], kinds["loop_multiply_fusion"], kinds["add"]) == ("cublas", "fusion", "mosaic")
    assert (kinds["copy_a"], kinds["copy-start"], kinds["sort_c"], kinds["negate_b"]) == (
        "copy",
        "copy",
        "sort",
        "negate",
    )


def test_operands_are_read_once_and_the_workspace_of_a_library_moves_nothing(launches):
    gemm = launches["gemm"]
    assert gemm.bytes_read == 2 * (8 * 4 + 4 * 4)  # the third operand is the first one by another name
    assert gemm.bytes_written == 2 * 8 * 4
    assert launches["y"].bytes_moved == 4 * 16 * 2
    assert launches["add"].bytes_read == 2 * 8 * 4 + 4 * 16


def test_what_stands_in_a_loop_or_a_branch_says_so(launches):
    assert launches["y"].inside == launches["less"].inside == ("while.3 (12 times)",)
    assert launches["copy_a"].inside == ("either branch 0",)
    assert launches["negate_b"].inside == ("either branch 1",)
    assert launches["sort_c"].inside == launches["gemm"].inside == ()


def test_a_loop_of_unknown_length():
    text = MODULE.replace(', backend_config={"known_trip_count":{"n":"12"}}', "")
    assert {k.inside for k in hlo.launches(text)} >= {("while.3 (unknown number of times)",)}


def test_names_of_operations_are_those_of_the_function(launches):
    assert launches["gemm"].op == "jit(f)/dot_general" and launches["add"].op == "jit(f)/add"


def test_kernels_of_triton():
    line = (
        '  ROOT %g = bf16[8,4]{1,0} fusion(%product), kind=kCustom, calls=%f, backend_config={"fusion_backend_config":'
        '{"kind":"__triton_gemm"}}\n}\n'
    )
    head = "ENTRY %main (product: bf16[8,4]) -> bf16[8,4] {\n  %product = bf16[8,4]{1,0} parameter(0)\n"
    (kernel,) = hlo.launches(head + line)
    assert (kernel.name, kernel.kind) == ("g", "triton")


@pytest.mark.parametrize(
    ("type_text", "size"),
    [
        ("f32[]", 4),
        ("bf16[8,128]{1,0:T(8,128)(2,1)}", 2048),
        ("pred[3]{0}", 3),
        ("s4[3]{0}", 2),
        ("f8e4m3fn[16]{0}", 16),
        ("c64[2]{0}", 16),
        ("(f32[2]{0}, (u8[3]{0}, token[]))", 11),
        ("f32[0,5]{1,0}", 0),
    ],
)
def test_sizes(type_text, size):
    assert hlo.nbytes(type_text) == size


def test_what_cannot_be_read_is_an_error_and_not_zero():
    with pytest.raises(ValueError, match="element type 'blob' has an unknown size"):
        hlo.nbytes("blob[3]")
    with pytest.raises(ValueError, match="expected the text of an HLO module with an ENTRY computation, found 'oops"):
        hlo.launches("oops")
