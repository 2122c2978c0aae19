"""Code in the README and in the guides runs as it stands."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


PAGES = sorted(
    str(p.relative_to(ROOT))
    for p in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
    if "```python" in p.read_text("utf-8")
)


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_run_in_order(page, capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.S)
    assert blocks
    scope = {"__name__": "documentation"}
    for block in blocks:
        exec(compile(block, page, "exec"), scope)
