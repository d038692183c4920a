"""Run a measurement in its own process, so that its peak memory can be measured separately."""

import multiprocessing
import os
import resource
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moray.errors import DataError, MorayError

_STATUS = Path("/proc/self/status")
_UNIT = 1 if sys.platform == "darwin" else 1024


def measure_alone(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Call a module-level function in a fresh process; returns its figures and that process's `peak_memory_bytes`.

    Raises:
        MorayError: as raised by the function; `DataError` if the process died.
        RuntimeError: the function raised any other exception; the message is its traceback.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(sender, function, arguments))
    process.start()
    sender.close()
    try:
        outcome = receiver.recv()
    except EOFError:
        process.join()
        raise DataError(
            f"the process that measured {function.__name__} ended with exit code {process.exitcode}, probably because "
            "memory ran out: free memory, or give smaller settings"
        ) from None
    process.join()
    if isinstance(outcome, MorayError):
        raise outcome
    if isinstance(outcome, str):
        raise RuntimeError(outcome)
    return outcome


def peak_memory() -> int:
    """Peak resident memory of this process in bytes, since it started or since `forget_peak`."""
    if _STATUS.exists():
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT


def forget_peak() -> None:
    """Reset the peak memory counter, where the system supports it (Linux)."""
    if _STATUS.exists():
        Path("/proc/self/clear_refs").write_text("5")


def resident_memory() -> int:
    """Current resident memory of this process in bytes."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def _run(sender: Any, function: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        figures = function(*arguments)
        sender.send({"peak_memory_bytes": peak_memory()} | figures)
    except MorayError as error:
        sender.send(error)
    except Exception:  # noqa: BLE001 - passed to the caller with its traceback
        sender.send(traceback.format_exc())
