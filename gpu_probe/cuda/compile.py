"""Compiles probe kernels with NVRTC, which needs no GPU, and checks what they became.

NVRTC is called through the bindings that cuda-core stands on and not through `cuda.core.Program`: that asks the driver
for its version before it gives PTX, and a machine that only compiles has no driver. One compilation gives PTX, cubin
and what ptxas says.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu_probe.cuda.code import Code, read_ptx, read_sass
from gpu_probe.cuda.template import Template

#: Modules that CUDA probes import, and the packages of the extra ``probe`` that they are in.
COMPILING = {"cuda.bindings.nvrtc": "cuda-bindings"}
RUNNING = {"cuda.core": "cuda-core", **COMPILING}
NVRTC = "nvidia-cuda-nvrtc"

#: What the probes are compiled for, by the name of a GPU.
ARCHS = {"a100": "sm_80", "h100": "sm_90a", "h200": "sm_90a", "b200": "sm_100", "l4": "sm_89"}

#: The least architecture: that of the products which `cuda_tensor` issues (``mma.m16n8k16``).
LEAST = 80


class CompileError(RuntimeError):
    """NVRTC does not take a kernel; the message holds all it said."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A kernel, compiled.

    Attributes:
      template: what it was made of.
      arch: what it was compiled for.
      ptx, cubin: the code.
      registers, spill_bytes: of a thread; None where NVRTC did not say.
      smem_bytes: static, of a block.
      warnings: what ptxas remarks on its speed.
    """

    template: Template
    arch: str
    ptx: str = dataclasses.field(repr=False)
    cubin: bytes = dataclasses.field(repr=False)
    registers: int | None
    spill_bytes: int | None
    smem_bytes: int
    warnings: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The kernel's function."""
        return self.template.name

    def code(self) -> Code:
        """SASS where a disassembler is installed, else PTX."""
        tool = disassembler()
        if tool is None:
            return read_ptx(self.ptx, self.arch, self.name)
        return read_sass(disassemble(self.cubin, tool), self.arch)

    def problems(self, code: Code | None = None) -> list[str]:
        """What is not as the template says it must be; `code` is what to look at, if not `code()`."""
        code = code or self.code()
        found = [check.problem(code, self.template) for check in self.template.CHECKS]
        texts = [f"{self.name} for {self.arch} ({code.isa}): {text}" for text in found if text is not None]
        if self.spill_bytes:
            texts.append(f"{self.name} for {self.arch}: spills {self.spill_bytes} bytes")
        return texts + [f"{self.name} for {self.arch}: {text}" for text in self.warnings]


def check_packages(modules: Mapping[str, str] = RUNNING) -> None:
    """Raises ImportError, naming what to install, unless the packages of the extra ``probe`` are there."""
    missing = [package for module, package in modules.items() if not _importable(module)]
    if missing:
        raise ImportError(
            f"CUDA probes need the extra `probe`: {', '.join(missing)} not installed; "
            f"install with: pip install {' '.join(missing)} {NVRTC}"
        )
    nvrtc: Any = importlib.import_module("cuda.bindings.nvrtc")
    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as error:  # the binding is there and what it binds is not
        raise ImportError(
            f"CUDA probes need the extra `probe`: the library NVRTC is not installed; install with: pip install {NVRTC}"
        ) from error


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # what it is in is not there
        return False


def compile_template(template: Template, arch: str) -> Compiled:
    """Compiles a kernel; no GPU and no driver is needed.

    Args:
      template: the kernel.
      arch: as ``"sm_90a"``.

    Raises:
      ImportError: a package is missing; the message names it.
      CompileError: NVRTC does not take the kernel.
    """
    check_packages(COMPILING)
    nvrtc: Any = importlib.import_module("cuda.bindings.nvrtc")
    source, file = template.source.encode(), f"{template.name}.cu".encode()
    program = _value(nvrtc, nvrtc.nvrtcCreateProgram(source, file, 0, [], []))
    options = [f"--gpu-architecture={arch}".encode(), b"--std=c++17", b"--ptxas-options=-v"]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    log = _bytes(nvrtc, program, "ProgramLog").decode(errors="replace").strip("\0\n ")
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"{template.name} cannot be compiled for {arch} ({status.name}):\n{log}")
    ptx = _bytes(nvrtc, program, "PTX").decode().rstrip("\0")
    cubin = _bytes(nvrtc, program, "CUBIN")
    nvrtc.nvrtcDestroyProgram(program)
    return Compiled(template, arch, ptx, cubin, *_resources(log))


def _value(nvrtc: Any, returned: tuple[Any, ...]) -> Any:
    status, *values = returned
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"NVRTC says {status.name}")
    return values[0] if values else None


def _bytes(nvrtc: Any, program: Any, what: str) -> bytes:
    size = _value(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size")(program))
    buffer = b"\0" * size
    _value(nvrtc, getattr(nvrtc, f"nvrtcGet{what}")(program, buffer))
    return buffer


def _resources(log: str) -> tuple[int | None, int | None, int, tuple[str, ...]]:
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    smem = re.search(r"(\d+) bytes smem", log)
    warnings = dict.fromkeys(re.findall(r"Potential Performance Loss: (.*\S)", log))
    return (
        int(registers[1]) if registers else None,
        int(spills[1]) + int(spills[2]) if spills else None,
        int(smem[1]) if smem else 0,
        tuple(warnings),
    )


@functools.cache
def disassembler() -> Path | None:
    """``nvdisasm`` or ``cuobjdump``: from a pip package, or on PATH; None where there is none."""
    for name, package in (("nvdisasm", "nvidia-cuda-nvdisasm"), ("cuobjdump", "nvidia-cuda-cuobjdump")):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            for file in importlib.metadata.files(package) or ():
                if file.name == name and Path(str(file.locate())).exists():
                    return Path(str(file.locate()))
        found = shutil.which(name)
        if found is not None:
            return Path(found)
    return None


def disassemble(cubin: bytes, tool: Path) -> str:
    """What a disassembler prints about a cubin.

    Raises:
      RuntimeError: it does not take the file; the message holds what it said.
    """
    options = ["-c"] if tool.name == "nvdisasm" else ["-sass"]
    with tempfile.TemporaryDirectory(prefix="gpu-probe-") as folder:
        path = Path(folder) / "probe.cubin"
        path.write_bytes(cubin)
        ran = subprocess.run([str(tool), *options, str(path)], capture_output=True, text=True, timeout=60, check=False)
    if ran.returncode:
        raise RuntimeError(f"{tool.name} ended with code {ran.returncode}: {ran.stderr.strip() or ran.stdout.strip()}")
    return ran.stdout
