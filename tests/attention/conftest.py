"""Small arrays in several tiles: what streams at length 4096 is tested at length 37."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import aicf_jax
from aicf_jax.ops import _programs


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every attention is streamed, in blocks of 8: several, the last one ragged."""

    def blocks(program, machine):
        return program.with_blocks(**{a.name: min(8, a.size) for a in program.axes if a.name in ("i", "j")})

    aicf_jax.clear_caches()
    monkeypatch.setattr(_programs, "cache_bytes", lambda op: 0)
    monkeypatch.setattr(_programs, "scheduled", blocks)
    yield
    aicf_jax.clear_caches()
