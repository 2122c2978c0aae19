"""What the portable kernels share: Triton when it is needed, whether it works with this jax, and its interpreter.

They are called through `jax_triton.triton_call`; Pallas' own Triton backend is deprecated. Triton compiles on any
machine, so a kernel can be lowered for a GPU that is not there.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import numpy as np

#: Compute capability that is compiled for where nothing tells the device: what later ones run too.
OLDEST = 80


class Unavailable(NamedTuple):
    """Why nothing can be called through jax-triton here."""

    expected: str
    found: str


@functools.cache
def unavailable() -> Unavailable | None:
    """None where jax-triton can lower a kernel with the installed jax. One tiny kernel is lowered, once a process."""
    expected = "jax-triton, which lowers kernels with the installed jax and its CUDA plugin"
    try:
        called = importlib.import_module("jax_triton")
    except ImportError as error:
        return Unavailable(f"{expected} (extra `gpu`, Python 3.12 or later)", f"{type(error).__name__}: {error}")
    try:
        kernels = importlib.import_module("pallas_kernels._triton_probe")
        x = jax.ShapeDtypeStruct((16,), np.float32)
        probe = functools.partial(
            called.triton_call, kernel=kernels.copy, out_type=x, grid=1, compute_capability=OLDEST, n=16, **_OPTIONS
        )
        jax.jit(probe).trace(x).lower(lowering_platforms=("cuda",))
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "")[:300]
        return Unavailable(expected, f"{_versions()}: {type(error).__name__}: {reason}")
    return None


#: Contracted multiplications and additions; Triton warns where nobody says. PTX of CUDA 12.8: for GPUs from Hopper on
#: Triton writes what its own assembler reads, which may be newer than the one that XLA calls.
_OPTIONS = {"backend_options": {"enable_fp_fusion": True, "ptx_version": 87}}


def _versions() -> str:
    found = [f"jax {jax.__version__}"]
    for package in ("jax-triton", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{package} {importlib.metadata.version(package)}")
    return ", ".join(found)


def refusal(target: str) -> str | None:
    """Why the kernels cannot run on a GPU (`aot.targets`) from here; None where they can."""
    missing = unavailable()
    if missing is not None:
        return f"needs {missing.expected}; found {missing.found}"
    from pallas_kernels.aot import target as targets

    capability = targets.load(target).compute_capability
    return None if capability >= OLDEST else f"needs compute capability {OLDEST / 10}, found {capability / 10}"


def compute_capability() -> int | None:
    """Of the device that the enclosing mesh describes; None: jax-triton asks the GPU at hand; else `OLDEST`."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None and getattr(described, "platform", "") in ("gpu", "cuda"):
        from pallas_kernels.aot import target

        known = {t.device_kind: t.compute_capability for t in map(target.load, target.names())}
        return known.get(described.device_kind, OLDEST)
    return None if jax.default_backend() == "gpu" else OLDEST


def call(
    module: str,
    name: str,
    inputs: Mapping[str, Any],
    results: Mapping[str, Any],
    grid: Sequence[int],
    *,
    constants: Mapping[str, Any],
    num_warps: int,
    num_stages: int = 1,
    products: Sequence[str] = (),
    interpret: bool = False,
) -> dict[str, Any]:
    """Results, by name, of a kernel: function `name` of `module`, whose parameters are all named here.

    Args:
      module: where the kernel is; it imports Triton.
      name: of the kernel.
      inputs: arrays; None for parameters that the kernel goes without.
      results: types of arrays; None likewise.
      grid: up to three sizes.
      constants: ``tl.constexpr`` parameters.
      num_warps: of a block.
      num_stages: loads in flight.
      products: inputs that are operands of a product. Triton's interpreter multiplies the bits of bfloat16; it is given
        float32, which holds the same numbers.
      interpret: run Triton's interpreter on the CPU; nothing is compiled then.
    """
    wanted = {k: jax.ShapeDtypeStruct(t.shape, t.dtype) for k, t in results.items() if t is not None}
    absent = {k: None for k, x in (*inputs.items(), *results.items()) if x is None}
    given = {k: x for k, x in inputs.items() if x is not None}
    if interpret:
        given |= {k: x.astype(np.float32) for k, x in given.items() if k in products and str(x.dtype) == "bfloat16"}
        run = functools.partial(_interpreted, module, name, list(given), wanted, absent, tuple(grid), dict(constants))
        return jax.pure_callback(run, wanted, *given.values(), vmap_method="sequential")
    kernel = getattr(importlib.import_module(module), name)
    found = importlib.import_module("jax_triton").triton_call(
        kernel=kernel,
        out_type=list(wanted.values()),
        grid=tuple(grid),
        name=name,
        num_warps=num_warps,
        num_stages=num_stages,
        compute_capability=compute_capability(),
        **_OPTIONS,
        **given,
        **absent,
        **constants,
    )
    return dict(zip(wanted, found, strict=True))


def expect_power_of_two(owner: object, name: str, least: int, most: int) -> None:
    """Raises ValueError unless an attribute is a power of two in these limits."""
    found = getattr(owner, name)
    if not least <= found <= most or found & (found - 1):
        raise ValueError(
            f"{type(owner).__name__}({name}=...): expected a power of two from {least} to {most}, found {found!r}"
        )


# -- the interpreter -------------------------------------------------------------------------------------


@functools.cache
def interpreted(module: str) -> ModuleType:
    """A second copy of a module of kernels, which Triton interprets. They reduce by ``add`` and ``larger``."""
    triton = importlib.import_module("triton")
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    before, triton.knobs.runtime.interpret = triton.knobs.runtime.interpret, True
    try:
        spec.loader.exec_module(copy)
    finally:
        triton.knobs.runtime.interpret = before
    # It calls a function of ours for each two elements of a sum, and NumPy's for its own.
    standard = importlib.import_module("triton.language").standard
    vars(copy).update(add=standard._sum_combine, larger=standard._elementwise_max)
    return copy


class _Memory:
    """An array of NumPy as Triton's interpreter wants its arguments: as an array of PyTorch in a CPU's memory."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.dtype = values, _TYPES[str(values.dtype)]

    def data_ptr(self) -> int:
        return self.values.ctypes.data

    def untyped_storage(self) -> _Memory:
        return self

    def cpu(self) -> _Memory:
        return self

    def new_empty(self, *_: Any, **__: Any) -> _Memory:
        return _Memory(self.values)

    def set_(self, storage: _Memory, *_: Any) -> None:
        self.values = storage.values

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.values.shape

    def stride(self) -> tuple[int, ...]:
        return self.values.strides

    def copy_(self, other: _Memory) -> None:
        """Nothing: `other` has the same memory."""


_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def _interpreted(
    module: str,
    name: str,
    names: Sequence[str],
    wanted: Mapping[str, Any],
    absent: Mapping[str, None],
    grid: tuple[int, ...],
    constants: Mapping[str, Any],
    *arrays: Any,
) -> dict[str, np.ndarray]:
    # What the kernel leaves out shows: neither a GPU's memory nor this is zero.
    out = {k: np.full(t.shape, np.nan, t.dtype) for k, t in wanted.items()}
    given = {k: np.ascontiguousarray(x) for k, x in zip(names, arrays, strict=True)}
    memory = {k: _Memory(x) for k, x in {**given, **out}.items()}
    with np.errstate(all="ignore"):  # infinities and NaN are values like others
        getattr(interpreted(module), name)[grid](**memory, **absent, **constants)
    return out
