"""The device of the edge benchmark: a process inside the emulated network that answers one question per line.

    python -m serve.bench.edge_device < lines of JSON    (`serve.bench.edge` starts it)

A line names the way: over the edge protocol with one of the drafters that were loaded here, or over the streaming API.
The answer is a line with text, time, calls, bytes, processor time and wake-ups.
"""

import http.client
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import torch

from moray.config import validate
from moray.decoding.request import Request
from moray.drafters.loading import build_drafters, fingerprints_of, num_head_layers
from moray.edge.config import EdgeConfig
from moray.edge.device.client import EdgeClient
from moray.edge.device.drafting import DeviceDrafter
from moray.edge.device.events import VerifiedTokens
from moray.edge.device.transport import WebSocketLink
from moray.edge.messages import Hello
from moray.targets.head import TargetHead
from moray.text import ChatTokenizer
from serve.config import ServeConfig


class Device:
    """Drafters, tokenizer and connections of this process."""

    def __init__(self, url: str, application: ServeConfig, max_tokens: int) -> None:
        """
        Args:
            url: of the application.
            application: what is served there.
            max_tokens: tokens of every answer.
        """
        assert application.edge is not None
        torch.set_num_threads(1)
        self._url, self._max_tokens = urlsplit(url), max_tokens
        self._model = application.model_name
        self._tokenizer = ChatTokenizer.load(application.target.model, application.target.template)
        entries = {name: application.drafters[name] for name in application.edge.drafters}
        head = TargetHead.load(application.target, num_head_layers(tuple(entries.values())))
        self.drafters: dict[str, DeviceDrafter] = {}
        self.hellos: dict[str, Hello] = {}
        for name, entry in entries.items():
            ((_, drafter),) = build_drafters((entry,), lambda _: head, self._tokenizer).items()
            self.drafters[name] = DeviceDrafter(drafter, name, head.spec.max_positions)
            self.hellos[name] = Hello(
                target=head.spec.fingerprint,
                text=self._tokenizer.fingerprint,
                drafter=name,
                drafter_fingerprint=next(iter(fingerprints_of((entry,)).values()), ""),
            )
        self._clients: dict[str, EdgeClient] = {}
        """By way, so that each keeps what its planner has learnt."""

    @property
    def edge_url(self) -> str:
        """Address of the endpoint for devices."""
        return f"ws://{self._url.netloc}{self._url.path}/v1/edge"

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return frozenset(self._tokenizer.eos_ids)

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, without special ones."""
        return self._tokenizer.encode_text(text, adds_special=False)

    def decode(self, tokens: list[int]) -> str:
        """Text of tokens."""
        return self._tokenizer.decode(tokens)

    def request(self, prompt: str, *, ignore_eos: bool = False) -> Request:
        """The request for a user's message."""
        ids = tuple(self._tokenizer.encode_prompt([{"role": "user", "content": prompt}]))
        return Request(prompt=ids, max_new_tokens=self._max_tokens, ignore_eos=ignore_eos)

    def close(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            client.close()

    def answer(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Answer one question."""
        process = psutil.Process()
        before, switches = process.cpu_times(), process.num_ctx_switches().voluntary
        began = time.perf_counter()
        found = self._over_edge(asked) if asked["edge"] is not None else self._over_api(asked)
        found["seconds"] = time.perf_counter() - began
        after = process.cpu_times()
        found["cpu_seconds"] = after.user + after.system - before.user - before.system
        found["wake_ups"] = process.num_ctx_switches().voluntary - switches
        return found

    def _over_edge(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        name = asked["drafter"]
        if asked["way"] not in self._clients:
            url = self.edge_url
            self._clients[asked["way"]] = EdgeClient(
                self.drafters[name],
                self.hellos[name],
                lambda: WebSocketLink(url, allows_plain=True),
                validate(EdgeConfig, asked["edge"]),
                self._tokenizer.eos_ids,
            )
        client = self._clients[asked["way"]]
        request = self.request(asked["prompt"], ignore_eos=True)
        tokens: list[int] = []
        first = None
        began = time.perf_counter()
        for event in client.answer(request):
            if isinstance(event, VerifiedTokens):
                first = time.perf_counter() - began if first is None else first
                tokens += event.tokens
        return {
            "text": self._tokenizer.decode(tokens),
            "num_tokens": len(tokens),
            "ttft": first,
            "num_calls": client.stats.num_calls,
            "tau": client.stats.tau,
            "num_cycles": client.stats.num_cycles,
            "num_planned": client.stats.num_planned,
            "num_levels": client.stats.num_levels,
            "num_layers": client.stats.num_layers,
        }

    def _over_api(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": asked["prompt"]}],
            "max_tokens": self._max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "speculation": {"enabled": asked["drafter"] is not None, "drafter": asked["drafter"]},
        }
        connection = http.client.HTTPConnection(self._url.hostname or "", self._url.port, timeout=120)
        began, first, text, num_tokens = time.perf_counter(), None, "", 0
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", f"{self._url.path}/v1/chat/completions", json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"{response.status}: {response.read()[:300]!r}")
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                num_tokens = (chunk.get("usage") or {}).get("completion_tokens", num_tokens)
                for choice in chunk["choices"]:
                    piece = choice["delta"].get("content") or ""
                    first = time.perf_counter() - began if piece and first is None else first
                    text += piece
        finally:
            connection.close()
        counts = dict.fromkeys(("num_cycles", "num_planned", "num_levels", "num_layers"), 0)
        return {"text": text, "num_tokens": num_tokens, "ttft": first, "num_calls": 1, "tau": None, **counts}


def main() -> None:
    """Answer the questions on standard input."""
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    application = validate(ServeConfig, settings["application"])
    answers = sys.stdout
    sys.stdout = sys.stderr  # what loading prints is no answer
    device = Device(settings["url"], application, settings["max_tokens"])
    types = {name: getattr(drafter.drafter.config, "type", "") for name, drafter in device.drafters.items()}
    print(json.dumps({"types": types}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(device.answer(json.loads(line))), file=answers, flush=True)
    device.close()


if __name__ == "__main__":
    main()
