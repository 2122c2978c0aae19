"""A kernel on one shape, as data: what `experiments.device_check` checks and times on a GPU.

Each kernel package lists its own as ``DEVICE`` in its modules ``cases`` and, for its kernels through Triton,
``portable_cases``; they are found by listing the packages.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

#: XLA's options under which products go to cuBLASLt, with its epilogues.
CUBLASLT = {"xla_gpu_enable_triton_gemm": False}


def _taken(target: str) -> str | None:
    return None


@dataclasses.dataclass(frozen=True)
class DeviceCase:
    """One comparison.

    Attributes:
      name: of the case, unique in its package.
      arrays: key -> the arguments, random, made by jax (`jax.jit` can trace it).
      kernel: arguments -> results, by our kernels.
      unfused: the same in plain jax: what XLA is timed with.
      reference: the same in float64, under ``jax.enable_x64``.
      tolerances: for each result, the largest difference from the reference, relative to its largest magnitude.
      flops: multiplications and additions that the results need; 0 where memory is what matters.
      bytes: arguments and results, each once.
      libraries: name -> options of XLA under which `unfused` is timed too.
      refusal: name of a GPU (`aot.targets`) -> why the kernel cannot run there from here; None where it can.

    Raises:
      ValueError: naming the attribute, what was expected, what was found.
    """

    name: str
    arrays: Callable[[jax.Array], tuple[Any, ...]]
    kernel: Callable[..., tuple[Any, ...]]
    unfused: Callable[..., tuple[Any, ...]]
    reference: Callable[..., tuple[Any, ...]]
    tolerances: tuple[float, ...]
    flops: int
    bytes: int
    libraries: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    refusal: Callable[[str], str | None] = _taken

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("DeviceCase(name=...): expected a name, found none")
        if not self.tolerances or not all(0 < t < 1 for t in self.tolerances):
            raise ValueError(f"DeviceCase({self.name!r}, tolerances=...): expected some in (0, 1): {self.tolerances}")
        if self.flops < 0 or self.bytes <= 0:
            raise ValueError(f"DeviceCase({self.name!r}): expected work, found {self.flops} flops, {self.bytes} bytes")

    def avals(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Types of the arguments."""
        return jax.eval_shape(self.arrays, jax.eval_shape(lambda: jax.random.key(0)))


def tolerance(dtype: Any, length: int = 1) -> float:
    """Largest error of a result of `dtype` that is a float32 sum of `length` random terms, relative to the largest.

    Two roundings to `dtype`, of what is summed and of the result. The error of a float32 sum of n terms is at most
    ``6 sqrt(n) u sum |terms|``, u = 2^-24, but for one in some hundred millions (Higham and Mary, "A new approach to
    probabilistic rounding error analysis", 2019); for terms of mean 0, ``sum |terms|`` is about ``0.4 sqrt(n)`` times
    the largest of many sums.
    """
    return 2.0 * float(jnp.finfo(dtype).eps) + 2.4 * length * 2.0**-24


def nbytes(*trees: Any) -> int:
    """Bytes of all arrays, or types of arrays, in some trees."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(trees))


#: Modules of a kernel package that list cases, and what the package is called in their names.
_MODULES = {"cases": "{}", "portable_cases": "{} by Triton"}


def discover() -> dict[str, DeviceCase]:
    """Every case of every kernel package, as ``"package/name"``, in sorted order of the packages.

    Raises:
      TypeError: a module of cases without ``DEVICE``, or with something else in it.
      ValueError: two cases of one name.
    """
    import pallas_kernels

    found: dict[str, DeviceCase] = {}
    packages = sorted(info.name for info in pkgutil.iter_modules(pallas_kernels.__path__) if info.ispkg)
    for module, called in _MODULES.items():
        for package in packages:
            module_name = f"pallas_kernels.{package}.{module}"
            if importlib.util.find_spec(module_name) is not None:
                _add(found, called.format(package), module_name)
    return found


def _add(found: dict[str, DeviceCase], package: str, module_name: str) -> None:
    cases = getattr(importlib.import_module(module_name), "DEVICE", None)
    if not isinstance(cases, tuple) or not all(isinstance(c, DeviceCase) for c in cases):
        raise TypeError(f"{module_name} must export DEVICE: tuple[DeviceCase, ...], found {cases!r}")
    for case in cases:
        name = f"{package}/{case.name}"
        if name in found:
            raise ValueError(f"{module_name}: two cases of the name {case.name!r}")
        found[name] = case
