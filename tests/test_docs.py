"""Code in the README and in the guides runs as it stands; what the site names exists."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


# Pages whose code compiles for a GPU.
COMPILING = ("docs/gpu-compile.md",)

PAGES = [
    pytest.param(page, marks=pytest.mark.aot if page in COMPILING else ())
    for page in sorted(
        str(p.relative_to(ROOT))
        for p in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
        if "```python" in p.read_text("utf-8")
    )
]


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_run_in_order(page, capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.S)
    assert blocks
    scope = {"__name__": "documentation"}
    for block in blocks:
        exec(compile(block, page, "exec"), scope)


def test_pages_of_the_site_exist():
    pages = re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
    assert len(pages) > 8
    assert [p for p in pages if not (ROOT / "docs" / p).is_file()] == []


def test_links_between_pages_lead_somewhere():
    for page in (ROOT / "docs").glob("*.md"):
        for target in re.findall(r"\]\(([^)#]+\.md)[^)]*\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).is_file(), f"{page.name} links to {target}"


@pytest.mark.parametrize(
    "name", re.findall(r"^::: ([\w.]+)$", (ROOT / "docs/api.md").read_text(encoding="utf-8"), re.M)
)
def test_documented_names_exist_and_say_what_they_are(name):
    module, _, attribute = name.rpartition(".")
    assert getattr(importlib.import_module(module), attribute).__doc__
