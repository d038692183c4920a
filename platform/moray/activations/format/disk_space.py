"""Room on the file system that a cache lies on: how much there is, and what it looks like when there is none."""

import errno
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from moray.errors import StorageFullError

_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
# Object stores, and file systems behind them, say it in words alone.
_WORDS = re.compile(
    r"no space left|disk quota exceeded|storage ?full|insufficient ?storage|quota ?exceeded|"
    r"not enough (free )?(disk )?space|errno 28\b|errno 122\b",
    re.IGNORECASE,
)
_MAX_RESERVED = 1 << 30


@dataclass(frozen=True)
class DiskSpace:
    """What may still be written."""

    free: int | None
    """Free bytes of the file system; None where that is not known, as in object stores."""
    reserve: int = 0
    """Bytes of it to leave to others."""
    max_bytes: int | None = None
    """Most bytes that the cache may take in all."""
    written: int = 0
    """Bytes of it that are there already."""

    @property
    def left(self) -> int | None:
        """Bytes that may still be written; None for no known limit."""
        limits = [] if self.free is None else [self.free - self.reserve]
        if self.max_bytes is not None:
            limits.append(self.max_bytes - self.written)
        return max(0, min(limits)) if limits else None

    def fits(self, total: int) -> bool:
        """Whether a cache of `total` bytes fits, counting what is there already."""
        return self.left is None or total - self.written <= self.left


def free_bytes(folder: Path) -> tuple[int, int]:
    """Free bytes of the file system a folder is on, or will be, and those to leave: 2 % of its size, 1 GiB at most."""
    while not folder.exists():
        folder = folder.parent
    usage = shutil.disk_usage(folder)
    return usage.free, min(_MAX_RESERVED, usage.total // 50)


@contextmanager
def told_if_full(path: str) -> Iterator[None]:
    """Raise `StorageFullError` for whatever a file system raises when it is full or a quota is used up."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        raise StorageFullError(f"'{path}' cannot be written: no room is left ({_reason(error)})") from None


def is_full(error: OSError) -> bool:
    """Whether an error means that there is no room."""
    return error.errno in _ERRNOS or bool(_WORDS.search(str(error)))


def size_text(num_bytes: int | float) -> str:
    """Bytes as people read them: 1.5 GiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:,.0f} {unit}" if unit == "bytes" or num_bytes >= 100 else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} TiB"


def _reason(error: OSError) -> str:
    words = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}
    return words.get(error.errno or 0) or " ".join(str(error).split())[:200]
