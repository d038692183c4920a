"""Frames as calls through a Ray Serve handle, all of them to one replica."""

import uuid
from collections import deque
from typing import Any

from moray.decoding.remote.channel import Channel
from moray.errors import UnreachableError


class HandleChannel(Channel):
    """The deployment's router must be `cluster.sticky_router.StickyRouter`; called from threads without a loop."""

    def __init__(self, handle: Any, replica: str, *, by_grpc: bool = False) -> None:
        """
        Args:
            handle: of a deployment of `ServedFarSide`.
            replica: Serve's name of the replica that answers.
            by_grpc: straight to the replica, instead of as an actor's call.
        """
        self._replica = replica
        self._handle = handle.options(session_id=f"{uuid.uuid4().hex}@{replica}", _by_reference=not by_grpc)
        self._owed: deque[Any] = deque()

    def send(self, frame: bytes) -> None:
        try:
            self._owed.append(self._handle.answer.remote(frame, self._replica))
        except Exception as error:  # noqa: BLE001 - whatever Serve says of it, nothing is sent
            raise UnreachableError(f"the drafter is gone: {type(error).__name__}") from None

    def receive(self, seconds: float) -> bytes | None:
        if not self._owed:
            return None
        try:
            reply = self._owed[0].result(timeout_s=seconds)
        except TimeoutError:
            return None
        except Exception as error:  # noqa: BLE001 - by gRPC an error comes as what it is, not as one of Ray's
            raise UnreachableError(f"the drafter is gone: {type(error).__name__}") from None
        self._owed.popleft()
        return reply

    def close(self) -> None:
        for call in self._owed:
            call.cancel()
        self._owed.clear()
