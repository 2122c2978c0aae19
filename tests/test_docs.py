"""Code in the README and in the guides runs as it stands."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("page", ["README.md", "docs/extending.md"])
def test_python_blocks_run_in_order(page, capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.S)
    assert blocks
    scope = {"__name__": "documentation"}
    for block in blocks:
        exec(compile(block, page, "exec"), scope)
