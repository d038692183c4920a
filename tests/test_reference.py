"""docs/reference is what the code says: commands, settings, metrics, the HTTP interface and the cache's format."""

import importlib.util
import sys
from pathlib import Path

import pytest
from test_entry_points import MODULES

DOCS = Path(__file__).resolve().parents[1] / "docs"


@pytest.fixture(scope="module")
def generator():
    spec = importlib.util.spec_from_file_location("generate_reference", DOCS / "generate_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_command_is_in_it(generator):
    assert sorted(generator.MODULES) == sorted(MODULES)


def test_its_pages_are_up_to_date(generator):
    written = {path.name: path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.md")}
    made = generator.pages()
    assert written.keys() == made.keys()
    for name, text in made.items():
        assert written[name] == text, f"docs/reference/{name} is out of date: run `make reference`"


def test_no_key_and_no_field_lacks_a_meaning(generator):
    for name, text in generator.pages().items():
        rows = [line for line in text.splitlines() if line.startswith("| `") and name in ("settings.md", "http.md")]
        assert [row for row in rows if row.endswith("|  |")] == [], name
