"""The application on Ray Serve, on a tiny target: deployed as users deploy it, asked by many at once, and killed."""

import asyncio
import os
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import psutil

from moray.decoding.params import SamplingParams
from moray.decoding.plain import PlainDecoder
from moray.targets.model import Target
from moray.targets.spec import TargetConfig
from moray.text import ChatTokenizer

APPLICATION = "moray-test"
MODEL = "tiny"
NUM_QUESTIONS = 32
"""Of the tests that compare all texts; 26 of them are greedy."""


@dataclass(frozen=True)
class Question:
    """What a client asks."""

    text: str
    temperature: float
    seed: int
    max_tokens: int


def questions(count: int) -> list[Question]:
    """Mixed ones: short and long, greedy and sampled, with short and long answers."""
    words = "one two three four five six seven eight nine ten".split()
    return [
        Question(
            " ".join(words[(number * 7 + k) % 10] for k in range(1 + number * 3 % 17)),
            temperature=0.9 if number % 5 == 4 else 0.0,
            seed=number,
            max_tokens=16 + number * 11 % 60,
        )
        for number in range(count)
    ]


def plain_texts(folder: Path, asked: list[Question]) -> list[str]:
    """The target's own answers, made one after the other in this process."""
    target, tokenizer = Target.load(TargetConfig(model=str(folder), device="cpu")), ChatTokenizer.load(str(folder))
    decoder = PlainDecoder(target, target.spec.max_positions)
    eos_ids = {*target.eos_ids, *tokenizer.eos_ids}
    texts = []
    for question in asked:
        prompt = tokenizer.encode_prompt([{"role": "user", "content": question.text}])
        params = SamplingParams(temperature=question.temperature, seed=question.seed)
        texts.append(tokenizer.decode(decoder.generate(prompt, params, question.max_tokens, eos_ids).tokens))
    return texts


class ServedApp:
    """A running application."""

    def __init__(self, folder: Path, num_replicas: dict[str, int], **args: Any) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._args = {
            "target": {"model": str(folder), "device": "cpu"},
            "drafters": {"same": {"type": "pretrained", "model": str(folder)}, "lookup": {"type": "ngram"}},
            "engine": {"max_num_seqs": 16, "kv_cache_tokens": 4096, "tree": {"type": "chain", "depth": 3}},
            "api": {"model_name": MODEL},
            "draft_timeout_ms": 1000,
            "threads": 1,
        } | args
        self._handles: dict[str, Any] = {}
        self.deploy(num_replicas)

    def deploy(
        self,
        num_replicas: dict[str, int],
        scaling: dict[str, dict[str, float]] | None = None,
        num_cpus: dict[str, float] | None = None,
        wait_seconds: float = 120,
        **args: Any,
    ) -> None:
        """Deploy, or change the numbers of replicas or `args`; waits until all of them run.

        Args:
            num_replicas: by deployment; one where nothing is said.
            scaling: by deployment, its `autoscaling_config` in place of a number.
            num_cpus: by deployment, of each replica; none where nothing is said.
            wait_seconds: for all of them to run.
            args: of the application, in place of those before, from now on.
        """
        from serve.deploy import DeployConfig, main

        self._args |= args
        numbers = {name: {"num_replicas": num_replicas.get(name, 1)} for name in ("Gateway", "Target", "Drafter")}
        scaled = {name: {"autoscaling_config": config} for name, config in (scaling or {}).items()}
        deployments = [
            {"name": name, "ray_actor_options": {"num_cpus": (num_cpus or {}).get(name, 0)}} | number
            for name, number in (numbers | scaled).items()
        ]
        application = {
            "name": APPLICATION,
            "route_prefix": "/",
            "import_path": "serve.app:build_app",
            "args": self._args,
            "deployments": deployments,
        }
        main(
            DeployConfig(
                applications=(application,),
                http_options={"host": "127.0.0.1", "port": self.port},
                wait_seconds=wait_seconds,
            )
        )

    def close(self) -> None:
        """End it."""
        from ray import serve

        serve.shutdown()

    def pids(self, deployment: str) -> list[int]:
        """Processes of a deployment's replicas."""
        mark = f"ServeReplica:{APPLICATION}:{deployment}"
        found = []
        for process in psutil.Process().children(recursive=True):
            try:
                if mark in " ".join(process.cmdline()):
                    found.append(process.pid)
            except psutil.Error:
                continue
        return found

    def num_running(self, deployment: str) -> int:
        """Replicas of a deployment that take requests."""
        from ray import serve

        states = serve.status().applications[APPLICATION].deployments[deployment].replica_states
        return states.get("RUNNING", 0)

    def ready(self, deployment: str) -> list[int]:
        """Processes of those."""
        return self.pids(deployment)[: self.num_running(deployment)]

    def kill(self, deployment: str, *, everyone: bool = False) -> int:
        """kill -9 of one replica, or of all; returns how many."""
        pids = self.pids(deployment)
        chosen = pids if everyone else pids[:1]
        for pid in chosen:
            os.kill(pid, signal.SIGKILL)
        return len(chosen)

    def describe(self, deployment: str) -> Any:
        """What one replica says of itself."""
        from ray import serve

        if deployment not in self._handles:  # each has a router of its own, which first has to find the replicas
            handle = self._handles[deployment] = serve.get_deployment_handle(deployment, APPLICATION)
            handle._init(_run_router_in_separate_loop=True)  # here is none
        return self._handles[deployment].describe.remote().result(timeout_s=30)

    def wait_until_idle(self, seconds: float) -> float:
        """Wait until nothing runs in the one target and the one drafter; returns the seconds that it took."""
        begin = time.monotonic()
        while True:
            target, drafter = self.describe("Target"), self.describe("Drafter")
            busy = target.num_open, target.num_running, target.num_leases, *drafter.values()
            if not any(busy):
                return time.monotonic() - begin
            assert time.monotonic() - begin < seconds, busy
            time.sleep(0.02)

    def client(self) -> openai.AsyncOpenAI:
        """The official client, which tries nothing twice by itself."""
        return openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=120
        )

    def plain_client(self) -> openai.OpenAI:
        """The same without asyncio."""
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=120)

    async def ask(self, client: openai.AsyncOpenAI, question: Question, **speculation: Any) -> tuple[str, int]:
        """The streamed answer's text, and how many of its tokens were drafted."""
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": question.text}],
            temperature=question.temperature,
            seed=question.seed,
            max_tokens=question.max_tokens,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"speculation": speculation},
        )
        text, num_drafted = "", 0
        async for chunk in stream:
            if chunk.choices:
                text += chunk.choices[0].delta.content or ""
            elif chunk.usage is not None and chunk.usage.completion_tokens_details is not None:
                num_drafted = chunk.usage.completion_tokens_details.accepted_prediction_tokens or 0
        return text, num_drafted

    def request_drafts(self, asked: list[Question], at_once: int) -> list[tuple[str, int]]:
        """All answers, so many asked for at the same time."""

        async def run() -> list[tuple[str, int]]:
            places = asyncio.Semaphore(at_once)
            async with self.client() as client:

                async def one(number: int, question: Question) -> tuple[str, int]:
                    async with places:
                        return await self.ask(client, question, drafter=("same", "lookup")[number % 4 == 3])

                return await asyncio.gather(*(one(number, question) for number, question in enumerate(asked)))

        return asyncio.run(run())
