"""One drafter process for every kind of channel, started on Ray, and how to connect to it."""

import logging
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from moray.bench.configs import ChannelName
from moray.cluster.channels.actor import ActorChannel
from moray.cluster.channels.far_side import Answerer, FarSide, ServedFarSide
from moray.cluster.channels.graph import GraphChannel
from moray.cluster.channels.handle import HandleChannel
from moray.cluster.own_serve import own_serve
from moray.decoding.remote.channel import Channel, SocketChannel

_START_SECONDS = 120.0
_IN_A_THREAD = "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD"
"""Serve's default, but not when tuned. The caller's router keeps a loop of its own in both ways: the engine's thread,
which calls, has none."""


class Way(ABC):
    """A process, and the one channel to it."""

    def __init__(self, name: ChannelName) -> None:
        self.name = name

    @abstractmethod
    def connect(self) -> Channel:
        """The channel; the one before must have been closed."""

    @abstractmethod
    def prepare(self, topic: int | None) -> None:
        """See `Answerer.prepare`; waits until it is done."""

    @abstractmethod
    def pid(self) -> int:
        """Of the process."""

    @abstractmethod
    def stop(self) -> None:
        """End the process."""


class ActorWay(Way):
    """An actor of its own behind a socket, an actor call or a compiled graph."""

    def __init__(self, name: ChannelName, make: Callable[[], Answerer]) -> None:
        import ray

        super().__init__(name)
        self._actor: Any = ray.remote(FarSide).options(num_cpus=0).remote(make)
        self._listening = self._actor.listen.remote() if name == "socket" else None

    def connect(self) -> Channel:
        import ray

        if self._listening is not None:
            return SocketChannel(ray.get(self._listening, timeout=_START_SECONDS))
        return ActorChannel(self._actor) if self.name == "actor" else GraphChannel(self._actor)

    def prepare(self, topic: int | None) -> None:
        import ray

        ray.get(self._actor.prepare.remote(topic), timeout=_START_SECONDS)

    def pid(self) -> int:
        import ray

        return ray.get(self._actor.pid.remote(), timeout=_START_SECONDS)

    def stop(self) -> None:
        import ray

        ray.kill(self._actor)


class ServeWay(Way):
    """A Serve application of one replica, called by its handle."""

    def __init__(self, name: ChannelName, make: Callable[[], Answerer]) -> None:
        from ray import serve
        from ray.serve.config import RequestRouterConfig

        super().__init__(name)
        self._is_tuned = name == "handle tuned"
        router = RequestRouterConfig(request_router_class="moray.cluster.sticky_router:StickyRouter")  # type: ignore[arg-type]
        in_a_thread = "0" if self._is_tuned else "1"
        actor = {"num_cpus": 0, "runtime_env": {"env_vars": {_IN_A_THREAD: in_a_thread}}}
        options: dict[str, Any] = {"request_router_config": router, "ray_actor_options": actor}
        if self._is_tuned:
            options["logging_config"] = {"enable_access_log": False}
        deployment = serve.deployment(name="FarSide", **options)(ServedFarSide)
        self._application = f"moray-{name.replace(' ', '-')}-{uuid.uuid4().hex[:8]}"
        target = serve.RunTarget(deployment.bind(make), name=self._application, route_prefix=None)
        self._handle: Any
        (self._handle,) = serve.run_many([target], wait_for_applications_running=False)  # the first call waits
        self._handle._init(_run_router_in_separate_loop=True)  # whatever the environment says: callers have no loop

    def _call(self, method: str, *arguments: Any) -> Any:
        return getattr(self._handle, method).remote(*arguments).result(timeout_s=_START_SECONDS)

    def connect(self) -> Channel:
        return HandleChannel(self._handle, self._call("replica"), by_grpc=self._is_tuned)

    def prepare(self, topic: int | None) -> None:
        self._call("prepare", topic)

    def pid(self) -> int:
        return self._call("pid")

    def stop(self) -> None:
        from ray import serve

        serve.delete(self._application, _blocking=False)


def needs_serve(names: Sequence[ChannelName]) -> bool:
    """Whether a channel among these is one of Serve's."""
    return any(name.startswith("handle") for name in names)


@contextmanager
def open_ways(names: Sequence[ChannelName], make: Callable[[], Answerer]) -> Iterator[dict[ChannelName, Way]]:
    """A process for each kind of channel, where a Ray session is open; Serve runs without HTTP, and ends with them.

    They start side by side; the first call of each waits until it runs.

    Args:
        names: kinds of channels.
        make: makes the answerer in each process; pickled.

    Raises:
        ConfigError: Serve is needed, and runs already.
    """
    with ExitStack() as stack:
        if needs_serve(names):
            stack.enter_context(_serving())
        ways: dict[ChannelName, Way] = {}
        for name in names:
            way = (ServeWay if name.startswith("handle") else ActorWay)(name, make)
            stack.callback(way.stop)
            ways[name] = way
        yield ways


@contextmanager
def _serving() -> Iterator[None]:
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # what starts and ends is no news to whoever measures
    with own_serve():
        serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
        yield
