"""Whose folder a sweep's output is, whether it is done there, and how long it has run. Without Ray."""

import fcntl
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from moray.config import Config
from moray.distill.runs import check_run
from moray.errors import ConfigError
from moray.provenance import RUN_FILE, read_json, write_json_atomically, write_run_yaml
from sweeps.tuning.folders import trial_folders

SUMMARY_FILE, _CLOCK_FILE, _LOCK_FILE = "summary.json", "clock.json", ".lock"


def is_done(
    output: Path,
    identity: Config,
    fingerprints: Callable[[], Mapping[str, str]],
    resume: bool,
    may_differ: Collection[str],
) -> bool:
    """Whether the sweep is done; refuses one that is not, unless it is to go on. With `resume` one whose trials have
    failed is not.

    Args:
        output: of the sweep.
        identity: its configuration, without what decides how, and not what, it does.
        fingerprints: of what it reads.
        resume: go on.
        may_differ: keys, and groups of keys, that may be others when it goes on.

    Raises:
        MismatchError: the folder holds another sweep.
        ConfigError: it holds an unfinished one, and `resume` is not given; or another process works on it.
    """
    output = output.absolute()
    if not (output / RUN_FILE).is_file():
        return False
    check_run(output, identity, fingerprints(), irrelevant=may_differ)
    summary = output / SUMMARY_FILE
    if summary.is_file() and read_json(summary)["config"] == identity.model_dump(mode="json"):
        return not (resume and any(folder.state == "failed" for folder in trial_folders(str(output))))
    with alone(output):  # what still runs is not to be resumed
        pass
    if not resume:
        raise ConfigError(
            f"'{output}' holds a sweep that is not finished: add --resume to go on with it, or give another output"
        )
    return False


def claim_sweep(output: Path, identity: Config, fingerprints: Mapping[str, str], may_differ: Collection[str]) -> None:
    """Note whose folder it is; call it `alone` there, after `is_done`, when nothing speaks against the sweep.

    Raises:
        MismatchError: another sweep was quicker.
    """
    check_run(output, identity, fingerprints, irrelevant=may_differ)
    (output / SUMMARY_FILE).unlink(missing_ok=True)
    write_run_yaml(output, identity, None, fingerprints)  # what may differ is noted as it is now


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
