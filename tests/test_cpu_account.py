"""The CPU time of a suite and its budget: detached processes and those that no parent waits for count, no others."""

import subprocess
import sys
from pathlib import Path

import pytest
from cpu_account import budget_minutes, judge

TOOL = Path(__file__).with_name("cpu_account.py")
BURN = "import time\nwhile time.process_time() < {seconds}: pass\n"
DETACHED = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", {burn!r}])
    os._exit(0)
time.sleep({wait})
"""
DEAF = """
import os, signal, sys, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
if os.fork() == 0:
    os.execv(sys.executable, [sys.executable, "-c", {burn!r}])
time.sleep({wait})
"""
IDLE = "import time\ntime.sleep(1)\n"


def run(code: str, minutes: float) -> tuple[int, float]:
    """The exit status, and the CPU seconds that the tool says."""
    budget = ["--slow-minutes", str(minutes), "--fast-minutes", str(minutes)]
    command = [sys.executable, str(TOOL), *budget, "--", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, 60 * float(done.stdout.partition(" CPU minutes")[0].split()[-1])


@pytest.mark.parametrize("parent", [DETACHED, DEAF], ids=["detached", "no parent waits"])
def test_what_is_not_waited_for_is_counted(parent):
    """A second and a half, of which the last may be missed: it is looked at every half a second."""
    status, seconds = run(parent.format(burn=BURN.format(seconds=1.5), wait=5), minutes=1)
    assert status == 0
    assert 0.7 < seconds < 4.0


def test_waiting_costs_nothing():
    status, seconds = run(IDLE, minutes=1)
    assert status == 0
    assert seconds < 0.9


@pytest.mark.parametrize(("code", "expected"), [("print()", 0), ("raise SystemExit(5)", 5)])
def test_the_exit_status_is_the_command_s(code, expected):
    assert run(code, minutes=1)[0] == expected


def test_more_than_the_budget_fails():
    assert run(BURN.format(seconds=1.0), minutes=0.01)[0] == 1


def test_a_machine_twice_as_fast_is_allowed_half():
    assert budget_minutes(90, 45, 1.0) == 90
    assert budget_minutes(90, 45, 0.5) == 45
    assert budget_minutes(90, 45, 0.75) == 67.5


def test_a_little_more_than_the_budget_is_a_warning():
    assert [judge(minutes, 60.0) for minutes in (60.0, 61.0, 78.0, 78.1)] == [None, "warning", "warning", "error"]
