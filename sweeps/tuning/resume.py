"""Ownership of a sweep's output folder: checks, locking, resumption and total run time. Without Ray."""

import fcntl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moray.config import Config, read_yaml
from moray.distill.runs import check_run, first_difference, recorded_config
from moray.errors import ConfigError, MismatchError
from moray.provenance import RUN_FILE, read_json, write_json_atomically, write_run_yaml
from moray.runs_folder import as_runs
from sweeps.tuning.folders import trial_folders

SUMMARY_FILE, _CLOCK_FILE, _LOCK_FILE = "summary.json", "clock.json", ".lock"

_HOW = ("ray", "output", "resume", "max_concurrent", "max_failures")
"""Keys that affect how a sweep runs but not its results."""
_NOT_SHARED = ("ray", "workers", "output", "trackers")
"""Keys of the trainings that may differ when a sweep is resumed."""
_SUPERSEDED = "fingerprint.distil"
"""Before version 0.2 a hash of what `sweeps.trainings.run` now compares key by key."""
_MAY_DIFFER = (*_HOW, _SUPERSEDED, "space", "search", "confirm")
"""Keys and groups of keys that may differ when a sweep is resumed; new trials are then added to the existing ones."""


def is_done(output: Path, sweep: Config, fingerprints: Callable[[], Mapping[str, str]], resume: bool) -> bool:
    """Whether the sweep is done. An unfinished sweep is refused unless `resume` is set.

    With `resume`, a finished sweep with failed trials does not count as done.

    Args:
        output: folder of the sweep.
        sweep: its configuration.
        fingerprints: computes the fingerprints of its inputs.
        resume: whether to resume the sweep.

    Raises:
        MismatchError: the folder holds another sweep.
        ConfigError: the folder holds an unfinished sweep, or a finished one with another space, search or confirm, and
            `resume` is not set; or another process is working on it.
    """
    output = output.absolute()
    if not (output / RUN_FILE).is_file():
        return False
    check_sweep_folder(output, sweep, fingerprints())
    summary, why = output / SUMMARY_FILE, "a sweep that is not finished: add --resume to continue it"
    if summary.is_file():
        others = _others(recorded_config(type(sweep), read_json(summary)["config"]), sweep.model_dump(mode="json"))
        if not others:
            return not (resume and any(folder.state == "failed" for folder in trial_folders(str(output))))
        why = f"a finished sweep with another {', '.join(others)}: add --resume to try what is new"
    with alone(output):  # a sweep that is still running cannot be resumed
        pass
    if not resume:
        raise ConfigError(f"'{output}' holds {why}, or give another output")
    return False


def _others(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The keys that affect the results and whose values differ."""
    return [key for key in now if key not in _HOW and as_runs(before.get(key)) != as_runs(now[key])]


def check_sweep_folder(output: Path, sweep: Config, fingerprints: Mapping[str, str]) -> None:
    """Refuse a folder that holds another sweep; a folder without one is fine.

    Raises:
        MismatchError: names the first differing key and both values.
    """
    check_run(output, sweep, fingerprints, irrelevant=_MAY_DIFFER)


def check_same_trainings(output: Path, trial: Config, names: Sequence[str], of: str) -> None:
    """Refuse a folder whose trials were trained in another way, because the files that describe it were edited.

    Args:
        output: folder of the sweep; one without a record of the trainings is fine.
        trial: configuration that all trials share.
        names: names that the record may have, newest first.
        of: what is trained, for errors.

    Raises:
        MismatchError: names the first differing key and both values.
    """
    path = next((output / name for name in names if (output / name).is_file()), None)
    if path is None:
        return
    before, now = recorded_config(type(trial), read_yaml(path)), trial.model_dump(mode="json")
    if (found := first_difference(before, now, _NOT_SHARED)) is not None:
        key, was, wanted = found
        raise MismatchError(
            f"'{output}' holds a sweep over {of} with {key} = {was}, now it is {wanted}; give another output"
        )


def begin_or_resume_sweep(output: Path, sweep: Config, fingerprints: Mapping[str, str]) -> None:
    """Record that the folder belongs to a sweep; call this inside `alone`, after `is_done` and all checks.

    Raises:
        MismatchError: the folder belongs to another sweep.
    """
    check_sweep_folder(output, sweep, fingerprints)
    (output / SUMMARY_FILE).unlink(missing_ok=True)
    write_run_yaml(output, sweep, None, fingerprints)  # records the current values of the keys that may differ


def seconds_run(output: Path) -> float:
    """Total run time of the sweep in seconds, across interruptions."""
    path = output / _CLOCK_FILE
    return read_json(path)["seconds"] if path.is_file() else 0.0


@contextmanager
def alone(output: Path) -> Iterator[None]:
    """Lock a sweep's folder for the duration of the block; the lock ends with the process.

    Raises:
        ConfigError: another process is working there, or the file system does not support locks.
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
    """Whether a process is working on a sweep now; creates nothing in a folder without a lock file."""
    if not (output / _LOCK_FILE).is_file():
        return False
    try:
        with alone(output):
            return False
    except ConfigError:
        return True


@contextmanager
def running_clock(output: Path) -> Iterator[None]:
    """Add the duration of the block to the sweep's run time, saving it every two seconds."""
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
