"""Progress without a terminal: plain lines from a steady clock. No test here sleeps."""

import io
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
from rich.console import Console

from moray.progress import LINE_SECONDS, Clock, Part, Progress, track


class FakeClock(Clock):
    """Time passes when it is waited for; `during` is done in between, as work that goes on."""

    def __init__(self, waits: int = 0, during: Callable[[int], None] = lambda number: None) -> None:
        self.time = 100.0
        self.over = threading.Event()
        self._waits = waits
        self._during = during

    def now(self) -> float:
        return self.time

    def wait(self, stop: threading.Event, seconds: float) -> bool:
        if self._waits == 0:
            self.over.set()
            return stop.wait(60)
        self._waits -= 1
        self._during(self._waits)
        self.time += seconds
        return False


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=40)


def printed(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_lines_come_by_the_clock_whatever_the_work_does(console):
    work = [5_000.0, 0.0, 0.0]  # the last is done first
    clock = FakeClock(3, lambda number: progress.advance(work[number]))
    progress = Progress("cache", 20_000, unit="tokens", note="loss 3.1", console=console, clock=clock)
    with progress:
        assert clock.over.wait(10)
        progress.advance(15_000)
    assert LINE_SECONDS < 15
    assert printed(console) == [
        "cache: 0 of 20,000 tokens (0 %), 0:10 so far; loss 3.1; nothing new for 0:10",
        "cache: 0 of 20,000 tokens (0 %), 0:20 so far; loss 3.1; nothing new for 0:20",
        "cache: 5,000 of 20,000 tokens (25 %), 167 tokens/s, 1:30 left; loss 3.1; nothing new for 0:10",
        "cache: 20,000 of 20,000 tokens, after 0:30; loss 3.1",
    ]


def test_what_was_done_before_does_not_count_for_the_speed(console):
    clock = FakeClock()
    with Progress("distill", unit="updates", note="starting workers", console=console, clock=clock) as progress:
        clock.time += 60.0
        progress.tell()
        progress.update(done=1_000, total=2_000)
        clock.time += 10.0
        progress.update(done=1_100, note="loss 2.000")
        progress.tell()
        progress.update(done=1_050)  # workers died, and go on from their last checkpoint
        clock.time += 5.0
        progress.update(done=1_060)
        progress.tell()
        progress.update(done=900)
        clock.time += 5.0
        progress.tell()
    lines = printed(console)
    assert lines[0] == "distill: 1:00 so far; starting workers; nothing new for 1:00"
    assert lines[1] == "distill: 1,100 of 2,000 updates (55 %), 10 updates/s, 1:30 left; loss 2.000"
    assert lines[2].startswith("distill: 1,060 of 2,000 updates (53 %), 4 updates/s, 3:55 left")
    assert lines[3].startswith("distill: 900 of 2,000 updates (45 %), 1:20 so far")


def test_starting_does_not_count_for_the_speed_once_work_is_under_way(console):
    clock = FakeClock()
    with Progress("cache", 100_000, done=2_000, unit="tokens", console=console, clock=clock) as progress:
        clock.time += 36.0  # a replica loads its model
        progress.advance(4_000)
        progress.tell()
        for seconds in (4.0, 32.0):
            clock.time += seconds
            progress.advance(1_000 * seconds)
            progress.tell()
        progress.update(done=1_000)  # it begins again, further back
        clock.time += 4.0
        progress.advance(1_000)
        progress.tell()
    speeds = [line.partition(", ")[2].partition(" tokens/s")[0] for line in printed(console)[:4]]
    assert speeds == ["111", "200", "1,000", "250"]


def test_what_several_workers_finish_together_does_not_count_as_speed(console):
    clock = FakeClock()
    with Progress("cache", 400_000, unit="tokens", console=console, clock=clock) as progress:
        clock.time += 16.0
        for _ in range(8):  # rounds of ten seconds: four replicas, a shard of 4,000 tokens each
            clock.time += 10.0
            for _ in range(4):
                clock.time += 0.1
                progress.advance(4_000)
            progress.tell()
    speeds = [float(line.partition(", ")[2].partition(" tok")[0].replace(",", "")) for line in printed(console)[:8]]
    assert speeds == sorted(speeds[:3]) + sorted(speeds[3:], reverse=True)
    assert max(speeds) < 1.35 * 1_538, "the true speed, 16,000 tokens in 10.4 seconds"


def test_work_that_is_not_counted_is_silent_unless_it_lasts(console):
    with Progress("start Ray", console=console, clock=FakeClock()):
        pass
    assert printed(console) == []
    clock = FakeClock(2)
    with Progress("start Ray", console=console, clock=clock):
        assert clock.over.wait(10)
    assert printed(console) == ["start Ray: 0:10 so far", "start Ray: 0:20 so far", "start Ray: after 0:20"]


def test_parts_and_what_is_said_are_lines_too(console):
    with Progress("sweep", 8, unit="trials", console=console, clock=FakeClock()) as progress:
        progress.show_parts({"lr 0.1": Part(20, 40, "rung 1: loss 3.000"), "lr 0.2": Part(note="rung 0: measuring")})
        progress.tell()
        progress.say("warning: [a] tracker does not answer, and its line is not wrapped", style="yellow")
    assert printed(console) == [
        "sweep: 0 of 8 trials (0 %), 0:00 so far",
        "  lr 0.1: 20 of 40; rung 1: loss 3.000",
        "  lr 0.2: rung 0: measuring",
        "warning: [a] tracker does not answer, and its line is not wrapped",
        "sweep: 0 of 8 trials, after 0:00",
    ]


def test_slow_work_is_told_by_the_minute(console):
    clock = FakeClock()
    with Progress("compact", 4, unit="shards", console=console, clock=clock) as progress:
        clock.time += 1_800.0
        progress.advance()
        progress.tell()
    assert printed(console)[0] == "compact: 1 of 4 shards (25 %), 0.033 shards/min, 1:30:00 left"


def test_an_error_passes_and_says_how_far_it_was(console):
    def fail() -> None:
        with Progress("verify", 9, unit="MiB", console=console) as progress:
            progress.advance(3)
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fail()
    assert printed(console) == ["verify: 3 of 9 MiB, after 0:00"]


def test_items_are_counted(console):
    assert list(track(iter("abc"), "answers", 3, unit="turns", console=console)) == ["a", "b", "c"]
    assert printed(console) == ["answers: 3 of 3 turns, after 0:00"]


def test_work_goes_on_after_the_reader_of_its_lines_has_gone(tmp_path):
    """In a process of its own: rich turns the standard output of a process without a reader to /dev/null."""
    script = (
        "import sys, pathlib\n"
        "from moray.progress import Progress\n"
        "sys.stdin.read()\n"  # until the reader has gone
        "with Progress('cache', 3, unit='tokens') as progress:\n"
        "    progress.tell()\n"
        "    progress.advance(3)\n"
        "pathlib.Path(sys.argv[1]).write_text('done')\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "result")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=60) == 0, process.stderr.read() if process.stderr else ""
    assert (tmp_path / "result").read_text() == "done"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_and_a_coloured_file_gets_lines(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    bars = Console(file=_Terminal(), force_terminal=True, width=120)
    with Progress("cache", 4, unit="tokens", note="fast", console=bars) as progress:
        progress.show_parts({"lr 0.1": Part(1, 2, "rung 0")})
        progress.advance(2)
    assert isinstance(bars.file, _Terminal)
    assert "\x1b[" in bars.file.getvalue()
    assert "2/4" in bars.file.getvalue()
    lines = Console(file=io.StringIO(), force_terminal=True, width=120)
    with Progress("cache", 4, unit="tokens", console=lines) as progress:
        progress.advance(2)
    assert printed(lines) == ["cache: 2 of 4 tokens, after 0:00"]
