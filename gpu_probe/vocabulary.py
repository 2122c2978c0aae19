"""What the usual names of properties mean, and the unit each is given in."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Known:
    """A usual name. A last part ``*`` stands for any further parts (dtype, shape of the instruction).

    Attributes:
      unit: that it is given in.
      meaning: in words.
      zero: whether it may be 0; a size, a rate or a latency of a machine is not.
    """

    unit: str
    meaning: str
    zero: bool = False


#: Name -> meaning, memory first. `l3` is a CPU's; `smem`, `sm`, `tensor`, `sfu`, `occupancy`, `issue` are a GPU's.
VOCABULARY: Mapping[str, Known] = {
    "l1.size": Known("B", "data that the first cache holds"),
    "l1.latency": Known("ns", "one dependent load from the first cache"),
    "l1.latency_cycles": Known("cycles", "the same in clocks"),
    "l1.bw": Known("B/s", "loads from the first cache, all cores"),
    "l2.size": Known("B", "data that the second cache holds"),
    "l2.latency": Known("ns", "one dependent load from the second cache"),
    "l2.latency_near": Known("cycles", "the same from the partition beside the SM"),
    "l2.latency_far": Known("cycles", "the same from the other partition"),
    "l2.bw": Known("B/s", "loads from the second cache, all cores"),
    "l3.size": Known("B", "data that the third cache holds"),
    "l3.latency": Known("ns", "one dependent load from the third cache"),
    "line.size": Known("B", "what one miss brings"),
    "sector.size": Known("B", "the least that a request moves"),
    "dram.size": Known("B", "device memory"),
    "dram.latency": Known("ns", "one dependent load from memory"),
    "dram.latency_cycles": Known("cycles", "the same in clocks"),
    "dram.bw": Known("B/s", "memory bandwidth that the vendor states"),
    "dram.bw_read": Known("B/s", "a sum of a large array, all cores"),
    "dram.bw_copy": Known("B/s", "bytes read and written by a large copy, all cores"),
    "coalescing.*": Known("ratio", "bandwidth at a stride over that at stride 1"),
    "sectors.*": Known("count", "sectors that a warp's request moves at a stride"),
    "smem.bank_count": Known("count", "banks of shared memory"),
    "smem.bank_width": Known("B", "of a bank, each clock"),
    "smem.max_per_block": Known("B", "shared memory that a block may have"),
    "smem.max_per_sm": Known("B", "shared memory of a multiprocessor"),
    "smem.latency": Known("cycles", "one dependent load from shared memory"),
    "smem.bw": Known("B/clk/SM", "loads without conflicts"),
    "sm.count": Known("count", "multiprocessors"),
    "sm.registers": Known("count", "32-bit registers of a multiprocessor"),
    "sm.max_warps": Known("count", "warps that a multiprocessor holds"),
    "clock.max": Known("Hz", "highest clock that the vendor states"),
    "clock.sm": Known("Hz", "clock while probes ran"),
    "tensor.*": Known("FLOP/s", "tensor cores, by dtype"),
    "tensor_clk.*": Known("FLOP/clk/SM", "tensor cores by dtype and shape of the instruction"),
    "vector.*": Known("FLOP/s", "arithmetic outside the tensor cores, by dtype"),
    "gemm.*": Known("FLOP/s", "a large product, by dtype, as XLA compiles it"),
    "sfu.exp_rate": Known("1/s", "exponentials a second, all cores or multiprocessors"),
    "sfu.exp_clk": Known("1/clk/SM", "exponentials"),
    "launch.stream": Known("s", "one kernel behind another in a stream"),
    "launch.graph": Known("s", "one kernel behind another in a graph"),
    "launch.dispatch": Known("s", "one call of a compiled program that does next to nothing"),
    "launch.loop_step": Known("s", "what a round of a compiled loop costs beside its work", zero=True),
    "occupancy.saturation_warps": Known("count", "warps of a multiprocessor beyond which bandwidth does not grow"),
    "issue.*": Known("ratio", "of instructions that could be issued, by parallelism", zero=True),
}


def known(name: str) -> Known | None:
    """What a name usually means, None for a name of the user's own."""
    if name in VOCABULARY:
        return VOCABULARY[name]
    first, *rest = name.split(".")
    return VOCABULARY.get(f"{first}.*") if rest else None
