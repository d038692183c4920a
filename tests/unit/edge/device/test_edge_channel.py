"""A device's end of a connection: a server that refuses and closes at once is understood."""

from collections import deque

import pytest

from moray.edge.device.channel import Channel, TryLaterError
from moray.edge.device.stats import EdgeStats
from moray.edge.device.transport import Link
from moray.edge.messages import Cancel
from moray.edge.server.server import RefusedError
from moray.errors import MismatchError, UnreachableError


class ClosedLink(Link):
    """A connection that the server has closed; what it had sent before can still be read."""

    def __init__(self, *frames: bytes) -> None:
        self._frames = deque(frames)

    def send(self, text: str) -> None:
        raise UnreachableError("closed")

    def receive(self, seconds: float) -> bytes | None:
        if not self._frames:
            raise UnreachableError("closed")
        return self._frames.popleft()

    @property
    def silent_seconds(self) -> float:
        return 0.0

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("refusal", "error", "said"),
    [
        (RefusedError("text", "another tokenizer"), MismatchError, "another tokenizer"),
        (RefusedError("full", "no room", retry_ms=2000), TryLaterError, "no room"),
        (None, UnreachableError, "closed"),
    ],
)
def test_a_message_to_a_server_that_has_refused_raises_its_reason(refusal, error, said):
    frames = () if refusal is None else (refusal.frame,)
    with pytest.raises(error, match=said):
        Channel(ClosedLink(*frames), EdgeStats(), 10).send(Cancel())
