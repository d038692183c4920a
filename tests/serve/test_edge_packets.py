"""A device in a network of its own: no IP packet that leaves it holds a private text, nor the tokens of one."""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from websockets.frames import Frame, Opcode
from websockets.http11 import Request as Handshake
from websockets.server import ServerProtocol

from moray.drafters.configs import NgramConfig
from moray.edge.link.namespaces import EmulatedLink, emulated_link, why_not
from moray.edge.link.profiles import LinkProfile
from moray.edge.messages import Open, decode_up
from serve.config import EdgeEndpointConfig

PROFILE = LinkProfile(name="test", delay_ms=1, rate_mbit=100)
SECRET = "Ada Byron"
_ALL_PROTOCOLS, _TCP = 0x0003, 6


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize("is_marked", [True, False])
def test_a_private_text_is_in_no_packet(serve_target, chat_target, is_marked):
    mark = ("<private>", "</private>") if is_marked else ("", "")
    question = f"Greet {mark[0]}{SECRET}{mark[1]}, for {SECRET} is here."
    edge = EdgeEndpointConfig(drafters=("ngram",))
    ngram = NgramConfig(type="ngram", max_ngram=3)
    with serve_target(drafters={"ngram": ngram}, edge=edge) as api, emulated_link(PROFILE, number=8) as link:
        with passed_on(link.host, int(api.url.rpartition(":")[2])) as port, captured(link) as packets:
            url = f"ws://{link.host}:{port}/v1/edge"
            device = [sys.executable, "-c", DEVICE, str(chat_target), url, question]
            done = subprocess.run(link.command(device), capture_output=True, text=True, timeout=120, check=False)
            assert done.returncode == 0, done.stderr
        tokenizer = api.gateway.tokenizer
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["num_tokens"] == 24
    sent = [frame for frame in frames_of(packets, link.device) if frame.opcode is Opcode.TEXT]
    opened = [message for message in map(decode_up, (frame.data for frame in sent)) if isinstance(message, Open)]
    assert opened[0].request.prompt == tuple(told["prompt"]), "the packets are those of this answer"
    everything = b"".join(frame.data for frame in sent) + b"".join(packets)
    secret = tokenizer.encode_text(SECRET, adds_special=False)
    crossed = SECRET.encode() in everything or json.dumps(secret)[1:-1].replace(" ", "").encode() in everything
    assert crossed == (not is_marked), "without marks it does cross, so this test can see it"


@contextmanager
def passed_on(host: str, port: int) -> Iterator[int]:
    """A port of that address whose connections are passed on to a port of the loopback."""
    with socket.create_server((host, 0)) as server:

        def pump(source: socket.socket, sink: socket.socket) -> None:
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

        def accept() -> None:
            connection, _ = server.accept()
            with connection, socket.create_connection(("127.0.0.1", port)) as inner:
                back = threading.Thread(target=pump, args=(inner, connection))
                back.start()
                pump(connection, inner)
                back.join(10)

        thread = threading.Thread(target=accept)
        thread.start()
        yield server.getsockname()[1]
        thread.join(10)


@contextmanager
def captured(link: EmulatedLink) -> Iterator[list[bytes]]:
    """All IP packets on this machine's end of the network, until the end of the block."""
    packets: list[bytes] = []
    is_over = threading.Event()
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS)) as tap:
        tap.bind((link.interface, 0))
        tap.settimeout(0.1)

        def read() -> None:
            while True:
                try:
                    packets.append(tap.recv(1 << 16))
                except TimeoutError:
                    if is_over.is_set():
                        return

        thread = threading.Thread(target=read)
        thread.start()
        try:
            yield packets
        finally:
            is_over.set()
            thread.join(10)


def frames_of(packets: list[bytes], device: str) -> list[Frame]:
    """The WebSocket frames that the device has sent, put together from its TCP segments."""
    segments: dict[int, bytes] = {}
    for packet in packets:
        header = (packet[0] & 15) * 4
        if packet[0] >> 4 != 4 or packet[9] != _TCP or packet[12:16] != socket.inet_aton(device):
            continue
        tcp = packet[header : int.from_bytes(packet[2:4], "big")]
        data = tcp[(tcp[12] >> 4) * 4 :]
        if data:
            segments[int.from_bytes(tcp[4:8], "big")] = data
    begin = next(number for number, data in segments.items() if data.startswith(b"GET "))
    protocol = ServerProtocol(subprotocols=["moray.edge.1"])  # type: ignore[list-item]
    frames: list[Frame] = []
    while begin in segments:
        data = segments.pop(begin)
        begin = (begin + len(data)) % (1 << 32)
        protocol.receive_data(data)
        for event in protocol.events_received():
            if isinstance(event, Handshake):
                protocol.send_response(protocol.accept(event))
            else:
                assert isinstance(event, Frame)
                frames.append(event)
    assert not segments, "every byte that was captured was read"
    return frames


DEVICE = """
import json, sys
from moray.decoding.request import Request
from moray.drafters.configs import NgramConfig
from moray.edge.config import EdgeConfig
from moray.edge.device.client import EdgeClient
from moray.edge.device.drafting import DeviceDrafter
from moray.edge.device.events import VerifiedTokens
from moray.edge.device.private import Redactor
from moray.edge.device.transport import WebSocketLink
from moray.edge.messages import Hello
from moray.targets.head import TargetHead
from moray.targets.spec import TargetConfig
from moray.text import ChatTokenizer

folder, url, question = sys.argv[1:]
tokenizer = ChatTokenizer.load(folder)
head = TargetHead.load(TargetConfig(model=folder, device="cpu"), 0)
drafter = DeviceDrafter(NgramConfig(type="ngram", max_ngram=3).build(head), "ngram", 256)
hello = Hello(target=head.spec.fingerprint, text=tokenizer.fingerprint, drafter="ngram", drafter_fingerprint="")
prompt = tokenizer.encode_prompt(Redactor().redact([{"role": "user", "content": question}]))
client = EdgeClient(drafter, hello, lambda: WebSocketLink(url, allows_plain=True), EdgeConfig())
request = Request(prompt=tuple(prompt), max_new_tokens=24, ignore_eos=True)
tokens = [token for event in client.answer(request) if isinstance(event, VerifiedTokens) for token in event.tokens]
client.close()
print(json.dumps({"prompt": prompt, "num_tokens": len(tokens)}))
"""
