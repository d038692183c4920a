"""A target replica: the engine and its drafters. Plain Python; `serve.app` makes it a deployment."""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moray.decoding.engine.draft_source import DraftSource, LocalDrafts
from moray.decoding.engine.engine import Engine
from moray.decoding.remote.source import RemoteDrafts
from moray.decoding.request import Request, RequestOutput
from moray.drafters.base import Drafter
from moray.drafters.loading import fingerprints_of, load_drafters
from moray.edge.messages import CodecName, Open, Verify
from moray.edge.server.replies import Reply
from moray.edge.server.server import Served
from moray.targets.model import Target
from moray.targets.sparse.measured import Measured
from moray.targets.sparse.target import SparseTarget
from moray.text import ChatTokenizer
from serve.api.documents import Sparse
from serve.api.failures import describe
from serve.config import ServeConfig
from serve.engine_thread import Admission, EngineThread
from serve.lease_client import LeaseClient
from serve.loading_thread import run_in_ending_thread
from serve.metrics.publisher import Publisher
from serve.metrics.readings import read_engine
from serve.metrics.sink import Nowhere, Sink

_LOGGER = logging.getLogger("ray.serve")
_LAST_SECONDS = 0.1
"""Seconds that open streams have to receive the error before the process of a failed engine exits."""


@dataclass(frozen=True)
class TargetDescription:
    """What a target replica says about itself."""

    max_model_len: int
    """Maximum tokens of prompt and answer together."""
    vocab_size: int
    drafters: tuple[str, ...]
    num_open: int
    """Sequences that run or wait."""
    num_running: int
    """Sequences that the engine decodes now."""
    num_leases: int
    """Leases of drafter replicas that are held or requested."""
    edge: Served | None = None
    """What devices must have in common with this target; None without an endpoint for devices."""
    sparse: Sparse | None = None
    """Of a sparse target."""


class TargetReplica:
    """Answers token sequences; the gateway handles text."""

    def __init__(
        self, config: ServeConfig, drafters: Any = None, sink: Sink | None = None, ends_process: bool = False
    ) -> None:
        """
        Args:
            config: configuration of the application.
            drafters: handle of the drafter deployment, if there is one.
            sink: receives the metrics.
            ends_process: exit the process once the engine has failed. Otherwise the replica would fail every request
                at once, look the least busy of all, and attract more requests.
        """
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        if config.engine.synthetic.is_on:
            _LOGGER.warning(config.engine.synthetic.notice)
        self._config = config
        self._ends_process = ends_process
        self._target, self._tokenizer, self._drafters = run_in_ending_thread(lambda: _load(config))
        if self._target.kernels is not None and self._target.kernels.reason:
            _LOGGER.info(self._target.kernels.reason)
        self._lease_client = LeaseClient(drafters) if drafters is not None else None
        self._engine = run_in_ending_thread(self._new_engine)
        self._sparse = _sparse(self._target)
        self._served = self._common_with_devices()
        self._publisher = Publisher(sink or Nowhere(), lambda: read_engine(self._engine))
        self._thread: EngineThread | None = None

    @property
    def running(self) -> EngineThread:
        """The engine's thread, started on first use, because constructors run without an event loop."""
        if self._thread is None:
            if self._lease_client is not None:
                self._lease_client.start()
            self._thread = EngineThread(self._engine, self._config.max_waiting, self._end)
            self._publisher.start()
        return self._thread

    def _new_engine(self) -> Engine:
        eos_ids = {*self._target.eos_ids, *self._tokenizer.eos_ids}
        config, decode, edge = self._config.engine, self._tokenizer.decode, self._config.edge
        engine = Engine(
            self._target,
            config,
            eos_ids,
            drafts=self._sources(),
            paced={name: self._drafters[name] for name in edge.drafters} if edge is not None else None,
            max_offered_nodes=edge.max_nodes if edge is not None else 0,
            decode=decode,
        )
        for scheduler in engine.draft_schedulers.values():
            for notice in scheduler.notices:
                _LOGGER.warning(notice)
        engine.measure_costs(self._drafters)
        return engine

    def _common_with_devices(self) -> Served | None:
        edge = self._config.edge
        if edge is None:
            return None
        found = {name: fingerprints_of((self._config.drafters[name],)) for name in edge.drafters}
        fingerprints = {name: next(iter(one.values()), "") for name, one in found.items()}
        return Served(self._target.spec.fingerprint, self._tokenizer.fingerprint, fingerprints, edge.codecs)

    def _sources(self) -> Mapping[str, DraftSource]:
        return {name: self._source(name, drafter) for name, drafter in self._drafters.items()}

    def _source(self, name: str, drafter: Drafter) -> DraftSource:
        config, engine = self._config, self._config.engine
        if self._lease_client is not None and name in config.pooled:
            timeout, max_inflight = config.draft_timeout_ms / 1000, 2 * engine.num_micro_batches
            return RemoteDrafts(drafter, name, self._lease_client, timeout=timeout, max_inflight=max_inflight)
        most = engine.max_positions_of(self._target.spec.max_positions)
        return LocalDrafts(drafter, most, engine.tree.num_expanded, engine.synthetic.draft)

    def _end(self, error: BaseException) -> None:
        _LOGGER.critical("the engine has failed: %s", describe(error, self._config.api.log_prompts))
        if self._ends_process:
            asyncio.get_running_loop().call_later(_LAST_SECONDS, os._exit, 1)

    async def describe(self) -> TargetDescription:
        """Report the limits that the gateway needs, and how busy this replica is."""
        engine = self._engine
        return TargetDescription(
            max_model_len=engine.max_model_len,
            vocab_size=self._target.spec.vocab_size,
            drafters=tuple(engine.draft_schedulers),
            num_open=0 if self._thread is None else self._thread.num_open,
            num_running=engine.num_running,
            num_leases=0 if self._lease_client is None else self._lease_client.num_leases,
            edge=self._served,
            sparse=self._sparse,
        )

    async def generate(self, request: Request, is_resumed: bool = False) -> AsyncGenerator[Admission | RequestOutput]:
        """Answer one sequence (see `EngineThread.generate`)."""
        async for event in self.running.generate(request, is_resumed):
            yield event

    async def edge(self, session: str, message: Open, codec: CodecName) -> AsyncGenerator[Admission | Reply]:
        """Answer one sequence whose client drafts (see `EngineThread.generate_paced`)."""
        async for event in self.running.generate_paced(session, message, codec):
            yield event

    async def offer(self, session: str, verify: Verify) -> None:
        """Verify a client's draft (see `EngineThread.offer`)."""
        self.running.offer(session, verify)

    def check_health(self) -> None:
        """Called by Serve, which replaces the replica if this raises: the engine has failed, or a process that holds a
        part of the target has ended."""
        self._target.check_ranks()
        if self._thread is not None and self._thread.failure is not None:
            raise RuntimeError("the engine has failed") from self._thread.failure


def _load(config: ServeConfig) -> tuple[Target, ChatTokenizer, dict[str, Drafter]]:
    target = Target.load(config.target)
    tokenizer = ChatTokenizer.load(config.target.model, config.target.template)
    drafters = {
        name: load_drafters((entry,), target, tokenizer).popitem()[1] for name, entry in config.drafters.items()
    }
    return target, tokenizer, drafters


def _sparse(target: Target) -> Sparse | None:
    if not isinstance(target, SparseTarget):
        return None
    assert target.spec.routing is not None
    measured = Measured.read(target.folder, target.spec.fingerprint)
    if measured is None:
        return Sparse(share=target.spec.routing.share, agreement=None)
    return Sparse(share=measured.share, agreement=measured.agreement)
