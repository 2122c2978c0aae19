"""What the kernels share: Mosaic GPU when it is needed, the simulator for tests, and the size of the device."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from pallas_kernels import _compat

#: Shared memory that one block of a Hopper GPU may have, in bytes.
HOPPER_SMEM_BYTES = 232_448

#: Multiprocessors of an H200 or H100 (SXM): what is assumed where no device tells.
HOPPER_SM_COUNT = 132


@dataclasses.dataclass(frozen=True)
class Mosaic:
    """The modules that kernels are written with: ``pl`` and ``gpu``."""

    pl: Any
    gpu: Any


@functools.cache
def mosaic() -> Mosaic:
    """Import Pallas with its Mosaic GPU backend.

    Raises:
      ImportError: naming the packages to install.
    """
    try:
        import jax.experimental.pallas as pl
        import jax.experimental.pallas.mosaic_gpu as gpu
    except ImportError as e:
        raise ImportError(
            "Mosaic GPU kernels need absl-py and a jaxlib with Mosaic GPU: pip install 'aicf-jax[gpu]' on a "
            f"machine with a GPU, 'aicf-jax[aot]' to compile for one ({e})"
        ) from e
    return Mosaic(pl, gpu)


def on_refs(kernel: Any) -> Any:
    """What `gpu.kernel` returns, for arguments that are refs, which it may write to: without a rule for ``vmap``."""
    return kernel.fun


def interpret(detect_races: bool = True, **options: Any) -> Any:
    """``interpret=`` of a kernel that runs in Mosaic GPU's simulator on a CPU.

    Args:
      detect_races: look for accesses to shared memory that nothing orders; `races_found` says whether there were any.
      options: further fields of `InterpretGPUParams`.
    """
    mosaic()
    return _compat.interpret_params_class()(detect_races=detect_races, **options)


def races_found() -> bool:
    """Whether the last kernel simulated with `detect_races` had a race."""
    return _compat.races_found()


def sm_count(given: int | None = None) -> int:
    """Multiprocessors to spread a persistent grid over.

    `given` where it is not None; else of the device that the enclosing mesh describes; else of the GPU at hand; else
    `HOPPER_SM_COUNT`. A kernel is right with any number; with another than the device's it is slower.
    """
    if given is not None:
        return given
    described = jax.sharding.get_abstract_mesh().abstract_device
    cores = getattr(described, "num_cores", None) if getattr(described, "platform", "") in ("gpu", "cuda") else None
    if cores is None and jax.default_backend() == "gpu":
        cores = getattr(jax.devices()[0], "core_count", None)
    return HOPPER_SM_COUNT if cores is None else int(cores)
