"""Frames as calls through a Ray Serve handle, all of them to one replica."""

import uuid
from collections import deque
from typing import Any

from grpc import RpcError
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from moray.cluster.channels.trouble import failed, unreachable
from moray.decoding.remote.channel import Channel


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
        except Exception as error:  # whatever Serve says of it, nothing is sent
            raise unreachable(error) from error

    def receive(self, seconds: float) -> bytes | None:
        if not self._owed:
            return None
        try:
            reply = self._owed[0].result(timeout_s=seconds)
        except TimeoutError:
            return None
        except (RayError, RayServeException, RpcError) as error:
            raise unreachable(error) from error
        except Exception as error:  # by gRPC the answerer's own comes as what it is, not as one of Ray's
            raise failed(error) from error
        self._owed.popleft()
        return reply

    def close(self) -> None:
        for call in self._owed:
            call.cancel()
        self._owed.clear()
