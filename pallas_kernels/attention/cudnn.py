"""``O = softmax(scale Q K^T) V`` and its gradients by cuDNN, as `jax.nn.dot_product_attention` calls it.

What it takes is what jax checks: bfloat16 or float16, heads of a multiple of 8 up to 128, causal masks and windows that
end at the query itself. The gradient runs cuDNN's forward again, for the log-sum-exp as its backward wants it:
the public function has it in 16 bits only. Sums of the backward have no fixed order.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _compat

#: The longest head, whose length is a multiple of the second number. Hopper alone would take heads of 256.
MAX_HEAD, HEAD_MULTIPLE = 128, 8


@functools.cache
def unavailable() -> tuple[str, str] | None:
    """None where jax finds cuDNN; else what is needed and what there is."""
    expected = "cuDNN, as jax finds it (package nvidia-cudnn-cu13 beside jax's CUDA plugin)"
    try:
        _compat.cudnn_version()
    except Exception as error:  # what is missing decides what is raised
        return expected, f"{type(error).__name__}: {str(error)[:300]}"
    return None


def takes(queries: int, keys: int, depth: int, lower: int | None, upper: int | None, softcap: float | None) -> bool:
    """Whether it computes this: limits as those of `pallas_kernels.attention.forward`.

    Where lengths differ, which corner a causal mask starts from is left to cuDNN, and so not taken.
    """
    if depth > MAX_HEAD or depth % HEAD_MULTIPLE or softcap is not None:
        return False
    if lower is None and upper is None:
        return True
    return upper == 0 and queries == keys and (lower is None or lower <= 0)


def _equation(
    function: str, q: Any, k: Any, layouts: tuple[str, ...], scale: float, limits: tuple[Any, Any], softcap: Any
) -> dict[str, Any]:
    queries, keys = (x.shape[layout.index("s")] for x, layout in ((q, layouts[0]), (k, layouts[1])))
    found = (queries, keys, q.shape[-1], *limits, softcap)
    if not takes(*found):
        expected = (
            f"heads of a multiple of {HEAD_MULTIPLE} up to {MAX_HEAD}, no softcap, and either no limits or, of as many "
            "keys as queries, those up to the query itself"
        )
        raise ValueError(f"{function}: expected {expected}, found (S, T, D, lower, upper, softcap) = {found}")
    lower, upper = limits
    return {"scale": scale, "is_causal": upper is not None, "window": None if lower is None else (-lower, 0)}


def _turned(x: Any, layout: str) -> Any:
    """From a layout to ``"bshd"``, or back."""
    return x if layout == "bshd" else x.swapaxes(1, 2)


def _attention(q: Any, k: Any, v: Any, *, scale: float, is_causal: bool, window: Any) -> Any:
    return jax.nn.dot_product_attention(
        q, k, v, scale=scale, is_causal=is_causal, local_window_size=window, implementation="cudnn"
    )


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
) -> tuple[jax.Array, ...]:
    """``(O,)`` or ``(O, m, l)``: m is the log-sum-exp of each row and l is 1, so that ``P = exp(X - m) / l``.

    Arguments and results otherwise as those of `pallas_kernels.attention.forward`, as far as `takes` says.

    Raises:
      ValueError: for what cuDNN does not compute.
    """
    equation = _equation("forward", q, k, layouts, scale, (lower, upper), softcap)
    given = [_turned(x, layout) for x, layout in zip((q, k, v), layouts, strict=False)]
    if not with_statistics:
        return (_turned(_attention(*given, **equation), layouts[3]),)
    out, log_sum = _compat.cudnn_attention(*given, **equation)
    return _turned(out, layouts[3]), log_sum, jnp.ones_like(log_sum)


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
) -> tuple[jax.Array, ...]:
    """``(dQ, dK, dV)``. Arguments and results as those of `portable.backward`; out, m and l are computed again.

    Raises:
      ValueError: for what cuDNN does not compute.
    """
    del out, m, l
    equation = _equation("backward", q, k, layouts, scale, (lower, upper), softcap)
    given = [_turned(x, layout) for x, layout in zip((q, k, v), layouts, strict=False)]
    _, pull = jax.vjp(functools.partial(_attention, **equation), *given)
    found = zip(pull(_turned(dout, layouts[3])), layouts, strict=False)
    return tuple(_turned(x, layout) for x, layout in found)
