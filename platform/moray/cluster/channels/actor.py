"""Frames as calls of an actor's method."""

from collections import deque
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from moray.cluster.channels.trouble import unreachable
from moray.decoding.remote.channel import Channel


class ActorChannel(Channel):
    """Calls of one caller reach an actor in their order, and it answers one at a time."""

    def __init__(self, actor: Any) -> None:
        """`actor` is the handle of a `FarSide`."""
        self._actor = actor
        self._owed: deque[ray.ObjectRef[bytes]] = deque()

    def send(self, frame: bytes) -> None:
        try:
            self._owed.append(self._actor.answer.remote(frame))
        except RayError as error:
            raise unreachable(error) from error

    def receive(self, seconds: float) -> bytes | None:
        if not self._owed:
            return None
        try:
            reply = ray.get(self._owed[0], timeout=seconds)
        except GetTimeoutError:
            return None
        except RayError as error:
            raise unreachable(error) from error
        self._owed.popleft()
        return reply

    def close(self) -> None:
        self._owed.clear()
