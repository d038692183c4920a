"""The real API over a real engine on a tiny target, in this process: all of serving but Ray Serve itself.

What Serve would be is a stand-in handle; requests come in over a loopback port as they do in production.
"""

import asyncio
import contextlib
import shutil
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import uvicorn
from tiny_drafters import noisy_copy
from tiny_targets import TinyTarget, save_chat_target
from transformers import AutoModelForCausalLM

from moray.config import validate
from moray.decoding.request import Request, RequestOutput
from moray.targets.model import Target
from moray.targets.spec import TargetConfig
from moray.text import ChatTokenizer
from serve.api.routes import build_api
from serve.config import ServeConfig
from serve.gateway import Gateway
from serve.target import TargetReplica

DRAFTERS = ("twin", "lookup")


@dataclass
class StandIn:
    """Answers as a Serve handle of the target deployment does, from one replica in this process."""

    replica: TargetReplica
    requests: list[Request] = field(default_factory=list)
    """All that were asked, in order."""
    updates: list[RequestOutput] = field(default_factory=list)
    """All that the engine has said, in order."""
    break_after: int | None = None
    """The next stream fails after so many updates."""

    @property
    def describe(self) -> Any:
        return _Method(self.replica.describe)

    @property
    def generate(self) -> Any:
        return _Method(self._generate)

    @property
    def edge(self) -> Any:
        return _Method(lambda *arguments: _Stream(self.replica.edge(*arguments)))

    @property
    def offer(self) -> Any:
        return _Method(self.replica.offer)

    def options(self, **_: Any) -> "StandIn":
        return self

    def _generate(self, request: Request, is_resumed: bool) -> "_Stream":
        self.requests.append(request)
        return _Stream(self._updates(request, is_resumed))

    async def _updates(self, request: Request, is_resumed: bool) -> AsyncIterator[Any]:
        count = 0
        async for event in self.replica.generate(request, is_resumed):
            if isinstance(event, RequestOutput):
                if count == self.break_after:
                    self.break_after = None
                    raise RuntimeError("the test breaks this stream")
                self.updates.append(event)
                count += 1
            yield event


@dataclass
class _Method:
    remote: Any


class _Stream:
    """Serve's stream of a call: iterable, and cancelled from outside."""

    def __init__(self, updates: Any) -> None:
        self._updates = updates

    def __aiter__(self) -> Any:
        return self

    def __anext__(self) -> Any:
        return anext(self._updates)

    def cancel(self) -> None:
        task = asyncio.get_running_loop().create_task(self._updates.aclose())
        task.add_done_callback(lambda done: done.cancelled() or done.exception())


@dataclass
class ChatServer:
    """One running server."""

    folder: Path
    url: str
    targets: StandIn
    tokenizer: ChatTokenizer
    pace: float = 0.0
    """Seconds that every step of the engine is held up."""

    @property
    def num_running(self) -> int:
        """Sequences in the engine."""
        engine = self.targets.replica._engine
        return engine.num_running + engine.num_waiting

    def slow_down(self) -> None:
        """From now on each step of the engine lasts `pace` longer."""
        engine: Any = self.targets.replica._engine
        step = engine.step

        def paced() -> Any:
            time.sleep(self.pace)
            return step()

        engine.step = paced

    def greedy(self, messages: list[dict[str, str]], num_tokens: int) -> str:
        """What transformers answers, with no code of ours but the chat template."""
        model = AutoModelForCausalLM.from_pretrained(self.folder)
        prompt = torch.tensor([self.tokenizer.encode_prompt(messages)])
        output = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=num_tokens, do_sample=False
        )
        return self.tokenizer.decode(output[0, prompt.shape[1] :].tolist())


@contextlib.contextmanager
def running_server(folder: Path, edge: dict[str, Any] | None = None) -> Iterator[ChatServer]:
    """A server on a free port of the loopback, until the end of the block; `edge` is its endpoint for devices."""
    target = save_chat_target(folder / "tiny")
    model = Target.load(TargetConfig(model=str(target), device="cpu"))
    noisy = noisy_copy(TinyTarget("tiny", target, model), noise=0.1)
    for file in target.glob("*token*"):
        shutil.copy(file, noisy)
    config = validate(
        ServeConfig,
        {
            "target": {"model": str(target), "device": "cpu"},
            "drafters": {
                "twin": {"type": "pretrained", "model": str(noisy)},
                "lookup": {"type": "ngram", "max_ngram": 3},
            },
            "placement": "in_process",
            "engine": {"max_num_seqs": 2, "kv_cache_tokens": 2048, "tree": {"type": "chain", "depth": 4}},
            "max_waiting": 0,
            "edge": edge,
        },
    )
    targets = StandIn(TargetReplica(config))
    gateway = Gateway(config, targets)
    with listening(build_api(gateway)) as port:
        chat_server = ChatServer(target, f"http://127.0.0.1:{port}", targets, gateway.tokenizer)
        chat_server.slow_down()
        yield chat_server
    if targets.replica._thread is not None:
        targets.replica._thread.close()


@contextlib.contextmanager
def listening(app: Any) -> Iterator[int]:
    """An application on a free port of the loopback, until the end of the block."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        wait_until(lambda: server.started, "the server has started")
        yield listener.getsockname()[1]
        server.should_exit = True
        thread.join(10)


def wait_until(is_so: Any, what: str, seconds: float = 10.0) -> None:
    """Look again and again until something is so."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, f"waited {seconds} s until {what}: it did not happen"
        time.sleep(0.01)
