"""Devices that draft themselves, over real WebSockets: the gateway, the engine's thread and the client."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from served_api import Served

from moray.decoding.params import SamplingParams
from moray.decoding.plain import PlainDecoder
from moray.decoding.request import Request
from moray.drafters.configs import NgramConfig
from moray.edge.client import EdgeClient
from moray.edge.config import EdgeConfig
from moray.edge.drafting import DeviceDrafter
from moray.edge.events import VerifiedTokens
from moray.edge.messages import Hello
from moray.edge.transport import WebSocketLink
from moray.errors import DataError, MismatchError
from moray.targets.head import TargetHead
from moray.targets.model import Target
from moray.targets.spec import TargetConfig
from moray.trees.shapes import ChainShape
from serve.config import EdgeEndpointConfig

NGRAM = NgramConfig(type="ngram", max_ngram=3)
CONFIG = EdgeConfig(tree=ChainShape(type="chain", depth=3), retry_seconds=0.01, give_up_seconds=5)


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("first\nsecond\n")
    return path


@pytest.fixture(scope="module")
def target(chat_target) -> Target:
    return Target.load(TargetConfig(model=str(chat_target), device="cpu"))


@pytest.fixture(scope="module")
def api(serve_target, keys: Path) -> Iterator[Served]:
    edge = EdgeEndpointConfig(drafters=("ngram",), max_sessions=2, idle_seconds=30)
    with serve_target(drafters={"ngram": NGRAM}, edge=edge, api_keys_file=str(keys)) as running:
        yield running


def client_of(api: Served, target: Target, key: str = "first", **hello) -> EdgeClient:
    spec = target.spec
    greeting = Hello(
        target=hello.get("hello_target", spec.fingerprint),
        text=hello.get("hello_text", api.gateway.tokenizer.fingerprint),
        drafter="ngram",
        drafter_fingerprint=hello.get("hello_drafter_fingerprint", ""),
    )
    drafter = DeviceDrafter(NGRAM.build(TargetHead.of(target)), "ngram", 256)
    url = api.url.replace("http:", "ws:") + "/v1/edge"
    return EdgeClient(drafter, greeting, lambda: WebSocketLink(url, key), CONFIG)


def text_of(client: EdgeClient, request: Request) -> list[int]:
    return [token for event in client.answer(request) if isinstance(event, VerifiedTokens) for token in event.tokens]


def test_a_device_gets_the_target_s_text(api, target):
    prompt = [3, 4, 5] * 20
    wanted = PlainDecoder(target, 256).generate(prompt, SamplingParams(), 40, ())
    client = client_of(api, target)
    for _ in range(2):
        assert text_of(client, Request(prompt=tuple(prompt), max_new_tokens=40, ignore_eos=True)) == wanted.tokens
    assert client.stats.num_cycles
    assert client.stats.num_cuts == 0
    api.wait_until_idle(5)


def test_strangers_are_refused(api, target):
    request = Request(prompt=(1, 2, 3), max_new_tokens=4)
    with pytest.raises(DataError, match="401: it needs a valid key"):
        text_of(client_of(api, target, key="wrong"), request)
    for field in ("target", "text", "drafter_fingerprint"):
        with pytest.raises(MismatchError, match="another-one"):
            text_of(client_of(api, target, **{f"hello_{field}": "another-one"}), request)
    api.wait_until_idle(5)
    assert api.gateway.edge.num_sessions == 0
