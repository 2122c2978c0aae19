"""The framework's logger: each distinct message once per process."""

from __future__ import annotations

import logging
import threading

_logger = logging.getLogger("aicf_jax")
_seen: set[str] = set()
_lock = threading.Lock()
#: Distinct messages remembered; beyond it they are logged every time.
_LIMIT = 4096


def once(message: str) -> None:
    """Logs a warning the first time it is met."""
    with _lock:
        if message in _seen:
            return
        if len(_seen) < _LIMIT:
            _seen.add(message)
    _logger.warning("%s", message)
