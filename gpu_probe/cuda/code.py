"""Compiled code, read: SASS or PTX, as instructions with what they write and read; and checks on it.

The optimizer knows nothing of what a probe is for. A chase whose loads could overlap would measure bandwidth, and a
stride that was folded away would measure nothing, so each template says what must be true of its code.

The data flow is followed once through the instructions in their order, without going round loops: enough for bodies
that are unrolled.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Literal

#: (SASS, PTX) of what checks ask for, to match from the start of an instruction without its predicate.
KINDS: dict[str, tuple[str, str]] = {
    "global load": (r"LDG?\.", r"ld\.(volatile\.)?global"),
    "global store": (r"STG?\.", r"st\.global"),
    "shared load": (r"LDS", r"ld\.shared"),
    "shared store": (r"STS", r"st\.shared"),
    "clock": (r"\S+ \w+, SR_CLOCK", r"mov\.[ub]64\s+%\w+, %clock64"),
    "fma": (r"FFMA", r"fma\.rn\.f32"),
    "exponential": (r"MUFU\.EX2", r"ex2\.approx"),
    "tensor": (r"[HIQ]G?MMA", r"wgmma\.mma_async|mma\.sync"),
    "spill": (r"(LD|ST)L", r"(ld|st)\.local"),
}

#: Where the kernel's arguments begin in constant bank 0, by major compute capability.
_ARGUMENTS_AT = {8: 0x160, 9: 0x210, 10: 0x380, 12: 0x380}

_STORES = re.compile(r"(ST|STG|STS|STL|RED|BRA|EXIT|BAR|WARPSYNC|NOP|RET|BSYNC|BSSY|MEMBAR|DEPBAR)\b")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
      opcode: with its modifiers: ``LDG.E.64``, ``ld.global.ca.u64``.
      writes, reads: registers, and as `reads` also special registers, constants and the names of arguments.
      text: as the disassembler prints it, without its predicate.
    """

    opcode: str
    writes: tuple[str, ...]
    reads: tuple[str, ...]
    text: str


@dataclasses.dataclass(frozen=True)
class Code:
    """The instructions of one kernel.

    Attributes:
      isa: what they are.
      arch: what they were compiled for, as ``sm_90a``.
      instructions: in the order of the text.
    """

    isa: Literal["sass", "ptx"]
    arch: str
    instructions: tuple[Instruction, ...]

    def of_kind(self, kind: str) -> list[Instruction]:
        """The instructions of a kind, see `KINDS`."""
        pattern = re.compile(KINDS[kind][0 if self.isa == "sass" else 1])
        return [i for i in self.instructions if pattern.match(i.text)]

    def chain(self, kind: str) -> int:
        """The longest sequence of instructions of a kind each of which needs the result of the one before."""
        members = set(map(id, self.of_kind(kind)))
        depth: dict[str, int] = {}
        longest = 0
        for i in self.instructions:
            found = max((depth.get(r, 0) for r in i.reads), default=0) + (id(i) in members)
            depth |= dict.fromkeys(i.writes, found)
            longest = max(longest, found)
        return longest

    def origins(self, instruction: Instruction) -> frozenset[str]:
        """Everything that is no register (arguments, special registers) on which what it reads depends."""
        known: dict[str, frozenset[str]] = {}
        for i in self.instructions:
            found = frozenset().union(*(known.get(r, frozenset() if _is_register(r) else {r}) for r in i.reads))
            if i is instruction:
                return found
            known |= dict.fromkeys(i.writes, found)
        return frozenset()

    def argument(self, offset: int, index: int, kernel: str) -> str:
        """How the code names the kernel's argument number `index`, which lies `offset` bytes after the first."""
        if self.isa == "ptx":
            return f"{kernel}_param_{index}"
        major = int(re.sub(r"\D", "", self.arch)) // 10
        return f"c[0x0][{_ARGUMENTS_AT[major] + offset:#x}]"


def _is_register(name: str) -> bool:
    return re.fullmatch(r"U?R\d+|U?P\d+|%(?:r|rd|f|fd|p|rs|h|hh)\d+", name) is not None


def read_sass(text: str, arch: str) -> Code:
    """The code in what ``nvdisasm -c`` or ``cuobjdump -sass`` prints about one kernel."""
    found = re.findall(r"/\*[0-9a-f]{4,}\*/\s+((?:@!?U?P\w+\s+)?[A-Z][^;]*?)\s*;", text)
    return Code("sass", arch, tuple(map(_sass, found)))


def _sass(text: str) -> Instruction:
    body = re.sub(r"^@!?U?P\w+\s+", "", text)
    opcode, _, rest = body.partition(" ")
    operands = [o.strip() for o in re.split(r",\s*(?![^\[]*\])", rest)] if rest else []
    writes: list[str] = []
    if operands and not _STORES.match(opcode):
        writes = _written(opcode, operands.pop(0))
        while operands and re.fullmatch(r"U?P(\d+|T)", operands[0]):  # predicates that are written stand next
            writes.append(operands.pop(0))
    reads: list[str] = []
    for operand in operands:
        reads += re.findall(r"c\[0x[0-9a-f]+\]\[0x[0-9a-f]+\]|SR_[\w.]+|\bU?P\d+\b", operand)
        for name, number, wide in re.findall(r"\b(U?R)(\d+)(\.64)?", operand):
            reads += [f"{name}{int(number) + k}" for k in range(2 if wide else 1)]
    return Instruction(opcode, tuple(writes), tuple(reads), body)


def _written(opcode: str, operand: str) -> list[str]:
    found = re.fullmatch(r"(U?R|U?P)(\d+)", operand)
    if found is None:
        return []
    count = 1
    if re.search(r"\.128\b", opcode):
        count = 4
    elif re.search(r"\.64\b|\.WIDE\b|^CS2R|^LDC\.64|^ULDC\.64|^LDCU\.64", opcode):
        count = 2
    return [f"{found[1]}{int(found[2]) + k}" for k in range(count)]


def read_ptx(text: str, arch: str, kernel: str) -> Code:
    """The code of one kernel in a PTX module."""
    body = re.sub(r"//[^\n]*", "", text[text.index(f".entry {kernel}(") :])
    body = body[body.index("{") + 1 :]
    # one statement a line; braces alone open and close the scopes of inline assembly
    statements = (s.strip(" \t\n{}") if "," not in s else s.strip() for s in body.split(";"))
    return Code("ptx", arch, tuple(_ptx(_last_line(s)) for s in statements if _last_line(s)))


def _last_line(statement: str) -> str:
    """The instruction of a statement, without labels, scopes and declarations before it."""
    lines = [line.strip() for line in statement.splitlines()]
    lines = [line for line in lines if line not in ("", "{", "}") and not re.match(r"\.|\$\w+:$", line)]
    return " ".join(lines)


def _ptx(text: str) -> Instruction:
    body = re.sub(r"^(?:\$\w+:\s*)*(?:@!?%p\d+\s+)?", "", text)
    opcode, rest = [*body.split(None, 1), ""][:2]
    names = re.findall(r"%[a-zA-Z]\w*(?:\.[xyz])?|\b\w+_param_\d+\b", rest)
    if not names or re.match(r"(st|red|bra|ret|bar|membar)\b", opcode):
        return Instruction(opcode, (), tuple(names), body)
    # several results stand in braces
    count = len(re.findall(r"%\w+", rest.partition("}")[0])) if rest.startswith("{") else 1
    reads = names if opcode.startswith("wgmma.mma_async") else names[count:]  # whose results are added to
    return Instruction(opcode, tuple(names[:count]), tuple(reads), body)


class Check:
    """Something that must be true of a template's code."""

    def problem(self, code: Code, template: object) -> str | None:
        """What is wrong in a few words, or None."""
        raise NotImplementedError


def _number(template: object, count: int | str) -> int:
    """A number, or the one that the template has under that name."""
    return count if isinstance(count, int) else int(getattr(template, count))


@dataclasses.dataclass(frozen=True)
class AtLeast(Check):
    """There are so many instructions of a kind: none was merged, dropped or hoisted.

    Attributes:
      kind: see `KINDS`.
      count: the number, or the name of the template's attribute that holds it.
    """

    kind: str
    count: int | str

    def problem(self, code: Code, template: object) -> str | None:
        expected, found = _number(template, self.count), len(code.of_kind(self.kind))
        return None if found >= expected else f"expected {expected} instructions of kind {self.kind!r}, found {found}"


@dataclasses.dataclass(frozen=True)
class NoneOf(Check):
    """There is no instruction of a kind."""

    kind: str

    def problem(self, code: Code, template: object) -> str | None:
        found = code.of_kind(self.kind)
        return f"expected no instruction of kind {self.kind!r}, found {found[0].text!r}" if found else None


@dataclasses.dataclass(frozen=True)
class Chained(Check):
    """Each instruction of a kind needs the result of the one before: none can start early."""

    kind: str
    count: int | str

    def problem(self, code: Code, template: object) -> str | None:
        expected, found = _number(template, self.count), code.chain(self.kind)
        if found >= expected:
            return None
        return f"expected {expected} instructions of kind {self.kind!r}, each waiting for the last, found {found}"


@dataclasses.dataclass(frozen=True)
class AddressedBy(Check):
    """The addresses of all instructions of a kind depend on an argument of the kernel and on the thread.

    Attributes:
      kind: see `KINDS`.
      index: of the argument.
      offset: its place in bytes after the first argument.
    """

    kind: str
    index: int
    offset: int

    def problem(self, code: Code, template: object) -> str | None:
        argument = code.argument(self.offset, self.index, getattr(template, "name"))  # noqa: B009 - any template
        for i in code.of_kind(self.kind):
            origins = code.origins(i)
            if argument not in origins:
                return f"expected the address in {i.text!r} to depend on {argument}, found {sorted(origins)}"
            if not any(re.match(r"SR_(TID|LANEID)|%(tid|laneid)", o) for o in origins):
                return f"expected the address in {i.text!r} to depend on the thread, found {sorted(origins)}"
        return None


@dataclasses.dataclass(frozen=True)
class InOrder(Check):
    """Somewhere instructions of these kinds follow each other in this order, with others between them."""

    kinds: tuple[str, ...]

    def problem(self, code: Code, template: object) -> str | None:
        wanted: Sequence[str] = self.kinds
        place = 0
        members = {kind: set(map(id, code.of_kind(kind))) for kind in wanted}
        for i in code.instructions:
            if place < len(wanted) and id(i) in members[wanted[place]]:
                place += 1
        return None if place == len(wanted) else f"expected {' then '.join(wanted)}, found no {wanted[place]} in order"
