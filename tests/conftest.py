"""Fixtures and switches that every test shares. Depends on no package of the project."""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

TESTS = Path(__file__).parent
DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"

# Both are read once, when jax starts: so here, before any test module imports jax. What the caller set wins.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if DEVICE_COUNT_FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICE_COUNT_FLAG}=8".strip()

# The first example compiles and the others do not, so a deadline per example would measure XLA. In CI the examples are
# the same on every run: a failure there belongs to the change at hand.
hypothesis.settings.register_profile("project", deadline=None, derandomize="CI" in os.environ, print_blob=True)
hypothesis.settings.load_profile("project")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write golden files instead of comparing with them")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `slow.txt` names. What is collected in part cannot show that a line names nothing."""
    slow, collected = _slow(), {}
    for item in items:
        file, _, test = item.nodeid.partition("::")
        collected.setdefault(file, {}).setdefault(test.partition("[")[0], set()).add(test)
        if test in slow.get(file, ()):
            item.add_marker("slow")
    stale = [
        f"{file}::{test}"
        for file, tests in slow.items()
        for test in sorted(tests)
        if len(found := collected.get(file, {}).get(test.partition("[")[0], ())) > 1 and test not in found
    ]
    if stale:
        raise pytest.UsageError("tests/slow.txt names tests that are not there:\n" + "\n".join(stale))


def _slow() -> dict[str, set[str]]:
    """File -> names of tests in it; a line that is not indented names a file."""
    found: dict[str, set[str]] = {}
    file = ""
    for line in (TESTS / "slow.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("    "):
            found[file].add(line.strip())
        elif line and not line.startswith("#"):
            found[file := line] = set()
    return found


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import jax

        if jax.default_backend() != "gpu":
            pytest.skip("jax has no GPU here; on a machine with one, set JAX_PLATFORMS=cuda")
    if item.get_closest_marker("aot") and importlib.util.find_spec("jax_cuda13_plugin") is None:
        pytest.skip("needs the `aot` extra: pip install '.[aot]'")
    if item.get_closest_marker("nvrtc"):
        from gpu_probe.cuda.compile import COMPILING, check_packages

        try:
            check_packages(COMPILING)
        except ImportError as error:
            pytest.skip(str(error))


@pytest.fixture
def strict_promotion() -> Iterator[None]:
    """Mixing dtypes raises. Ask for it with `pytest.mark.usefixtures("strict_promotion")`."""
    import jax

    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[..., None]:
    """`golden(text)` compares text with `tests/golden/<test module>/<test name>.txt`.

    `golden(text, name)` uses `<test name>.<name>.txt`, for a test that has several. `--update-golden` writes the files.
    """
    module = request.path.relative_to(TESTS).with_suffix("")
    folder = TESTS / "golden" / module
    stem = re.sub(r"[^\w.-]+", "_", request.node.name).strip("_")
    update: bool = request.config.getoption("--update-golden")

    def compare(text: str, name: str | None = None) -> None:
        __tracebackhide__ = True
        path = folder / f"{stem}.txt" if name is None else folder / f"{stem}.{name}.txt"
        actual = text.rstrip("\n") + "\n"
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(actual, encoding="utf-8")
            return
        shown = path.relative_to(TESTS.parent)
        if not path.exists():
            pytest.fail(
                f"{shown} does not exist; read the text, then run with --update-golden:\n{actual}", pytrace=False
            )
        expected = path.read_text(encoding="utf-8")
        if actual != expected:
            diff = difflib.unified_diff(expected.splitlines(), actual.splitlines(), str(shown), "this run", lineterm="")
            pytest.fail("\n".join(["golden text differs (--update-golden accepts it)", *diff]), pytrace=False)

    return compare
