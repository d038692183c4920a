"""One answer on a device: what is verified, what is only drafted, and what is under way."""

from collections import deque
from dataclasses import dataclass
from typing import Literal

from moray.decoding.remote.ahead import Ahead
from moray.decoding.request import Request
from moray.edge.messages import Verify, Welcome
from moray.trees.ranking import Pruned


@dataclass(frozen=True)
class TimedDraft:
    """A draft made after the previous reply, so that its own reply can be timed."""

    seq: int
    num_levels: int
    num_target_layers: int
    sent_at: float
    pruned: Pruned | None
    """What of it was sent; None for all of it."""


class EdgeAnswer:
    """The state of one answer."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens = [*request.prompt, *request.generated]
        """Prompt and verified tokens."""
        self.drafted: list[int] = []
        """Tokens after them that the user has seen and that are not verified."""
        self.finish_reason: str | None = None
        self.alone: Ahead | Literal["ended"] | None = None
        """What drafts `drafted` on while there is no server; None if it has not begun."""
        self.has_root = False
        """Whether the server has read all tokens but the last, so that it verifies drafts below it."""
        self.welcome: Welcome | None = None
        """Of the session; None while there is none."""
        self.received = 0
        self.lost_at: float | None = None
        """Since when there has been no server; None if the last message came as it should."""
        self.next_seq = 1
        self.last_stale_seq = -1
        """Answers to drafts up to this one may have waited for a connection: they say nothing about its speed."""
        self.under_way: deque[Verify] = deque()
        self.timed: TimedDraft | None = None
        """The last timed draft; None if there is none."""

    @property
    def index(self) -> int:
        """Index in the answer of the next token to be verified."""
        return len(self.tokens) - len(self.request.prompt)

    def reopen(self) -> None:
        """The session is gone: nothing is under way any more."""
        self.welcome, self.received, self.next_seq, self.last_stale_seq = None, 0, 1, -1
        self.under_way.clear()
        self.has_root = False
        self.alone = None
