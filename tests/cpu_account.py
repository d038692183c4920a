"""Runs a command, adds up the CPU time of all that it starts, and fails if that is more than its budget.

    python tests/cpu_account.py --slow-minutes 90 --fast-minutes 45 -- make test-all

CPU time is what a suite costs; wall time is also what else runs on the machine. This process adopts every descendant
whose parent ends before it (PR_SET_CHILD_SUBREAPER), so Ray's daemons are counted as well. A machine that is twice as
fast needs half the CPU time, so the budget lies between the two numbers, by the speed of a loop that is timed here.
"""

import argparse
import ctypes
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PR_SET_CHILD_SUBREAPER = 36
_IGNORES_CHILDREN = 1 << (signal.SIGCHLD - 1)

TOLERANCE = 1.3
"""The timed loop tells only roughly how much slower a machine is, because it does not measure memory: nearly the same
suite took 2,249 and 2,847 s on CI's machine on two days."""
SLOW_SECONDS = 0.175
"""CPU time of `_loop` on the slow machine for which `--slow-minutes` is given; a fast one takes half of it."""


@dataclass(frozen=True)
class Process:
    """One process as /proc describes it.

    Attributes:
        parent: the parent's process id.
        seconds: CPU time of its own and of the children for which it has waited.
        ignores_sigchld: as Ray's raylet does, so that the kernel forgets the CPU time of its children.
    """

    parent: int
    seconds: float
    ignores_sigchld: bool


def _look(pid: int) -> tuple[tuple[int, int], Process]:
    """A process by its id and start, so that a reused id is another process; OSError if it has gone."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    status = Path(f"/proc/{pid}/status").read_text()
    ignored = int(status.partition("SigIgn:")[2].split(None, 1)[0], 16)
    seconds = sum(map(int, fields[11:15])) / _TICKS
    return (pid, int(fields[19])), Process(int(fields[1]), seconds, bool(ignored & _IGNORES_CHILDREN))


def _parents() -> Iterable[tuple[int, int]]:
    """The id of every process, and of its parent."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                yield int(folder.name), int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue  # it has just ended


def _descendants() -> list[int]:
    children: dict[int, list[int]] = {}
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    found, waiting = [], [os.getpid()]
    while waiting:
        more = children.get(waiting.pop(), [])
        found += more
        waiting += more
    return found


class CpuAccount:
    """CPU time of everything that this process has started, directly or not."""

    def __init__(self) -> None:
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
        self._living: dict[tuple[int, int], Process] = {}
        self._forgotten = 0.0

    def look(self) -> None:
        """Read the clocks of all descendants; at least every second, or short-lived children of a raylet are missed."""
        before, self._living = self._living, {}
        for pid in _descendants():
            try:
                key, process = _look(pid)
            except (OSError, IndexError):
                continue  # it has just ended
            self._living[key] = process
        ignoring = {pid for (pid, _), process in before.items() if process.ignores_sigchld}
        for key in before.keys() - self._living.keys():
            if before[key].parent in ignoring:
                self._forgotten += before[key].seconds

    @property
    def seconds(self) -> float:
        """Of those that have ended and those that live, as of the last look."""
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        living = sum(process.seconds for process in self._living.values())
        return ended.ru_utime + ended.ru_stime + living + self._forgotten

    def run(self, command: list[str]) -> int:
        """Run a command to its end and return its exit status; what it leaves running is counted up to then."""
        child = os.posix_spawnp(command[0], command, os.environ)
        while True:
            self.look()
            while (ended := _reap())[0]:
                if ended[0] == child:
                    self.look()
                    return os.waitstatus_to_exitcode(ended[1])
            time.sleep(0.5)


def _reap() -> tuple[int, int]:
    """One ended child, or (0, 0)."""
    try:
        return os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return 0, 0


def _loop() -> float:
    """CPU seconds of a fixed piece of work in Python."""
    begin = time.process_time()
    words = [f"word {number}" for number in range(2000)]
    for _ in range(200):
        counts = {word: len(word) * 3 for word in words}
        json.loads(json.dumps(counts))
    return time.process_time() - begin


def slowness() -> float:
    """1 on the slow machine, 0.5 on one that is twice as fast; never more or less than these two."""
    return min(1.0, max(0.5, min(_loop() for _ in range(3)) / SLOW_SECONDS))


def budget_minutes(slow: float, fast: float, slow_share: float) -> float:
    """Between `fast` at a slowness of 0.5 and `slow` at 1."""
    return fast + (slow - fast) * (slow_share - 0.5) / 0.5


def judge(minutes: float, allowed: float) -> str | None:
    """The verdict: "error" above `TOLERANCE` times the budget, "warning" above the budget, else None."""
    if minutes > TOLERANCE * allowed:
        return "error"
    return "warning" if minutes > allowed else None


def main(arguments: list[str]) -> int:
    """Run the command; its exit status, or 1 if it succeeded but cost too much."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slow-minutes", type=float, required=True, help="CPU minutes allowed on a slow machine")
    parser.add_argument("--fast-minutes", type=float, required=True, help="on one that is twice as fast")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    share, begin, account = slowness(), time.monotonic(), CpuAccount()
    status = account.run(options.command)
    wall, cpu = (time.monotonic() - begin) / 60, account.seconds / 60
    allowed = budget_minutes(options.slow_minutes, options.fast_minutes, share)
    print(
        f"time: {wall:.1f} minutes, {cpu:.2f} CPU minutes; the budget is {allowed:.1f} CPU minutes on this machine,"
        f" where the timed loop takes {share:.2f} of the slow machine's time"
    )
    if verdict := judge(cpu, allowed):
        print(
            f"{verdict}: the suites cost {cpu:.2f} CPU minutes, and {allowed:.1f} are allowed: make the slowest tests"
            " cheaper, or move what is rare and expensive to `make test-soak`",
            file=sys.stderr,
        )
    return status or int(verdict == "error")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
