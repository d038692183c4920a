"""Makes a process as slow as a device: a share of one core's time, by a control group (Linux, as root).

Both versions of control groups are supported. The quota is given out every 6 ms, so that a draft step of a few
milliseconds is slowed down as a whole and not in lumps.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moray.errors import ConfigError

_PERIOD_US = 6000
_MIN_QUOTA_US = 1000
_ROOT = Path("/sys/fs/cgroup")


def why_not(root: Path = _ROOT) -> str | None:
    """Why processes cannot be slowed down here; None if they can."""
    if os.geteuid() != 0:
        return "root is needed to make control groups"
    if _version(root) is None:
        return f"there is no CPU controller under {root}"
    return None


@contextmanager
def throttled(pid: int, compute_ratio: float, root: Path = _ROOT) -> Iterator[None]:
    """Give a process and all its threads and children 1 / `compute_ratio` of one core.

    Args:
        pid: of the process.
        compute_ratio: at least 1; 1 is a whole core.
        root: where control groups are mounted.

    Raises:
        ConfigError: processes cannot be slowed down here, or not by so much.
    """
    quota = round(_PERIOD_US / compute_ratio)
    if quota < _MIN_QUOTA_US:
        most = _PERIOD_US / _MIN_QUOTA_US
        raise ConfigError(f"compute_ratio is {compute_ratio:g}; 1 to {most:g} are accepted")
    reason = why_not(root)
    if reason is not None:
        raise ConfigError(f"compute_ratio is {compute_ratio:g}, but {reason}")
    version = _version(root)
    group = (root / "cpu" if version == 1 else root) / f"moray-{os.getpid()}-{pid}"
    group.mkdir()
    try:
        if version == 1:
            (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (group / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        parent = group.parent / "cgroup.procs"
        for member in (group / "cgroup.procs").read_text().split():
            parent.write_text(member)
        group.rmdir()


def _version(root: Path) -> int | None:
    """Version of the control groups that have a CPU controller."""
    if (root / "cpu" / "cpu.cfs_quota_us").exists() or (root / "cpu" / "cgroup.procs").exists():
        return 1
    controllers = root / "cgroup.subtree_control"
    return 2 if controllers.exists() and "cpu" in controllers.read_text().split() else None
