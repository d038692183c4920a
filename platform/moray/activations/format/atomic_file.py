"""Writes files atomically on any file system."""

import hashlib
import uuid
from typing import Any

import pyarrow.fs as pafs

from moray.activations.format.disk_space import storage_full_errors


class AtomicFile:
    """Binary sink that hashes what is written and appears under its final name only on a clean exit.

    On every file system, it writes to a temporary name and then moves the file, which an object store does by copying
    on its side. Writing directly to the final name is not safe there: closing an upload completes it, even after an
    error, and pyarrow cannot abort one. S3 copies at most 5 GiB at once, so no shard may be larger.
    """

    def __init__(self, filesystem: pafs.FileSystem, path: str) -> None:
        self._filesystem = filesystem
        self._final = path
        # A unique name: a worker of a job that was just killed may still be writing.
        self._path = f"{path}.{uuid.uuid4().hex[:8]}.tmp"
        self._stream: Any = None
        self._digest = hashlib.sha256()
        self.num_bytes = 0

    def __enter__(self) -> "AtomicFile":
        with storage_full_errors(self._final):
            self._stream = self._filesystem.open_output_stream(self._path)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        closed = False
        try:
            with storage_full_errors(self._final):
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
        except OSError:  # never created, or unreachable: the error being raised already says why
            return

    def write(self, data: Any) -> int:
        """Write bytes or any object with a buffer; return the number of bytes."""
        view = memoryview(data)
        self._digest.update(view)
        with storage_full_errors(self._final):
            self._stream.write(view)
        self.num_bytes += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        """Return the number of bytes written so far."""
        return self.num_bytes

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()

    @property
    def closed(self) -> bool:
        """Whether the stream is closed (read by pyarrow)."""
        return self._stream is None or self._stream.closed

    def close(self) -> None:
        """Do nothing: the `with` block closes the stream."""

    @property
    def sha256(self) -> str:
        """SHA-256 of everything written."""
        return self._digest.hexdigest()
