"""A drafter replica: runs drafters without their target and serves target replicas over a socket.

A target holds a lease for every sequence that is drafted here: a streamed call that lasts as long as the sequence. The
leases tell Serve how busy the replica is (for routing and autoscaling), and tell a target at once when the replica
dies. The drafts themselves go over the socket (see `decoding.remote.channel`). Leases use gRPC, because Ray 2.60 does
not end streamed calls of a killed process, whereas a gRPC call ends with the process that holds it. If a whole machine
vanishes, its leases end after their sequences have been idle for some time.
"""

import logging
import secrets
from collections.abc import AsyncGenerator, Mapping

import torch

from moray.decoding.planning.fitting import fit_shape
from moray.decoding.remote.ahead import can_run_ahead
from moray.decoding.remote.channel import Endpoint, SocketServer
from moray.decoding.remote.host import DraftHost
from moray.decoding.remote.messages import pack, unpack_request
from moray.drafters.base import Drafter
from moray.drafters.loading import build_drafters, num_head_layers
from moray.targets.head import TargetHead
from moray.text import ChatTokenizer
from serve.config import ServeConfig
from serve.lease_table import LeaseTable
from serve.loading_thread import run_in_ending_thread
from serve.metrics.publisher import Publisher
from serve.metrics.readings import read_host
from serve.metrics.sink import Nowhere, Sink

_LOGGER = logging.getLogger("ray.serve")


class DrafterReplica:
    """Serves the drafters of the application's pool; `serve.app` makes it a deployment."""

    def __init__(
        self, config: ServeConfig, host: str | None = None, replica: str = "", sink: Sink | None = None
    ) -> None:
        """
        Args:
            config: configuration of the application.
            host: address to listen on; None for this node's address in the Ray cluster.
            replica: name of this process; its address if empty.
            sink: receives the metrics.

        Raises:
            ConfigError: a drafter cannot draft the tree.
        """
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        if config.engine.synthetic.is_on:
            _LOGGER.warning(config.engine.synthetic.notice)
        head, drafters = run_in_ending_thread(lambda: _load(config))
        for name, drafter in drafters.items():
            fit_shape(config.engine.tree, name, drafter.max_depth, head.spec.vocab_size)
        if config.run_ahead:
            _warn_who_cannot_run_ahead(drafters, config)
        self.host = DraftHost(
            drafters,
            config.engine.max_positions_of(head.spec.max_positions),
            config.num_expanded,
            config.session_idle_seconds,
            run_ahead=config.run_ahead,
            cost=config.engine.synthetic.draft,
        )
        self._lease_table = LeaseTable(self.host, config.session_idle_seconds)
        self._publisher = Publisher(sink or Nowhere(), lambda: read_host(self.host))
        secret = secrets.token_hex(32)
        host = host or _node_address()
        go_on = self.host.go_on if config.run_ahead else None
        self._server = SocketServer(self._answer, host, secret, go_on)
        self.endpoint = Endpoint(host, self._server.port, secret, replica or f"{host}:{self._server.port}")

    def _answer(self, frame: bytearray) -> bytes:
        return pack(self.host.handle(*unpack_request(frame)))

    async def lease(self, session: str) -> AsyncGenerator[Endpoint]:
        """Reserve a slot for a sequence until the caller stops listening, dies, or leaves the sequence idle."""
        self._publisher.start()
        with self._lease_table.lend(session):
            yield self.endpoint
            await self._lease_table.until_unused(session)

    async def describe(self) -> dict[str, int]:
        """Report how busy this replica is."""
        return {"num_sessions": self.host.num_sessions, "num_leases": len(self._lease_table)}

    def close(self) -> None:
        """Stop listening."""
        self._server.close()

    def check_health(self) -> None:
        """Called by Serve, which replaces the replica if this raises: the thread that answers targets has ended."""
        if not self._server.is_alive:
            raise RuntimeError("the thread that answers target replicas has ended")


def _load(config: ServeConfig) -> tuple[TargetHead, dict[str, Drafter]]:
    head = TargetHead.load(config.target, num_head_layers(tuple(config.pooled.values())))
    tokenizer = ChatTokenizer.load(config.target.model, config.target.template)
    drafters = {
        name: build_drafters((entry,), lambda _: head, tokenizer).popitem()[1] for name, entry in config.pooled.items()
    }
    return head, drafters


def _warn_who_cannot_run_ahead(drafters: Mapping[str, Drafter], config: ServeConfig) -> None:
    depth = config.engine.tree.depth
    for name, drafter in drafters.items():
        if not can_run_ahead(drafter, 1 + depth, depth, config.num_expanded):
            _LOGGER.warning(
                "run_ahead is true, but drafter '%s' will not run ahead: max_depth is %s, and to go on below a chain "
                "of depth %d it needs %d; name a shorter chain in engine.tree.depth",
                *(name, drafter.max_depth, depth, config.num_expanded),
            )


def _node_address() -> str:
    import ray

    return ray.util.get_node_ip_address()
