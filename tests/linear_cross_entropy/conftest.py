"""Small arrays in several blocks: what streams over 16384 classes is tested over 37."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import aicf_jax
from aicf_jax.ops import _loss_programs, _programs


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every loss is streamed, in blocks of 8 classes or rows: several, the last one ragged."""
    aicf_jax.clear_caches()
    monkeypatch.setattr(_programs, "cache_bytes", lambda op: 0)
    monkeypatch.setattr(_loss_programs, "BLOCK_BYTES", 0)
    monkeypatch.setattr(_loss_programs, "LEAST_ROWS", 8)
    monkeypatch.setattr(_loss_programs, "LEAST_CLASSES", 8)
    monkeypatch.setattr(_loss_programs, "SHARDS", 4)
    yield
    aicf_jax.clear_caches()
