"""The patterns, one file each: every module exports ``PATTERN``; earlier names win where two fit the same anchor.

File names start with a two-digit priority: longer sequences first.
"""

from __future__ import annotations

from aicf_jax.pattern import Pattern
from aicf_jax.registry import discover, unique

#: All built-in patterns, in order of preference. ``fuse(..., patterns=FUSION_PATTERNS + (mine,))`` adds one.
FUSION_PATTERNS: tuple[Pattern, ...] = tuple(unique(discover(__name__, "PATTERN"), "name"))
