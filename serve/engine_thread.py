"""Runs the engine in its own thread and exposes answers as asynchronous streams. Independent of Ray and HTTP.

Only that thread touches the engine: requests and cancellations go through an inbox, and the updates of each step are
passed to the event loop in one call.
"""

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from moray.decoding.engine.engine import Engine
from moray.decoding.request import Request, RequestOutput
from moray.edge.messages import CodecName, Open, Verify
from moray.edge.server.replies import Reply, ReplyWriter, client_memory_of, offer_of
from moray.errors import DataError, MorayError


class Admission(Enum):
    """The first event of every answer: whether the request may run or wait here."""

    ADMITTED = "admitted"
    REFUSED = "refused"


class EngineFailedError(MorayError):
    """An exception has ended the engine; the request itself is not necessarily at fault."""


@dataclass(eq=False)
class _Answer:
    """The event loop's state of one request."""

    submit: Callable[[], int]
    """Queues the request in the engine and returns its number."""
    convert: Callable[[RequestOutput], Any] = lambda update: update
    """Turns an update into what the stream yields; called in the engine's thread."""
    updates: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    """Converted updates, or the exception that ends the stream."""
    number: int | None = None
    """The engine's number of the request; used only in the engine's thread."""


class EngineThread:
    """A thread that steps the engine while there is work, and sleeps otherwise."""

    def __init__(
        self, engine: Engine, max_waiting: int, on_failure: Callable[[BaseException], None] | None = None
    ) -> None:
        """Start the thread; must be called inside the event loop that will consume the streams.

        Args:
            engine: must not be used by anything else from now on.
            max_waiting: how many sequences may wait in addition to those that run.
            on_failure: called in the event loop after an exception has ended the engine and all streams got the error.
        """
        self.engine = engine
        self._most = engine.config.max_num_seqs + max_waiting
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._answers: dict[int, _Answer] = {}
        self._open: list[_Answer] = []
        self._paced: dict[str, _Answer] = {}
        """Sequences whose clients draft, by session."""
        self._on_failure = on_failure
        self.failure: BaseException | None = None
        """The exception that ended the thread, if any."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def generate(self, request: Request, is_resumed: bool = False) -> AsyncGenerator[Admission | RequestOutput]:
        """Answer a request: yields its admission and, if admitted, updates. Closing the generator cancels the request.

        Args:
            request: the request.
            is_resumed: whether another replica had admitted the request and was lost. Such requests are admitted even
                beyond the limit, because refusing one would cut off a half-written answer. Their number is bounded by
                the requests that had been admitted.

        Raises:
            DataError: the request cannot be served.
            EngineFailedError: the engine failed, before or during the request.
        """
        return self._stream(_Answer(lambda: self.engine.submit(request)), is_resumed)

    async def generate_paced(self, session: str, message: Open, codec: CodecName) -> AsyncGenerator[Admission | Reply]:
        """Answer a request whose client drafts: yields its admission and, if admitted, messages to the client. Closing
        the generator cancels the request.

        Args:
            session: name for `offer`.
            message: the request.
            codec: how the drafter's memory is sent.

        Raises:
            DataError: the request, or something that was offered for it, cannot be served.
            EngineFailedError: the engine failed, before or during the request.
        """
        writer = ReplyWriter(message.request, codec)
        answer = _Answer(lambda: self.engine.submit_paced(message.request, client_memory_of(message)), writer.write)
        self._paced[session] = answer
        try:
            async with aclosing(self._stream(answer, is_resumed=False)) as stream:
                async for event in stream:
                    yield event
        finally:
            del self._paced[session]

    def offer(self, session: str, verify: Verify) -> None:
        """Verify a client's draft; if that is not possible, its stream ends with the error.

        Raises:
            DataError: the session is not here.
        """
        answer = self._paced.get(session)
        if answer is None:
            raise DataError("the session is not known here any more: open it again")
        self._inbox.put(lambda: self._offer(answer, verify))

    async def _stream(self, answer: _Answer, is_resumed: bool) -> AsyncGenerator[Any]:
        if self.failure is not None:
            raise _failed(self.failure)
        if self.num_open >= self._most and not is_resumed:
            yield Admission.REFUSED
            return
        self._open.append(answer)
        self._inbox.put(lambda: self._submit(answer))
        try:
            yield Admission.ADMITTED
            while True:
                update = await answer.updates.get()
                if isinstance(update, Exception):
                    raise update
                yield update
                if update.is_finished:
                    return
        finally:
            self._open.remove(answer)
            self._inbox.put(lambda: self._cancel(answer))

    @property
    def num_open(self) -> int:
        """Sequences that run or wait."""
        return len(self._open)

    def close(self) -> None:
        """End the thread after its current step."""
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        """Main loop of the thread. Except for `_fail`, all methods below are called in this thread."""
        try:
            while self._handle_inbox():
                self._deliver(self.engine.step())
        except BaseException as error:  # noqa: BLE001 - passed to all open streams
            self.failure = error
            self._loop.call_soon_threadsafe(self._fail, error)

    def _handle_inbox(self) -> bool:
        """Run the tasks in the inbox, waiting for one if the engine is idle; returns False to end the thread."""
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
            answer.number = answer.submit()
        except MorayError as error:
            self._loop.call_soon_threadsafe(answer.updates.put_nowait, error)
            return
        self._answers[answer.number] = answer

    def _offer(self, answer: _Answer, verify: Verify) -> None:
        target = self.engine.target
        if answer.number not in self._answers:
            return  # it has ended meanwhile
        try:
            self.engine.offer(answer.number, offer_of(verify, target.spec.vocab_size, target.device))
        except MorayError as error:
            self._loop.call_soon_threadsafe(answer.updates.put_nowait, error)

    def _cancel(self, answer: _Answer) -> None:
        if answer.number is not None and self._answers.pop(answer.number, None) is not None:
            self.engine.cancel(answer.number)

    def _deliver(self, updates: list[RequestOutput]) -> None:
        if not updates:
            return
        pairs = [
            (answer, answer.convert(update))
            for update in updates
            if (answer := self._answers.get(update.number)) is not None
        ]
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
    return EngineFailedError(f"the engine has failed: {type(error).__name__}")  # the message may quote a prompt


def _put(pairs: list[tuple[_Answer, Any]]) -> None:
    for answer, update in pairs:
        answer.updates.put_nowait(update)
