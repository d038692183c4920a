"""Server-sent events out of bytes, cut anywhere. Knows no HTTP and no JSON."""

from collections.abc import Iterator


class EventReader:
    """Puts the pieces of a stream together again."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The data of every event that is complete with this piece; comments and other fields are left out."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data.clear()
