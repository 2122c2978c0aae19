"""`Compiler`, which makes kernels for a GPU that need not be here, and `Gpu`, which runs them on one that is."""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gpu_probe.cuda.compile import Compiled, check_packages, compile_template
from gpu_probe.cuda.template import Template, check_range
from gpu_probe.probe import DeviceError

#: Fresh memory is filled by this many threads.
_FILL_GRID, _FILL_BLOCK = 1024, 256


class CodeError(RuntimeError):
    """A kernel's compiled code is not what its probe needs, so that its readings would mean nothing."""


@dataclasses.dataclass(frozen=True)
class Fill(Template):
    """Random words: of what lies in memory depends how much power moving it takes, and with that the clock.

    Attributes:
      salt: another one gives other words.
    """

    NAME = "probe_fill"
    TEXT = """
// Word k of x becomes random bits, of which those in `keep` stay; `one` is set in all.
extern "C" __global__ void $name(u32* x, u64 words, u32 keep, u32 one) {
  const u64 threads = (u64)gridDim.x * blockDim.x;
  for (u64 k = (u64)blockIdx.x * blockDim.x + threadIdx.x; k < words; k += threads) {
    u64 z = (k + 1) * 0x9E3779B97F4A7C15ull + $salt;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    x[k] = ((u32)(z >> 32) & keep) | one;
  }
}
"""

    salt: int = 1

    def __post_init__(self) -> None:
        check_range(self, "salt", 0, 2**31)


@dataclasses.dataclass(frozen=True)
class Clock(Template):
    """How many cycles a multiprocessor makes in a time.

    Attributes:
      cycles: to wait.
    """

    NAME = "probe_clock"
    TEXT = """
// out: cycles, nanoseconds.
extern "C" __global__ void $name(u64* out) {
  const u64 from_ns = nanoseconds();
  const u64 from = cycles();
  while (cycles() - from < $cycles) {
  }
  out[0] = cycles() - from;
  out[1] = nanoseconds() - from_ns;
}
"""

    cycles: int = 400_000

    def __post_init__(self) -> None:
        check_range(self, "cycles", 1000, 2**31)


class Compiler:
    """Compiles templates for one architecture, each once.

    Attributes:
      arch: as ``"sm_90a"``.
    """

    def __init__(self, arch: str):
        self.arch = arch
        self._compiled: dict[Template, Compiled] = {}

    def compile(self, template: Template) -> Compiled:
        """The compiled kernel.

        Raises:
          ImportError: a package is missing; the message names it.
          CompileError: NVRTC does not take the kernel.
          CodeError: what it became is not what the template says it must be.
        """
        if template not in self._compiled:
            compiled = compile_template(template, self.arch)
            problems = compiled.problems()
            if problems:
                raise CodeError("; ".join(problems))
            self._compiled[template] = compiled
        return self._compiled[template]


class Gpu(Compiler):
    """The GPU that is here: memory, launches and times.

    Attributes:
      facts: what the driver says of it, see `facts_of`.
    """

    def __init__(self, device: Any, bindings: Any, core: Any):
        super().__init__(arch_of(device.compute_capability))
        self.facts = facts_of(device)
        self._device, self._driver, self._core = device, bindings, core
        self._stream = device.create_stream()
        self._kernels: dict[Template, Any] = {}
        self._random: dict[tuple[int, int], tuple[int, Any]] = {}

    # -- memory -----------------------------------------------------------------------------------------------------

    def allocate(self, size_bytes: int) -> Memory:
        """Memory of the device, given back when nothing refers to it."""
        free_bytes = self._value(self._driver.cuMemGetInfo())[0]
        if size_bytes > 0.9 * free_bytes:
            raise DeviceError(f"the probe needs {size_bytes:,} bytes of device memory, {free_bytes:,} are free")
        return Memory(self._device.allocate(size_bytes, stream=self._stream), size_bytes)

    def random(self, size_bytes: int, keep: int = 0xFFFFFFFF, one: int = 0) -> Memory:
        """Memory with random words, of each the bits in `keep`, and those in `one` set; shared by all who ask."""
        held = self._random.get((keep, one))
        if held is None or held[0] < size_bytes:
            self._random.pop((keep, one), None)
            memory = self.allocate(size_bytes)
            self.launch(Fill(), _FILL_GRID, _FILL_BLOCK, (memory, size_bytes // 4, keep, one))
            self.wait()
            self._random[keep, one] = held = (size_bytes, memory)
        return held[1]

    def write(self, memory: Memory, values: np.ndarray) -> None:
        """Copies an array to the start of the memory."""
        values = np.ascontiguousarray(values)
        self.wait()
        self._value(self._driver.cuMemcpyHtoD(memory.address, values.ctypes.data, values.nbytes))

    def read(self, memory: Memory, count: int, dtype: Any) -> np.ndarray:
        """The first `count` values of the memory."""
        values = np.empty(count, dtype)
        self.wait()
        self._value(self._driver.cuMemcpyDtoH(values.ctypes.data, memory.address, values.nbytes))
        return values

    # -- execution --------------------------------------------------------------------------------------------------

    def launch(
        self,
        template: Template,
        grid: int,
        block: int,
        arguments: Sequence[Any] = (),
        smem_bytes: int = 0,
        on: Any = None,
    ) -> None:
        """Launches a kernel; `on` is a graph that is being built, the stream by default."""
        kernel = self._kernel(template, smem_bytes)
        config = self._core.LaunchConfig(grid=grid, block=block, shmem_size=smem_bytes)
        self._core.launch(on or self._stream, config, kernel, *typed(template, arguments))

    def wait(self) -> None:
        """Until all that was launched has finished."""
        self._stream.sync()

    def seconds(self, launches: Callable[[], None]) -> float:
        """What is launched takes on the device, by its events."""
        options = self._core.EventOptions(timing_enabled=True)
        begin = self._stream.record(options=options)
        launches()
        end = self._stream.record(options=options)
        end.sync()
        return (end - begin) * 1e-3

    def graph(self, launches: Callable[[Any], None]) -> Callable[[], None]:
        """What launches a graph of what `launches(graph)` launches on it."""
        builder = self._stream.create_graph_builder()
        builder.begin_building()
        launches(builder)
        graph = builder.end_building().complete()
        graph.upload(self._stream)
        return lambda: graph.launch(self._stream)

    def clock_hz(self) -> float:
        """The clock of a multiprocessor just now."""
        out = self.allocate(16)
        self.launch(Clock(), 1, 1, (out,))
        cycles, ns = self.read(out, 2, np.uint64)
        return float(cycles) / float(ns) * 1e9 if ns else math.nan

    def resident_blocks(self, template: Template, block: int, smem_bytes: int = 0) -> int:
        """How many blocks of a kernel a multiprocessor holds at once."""
        return int(self._kernel(template, smem_bytes).occupancy.max_active_blocks_per_multiprocessor(block, smem_bytes))

    def _kernel(self, template: Template, smem_bytes: int) -> Any:
        if template not in self._kernels:
            code = self._core.ObjectCode.from_cubin(self.compile(template).cubin, name=template.name)
            self._kernels[template] = code.get_kernel(template.name)
        kernel = self._kernels[template]
        if smem_bytes > 48 * 1024:  # more has to be asked for
            attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._value(self._driver.cuKernelSetAttribute(attribute, smem_bytes, kernel.handle, self._device.device_id))
        return kernel

    def _value(self, returned: tuple[Any, ...]) -> tuple[Any, ...]:
        status, *values = returned
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise DeviceError(f"the CUDA driver says {getattr(status, 'name', status)}")
        return tuple(values)


@dataclasses.dataclass(frozen=True)
class Memory:
    """A piece of device memory.

    Attributes:
      buffer: of cuda-core.
      size_bytes: how much.
    """

    buffer: Any
    size_bytes: int

    @property
    def address(self) -> int:
        """Where it starts."""
        return int(self.buffer.handle)


_SCALARS = {"u32": np.uint32, "u64": np.uint64}


def typed(template: Template, arguments: Sequence[Any]) -> list[Any]:
    """The arguments as the kernel takes them: memory as its address, whole numbers in their width.

    Raises:
      TypeError: another number of arguments than the kernel has, or one of another kind.
    """
    expected = template.parameters
    if len(arguments) != len(expected):
        raise TypeError(f"{template.name}: expected {len(expected)} arguments, found {len(arguments)}")
    found: list[Any] = []
    for declared, value in zip(expected, arguments, strict=True):
        if declared.endswith("*") != isinstance(value, Memory | Address):
            raise TypeError(f"{template.name}: expected {declared}, found {value!r}")
        address = isinstance(value, Memory | Address)
        found.append(np.uint64(value.address) if address else _SCALARS[declared](value))
    return found


@dataclasses.dataclass(frozen=True)
class Address:
    """A place inside a piece of memory."""

    address: int


def arch_of(capability: Any) -> str:
    """``(9, 0)`` -> ``"sm_90a"``: Hopper's tensor cores need the architecture-specific target."""
    major, minor = capability
    return f"sm_{major}{minor}{'a' if (major, minor) == (9, 0) else ''}"


#: Fact -> attribute of the driver.
_FACTS = {
    "sm_count": "multiprocessor_count",
    "l2_bytes": "l2_cache_size",
    "smem_per_block_bytes": "max_shared_memory_per_block_optin",
    "smem_per_sm_bytes": "max_shared_memory_per_multiprocessor",
    "smem_reserved_bytes": "reserved_shared_memory_per_block",
    "threads_per_sm": "max_threads_per_multiprocessor",
    "blocks_per_sm": "max_blocks_per_multiprocessor",
    "registers_per_sm": "max_registers_per_multiprocessor",
}


def facts_of(device: Any) -> dict[str, Any]:
    """What the driver says of a GPU, as a JSON object."""
    major, minor = device.compute_capability
    found: dict[str, Any] = {"compute_capability": f"{major}.{minor}"}
    return found | {fact: int(getattr(device.properties, name)) for fact, name in _FACTS.items()}


def open_gpu(index: int = 0) -> tuple[str, Gpu]:
    """The name of a GPU of this machine, and the GPU.

    Raises:
      DeviceError: a package is missing, or there is no driver or no such GPU; one sentence that says which.
    """
    try:
        check_packages()
    except ImportError as error:
        raise DeviceError(str(error)) from error
    core: Any = importlib.import_module("cuda.core")
    bindings: Any = importlib.import_module("cuda.bindings.driver")
    try:
        device = core.Device(index)
        device.set_current()
    except Exception as error:  # cuda-core's own errors have no other class in common
        if "driver library" in str(error):
            raise DeviceError(
                "there is no NVIDIA driver on this machine, so CUDA probes cannot run here; --dry-run compiles them"
            ) from error
        raise DeviceError(f"GPU {index} cannot be used ({error}); --dry-run compiles the probes without one") from error
    return device.name, Gpu(device, bindings, core)
