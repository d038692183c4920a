"""The activation cache as files: plan, parts, shards with commit markers, manifest.

Everything goes through `pyarrow.fs`, so that a cache may lie on a local disk or in an object store. A shard
counts only once its commit marker is there, and a marker is written only after its shard: killed at any
instant, a job finds every finished shard and redoes the others.
"""

import hashlib
import json
import uuid
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from moray.errors import ConfigError, DataError, MismatchError


@dataclass(frozen=True)
class ShardInfo:
    """A committed shard, as its marker and the manifest describe it."""

    name: str
    rows: int
    tokens: int
    bytes: int
    sha256: str
    row_groups: list[list[int]]
    """Lengths of the chats in each row group."""
    hidden_square_sums: dict[str, float]
    """Per hidden column, the sum over tokens of the mean square: gives the rms a drafter scales by."""


class CacheStore:
    """One activation cache, by URI or path. Picklable."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._filesystem: pafs.FileSystem | None = None
        self._root = ""

    def __reduce__(self) -> tuple[Any, ...]:
        return CacheStore, (self.uri,)

    @property
    def filesystem(self) -> pafs.FileSystem:
        """The file system that the URI names."""
        if self._filesystem is None:
            try:
                uri = self.uri if "://" in self.uri else _absolute(self.uri)
                self._filesystem, self._root = pafs.FileSystem.from_uri(uri)
            except (pa.ArrowInvalid, OSError) as error:
                raise ConfigError(f"'{self.uri}' is no path or URI that can be opened: {error}") from None
        return self._filesystem

    def path(self, name: str) -> str:
        """Full path of a file of this cache on its file system."""
        _ = self.filesystem
        return f"{self._root}/{name}"

    def exists(self, name: str) -> bool:
        """Whether a file is there."""
        return self.filesystem.get_file_info(self.path(name)).type == pafs.FileType.File

    def size(self, name: str) -> int:
        """Bytes of a file."""
        return int(self.filesystem.get_file_info(self.path(name)).size or 0)

    def names(self, folder: str, suffix: str) -> list[str]:
        """Sorted names in a folder that end in `suffix`."""
        selector = pafs.FileSelector(self.path(folder), allow_not_found=True)
        return sorted(info.base_name for info in self.filesystem.get_file_info(selector) if info.path.endswith(suffix))

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file so that it is there whole or not at all."""
        self._write_atomically(name, lambda sink: sink.write(json.dumps(value).encode()))

    def read_json(self, name: str) -> Any:
        """Read a JSON file.

        Raises:
            DataError: it is missing or damaged.
        """
        try:
            with self.filesystem.open_input_file(self.path(name)) as source:
                return json.loads(source.read())
        except FileNotFoundError:
            raise DataError(
                f"'{self.uri}/{name}' is missing: is the cache complete? Run pipelines.cache_activations"
            ) from None
        except (OSError, ValueError) as error:
            raise DataError(
                f"'{self.uri}/{name}' is damaged: {error}; remove it and run pipelines.cache_activations"
            ) from None

    def write_text(self, name: str, text: str) -> None:
        """Write a text file so that it is there whole or not at all."""
        self._write_atomically(name, lambda sink: sink.write(text.encode()))

    def write_table(self, name: str, table: pa.Table) -> None:
        """Write a small Parquet file so that it is there whole or not at all."""
        self._write_atomically(name, lambda sink: pq.write_table(table, sink))

    def read_table(self, name: str) -> pa.Table:
        """Read a whole Parquet file."""
        try:
            return pq.read_table(self.path(name), filesystem=self.filesystem)
        except (OSError, pa.ArrowInvalid) as error:
            raise DataError(f"'{self.uri}/{name}' cannot be read: {error}; remove it and cache again") from None

    def read_row_groups(self, shard: str, row_groups: list[int], columns: list[str]) -> pa.Table:
        """Read some row groups of a shard, and of those only the named columns.

        Raises:
            DataError: the shard is missing or damaged; its name says which one to remove and redo.
        """
        name = f"shards/{shard}.parquet"
        try:
            with self.filesystem.open_input_file(self.path(name)) as source:
                file = pq.ParquetFile(source, pre_buffer=True, page_checksum_verification=True)
                return file.read_row_groups(row_groups, columns=columns, use_threads=False)
        except (OSError, pa.ArrowInvalid, pa.ArrowKeyError) as error:
            raise DataError(
                f"shard '{self.uri}/{name}' cannot be read: {error}; remove it and its .json, then cache again"
            ) from None

    def claim(self, plan: dict[str, Any]) -> None:
        """Start a cache, or go on with one that was started for the same plan; clears what a kill left half-written.

        Raises:
            MismatchError: something else is cached here; the first differing entry and both values are named.
        """
        plan = json.loads(json.dumps(plan))
        for folder in ("tokens", "shards"):
            for name in self.names(folder, ".tmp"):
                self.filesystem.delete_file(self.path(f"{folder}/{name}"))
        if not self.exists("plan.json"):
            self.write_json("plan.json", plan)
            return
        present = self.read_json("plan.json")
        for key in plan:
            if present.get(key) != plan[key]:
                raise MismatchError(
                    f"'{self.uri}' was cached with {key} = {json.dumps(present.get(key))}, now it is "
                    f"{json.dumps(plan[key])}; give another output or remove the folder"
                )

    def committed(self) -> dict[str, ShardInfo]:
        """All shards that count, by name."""
        names = self.names("shards", ".json")
        return {name[:-5]: ShardInfo(**self.read_json(f"shards/{name}")) for name in names}

    def commit(self, info: ShardInfo) -> None:
        """Make a written shard count."""
        self.write_json(f"shards/{info.name}.json", info.__dict__)

    def open_output(self, name: str) -> "AtomicFile":
        """A file to write that appears under its name only when closed without an error."""
        self._make_folder(name)
        return AtomicFile(self.filesystem, self.path(name))

    def _write_atomically(self, name: str, write: Any) -> None:
        with self.open_output(name) as sink:
            write(sink)

    def _make_folder(self, name: str) -> None:
        folder = self.path(name).rsplit("/", 1)[0]
        self.filesystem.create_dir(folder, recursive=True)


class AtomicFile:
    """A binary sink that hashes what passes and appears under its final name on a clean exit.

    On a local disk: temporary file, then rename. In an object store a file appears when its upload is
    completed, and the commit marker decides anyway.
    """

    def __init__(self, filesystem: pafs.FileSystem, path: str) -> None:
        self._filesystem = filesystem
        self._final = path
        self._is_local = isinstance(filesystem, pafs.LocalFileSystem)
        # A name of its own: a job killed a moment ago may still have a worker that writes.
        self._path = f"{path}.{uuid.uuid4().hex[:8]}.tmp" if self._is_local else path
        self._stream: Any = None
        self._digest = hashlib.sha256()
        self.num_bytes = 0

    def __enter__(self) -> "AtomicFile":
        self._stream = self._filesystem.open_output_stream(self._path)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        closed = False
        try:
            self._stream.close()
            closed = True
        finally:
            if self._is_local and kind is None and closed:
                self._filesystem.move(self._path, self._final)
            elif self._is_local:
                self._filesystem.delete_file(self._path)

    def write(self, data: Any) -> int:
        """Write bytes or anything with a buffer."""
        view = memoryview(data)
        self._digest.update(view)
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


def _absolute(path: str) -> str:
    from pathlib import Path

    return Path(path).absolute().as_uri()
