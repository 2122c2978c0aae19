"""`compile_for`: traces and lowers here, compiles in a process of its own.

A function cannot be sent to another process in general, and this process cannot compile for a GPU: jax settles once,
when it starts, which platforms it has. So the function is traced where it lives, lowered for CUDA (for which no GPU and
no CUDA plugin is needed), and the lowered program is what another process compiles.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp

from pallas_kernels import _compat
from pallas_kernels.aot import hlo, resources
from pallas_kernels.aot.report import CompileReport
from pallas_kernels.aot.target import Target, load

#: Packages that the other process needs beside jax: the extra ``aot``.
PACKAGES = (
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
    "nvidia-cuda-nvcc",
    "nvidia-nvvm",
    "nvidia-cuda-runtime",
    "nvidia-cuda-nvrtc",
    "nvidia-nvjitlink",
    "absl-py",
)

#: Custom calls that appear in what is lowered here and whose form may change with a release of jax; the process that
#: compiles runs the same one.
_CUSTOM_CALLS = ("mosaic_gpu_v2", "mosaic_gpu", "triton_kernel_call_ffi", "triton_kernel_call", "__gpu$xla.gpu.triton")

#: Settings of this process that the compiling one must not have: what it runs on, and how much it optimizes.
_DROPPED = ("JAX_PLATFORMS", "JAX_PLATFORM_NAME", "JAX_DISABLE_MOST_OPTIMIZATIONS", "JAX_DISABLE_JIT", "PYTHONWARNINGS")

_SETTINGS = {
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # there is no driver whose version could be checked
    "CUDA_VISIBLE_DEVICES": "",  # the same result where there is a GPU, whose memory is left alone
    "JAX_ENABLE_X64": "1",  # types are settled by now; without it 64-bit ones could not be passed on
    "JAX_ENABLE_COMPILATION_CACHE": "0",  # a program from a cache writes nothing about its kernels
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "MOSAIC_GPU_DUMP_PTX": "1",
    "MOSAIC_GPU_DUMP_PTXAS": "1",
}


_SCRIPT = Path(__file__).with_name("_child.py")


class CompileError(RuntimeError):
    """A program that was traced and lowered cannot be compiled; the message holds all the compiler said."""


class Program(NamedTuple):
    """What `compile_all` compiles: a function, its arguments, and options of XLA."""

    fn: Callable[..., Any]
    avals: Sequence[Any]
    options: Mapping[str, Any] = {}


def compile_for(
    target: str,
    fn: Callable[..., Any],
    *avals: Any,
    options: Mapping[str, Any] | None = None,
    timeout_s: float = 300.0,
) -> CompileReport:
    """Compile a function for a GPU that need not be there, and tell what it compiles to.

    The function is traced here, as `jax.jit` would trace it for the target, and compiled in another process; nothing is
    run. Whatever jax can trace is taken: lambdas, `jax.jit` of functions, what `jax.grad` returns, fused functions.
    Kernels that ask for the number of multiprocessors get the target's.

    Args:
      target: ``"h200"``, ``"h100"``, ``"a100"``, ``"l4"`` or ``"b200"``, see `targets`.
      fn: the function.
      avals: its arguments; arrays, `jax.ShapeDtypeStruct`s, numpy arrays and Python floats are traced, as are arrays of
        PRNG keys. Everything else (strings, None, booleans, integers, callables) is static. Pytrees are welcome.
      options: of XLA, as `jax.jit` takes them: ``{"xla_gpu_enable_triton_gemm": False}`` leaves products to cuBLAS.
      timeout_s: seconds that compiling may take.

    Returns:
      The report. It costs some seconds: the other process has to start.

    Raises:
      ValueError: an unknown target, or a program for more than one device.
      ImportError: packages of the extra ``aot`` are missing or do not fit; the message names them.
      CompileError: the program cannot be compiled.
      TimeoutError: after `timeout_s`; the other process is stopped.
    """
    name = _name(fn)
    report = compile_all(target, {name: Program(fn, avals, options or {})}, timeout_s=timeout_s)[name]
    if isinstance(report, Exception):
        raise report
    return report


def compile_all(
    target: str, programs: Mapping[str, Program | tuple[Callable[..., Any], Sequence[Any]]], timeout_s: float = 300.0
) -> dict[str, CompileReport | Exception]:
    """`compile_for` for many programs in one process, which has to start only once.

    Args:
      target: as for `compile_for`.
      programs: name -> `Program`, or ``(function, arguments)``.
      timeout_s: seconds that compiling them all may take.

    Returns:
      For each name its report, or the error, where this one cannot be traced or compiled.

    Raises:
      ValueError, ImportError, TimeoutError: as `compile_for`.
      CompileError: the process came to an end before all programs were compiled.
    """
    described = load(target)
    check_packages()
    found: dict[str, CompileReport | Exception] = {}
    lowered: dict[str, tuple[jax.export.Exported, Mapping[str, Any]]] = {}
    for name, given in programs.items():
        program = given if isinstance(given, Program) else Program(*given)
        try:
            lowered[name] = _export(described, program.fn, program.avals), program.options
        except Exception as error:
            found[name] = error
    if lowered:
        with tempfile.TemporaryDirectory(prefix="aicf-aot-") as path:
            stems = {name: Path(path) / f"{k:04}" for k, name in enumerate(lowered)}
            for name, (exported, options) in lowered.items():
                _write(stems[name], exported, options)
            (Path(path) / "target.txtpb").write_text(described.text)
            _run(Path(path), timeout_s)
            seen: dict[str, resources.MosaicKernel] = {}
            found |= {name: _read(stem, name, target, seen) for name, stem in stems.items()}
    return {name: found[name] for name in programs}


def check_packages() -> None:
    """Raises ImportError, naming what to install, unless the packages of the extra ``aot`` are there and fit jax."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    wanted = {p: _compat.plugin_version() for p in PACKAGES if p.startswith("jax-")}
    missing = [p for p in PACKAGES if p not in found]
    other = [f"{p} {found[p]}" for p, version in wanted.items() if p in found and found[p] != version]
    if not missing and not other:
        return
    trouble = [f"{', '.join(missing)} not installed"] if missing else []
    trouble += [f"{', '.join(other)} installed beside jax {_compat.plugin_version()}"] if other else []
    names = " ".join(f"{p}=={wanted[p]}" if p in wanted else p for p in PACKAGES)
    raise ImportError(
        f"compiling for a GPU that is not there needs the extra `aot`: {'; '.join(trouble)}. "
        f"Install them with: pip install --no-deps {names}"
    )


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _key_bits(aval: Any) -> tuple[Any, Any]:
    """The type of the bits of an array of keys, and what implements them; jax tells the latter of a value only."""
    implementations = []

    def bits(key: Any) -> Any:
        implementations.append(jax.random.key_impl(key))
        return jax.random.key_data(key)

    return jax.eval_shape(bits, aval), implementations[0]


def _is_traced(x: Any) -> bool:
    return isinstance(x, float | complex) or (hasattr(x, "shape") and hasattr(x, "dtype"))


def _export(target: Target, fn: Callable[..., Any], avals: Sequence[Any]) -> jax.export.Exported:
    """The function as a CUDA program of flat arrays. Keys are passed as their bits."""
    leaves, tree = jax.tree.flatten(tuple(avals))
    traced = [k for k, x in enumerate(leaves) if _is_traced(x)]
    types = {k: jax.eval_shape(lambda x: x, leaves[k]) for k in traced}
    keys: dict[int, Any] = {}
    for k in traced:
        if _is_key(types[k]):
            types[k], keys[k] = _key_bits(types[k])

    def program(*arrays: Any) -> list[Any]:
        given = list(leaves)
        for k, x in zip(traced, arrays, strict=True):
            given[k] = jax.random.wrap_key_data(x, impl=keys[k]) if k in keys else x
        out = jax.tree.leaves(fn(*jax.tree.unflatten(tree, given)))
        return [jax.random.key_data(x) if hasattr(x, "dtype") and _is_key(x) else x for x in out]

    program.__name__ = _name(fn)
    device = jax.sharding.AbstractDevice(device_kind=target.device_kind, num_cores=target.sm_count, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        exported = _lowered(jax.jit(program, keep_unused=True), [types[k] for k in traced])
    if exported.nr_devices != 1:
        raise ValueError(f"compile_for: expected a program for one device, found one for {exported.nr_devices}")
    return exported


def _lowered(program: Any, arguments: Sequence[Any]) -> jax.export.Exported:
    """The exported program. Which custom calls it has is looked up where one is none of those that are known."""

    def export(calls: Sequence[str]) -> jax.export.Exported:
        allowed = [jax.export.DisabledSafetyCheck.custom_call(name) for name in calls]
        return jax.export.export(program, platforms=["cuda"], disabled_checks=allowed)(*arguments)

    traced = program.trace(*arguments)  # what is wrong with the function shows here
    try:
        return export(_CUSTOM_CALLS)
    except ValueError:
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        calls = set(re.findall(r"stablehlo\.custom_call @([\w.$]+)", text)) - set(_CUSTOM_CALLS)
        if not calls:
            raise
        return export((*_CUSTOM_CALLS, *sorted(calls)))


def _write(stem: Path, exported: jax.export.Exported, options: Mapping[str, Any]) -> None:
    types = ([(a.shape, str(a.dtype)) for a in avals] for avals in (exported.in_avals, exported.out_avals))
    stem.with_suffix(".types").write_text("\n".join(map(json.dumps, types)))
    stem.with_suffix(".options").write_text(json.dumps(dict(options)))
    stem.with_suffix(".program").write_bytes(exported.mlir_module_serialized)


def _run(folder: Path, timeout_s: float) -> None:
    """Runs the compiling process over a folder of programs."""
    scratch = folder / "tmp"
    scratch.mkdir()
    environment = {k: v for k, v in os.environ.items() if k not in _DROPPED}
    environment |= {**_SETTINGS, "TMPDIR": str(scratch)}
    # -P: the script's own folder is no place to import from
    command = [sys.executable, "-P", str(_SCRIPT), str(folder)]
    with _stopped_at_the_end(
        subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"compiling took longer than timeout_s={timeout_s:g} seconds and was stopped") from error
    if process.returncode:
        ended = f"code {process.returncode}" if process.returncode > 0 else signal.Signals(-process.returncode).name
        raise CompileError(f"the compiling process ended with {ended}; it printed:\n{output}")


@contextlib.contextmanager
def _stopped_at_the_end(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """Stops a process, and what it has started, however the block is left."""
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def _read(stem: Path, name: str, target: str, seen: dict[str, resources.MosaicKernel]) -> CompileReport | CompileError:
    """The report on a compiled program. `seen`: the Mosaic kernels of earlier ones, which are not compiled again."""
    failed = stem.with_suffix(".error")
    if failed.exists():
        return CompileError(f"{name} cannot be compiled for {target}:\n{failed.read_text()}")
    text = stem.with_suffix(".hlo").read_text()
    launches = hlo.launches(text)
    used = collections.Counter(k.mosaic_hash for k in launches if k.kind == "mosaic")
    names = {k.mosaic_hash: k.name for k in launches}
    dumped = resources.read_dump(stem.with_suffix(".dump"))
    for h in used:
        if h not in seen:
            # those of one name are compiled, and so numbered, in the order in which they are launched
            match = next((m for m in dumped if m.name == names[h]), None)
            if match is None:
                raise CompileError(f"{name}: Mosaic GPU wrote nothing about its kernel {names[h]}")
            dumped.remove(match)
            seen[h] = match
    mosaic = tuple(dataclasses.replace(seen[h], launches=n) for h, n in used.items())
    sizes = json.loads(stem.with_suffix(".memory").read_text())
    return CompileReport(name=name, target=target, kernels=launches, mosaic=mosaic, jax=jax.__version__, **sizes)
