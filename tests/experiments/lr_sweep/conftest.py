"""The smallest sweep, run once for all that ask what it left."""

from __future__ import annotations

import pytest

from experiments.lr_sweep.store import Store
from tests.experiments.lr_sweep.sweep_support import SMALL, SMALL_FLAGS, command, identity


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """The small sweep, run once: (folder, exit code, output)."""
    folder = tmp_path_factory.mktemp("sweep")
    return folder, *command(folder, *SMALL_FLAGS)


@pytest.fixture(scope="session")
def results(finished):
    """Its results, by cell."""
    return Store(finished[0], SMALL, f"{identity.__module__}.{identity.__qualname__}").load()
