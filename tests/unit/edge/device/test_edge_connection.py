"""A device's end of a connection: a server that refuses and closes at once is understood."""

from collections import deque

import pytest

from moray.decoding.remote.frames import pack_frame
from moray.edge.device.connection import ServerConnection, TryLaterError
from moray.edge.device.stats import EdgeStats
from moray.edge.device.transport import Link
from moray.edge.messages import Cancel, Resumed
from moray.edge.server.server import RefusedError
from moray.errors import MismatchError, UnreachableError

EARLIER = pack_frame(Resumed(last_seq=3))


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
        raise UnreachableError("closed")

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("frames", "error", "said"),
    [
        ((RefusedError("text", "another tokenizer").frame,), MismatchError, "another tokenizer"),
        ((EARLIER, RefusedError("text", "another tokenizer").frame), MismatchError, "another tokenizer"),
        ((RefusedError("full", "no room", retry_ms=2000).frame,), TryLaterError, "no room"),
        ((EARLIER,), UnreachableError, "closed"),
        ((), UnreachableError, "closed"),
    ],
)
def test_a_message_to_a_server_that_has_refused_raises_its_reason(frames, error, said):
    with pytest.raises(error, match=said):
        ServerConnection(ClosedLink(*frames), EdgeStats(), 10).send(Cancel())
    with pytest.raises(error, match=said):
        ServerConnection(ClosedLink(*frames), EdgeStats(), 10).check_silence()
