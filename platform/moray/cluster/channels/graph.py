"""Frames through a compiled graph of one actor: shared memory that both sides wait at.

Ray 2.60 lets a result be fetched once, whether it has come or not. Here it is waited for by the graph's own method,
which is private to Ray (its version is pinned exactly), and fetched when it has come.
"""

from collections import deque
from typing import Any

from ray.dag import InputNode
from ray.exceptions import RayChannelTimeoutError

from moray.cluster.channels.trouble import unreachable
from moray.decoding.remote.channel import Channel

_SUBMIT_SECONDS = 2.0


class GraphChannel(Channel):
    """Used by the process and the thread that made it, and by nobody else; the actor is its alone until `close`."""

    def __init__(self, actor: Any) -> None:
        """`actor` is the handle of a `FarSide`; buffers grow with the frames."""
        with InputNode() as frame:
            answered = actor.answer.bind(frame)
        self._graph = answered.experimental_compile(_submit_timeout=_SUBMIT_SECONDS)
        self._owed: deque[Any] = deque()

    def send(self, frame: bytes) -> None:
        try:
            self._owed.append(self._graph.execute(frame))
        except Exception as error:  # a graph whose actor has died fails in several ways
            raise unreachable(error) from error

    def receive(self, seconds: float) -> bytes | None:
        if not self._owed:
            return None
        result = self._owed[0]
        try:
            self._graph._execute_until(result._execution_index, timeout=seconds)
            reply = result.get()
        except RayChannelTimeoutError:
            return None
        except Exception as error:  # see `send`
            raise unreachable(error) from error
        self._owed.popleft()
        return reply

    def close(self) -> None:
        self._graph.teardown()
        self._owed.clear()  # afterwards: results of a graph that still stands would be waited for
