"""Measures the free space of a cache's file system and recognises the errors of a full one."""

import errno
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from moray.errors import StorageFullError

_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
# Object stores, and file systems on top of them, report it only in words.
_WORDS = re.compile(
    r"no space left|disk quota exceeded|storage ?full|insufficient ?storage|quota ?exceeded|"
    r"not enough (free )?(disk )?space|errno 28\b|errno 122\b",
    re.IGNORECASE,
)
_MAX_RESERVED = 1 << 30


@dataclass(frozen=True)
class DiskSpace:
    """Space that a cache may still use."""

    free: int | None
    """Free bytes of the file system; None if unknown, as for object stores."""
    reserve: int = 0
    """Bytes of the free space to leave to others."""
    max_bytes: int | None = None
    """Maximum total bytes of the cache; None for no limit."""
    written: int = 0
    """Bytes of the cache already written."""

    @property
    def left(self) -> int | None:
        """Bytes that may still be written; None if no limit is known."""
        limits = [] if self.free is None else [self.free - self.reserve]
        if self.max_bytes is not None:
            limits.append(self.max_bytes - self.written)
        return max(0, min(limits)) if limits else None

    def fits(self, total: int) -> bool:
        """Return whether a cache of `total` bytes fits, the bytes already written included."""
        return self.left is None or total - self.written <= self.left


def free_bytes(folder: Path) -> tuple[int, int]:
    """Return the free bytes of the file system that holds a folder, which need not exist, and the bytes to leave free:
    2 % of its size, at most 1 GiB."""
    while not folder.exists():
        folder = folder.parent
    usage = shutil.disk_usage(folder)
    return usage.free, min(_MAX_RESERVED, usage.total // 50)


@contextmanager
def storage_full_errors(path: str) -> Iterator[None]:
    """Convert any error of a full file system or an exhausted quota to `StorageFullError`."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        raise StorageFullError(f"'{path}' cannot be written: no room is left ({_reason(error)})") from None


def is_full(error: OSError) -> bool:
    """Return whether an error means that the file system is full or a quota is exhausted."""
    return error.errno in _ERRNOS or bool(_WORDS.search(str(error)))


def size_text(num_bytes: int | float) -> str:
    """Format a number of bytes for people, such as 1.5 GiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:,.0f} {unit}" if unit == "bytes" or num_bytes >= 100 else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} TiB"


def _reason(error: OSError) -> str:
    words = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}
    return words.get(error.errno or 0) or " ".join(str(error).split())[:200]
