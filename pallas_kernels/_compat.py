"""The only file of this package that names `jax._src` or a version of jax.

Each function is one fact that no public API offers on every supported release; tried on jax 0.10.2 and 0.12.0.1.
"""

from __future__ import annotations

import inspect
from typing import Any

import jax


def interpret_params_class() -> type[Any]:
    """The parameters of Mosaic GPU's simulator; public from jax 0.11."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    found = getattr(plgpu, "InterpretGPUParams", None)
    if found is None:
        from jax._src.pallas.mosaic_gpu.interpret import params

        found = params.InterpretGPUParams
    return found


def reset_interpreter() -> None:
    """Forget the simulator's memory: needed after a kernel raised inside of it."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    interpret_pallas_call.reset_gpu_interpret_mode_state()


def races_found() -> bool:
    """Whether the last simulated kernel that looked for races had one."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    state = gpu_callbacks.get_races()
    return bool(state.races_found)


def load(ref: Any, layout: Any, simulated: bool) -> Any:
    """An array from global memory, over the threads as `layout` says.

    The simulator of jax 0.10 knows neither layouts nor this load: what it reads is the same.
    """
    import jax.experimental.pallas.mosaic_gpu as plgpu

    if simulated:
        return ref[...]
    known = inspect.signature(plgpu.load).parameters.get("idx")
    index = ((),) if known is not None and known.default is known.empty else ()  # from jax 0.11 on it is deprecated
    return plgpu.load(ref, *index, layout=layout, optimized=False)


def store(ref: Any, value: Any, simulated: bool) -> None:
    """An array to global memory. Where jax has no such store an assignment allows any layout."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    known = getattr(plgpu, "store", None)
    if simulated or known is None:
        ref[...] = value
    else:
        known(ref, value, optimized=False)


def x64_enabled() -> bool:
    """Whether 64-bit types are on."""
    return bool(getattr(jax.config, "jax_enable_x64"))  # noqa: B009 - a flag pyright does not know


def plugin_version() -> str:
    """The release that the packages of jax's CUDA plugin must have: jax's own."""
    return jax.__version__


def transposed(ref: Any) -> Any:
    """A view of a two-dimensional ref of shared memory with its dimensions swapped."""
    return ref.transpose(1, 0) if not hasattr(ref, "transforms") else ref.transpose((1, 0))


def simulates_bounds() -> bool:
    """Whether the simulator fills and clips what TMA moves beyond an array; from jax 0.12."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    return hasattr(gpu_callbacks, "_clip_store_to_shape")


def simulates_transposes() -> bool:
    """Whether the simulator multiplies refs that are transposed; from jax 0.12, as far as was tried."""
    return simulates_bounds()


def simulates_refs() -> bool:
    """Whether the simulator runs a kernel that writes over an argument; from jax 0.12, as far as was tried."""
    return simulates_bounds()


def moves_registers() -> bool:
    """Whether the assembler gives registers that the loading warpgroup of a kernel leaves to those that compute.

    The one that jax 0.12 calls does not: of 384 threads each has 168.
    """
    return not simulates_bounds()


def cudnn_version() -> int:
    """Of the cuDNN that jax finds. Raises where it finds none."""
    from jax._src.cudnn import fused_attention_stablehlo

    return int(fused_attention_stablehlo.check_cudnn_version())


def cudnn_attention(
    q: Any, k: Any, v: Any, *, scale: float, is_causal: bool, window: tuple[int, int] | None
) -> tuple[Any, Any]:
    """``(O, log-sum-exp)`` of ``jax.nn.dot_product_attention(implementation="cudnn")``.

    The public function rounds the log-sum-exp, float32 ``[B, H, S]``, to the type of O.
    """
    from jax._src.cudnn import fused_attention_stablehlo as fused

    mask = fused.MaskType.CAUSAL if is_causal else fused.MaskType.NO_MASK
    length = None if window is None else window[0] + 1
    out, residual = fused.dot_product_attention(  # pyright: ignore[reportGeneralTypeIssues,reportAssignmentType]
        q, k, v, scale=scale, mask_type=mask, sliding_window_length=length, return_residual=True
    )
    return out, residual
