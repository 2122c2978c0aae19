"""The only file of this package that names `jax._src` or a version of jax.

Each function is one fact that no public API offers on every supported release; tried on jax 0.10.2 and 0.12.0.1.
"""

from __future__ import annotations

from typing import Any


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


def transposed(ref: Any) -> Any:
    """A view of a two-dimensional ref of shared memory with its dimensions swapped."""
    return ref.transpose(1, 0) if not hasattr(ref, "transforms") else ref.transpose((1, 0))
