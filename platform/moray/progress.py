"""Progress of long work: a bar on a terminal; elsewhere, as in the log of a Ray job, a plain line every few seconds.

    with Progress("cache", total=400_000, unit="tokens") as progress:
        progress.advance(1_024)

Without a terminal that prints, for as long as the block runs,

    cache: 120,000 of 400,000 tokens (30 %), 5,211 tokens/s, 0:53 left

Lines come from a clock of their own, not from updates: where nothing has advanced they say so, which tells slow work
from dead work. Every line is flushed, and has neither carriage returns nor colour codes. This module refuses to know
what is being done.
"""

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars
from rich.table import Column

from moray.console import open_console

LINE_SECONDS = 10.0
"""Seconds between two lines, as docs/guide/own-model.md says."""

Item = TypeVar("Item")


class Clock:
    """Reads the time and waits; tests pass one that does neither for real."""

    def now(self) -> float:
        """Seconds since some moment."""
        return time.monotonic()

    def wait(self, stop: threading.Event, seconds: float) -> bool:
        """Wait so long, or until `stop` is set; returns whether it is."""
        return stop.wait(seconds)


@dataclass(frozen=True)
class Part:
    """Something that runs within the whole at the moment, such as one trial of a sweep."""

    done: float = 0.0
    total: float | None = None
    note: str = ""


class Progress:
    """How far one piece of work is, shown while the `with` block runs. Any thread may update it."""

    def __init__(
        self,
        title: str,
        total: float | None = None,
        *,
        done: float = 0.0,
        unit: str = "",
        note: str = "",
        console: Console | None = None,
        clock: Clock | None = None,
    ) -> None:
        """
        Args:
            title: what is being done.
            total: how much there is to do, in units; None if that is not known yet, or never.
            done: how much was done before: it does not count for the speed.
            unit: of which things are counted, in the plural; "" for work that is not counted, of which nothing stays
                on the screen, and nothing is printed if it is over before the first line.
            note: figures of the moment.
            console: where to; None for stdout.
            clock: of lines and speeds.
        """
        self._console = console or open_console()
        self._clock = clock or Clock()
        self._title, self._unit, self._note = title, unit, note
        self._total, self._done = total, done
        self._parts: dict[str, Part] = {}
        self._lock = threading.Lock()
        self._began = self._changed = self._clock.now()
        self._base = (self._began, done)
        """When counting began, and what was done then: where speed is measured from at first."""
        self._first: tuple[float, float] | None = None
        """Time and count at the first advance; once enough has followed, speed is measured from here."""
        self._has_told = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._bars = _Bars(self._console, unit) if _is_terminal(self._console) else None

    def __enter__(self) -> "Progress":
        self._show()
        if self._bars is not None:
            self._bars.start()
        else:
            self._thread = threading.Thread(target=self._tell_on_time, name="progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self.show_parts({})
        if self._bars is not None:
            self._bars.stop()
        if self._thread is not None:
            self._thread.join(timeout=5)
            if self._unit or self._has_told:
                self._write(self._line(is_over=True))

    def advance(self, count: float = 1.0) -> None:
        """So many more are done."""
        self._change(count=count)

    def update(
        self,
        *,
        done: float | None = None,
        total: float | None = None,
        note: str | None = None,
        title: str | None = None,
    ) -> None:
        """Say what has changed; what is None stays as it was."""
        self._change(done, total, note, title)

    def show_parts(self, parts: Mapping[str, Part]) -> None:
        """What runs within the whole now, by name; it replaces what was shown before."""
        with self._lock:
            self._parts = dict(parts)
        self._show()

    def say(self, text: str, style: str = "") -> None:
        """Print a line of text without disturbing the bar."""
        self._console.print(text, style=style or None, markup=False, highlight=False, soft_wrap=True)
        self._console.file.flush()

    def tell(self) -> None:
        """Print how far the work is, as a line."""
        with self._lock:
            lines = [self._line(), *(f"  {_part_line(name, part)}" for name, part in self._parts.items())]
        self._write("\n".join(lines))
        self._has_told = True

    def _tell_on_time(self) -> None:
        while not self._clock.wait(self._stop, LINE_SECONDS):
            self.tell()

    def _change(
        self,
        done: float | None = None,
        total: float | None = None,
        note: str | None = None,
        title: str | None = None,
        count: float = 0.0,
    ) -> None:
        with self._lock:
            before = (self._done, self._total, self._note, self._title)
            now = self._clock.now()
            is_begun = self._total is None and total is not None
            self._done = (self._done if done is None else done) + count
            self._total = self._total if total is None else total
            self._note = self._note if note is None else note
            self._title = self._title if title is None else title
            if is_begun or self._done < self._base[1]:  # it was begun again, further back
                self._base, self._first = (now, self._done), None
            elif self._first is None and self._done > self._base[1]:
                self._first = (now, self._done)
            if before != (self._done, self._total, self._note, self._title):
                self._changed = now
        self._show()

    def _show(self) -> None:
        if self._bars is not None:
            with self._lock:
                self._bars.show(self._title, Part(self._done, self._total, self._note), self._parts)

    def _write(self, text: str) -> None:
        try:
            self._console.out(text, highlight=False)
            self._console.file.flush()
        except (OSError, ValueError, SystemExit):  # the reader has gone, where rich raises SystemExit: the work goes on
            self._stop.set()

    def _speed(self, now: float) -> float | None:
        """Units per second, excluding start-up once that many and that many seconds have followed the first advance as
        led up to it: what workers finish together with it must not count as speed."""
        since, before = self._base
        if self._first is not None:
            first, count = self._first
            if now - first >= first - since and self._done - count >= count - before:
                since, before = first, count
        made = self._done - before
        return made / (now - since) if made > 0 and now > since else None

    def _line(self, is_over: bool = False) -> str:
        now = self._clock.now()
        elapsed, speed = _duration(now - self._began), self._speed(now)
        figures = []
        if self._total is not None:
            share = f" ({100 * self._done / self._total:.0f} %)" if self._total and not is_over else ""
            figures.append(f"{self._done:,.0f} of {self._total:,.0f} {self._unit}".rstrip() + share)
        elif self._done:
            figures.append(f"{self._done:,.0f} {self._unit}".rstrip())
        if is_over:
            figures.append(f"after {elapsed}")
        elif speed is None or self._total is None:
            figures.append(f"{elapsed} so far")
        else:
            left = (self._total - self._done) / speed
            figures += [_speed_text(speed, self._unit), f"{_duration(left)} left"]
        idle = now - self._changed
        notes = [self._note] if self._note else []
        if self._unit and not is_over and idle >= LINE_SECONDS:
            notes.append(f"nothing new for {_duration(idle)}")
        return "; ".join([f"{self._title}: {', '.join(figures)}", *notes])


def track(
    items: Iterable[Item], title: str, total: float, *, unit: str, console: Console | None = None
) -> Iterator[Item]:
    """The items, each of which counts as one unit when the next one is asked for."""
    with Progress(title, total, unit=unit, console=console) as progress:
        for item in items:
            yield item
            progress.advance()


class _Bars:
    """The same on a terminal: a bar for the whole and one for each part."""

    def __init__(self, console: Console, unit: str) -> None:
        title = TextColumn("{task.description}", markup=False)
        note = TextColumn("{task.fields[note]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))
        columns: tuple[ProgressColumn, ...] = (SpinnerColumn(), title, TimeElapsedColumn(), note)
        if unit:
            columns = (
                SpinnerColumn(),
                title,
                BarColumn(bar_width=None),  # takes what the others leave: figures must not be cut
                MofNCompleteColumn(table_column=Column(no_wrap=True)),
                TextColumn(unit, markup=False),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                note,
            )
        self._bars = Bars(*columns, console=console, expand=bool(unit), transient=not unit)
        self._whole = self._bars.add_task("", total=None, note="")
        self._parts: dict[str, TaskID] = {}

    def start(self) -> None:
        self._bars.start()

    def stop(self) -> None:
        self._bars.stop()

    def show(self, title: str, whole: Part, parts: Mapping[str, Part]) -> None:
        self._set(self._whole, title, whole)
        for name in self._parts.keys() - parts.keys():
            self._bars.remove_task(self._parts.pop(name))
        for name, part in parts.items():
            if name not in self._parts:
                self._parts[name] = self._bars.add_task("", total=None, note="")
            self._set(self._parts[name], f"  {name}", part)

    def _set(self, task: TaskID, title: str, part: Part) -> None:
        self._bars.update(task, description=title, completed=part.done, total=part.total, note=part.note)


def _is_terminal(console: Console) -> bool:
    """Whether a bar can move there. A console that was told to colour a file (FORCE_COLOR) is none."""
    return console.is_interactive and console.file.isatty()


def _part_line(name: str, part: Part) -> str:
    figures = [] if part.total is None else [f"{part.done:,.0f} of {part.total:,.0f}"]
    return f"{name}: {'; '.join([*figures, *([part.note] if part.note else [])])}"


def _speed_text(speed: float, unit: str) -> str:
    if speed < 0.1:
        return f"{60 * speed:.2g} {unit}/min"
    return f"{speed:,.0f} {unit}/s" if speed >= 10 else f"{speed:.2g} {unit}/s"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
