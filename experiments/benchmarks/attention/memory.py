"""How much memory one program may use here."""

from __future__ import annotations

import os
from pathlib import Path

# Other processes share the machine, and arguments, results and a second program's temporaries come beside.
SHARE = 0.25
_LIMIT = Path("/sys/fs/cgroup/memory.max")


def machine_bytes() -> int:
    """Physical memory, or the limit of the container where that is lower."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = _LIMIT.read_text(encoding="ascii").strip()
    except OSError:
        return physical
    return min(physical, int(limit)) if limit.isdigit() else physical


def budget_bytes() -> int:
    """Temporaries that a program may have and still be run: a quarter of the machine's memory."""
    return int(machine_bytes() * SHARE)
