"""A target replica: the engine, and who drafts for it. Plain Python; `serve.app` makes it a deployment."""

import logging
from collections.abc import AsyncGenerator
from typing import Any

import torch

from moray.bench.loading import load_drafters
from moray.decoding.drafts import DraftSource, LocalDrafts
from moray.decoding.engine import Engine
from moray.decoding.request import Request, Update
from moray.targets.model import Target
from moray.text import ChatTokenizer
from serve.config import ServeConfig
from serve.engine_thread import EngineThread

_LOGGER = logging.getLogger("ray.serve")


class TargetReplica:
    """Answers sequences of tokens; text is the gateway's business."""

    def __init__(self, config: ServeConfig, drafters: Any = None) -> None:
        """
        Args:
            config: of the application.
            drafters: handle of the drafter deployment, where drafters are one.
        """
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self._config = config
        self._drafters = drafters
        self._target = Target.load(config.target)
        self._tokenizer = ChatTokenizer.load(config.target.model, config.target.template)
        self._engine = Engine(
            self._target,
            config.engine,
            {*self._target.eos_ids, *self._tokenizer.eos_ids},
            drafts=self._sources(),
            decode=self._tokenizer.decode,
        )
        self._thread: EngineThread | None = None

    def _sources(self) -> dict[str, DraftSource]:
        loaded = load_drafters(tuple(self._config.drafters.values()), self._target, self._tokenizer)
        shape = self._config.engine.tree
        return {
            name: LocalDrafts(drafter, self._target.spec.max_positions, shape.num_expanded)
            for name, drafter in zip(self._config.drafters, loaded.values(), strict=True)
        }

    @property
    def _running(self) -> EngineThread:
        if self._thread is None:  # the constructor may run outside of the event loop
            self._thread = EngineThread(self._engine, self._config.max_waiting)
        return self._thread

    async def describe(self) -> dict[str, Any]:
        """What the gateway has to know."""
        return {
            "capacity": self._engine.capacity,
            "vocab_size": self._target.spec.vocab_size,
            "drafters": list(self._engine.drafting),
        }

    async def generate(self, request: Request) -> AsyncGenerator[Update]:
        """Answer one sequence (see `EngineThread.generate`)."""
        async for update in self._running.generate(request):
            yield update

    def check_health(self) -> None:
        """Called by Serve; a replica whose engine has failed is replaced."""
        if self._thread is not None and self._thread.failure is not None:
            raise RuntimeError("the engine has failed") from self._thread.failure
