"""What the GPU kernels of norms share: what they can do, and how an operation's arrays become theirs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from aicf_jax.kernels._hopper import TARGETS
from aicf_jax.kernels._kernel import ANY, Kernel
from aicf_jax.ops import FusedOp, _norm, nbytes
from aicf_jax.partition import Partition


@dataclasses.dataclass(frozen=True)
class Library:
    """Kernels of both directions for some machines.

    Attributes:
      prefix: of their names.
      targets: the machines.
      load: what has ``forward`` and ``backward``; called, and so imported, when a kernel runs.
      row_bytes: of the longest row, forward and backward.
      moved: ``op -> bytes`` it moves beside inputs and results.
      available: see `Kernel`.
    """

    prefix: str
    targets: tuple[str, ...]
    load: Callable[[], Any]
    row_bytes: tuple[int, int]
    moved: Callable[[FusedOp], int]
    available: Callable[[], tuple[str, str] | None] | None = None

    def cost_bytes(self, op: FusedOp) -> int:
        return op.outer_bytes() + self.moved(op)

    def run(self, op: FusedOp, *inputs: Any) -> tuple[Any, ...]:
        return _forward(self, op, inputs, with_statistics=False)[0]

    def save(self, op: FusedOp, *inputs: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return _forward(self, op, inputs, with_statistics=True)

    def run_gradient(self, op: FusedOp, *inputs: Any) -> tuple[Any, ...]:
        return _run_gradient(self, op, *inputs)


def _load() -> Any:
    from pallas_kernels import norm

    return norm


def _moved(op: FusedOp) -> int:
    """To pad rows, and the sums of each block."""
    from pallas_kernels.norm.config import partial_bytes

    count = math.prod(op.in_avals[0].shape) // _norm.row_length(op)
    itemsize = op.in_avals[0].dtype.itemsize
    return _padding(op) + parameter_sums(op) * partial_bytes(count, _norm.row_length(op), itemsize)


def parameter_sums(op: FusedOp) -> int:
    """Gradients of parameters that are wanted."""
    return sum(name in ("dscale", "dbias") for name in op.result_names)


@dataclasses.dataclass(frozen=True)
class _Each:
    """Contains every tuple of some words that has all of those in `required`."""

    words: frozenset[str]
    required: frozenset[str] = frozenset()

    def __contains__(self, item: object) -> bool:
        return isinstance(item, tuple) and self.required <= set(item) <= self.words

    def __repr__(self) -> str:
        needed = f" with {', '.join(sorted(self.required))}" if self.required else ""
        return f"some of {', '.join(sorted(self.words))}{needed}"


_FLOATS = _Each(frozenset({"bfloat16", "float16", "float32"}))
_INPUTS = frozenset({"X", "R", "scale", "bias"})
_GIVEN = frozenset({"S", "mean", "rstd", "slope", "dY", "dS"})


@dataclasses.dataclass(frozen=True)
class _UpTo:
    """Contains the numbers from 1 to `most`."""

    most: int

    def __contains__(self, item: object) -> bool:
        return isinstance(item, int) and 1 <= item <= self.most

    def __repr__(self) -> str:
        return f"up to {self.most}"


def _capabilities(row_bytes: int, **names: Any) -> dict[str, Any]:
    return {
        **names,
        "axes": ANY,
        "length": _UpTo(8192),
        "row_bytes": _UpTo(row_bytes),
        "variance": {"centered", "moments", "mean_square"},
        "clamped": {False, True},
        "statistics": {"float32", "bfloat16", "float16"},
        "has_residual": {False, True},
        "scale_axes": ANY,
        "bias_axes": ANY,
        "input_dtypes": _FLOATS,
        "output_dtypes": _FLOATS,
        "arrays": {"rows"},
    }


def forward_kernel(op: str, library: Library | None = None) -> Kernel:
    """The kernel of a norm, of Mosaic's where no library is named. A row is held in the registers of one block."""
    library = library or MOSAIC
    return Kernel(
        f"{library.prefix}_{op}",
        op,
        ("cuda",),
        _capabilities(library.row_bytes[0], inputs=_Each(_INPUTS, frozenset({"X"}))),
        library.run,
        save=library.save,
        cost_bytes=library.cost_bytes,
        partition=_partition,
        targets=library.targets,
        opaque=True,
        available=library.available,
    )


def gradient_kernel(op: str, library: Library | None = None) -> Kernel:
    """The kernel of a norm's gradient: a row twice, and twice its sums."""
    library = library or MOSAIC
    return Kernel(
        f"{library.prefix}_{op}",
        op,
        ("cuda",),
        _capabilities(
            library.row_bytes[1],
            inputs=_Each(_INPUTS | _GIVEN, frozenset({"X", "rstd", "dY"})),
            results=_Each(frozenset("d" + name for name in _INPUTS)),
        ),
        library.run_gradient,
        cost_bytes=library.cost_bytes,
        launches=_gradient_launches,
        partition=_partition_gradient,
        targets=library.targets,
        opaque=True,
        available=library.available,
    )


def _gradient_launches(op: FusedOp) -> int:
    """One over the rows, and one that adds up what their blocks have of the gradients of scale and bias."""
    return 1 + any(name in ("dscale", "dbias") for name in op.result_names)


# -- forward ---------------------------------------------------------------------------------------------


def _forward(
    library: Library, op: FusedOp, inputs: Any, with_statistics: bool
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    names = _norm.input_names(op)
    arrays = {names[i]: x for i, x in enumerate(inputs)}
    x, known = arrays["X"], _norm.sum_result(op)
    found = library.load().forward(
        _rows(op, x),
        *(_parameter(op, name, arrays.get(name)) for name in ("scale", "bias")),
        residual=_rows(op, arrays["R"]) if op.blob["has_residual"] else None,
        eps=op.blob["eps"],
        variance=op.blob["variance"],
        clamped=bool(op.blob["clamped"]),
        dtype=op.out_avals[0].dtype,
        with_sum=known is not None,
        with_statistics=with_statistics,
    )
    results = [found.y.reshape(x.shape)] * len(op.results)
    if known is not None:
        results[known] = found.sum.reshape(x.shape)
    saved = (s for s in (found.mean, found.rstd, found.slope) if s is not None)
    shape = (*x.shape[: x.ndim - op.blob["axes"]], *(1,) * op.blob["axes"])
    return tuple(results), tuple(s.reshape(shape) for s in saved)


# -- backward --------------------------------------------------------------------------------------------


def _run_gradient(library: Library, op: FusedOp, *inputs: Any) -> tuple[Any, ...]:
    given = dict(zip(op.input_names, inputs, strict=True))
    wanted = dict(zip(op.result_names, op.out_avals, strict=True))
    summed_again = op.blob["has_residual"] and "S" not in given
    x = given.get("S", given["X"])
    found = library.load().backward(
        _rows(op, given["dY"]),
        _rows(op, x),
        *(given[name].reshape(-1) if name in given else None for name in ("rstd", "mean", "slope")),
        scale=_parameter(op, "scale", given.get("scale")),
        residual=_rows(op, given["R"]) if summed_again else None,
        dsum=_rows(op, given["dS"]) if "dS" in given else None,
        with_dx=bool({"dX", "dR"} & set(wanted)),
        dscale=_sum_type(op, "scale", wanted),
        dbias=_sum_type(op, "bias", wanted),
    )
    dx = None if found.dx is None else found.dx.reshape(x.shape)
    results = {"dX": lambda: dx, "dR": lambda: dx}
    for name, total in (("scale", found.dscale), ("bias", found.dbias)):
        results["d" + name] = lambda name=name, total=total: _folded(op, name, total, wanted["d" + name])
    return tuple(results[name]() for name in op.result_names)


def _sum_type(op: FusedOp, name: str, wanted: Mapping[str, Any]) -> Any:
    """The type to add a parameter's gradient up in: its own where it is as long as a row, else it is added further."""
    aval = wanted.get("d" + name)
    if aval is None:
        return None
    return aval.dtype if math.prod(aval.shape) == _norm.row_length(op) else jnp.float32


def _folded(op: FusedOp, name: str, total: Any, aval: Any) -> Any:
    """The gradient of a parameter, from that of one as long as a row."""
    if total.size == math.prod(aval.shape):
        return total.reshape(aval.shape)
    trailing = op.in_avals[0].shape[-op.blob["axes"] :]
    kept = _norm.dimensions(op.blob[f"{name}_axes"], len(trailing))
    axes = tuple(d for d in range(len(trailing)) if d not in kept)
    return jnp.sum(total.reshape(trailing), axis=axes).reshape(aval.shape).astype(aval.dtype)


# -- several devices -------------------------------------------------------------------------------------


def _partition(op: FusedOp, saving: bool) -> Partition:
    """Rows may be split, and what there is one of for each row; they are whole themselves, as are parameters."""
    names = _norm.input_names(op)
    inputs = tuple(_names(op, names[i], a) for i, a in enumerate(op.in_avals))
    rows = _names(op, "X", op.in_avals[0])
    return Partition(inputs, (rows,) * (len(op.results) + (len(_norm.saved_statistics(op)) if saving else 0)))


def _partition_gradient(op: FusedOp, saving: bool) -> Partition:
    """As forward; gradients of parameters are the sum of those that each part has."""
    arrays = ((op.input_names, op.in_avals), (op.result_names, op.out_avals))
    inputs, results = (tuple(_names(op, n, a) for n, a in zip(*of, strict=True)) for of in arrays)
    return Partition(inputs, results, tuple(k for k, n in enumerate(op.result_names) if n in ("dscale", "dbias")))


def _names(op: FusedOp, name: str, aval: Any) -> tuple[str | None, ...]:
    if name.removeprefix("d") in ("scale", "bias"):
        return (None,) * aval.ndim
    free = aval.ndim - op.blob["axes"]
    return tuple(f"r{k}" if k < free else None for k in range(aval.ndim))


# -- arrays ----------------------------------------------------------------------------------------------


def _rows(op: FusedOp, x: Any) -> Any:
    return x.reshape(-1, _norm.row_length(op))


def _parameter(op: FusedOp, name: str, value: Any) -> Any:
    """Scale or bias, as long as a row."""
    if value is None:
        return None
    trailing = op.in_avals[0].shape[-op.blob["axes"] :]
    kept = _norm.dimensions(op.blob[f"{name}_axes"], len(trailing))
    beside = value.reshape([n if d in kept else 1 for d, n in enumerate(trailing)])
    return jnp.broadcast_to(beside, trailing).reshape(-1)


def _padding(op: FusedOp) -> int:
    """Bytes moved to pad rows that are shorter than the threads that share one, and to cut them again."""
    from pallas_kernels.norm.config import padded_length

    length = _norm.row_length(op)
    count = math.prod(op.in_avals[0].shape) // length
    width = padded_length(count, length)
    whole = [a for a in (*op.in_avals, *op.out_avals) if math.prod(a.shape) == count * length]
    return 2 * sum(nbytes(a) for a in whole) * width // length if width > length else 0


MOSAIC = Library("mosaic", TARGETS, _load, (32768, 16384), _moved)
