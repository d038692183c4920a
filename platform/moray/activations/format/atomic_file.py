"""A file that is there whole or not at all, on any file system."""

import hashlib
import uuid
from typing import Any

import pyarrow.fs as pafs

from moray.activations.format.disk_space import told_if_full


class AtomicFile:
    """A binary sink that hashes what passes and appears under its final name on a clean exit.

    Everywhere: a temporary name, then a move, which an object store does as a copy of its own. The final name
    must not be written directly there, for closing an upload completes it, after an error as well, and pyarrow
    cannot abort one. One copy is at most 5 GiB on S3: no shard may be larger.
    """

    def __init__(self, filesystem: pafs.FileSystem, path: str) -> None:
        self._filesystem = filesystem
        self._final = path
        # A name of its own: a job killed a moment ago may still have a worker that writes.
        self._path = f"{path}.{uuid.uuid4().hex[:8]}.tmp"
        self._stream: Any = None
        self._digest = hashlib.sha256()
        self.num_bytes = 0

    def __enter__(self) -> "AtomicFile":
        with told_if_full(self._final):
            self._stream = self._filesystem.open_output_stream(self._path)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        closed = False
        try:
            with told_if_full(self._final):
                self._stream.close()
            closed = True
        finally:
            if kind is not None or not closed:
                self._discard()
        if kind is None:
            self._filesystem.move(self._path, self._final)

    def _discard(self) -> None:
        try:
            self._filesystem.delete_file(self._path)
        except OSError:  # not even begun, or out of reach: what is being raised already says why
            return

    def write(self, data: Any) -> int:
        """Write bytes or anything with a buffer."""
        view = memoryview(data)
        self._digest.update(view)
        with told_if_full(self._final):
            self._stream.write(view)
        self.num_bytes += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        """Bytes written so far."""
        return self.num_bytes

    def flush(self) -> None:
        """Pass what is buffered on."""
        self._stream.flush()

    @property
    def closed(self) -> bool:
        """Whether the stream is closed (asked by pyarrow)."""
        return self._stream is None or self._stream.closed

    def close(self) -> None:
        """Nothing: the `with` block closes."""

    @property
    def sha256(self) -> str:
        """Hash of everything written."""
        return self._digest.hexdigest()
