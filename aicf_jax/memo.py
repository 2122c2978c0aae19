"""Bounded memories of pure functions, which `clear_caches` empties together."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_ALL: list[Any] = []


def memo(maxsize: int = 512) -> Callable[[F], F]:
    """A decorator: remembers results for this many different arguments and forgets the least recently used first."""

    def decorate(function: F) -> F:
        cached = functools.lru_cache(maxsize=maxsize)(function)
        _ALL.append(cached)
        return cached  # pyright: ignore[reportReturnType]

    return decorate


def clear() -> None:
    """Forgets everything."""
    for cached in _ALL:
        cached.cache_clear()
