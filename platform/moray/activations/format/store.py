"""Reads and writes the files of an activation cache: plan, parts, shards with commit markers, manifest.

All access goes through `pyarrow.fs`, so a cache can be on a local disk or in an object store. A shard counts only once
it has a commit marker, which is written after the shard: a job killed at any time finds every finished shard and
rewrites only the others. Every JSON file contains a hash of itself.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from moray.activations.format.atomic_file import AtomicFile
from moray.activations.format.location import absolute, refuse_secrets
from moray.activations.format.records import AnyRecord, PlanRecord
from moray.activations.format.shard_info import ShardInfo
from moray.activations.format.threads import in_threads
from moray.errors import ConfigError, DamagedError, DataError, MismatchError, UnreachableError
from moray.explain import one_line
from moray.runs_folder import as_runs

_SEAL = "seal"


class CacheStore:
    """Files of one activation cache, by URI or path. Picklable.

    Credentials and address of an object store come from the environment (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...).
    """

    def __init__(self, uri: str) -> None:
        """
        Raises:
            ConfigError: the URI holds credentials.
        """
        refuse_secrets(uri)
        self.uri = uri.rstrip("/") or uri
        self._filesystem: pafs.FileSystem | None = None
        self._root = ""
        self._folders: set[str] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        return CacheStore, (self.uri,)

    @property
    def filesystem(self) -> pafs.FileSystem:
        """File system that the URI names."""
        if self._filesystem is None:
            try:
                uri = self.uri if "://" in self.uri else absolute(self.uri)
                self._filesystem, self._root = pafs.FileSystem.from_uri(uri)
            except (pa.ArrowInvalid, OSError) as error:
                raise ConfigError(f"'{self.uri}' is no path or URI that can be opened: {error}") from None
        return self._filesystem

    def path(self, name: str) -> str:
        """Return the full path of a file of this cache on its file system."""
        _ = self.filesystem
        return f"{self._root}/{name}"

    def check(self) -> None:
        """Check that the store can be written to, before long work begins.

        Raises:
            ConfigError: the URI cannot be opened.
            DataError: the store does not answer, or there is no such bucket.
        """
        if not self.exists("plan.json"):
            self._make_folder("plan.json")

    def exists(self, name: str) -> bool:
        """Return whether a file exists."""
        with self._reaching(name):
            return self.filesystem.get_file_info(self.path(name)).type == pafs.FileType.File

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        with self._reaching(name):
            return int(self.filesystem.get_file_info(self.path(name)).size or 0)

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the size in bytes of every file in a folder, by name, using one listing."""
        selector = pafs.FileSelector(self.path(folder), allow_not_found=True)
        with self._reaching(folder):
            infos = self.filesystem.get_file_info(selector)
        return {info.base_name: int(info.size) for info in infos if info.type == pafs.FileType.File}

    def names(self, folder: str, suffix: str | tuple[str, ...]) -> list[str]:
        """Return the sorted names of the files in a folder that end in `suffix`, or in one of several."""
        return sorted(name for name in self.sizes(folder) if name.endswith(suffix))

    def delete(self, name: str) -> None:
        """Delete a file if it exists."""
        with self._reaching(name):
            try:
                self.filesystem.delete_file(self.path(name))
            except FileNotFoundError:
                return

    def write_json(self, name: str, value: Mapping[str, object]) -> None:
        """Write a JSON file atomically, with a hash that reveals damage."""
        self._write_atomically(name, lambda sink: sink.write(json.dumps({**value, _SEAL: _seal(value)}).encode()))

    def read_json(self, name: str) -> Any:
        """Read a JSON file that `write_json` wrote.

        Raises:
            DamagedError: the file is missing or damaged.
        """
        try:
            with self.filesystem.open_input_file(self.path(name)) as source:
                value = json.loads(source.read())
            if not isinstance(value, dict):
                raise ValueError(f"it holds a {type(value).__name__} instead of keys")
            seal = value.pop(_SEAL, None)
            if seal is not None and seal != _seal(value):
                raise ValueError("its content does not match the hash in it")
        except FileNotFoundError:
            raise DamagedError(
                f"'{self.uri}/{name}' is missing: is the cache complete? Run pipelines.cache_activations"
            ) from None
        except OSError as error:
            raise self._unreachable(name, error) from None
        except ValueError as error:
            raise DamagedError(
                f"'{self.uri}/{name}' is damaged: {error}; remove it and run pipelines.cache_activations"
            ) from None
        return value

    def read_record(self, name: str, kind: type[AnyRecord]) -> AnyRecord:
        """Read a JSON file as a record.

        Raises:
            DamagedError: the file is missing or damaged, or lacks a value.
        """
        return self._record(name, kind, self.read_json(name))

    def sha256(self, name: str, chunk_bytes: int = 8 << 20) -> str:
        """Return the SHA-256 of a file, read in chunks."""
        digest = hashlib.sha256()
        with self._reaching(name), self.filesystem.open_input_stream(self.path(name)) as source:
            while data := source.read(chunk_bytes):
                digest.update(data)
        return digest.hexdigest()

    def write_text(self, name: str, text: str) -> None:
        """Write a text file atomically."""
        self._write_atomically(name, lambda sink: sink.write(text.encode()))

    def read_text(self, name: str) -> str:
        """Read a text file.

        Raises:
            DamagedError: the file does not exist.
        """
        try:
            with self._reaching(name), self.filesystem.open_input_file(self.path(name)) as source:
                return source.read().decode()
        except FileNotFoundError:
            raise DamagedError(f"'{self.uri}/{name}' is missing") from None

    def write_table(self, name: str, table: pa.Table) -> AtomicFile:
        """Write a small Parquet file atomically; the result holds its size and hash."""
        return self._write_atomically(name, lambda sink: pq.write_table(table, sink))

    def read_table(self, name: str, columns: list[str] | None = None) -> pa.Table:
        """Read a Parquet file, or some columns of it."""
        try:
            return pq.read_table(self.path(name), columns=columns, filesystem=self.filesystem)
        except (OSError, pa.ArrowInvalid) as error:
            if _is_unreachable(error):
                raise self._unreachable(name, error) from None
            raise DataError(f"'{self.uri}/{name}' cannot be read: {error}; remove it and cache again") from None

    def read_row_groups(self, shard: str, row_groups: list[int], columns: list[str]) -> pa.Table:
        """Read the named columns of some row groups of a shard.

        Raises:
            DataError: the shard is missing or damaged; names the files to remove.
        """
        with self.open_shard(shard) as file:
            return file.read_row_groups(row_groups, columns=columns, use_threads=False)

    @contextmanager
    def open_shard(self, shard: str) -> Iterator[pq.ParquetFile]:
        """Open a shard for reading; errors in the `with` block are reported as damage to the shard.

        Raises:
            DataError: the shard is missing or damaged; names the files to remove.
        """
        name = f"shards/{shard}.parquet"
        try:
            with self.filesystem.open_input_file(self.path(name)) as source:
                yield pq.ParquetFile(source, pre_buffer=True, page_checksum_verification=True)
        except (OSError, pa.ArrowInvalid, pa.ArrowKeyError) as error:
            if _is_unreachable(error):
                raise self._unreachable(name, error) from None
            raise DataError(
                f"shard '{self.uri}/{name}' cannot be read: {error}; remove it and its .json, then cache again"
            ) from None

    def begin_or_resume(self, plan: Mapping[str, object]) -> None:
        """Start a cache, or resume one with the same plan; delete the half-written files of a killed process.

        Args:
            plan: plain values, such as `PlanRecord.values`; compared with those of plan.json key by key.

        Raises:
            MismatchError: a different cache is here; names the first differing entry and both values.
        """
        plan = json.loads(json.dumps(plan))
        if not self.exists("plan.json"):
            self.clear_temporary()
            self.write_json("plan.json", plan)
            return
        present = self.read_plan_values()
        for key in plan:
            if as_runs(present.get(key)) != as_runs(plan[key]):
                raise MismatchError(
                    f"'{self.uri}' was cached with {key} = {json.dumps(present.get(key))}, now it is "
                    f"{json.dumps(plan[key])}; give another output or remove the folder"
                )
        self.clear_temporary()

    def clear_temporary(self) -> int:
        """Delete half-written files and attempt counts; return the number of files."""
        folders = ["tokens", "shards", "attempts", "tries"]  # tries: name of attempts before version 0.2
        if isinstance(self.filesystem, pafs.LocalFileSystem):  # object stores have no name for a folder itself
            folders.append(".")
        found = [
            f"{folder}/{name}" for folder in folders for name in self.names(folder, (".tmp", ".attempts", ".tries"))
        ]
        for name in found:
            self.delete(name)
        return len(found)

    def read_marker(self, name: str) -> ShardInfo:
        """Read the commit marker of one shard.

        Raises:
            DamagedError: the marker is missing or damaged.
        """
        values = self.read_json(f"shards/{name}.json")
        try:
            info = ShardInfo(**values)
        except TypeError as error:
            raise DamagedError(
                f"'{self.uri}/shards/{name}.json' is damaged: {error}; remove it and cache again"
            ) from None
        if info.name != name:
            raise DamagedError(f"'{self.uri}/shards/{name}.json' is damaged: it is the marker of '{info.name}'")
        return info

    def committed(self) -> dict[str, ShardInfo]:
        """Read the markers of all shards that have one, by name.

        Raises:
            DataError: a marker is damaged.
        """
        names = [name[:-5] for name in self.names("shards", ".json")]
        return dict(zip(names, in_threads(self.read_marker, names), strict=True))

    def commit(self, info: ShardInfo) -> None:
        """Commit a written shard by writing its marker."""
        self.write_json(f"shards/{info.name}.json", info.__dict__)

    def uncommit(self, name: str) -> None:
        """Delete a shard, marker first: if this is interrupted, the remaining file does not count."""
        for suffix in ("json", "parquet"):
            self.delete(f"shards/{name}.{suffix}")

    @contextmanager
    def open_output(self, name: str) -> Iterator[AtomicFile]:
        """Open a file for writing; it appears under its name only if the block ends without an error."""
        self._make_folder(name)
        try:
            with AtomicFile(self.filesystem, self.path(name)) as sink:
                yield sink
        except OSError as error:
            if isinstance(self.filesystem, pafs.LocalFileSystem):
                raise
            raise self._unreachable(name, error) from None

    def read_plan(self) -> PlanRecord:
        """Read the plan; if plan.json is missing or damaged, restore it from the manifest of a complete cache.

        Raises:
            DamagedError: there is no plan, or it lacks a value.
        """
        return self._record("plan.json", PlanRecord, self.read_plan_values())

    def read_plan_values(self) -> Any:
        """Read the plan as plain values, to compare with others; otherwise like `read_plan`."""
        try:
            return self.read_json("plan.json")
        except DamagedError as damaged:
            try:
                plan = self.read_json("manifest.json")["plan"]
            except (DamagedError, KeyError):
                raise damaged from None
        print(f"'{self.uri}/plan.json' was damaged: written again from manifest.json")
        self.write_json("plan.json", plan)
        return plan

    def _record(self, name: str, kind: type[AnyRecord], values: Mapping[str, object]) -> AnyRecord:
        try:
            return kind.of(values)
        except ValueError as error:
            raise DamagedError(
                f"'{self.uri}/{name}' is damaged: {error}; remove it and run pipelines.cache_activations"
            ) from None

    def _write_atomically(self, name: str, write: Callable[[AtomicFile], object]) -> AtomicFile:
        with self.open_output(name) as sink:
            write(sink)
        return sink

    def _make_folder(self, name: str) -> None:
        folder = self.path(name).rsplit("/", 1)[0]
        if folder in self._folders:
            return
        with self._reaching(name):
            self.filesystem.create_dir(folder, recursive=True)
        if not isinstance(self.filesystem, pafs.LocalFileSystem):  # creating a folder there costs several requests
            self._folders.add(folder)

    @contextmanager
    def _reaching(self, name: str) -> Iterator[None]:
        """Convert errors of the store to `UnreachableError`, except for a missing file."""
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self._unreachable(name, error) from None

    def _unreachable(self, name: str, error: OSError) -> UnreachableError:
        remedy = (
            "check its owner and the disk"
            if isinstance(self.filesystem, pafs.LocalFileSystem)
            else "check bucket and address, and the environment's credentials (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL)"
        )
        return UnreachableError(f"'{self.uri}/{name}' cannot be reached: {one_line(str(error))}; {remedy}")


def _is_unreachable(error: Exception) -> bool:
    """Return whether the store failed rather than the file. Arrow also raises OSError for damaged Parquet, but without
    an errno and without naming a request."""
    if not isinstance(error, OSError) or isinstance(error, FileNotFoundError):
        return False
    return error.errno is not None or isinstance(error, PermissionError) or "AWS Error" in str(error)


def _seal(value: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(dict(value), sort_keys=True).encode()).hexdigest()[:16]
