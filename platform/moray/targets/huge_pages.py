"""Moves weights that every pass reads in full to huge pages.

With pages of 4 KiB, address translation takes about a fifth of such a pass. Linux gives huge pages to programs that ask
for them (`/sys/kernel/mm/transparent_hugepage/enabled` is `madvise`, as on most systems), but torch and oneDNN do not
ask. So Moray asks once the weights are loaded; Linux then copies them, at about 400 MiB a second.
"""

import ctypes
import sys
import time
from pathlib import Path

_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_HUGE, _PIECE = 2 << 20, 64 << 20
"""Bytes of a huge page, and bytes that are copied between two looks at the clock."""
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_MAX_SECONDS = 10.0
"""After this time copying stops; the rest of a large model stays in small pages."""


def move_to_huge_pages(max_seconds: float = _MAX_SECONDS) -> None:
    """Ask for huge pages for this process's large anonymous memory, if the system's settings allow it; stop after so
    many seconds.

    Nothing happens on other systems than Linux, or if huge pages are switched off.
    """
    if sys.platform != "linux" or not _ENABLED.exists() or "[never]" in _ENABLED.read_text(encoding="utf-8"):
        return
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    end = time.monotonic() + max_seconds
    for begin, size in _pieces(Path("/proc/self/maps").read_text(encoding="utf-8")):
        if time.monotonic() > end:
            return
        for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
            libc.madvise(begin, size, advice)  # memory that cannot be moved stays as it is


def _pieces(maps: str) -> list[tuple[int, int]]:
    """Address and size of pieces of the writable private memory that is not backed by a file, in whole huge pages."""
    found = []
    for line in maps.splitlines():
        span, access, _, _, _, *name = line.split()
        if access != "rw-p" or (name and name[0] != "[heap]"):
            continue
        begin, end = (int(part, 16) for part in span.split("-"))
        begin, end = -(-begin // _HUGE) * _HUGE, end // _HUGE * _HUGE
        found += [(start, min(_PIECE, end - start)) for start in range(begin, end, _PIECE)]
    return found
