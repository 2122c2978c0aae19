"""Tensor cores: operations a cycle by type and shape, with wgmma on Hopper and mma everywhere."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from typing import NamedTuple

from gpu_probe.cuda.code import AtLeast, NoneOf
from gpu_probe.cuda.gpu import Gpu
from gpu_probe.cuda.measure import CudaProgram, median_ticks, on_every_sm, program
from gpu_probe.cuda.template import Template, check_choice, check_range
from gpu_probe.probe import Probe, Target, Unsupported
from gpu_probe.property_map import Property
from gpu_probe.samples import Point, Reading, Samples
from gpu_probe.statistics import measured


class Operand(NamedTuple):
    """A type that tensor cores multiply.

    Attributes:
      bytes: of an element.
      result: what products are summed in.
      keep: bits of a random word that stay, so that no element is an infinity, not a number or beyond 2.
    """

    bytes: int
    result: str
    keep: int


OPERANDS = {
    "bf16": Operand(2, "f32", 0xBFFFBFFF),
    "f16": Operand(2, "f32", 0xBFFFBFFF),
    "tf32": Operand(4, "f32", 0xBFFFE000),
    "s8": Operand(1, "s32", 0xFFFFFFFF),
    "e4m3": Operand(1, "f32", 0xBFBFBFBF),
}
#: What mma multiplies as it is on every GPU here.
WARP_DTYPES = ("bf16", "f16", "tf32", "s8")
#: Result -> (its C++ type, the constraint of its registers).
_RESULTS = {"f32": ("float", "f"), "s32": ("int", "r")}


@dataclasses.dataclass(frozen=True)
class WarpProducts(Template):
    """Each warp runs chains of mma m16n8, K of 32 bytes; operands and results lie in registers.

    Attributes:
      dtype: one of `OPERANDS`, without e4m3: Hopper widens it to float16 and multiplies that.
      chains: accumulators of a warp.
      steps: products of a chain in a round.
    """

    NAME = "probe_mma_$dtype"
    TEXT = """
// ticks: cycles of each block for `rounds` rounds of $steps products on $chains accumulators by each warp.
extern "C" __global__ void $name(const u32* x, u64* ticks, $result* out, u32 rounds) {
  u32 a[4], b[2];
#pragma unroll
  for (u32 j = 0; j < 4; ++j) a[j] = x[threadIdx.x + j * blockDim.x];
#pragma unroll
  for (u32 j = 0; j < 2; ++j) b[j] = x[threadIdx.x + (4 + j) * blockDim.x];
  $result d[$chains][4] = {};
  __syncthreads();
  const u64 from = cycles();
#pragma unroll 1
  for (u32 i = 0; i < rounds; ++i) {
#pragma unroll
    for (u32 k = 0; k < $steps; ++k) {
#pragma unroll
      for (u32 c = 0; c < $chains; ++c)
        asm volatile("mma.sync.aligned.m16n8k$k.row.col.$sum.$dtype.$dtype.$sum "
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+$constraint"(d[c][0]), "+$constraint"(d[c][1]),
                       "+$constraint"(d[c][2]), "+$constraint"(d[c][3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) ticks[blockIdx.x] = cycles() - from;
  $result sum = 0;
#pragma unroll
  for (u32 c = 0; c < $chains; ++c) sum += d[c][0] + d[c][1] + d[c][2] + d[c][3];
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
"""
    CHECKS = (AtLeast("tensor", "count"), NoneOf("spill"))

    dtype: str = "bf16"
    chains: int = 4
    steps: int = 4

    def __post_init__(self) -> None:
        check_choice(self, "dtype", WARP_DTYPES)
        check_range(self, "chains", 1, 16)
        check_range(self, "steps", 1, 16)

    def derived(self) -> dict[str, object]:
        operand = OPERANDS[self.dtype]
        result, constraint = _RESULTS[operand.result]
        return {"k": self.k, "sum": operand.result, "result": result, "constraint": constraint}

    @property
    def k(self) -> int:
        """Length of the sums of one product."""
        return 32 // OPERANDS[self.dtype].bytes

    @property
    def count(self) -> int:
        """Products in a round."""
        return self.chains * self.steps

    @property
    def flops(self) -> int:
        """Operations of a warp in a round."""
        return 2 * 16 * 8 * self.k * self.count


@dataclasses.dataclass(frozen=True)
class GroupProducts(Template):
    """Each warpgroup runs wgmma m64, K of 32 bytes, on tiles of 128-byte rows in shared memory, swizzled.

    A round is `steps` products into one accumulator, along the rows and again from their start, and then a wait for
    them: two warpgroups fill each other's pauses. (A round that waits only for the one before makes ptxas serialize.)

    Attributes:
      dtype: one of `OPERANDS`.
      n: columns of a product.
      groups: warpgroups of a block; they share the second operand.
      steps: products in a round.
    """

    NAME = "probe_wgmma_${dtype}_n$n"
    TEXT = """
// The descriptor of a tile that starts at a multiple of 1024 bytes: eight rows are 1024 bytes apart, swizzle 128.
__device__ __forceinline__ u64 descriptor(u32 at) {
  return (u64)((at & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

// ticks: cycles of each block for `rounds` rounds. x: words for the tiles.
extern "C" __global__ void __launch_bounds__($threads) $name(const u32* x, u64* ticks, $result* out, u32 rounds) {
  extern __shared__ u32 raw[];
  const u32 base = (shared_address(raw) + 1023) & ~1023u;
  u32* words = raw + (base - shared_address(raw)) / 4;
  for (u32 i = threadIdx.x; i < $tile_words; i += blockDim.x) words[i] = x[i];
  asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
  __syncthreads();
  const u64 b = descriptor(base), a = descriptor(base + $b_bytes + threadIdx.x / 128 * 8192);
  $result d[$registers];
#pragma unroll
  for (u32 j = 0; j < $registers; ++j) d[j] = 0;
  const u64 from = cycles();
#pragma unroll 1
  for (u32 i = 0; i < rounds; ++i) {
    asm volatile("wgmma.fence.sync.aligned;" : : : "memory");
#pragma unroll
    for (u32 k = 0; k < $steps; ++k)
      asm volatile(
          "{\\n.reg .pred p;\\nsetp.eq.u32 p, 0, 0;\\n"
          "wgmma.mma_async.sync.aligned.m64n${n}k$k.$sum.$dtype.$dtype "
          "{$results}, %$a_at, %$b_at, p$flags;\\n}\\n"
          : $outputs
          : "l"(a + 2 * (k % 4)), "l"(b + 2 * (k % 4)));
    asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" : : : "memory");
  }
  __syncthreads();
  if (threadIdx.x == 0) ticks[blockIdx.x] = cycles() - from;
  $result sum = 0;
#pragma unroll
  for (u32 j = 0; j < $registers; ++j) sum += d[j];
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
"""
    CHECKS = (AtLeast("tensor", "steps"), NoneOf("spill"))

    dtype: str = "bf16"
    n: int = 256
    groups: int = 2
    steps: int = 16

    def __post_init__(self) -> None:
        check_choice(self, "dtype", tuple(OPERANDS))
        check_choice(self, "n", (8, 16, 32, 64, 128, 256))
        check_range(self, "groups", 1, 4)
        check_range(self, "steps", 4, 64)

    def derived(self) -> dict[str, object]:
        operand, registers = OPERANDS[self.dtype], self.n // 2
        result, constraint = _RESULTS[operand.result]
        # factors of the operands, and for 16-bit types which of them is transposed; whole numbers have neither
        flags = {1: ", 1, 1", 2: ", 1, 1, 0, 0", 4: ", 1, 1"}[operand.bytes] if operand.result == "f32" else ""
        return {
            "k": self.k,
            "sum": operand.result,
            "result": result,
            "registers": registers,
            "results": ", ".join(f"%{j}" for j in range(registers)),
            "outputs": ", ".join(f'"+{constraint}"(d[{j}])' for j in range(registers)),
            "a_at": registers,
            "b_at": registers + 1,
            "flags": flags,
            "threads": 128 * self.groups,
            "b_bytes": 128 * self.n,
            "tile_words": self.tile_bytes // 4,
        }

    @property
    def k(self) -> int:
        """Length of the sums of one product."""
        return 32 // OPERANDS[self.dtype].bytes

    @property
    def tile_bytes(self) -> int:
        """Both operands of a block; the second is padded so that what follows it is aligned."""
        return max(128 * self.n, 1024) + 8192 * self.groups

    @property
    def smem_bytes(self) -> int:
        """With room to begin at a multiple of 1024."""
        return self.tile_bytes + 1024

    @property
    def flops(self) -> int:
        """Operations of a warpgroup in a round."""
        return 2 * 64 * self.n * self.k * self.steps


NAME = "cuda_tensor"
#: Warps of a block that run mma, and rounds that are timed.
_WARPS, _ROUNDS = 8, 128


def points(quick: bool) -> list[Point]:
    """Types and shapes: mma m16n8, wgmma m64 with 64 to 256 columns."""
    warp: list[Point] = [{"instruction": "mma", "dtype": dtype, "n": 8} for dtype in WARP_DTYPES]
    columns = (256,) if quick else (64, 128, 256)
    return warp + [{"instruction": "wgmma", "dtype": dtype, "n": n} for dtype in OPERANDS for n in columns]


def generate(point: Point, target: Target) -> CudaProgram:
    """One type and shape.

    Raises:
      Unsupported: the target's tensor cores have no such instruction.
    """
    dtype, arch = str(point["dtype"]), str(target.handle.arch)
    if point["instruction"] == "mma":
        return program(target, _warp(WarpProducts(dtype)), WarpProducts(dtype))
    if arch != "sm_90a":
        raise Unsupported(f"wgmma needs sm_90a, {target.name} is {arch}")
    template = GroupProducts(dtype, int(point["n"]))
    return program(target, _group(template), template)


def _warp(template: WarpProducts) -> Callable[[Gpu], Reading]:
    def measure(gpu: Gpu) -> Reading:
        x = gpu.random(4 * 6 * 32 * _WARPS, OPERANDS[template.dtype].keep)
        ticks = median_ticks(gpu, template, 32 * _WARPS, (x,), (_ROUNDS,))
        return on_every_sm(gpu, template.flops * _WARPS * _ROUNDS / ticks)

    return measure


def _group(template: GroupProducts) -> Callable[[Gpu], Reading]:
    def measure(gpu: Gpu) -> Reading:
        x = gpu.random(template.tile_bytes, OPERANDS[template.dtype].keep)
        ticks = median_ticks(gpu, template, 128 * template.groups, (x,), (_ROUNDS,), template.smem_bytes)
        return on_every_sm(gpu, template.flops * template.groups * _ROUNDS / ticks)

    return measure


def shape(point: Point) -> str:
    """The instruction's shape, as ``m64n256k16``."""
    rows = 16 if point["instruction"] == "mma" else 64
    return f"m{rows}n{point['n']}k{32 // OPERANDS[str(point['dtype'])].bytes}"


def analyze(samples: Samples) -> Mapping[str, Property]:
    """Each type and shape by cycle; each type by second, at its fastest shape."""
    found: dict[str, Property] = {}
    best: dict[str, Samples] = {}
    for instruction, dtype, n in sorted(
        {(str(s.point["instruction"]), str(s.point["dtype"]), s.point["n"]) for s in samples}
    ):
        own = samples.of(NAME, instruction=instruction, dtype=dtype, n=n)
        name = f"tensor_clk.{dtype}.{shape({'instruction': instruction, 'dtype': dtype, 'n': n})}"
        method = f"{instruction}, sums in {OPERANDS[dtype].result}, one block on each multiprocessor"
        found[name] = measured(own.values(), "FLOP/clk/SM", method, NAME)
        if dtype not in best or statistics.median(own.values()) > statistics.median(best[dtype].values()):
            best[dtype] = own
    for dtype, own in best.items():
        rates = [s.value * s.counters["sm_count"] * s.clock_hz for s in own if s.clock_hz]
        if rates:
            fastest = own.all[0].point
            method = f"{fastest['instruction']} {shape(fastest)}, times multiprocessors and the clock just after"
            found[f"tensor.{dtype}"] = measured(rates, "FLOP/s", method, NAME)
    return found


PROBE = Probe(
    name=NAME,
    kind="cuda",
    measures="operations (a product and a sum are two) that the tensor cores of a multiprocessor finish a cycle",
    unit="FLOP/clk/SM",
    parameters={
        "instruction": "mma (a warp, operands in registers) or wgmma (a warpgroup, operands in shared memory)",
        "dtype": "of the operands; sums are float32 or int32",
        "n": "columns of the result; the rows are 16 or 64, the sums 32 bytes long",
    },
    expected="wgmma with 256 columns reaches 4096 for bf16 and f16 on Hopper, 2048 for tf32, 8192 for e4m3 and s8; mma "
    "reaches about 60 % of it there, and everything on Ampere (2048 for bf16)",
    caveats=(
        "the clock under such a load falls below the one measured just after it: rates a second are upper bounds",
        "on GPUs newer than Hopper mma is not the fastest instruction, and wgmma is none at all: such points say so",
        "operands are random; zeros would run at a higher clock",
    ),
    points=points,
    generate=generate,
    analyze=analyze,
    properties=("tensor_clk.*", "tensor.*"),
)
