"""What the tests of the experiments' commands share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def help_of(module):
    """What ``python -m module --help`` prints."""
    command = [sys.executable, "-m", module, "--help"]
    root = Path(__file__).parents[2]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, cwd=root).stdout
