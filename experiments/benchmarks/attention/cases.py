"""Which comparisons the attention study makes."""

from __future__ import annotations

from dataclasses import dataclass, field

from experiments.benchmarks.attention.gpt import Stack
from experiments.benchmarks.attention.peers import PEERS
from experiments.benchmarks.attention.spellings import MODES, SPELLINGS

STACK = "gpt_stack"
STACK_MODE = "value_and_grad"


@dataclass(frozen=True)
class Sizes:
    """Sequence lengths and the sizes of one attention (batch 1), and of the stack."""

    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384)
    heads: int = 8
    head_dim: int = 64
    stack: Stack = field(default_factory=Stack)


FULL = Sizes()
QUICK = Sizes(lengths=(128, 256), stack=Stack(layers=1, width=32, heads=2, length=128, vocabulary=256))


@dataclass(frozen=True)
class Case:
    """A baseline at one sequence length in one mode; the candidate is a fused program.

    `baseline` is a spelling ("flax", "jax_nn": the candidate is that spelling, fused), a peer ("torch", ...: the
    candidate is jax's spelling, fused) or "gpt_stack".
    """

    baseline: str
    length: int
    mode: str

    @property
    def key(self) -> str:
        """Its name in results: `baseline/s<length>/mode`."""
        return f"{self.baseline}/s{self.length}/{self.mode}"


def baselines() -> list[str]:
    """Names that can be chosen: spellings, installed peers, the stack."""
    return [*SPELLINGS, *(name for name, peer in PEERS.items() if peer.version is not None), STACK]


def all_cases(sizes: Sizes) -> list[Case]:
    """Every case: short sequences first, so that an interrupted run has most of them; the stack last."""
    names = [name for name in baselines() if name != STACK]
    found = [Case(name, length, mode) for length in sizes.lengths for mode in MODES for name in names]
    return [*found, Case(STACK, sizes.stack.length, STACK_MODE)]
