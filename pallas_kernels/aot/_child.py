"""Compiles exported programs for a described GPU, in a process of its own.

`pallas_kernels.aot.compile` runs this file as a script, with the folder of a request as its only argument, and reads
what it leaves there. It imports nothing of this package: whatever is wrong with that shows in the caller, where it
can be read.

In the folder: ``target.txtpb``, and for each program N ``N.program`` (the StableHLO of a `jax.export.Exported`),
``N.types`` (its arguments and results, as JSON) and ``N.options`` (of XLA, as JSON). Left behind, for each program:
``N.hlo`` (the optimized program as XLA prints it), ``N.memory`` (sizes in bytes, as JSON) and ``N.dump/`` (what Mosaic
GPU writes about its kernels), or ``N.error`` (a traceback).
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any


def device(target: str) -> Any:
    """The described GPU, which can be compiled for and not be run on."""
    import jax
    from jax.experimental import topologies

    jax.devices()  # makes jax find the CUDA plugin; the default backend stays the CPU, as there is no GPU
    described = topologies.get_topology_desc(topology_name="", platform="cuda", target_config=target, topology="1x1x1")
    return described.devices[0]


def exported(folder: Path, stem: str) -> Any:
    """The exported program: one of the same types that does nothing, with the program in its place.

    `jax.export.deserialize` would make the same object, and need the package flatbuffers for it.
    """
    import jax
    import jax.numpy as jnp

    arguments, results = (
        [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in json.loads(types)]
        for types in (folder / f"{stem}.types").read_text().splitlines()
    )
    nothing = jax.jit(lambda *_: [jnp.zeros(x.shape, x.dtype) for x in results], keep_unused=True)
    empty = jax.export.export(nothing, platforms=["cuda"])(*arguments)
    return dataclasses.replace(empty, mlir_module_serialized=(folder / f"{stem}.program").read_bytes())


def compile_program(folder: Path, stem: str, sharding: Any) -> None:
    """Compiles one program and writes what the compiler says about it."""
    import jax

    dump = folder / f"{stem}.dump"
    dump.mkdir()
    os.environ["MOSAIC_GPU_DUMP_TO"] = str(dump)
    program = exported(folder, stem)
    if b"mosaic_gpu" in program.mlir_module_serialized:
        # its import tells the compiler where Mosaic's runtime and the CUDA tools are; it needs absl-py
        importlib.import_module("jax.experimental.mosaic.gpu")
    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in program.in_avals]
    options = json.loads((folder / f"{stem}.options").read_text())
    try:
        compiled = jax.jit(program.call).lower(*avals).compile(compiler_options=options)
    finally:
        for log in dump.glob("*.mlir-passes.log"):
            shorten(log)
    text = compiled.as_text()
    if text is None:
        raise RuntimeError("XLA gives no text of the compiled program")
    (folder / f"{stem}.hlo").write_text(text)
    memory: Any = compiled.memory_analysis()
    sizes = {
        "temporaries_bytes": memory.temp_size_in_bytes,
        "arguments_bytes": memory.argument_size_in_bytes,
        "results_bytes": memory.output_size_in_bytes,
    }
    (folder / f"{stem}.memory").write_text(json.dumps(sizes))


def shorten(log: Path) -> None:
    """Keeps of Mosaic's log of all its passes, tens of megabytes, what stands before the kernel and its launch."""
    kept = []
    with log.open(errors="replace") as lines:
        for line in lines:
            kept.append(line)
            if "gpu.launch " in line:
                break
    log.write_text("".join(kept))


def main(folder: Path) -> None:
    """Compiles every program of a request; one that fails does not keep the others from being compiled."""
    import jax
    import jax.export

    mesh = jax.sharding.Mesh([device((folder / "target.txtpb").read_text())], ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    for program in sorted(folder.glob("*.program")):
        try:
            compile_program(folder, program.stem, sharding)
        except Exception:
            (folder / f"{program.stem}.error").write_text(traceback.format_exc())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
