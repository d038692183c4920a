"""What every benchmark writes beside its figures, and whether its file can be written at all. Torch-free."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moray.config import Config
from moray.errors import ConfigError
from moray.provenance import git_state, machine, versions, write_json_atomically


def record(config: Config) -> dict[str, Any]:
    """Where a benchmark's figures come from."""
    return {
        "argv": list(sys.argv),
        "git": git_state(Path(__file__)),
        "machine": machine(),
        "versions": versions(),
        "settings": config.model_dump(mode="json"),
    }


def check_writable(path: Path, key: str = "report") -> None:
    """Refuse a file that cannot be written before anything is measured; `key` names it. No file is left behind."""
    was_there = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise ConfigError(f"{key} is '{path}', which cannot be written: {error.strerror}; name another file") from None
    if not was_there:
        path.resolve().unlink()  # an empty YAML file would pass for settings if the run fails


def reported(report: str | None, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What is measured, written to `report` too: a path that cannot be written is refused before."""
    if report:
        check_writable(Path(report))
    result = measure()
    if report:
        write_json_atomically(Path(report), result)
    return result
