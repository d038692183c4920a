"""A target replica: the engine, and who drafts for it. Plain Python; `serve.app` makes it a deployment."""

from collections.abc import AsyncGenerator, Mapping
from typing import Any

import torch

from moray.bench.loading import load_drafters
from moray.decoding.drafts import DraftSource, LocalDrafts
from moray.decoding.engine import Engine
from moray.decoding.remote.source import RemoteDrafts
from moray.decoding.request import Request, Update
from moray.targets.model import Target
from moray.text import ChatTokenizer
from serve.config import ServeConfig
from serve.engine_thread import EngineThread
from serve.leases import LeasedPlaces
from serve.metrics.publisher import Publisher
from serve.metrics.readings import read_engine
from serve.metrics.sink import Nowhere, Sink


class TargetReplica:
    """Answers sequences of tokens; text is the gateway's business."""

    def __init__(self, config: ServeConfig, drafters: Any = None, sink: Sink | None = None) -> None:
        """
        Args:
            config: of the application.
            drafters: handle of the drafter deployment, where drafters are one.
            sink: of metrics.
        """
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self._config = config
        self._pool = drafters
        self._sink = sink or Nowhere()
        self._target = Target.load(config.target)
        self._tokenizer = ChatTokenizer.load(config.target.model, config.target.template)
        loaded = load_drafters(tuple(config.drafters.values()), self._target, self._tokenizer)
        self._drafters = dict(zip(config.drafters, loaded.values(), strict=True))
        self._thread: EngineThread | None = None

    @property
    def running(self) -> EngineThread:
        """The engine in its thread, started by the first call: constructors run where no event loop does."""
        if self._thread is None:
            sources = self._sources()
            engine = self._engine(sources)
            self._thread = EngineThread(engine, self._config.max_waiting)
            self._publisher = Publisher(self._sink, lambda: read_engine(engine, sources))
            self._publisher.start()
        return self._thread

    def _engine(self, sources: Mapping[str, DraftSource]) -> Engine:
        eos_ids = {*self._target.eos_ids, *self._tokenizer.eos_ids}
        return Engine(self._target, self._config.engine, eos_ids, drafts=sources, decode=self._tokenizer.decode)

    def _sources(self) -> Mapping[str, DraftSource]:
        if self._pool is None:
            sizes = self._target.spec.max_positions, self._config.engine.tree.num_expanded
            return {name: LocalDrafts(drafter, *sizes) for name, drafter in self._drafters.items()}
        places, timeout = LeasedPlaces(self._pool), self._config.draft_timeout_ms / 1000
        return {name: RemoteDrafts(drafter, name, places, timeout=timeout) for name, drafter in self._drafters.items()}

    async def describe(self) -> dict[str, Any]:
        """What the gateway has to know."""
        engine = self.running.engine
        return {
            "capacity": engine.capacity,
            "vocab_size": self._target.spec.vocab_size,
            "drafters": list(engine.drafting),
        }

    async def generate(self, request: Request) -> AsyncGenerator[Update]:
        """Answer one sequence (see `EngineThread.generate`)."""
        async for update in self.running.generate(request):
            yield update

    def check_health(self) -> None:
        """Called by Serve; a replica whose engine has failed is replaced."""
        if self._thread is not None and self._thread.failure is not None:
            raise RuntimeError("the engine has failed") from self._thread.failure
