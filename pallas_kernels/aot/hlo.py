"""Kernels of an optimized program, read from the text XLA prints of it.

Of the program only what launches is looked at: the entry computation, and what it calls, loops over and branches to.
What a fusion computes inside is one kernel. Parameters, tuples and bitcasts launch nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Iterator, Mapping

#: Opcodes that launch nothing: names for memory that is there already, or marks for the compiler.
_NO_LAUNCH = frozenset(
    {
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "after-all",
        "add-dependency",
        "opt-barrier",
        "partition-id",
        "replica-id",
        "domain",
        "get-dimension-size",
    }
)

#: Custom calls that are marks for the compiler.
_NO_LAUNCH_TARGETS = frozenset({"Sharding", "AllocateBuffer", "annotate_device_placement", "PinToDevice", "PinToHost"})

#: How a custom call's target begins -> kind of kernel.
_TARGETS = (
    ("mosaic_gpu", "mosaic"),
    ("__cublas$lt", "cublaslt"),
    ("__cublas", "cublas"),
    ("__cudnn", "cudnn"),
    ("__gpu$xla.gpu.triton", "triton"),
    ("triton_kernel_call", "triton"),
)

#: Kinds whose last s8 result is scratch memory, which belongs to the kernel and moves nothing between kernels.
_WITH_WORKSPACE = frozenset({"cublas", "cublaslt", "cudnn"})

#: How jax's names of operations begin in a program that was exported and called.
_EXPORTED = "jit(call)/call_exported/"

_BITS = {"pred": 8, "token": 0, "opaque": 0}


@dataclasses.dataclass(frozen=True)
class KernelLaunch:
    """One place in a program that launches a kernel.

    Attributes:
      name: of the instruction, without the number XLA appends; of a Mosaic kernel, its function's name.
      kind: ``"fusion"`` (a kernel XLA writes), ``"triton"`` (one XLA writes through Triton, or the user's),
        ``"mosaic"``, ``"cublas"``, ``"cublaslt"``, ``"cudnn"``, another custom call's target, or the opcode of an
        instruction that stands alone.
      op: jax's name of the operation, as ``"jit(f)/dot_general"``; empty where XLA does not say.
      bytes_read: sum over the distinct operands, each counted whole, also where a kernel reads a part of it.
      bytes_written: sum over the results; scratch memory of cuBLAS and cuDNN is left out.
      inside: the loops and branches around it, outermost first, as ``"while.3 (12 times)"``. It is counted once.
      mosaic_hash: tells apart Mosaic kernels of the same name; empty for other kinds.
    """

    name: str
    kind: str
    op: str
    bytes_read: int
    bytes_written: int
    inside: tuple[str, ...] = ()
    mosaic_hash: str = ""

    @property
    def bytes_moved(self) -> int:
        """Read and written."""
        return self.bytes_read + self.bytes_written


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    def called(self, *keys: str) -> list[str]:
        """Names of the computations that these attributes hold, as ``body=%name`` or ``calls={%a, %b}``."""
        found = []
        for key in keys:
            for many, one in re.findall(rf"\b{key}=(?:\{{([^}}]*)\}}|%?([\w.\-]+))", self.attributes):
                found += re.findall(r"[\w.\-]+", many) if many else [one]
        return found

    def text(self, key: str) -> str:
        """The quoted value of an attribute, empty where it is missing."""
        found = re.search(rf'\b{key}="((?:[^"\\]|\\.)*)"', self.attributes)
        return found[1] if found else ""


def launches(text: str) -> tuple[KernelLaunch, ...]:
    """The kernels of an optimized HLO module, in the order of its schedule.

    Raises:
      ValueError: the text has no entry computation, or an element type of unknown size.
    """
    computations, entry = _parse(text)
    if entry is None:
        raise ValueError(f"expected the text of an HLO module with an ENTRY computation, found {text[:80]!r}")
    return tuple(_walk(computations, entry, ()))


def nbytes(type_text: str) -> int:
    """Bytes of an HLO type: ``bf16[8,128]{1,0}`` or a tuple of such."""
    return sum(_array_bytes(element, sizes) for element, sizes in _arrays(type_text))


def _arrays(type_text: str) -> list[tuple[str, str]]:
    """``(element type, sizes)`` of each array in a type."""
    return re.findall(r"([a-z]\w*)\[([^\]]*)\]", type_text)


def _array_bytes(element: str, sizes: str) -> int:
    bits = _BITS.get(element)
    if bits is None:
        match = re.match(r"(?:bf|f|s|u|c)(\d+)", element)
        if match is None:
            raise ValueError(f"the HLO element type {element!r} has an unknown size")
        bits = int(match[1])
    count = math.prod(int(n) for n in re.findall(r"\d+", sizes))
    return -(-count * bits // 8)


def _parse(text: str) -> tuple[dict[str, list[_Instruction]], str | None]:
    """The instructions of each computation, and the name of the entry."""
    computations: dict[str, list[_Instruction]] = {}
    entry = current = None
    for line in text.splitlines():
        if line.startswith("}"):
            current = None
        elif line[:1] not in ("", " ", "\t") and line.rstrip().endswith("{") and not line.startswith("HloModule"):
            found = re.match(r"(ENTRY\s+)?%?([\w.\-]+)", line)
            if found is not None:
                current = computations.setdefault(found[2], [])
                entry = found[2] if found[1] else entry
        elif current is not None:
            instruction = _instruction(line)
            if instruction is not None:
                current.append(instruction)
    return computations, entry


def _instruction(line: str) -> _Instruction | None:
    head = re.match(r"\s+(?:ROOT\s+)?%?([\w.\-]+) = ", line)
    if head is None:
        return None
    rest = re.sub(r"/\*.*?\*/", "", line[head.end() :]) if "/*index=" in line else line[head.end() :]
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    opcode = re.match(r"\s*([\w\-]+)\(", rest[end:])
    if opcode is None:
        return None
    start = end + opcode.end() - 1
    stop = _closing(rest, start)
    inside = re.sub(
        r"\[[^\]]*\](?:\{[^}]*\})?", "", rest[start + 1 : stop]
    )  # the operands' types, where XLA prints them
    operands = tuple(part.split()[-1].lstrip("%") for part in inside.split(",") if part.strip())
    return _Instruction(head[1], rest[:end], opcode[1], operands, rest[stop + 1 :])


def _closing(text: str, start: int) -> int:
    """Where the bracket that opens at `start` closes; brackets in quotes do not count."""
    depth, quoted, k = 0, False, start
    while k < len(text):
        c = text[k]
        if quoted:
            k += c == "\\"
            quoted = c != '"'
        elif c == '"':
            quoted = True
        elif c in "({[":
            depth += 1
        elif c in ")}]":
            depth -= 1
            if not depth:
                return k
        k += 1
    return len(text)


def _walk(computations: Mapping[str, list[_Instruction]], name: str, inside: tuple[str, ...]) -> Iterator[KernelLaunch]:
    instructions = {i.name: i for i in computations.get(name, ())}
    for i in instructions.values():
        if i.opcode in _NO_LAUNCH or i.opcode.endswith(("-done", "-update")):
            continue
        if i.opcode == "while":
            where = (*inside, f"{i.name} ({_times(i)})")
            for part in i.called("condition", "body"):
                yield from _walk(computations, part, where)
        elif i.opcode == "conditional":
            for k, part in enumerate(i.called("true_computation", "false_computation", "branch_computations")):
                yield from _walk(computations, part, (*inside, f"{i.name} branch {k}"))
        elif i.opcode == "call":
            for part in i.called("to_apply"):
                yield from _walk(computations, part, inside)
        elif i.opcode == "async-start":
            for part in i.called("calls"):
                yield from _walk(computations, part, inside)
        elif i.text("custom_call_target") not in _NO_LAUNCH_TARGETS:
            yield _launch(i, instructions, inside)


def _times(loop: _Instruction) -> str:
    count = re.search(r'"known_trip_count":\{"n":"?(\d+)', loop.attributes.replace("\\", ""))
    return f"{count[1]} times" if count else "unknown number of times"


def _launch(i: _Instruction, instructions: Mapping[str, _Instruction], inside: tuple[str, ...]) -> KernelLaunch:
    kind = _kind(i)
    sources = dict.fromkeys(_source(name, instructions) for name in i.operands)
    read = sum(nbytes(instructions[name].type) for name in sources if name in instructions)
    results = _arrays(i.type)
    if kind in _WITH_WORKSPACE and len(results) > 1 and results[-1][0] in ("s8", "u8"):
        results = results[:-1]
    written = sum(_array_bytes(element, sizes) for element, sizes in results)
    name = re.sub(r"(\.\d+)+$", "", i.name)
    launch = KernelLaunch(name, kind, i.text("op_name").removeprefix(_EXPORTED), read, written, inside)
    return _named_by_mosaic(launch, i.attributes) if kind == "mosaic" else launch


def _named_by_mosaic(launch: KernelLaunch, attributes: str) -> KernelLaunch:
    """With the kernel's own name, which stands in the program of it that the custom call carries as MLIR bytecode."""
    config = attributes.partition("backend_config=")[2]
    # the strings of MLIR bytecode end with a zero; one of them is the name of Mosaic's serialized dialect
    names = [n for n in re.findall(r"(?<=\\00)([A-Za-z_]\w*)_mosaic_gpu(?=\\00)", config) if n != "stable"]
    key = re.search(r'kernel_hash = "((?:[^"\\]|\\.)*)"', config)
    digest = hashlib.sha256((key[1] if key else config).encode()).hexdigest()[:16]
    return dataclasses.replace(launch, name=names[0] if names else launch.name, mosaic_hash=digest)


def _source(name: str, instructions: Mapping[str, _Instruction]) -> str:
    """The instruction whose memory this one is, when it is a bitcast of it."""
    while name in instructions and instructions[name].opcode == "bitcast":
        name = instructions[name].operands[0]
    return name


def _kind(i: _Instruction) -> str:
    if i.opcode == "fusion":
        return "triton" if "triton" in i.attributes.partition("backend_config=")[2] else "fusion"
    if i.opcode.startswith("custom-call"):
        target = i.text("custom_call_target")
        return next((kind for start, kind in _TARGETS if target.startswith(start)), target)
    return i.opcode.removesuffix("-start")
