"""Executes each program of one CUDA probe once, for a profiler.

Run as ``python -m gpu_probe.cuda.once cuda_stride [--quick]``.

It prints a line of JSON for each: the point, and the kernel that it measures with.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from gpu_probe.cuda.measure import CudaProgram
from gpu_probe.probe import DeviceError, Target
from gpu_probe.probes import probes


def run(name: str, quick: bool, target: Target) -> list[dict[str, object]]:
    """Executes the programs; returns what is printed. Points that the GPU cannot run are left out."""
    probe = next(p for p in probes("cuda") if p.name == name)
    found: list[dict[str, object]] = []
    for point in probe.points(quick):
        try:
            program = probe.generate(point, target)
            program.execute()
        except DeviceError:
            continue
        assert isinstance(program, CudaProgram)
        found.append({"point": dict(point), "kernel": program.template.name})
    return found


def main(arguments: Sequence[str]) -> int:
    """The command; returns the exit code."""
    from gpu_probe.devices import connect

    known = [p.name for p in probes("cuda")]
    names = [a for a in arguments if a != "--quick"]
    if len(names) != 1 or names[0] not in known:
        print(f"expected one of {', '.join(known)}, found {' '.join(names)}", file=sys.stderr)
        return 2
    try:
        target = connect("cuda")
    except DeviceError as error:
        print(f"python -m gpu_probe.cuda.once: {error}", file=sys.stderr)
        return 2
    for line in run(names[0], "--quick" in arguments, target):
        print(json.dumps(line))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
