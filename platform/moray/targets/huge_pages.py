"""Weights in huge pages: a pass that reads every weight once spends a fifth of its time on looking up 4 KiB pages.

Most systems give huge pages to who asks (`transparent_hugepage/enabled` is `madvise`). torch and oneDNN do not ask, so
it is asked here, once all weights are where they stay. Linux copies them then, at some 400 MiB a second.
"""

import ctypes
import sys
import time
from pathlib import Path

_HUGE = 2 << 20
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_MOST_SECONDS = 10.0
"""What is not copied by then stays in small pages: of a large model the rest is not worth the wait."""


def move_to_huge_pages() -> int:
    """Ask for huge pages for all large anonymous memory of this process; returns how many bytes are in them now.

    Where the system has none, or is not Linux, nothing happens.
    """
    maps = Path("/proc/self/maps")
    if sys.platform != "linux" or not maps.exists():
        return 0
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    begun, num_bytes = time.monotonic(), 0
    for begin, end in _large_regions(maps.read_text(encoding="utf-8")):
        if time.monotonic() - begun > _MOST_SECONDS:
            break
        libc.madvise(begin, end - begin, _MADV_HUGEPAGE)
        if libc.madvise(begin, end - begin, _MADV_COLLAPSE) == 0:
            num_bytes += end - begin
    return num_bytes


def _large_regions(maps: str) -> list[tuple[int, int]]:
    """Whole huge pages within the writable private memory that belongs to no file."""
    found = []
    for line in maps.splitlines():
        span, access, _, _, _, *name = line.split()
        if access != "rw-p" or (name and name[0] != "[heap]"):
            continue
        begin, end = (int(part, 16) for part in span.split("-"))
        begin, end = -(-begin // _HUGE) * _HUGE, end // _HUGE * _HUGE
        if begin < end:
            found.append((begin, end))
    return found
