"""Parses server-sent events from a byte stream that may be split anywhere. Independent of HTTP and JSON."""

from collections.abc import Iterator


class EventReader:
    """Reassembles events from the pieces of a stream."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Yield the data of every event that this piece completes; comments and other fields are dropped."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data.clear()
