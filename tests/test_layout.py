"""The layout that imports, packaging and readers rely on."""

import platform
import re
import subprocess
from pathlib import Path

import pytest

from moray.config import read_yaml

REPOSITORY = Path(__file__).resolve().parents[1]
LIBRARY = REPOSITORY / "platform" / "moray"
FOLDERS = {"platform", "pipelines", "serve", "sweeps", "configs", "tests", "docs"}
OUTPUTS = {"runs", "dist", "__pycache__"}
MAX_LINES = 400
MAX_MODULES = 15
PAGES = ["README.md", *sorted(str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "docs").rglob("*.md"))]
YAMLS = sorted(path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / "configs").rglob("*.y*ml"))


def test_platform_is_a_source_root_and_no_package():
    assert not (REPOSITORY / "platform" / "__init__.py").exists()
    assert not Path(platform.__file__).is_relative_to(REPOSITORY / "platform")
    assert platform.python_version()


def test_top_level_folders_are_the_known_ones():
    found = {path.name for path in REPOSITORY.iterdir() if path.is_dir() and not path.name.startswith(".")}
    assert found - OUTPUTS <= FOLDERS
    known = {"moray", "README.md", "__pycache__"}
    assert {path.name for path in (REPOSITORY / "platform").iterdir()} <= known


def test_every_folder_of_the_library_is_a_package():
    modules = {path.parent for path in LIBRARY.rglob("*.py")}
    assert LIBRARY in modules
    assert [str(folder) for folder in modules if not (folder / "__init__.py").is_file()] == []


def test_no_file_of_the_library_is_too_long():
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in LIBRARY.rglob("*.py")}
    assert {str(path): length for path, length in lengths.items() if length > MAX_LINES} == {}


def test_no_folder_of_the_library_is_crowded():
    folders = {path.parent for path in LIBRARY.rglob("*.py")}
    counts = {folder.relative_to(LIBRARY).as_posix(): len([*folder.glob("[!_]*.py")]) for folder in folders}
    assert not {folder for folder, count in counts.items() if count > MAX_MODULES}


def test_test_files_have_unique_names_and_no_packages():
    files = list((REPOSITORY / "tests").rglob("*.py"))
    assert [str(path) for path in files if path.name == "__init__.py"] == []
    names = [path.name for path in files if path.name != "conftest.py"]
    assert sorted(names) == sorted(set(names))


def test_no_file_names_this_machine():
    listed = subprocess.run(
        ["git", "-C", str(REPOSITORY), "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    machine_path = re.compile(rb"(?<![\w./])/(work|root|home|mnt)/[\w.]")
    files = [REPOSITORY / name for name in listed.stdout.split("\0") if name]
    assert [str(path) for path in files if path.is_file() and machine_path.search(path.read_bytes())] == []


@pytest.mark.parametrize("name", YAMLS)
def test_every_yaml_is_read_by_our_loader(name):
    assert read_yaml(REPOSITORY / name)


def test_every_promise_is_held_by_a_test_that_is_there():
    promises = re.findall(r"`([\w/]+\.py)::(\w+)`", (REPOSITORY / "tests" / "README.md").read_text(encoding="utf-8"))
    assert len(promises) > 50
    missing = [
        f"{file}::{name}"
        for file, name in promises
        if f"\ndef {name}(" not in (REPOSITORY / "tests" / file).read_text(encoding="utf-8")
    ]
    assert missing == []


def sections_of_map() -> dict[str, set[str]]:
    """The words that the map of the code has for each folder, by its path."""
    text = (REPOSITORY / "docs" / "developer" / "map.md").read_text(encoding="utf-8").split("```")[1]
    sections: dict[str, set[str]] = {}
    parents: list[tuple[int, str]] = []
    for line in text.splitlines():
        if begins := re.match(r"( *)([\w/.]+)/ {2,}", line):
            indent = len(begins.group(1))
            parents = [(depth, path) for depth, path in parents if depth < indent]
            parents.append((indent, "/".join([*(path for _, path in parents[-1:]), begins.group(2)])))
        if parents:
            sections.setdefault(parents[-1][1], set()).update(re.findall(r"\w+", line))
    return sections


def test_the_map_names_every_module_in_its_folder_and_no_folder_that_is_not_there():
    sections = sections_of_map()
    assert [path for path in sections if not (REPOSITORY / path).is_dir()] == []
    missing = [
        str(path.relative_to(REPOSITORY))
        for root in ("platform", "pipelines", "serve", "sweeps")
        for path in (REPOSITORY / root).rglob("*.py")
        if not path.stem.startswith("_")
        and path.stem not in sections.get(str(path.parent.relative_to(REPOSITORY)), set())
    ]
    assert missing == []


def test_the_readme_is_two_screens():
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert len(text.encode()) <= 10_000
    assert text.count("\n") <= 180


@pytest.mark.parametrize("page", PAGES)
def test_links_between_pages_lead_somewhere(page):
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text)]
    local = [link for link in links if link and "://" not in link]
    assert [link for link in local if not ((REPOSITORY / page).parent / link).exists()] == []
