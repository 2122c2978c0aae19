"""The probes of `gpu_probe` as the last step of the check, in a process of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

#: Two to three minutes are expected; on a machine that is busy it may be more.
TIMEOUT_S = 600.0


def command(target: str | None, folder: Path) -> list[str]:
    """The quick probes on this GPU, or all of them compiled for `target`."""
    found = [sys.executable, "-m", "gpu_probe", "run", "--device", "cuda", "--output", str(folder)]
    return [*found, "--quick"] if target is None else [*found, "--dry-run", "--target", target]


def run_probes(target: str | None, folder: Path, timeout_s: float = TIMEOUT_S) -> int:
    """Runs the probes on this GPU, or with a target compiles them for it; what they print is printed.

    jax has taken most of the device's memory by now, of which the probes need some gigabytes; in a process of their own
    they share nothing else with it.

    Args:
      target: the GPU to compile for; None measures the one at hand.
      folder: where samples, map and images go.
      timeout_s: after which they are stopped.

    Returns:
      The exit code, 1 where the time was used up.
    """
    try:
        return subprocess.run(command(target, folder), timeout=timeout_s, check=False).returncode
    except subprocess.TimeoutExpired:
        print(f"the probes took longer than {timeout_s:g} seconds and were stopped", file=sys.stderr)
        return 1
