"""Checks of a study's configuration: whatever is unusable raises `ConfigError`, which names the argument."""

from __future__ import annotations

import math
from typing import Any


class ConfigError(ValueError):
    """An argument is unusable: the message names it, what was expected, what was found and what to do."""

    def __init__(self, argument: str, expected: str, found: object, remedy: str):
        self.argument, self.reason = argument, f"expected {expected}, found {found!r}; {remedy}"
        super().__init__(f"{argument}: {self.reason}")


def is_number(value: object) -> bool:
    """Whether `value` is a finite int or float, and no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def check_positive(argument: str, value: Any, expected: str, remedy: str, above: float = 0.0):
    """Raises ConfigError unless `value` is a finite number above `above`."""
    if not is_number(value) or value <= above:
        raise ConfigError(argument, expected, value, remedy)


def check_count(argument: str, value: object, low: int, high: int | None, remedy: str):
    """Raises ConfigError unless `value` is an integer from `low` to `high` (None: without end)."""
    valid = isinstance(value, int) and not isinstance(value, bool) and low <= value and (high is None or value <= high)
    if not valid:
        expected = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
        raise ConfigError(argument, expected, value, remedy)
