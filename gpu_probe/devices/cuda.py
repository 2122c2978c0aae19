"""The NVIDIA GPU of this machine, or one that is described and only compiled for."""

from __future__ import annotations

import re

from gpu_probe.cuda.compile import ARCHS, COMPILING, LEAST, check_packages
from gpu_probe.cuda.gpu import Compiler, open_gpu
from gpu_probe.probe import DeviceError, Target

#: What is compiled for where no GPU is named.
DEFAULT = "h200"


def connect(name: str | None = None, compile_only: bool = False) -> Target:
    """The first GPU of this machine; with `compile_only` one of `ARCHS`, or an architecture as ``"sm_90a"``.

    Raises:
      DeviceError: packages are missing, there is no driver or no GPU, or an unknown or too old architecture.
    """
    if not compile_only:
        if name is not None:
            raise DeviceError(
                f"expected no name of a GPU, because probes run on the one at hand, found {name!r}; with --dry-run "
                "they are compiled for another"
            )
        found, gpu = open_gpu()
        return Target("cuda", found, gpu.facts, handle=gpu)
    name = name or DEFAULT
    arch = ARCHS.get(name, name)
    number = re.fullmatch(r"sm_(\d+)[af]?", arch)
    if number is None:
        raise DeviceError(f"--target: expected {', '.join(ARCHS)} or an architecture like sm_90a, found {name!r}")
    if int(number[1]) < LEAST:
        raise DeviceError(f"--target: expected sm_{LEAST} or later, which tensor core probes need, found {name!r}")
    try:
        check_packages(COMPILING)
    except ImportError as error:
        raise DeviceError(str(error)) from error
    return Target("cuda", name, {"arch": arch}, present=False, handle=Compiler(arch))
