"""A GPU in numpy, as far as probes can tell: it checks every launch and answers with what the model below would take.

It is as simple as the probes' own description of what to expect, so that an analysis must find the model's constants.
"""

import math
import types

import numpy as np

from gpu_probe.cuda.chain import Walk
from gpu_probe.cuda.gpu import Memory, typed
from gpu_probe.probe import Target
from gpu_probe.probes import (
    cuda_bandwidth,
    cuda_banks,
    cuda_exp,
    cuda_l2_bandwidth,
    cuda_l2_distance,
    cuda_latency,
    cuda_launch,
    cuda_occupancy,
    cuda_scheduler,
    cuda_stride,
    cuda_tensor,
)

CLOCK_HZ = 1.7e9
L1_BYTES, L2_BYTES = 32 << 10, 1 << 20
LATENCY = {"l1": 33.0, "l2": 260.0, "dram": 620.0}
NEAR, FAR, TIMING = 200.0, 420.0, 12.0
DRAM_BYTES_PER_S, L2_BYTES_PER_S, L2_READ_BYTES = 4e12, 5.5e12, 40 << 20
LAUNCH_S, STREAM_S, GRAPH_S = 3e-6, 2.5e-6, 1.3e-6
BYTES_PER_WARP_S = 4e12 / (132 * 20)
TENSOR = {"mma": 2500.0, "wgmma": 4096.0}

FACTS = {
    "sm_count": 132,
    "l2_bytes": L2_BYTES,
    "smem_per_block_bytes": 232448,
    "smem_per_sm_bytes": 233472,
    "smem_reserved_bytes": 1024,
    "threads_per_sm": 2048,
    "blocks_per_sm": 32,
}


class FakeGpu:
    arch = "sm_90a"

    def __init__(self):
        self.facts = FACTS
        self._next = 1 << 40
        self._memory = {}
        self._took = 0.0

    def compile(self, template):
        return template.source

    def allocate(self, size_bytes):
        memory = Memory(types.SimpleNamespace(handle=self._next), size_bytes)
        self._memory[self._next] = (size_bytes, None)
        self._next += (size_bytes + 255) // 256 * 256
        return memory

    def random(self, size_bytes, keep=0xFFFFFFFF, one=0):
        assert 0 <= one <= 0xFFFFFFFF and 0 <= keep <= 0xFFFFFFFF
        return self.allocate(size_bytes)

    def write(self, memory, values):
        assert values.nbytes <= memory.size_bytes
        self._memory[memory.address] = (memory.size_bytes, np.array(values))

    def read(self, memory, count, dtype):
        size, values = self._memory[memory.address]
        assert count * np.dtype(dtype).itemsize <= size and len(values) >= count
        return np.asarray(values[:count], dtype)

    def clock_hz(self):
        return CLOCK_HZ

    def wait(self):
        pass

    def seconds(self, launches):
        self._took = 0.0
        launches()
        return self._took

    def graph(self, launches):
        def launch():
            self._took = 0.0
            launches(self)
            self._took *= GRAPH_S / STREAM_S

        return launch

    def resident_blocks(self, template, block, smem_bytes=0):
        by_memory = self.facts["smem_per_sm_bytes"] // (smem_bytes + self.facts["smem_reserved_bytes"])
        return min(by_memory, self.facts["threads_per_sm"] // block, self.facts["blocks_per_sm"])

    def launch(self, template, grid, block, arguments=(), smem_bytes=0, on=None):
        typed(template, arguments)  # as many arguments as the kernel has, of its kinds
        assert 1 <= block <= 1024 and 1 <= grid < 2**31 and smem_bytes <= self.facts["smem_per_block_bytes"]
        MODEL[type(template)](self, template, grid, block, *arguments)

    def footprint(self, address):
        start, (size, words) = next((a, m) for a, m in self._memory.items() if a <= address < a + m[0])
        return start, size, words

    def ticks(self, ticks, out, grid, block, cycles):
        assert ticks.size_bytes >= 8 * grid and out.size_bytes >= 4 * grid * block
        self.write(ticks, np.full(grid, cycles, np.uint64))


def walk(gpu, t, grid, block, starts, out, loads):
    addresses = gpu.read(starts, grid, np.uint64)
    base, size, words = gpu.footprint(int(addresses[0]))
    assert block == 1 and grid * loads >= size // 128
    if size <= 1 << 16:  # small enough to follow: the parts together are the whole cycle
        seen = set()
        for p in addresses:
            for _ in range(loads):
                seen.add(int(p))
                p = words[(int(p) - base) // 8]
        assert len(seen) == size // 128


def chase(gpu, t, grid, block, start, out, warm, rounds):
    _, size, _ = gpu.footprint(start.address)
    assert grid == block == 1 and (size > 512 << 10 or warm * t.unroll >= size // 128)
    latency = LATENCY["l1" if size <= L1_BYTES else "l2" if size <= L2_BYTES else "dram"]
    cycles = latency * rounds * t.unroll
    gpu.write(out, np.array([cycles, cycles / CLOCK_HZ * 1e9, start.address], np.uint64))


def timed_loads(gpu, t, grid, block, start, out, warm):
    half = t.samples // 2
    each = np.array([NEAR] * half + [FAR] * half + [(NEAR + FAR) / 2 * t.samples / 1 - TIMING])
    each[:-1] += TIMING
    each[-1] = (NEAR + FAR) / 2 * t.samples
    gpu.write(out, each.astype(np.uint64))


def strided_l1(gpu, t, grid, block, x, ticks, out, stride, rounds):
    assert x.size_bytes >= 4 * (31 * stride + (t.unroll - 1) * 32 * stride + 1)
    gpu.ticks(ticks, out, grid, block, rounds * t.unroll * block / 32 * min(32, 4 * stride) / 4)


def strided_dram(gpu, t, grid, block, x, out, stride, rounds):
    words = grid * block * t.unroll * rounds
    assert x.size_bytes >= 4 * ((words - 1) * stride + 1) and out.size_bytes >= 4 * grid * block
    gpu._took = words * min(4 * stride, 32) / DRAM_BYTES_PER_S


def banks(gpu, t, grid, block, ticks, out, stride, rounds):
    assert stride <= 64
    gpu.ticks(ticks, out, grid, block, block / 32 * t.unroll * rounds * math.gcd(stride, 32))


def stream(gpu, t, grid, block, x, out, rounds):
    moved = 16 * t.loads * rounds * grid * block
    assert x.size_bytes >= moved and out.size_bytes >= 4 * grid * block
    gpu._took = moved / min(DRAM_BYTES_PER_S, grid * block / 32 * t.loads * BYTES_PER_WARP_S)


def multiply_adds(gpu, t, grid, block, x, ticks, out, rounds):
    assert x.size_bytes >= 4 * block * (2 + t.ilp)
    rate = min(128.0, block * t.ilp / 4)
    gpu.ticks(ticks, out, grid, block, block * t.count * rounds / rate)


def exponentials(gpu, t, grid, block, x, ticks, out, rounds):
    assert x.size_bytes >= 4 * block * t.ilp
    gpu.ticks(ticks, out, grid, block, block * t.count * rounds / 16)


def move(gpu, t, grid, block, x, y, elements):
    assert elements % (grid * block * t.unroll) == 0 and x.size_bytes >= 16 * elements
    assert y.size_bytes >= (16 * elements if t.what == "copy" else 4 * grid * block)
    gpu._took = LAUNCH_S + 16 * elements * (2 if t.what == "copy" else 1) / DRAM_BYTES_PER_S


def read_again(gpu, t, grid, block, x, out, elements, rounds):
    assert grid * block <= elements and x.size_bytes >= 16 * elements and elements + grid * block < 2**32
    rate = L2_BYTES_PER_S if 16 * elements <= L2_READ_BYTES else DRAM_BYTES_PER_S * 0.7
    gpu._took = 16 * t.unroll * rounds * grid * block / rate


def nothing(gpu, t, grid, block):
    gpu._took += STREAM_S


def warp_products(gpu, t, grid, block, x, ticks, out, rounds):
    assert x.size_bytes >= 4 * 6 * block
    gpu.ticks(ticks, out, grid, block, t.flops * block / 32 * rounds / TENSOR["mma"])


def group_products(gpu, t, grid, block, x, ticks, out, rounds):
    assert x.size_bytes >= t.tile_bytes and block == 128 * t.groups
    gpu.ticks(ticks, out, grid, block, t.flops * t.groups * rounds / (TENSOR["wgmma"] * t.n / 256))


MODEL = {
    Walk: walk,
    cuda_latency.Chase: chase,
    cuda_l2_distance.TimedLoads: timed_loads,
    cuda_stride.StridedL1: strided_l1,
    cuda_stride.StridedDram: strided_dram,
    cuda_banks.Banks: banks,
    cuda_occupancy.Stream: stream,
    cuda_scheduler.MultiplyAdds: multiply_adds,
    cuda_exp.Exponentials: exponentials,
    cuda_bandwidth.Move: move,
    cuda_l2_bandwidth.ReadAgain: read_again,
    cuda_launch.Nothing: nothing,
    cuda_tensor.WarpProducts: warp_products,
    cuda_tensor.GroupProducts: group_products,
}


def target():
    return Target("cuda", "a GPU in numpy", FACTS, handle=FakeGpu())
