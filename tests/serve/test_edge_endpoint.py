"""Devices that run the drafter, over real WebSockets: the gateway, the engine's thread and the client."""

import asyncio
import datetime
import ipaddress
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from remembering_sink import RememberingSink
from served_api import Served

from moray.decoding.params import SamplingParams
from moray.decoding.plain import PlainDecoder
from moray.decoding.remote.frames import pack_frame
from moray.decoding.request import Request
from moray.drafters.configs import NgramConfig
from moray.edge.config import EdgeConfig
from moray.edge.device.client import EdgeClient
from moray.edge.device.drafting import DeviceDrafter
from moray.edge.device.events import VerifiedTokens
from moray.edge.device.transport import WebSocketLink, check_url
from moray.edge.messages import Hello, Open, Verified, encode_up
from moray.edge.server.replies import Reply
from moray.errors import ConfigError, DataError, MismatchError
from moray.targets.head import TargetHead
from moray.targets.model import Target
from moray.targets.spec import TargetConfig
from moray.trees.shapes import ChainShape
from serve.config import EdgeEndpointConfig
from serve.engine_thread import Admission
from serve.metrics import series

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
def sink() -> RememberingSink:
    return RememberingSink()


@pytest.fixture(scope="module")
def api(serve_target, keys: Path, sink: RememberingSink) -> Iterator[Served]:
    edge = EdgeEndpointConfig(drafters=("ngram",), max_sessions=2, idle_seconds=30)
    with serve_target(drafters={"ngram": NGRAM}, edge=edge, api_keys_file=str(keys), sink=sink) as running:
        yield running


def client_of(
    api: Served, target: Target, key: str = "first", *, url: str = "", ca_file: str | None = None, **hello
) -> EdgeClient:
    spec = target.spec
    greeting = Hello(
        target=hello.get("hello_target", spec.fingerprint),
        text=hello.get("hello_text", api.gateway.tokenizer.fingerprint),
        drafter="ngram",
        drafter_fingerprint=hello.get("hello_drafter_fingerprint", ""),
    )
    drafter = DeviceDrafter(NGRAM.build(TargetHead.of(target)), "ngram", 256)
    url = url or api.url.replace("http:", "ws:") + "/v1/edge"
    return EdgeClient(drafter, greeting, lambda: WebSocketLink(url, key, ca_file), CONFIG)


def text_of(client: EdgeClient, request: Request) -> list[int]:
    return [token for event in client.answer(request) if isinstance(event, VerifiedTokens) for token in event.tokens]


def test_a_device_gets_the_target_s_text(api, target):
    prompt = [3, 4, 5] * 20
    wanted = PlainDecoder(target, 256).generate(prompt, SamplingParams(), 40, ())
    client = client_of(api, target)
    for pause in (0.0, CONFIG.offline_after_seconds + 0.1):
        time.sleep(pause)  # a connection that was idle for so long is still used
        assert text_of(client, Request(prompt=tuple(prompt), max_new_tokens=40, ignore_eos=True)) == wanted.tokens
        assert client.stats.num_cuts == 0
    assert client.stats.num_cycles
    api.wait_until_idle(5)
    client.close()


def test_what_devices_do_is_counted(api, target, sink):
    sink.sums.clear()
    client = client_of(api, target)
    text_of(client, Request(prompt=(3, 4, 5) * 20, max_new_tokens=30, ignore_eos=True))
    stats = client.stats
    assert sink.now[series.EDGE_SESSIONS.name] in (0, 1)
    client.close()
    api.wait_until_idle(5)
    by_source = {source: sink.sums[series.EDGE_TOKENS.name, source] for source in ("draft", "target")}
    assert by_source == {"draft": stats.num_accepted, "target": 30 - stats.num_accepted}
    assert sink.total(series.EDGE_DRAFTS) == stats.num_calls
    assert sink.sums[series.EDGE_BYTES.name, "received"] == stats.num_bytes_up
    assert sink.sums[series.EDGE_BYTES.name, "sent"] >= stats.num_bytes_down
    with pytest.raises(MismatchError):
        text_of(client_of(api, target, hello_text="another-one"), Request(prompt=(1,), max_new_tokens=4))
    assert sink.sums[series.EDGE_REFUSED.name, "text"] == 1
    assert sink.now[series.EDGE_SESSIONS.name] == 0


class EndlessReplies:
    """A handle of targets whose replies never end, each of a megabyte."""

    def __init__(self) -> None:
        self.num_taken = 0
        self.edge = self.offer = SimpleNamespace(remote=lambda *_: self)

    def options(self, **_: object) -> "EndlessReplies":
        return self

    def __aiter__(self) -> "EndlessReplies":
        return self

    async def __anext__(self) -> Admission | Reply:
        await asyncio.sleep(0)
        self.num_taken += 1
        if self.num_taken == 1:
            return Admission.ADMITTED
        index = self.num_taken - 1
        return Reply(index, (), 0, False, pack_frame(Verified(index=index)) + bytes(1 << 20))

    def cancel(self) -> None:
        """Called when the gateway drops the session."""


def test_a_device_that_does_not_read_makes_its_target_wait(api, target, monkeypatch):
    targets = EndlessReplies()
    monkeypatch.setattr(api.gateway.edge, "_targets", targets)
    link = WebSocketLink(api.url.replace("http:", "ws:") + "/v1/edge", "first")
    text, fingerprint = api.gateway.tokenizer.fingerprint, target.spec.fingerprint
    link.send(encode_up(Hello(target=fingerprint, text=text, drafter="ngram", drafter_fingerprint="")))
    link.send(encode_up(Open(request=Request(prompt=(1,), max_new_tokens=9, drafter="ngram"))))
    taken, deadline = -1, time.monotonic() + 20
    while taken != targets.num_taken and time.monotonic() < deadline:
        taken = targets.num_taken
        time.sleep(0.5)
    assert 4 < taken == targets.num_taken < 100, "the replies wait in the target"
    for _ in range(taken + 10):
        assert link.receive(5.0) is not None
    assert targets.num_taken > taken, "and come when the device reads again"
    link.close()
    api.gateway.edge._server.drop(next(iter(api.gateway.edge._server.sessions.values())))


def test_what_a_device_has_is_shown_to_its_own_key(api, target):
    prompt = [3, 4, 5] * 20
    client = client_of(api, target, "second")
    text = text_of(client, Request(prompt=tuple(prompt), max_new_tokens=31, ignore_eos=True))
    client.close()

    def sessions(key: str) -> list[dict[str, object]]:
        answer = httpx.get(f"{api.url}/v1/edge/sessions", headers={"Authorization": f"Bearer {key}"})
        assert answer.status_code == 200
        return answer.json()["data"]

    shown = sessions("second")[0]
    assert shown.pop("id")
    assert shown == {
        "drafter": "ngram",
        "num_tokens": 31,
        "verified": api.gateway.tokenizer.decode(text),
        "unverified": "",
        "retracted": shown["retracted"],
        "is_finished": True,
    }
    assert all(session["num_tokens"] != 31 for session in sessions("first")), "that of another key"
    assert httpx.get(f"{api.url}/v1/edge/sessions").status_code == 401


def test_strangers_are_refused(api, target):
    request = Request(prompt=(1, 2, 3), max_new_tokens=4)
    with pytest.raises(DataError, match="401: it needs a valid key"):
        text_of(client_of(api, target, key="wrong"), request)
    for field in ("target", "text", "drafter_fingerprint"):
        with pytest.raises(MismatchError, match="another-one"):
            text_of(client_of(api, target, **{f"hello_{field}": "another-one"}), request)
    api.wait_until_idle(5)
    assert api.gateway.edge.num_sessions == 0


def test_a_device_over_the_limit_waits_and_loses_nothing(serve_target, target):
    edge = EdgeEndpointConfig(drafters=("ngram",))
    with serve_target(drafters={"ngram": NGRAM}, edge=edge, requests_per_minute=195) as limited:
        client = client_of(limited, target)
        prompt = [3, 4, 5] * 20
        text = text_of(client, Request(prompt=tuple(prompt), max_new_tokens=250, ignore_eos=True))
        assert text == PlainDecoder(target, 512).generate(prompt, SamplingParams(), 250, ()).tokens
        assert client.stats.num_calls > 195, "more than the limit allows at once"
        assert client.stats.seconds > 1
        assert client.stats.num_cuts == 0, "waiting is no lost connection"


def test_over_tls_the_certificate_is_checked(serve_target, target, tmp_path):
    certificate, key = _certificate(tmp_path)
    edge = EdgeEndpointConfig(drafters=("ngram",))
    with serve_target(drafters={"ngram": NGRAM}, edge=edge, tls=(certificate, key)) as secure:
        url = secure.url.replace("http:", "wss:") + "/v1/edge"
        request = Request(prompt=(1, 2, 3), max_new_tokens=4, ignore_eos=True)
        with pytest.raises(DataError, match=r"not trusted .* ca_file"):
            text_of(client_of(secure, target, url=url), request)
        assert len(text_of(client_of(secure, target, url=url, ca_file=str(certificate)), request)) == 4
    with pytest.raises(ConfigError, match="holds no certificates"):
        text_of(client_of(secure, target, url=url, ca_file=str(tmp_path / "missing")), request)


def test_text_never_crosses_a_network_without_tls():
    for url in ("ws://example.org/v1/edge", "http://127.0.0.1/v1/edge", "wss://", "127.0.0.1:8000"):
        with pytest.raises(ConfigError, match="wss://"):
            check_url(url)
    check_url("wss://example.org/v1/edge")
    check_url("ws://localhost:8000/v1/edge")


def _certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for this machine that signs itself, and its key."""
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "moray test")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(private, hashes.SHA256())
    )
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key.write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return certificate, key
