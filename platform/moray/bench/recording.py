"""Provenance that every benchmark writes with its figures, and an early check of its output file. Torch-free."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moray.config import Config
from moray.errors import ConfigError
from moray.provenance import git_state, machine, versions, write_json_atomically


def record(config: Config) -> dict[str, Any]:
    """The provenance of a benchmark's figures: command, commit, machine, versions and settings."""
    return {
        "argv": list(sys.argv),
        "git": git_state(Path(__file__)),
        "machine": machine(),
        "versions": versions(),
        "settings": config.model_dump(mode="json"),
    }


def check_writable(path: Path, key: str = "report") -> None:
    """Check that a file can be written, before anything is measured, and leave no new file behind.

    Raises:
        ConfigError: it cannot be written; the message names the configuration key `key`.
    """
    was_there = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise ConfigError(f"{key} is '{path}', which cannot be written: {error.strerror}; name another file") from None
    if not was_there:
        path.resolve().unlink()  # if the run fails, an empty YAML file would be accepted as settings


def reported(report: str | None, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of `measure` and also write it to `report`, whose path is checked before measuring."""
    if report:
        check_writable(Path(report))
    result = measure()
    if report:
        write_json_atomically(Path(report), result)
    return result
