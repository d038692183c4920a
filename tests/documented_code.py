"""The Python code that a page of the documentation shows."""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def python_blocks(page: str) -> list[str]:
    """All fenced Python blocks of a page, named relative to the repository, in their order."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.S)


def run_block(code: str, page: str) -> dict[str, Any]:
    """Run a block; returns the names that it defined."""
    names: dict[str, Any] = {}
    exec(compile(code, str(ROOT / page), "exec"), names)
    return names
