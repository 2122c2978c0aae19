"""``O = softmax(scale Q K^T) V`` and its gradients through Triton, for GPUs of Ampere and Ada.

Forward, one kernel: a CTA takes a block of queries of one head; keys and values come block by block, with the online
softmax between the two products, in float32. Backward, three kernels: what each row needs (``delta = sum dO O`` and the
power of two that its weights have in common), dQ by blocks of queries, dK and dV by blocks of keys. Weights are
computed again from Q and K; each sum has one owner and one order: the same bits on every run.

What no query of a block sees is not computed. Lengths are any; what lies beyond the ends of arrays is masked. Read: Q,
K, V, O and dO once, and what a block visits again, mostly from L2; written: O, dQ, dK, dV, and four numbers a row.
Dao, "FlashAttention-2", 2023.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _triton
from pallas_kernels.attention.arguments import Sizes, check_results, check_scores, sizes

_MODULE = "pallas_kernels.attention.triton_kernels"

#: The longest head.
MAX_HEAD = 256


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """How a kernel cuts its work.

    Attributes:
      block_q, block_k: queries and keys that are multiplied at a time.
      warps: of a CTA.
      stages: loads in flight.

    Raises:
      ValueError: naming the attribute, what was expected, what was found.
    """

    block_q: int
    block_k: int
    warps: int = 4
    stages: int = 2

    def __post_init__(self) -> None:
        for name, least, most in (("block_q", 16, 256), ("block_k", 16, 256), ("warps", 1, 16)):
            _triton.expect_power_of_two(self, name, least, most)
        if self.stages < 1:
            raise ValueError(f"TileConfig(stages=...): expected at least 1, found {self.stages!r}")


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """Tiles of the kernels for dQ and for dK and dV, and rows of a CTA of the one before them."""

    queries: TileConfig
    keys: TileConfig
    rows: int = 32

    def __post_init__(self) -> None:
        _triton.expect_power_of_two(self, "rows", 1, 256)


def default_forward(head_dim: int, has_softcap: bool = False) -> TileConfig:
    """By the length of heads: what spills no registers, in the shared memory of an L4. A softcap takes some of both."""
    if head_dim <= 64:
        return TileConfig(128, 64, 8 if has_softcap else 4, 3)
    if head_dim <= 128:
        return TileConfig(64 if has_softcap else 128, 64, 8, 2)
    return TileConfig(64, 32, 8, 2)


def default_backward(head_dim: int, has_softcap: bool = False) -> BackwardConfig:
    """Likewise. dK and dV are two accumulators."""
    if head_dim <= 64:
        return BackwardConfig(TileConfig(128, 64, 8, 2), TileConfig(32, 128, 8, 2))
    if head_dim <= 128:
        return BackwardConfig(TileConfig(64, 64, 8, 2), TileConfig(32 if has_softcap else 64, 64, 8, 2))
    return BackwardConfig(TileConfig(32, 32, 8, 2), TileConfig(16 if has_softcap else 32, 32, 8, 2))


@dataclasses.dataclass(frozen=True)
class Problem(Sizes):
    """Sizes and equation, checked; `constants` is what the kernels are specialized on."""

    layouts: tuple[str, ...]
    scale: float
    lower: int | None
    upper: int | None
    softcap: float | None

    def strides(self, name: str, layout: str) -> dict[str, int]:
        """Elements between batches, heads and rows of an array: q and out have the queries, k and v the keys."""
        heads, rows = (self.heads, self.queries) if name in ("q", "out") else (self.kv_heads, self.keys)
        head, row = (
            (rows * self.head_dim, self.head_dim) if layout == "bhsd" else (self.head_dim, heads * self.head_dim)
        )
        return {f"{name}_batch": heads * rows * self.head_dim, f"{name}_head": head, f"{name}_row": row}

    def constants(self, c: TileConfig) -> dict[str, Any]:
        """What kernels of both directions are told."""
        found: dict[str, Any] = {}
        for name, layout in zip(("q", "k", "v", "out"), self.layouts, strict=True):
            found |= self.strides(name, layout)
        cap = self.softcap
        return found | {
            **{"heads": self.heads, "group": self.group, "queries": self.queries, "keys": self.keys},
            **{"depth": self.head_dim, "width": max(16, 1 << (self.head_dim - 1).bit_length())},
            **{"unit": (self.scale if cap is None else cap) * math.log2(math.e)},
            **{"slope": None if cap is None else 2 * self.scale / cap * math.log2(math.e)},
            **{"lower": self.lower, "upper": self.upper, "block_q": c.block_q, "block_k": c.block_k},
        }

    def query_blocks(self, block: int) -> int:
        return math.ceil(self.queries / block) * self.heads * self.batch

    def key_blocks(self, block: int) -> int:
        return math.ceil(self.keys / block) * self.kv_heads * self.batch


def _problem(
    function: str, q: Any, k: Any, v: Any, layouts: tuple[str, ...], scale: float, lower: int | None, upper: int | None,
    softcap: float | None,
) -> Problem:  # fmt: skip
    of = sizes(function, q, k, v, layouts, lambda d: d <= MAX_HEAD, f"heads of at most {MAX_HEAD}")
    check_scores(function, of, scale=scale, lower=lower, upper=upper, softcap=softcap)
    return Problem(
        **dataclasses.asdict(of), layouts=tuple(layouts), scale=float(scale), lower=lower, upper=upper,
        softcap=None if softcap is None else float(softcap),
    )  # fmt: skip


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float = 1.0,
    lower: int | None = None,
    upper: int | None = None,
    softcap: float | None = None,
    layouts: tuple[str, ...] = ("bshd",) * 4,
    with_statistics: bool = False,
    config: TileConfig | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """``(O,)`` or ``(O, m, l)``.

    Arguments and results as those of `pallas_kernels.attention.forward`, with heads of any length up to `MAX_HEAD`.
    `interpret`: by Triton's interpreter, on the CPU.

    Raises:
      ValueError: naming the argument, what was expected, what was found.
    """
    p = _problem("forward", q, k, v, layouts, scale, lower, upper, softcap)
    c = config or default_forward(p.head_dim, softcap is not None)
    shape = p.of_result(layouts[3])
    row = jax.ShapeDtypeStruct((p.batch, p.heads, p.queries), jnp.float32) if with_statistics else None
    found = _triton.call(
        _MODULE,
        "attention_forward",
        {"q": q, "k": k, "v": v},
        {"out": jax.ShapeDtypeStruct(shape, q.dtype), "m": row, "l": row},
        (p.query_blocks(c.block_q),),
        constants=p.constants(c),
        num_warps=c.warps,
        num_stages=c.stages,
        products=("q", "k", "v"),
        interpret=interpret,
    )
    return tuple(found[name] for name in ("out", "m", "l") if name in found)


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    m: jax.Array,
    l: jax.Array,
    dout: jax.Array,
    *,
    scale: float = 1.0,
    lower: int | None = None,
    upper: int | None = None,
    softcap: float | None = None,
    layouts: tuple[str, ...] = ("bshd",) * 4,
    config: BackwardConfig | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``(dQ, dK, dV)``, laid out and of the types of q, k and v; accumulated in float32.

    Args:
      q: as for `forward`.
      k: likewise.
      v: likewise.
      out: what `forward` returned, in the layout of O.
      m: its statistics.
      l: likewise.
      dout: the cotangent of out, laid out like it.
      scale: as for `forward`.
      lower: likewise.
      upper: likewise.
      softcap: likewise.
      layouts: of q, k, v and out.
      config: tiles; by the length of heads unless told otherwise.
      interpret: by Triton's interpreter, on the CPU.

    Raises:
      ValueError: naming the argument, what was expected, what was found.
    """
    p = _problem("backward", q, k, v, layouts, scale, lower, upper, softcap)
    check_results("backward", p, layouts[3], q, out, dout, m, l)
    c = config or default_backward(p.head_dim, softcap is not None)
    needed = _rows(p, c, out, dout, m, l, interpret)
    given = {"q": q, "k": k, "v": v, "dout": dout, **needed}
    found = _gradient(p, c.queries, "attention_query_gradient", given, {"dq": q}, p.query_blocks, interpret)
    results = {"dk": k, "dv": v}
    found |= _gradient(p, c.keys, "attention_key_gradient", given, results, p.key_blocks, interpret)
    return found["dq"], found["dk"], found["dv"]


def _rows(p: Problem, c: BackwardConfig, out: Any, dout: Any, m: Any, l: Any, interpret: bool) -> dict[str, Any]:
    constants = p.constants(c.queries)
    names = ("out_batch", "out_head", "out_row", "heads", "queries", "depth", "width")
    return _triton.call(
        _MODULE,
        "attention_rows",
        {"out": out, "dout": dout, "m": m, "l": l},
        {"power": jax.ShapeDtypeStruct(m.shape, jnp.float32), "delta": jax.ShapeDtypeStruct(m.shape, jnp.float32)},
        (p.query_blocks(c.rows),),
        constants={**{name: constants[name] for name in names}, "rows": c.rows},
        num_warps=4,
        interpret=interpret,
    )


def _gradient(
    p: Problem, c: TileConfig, name: str, inputs: Any, results: Any, blocks: Any, interpret: bool
) -> dict[str, Any]:
    return _triton.call(
        _MODULE,
        name,
        inputs,
        {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in results.items()},
        (blocks(c.block_q if "dq" in results else c.block_k),),
        constants={**p.constants(c), "scale": p.scale},
        num_warps=c.warps,
        num_stages=c.stages,
        products=("q", "k", "v", "dout"),
        interpret=interpret,
    )
