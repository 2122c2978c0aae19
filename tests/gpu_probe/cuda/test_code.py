"""Reading SASS and PTX, and the checks that tell a probe's code from what an optimizer could have made of it."""

from gpu_probe.cuda.code import AddressedBy, AtLeast, Chained, InOrder, NoneOf, read_ptx, read_sass
from gpu_probe.probes.cuda_banks import Banks
from gpu_probe.probes.cuda_latency import Chase

#: As nvdisasm prints it, shortened: loads of which each needs the one before.
DEPENDENT = """
        /*0090*/                   LDG.E.64.STRONG.GPU R4, desc[UR6][R4.64] ;
.L_x_1:
        /*00a0*/                   LDG.E.64 R6, desc[UR6][R4.64] ;
        /*00b0*/              @!P0 LDG.E.64 R4, desc[UR6][R6.64] ;
        /*00c0*/                   MOV R6, RZ ;
        /*00d0*/              @!P0 BRA `(.L_x_1) ;
"""
#: The second and the third load need the first alone, so that they overlap.
OVERLAPPING = """
        /*0090*/                   LDG.E.64 R4, desc[UR6][R2.64] ;
        /*00a0*/                   LDG.E.64 R6, desc[UR6][R4.64+0x80] ;
        /*00b0*/                   LDG.E.64 R8, desc[UR6][R4.64+0x100] ;
"""
SHARED = """
        /*0010*/                   S2R R0, SR_TID.X ;
        /*0020*/                   LDC R3, c[0x0][0x220] ;
        /*0030*/                   ULDC UR4, c[0x0][0x224] ;
        /*0040*/                   LOP3.LUT R0, R0, 0x1f, RZ, 0xc0, !PT ;
        /*0050*/                   IMAD R0, R0, {factor}, RZ ;
        /*0060*/                   CS2R R8, SR_CLOCKLO ;
        /*0070*/                   LDS R5, [R0+0x80] ;
        /*0080*/                   LDS R6, [R0+UR5+0x100] ;
        /*0090*/                   STS [R7], R5 ;
        /*00a0*/                   CS2R R10, SR_CLOCKLO ;
        /*00b0*/                   CS2R R12, SRZ ;
"""
PTX = """
.visible .entry probe_banks(
  .param .u64 probe_banks_param_0, .param .u64 probe_banks_param_1,
  .param .u32 probe_banks_param_2, .param .u32 probe_banks_param_3
)
{
  .reg .b32 %r<9>;
  ld.param.u32 %r1, [probe_banks_param_2]; // the stride
  mov.u32 %r2, %tid.x;
  mul.lo.s32 %r3, %r2, %r1;
$L__BB0_1:
  // begin inline asm
  ld.shared.u32 %r4, [%r3];
  // end inline asm
  @%p1 bra $L__BB0_1;
  ld.global.v4.u32 {%r5, %r6, %r7, %r8}, [%rd1];
  {
  .reg .pred p;
  setp.eq.u32 p, 0, 0;
  wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1, %f2}, %rd2, %rd3, p, 1, 1, 0, 0;
  }
  st.global.u32 [%rd2], %r8;
  ret;
}
"""
STRIDE = AddressedBy("shared load", 2, 16)


def test_loads_that_need_each_other_are_counted_in_a_row():
    code = read_sass(DEPENDENT, "sm_90a")
    assert len(code.instructions) == 5 and code.chain("global load") == 3
    assert Chained("global load", 3).problem(code, Chase()) is None
    assert read_sass(OVERLAPPING, "sm_90a").chain("global load") == 2


def test_a_chase_whose_loads_overlap_is_refused():
    problem = Chained("global load", "unroll").problem(read_sass(OVERLAPPING, "sm_90a"), Chase())
    assert problem == "expected 32 instructions of kind 'global load', each waiting for the last, found 2"


def test_a_stride_that_was_folded_away_is_refused():
    kept, folded = (read_sass(SHARED.replace("{factor}", factor), "sm_90a") for factor in ("R3", "0x4"))
    assert STRIDE.problem(kept, Banks()) is None
    problem = STRIDE.problem(folded, Banks())
    assert problem is not None and "to depend on c[0x0][0x220], found ['SR_TID.X']" in problem


def test_addresses_must_depend_on_the_thread():
    code = read_sass(SHARED.replace("{factor}", "R3").replace("SR_TID.X", "SR_CTAID.X"), "sm_90a")
    assert "to depend on the thread" in str(STRIDE.problem(code, Banks()))


def test_kinds_are_counted_and_kept_in_order():
    code = read_sass(SHARED.replace("{factor}", "R3"), "sm_90a")
    assert len(code.of_kind("clock")) == 2  # what sets a register to zero reads no clock
    assert InOrder(("clock", "shared load", "shared store", "clock")).problem(code, None) is None
    assert InOrder(("clock", "clock", "shared load")).problem(code, None) is not None
    assert AtLeast("shared load", 2).problem(code, None) is None
    assert AtLeast("shared load", 3).problem(code, None) == "expected 3 instructions of kind 'shared load', found 2"
    assert NoneOf("spill").problem(code, None) is None
    assert "LDS R5" in str(NoneOf("shared load").problem(code, None))


def test_ptx_is_read_alike():
    code = read_ptx(PTX, "sm_90a", "probe_banks")
    assert STRIDE.problem(code, Banks()) is None
    (vector,) = code.of_kind("global load")
    assert vector.writes == ("%r5", "%r6", "%r7", "%r8") and vector.reads == ("%rd1",)
    (product,) = code.of_kind("tensor")
    assert product.writes == ("%f1", "%f2") and set(product.reads) == {"%f1", "%f2", "%rd2", "%rd3"}
    folded = read_ptx(PTX.replace("%r2, %r1;", "%r2, 4;"), "sm_90a", "probe_banks")
    assert "probe_banks_param_2" in str(STRIDE.problem(folded, Banks()))
