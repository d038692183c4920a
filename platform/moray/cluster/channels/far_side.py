"""The process at the other end of a channel: plain Python that Ray makes an actor or a replica of.

It knows how frames get in and out, not what is in them: that is the answerer's business.
"""

import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable

from moray.decoding.remote.channel import Endpoint, SocketServer


class Answerer(ABC):
    """Answers frames, one at a time."""

    @abstractmethod
    def answer(self, frame: bytes | bytearray) -> bytes:
        """The reply to a frame."""

    @abstractmethod
    def prepare(self, topic: int | None) -> None:
        """Get ready for what the frames that follow are about; never called while one is being answered."""


class FarSide:
    """An answerer behind all channels but Serve's."""

    def __init__(self, make: Callable[[], Answerer]) -> None:
        """`make` is called here, in the process that answers."""
        self._answerer = make()
        self._server: SocketServer | None = None

    def answer(self, frame: bytes) -> bytes:
        """The reply to a frame."""
        return self._answerer.answer(frame)

    def prepare(self, topic: int | None) -> None:
        """See `Answerer.prepare`."""
        self._answerer.prepare(topic)

    def listen(self) -> Endpoint:
        """Answer at a socket too, from now on."""
        import ray

        host, secret = ray.util.get_node_ip_address(), secrets.token_hex(32)
        self._server = SocketServer(self._answerer.answer, host, secret)
        return Endpoint(host, self._server.port, secret, str(os.getpid()))

    def pid(self) -> int:
        """Of this process."""
        return os.getpid()


class ServedFarSide:
    """The same as a Serve replica; its methods are coroutines, for Serve calls others through a pool of threads."""

    def __init__(self, make: Callable[[], Answerer]) -> None:
        """`make` is called here, in the process that answers."""
        self._answerer = make()

    async def answer(self, frame: bytes, replica: str) -> bytes:
        """The reply to a frame.

        Raises:
            RuntimeError: it was meant for another replica, which is gone.
        """
        if replica != await self.replica():
            raise RuntimeError(f"replica {replica} is gone")
        return self._answerer.answer(frame)

    async def prepare(self, topic: int | None) -> None:
        """See `Answerer.prepare`."""
        self._answerer.prepare(topic)

    async def replica(self) -> str:
        """Serve's name of this replica."""
        from ray import serve

        return serve.get_replica_context().replica_id.unique_id

    async def pid(self) -> int:
        """Of this process."""
        return os.getpid()
