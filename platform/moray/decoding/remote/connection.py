"""The channel to one drafter process, and the requests that it has not answered yet."""

import time
from dataclasses import dataclass

from moray.decoding.engine.draft_source import DraftJob
from moray.decoding.remote.channel import Channel
from moray.decoding.remote.messages import DraftedTree, DraftReply, unpack_reply
from moray.errors import DataError, UnreachableError

_STALL_SECONDS = 5.0
"""A drafter process that has not answered for this long is given up."""


@dataclass
class PendingRequest:
    """A request that was sent."""

    jobs: dict[str, DraftJob]
    """By session."""
    since: float


class Connection:
    """One drafter process, as the engine's side sees it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._pending: dict[int, PendingRequest] = {}
        """By the request's number, in the order in which they are answered."""

    @property
    def num_pending(self) -> int:
        """Requests without an answer."""
        return len(self._pending)

    def send(self, frame: bytes, number: int, jobs: dict[str, DraftJob]) -> None:
        """Send a request.

        Args:
            frame: as `messages.pack` builds it.
            number: of the request.
            jobs: the draft jobs in it, by session.

        Raises:
            UnreachableError: the process is gone.
        """
        self._channel.send(frame)
        self._pending[number] = PendingRequest(jobs, time.monotonic())

    def receive(self, seconds: float) -> tuple[DraftReply, int] | None:
        """The next reply and its number of bytes; None if none arrives in this time.

        Raises:
            UnreachableError: the process is gone, or has not answered for `_STALL_SECONDS`.
            DataError: it sent something else.
        """
        frame = self._channel.receive(seconds)
        if frame is not None:
            return unpack_reply(frame), len(frame)
        if any(time.monotonic() - request.since > _STALL_SECONDS for request in self._pending.values()):
            raise UnreachableError("the drafter does not answer")
        return None

    def match(self, reply: DraftReply) -> list[tuple[DraftJob, DraftedTree]]:
        """The drafts of a reply, each with what was asked for; the request is answered then.

        Raises:
            DataError: the reply does not answer an open request with exactly the drafts that it asked for.
        """
        request = self._pending.pop(reply.number, None)
        if request is None:
            raise DataError(f"request {reply.number} was answered, which is not open")
        matched: list[tuple[DraftJob, DraftedTree]] = []
        for drafted in reply.trees:
            job = request.jobs.pop(drafted.session, None)
            if job is None:
                raise DataError(f"a draft for session '{drafted.session[:40]}' came, for which none was requested")
            matched.append((job, drafted))
        if request.jobs:
            raise DataError(f"request {reply.number} was answered without {len(request.jobs)} of its drafts")
        return matched

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()
