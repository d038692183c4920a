"""Which files a `chats` setting names: one file, all files below a folder, or those that a glob pattern matches."""

import difflib
import glob
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from moray.errors import ConfigError, DataError

SUFFIXES = (".jsonl", ".json", ".parquet")


class ChatFile(NamedTuple):
    """One file of chats."""

    path: Path
    label: str
    """Its name below the folder that was asked for: the same on every machine."""


def find_files(path: str, split: str | None) -> list[ChatFile]:
    """Files in a fixed order.

    Args:
        path: a file, a folder, or a glob pattern of both.
        split: word that the names of a folder's files must contain, such as train; None for all files.

    Raises:
        ConfigError: the path does not exist, holds no file of chats, or has no such split.
        DataError: the folder holds the unfinished answers of `pipelines.regenerate`.
    """
    given = Path(path).expanduser()
    if given.is_file():
        return [_single_file(given, split)]
    if given.is_dir():
        _refuse_unfinished(given)
        base, found = given, _files_below(given)
    elif glob.has_magic(str(given)):
        base = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), given.parts))
        found = _matching(base, str(given.relative_to(base)))
    else:
        raise ConfigError(f"chats.path '{path}' does not exist{_nearest(given)}")
    files = [ChatFile(file, str(file.relative_to(base))) for file in sorted(found) if file.is_file()]
    files = [file for file in files if not _is_hidden(file)]
    for file in files:
        if file.path.suffix not in SUFFIXES:  # a pattern may match anything
            raise ConfigError(f"chats.path '{path}' matches '{file.path}'; accepted are {', '.join(SUFFIXES)}")
    if split is not None:
        files = _of_split(files, split, path)
    if not files:
        raise ConfigError(f"chats.path '{path}' holds no {', '.join(SUFFIXES)} file")
    return files


def _single_file(path: Path, split: str | None) -> ChatFile:
    if path.suffix not in SUFFIXES:
        raise ConfigError(
            f"chats.path is '{path}', whose suffix is unknown; accepted are {', '.join(SUFFIXES)}: "
            "decompress or convert it first"
        )
    if split is not None:
        raise ConfigError(f"chats.split is '{split}', but '{path}' is a single file; set split to null")
    return ChatFile(path, path.name)


def _refuse_unfinished(folder: Path) -> None:
    if (folder / "plan.yaml").is_file() and not (folder / "summary.yaml").is_file():
        raise DataError(f"chats.path '{folder}' holds unfinished answers: run pipelines.regenerate again until it ends")


def _files_below(folder: Path) -> Iterator[Path]:
    return (file for file in folder.rglob("*") if file.suffix in SUFFIXES)


def _matching(base: Path, pattern: str) -> Iterator[Path]:
    """Files that a pattern matches, and the files of chats below folders that it matches."""
    for match in base.glob(pattern):
        if match.is_dir():
            yield from _files_below(match)
        else:
            yield match


def _is_hidden(file: ChatFile) -> bool:
    return any(part.startswith(".") for part in Path(file.label).parts)


def _of_split(files: list[ChatFile], split: str, path: str) -> list[ChatFile]:
    """The files in whose name the split is a word of its own."""
    word = re.compile(rf"(^|/){re.escape(split)}([-./]|$)")
    chosen = [file for file in files if word.search(file.label)]
    if files and not chosen:
        names = ", ".join(file.label for file in files[:8])
        raise ConfigError(f"chats.split is '{split}', which no file of '{path}' is named for: {names}")
    return chosen


def _nearest(path: Path) -> str:
    names = sorted(other.name for other in path.parent.iterdir()) if path.parent.is_dir() else []
    match = difflib.get_close_matches(path.name, names, n=1, cutoff=0.4)
    return f"; did you mean '{path.parent / match[0]}'?" if match else ""
