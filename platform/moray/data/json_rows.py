"""Where the rows of JSON files lie: byte ranges of lines, and of the objects of an array. Contents are parsed later."""

import mmap
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from moray.errors import DataError

_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)
"""A string or a bracket. Strings are matched whole, so brackets inside them do not count."""
_BETWEEN_ELEMENTS = b" \t\r\n,"


class Extent(NamedTuple):
    """One row of a file."""

    row: int
    """Counted from 1; of JSON Lines the number of the line, empty lines included."""
    start: int
    end: int
    """Bytes [start, end) of the file."""


def is_array(file: Path) -> bool:
    """Whether a JSON file holds one array, and not JSON Lines."""
    with file.open("rb") as stream:
        return stream.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def line_extents(file: str) -> Iterator[Extent]:
    """The lines of a JSON Lines file that are not empty.

    A line ends at b"\\n" alone: texts contain U+2028 and other characters at which str.splitlines would cut.
    """
    position = 0
    with Path(file).open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield Extent(number, position, position + len(line))
            position += len(line)


def array_extents(file: str) -> Iterator[Extent]:
    """The objects of a JSON array."""
    with Path(file).open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
        for number, (start, end) in enumerate(array_elements(buffer, file), start=1):
            yield Extent(number, start, end)


def array_elements(buffer: mmap.mmap | bytes, file: str) -> Iterator[tuple[int, int]]:
    """Bytes [start, end) of every object of a JSON array, found by counting brackets.

    Raises:
        DataError: the array holds something other than objects, or does not end; the message names `file`.
    """
    depth = 0  # brackets that are open: 1 between two elements
    element_start = gap_start = 0
    for token in _TOKEN.finditer(buffer):
        bracket = buffer[token.start() : token.start() + 1]
        if bracket == b'"':
            continue
        if depth == 1:  # the next element begins here, or the array ends
            if buffer[gap_start : token.start()].strip(_BETWEEN_ELEMENTS):
                raise DataError(
                    f"'{file}' is a JSON array with something else than objects before byte {token.start()}"
                )
            element_start = token.start()
        if bracket in (b"[", b"{"):
            depth += 1
            if depth == 1:
                gap_start = token.end()
            continue
        depth -= 1
        if depth == 0:
            return
        if depth == 1:
            gap_start = token.end()
            yield element_start, gap_start
    raise DataError(f"'{file}' is a JSON array that does not end; the file seems cut off")
