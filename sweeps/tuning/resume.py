"""Whose folder a sweep's output is, whether it is done there, and how long it has run. Without Ray."""

import fcntl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moray.config import Config
from moray.distill.runs import check_run, recorded_config
from moray.errors import ConfigError
from moray.provenance import RUN_FILE, read_json, write_json_atomically, write_run_yaml
from moray.runs_folder import as_runs
from sweeps.tuning.folders import trial_folders

SUMMARY_FILE, _CLOCK_FILE, _LOCK_FILE = "summary.json", "clock.json", ".lock"

_HOW = ("ray", "output", "resume", "max_concurrent", "max_failures", "fingerprint.distil")
"""Keys of a sweep that decide how, and not what, it does. Before version 0.2 `fingerprint.distil` was a hash of what
`sweeps.trainings.run` now compares key by key."""
_MAY_DIFFER = (*_HOW, "space", "search", "confirm")
"""Keys, and groups of keys, that may differ when a sweep goes on: other trials stand beside those it has."""


def is_done(output: Path, sweep: Config, fingerprints: Callable[[], Mapping[str, str]], resume: bool) -> bool:
    """Whether the sweep is done; refuses one that is not, unless it is to go on. With `resume` one whose trials have
    failed is not.

    Args:
        output: of the sweep.
        sweep: its configuration.
        fingerprints: of what it reads.
        resume: go on.

    Raises:
        MismatchError: the folder holds another sweep.
        ConfigError: it holds an unfinished one, or a finished one of another space, and `resume` is not given; or
            another process works on it.
    """
    output = output.absolute()
    if not (output / RUN_FILE).is_file():
        return False
    check_run(output, sweep, fingerprints(), irrelevant=_MAY_DIFFER)
    summary, why = output / SUMMARY_FILE, "a sweep that is not finished: add --resume to go on with it"
    if summary.is_file():
        others = _others(recorded_config(type(sweep), read_json(summary)["config"]), sweep.model_dump(mode="json"))
        if not others:
            return not (resume and any(folder.state == "failed" for folder in trial_folders(str(output))))
        why = f"a finished sweep with another {', '.join(others)}: add --resume to try what is new"
    with alone(output):  # what still runs is not to be resumed
        pass
    if not resume:
        raise ConfigError(f"'{output}' holds {why}, or give another output")
    return False


def _others(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The keys that decide what is done and whose values are others."""
    return [key for key in now if key not in _HOW and as_runs(before.get(key)) != as_runs(now[key])]


def begin_or_resume_sweep(output: Path, sweep: Config, fingerprints: Mapping[str, str]) -> None:
    """Note whose folder it is; call it `alone` there, after `is_done`, when nothing speaks against the sweep.

    Raises:
        MismatchError: another sweep was quicker.
    """
    check_run(output, sweep, fingerprints, irrelevant=_MAY_DIFFER)
    (output / SUMMARY_FILE).unlink(missing_ok=True)
    write_run_yaml(output, sweep, None, fingerprints)  # what may differ is noted as it is now


def seconds_run(output: Path) -> float:
    """How long it has run, kills and resumptions together."""
    path = output / _CLOCK_FILE
    return read_json(path)["seconds"] if path.is_file() else 0.0


@contextmanager
def alone(output: Path) -> Iterator[None]:
    """Keep other processes out of a sweep's folder for the block; the lock dies with its process.

    Raises:
        ConfigError: another one works there.
    """
    output.mkdir(parents=True, exist_ok=True)
    with (output / _LOCK_FILE).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another process works on the sweep in '{output}': wait for it, or give another output"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"'{file.name}' cannot be locked: {error.strerror}; give an output on another file system"
            ) from None
        yield


def is_worked_on(output: Path) -> bool:
    """Whether a process works on a sweep now; a folder without one is left as it is."""
    if not (output / _LOCK_FILE).is_file():
        return False
    try:
        with alone(output):
            return False
    except ConfigError:
        return True


@contextmanager
def running_clock(output: Path) -> Iterator[None]:
    """Count the seconds of the block."""
    before, begin, stop = seconds_run(output), time.monotonic(), threading.Event()

    def note() -> None:
        write_json_atomically(output / _CLOCK_FILE, {"seconds": before + time.monotonic() - begin})

    def tick() -> None:
        while not stop.wait(2.0):
            note()

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        note()
