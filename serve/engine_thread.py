"""The engine in a thread of its own, with answers as asynchronous streams. Knows neither Ray nor HTTP.

The engine is only ever touched by its thread: requests and cancellations are put into an inbox, and each step's
updates go to the event loop in one call.
"""

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from enum import Enum

from moray.decoding.engine.engine import Engine
from moray.decoding.request import Request, RequestOutput
from moray.errors import MorayError


class Admission(Enum):
    """What every answer begins with: whether there is a place for it, to run or to wait."""

    ADMITTED = "admitted"
    REFUSED = "refused"


class EngineFailedError(MorayError):
    """A defect has ended the engine; the request may be as good as any other."""


@dataclass(eq=False)
class _Answer:
    """What the event loop keeps of one request."""

    request: Request
    updates: "asyncio.Queue[RequestOutput | Exception]" = field(default_factory=asyncio.Queue)
    number: int | None = None
    """The engine's, known to its thread alone."""


class EngineThread:
    """Runs an engine for as long as it has something to do, and sleeps otherwise."""

    def __init__(
        self, engine: Engine, max_waiting: int, on_failure: Callable[[BaseException], None] | None = None
    ) -> None:
        """Must be made where an event loop runs; its streams belong to it.

        Args:
            engine: that nobody else touches from now on.
            max_waiting: sequences beyond those that run.
            on_failure: called in the event loop when a defect has ended the engine, once all streams know.
        """
        self.engine = engine
        self._most = engine.config.max_num_seqs + max_waiting
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._answers: dict[int, _Answer] = {}
        self._open: list[_Answer] = []
        self._on_failure = on_failure
        self.failure: BaseException | None = None
        """What ended the thread, if anything has."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def generate(self, request: Request, is_resumed: bool = False) -> AsyncGenerator[Admission | RequestOutput]:
        """Answer a request: its admission, and then updates if it is admitted. Whoever stops listening frees its place
        at once.

        Args:
            request: what is asked.
            is_resumed: another replica had let it in and was lost. It has waited for its place already, so it is let
                in beyond the limit: refused, a half-written answer would end. There are at most as many as had places.

        Raises:
            DataError: the request cannot be served.
            EngineFailedError: before or meanwhile.
        """
        if self.failure is not None:
            raise _failed(self.failure)
        if self.num_open >= self._most and not is_resumed:
            yield Admission.REFUSED
            return
        answer = _Answer(request)
        self._open.append(answer)
        self._inbox.put(lambda: self._submit(answer))
        try:
            yield Admission.ADMITTED
            while True:
                update = await answer.updates.get()
                if isinstance(update, Exception):
                    raise update
                yield update
                if update.finish_reason is not None:
                    return
        finally:
            self._open.remove(answer)
            self._inbox.put(lambda: self._cancel(answer))

    @property
    def num_open(self) -> int:
        """Sequences that run or wait."""
        return len(self._open)

    def close(self) -> None:
        """End the thread after its present step."""
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        """What the thread does; but for `_fail`, methods from here on are called in it."""
        try:
            while self._handle_inbox():
                self._deliver(self.engine.step())
        except BaseException as error:  # noqa: BLE001 - a thread's end is told to everybody
            self.failure = error
            self._loop.call_soon_threadsafe(self._fail, error)

    def _handle_inbox(self) -> bool:
        """Do what was asked for, waiting for it if there is nothing else to do; False once it is time to end."""
        while True:
            try:
                task = self._inbox.get(block=not self.engine.is_busy)
            except queue.Empty:
                return True
            if task is None:
                return False
            task()

    def _submit(self, answer: _Answer) -> None:
        try:
            answer.number = self.engine.submit(answer.request)
        except MorayError as error:
            self._loop.call_soon_threadsafe(answer.updates.put_nowait, error)
            return
        self._answers[answer.number] = answer

    def _cancel(self, answer: _Answer) -> None:
        if answer.number is not None and self._answers.pop(answer.number, None) is not None:
            self.engine.cancel(answer.number)

    def _deliver(self, updates: list[RequestOutput]) -> None:
        if not updates:
            return
        pairs = [(self._answers[update.number], update) for update in updates if update.number in self._answers]
        for update in updates:
            if update.finish_reason is not None:
                self._answers.pop(update.number, None)
        self._loop.call_soon_threadsafe(_put, pairs)

    def _fail(self, error: BaseException) -> None:
        for answer in self._open:
            answer.updates.put_nowait(_failed(error))
        if self._on_failure is not None:
            self._on_failure(error)


def _failed(error: BaseException) -> EngineFailedError:
    return EngineFailedError(f"the engine has failed: {type(error).__name__}")  # its words may quote a prompt


def _put(pairs: list[tuple[_Answer, RequestOutput]]) -> None:
    for answer, update in pairs:
        answer.updates.put_nowait(update)
