"""Compile for a GPU on a machine that has none, and see what a program becomes there.

    report = compile_for("h200", f, *avals)
    print(report)                                              # kernels, temporaries, bytes, resources
    print(report.beside(compile_for("h200", unfused, *avals)))  # two programs side by side

From the shell: ``python -m pallas_kernels.aot h200 module:function --arg bf16[8192,4096]``.
"""

from pallas_kernels.aot.compile import CompileError, Program, check_packages, compile_all, compile_for
from pallas_kernels.aot.hlo import KernelLaunch
from pallas_kernels.aot.report import Comparison, CompileReport
from pallas_kernels.aot.resources import MosaicKernel
from pallas_kernels.aot.target import Target
from pallas_kernels.aot.target import load as load_target
from pallas_kernels.aot.target import names as targets

__all__ = [
    "Comparison",
    "CompileError",
    "CompileReport",
    "KernelLaunch",
    "MosaicKernel",
    "Program",
    "Target",
    "check_packages",
    "compile_all",
    "compile_for",
    "load_target",
    "targets",
]
