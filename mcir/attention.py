"""Programs that people ask for by name: attention, its backward, log-sum-exp and moments.

Each is a plain JAX function, as one would write it without a thought for memory, given to `derive`: nothing here says
what a tile, a stream or a running maximum is. Models' own spellings of the same functions become the same programs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mcir.derive import Derived, derive, derive_bound
from mcir.ir import Program

_ALIGN = ("top_left", "bottom_right")


def attention(*, save: bool = False, **problem: Any) -> Program:
    """``softmax(mask(scale Q K^T)) V`` as one stream over the keys: buffers ``q, k, v -> out`` (FlashAttention).

    Args:
      save: also give ``m`` and ``l``, the maximum of each row's scores and the sum of ``exp(score - m)``, in float32 or
        wider: what `attention_backward` needs.
      **problem: sizes and options, by keyword:

        - ``heads, q_len, head_dim``; ``batch`` (1), ``kv_len`` (q_len), ``value_dim`` (head_dim);
        - ``kv_heads`` (heads): fewer than `heads`, each serves a group of consecutive query heads;
        - ``dtype`` ("float32"): of inputs and results; scores, weights' sums and products in float32 or wider;
        - ``causal`` (False): queries see keys at or before their own position;
        - ``window`` (None): queries see keys at most that far away, ``(left, right)`` or one number for both;
        - ``align`` ("top_left"): whether first or, "bottom_right", last query and key have the same position;
        - ``scale`` (``1/sqrt(head_dim)``), ``fill`` (-inf): hidden scores. -inf gives NaN for rows that see nothing, a
          finite number uniform weights.

    Moves ``2 N d + 2 N d ceil(N / block)`` elements a head, counted by `Program.traffic`.

    Dao, Fu, Ermon, Rudra and Re, "FlashAttention: Fast and memory-efficient exact attention with IO-awareness", 2022.

    Raises:
      ValueError: for sizes and options that do not fit together.
      TypeError: for unknown or missing ones.
    """
    return bound_attention(save=save, **problem).program


def attention_backward(**problem: Any) -> Program:
    """The gradient of `attention`: ``q, k, v, out, m, l, dout -> dq, dk, dv``. Takes the same `problem`.

    Weights are recomputed from m and l; a row's ``delta = sum_e dout out`` is computed once before::

        P = exp(X - m) / l    dV = P^T dO    dX = P (dO V^T - delta)    dQ = scale dX K    dK = scale dX^T Q
    """
    return bound_attention_backward(**problem).program


def bound_attention(*, save: bool = False, **problem: Any) -> Derived:
    """`attention`, with the binding to arrays.

    q ``[batch, heads, q_len, head_dim]``; k and v with ``kv_heads`` and ``kv_len``; results in the layout of q, m and l
    ``[batch, heads, q_len]``.
    """
    p = Problem(**problem)
    names = ("out", "m", "l") if save else ("out",)
    return derive_bound(p.forward(save), *p.avals("q", "k", "v"), name="attention", results=names)


def bound_attention_backward(**problem: Any) -> Derived:
    """`attention_backward`, with the binding to arrays."""
    p = Problem(**problem)
    inputs = p.avals("q", "k", "v", "out", "m", "l", "dout")
    return derive_bound(p.backward(), *inputs, name="attention_backward", results=("dq", "dk", "dv"))


def logsumexp(rows: int, length: int, dtype: str = "float32") -> Program:
    """``lse[i] = log(sum_j exp(x[i, j]))``: one pass over each row, relative to its running maximum."""

    def function(x: Any) -> Any:
        return jax.nn.logsumexp(x, axis=-1)

    return derive(function, jax.ShapeDtypeStruct((rows, length), dtype), name="logsumexp", results=("lse",))


def moments(rows: int, length: int, dtype: str = "float32") -> Program:
    """``mean[i]`` and ``var[i]`` (over n, not n - 1) of x[i, :] in one pass, by Chan's update."""

    def function(x: Any) -> Any:
        return jnp.mean(x, axis=-1), jnp.var(x, axis=-1)

    return derive(function, jax.ShapeDtypeStruct((rows, length), dtype), name="moments", results=("mean", "var"))


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sizes and options of one attention, see `attention`, and its plain JAX functions."""

    _: dataclasses.KW_ONLY
    heads: int
    q_len: int
    head_dim: int
    batch: int = 1
    kv_len: int | None = None
    value_dim: int | None = None
    kv_heads: int | None = None
    dtype: str = "float32"
    causal: bool = False
    window: int | tuple[int, int] | None = None
    align: str = "top_left"
    scale: float | None = None
    fill: float = -math.inf

    def __post_init__(self) -> None:
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"attention: expected kv_heads that divide {self.heads} heads, found {self.kv_heads}")
        if self.align not in _ALIGN:
            raise ValueError(f"attention: expected align to be one of {_ALIGN}, found {self.align!r}")
        if self.window is not None and min(self.sides) < 0:
            raise ValueError(f"attention: expected a window of 0 or more to each side, found {self.window}")

    @property
    def sides(self) -> tuple[int, int]:
        assert self.window is not None
        return self.window if isinstance(self.window, tuple) else (self.window, self.window)

    @property
    def groups(self) -> tuple[int, int]:
        """Heads of keys, and query heads that share one."""
        kv_heads = self.kv_heads or self.heads
        return kv_heads, self.heads // kv_heads

    def avals(self, *names: str) -> Sequence[jax.ShapeDtypeStruct]:
        rows, kv = (self.batch, self.heads, self.q_len), (self.batch, self.groups[0], self.kv_len or self.q_len)
        value_dim = self.value_dim or self.head_dim
        shapes = {"q": (*rows, self.head_dim), "k": (*kv, self.head_dim), "v": (*kv, value_dim), "m": rows, "l": rows}
        return [
            jax.ShapeDtypeStruct(
                shapes.get(n, (*rows, value_dim)), _wide(self.dtype) if n in ("m", "l") else self.dtype
            )
            for n in names
        ]

    # -- in plain JAX: h is a head of keys, g one of its query heads -----------------------------------------
    def grouped(self, x: Any) -> Any:
        return x.reshape(x.shape[0], *self.groups, *x.shape[2:])

    def ungrouped(self, x: Any) -> Any:
        return x.reshape(x.shape[0], self.heads, *x.shape[3:])

    def visible(self) -> Any:
        """Which keys a query sees; None: all."""
        kv_len = self.kv_len or self.q_len
        late = kv_len - self.q_len if self.align == "bottom_right" else 0
        query, key = jnp.arange(self.q_len)[:, None] + late, jnp.arange(kv_len)
        tests = [key <= query] if self.causal else []
        if self.window is not None:
            left, right = self.sides
            tests.append(query - key <= left)
            if not self.causal:
                tests.append(key - query <= right)
        return None if not tests else tests[0] if len(tests) == 1 else tests[0] & tests[1]

    def masked(self, x: Any, fill: float) -> Any:
        visible = self.visible()
        return x if visible is None else jnp.where(visible, x, jnp.asarray(fill, x.dtype))

    def scores(self, q: Any, k: Any) -> Any:
        x = jnp.einsum("bhgid,bhjd->bhgij", self.grouped(q), k, preferred_element_type=_wide(q.dtype))
        return self.masked(x * jnp.asarray(self.factor, x.dtype), self.fill)

    @property
    def factor(self) -> float:
        return 1 / math.sqrt(self.head_dim) if self.scale is None else self.scale

    def forward(self, save: bool) -> Callable[..., Any]:
        def attention(q: Any, k: Any, v: Any) -> Any:
            x = self.scores(q, k)
            m = jnp.max(x, axis=-1)
            p = jnp.exp(x - m[..., None])
            l = jnp.sum(p, axis=-1)
            weights = (p / l[..., None]).astype(v.dtype)
            out = jnp.einsum("bhgij,bhje->bhgie", weights, v, preferred_element_type=x.dtype).astype(v.dtype)
            return tuple(map(self.ungrouped, (out, m, l))) if save else self.ungrouped(out)

        return attention

    def backward(self) -> Callable[..., Any]:
        def attention_backward(q: Any, k: Any, v: Any, out: Any, m: Any, l: Any, dout: Any) -> Any:
            m, l, wide = self.grouped(m), self.grouped(l), _wide(q.dtype)
            p = jnp.exp(self.scores(q, k) - m[..., None]) / l[..., None]
            q, dout, out = self.grouped(q), self.grouped(dout), self.grouped(out)
            dv = jnp.einsum("bhgij,bhgie->bhje", p.astype(v.dtype), dout, preferred_element_type=wide)
            dp = jnp.einsum("bhgie,bhje->bhgij", dout, v, preferred_element_type=wide)
            delta = jnp.sum(out.astype(wide) * dout.astype(wide), axis=-1)
            dx = self.masked(p * (dp - delta[..., None]), 0.0) * jnp.asarray(self.factor, wide)
            dx = dx.astype(v.dtype)
            dq = jnp.einsum("bhgij,bhjd->bhgid", dx, k, preferred_element_type=wide)
            dk = jnp.einsum("bhgij,bhgid->bhjd", dx, q, preferred_element_type=wide)
            return self.ungrouped(dq).astype(v.dtype), dk.astype(v.dtype), dv.astype(v.dtype)

        return attention_backward


def _wide(dtype: Any) -> str:
    """The type of scores and sums."""
    return str(jnp.promote_types(dtype, jnp.float32))
