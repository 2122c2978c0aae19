"""Memory flow programs of fused operations, derived once for equal operations and scheduled for this machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

import mcir
from aicf_jax import _compat
from aicf_jax.memo import memo
from aicf_jax.ops._semantic import FusedOp, nbytes
from gpu_probe.property_map import PropertyMap
from mcir.derive import Derived, from_graph
from mcir.lower_jax import lower
from mcir.schedule import Hardware, ScheduleError, batch_axes, schedule


@memo()
def forward(op: FusedOp) -> Derived:
    """The program of the operation's results."""
    return _derived(op, op.reference, "attention", _input_names(op))


@memo()
def forward_saving(op: FusedOp) -> Derived:
    """The program of the operation's results and of what its backward wants kept."""
    composite = op.semantic.composite
    assert composite is not None

    def f(*xs: Any) -> list[Any]:
        results, saved = composite.save(op, xs)
        return [*results, *saved]

    return _derived(op, f, "attention", _input_names(op), (*["out"] * len(op.results), *composite.names_of(op)[1:]))


@memo()
def backward(op: FusedOp) -> Derived:
    """The program of a derived backward."""
    names = [_PRINTED.get(n, n.lower()) for n in op.input_names]
    results = ["d" + _PRINTED.get(n[1:], n[1:].lower()) for n in op.result_names]
    return _derived(op, op.reference, "attention_backward", names, results)


#: Names of the textbook as those of a program's buffers.
_PRINTED = {"Y": "out", "dY": "dout"}


def _input_names(op: FusedOp) -> list[str]:
    found = op.semantic.names(op) if callable(op.semantic.names) else {}
    return [found.get(i, f"in{i}").lower() for i in range(len(op.in_avals))]


def _derived(op: FusedOp, f: Any, name: str, names: Sequence[str], results: Sequence[str] = ()) -> Derived:
    return from_graph(mcir.trace(f, *map(_compat.plain_aval, op.in_avals)), name, names, results)


#: What tiles may take beyond a small cache.
_OVERFLOW_BYTES = 2**24


@memo(1)
def host() -> Hardware:
    """The machine this process runs on, as its loops of XLA kernels find it.

    Half of the last cache: operands and results pass through it too. A round of a loop is some fifteen kernels and
    the threads they start and wait for, about 0.2 ms: the time of 2 MiB of traffic.
    """
    machine = Hardware.host()
    return dataclasses.replace(machine, cache_bytes=machine.cache_bytes // 2, step_bytes=2**21)


def machine(op: FusedOp) -> Hardware:
    """What the program of an operation gets its tiles for: the machine of the policy's property map, else the host.

    A measured cache is taken whole: it is what a walk through it leaves to be used.
    """
    described = op.context.policy.properties("cpu")
    return host() if described is None else _described(described)


@memo(8)
def _described(properties: PropertyMap) -> Hardware:
    return Hardware.from_map(properties, host())


def scheduled(program: mcir.Program, machine: Hardware) -> mcir.Program:
    """Tiles for a machine.

    All tiles together should take half of the cache, and where they do not, batches are walked one after the other,
    heads last; they stay whole where there are several devices, since arrays may be sharded along them. Half of
    16 MiB may be taken in any case: to pass tiles through memory takes less time than one core takes for products that
    are too small for all of them. The same is worth the rest of the cache, then smaller tiles. Where not even the
    smallest fit, for very many heads, they are taken all the same: what matters then is that nothing grows with the
    square of the length.
    """
    least, rows, cache = machine.smallest, machine.smallest_rows, machine.cache_bytes
    beyond = max(cache, _OVERFLOW_BYTES)
    whole, *parts = _batches(program)
    choices = [(given, least, rows, beyond // 2) for given in (whole, *parts)]
    choices += [(whole, least, rows, beyond)]
    choices += [(whole, smallest, 0, size) for smallest in (least, 128, 64, 16) for size in (cache, beyond)]
    for given, smallest, smallest_rows, size in choices:
        limits = {"smallest": smallest, "smallest_rows": smallest_rows, "cache_bytes": size}
        try:
            return schedule(program, dataclasses.replace(machine, **limits), given)
        except ScheduleError:
            continue
    looped = {a for loops, _ in program.statements() for a in loops} - set(whole)
    return program.with_blocks(**{a.name: min(16, a.size) for a in program.axes if a.name in looped})


def _batches(program: mcir.Program) -> list[dict[str, int]]:
    """Tile sizes of batch axes: all whole, then less and less of them, the first axis first."""
    batch = batch_axes(program)
    sizes = {a.name: a.size for a in program.axes if a.name in batch}
    found = [dict(sizes)]
    for name, size in sizes.items() if _is_one_device() else ():
        for n in reversed(range(max(0, size - 1).bit_length())):
            sizes[name] = 2**n
            found.append(dict(sizes))
    return found


def _is_one_device() -> bool:
    try:
        return jax.device_count("cpu") == 1
    except RuntimeError:  # a process without that platform, which asks what would run on it
        return True


def cache_bytes(op: FusedOp) -> int:
    """What an intermediate may measure and still stay in the cache of a CPU, beside its operands.

    Taken for other platforms too, which have no kernel of a memory flow program.
    """
    return machine(op).cache_bytes // 2


@memo()
def lowered(make: Any, op: FusedOp) -> Any:
    """The program of an operation as a function, with tiles for this machine."""
    derived = make(op)
    return lower(dataclasses.replace(derived, program=scheduled(derived.program, machine(op))))


def text(make: Any, op: FusedOp) -> str:
    """The program of an operation with its tiles."""
    return str(scheduled(make(op).program, machine(op)))


def moved_bytes(op: FusedOp) -> int:
    """Inputs and results once: blocks that are read again come from the cache."""
    return op.outer_bytes()


def unfused_bytes(op: FusedOp, platform: str) -> int:
    """Inputs and results once, and each larger intermediate written and read; what fits in the cache stays there."""
    cache = cache_bytes(op)
    made = [v.aval for step in op.steps for eqn in step.body.eqns for v in eqn.outvars]
    return op.outer_bytes() + sum(2 * nbytes(a) for a in made if nbytes(a) > cache)
